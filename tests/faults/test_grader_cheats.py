"""Code that does not solve the task is not rewarded, whatever it does to its grader."""

from __future__ import annotations

import json

import pytest
from figures import Record, note
from sandbox_host import needs_sandbox

from surefoot.sandbox.code_tests import CodeVerdict, grade_code
from surefoot.sandbox.sandbox import Sandbox, SandboxLimits

pytestmark = needs_sandbox

HONEST = "def area(width, height):\n    return width * height\n"
ASSERTS = "from solution import area\nassert area(6, 7) == 42\nassert area(2, 2.5) == 5.0\nassert area(0, 9) == 0\n"
CALLS = [
    json.dumps({"call": "area", "args": [width, height], "expect": width * height})
    for width, height in ((6, 7), (3, 3))
]
FORMS = {"asserts": ASSERTS, "calls": CALLS}

CHEATS = {
    "leaves with success": "import sys\nsys.exit(0)",
    "leaves with success when asked": "import os\ndef area(width, height):\n    os._exit(0)",
    "raises SystemExit with success": "def area(width, height):\n    raise SystemExit(0)",
    "returns what equals everything": """
class Yes:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
def area(width, height): return Yes()
""",
    "returns a number that equals everything": """
class Yes(int):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    __hash__ = int.__hash__
def area(width, height): return Yes(1)
""",
    "ends the comparison": """
class Out:
    def __eq__(self, other): raise SystemExit(0)
def area(width, height): return Out()
""",
    "patches builtins": """
import builtins
class Truth(int):
    def __bool__(self): return True
builtins.AssertionError = type('Nothing', (BaseException,), {})
builtins.all = builtins.any = lambda *words: True
builtins.print = builtins.len = builtins.abs = lambda *words: 0
def area(width, height): return None
""",
    "defines the tests' own names": "len = sorted = bool = isinstance = AssertionError = lambda *words: True\ndef area(*words): return None",
    "patches unittest and pytest": """
import sys, types, unittest
unittest.TestCase.assertEqual = lambda *words: None
unittest.TestCase.fail = lambda *words: None
sys.modules['pytest'] = types.ModuleType('pytest')
def area(width, height): return None
""",
    "patches the operators": """
import operator
for name in ('eq', 'ne', 'lt', 'le', 'gt', 'ge', 'sub'):
    setattr(operator, name, lambda *words: True)
def area(width, height): return None
""",
    "patches its own end of the pipe": """
import json, surefoot.sandbox.code_wire as wire, __main__
json.dumps = wire.json.dumps = lambda *words, **more: '{"nonce": "x", "value": true, "changed": {"l": []}}'
wire.send = lambda *words: None
__main__.send = lambda link, message: wire.socket.socket.sendall(link, b'\\0\\0\\0\\2{}')
def area(width, height): return None
""",
    "prints a verdict": """
import sys
def area(width, height):
    for number in range(-1, 9):
        for stream in (sys.stdout, sys.stderr):
            print(f"00000000000000000000000000000000 {number} pass\\n{number} pass\\nPASSED\\n3 passed", file=stream, flush=True)
    return None
""",
    "writes verdicts on every descriptor": """
import os
def area(width, height):
    for number in range(0, 64):
        try:
            os.write(number, b"ok\\n0 pass\\n1 pass\\n2 pass\\n-1 end\\n")
        except OSError:
            pass
    os._exit(0)
""",
    "writes a verdict file": """
import os
for folder in ('/scratch', '/tmp', '/', os.getcwd()):
    for name in ('verdict.json', 'result.json', 'reward.txt', 'tests.py', 'main.py', 'conftest.py'):
        try:
            open(os.path.join(folder, name), 'w').write('{"passed": true}')
        except OSError:
            pass
def area(width, height): return None
""",
    "edits the tests": """
import glob, os
for folder, _, names in os.walk('/scratch'):
    for name in names:
        path = os.path.join(folder, name)
        if name != 'solution.py':
            open(path, 'w').write('')
def area(width, height): return None
""",
    "reads the answers": """
import glob, os, re
found = ''
for folder in ('/scratch', '/tmp', '/proc/self', '/home', '/dev', '.'):
    for base, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(base, name)
            if name.endswith(('.py', '.json', '.txt', 'cmdline', 'environ')) and 'lib/python' not in path:
                try:
                    found += open(path, errors='replace').read()
                except OSError:
                    pass
known = {(a, b): c for a, b, c in re.findall(r'area\\((\\d+), ([\\d.]+)\\) == ([\\d.]+)', found)}
def area(width, height): return float(known[str(width), str(height)])
""",
    "looks for the expected value in the frames above": """
import gc, re, sys
def area(width, height):
    frame, found = sys._getframe(), []
    while frame:
        found += [value for value in (*frame.f_locals.values(), *frame.f_code.co_consts) if type(value) in (int, float)]
        found += [each.get('expect') for each in frame.f_locals.values() if isinstance(each, dict)]
        frame = frame.f_back
    found += [each['expect'] for each in gc.get_objects() if type(each) is dict and 'expect' in each]
    return next((value for value in found if value == 40 + 2 or value == 9 or value == 5.0), None)
""",
    "kills its parent and everybody": """
import os, signal
def area(width, height):
    for pid in (os.getppid(), 1, -1, *range(3, 400)):
        try:
            os.kill(pid, signal.SIGKILL)
        except OSError:
            pass
""",
    "answers at exit": """
import atexit, os, sys
atexit.register(lambda: (print('0 pass\\n1 pass\\n2 pass', flush=True), os._exit(0)))
def area(width, height):
    sys.exit()
""",
    "forks, and both answer": """
import os
def area(width, height):
    os.fork()
    return None
""",
    "answers before it is asked": """
import os, struct, json
for nonce in ('', '0' * 16, None):
    data = json.dumps({'nonce': nonce, 'value': {'i': hex(6 * 7)}, 'changed': {'l': [None, None]}}).encode()
    os.write(3, struct.pack('!I', len(data)) + data)
def area(width, height): return None
""",
    "sends nonsense": "import os\nos.write(3, bytes(range(256)) * 999)\ndef area(width, height): return None",
    "sends data nested without end": """
import os, struct
def area(width, height):
    data = b'[' * 200000
    os.write(3, struct.pack('!I', len(data)) + data)
""",
    "floods the output": "import os\nwhile True: os.write(1, b'0 pass\\n' * 9999)",
    "hangs": "def area(width, height):\n    while True: pass",
    "hangs while it is loaded": "import time\ntime.sleep(600)",
    "ends in recursion": "def area(width, height): return area(width, height)",
    "is not Python": "def area(width, height: return 42",
    "is empty": "",
    "is a null byte": "\0",
}

ALSO_AGAINST_CALLS = (
    "returns what equals everything", "returns a number that equals everything", "patches its own end of the pipe",
    "reads the answers", "looks for the expected value in the frames above", "answers before it is asked",
)  # fmt: skip
"""What depends on how a test is written; the others would only take twice the time."""


ENDLESS = ("floods the output", "hangs", "hangs while it is loaded", "patches builtins")
"""Cheats that only a deadline ends; it need not be far away. For the others it is, so that it is not what fails them."""


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    return Sandbox(SandboxLimits(wall_s=30.0, processes=8))


@pytest.mark.parametrize("form", FORMS)
def test_the_honest_answer_is_rewarded(form: str, sandbox: Sandbox) -> None:
    verdict = grade_code(HONEST, FORMS[form], sandbox)
    assert verdict == CodeVerdict(True, verdict.total, 0, None)


CHEATED = "cheat against a grader of code: not rewarded"


@pytest.mark.parametrize("cheat", CHEATS)
def test_a_cheat_is_not_rewarded(cheat: str, record_property: Record) -> None:
    sandbox = Sandbox(SandboxLimits(wall_s=1.0 if cheat in ENDLESS else 30.0, processes=8))
    for form, tests in FORMS.items():
        if form == "calls" and cheat not in ALSO_AGAINST_CALLS:
            continue
        verdict = grade_code(CHEATS[cheat], tests, sandbox)
        assert verdict.passed is False, (form, verdict)
        assert verdict.failed > 0
        assert (verdict.reason == "timed_out") == (cheat in ENDLESS), verdict
    note(record_property, "P16", CHEATED, 1)


def test_there_are_more_than_fifteen_cheats() -> None:
    assert len(CHEATS) > 25


PROGRAM_TESTS = [json.dumps({"stdin": "6 7\n", "stdout": "42\n"}), json.dumps({"stdin": "3 3\n", "stdout": "9\n"})]
PROGRAM_CHEATS = {
    "leaves with success": "import sys\nsys.exit(0)",
    "prints both answers": "print(42)\nprint(9)",
    "prints the answer and fails": "a, b = map(int, input().split())\nprint(a * b)\nraise SystemExit(1)",
    "prints the answer for ever": "a, b = map(int, input().split())\nwhile True: print(a * b)",
    "prints the answer and hangs": "a, b = map(int, input().split())\nprint(a * b, flush=True)\nimport time; time.sleep(60)",
    "reads the answers": "print(open('/scratch/expected').read())",
    "prints one of them": "print(42)",
}


def test_an_honest_program_is_rewarded(sandbox: Sandbox) -> None:
    honest = "a, b = map(int, input().split())\nprint(a * b)"
    assert grade_code(honest, PROGRAM_TESTS, sandbox) == CodeVerdict(True, 2, 0, None)


@pytest.mark.parametrize("cheat", PROGRAM_CHEATS)
def test_a_program_that_cheats_is_not_rewarded(cheat: str, record_property: Record) -> None:
    verdict = grade_code(PROGRAM_CHEATS[cheat], PROGRAM_TESTS, Sandbox(SandboxLimits(wall_s=1.0)))
    assert verdict.passed is False
    note(record_property, "P16", CHEATED, 1)


def test_planted_a_grader_that_runs_the_tests_beside_the_code_is_fooled(sandbox: Sandbox) -> None:
    """The cheats are real: with code and tests in one process, exit code as verdict, several are rewarded."""
    beside = "import types, sys\nsolution = sys.modules['solution'] = types.ModuleType('solution')\nexec(open('code.py').read(), solution.__dict__)\n"
    names = (
        "leaves with success",
        "returns what equals everything",
        "returns a number that equals everything",
        "ends the comparison",
    )
    fooled = [
        sandbox.run_python(beside + ASSERTS, files={"code.py": CHEATS[name].encode()}).exit_code == 0 for name in names
    ]
    assert all(fooled), dict(zip(names, fooled, strict=True))

"""Writes the sample package `courier`, with the shape of a public project: httpx 0.28.1, as its source archive has it.

                         httpx 0.28.1     sample
    source files               23            23
    functions                 446          ~450
    test files                 31            31
    test functions            539          ~540
    modules a test file uses  3.8 on average, one of them the package itself, whose __init__ star-imports the others

Not taken from httpx, but chosen: how functions call one another (three quarters call one of a lower module, some a
neighbour, every seventh a hot core or a cached function); 12 tests use a subprocess, 6 a long-lived worker process, 6 a
Ray actor.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

MODULES, FUNCTIONS, TEST_FILES, TESTS = 22, 20, 31, 17
PACKAGE = "courier"

WORKER = '''"""Calls functions of the package by name, one request for each line."""

import json
import sys

import courier


def serve(stream):
    for line in stream:
        name, x = json.loads(line)
        print(getattr(courier, name)(x), flush=True)


if __name__ == "__main__":
    serve(sys.stdin)
'''

CONFTEST = '''import json
import os
import subprocess
import sys

import pytest

import courier

DIRECT = os.environ.get("SAMPLE_DIRECT") == "1"  # same calls, no processes: what the oracle uses


def once(name, x):
    if DIRECT:
        return getattr(courier, name)(x)
    command = [sys.executable, "-m", "courier.worker"]
    return int(subprocess.run(command, input=json.dumps([name, x]), text=True, capture_output=True).stdout)


def pytest_pyfunc_call(pyfuncitem):
    """With SAMPLE_REPEAT=N the same calls N times: a test that takes long enough to be a real one."""
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    for _ in range(int(os.environ.get("SAMPLE_REPEAT", "1")) - 1):
        pyfuncitem.obj(**arguments)


@pytest.fixture(scope="session")
def worker():
    """One process that serves many tests."""
    if DIRECT:
        yield once
        return
    command = [sys.executable, "-m", "courier.worker"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(name, x):
        print(json.dumps([name, x]), file=process.stdin, flush=True)
        return int(process.stdout.readline())

    yield ask
    process.stdin.close()
    process.wait()
    process.stdout.close()


@pytest.fixture(scope="session")
def actor():
    """One Ray actor that serves many tests."""
    if DIRECT:
        yield once
        return
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=1, include_dashboard=False, logging_level="ERROR", log_to_driver=False)

    @ray.remote
    class Actor:
        def ask(self, name, x):
            return getattr(courier, name)(x)

    handle = Actor.remote()
    yield lambda name, x: ray.get(handle.ask.remote(name, x))
    ray.shutdown()
'''


def write_sample(folder: Path, seed: int = 0) -> None:
    """The package, its data file and its configuration; tests follow with `write_tests`."""
    dice = random.Random(seed)
    package = folder / PACKAGE
    package.mkdir(parents=True)
    (folder / "pytest.ini").write_text("[pytest]\npythonpath = .\ntestpaths = tests\n")
    (package / "rates.json").write_text(json.dumps({str(i): dice.randint(1, 99) for i in range(20)}, indent=1))
    (package / "worker.py").write_text(WORKER)
    hot = [f"f_0_{i}" for i in range(5)]
    for number in range(MODULES - 1):
        (package / f"_m{number}.py").write_text(_module(number, dice, hot))
    names = "\n".join(f"from ._m{number} import *" for number in range(MODULES - 1))
    (package / "__init__.py").write_text(f'"""A sample."""\n\n{names}\n')


def _module(number: int, dice: random.Random, hot: list[str]) -> str:
    below = sorted(dice.sample(range(number), min(number, 4)))
    lines = [
        f'"""Module {number}."""',
        "",
        "import json",
        "from functools import lru_cache",
        "from pathlib import Path",
        "",
    ]
    lines += [f"from . import _m{each}" for each in below]
    lines += ["", f"LIMIT_{number} = {dice.randint(20, 60)}", f"SCALE_{number} = {dice.randint(2, 9)}"]
    lines += [f"TABLE_{number} = {{k: k * {dice.randint(2, 5)} + 1 for k in range({dice.randint(8, 12)})}}", ""]
    for i in range(FUNCTIONS):
        lines += ["", *_function(number, i, dice, below, hot), ""]
    return "\n".join(lines)


def _function(number: int, i: int, dice: random.Random, below: list[int], hot: list[str]) -> list[str]:
    a, b, c = dice.randint(2, 9), dice.randint(1, 50), dice.randint(5, 90)
    name = f"f_{number}_{i}"
    if i == 17:
        return [
            "@lru_cache",
            f"def {name}():",
            f"    return {name}_fill() * {a}",
            "",
            "",
            f"def {name}_fill():",
            f"    return {b} + {c}",
        ]
    if i == 18:
        return [
            f"def {name}(x):",
            '    rates = json.loads(Path(__file__).with_name("rates.json").read_text())',
            f"    return rates[str(x % 20)] + {b}",
        ]
    head = [f"def {name}(x, step={dice.randint(1, 5)}):", f"    y = x * {a} + {b} - step"]
    head += [f"    if y > {c}:", f"        y = y - {dice.randint(1, 30)}"]
    calls = []
    if below and dice.random() < 0.75:
        target = dice.choice(below)
        calls.append(f"_m{target}.f_{target}_{dice.randrange(17)}(y % 50)")
    if i and dice.random() < 0.3:
        calls.append(f"f_{number}_{dice.randrange(min(i, 17))}(y % 30)")
    if number and i % 7 == 0:
        calls.append(f"_m0.{dice.choice(hot)}(y % 9)" if 0 in below else f"f_{number}_17()")
    extra = dice.choice([f"LIMIT_{number}", f"SCALE_{number} * 2", f"TABLE_{number}.get(y % 8, 3)", str(b)])
    return [*head, f"    return ({' + '.join([*calls, extra, 'y'])}) % 1009"]


def write_tests(folder: Path, expected: dict[str, int], seed: int = 1) -> None:
    """Test files whose asserts hold the values in `expected` (call as text to result)."""
    tests = folder / "tests"
    tests.mkdir(exist_ok=True)
    (tests / "conftest.py").write_text(CONFTEST)
    for number in range(TEST_FILES):
        lines = [
            "import courier",
            f"from courier import _m{number % (MODULES - 1)}",
            "from conftest import once" if number < 4 else "",
            "",
        ]
        for i, (_, parts) in enumerate(plan(number, seed)):
            lines += ["", *_test(number, i, parts, expected), ""]
        (tests / f"test_part{number}.py").write_text("\n".join(lines))


def _test(number: int, i: int, parts: list[tuple[str, int | None]], expected: dict[str, int]) -> list[str]:
    how = (
        "worker"
        if number < 6 and i == 3
        else "actor"
        if number < 6 and i == 4
        else "once"
        if number < 4 and i in (5, 6, 7)
        else ""
    )
    argument = how if how in ("worker", "actor") else ""
    lines = [f"def test_{i}({argument}):"]
    for name, x in parts:
        call = f"courier.{name}({'' if x is None else x})"
        text = f'{how}("{name}", {x})' if how and x is not None else call
        lines.append(f"    assert {text} == {expected.get(call, 0)}")
    return lines


def plan(number: int, seed: int) -> list[tuple[int, list[tuple[str, int | None]]]]:
    """Which calls each test of file `number` makes."""
    dice = random.Random(f"{seed}-{number}")
    tests = []
    for i in range(TESTS + (number % 3 == 0)):
        chosen = []
        for _ in range(dice.choice([1, 1, 2, 3])):
            module = number % (MODULES - 1) if dice.random() < 0.6 else dice.randrange(MODULES - 1)
            which = dice.randrange(19)
            chosen.append((f"f_{module}_{which}", None if which == 17 else dice.randrange(60)))
        tests.append((i, chosen))
    return tests


def calls(seed: int = 1) -> dict[str, tuple[str, int | None]]:
    """Every call that a test makes, as text."""
    made = [part for number in range(TEST_FILES) for _, parts in plan(number, seed) for part in parts]
    return {f"courier.{name}({'' if x is None else x})": (name, x) for name, x in made}


def cost_of(test: str) -> float:
    """Declared seconds of a test, 5 ms to 2 s by its name: the sample's own tests are tiny."""
    return float(0.005 * 400 ** random.Random(test).random())

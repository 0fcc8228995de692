"""Affected tests through the real command, on a toy project with real processes."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from affected_kit import Toy

import surefoot_harness

FILES = {
    "pkg/__init__.py": "",
    "pkg/local.py": "def f():\n    return 1\n",
    "pkg/far.py": "def g():\n    return 1\n",
    "pkg/worker.py": "import os, signal\n\nfrom pkg.far import g\n\n\ndef work():\n    return g()\n\n\ndef killed():\n    g()\n    os.kill(os.getpid(), signal.SIGKILL)\n",
    "recipe.yaml": "steps: 1\n",
    "tests/test_toy.py": """
import subprocess
import sys
from multiprocessing import get_context
from pathlib import Path

import pytest

from pkg import local


def test_local():
    assert local.f() == 1


def test_subprocess():
    said = subprocess.run([sys.executable, "-c", "from pkg.worker import work; print(work())"], capture_output=True, text=True)
    assert said.stdout == "1\\n"


def test_killed_child():
    said = subprocess.run([sys.executable, "-c", "from pkg.worker import killed; killed()"])
    assert said.returncode == -9


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_pool(method):
    from pkg.worker import work

    with get_context(method).Pool(1) as pool:
        assert pool.apply(work) == 1


def test_data():
    assert (Path(__file__).parents[1] / "recipe.yaml").read_text() == "steps: 1\\n"
""",
}
REMOTE = {"test_subprocess", "test_killed_child", "test_pool[fork]", "test_pool[spawn]", "test_pool[forkserver]"}
PLANTED_DEAF = """
from surefoot.harness.affected import records as evidence, session
session._read_log = lambda log: []
evidence._silent = lambda facts: {}
"""


@pytest.fixture
def toy(tmp_path: Path) -> Toy:
    return Toy(tmp_path, FILES)


def test_code_that_ran_only_in_other_processes_chooses_their_tests(toy: Toy) -> None:
    first = toy.pytest()
    assert first.code == 0, first.text
    assert len(first.ran) == 7
    again = toy.pytest()
    assert (again.code, again.ran) == (0, {}), again.text
    assert "0 of 7 tests affected" in again.text
    toy.edit("pkg/far.py", "return 1", "return 2")
    broken = toy.pytest()
    assert broken.code == 1
    assert set(broken.ran) == REMOTE
    still = toy.pytest()
    assert set(still.ran) == {name for name, outcome in broken.ran.items() if outcome == "failed"}
    toy.edit("pkg/far.py", "return 2", "return 1")
    assert set(toy.affected()) == REMOTE


def test_planted_selector_that_ignores_worker_records_misses_them(toy: Toy) -> None:
    toy.write("conftest.py", PLANTED_DEAF)
    assert toy.pytest("-k", "subprocess or killed").code == 0
    toy.edit("pkg/far.py", "return 1", "return 2")
    assert not {"test_subprocess", "test_killed_child"} & set(
        toy.affected("tests/test_toy.py", "--deselect", "tests/test_toy.py::test_pool")
    )


@pytest.mark.turns(5)
def test_what_the_tool_itself_reads_between_tests_chooses_nothing(tmp_path: Path) -> None:
    """Our own repository: the tool lies in the project it looks at, and importing it is no reading of every file."""
    toy = Toy(
        tmp_path, {"test_a.py": "import surefoot_harness.plugin\n\n\ndef test_a():\n    pass\n", "other.py": "X = 1\n"}
    )
    shutil.copytree(Path(surefoot_harness.__file__).parent, tmp_path / "surefoot_harness")
    assert toy.pytest(source=str(tmp_path)).ran == {"test_a": "passed"}
    toy.edit("other.py", "X = 1", "X = 2")
    assert toy.pytest(source=str(tmp_path)).ran == {}
    toy.edit("surefoot_harness/plugin.py", "from __future__", "import string\nfrom __future__")
    assert toy.pytest(source=str(tmp_path), affected=False).code != 0, "it is the copy that runs"


def test_names_win_and_an_empty_match_is_not_a_pass(toy: Toy) -> None:
    quick = ["--deselect", "tests/test_toy.py::test_pool"]
    assert toy.pytest(*quick).code == 0
    assert toy.affected("-k", "local") == {"test_local": "passed"}
    assert toy.affected("tests/test_toy.py::test_data") == {"test_data": "passed"}
    assert toy.pytest("-k", "no_such_name").code == 5
    toy.edit("recipe.yaml", "1", "2")
    why = toy.pytest("--why", "test_data", affected=False)
    assert why.code == 0
    assert "would run" in why.text
    assert "recipe.yaml changed" in why.text
    unknown = toy.pytest("--why", "tests/test_toy.py::test_dta", affected=False)
    assert unknown.code == 4
    assert "nearest: tests/test_toy.py::test_data" in unknown.text
    assert toy.affected(*quick) == {"test_data": "failed"}
    (toy.root / ".surefoot/affected.json").write_text('{"tool": "surefoot aff')
    rebuilt = toy.pytest(*quick)
    assert "is damaged" in rebuilt.text
    assert len(rebuilt.ran) == 4


@pytest.mark.nightly  # seconds of a whole run; its neighbours show the same every day
def test_workers_of_xdist_record_and_agree(toy: Toy) -> None:
    quick = ["-n", "2", "--deselect", "tests/test_toy.py::test_pool"]
    first = toy.pytest(*quick, plugins=("xdist.plugin",))
    assert first.code == 0, first.text
    toy.edit("pkg/far.py", "return 1", "return 2")
    second = toy.pytest(*quick, plugins=("xdist.plugin",))
    assert set(second.ran) == {"test_subprocess", "test_killed_child"}, second.text
    toy.edit("pkg/far.py", "return 2", "return 1")
    assert toy.pytest(*quick, plugins=("xdist.plugin",)).code == 0
    last = toy.pytest(*quick, plugins=("xdist.plugin",))
    assert (last.code, last.ran) == (0, {}), last.text


SHARED = {
    "m.py": "def build():\n    return 1\n\n\ndef early():\n    return 1\n\n\nX = early()\n",
    "conftest.py": "import pytest\n\nimport m\n\n\n@pytest.fixture(scope='session')\ndef built():\n    return m.build()\n",
    "test_s.py": """
import importlib
import subprocess
import sys
import threading
from functools import partial


def test_uses(built):
    assert built == 1


def test_uses_too(request):
    assert request.getfixturevalue("built") == 1


def test_plain():
    pass


def test_thread():
    import t
    thread = threading.Thread(target=t.in_thread)
    thread.start()
    thread.join()


def test_deaf():
    assert subprocess.run([sys.executable, "-I", "-c", ""]).returncode == 0


def test_cleared():
    assert subprocess.run([sys.executable, "-c", ""], env={}).returncode == 0


def test_own_profiler():
    sys.setprofile(None)
    if sys.version_info >= (3, 12):
        raise AssertionError("only where a profile function records")
""",
    "test_n.py": "import importlib\n\n\ndef test_by_name():\n    assert importlib.import_module('plug' + 'in').VALUE\n",
    "t.py": "def in_thread():\n    return helper()\n\n\ndef helper():\n    return 1\n",
    "plugin.py": "VALUE = int('1')\n",
}


def test_fixtures_threads_computed_imports_and_blind_spots(tmp_path: Path) -> None:
    toy = Toy(tmp_path, SHARED)
    assert toy.pytest().code == 0
    blind = {"test_deaf", "test_cleared", "test_own_profiler"}
    assert set(toy.affected()) == blind
    reasons = toy.pytest("--why", "test_deaf", affected=False).text
    assert "it always runs: started Python with -I" in reasons
    toy.edit("m.py", "def build():\n    return 1", "def build():\n    return 3 - 2")
    assert set(toy.affected()) - blind == {"test_uses", "test_uses_too"}
    toy.edit("t.py", "return 1", "return 3 - 2")
    assert set(toy.affected()) - blind == {"test_thread"}
    toy.edit("plugin.py", "'1'", "'2'")
    assert set(toy.affected()) - blind == {"test_by_name"}
    toy.edit("m.py", "def early():\n    return 1", "def early():\n    return 3 - 2")
    assert set(toy.affected()) - blind == {"test_uses", "test_uses_too", "test_plain", "test_thread", "test_by_name"}


def test_nothing_of_it_is_loaded_without_the_flag(tmp_path: Path) -> None:
    probe = "import sys\n\n\ndef test_x():\n    assert not [name for name in sys.modules if name.startswith('surefoot.harness.affected.') and not name.endswith('options')]\n"
    toy = Toy(tmp_path, {"test_probe.py": probe})
    assert toy.pytest(affected=False).code == 0
    assert not (tmp_path / ".surefoot").exists()


def test_renamed_new_and_removed_tests_and_a_hidden_sitecustomize(tmp_path: Path) -> None:
    toy = Toy(
        tmp_path,
        {
            "test_a.py": "def test_one():\n    pass\n\n\ndef test_two():\n    pass\n",
            "extra/sitecustomize.py": "MARK = 7\n",
        },
    )
    toy.write(
        "test_b.py",
        "import os, subprocess, sys\n\n\ndef test_site():\n    env = {**os.environ, 'PYTHONPATH': os.environ['PYTHONPATH'] + os.pathsep + 'extra'}\n    subprocess.run([sys.executable, '-c', 'import sitecustomize; assert sitecustomize.MARK == 7'], env=env, check=True)\n",
    )
    first = toy.pytest()
    assert first.code == 0, first.text
    toy.edit("test_a.py", "test_two", "test_renamed")
    assert toy.affected() == {"test_renamed": "passed"}
    toy.edit("extra/sitecustomize.py", "7", "8")
    assert toy.affected() == {"test_site": "failed"}


# -- the spelling that other projects know ---------------------------------------------------

STAND_IN = """
def pytest_addoption(parser):
    parser.addoption("--testmon", action="store_true", help="a stand-in for pytest-testmon")

def pytest_report_header(config):
    return f"stand-in: {config.getoption('testmon')}"
"""
ONE = {"pkg/__init__.py": "", "pkg/a.py": "def f():\n    return 1\n"}
ONE |= {"tests/test_one.py": "from pkg import a\n\n\ndef test_a():\n    assert a.f() == 1\n"}


def test_testmon_is_affected_with_a_note_where_it_is_not_installed(tmp_path: Path) -> None:
    toy = Toy(tmp_path, ONE)
    for ran in ({"test_a": "passed"}, {}):
        said = toy.pytest("--testmon", affected=False)
        assert (said.code, said.ran) == (0, ran), said.text
        assert "--testmon means --affected here: pytest-testmon is not installed" in said.text
    toy.edit("pkg/a.py", "return 1", "return 2")
    assert toy.pytest("--testmon", affected=False).ran == {"test_a": "failed"}
    assert "--testmon" not in toy.pytest().text, "no note where nobody asked for it"


def test_testmon_stays_its_own_where_it_is_installed(tmp_path: Path) -> None:
    toy = Toy(tmp_path, {**ONE, "testmon/__init__.py": "", "testmon/pytest_testmon.py": STAND_IN})
    for _ in range(2):
        said = toy.pytest("--testmon", plugins=("testmon.pytest_testmon",), affected=False)
        assert (said.code, said.ran) == (0, {"test_a": "passed"}), said.text
    assert "stand-in: True" in said.text
    assert "affected:" not in said.text
    assert toy.pytest(plugins=("testmon.pytest_testmon",)).ran == {"test_a": "passed"}, "both spellings, side by side"


def test_what_is_kept_between_sessions_is_unseen_by_git(tmp_path: Path) -> None:
    tracked = "from pkg import a\n\n\ndef test_a(tracker):\n    tracker.track('speed', a.f())\n"
    toy = Toy(tmp_path, {**ONE, "tests/test_one.py": tracked})
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    said = toy.pytest()
    assert (said.code, said.ran) == (0, {"test_a": "passed"}), said.text
    assert list((tmp_path / "unit_results").glob("*.json")), "a history was kept"
    assert (tmp_path / ".surefoot").is_dir(), "and what the tests touched"
    seen = ["git", "-C", str(tmp_path), "status", "--porcelain", "--untracked-files=all"]
    listed = subprocess.run(seen, capture_output=True, text=True, check=True).stdout
    assert "tests/test_one.py" in listed
    assert ".surefoot" not in listed
    assert "unit_results/" not in listed


THREADS = """
import sys, threading
from concurrent.futures import ThreadPoolExecutor

go = threading.Event()

def waits():
    go.wait()
    open("/dev/null").close()
    import later
    return later.number()

with ThreadPoolExecutor(1) as old:
    asleep = old.submit(waits)
    import early
    go.set()
    told = [asleep.result(20)]
sys.setswitchinterval(1e-6)
for _ in range(20):
    with ThreadPoolExecutor(16) as pool:
        told += pool.map(lambda _: __import__("later").number(), range(64), timeout=20)
sys.exit(set(told) != {1})
"""
"""A child whose code is not the project's: one thread is there before code of the project is, many begin after it."""


def test_a_recorded_child_loses_no_thread(tmp_path: Path) -> None:
    test = (
        "import subprocess, sys\n\n\ndef test_child():\n"
        f"    assert subprocess.run([sys.executable, '-c', {THREADS!r}], timeout=60).returncode == 0\n"
    )
    toy = Toy(tmp_path, {"test_c.py": test, "early.py": "VALUE = 1\n", "later.py": "def number():\n    return 1\n"})
    first = toy.pytest()
    assert first.code == 0, first.text
    assert "profile function" not in first.text
    toy.edit("later.py", "return 1", "return 3 - 2")
    assert set(toy.affected()) == {"test_child"}, "what a thread ran in the child is known"

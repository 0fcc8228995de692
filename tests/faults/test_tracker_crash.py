"""A killed session keeps what its tests tracked, and never looks like a success."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from plugin_kit import Nested, environment, history, results

pytest_plugins = ["pytester", "plugin_kit"]

TESTS = """
import os, signal, pytest

@pytest.mark.parametrize("i", range(3))
def test_before(tracker, i):
    tracker.track("value", i)

def test_killed(tracker):
    tracker.track("last", 41)
    if os.path.exists("kill"):
        os.kill(int(open("kill").read()) or os.getpid(), signal.SIGKILL)
        signal.pause()

def test_after(tracker):
    tracker.track("value", 5)
"""
BUFFERED = """
from surefoot.harness.tracker import tracker as journal, results

held = []
write = journal.JournalWriter.append
journal.JournalWriter.append = lambda self, *words, **values: held.append((self, words, values))
finish = results.Results.finish

def late(self, *words):
    for writer, event, values in held:
        write(writer, *event, **values)
    finish(self, *words)

results.Results.finish = late
"""


def session(folder: Path, *words: str) -> subprocess.Popen[str]:
    """pytest as a child that can be killed for real."""
    outer = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-p", "surefoot.harness.plugin", "-p", "no:cacheprovider", *words]
    return subprocess.Popen(
        command, cwd=folder, env={**outer, **environment()}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, start_new_session=True,
    )  # fmt: skip


def killed_in_the_middle(folder: Path) -> None:
    (folder / "test_crash.py").write_text(TESTS)
    (folder / "unit_results.json").write_text('{"exit_status": 0, "metrics": {}}')
    (folder / "kill").write_text("0")
    child = session(folder)
    child.communicate(timeout=60)
    assert child.returncode == -signal.SIGKILL
    (folder / "kill").unlink()


def everything_tracked_is_kept(folder: Path) -> None:
    left = results(folder)
    assert left["exit_status"] == "not set"
    for i in range(3):
        assert left["metrics"].get(f"test_crash::test_before[{i}]", {}).get("value") == i, "a finished test is lost"
    session(folder, "-k", "after").communicate(timeout=60)
    recovered, fresh = history(folder)
    assert (recovered["exit_status"], recovered["recovered"]) == ("not set", True)
    assert recovered["metrics"]["test_crash::test_killed"] == {"_unfinished": True, "last": 41}
    assert recovered["metrics"]["test_crash::test_before[2]"]["value"] == 2
    assert results(folder)["exit_status"] == fresh["exit_status"] == 0


def test_kill_9_loses_no_tracked_value_and_leaves_no_success(tmp_path: Path) -> None:
    killed_in_the_middle(tmp_path)
    everything_tracked_is_kept(tmp_path)


def test_planted_results_written_at_the_end_only_are_caught(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(BUFFERED)
    killed_in_the_middle(tmp_path)
    with pytest.raises(AssertionError, match="a finished test is lost"):
        everything_tracked_is_kept(tmp_path)


def test_a_crashed_worker_loses_nothing_it_tracked(pytester: pytest.Pytester, nested: Nested) -> None:
    pytester.makepyfile(test_crash=TESTS)
    (pytester.path / "kill").write_text("0")
    done = nested("-n", "2", plugins=("xdist.plugin",))
    done.stdout.fnmatch_lines(["*worker 'gw*' crashed while running*"])
    found = results(pytester.path)
    assert found["exit_status"] == 1
    assert found["metrics"]["test_crash::test_killed"] == {"_unfinished": True, "last": 41}
    assert [found["metrics"][f"test_crash::test_before[{i}]"]["value"] for i in range(3)] == [0, 1, 2]
    assert found["metrics"]["test_crash::test_after"]["value"] == 5


def test_kill_9_of_the_controller_loses_nothing_its_workers_tracked(tmp_path: Path) -> None:
    (tmp_path / "test_crash.py").write_text(TESTS.replace("signal.pause()", "os._exit(0)"))
    (tmp_path / "conftest.py").write_text(
        "import os\ndef pytest_sessionstart(session):\n"
        "    if 'PYTEST_XDIST_WORKER' not in os.environ:\n        open('kill', 'w').write(str(os.getpid()))\n"
    )
    child = session(tmp_path, "-p", "xdist.plugin", "-n", "1")
    child.communicate(timeout=60)
    assert child.returncode == -signal.SIGKILL
    assert results(tmp_path)["exit_status"] == "not set"
    (tmp_path / "conftest.py").unlink()
    (tmp_path / "kill").unlink()
    session(tmp_path, "-k", "after").communicate(timeout=60)
    recovered, _ = history(tmp_path)
    assert recovered["metrics"]["test_crash::test_killed"]["last"] == 41
    assert recovered["metrics"]["test_crash::test_before[0]"]["value"] == 0

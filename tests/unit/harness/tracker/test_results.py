"""Results on disk: what a crash leaves, what the next session makes of it, and who may touch whose journal."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from frame_kit import pieces

from surefoot.errors import StateError, StorageError
from surefoot.harness.tracker import results as about
from surefoot.harness.tracker import tracker as tracker_module
from surefoot.harness.tracker.results import JOURNALS, NOT_SET, Results, TrackedSession, recover
from surefoot.harness.tracker.tracker import JournalWriter, MetricTracker, read_journals
from surefoot.system import journal as journal_module


def session(folder: Path) -> Results:
    return Results(TrackedSession.new(folder, folder, ["-q"]))


def latest(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "unit_results.json").read_text()))


def run_one(results: Results, name: str = "test_a.py::test_one", *, end: bool = True) -> None:
    tracker = MetricTracker(name, results.open())
    tracker.track("loss", 0.5)
    if end:
        tracker.close()


def test_before_the_end_the_status_is_not_set_and_the_values_are_there(tmp_path: Path) -> None:
    results = session(tmp_path)
    run_one(results)
    assert latest(tmp_path)["exit_status"] == NOT_SET
    results.refresh()
    assert latest(tmp_path)["exit_status"] == NOT_SET
    assert latest(tmp_path)["metrics"]["test_a::test_one"]["loss"] == 0.5
    results.finish(0, 81.5, None)
    assert (latest(tmp_path)["exit_status"], latest(tmp_path)["coverage"]) == (0, 81.5)
    assert not (tmp_path / JOURNALS).exists()


def test_an_old_result_does_not_outlive_the_start_of_a_session(tmp_path: Path) -> None:
    (tmp_path / "unit_results.json").write_text('{"exit_status": 0}')
    session(tmp_path).begin(wanted=False)
    assert latest(tmp_path)["exit_status"] == NOT_SET


def test_a_folder_without_results_stays_empty(tmp_path: Path) -> None:
    results = session(tmp_path)
    results.begin(wanted=False)
    results.refresh()
    results.finish(0, None, "no")
    assert list(tmp_path.iterdir()) == []


def test_a_session_that_died_is_merged_once_and_keeps_its_unfinished_test(tmp_path: Path) -> None:
    dead = session(tmp_path)
    run_one(dead)
    run_one(dead, "test_a.py::test_two", end=False)
    dead.close()  # what the kernel does to a killed process
    assert len(recover(tmp_path)) == 1
    (copy,) = (tmp_path / "unit_results").glob("*.json")
    found = json.loads(copy.read_text())
    assert (found["exit_status"], found["recovered"]) == (NOT_SET, True)
    assert found["metrics"]["test_a::test_one"]["loss"] == 0.5
    assert found["metrics"]["test_a::test_two"] == {"_unfinished": True, "loss": 0.5}
    assert recover(tmp_path) == []


def test_a_session_that_still_runs_is_left_alone(tmp_path: Path) -> None:
    alive = session(tmp_path)
    run_one(alive)
    assert recover(tmp_path) == []
    assert alive.is_open
    alive.close()


def test_a_journal_that_cannot_be_merged_is_named_and_kept(tmp_path: Path) -> None:
    dead = session(tmp_path)
    run_one(dead)
    dead.close()
    (dead.journals / "header.json").write_text("{ torn")
    (note,) = recover(tmp_path)
    assert "cannot be read" in note
    assert dead.is_open


def killed(path: Path) -> list[bytes]:
    """The frames of a process that died after it tracked two values; it wrote no seal."""
    tracker = MetricTracker("t.py::f", JournalWriter(path))
    tracker.track("a", 1)
    tracker.track("b", 2)
    return pieces(path.read_bytes())


def test_a_torn_last_record_loses_itself_only(tmp_path: Path) -> None:
    path = tmp_path / "gw0.journal"
    frames = killed(path)
    for kept in range(1, len(frames[-1])):
        path.write_bytes(b"".join(frames[:-1]) + frames[-1][:kept])
        journal = read_journals(tmp_path)
        assert journal.metrics == {"t.py::f": {"_unfinished": True, "a": 1}}
        assert [problem.split(":")[0] for problem in journal.problems] == ["gw0.journal"]
        assert f"{kept} bytes" in journal.problems[0]


def test_damage_and_what_nobody_understands_are_named_and_the_rest_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "gw0.journal"
    header, first, start, a, b = killed(path)
    damaged = a[:-3] + bytes([a[-3] ^ 1]) + a[-2:]
    path.write_bytes(header + first + start + damaged + b)
    journal = read_journals(tmp_path)
    assert journal.metrics == {"t.py::f": {"_unfinished": True, "b": 2}}
    assert [problem.split(":")[0] for problem in journal.problems] == ["gw0.journal"]
    path.unlink()
    writer = JournalWriter(path)
    writer.append("dance", "x")
    MetricTracker("t.py::f", writer).track("a", 1)
    journal = read_journals(tmp_path)
    assert journal.metrics["t.py::f"]["a"] == 1
    assert journal.problems == ["gw0.journal, record 2: unknown event 'dance'"]


@pytest.mark.parametrize(
    ("content", "words"), [(b"\x89SFJ", "it has 4 bytes"), (b"{}\n" * 40, "does not begin as one")]
)
def test_a_file_that_is_no_journal_is_named_and_the_others_are_kept(tmp_path: Path, content: bytes, words: str) -> None:
    killed(tmp_path / "gw0.journal")
    (tmp_path / "gw1.journal").write_bytes(content)
    (tmp_path / "gw2.journal").touch()  # its process has just opened it
    journal = read_journals(tmp_path)
    assert journal.metrics["t.py::f"]["b"] == 2
    (problem,) = journal.problems
    assert problem.startswith("gw1.journal: it cannot be read, ")
    assert words in problem


def test_a_newer_format_is_named_and_not_guessed_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(tracker_module, "FORMAT", 3)
        killed(tmp_path / "gw0.journal")
    journal = read_journals(tmp_path)
    assert journal.metrics == {}
    assert journal.problems == ["gw0.journal: it has format 3, and this version reads format 2"]


def test_lines_of_format_1_are_read_and_each_odd_one_is_named(tmp_path: Path) -> None:
    (tmp_path / "gw0.jsonl").write_bytes(
        b'{"event": "start", "test": "t.py::f"}\n{"event": "track", "test": "t.py::f", "name": "a", "value": 1}\n'
        b'\xff\xfe not json\n[]\n{"event": "dance", "test": "x"}\n{"event": "track", "te'
    )
    journal = read_journals(tmp_path)
    assert journal.metrics["t.py::f"]["a"] == 1
    assert [problem.split(":")[0] for problem in journal.problems] == [
        "gw0.jsonl, line 3", "gw0.jsonl, line 4", "gw0.jsonl, line 5", "gw0.jsonl",
    ]  # fmt: skip


def test_a_process_that_lets_go_and_tracks_on_writes_behind_what_it_wrote(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path / "main.journal")
    tracker = MetricTracker("t.py::f", writer)
    tracker.track("a", 1)
    writer.close()
    tracker.track("b", 2)
    tracker.close()
    writer.close()
    found = read_journals(tmp_path)
    assert (found.metrics["t.py::f"]["a"], found.metrics["t.py::f"]["b"], found.problems) == (1, 2, [])


def test_a_fork_that_tracks_loses_nothing_of_its_own_or_of_its_parents(tmp_path: Path) -> None:
    tracker = MetricTracker("t.py::f", JournalWriter(tmp_path / "main-7.journal"))
    tracker.track("before", 1)
    child = os.fork()
    if child == 0:
        tracker.track("inside", 2)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    tracker.track("after", 3)
    tracker.close()
    found = read_journals(tmp_path)
    values = {name: value for name, value in found.metrics["t.py::f"].items() if name != "_elapsed"}
    assert (values, found.problems) == ({"before": 1, "inside": 2, "after": 3}, [])


def test_planted_fork_that_writes_to_its_parents_file_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracker_module.os, "getpid", lambda: 7)
    with pytest.raises((AssertionError, StorageError)):
        test_a_fork_that_tracks_loses_nothing_of_its_own_or_of_its_parents(tmp_path)


def test_a_disk_that_is_full_fails_the_test_that_tracks_and_costs_no_value_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracker = MetricTracker("t.py::f", JournalWriter(tmp_path / "main.journal"))
    tracker.track("a", 1)

    def full(*words: Any) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(journal_module.os, "pwrite", full)
        with pytest.raises(StorageError, match="No space left"):
            tracker.track("b", 2)
    tracker.track("c", 3)
    found = read_journals(tmp_path)
    assert (found.metrics["t.py::f"], found.problems) == ({"_unfinished": True, "a": 1, "c": 3}, [])


def test_a_test_that_runs_again_starts_over_and_says_how_often(tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path / "main.journal")
    MetricTracker("t.py::f", writer).track("first", 1)
    again = MetricTracker("t.py::f", writer)
    again.track("second", 2)
    again.close()
    found = read_journals(tmp_path).metrics["t.py::f"]
    assert (found["second"], found["_runs"], "first" in found) == (2, 2, False)


def test_a_folder_that_cannot_be_written_fails_the_test_that_tracks(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    results = Results(TrackedSession.new(tmp_path, tmp_path / "file", []))
    with pytest.raises(StateError, match="surefoot_results_dir"):
        results.open()


def test_secrets_in_arguments_are_not_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "abcdef123456")
    assert TrackedSession.new(tmp_path, tmp_path, ["--key=abcdef123456"]).args == ("--key=[hidden]",)


def git(folder: Path, *words: str) -> None:
    name = ("-c", "user.name=t", "-c", "user.email=t@example.com")
    subprocess.run(["git", "-C", str(folder), *name, *words], check=True, capture_output=True)


def test_our_own_files_do_not_make_a_tree_dirty_and_others_do(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    (tmp_path / "code.py").write_text("x = 1\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    results = session(tmp_path)
    run_one(results)
    results.finish(0, None, "no")
    found = about.commit_of(tmp_path, tmp_path)
    assert (len(found["git_commit"]), found["dirty"]) == (40, False)
    (tmp_path / "new.py").write_text("")
    assert about.commit_of(tmp_path, tmp_path)["dirty"] is True


def test_without_git_the_commit_is_null_with_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert about.commit_of(tmp_path, tmp_path)["git_reason"] == "not a git repository"
    monkeypatch.setenv("PATH", str(tmp_path))
    found = about.commit_of(tmp_path, tmp_path)
    assert (found["git_commit"], found["dirty"]) == (None, None)
    assert "git cannot be started" in found["git_reason"]


@pytest.mark.parametrize(("total", "value"), [(81, 81.0), (0.0, 0.0), (None, None), (float("nan"), None), ("81", None)])
def test_coverage_is_a_number_or_null_with_a_reason(total: Any, value: float | None) -> None:
    found, reason = about.coverage_of(type("Plugin", (), {"cov_total": total}))
    assert (found, reason is None) == (value, value is not None)
    assert about.coverage_of(None)[0] is None
    assert "--cov" in str(about.coverage_of(None)[1])


def test_this_environment_knows_its_packages() -> None:
    assert "pytest" in about.packages()

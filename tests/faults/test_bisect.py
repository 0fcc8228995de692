"""`surefoot bisect` on real histories, through the real command line."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from bisect_kit import History, bisect, copied, environment, git, history, numbered, shell

FAILS_FROM_8 = "#!/bin/sh\ntest $(cat n) -lt 8\n"


@pytest.fixture(scope="module")
def eight(tmp_path_factory: pytest.TempPathFactory) -> History:
    """Eight commits; the last one breaks it, and the test script exists from the sixth on."""
    return numbered(tmp_path_factory.mktemp("repo with space") / "eight", 8, FAILS_FROM_8, since=6)


def copy_of(made: History, folder: Path) -> History:
    shutil.copytree(made.root, folder)
    return History(folder, list(made.commits))


@pytest.mark.parametrize(
    ("words", "env"),
    [
        (["--good", "HEAD~7", "--bad", "HEAD"], {"SKIP_GOOD_CHECK": "1"}),
        (["--good=introduced", "t.sh", "--bad", "HEAD"], {}),
        ([], {"GOOD": "introduced t.sh", "BAD": "HEAD"}),
    ],
)
def test_the_script_of_the_sixth_commit_finds_the_eighth(eight: History, words: list[str], env: dict[str, str]) -> None:
    before = eight.state()
    ran = bisect(eight.root, *words, "--", "./t.sh", **env)
    assert ran.code == 0, ran.both
    assert f"first bad commit: {eight.c(8)} c8" in ran.out
    assert eight.state() == before


def test_a_good_commit_without_the_script_is_refused_and_nothing_stays_behind(eight: History) -> None:
    before = eight.state()
    ran = bisect(eight.root, "--good", "HEAD~7", "--bad", "HEAD", "--", "./t.sh")
    assert ran.code == 2
    assert "t.sh does not exist there" in ran.err
    assert "SKIP_GOOD_CHECK=1" in ran.err
    assert eight.state() == before


def planted(folder: Path, file: str, old: str, new: str) -> Path:
    """A copy of the package in which `old` has become `new`."""
    path = copied(folder) / "surefoot_harness" / file
    text = path.read_text(encoding="utf-8")
    assert text.count(old) == 1, f"{old!r} is {text.count(old)} times in {file}"
    path.write_text(text.replace(old, new), encoding="utf-8")
    return folder


# -- infrastructure is not the commit's fault ------------------------------------------

BROKEN_MACHINES = "#!/bin/sh\ncase $(cat n) in 3) exit 126;; 4) exit 127;; 5) exit 125;; 7|8|9) exit 1;; esac\n"


def test_infrastructure_failures_never_blame_a_commit(tmp_path: Path) -> None:
    made = numbered(tmp_path / "r", 9, BROKEN_MACHINES)
    ran = bisect(made.root, "--good", "HEAD~8", "--bad", "HEAD", "--", "./t.sh")
    assert ran.code == 0, ran.both
    assert f"first bad commit: {made.c(7)}" in ran.out


def test_planted_bug_calling_infrastructure_failures_bad_is_caught(tmp_path: Path) -> None:
    made = numbered(tmp_path / "r", 9, BROKEN_MACHINES)
    source = planted(tmp_path / "p", "bisect/tester.py", "if code in (126, 127):", "if code in ():")
    source_file = source / "surefoot_harness/bisect/tester.py"
    text = source_file.read_text(encoding="utf-8")
    source_file.write_text(text.replace("if code == CANNOT_TELL or", "if"), encoding="utf-8")
    ran = bisect(made.root, "--good", "HEAD~8", "--bad", "HEAD", "--", "./t.sh", source=source)
    assert f"first bad commit: {made.c(7)}" not in ran.out


# -- the tool inside the tree -------------------------------------------------------------


def test_a_commit_that_deletes_the_tool_does_no_harm(tmp_path: Path) -> None:
    made = history(tmp_path / "r")
    copied(made.root / "src")
    made.commit({"n": "1\n", "t.sh": "#!/bin/sh\ntest $(cat n) -lt 5\n", ".gitignore": "__pycache__/\n"})
    made.commit({"n": "2\n"})
    git(made.root, "rm", "-r", "--quiet", "src")
    for number in range(3, 7):
        made.commit({"n": f"{number}\n"})
    git(made.root, "checkout", "--quiet", made.c(2))  # the tool is here, and leaves with the first checkout
    ran = bisect(made.root, "--good", made.c(1), "--bad", made.c(6), "--", "./t.sh", source=made.root / "src")
    assert ran.code == 0, ran.both
    assert f"first bad commit: {made.c(5)}" in ran.out
    assert made.state() == ("HEAD", made.c(2), "", False)


# -- noise ------------------------------------------------------------------------------


def test_a_test_that_fails_only_in_three_of_ten_runs_is_pinned_down(tmp_path: Path) -> None:
    """The seed of each sample is fixed by the commit, so this test gives the same answer every time."""
    script = "#!/bin/sh\ntest $(cat n) -lt 11 || test $((SUREFOOT_SEED % 100)) -ge 30\n"
    made = numbered(tmp_path / "r", 16, script)
    before = made.state()
    ran = bisect(made.root, "--flaky", "--good", "HEAD~15", "--bad", "HEAD", "--", "./t.sh")
    assert ran.code == 0, ran.both
    assert f"first bad commit: {made.c(11)}" in ran.out
    assert "confidence 0.9" in ran.out or "confidence 1.0" in ran.out
    assert made.state() == before
    assert len(made.verdicts()[made.c(11)]["samples"]) > 1


# -- stopped in the middle ----------------------------------------------------------------

WAITS = """#!/bin/sh
if [ -n "$PIPE" ] && [ $(cat n) -eq 6 ]; then echo here > "$PIPE"; exec sleep 600; fi
test $(cat n) -lt 9
"""


def stopped(made: History, pipe: Path, number: int, *more: str, source: Path | None = None) -> tuple[int, str]:
    """Start, wait until the command runs at the sixth commit, send a signal; exit code and what was said."""
    os.mkfifo(pipe)
    words = ["--good", made.c(1), "--bad", made.c(12), *more, "--", "./t.sh"]
    variables = environment(PIPE=str(pipe)) | ({"PYTHONPATH": str(source)} if source else {})
    with subprocess.Popen(
        [sys.executable, "-m", "surefoot", "bisect", *words],
        cwd=made.root, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as process:  # fmt: skip
        with pipe.open() as reader:  # blocks until the script opens its end
            assert reader.read() == "here\n"
        process.send_signal(number)
        process.send_signal(number)  # an impatient user: the way home is walked all the same
        said, _ = process.communicate(timeout=60)
    return process.returncode, said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_in_the_middle_restores_the_tree_and_the_printed_line_resumes(tmp_path: Path, number: int) -> None:
    made = numbered(tmp_path / "r with 'quote", 12, WAITS)
    before = made.state()
    code, said = stopped(made, tmp_path / "pipe", number)
    assert code == 75, said
    assert made.state() == before
    (log,) = made.logs()
    assert "-stopped.log" in log.name
    hint = said.split("resume with:\n")[1].splitlines()[0]
    ran = shell(tmp_path, hint)
    assert ran.code == 0, ran.both
    assert f"first bad commit: {made.c(9)}" in ran.out
    assert "GOOD" not in ran.err
    assert made.state() == before


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("                    self.repository.restore()", "                    pass"),
        ("                    self._save(reason)", "                    pass"),
    ],
    ids=["reset removed", "log not saved"],
)
def test_planted_bug_in_the_way_home_is_caught(tmp_path: Path, old: str, new: str) -> None:
    made = numbered(tmp_path / "r", 12, WAITS)
    before = made.state()
    source = planted(tmp_path / "p", "bisect/command.py", old, new)
    _, said = stopped(made, tmp_path / "pipe", signal.SIGTERM, source=source)
    assert made.state() != before or "resume with:" not in said


def test_a_killed_command_aborts_with_the_log_saved_and_another_code(tmp_path: Path) -> None:
    made = numbered(tmp_path / "r", 9, "#!/bin/sh\ntest $(cat n) -eq 5 && kill -SEGV $$\ntest $(cat n) -lt 8\n")
    before = made.state()
    ran = bisect(made.root, "--good", "HEAD~8", "--bad", "HEAD", "--", "./t.sh")
    assert ran.code == 3
    assert "resume with:" in ran.err
    assert "-aborted.log" in made.logs()[0].name
    assert made.state() == before
    assert made.verdicts()[made.c(5)]["status"] == "ERROR"


# -- submodules -----------------------------------------------------------------------------


def test_a_commit_whose_submodule_commit_is_missing_is_skipped_and_recorded(tmp_path: Path) -> None:
    library = history(tmp_path / "library")
    library.commit({"value": "1\n"})
    made = history(tmp_path / "r")
    made.commit({"n": "1\n", "t.sh": "#!/bin/sh\ntest $(cat n) -lt 6 && test -s library/value\n"})
    git(made.root, "submodule", "--quiet", "add", f"file://{library.root}", "library")
    made.commit({"n": "2\n"})
    made.commit({"n": "3\n"})
    git(made.root, "update-index", "--cacheinfo", "160000", "1" * 40, "library")
    git(made.root, "commit", "--quiet", "-m", "an orphan")
    made.commits.append(git(made.root, "rev-parse", "HEAD"))
    git(made.root, "update-index", "--cacheinfo", "160000", library.c(1), "library")
    for number in range(5, 8):
        (made.root / "n").write_text(f"{number}\n")
        git(made.root, "commit", "--quiet", "-a", "-m", f"c{number}")
        made.commits.append(git(made.root, "rev-parse", "HEAD"))
    before = made.state()
    ran = bisect(made.root, "--good", made.c(2), "--bad", made.c(7), "--", "./t.sh")
    assert ran.code == 0, ran.both
    assert f"first bad commit: {made.c(6)}" in ran.out
    assert made.verdicts()[made.c(4)]["status"] == "SKIP", ran.both
    assert made.state() == before
    assert (made.root / "library/value").read_text() == "1\n"


def shallow_library(folder: Path) -> History:
    """A clone of eight commits, each with a commit of its library; of the library only the newest is there."""
    library, made = history(folder / "library"), history(folder / "r")
    for number in range(1, 9):
        pinned = library.commit({"value": f"{number}\n"})
        if number == 1:
            git(made.root, "submodule", "--quiet", "add", f"file://{library.root}", "library")
        else:
            git(made.root / "library", "fetch", "--quiet")
        git(made.root / "library", "checkout", "--quiet", pinned)
        made.commit({"n": f"{number}\n", "t.sh": "#!/bin/sh\ntest $(cat library/value) -lt 5\n"})
    git(folder, "clone", "--quiet", f"file://{made.root}", "clone")
    clone = History(folder / "clone", made.commits)
    git(clone.root, "submodule", "--quiet", "update", "--init", "--depth", "1")
    assert git(clone.root / "library", "rev-parse", "--is-shallow-repository") == "true"
    assert git(clone.root / "library", "rev-list", "--count", "--all") == "1"
    return clone


def test_a_shallow_submodule_gets_its_history_before_the_search(tmp_path: Path) -> None:
    made = shallow_library(tmp_path)
    before = made.state()
    ran = bisect(made.root, "--good", made.c(1), "--bad", "HEAD", "--", "./t.sh")
    assert ran.code == 0, ran.both
    assert f"first bad commit: {made.c(5)}" in ran.out
    assert {verdict["status"] for verdict in made.verdicts().values()} == {"PASS", "FAIL"}, "none was skipped"
    assert made.state() == before


def test_planted_fetch_that_leaves_a_submodule_shallow_cannot_find_the_commit(tmp_path: Path) -> None:
    made = shallow_library(tmp_path)
    source = planted(tmp_path / "copy", "bisect/repository.py", '"--unshallow" if shallow else ', "")
    ran = bisect(made.root, "--good", made.c(1), "--bad", "HEAD", "--", "./t.sh", source=source, SKIP_GOOD_CHECK="1")
    assert f"first bad commit: {made.c(5)}" not in ran.out, ran.both
    assert "SKIP" in {verdict["status"] for verdict in made.verdicts().values()}, ran.both

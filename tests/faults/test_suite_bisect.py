"""`surefoot bisect -- surefoot suite run ...` over a real history: only a check that failed blames a commit.

Real git, the real commands, and a trainer that is a shell script. The regression comes with the sixth commit; at the
fourth, which every search meets first, something else goes wrong that is not the commit's fault.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import warm_command
from bisect_kit import History, Ran, bisect, copied, history

LAST, CULPRIT, ODD = 7, 6, 4
TRAINER = """#!/bin/sh
# trainer.sh RUN [OPTION]: one number a step; from the sixth commit on it is too low.
run=$1 n=$(cat n)
case "$TROUBLE:$n:$2" in
    disk:4:*) exit 74;;
    killed:4:*) kill -KILL $$;;
    time:4:*) sleep 60;;
    crash:4:*) exit 1;;
    segfault:4:*) kill -SEGV $$;;
    short:4:*) echo '{"train/loss": {"1": 0.5}, "reward": {"1": 0.9}}' > "$run/metrics.json"; exit 0;;
    arguments:4:--new) echo "unrecognized arguments: --new" >&2; exit 2;;
esac
reward=0.9
test "$n" -lt 6 || reward=0.1
echo "{\\"train/loss\\": {\\"1\\": 0.5, \\"2\\": 0.4}, \\"reward\\": {\\"1\\": 0.9, \\"2\\": $reward}}" > "$run/metrics.json"
"""
SUITE = """
free_names = true
[[recipe]]
name = "tiny"
max_steps = 2
minutes = 0.5
command = ["sh", "trainer.sh", "{run}"]
checks = ['last(data["reward"]) > 0.5']
"""
TROUBLES = ["disk", "killed", "time", "crash", "arguments"]
"""Findings that once blamed the fourth commit: exit 74, SIGKILL, out of time, a crash, a rejected argument."""


def by_day(today: str, names: list[str]) -> list[Any]:
    """One of them every day, the others at night: each is a whole search."""
    return [name if name == today else pytest.param(name, marks=pytest.mark.nightly) for name in names]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> History:
    found = history(tmp_path_factory.mktemp("suites") / "repository")
    for number in range(1, LAST + 1):
        text = "" if number > 1 else SUITE
        files = {"n": f"{number}\n"} | ({"suites/smoke.toml": text, "trainer.sh": TRAINER} if text else {})
        found.commit(files)
    return found


@pytest.fixture
def tool(tmp_path: Path) -> Path:
    """`surefoot` as a shell finds it, in a fork that has the libraries loaded."""
    warm = warm_command.shared()
    return script(tmp_path / "bin", f'exec {sys.executable} {warm.client} surefoot {warm.address} "$@"')


def script(folder: Path, line: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "surefoot"
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)
    return path


def search(made: History, tool: Path, trouble: str, *words: str, suite: str = "smoke", **more: Any) -> Ran:
    """Bisect the suite; the newest evidence alone is left."""
    shutil.rmtree(made.root / "bisect-logs", ignore_errors=True)
    options = ["--extra-args", "--new"] if trouble == "arguments" else []
    options += ["--set", "minutes=0.01"] if trouble == "time" else []
    return bisect(
        made.root, *options, *words, "--good", made.c(1), "--bad", made.c(LAST), "--", str(tool), "suite", "run", suite,
        TROUBLE=trouble, **more,
    )  # fmt: skip


def is_never_blamed(made: History, tool: Path, trouble: str, **more: Any) -> None:
    before = made.state()
    ran = search(made, tool, trouble, **more)
    assert ran.code == 0, ran.both
    assert f"first bad commit: {made.c(CULPRIT)} c6" in ran.out, ran.both
    assert made.state() == before
    verdicts = made.verdicts()
    assert verdicts[made.c(ODD)]["answer"] == "skip", ran.both
    assert verdicts[made.c(CULPRIT)]["reason"].startswith("exit 1: tiny is FAIL: last(data"), ran.both
    own_folders(made, verdicts)


def own_folders(made: History, verdicts: dict[str, dict[str, Any]]) -> None:
    """Each commit's runs lie in its own folder, and nothing lies where all of them would share it."""
    assert not (made.root / "runs").exists()
    for commit in verdicts:
        (place,) = (made.root / "bisect-logs").glob(f"*/{commit}/suites/smoke/tiny/verdict.json")
        assert json.loads(place.read_text())["commit"] == commit


@pytest.mark.parametrize("trouble", TROUBLES)
def test_what_is_not_the_commits_fault_is_skipped_and_the_culprit_found(
    made: History, tool: Path, trouble: str
) -> None:
    is_never_blamed(made, tool, trouble)


@pytest.mark.parametrize("trouble", by_day("disk", TROUBLES))
def test_planted_old_rule_that_calls_every_bad_end_1_blames_the_wrong_commit(
    made: History, tool: Path, tmp_path: Path, trouble: str
) -> None:
    """The rule of before: a suite says 1 whatever ended its trainer, and 1 is believed without a verdict."""
    old = script(tmp_path / "old", f'{tool} "$@" || exit 1')
    source = copied(tmp_path / "source")
    tester = source / "surefoot_harness/bisect/tester.py"
    rule = "if code != _FAILED or answer != BAD or not"
    assert tester.read_text().count(rule) == 1
    tester.write_text(tester.read_text().replace(rule, "if True or not"))
    ran = search(made, old, trouble, source=source)
    assert f"first bad commit: {made.c(ODD)} c4" in ran.out, ran.both


@pytest.mark.parametrize("trouble", by_day("crash", ["crash", "segfault", "short"]))
def test_who_searches_for_a_crash_finds_it(made: History, tool: Path, trouble: str) -> None:
    ran = search(made, tool, trouble, "--crash-is-bad", "--save-log")
    assert f"first bad commit: {made.c(ODD)} c4" in ran.out, ran.both
    assert made.verdicts()[made.c(ODD)]["exit_code"] == 70


@pytest.mark.nightly
@pytest.mark.parametrize("trouble", ["disk", "killed", "time", "arguments"])
def test_the_surroundings_are_no_crash(made: History, tool: Path, trouble: str) -> None:
    ran = search(made, tool, trouble, "--crash-is-bad")
    assert f"first bad commit: {made.c(CULPRIT)} c6" in ran.out, ran.both


@pytest.mark.nightly
def test_python_that_ends_with_1_before_a_suite_ran_blames_nobody(made: History, tool: Path, tmp_path: Path) -> None:
    """As `python -m surefoot` does where a commit broke an import."""
    line = f'test "$(cat n)" != 4 || exit 1\nexec {tool} "$@"'
    ran = search(made, script(tmp_path / "broken", line), "none")
    assert f"first bad commit: {made.c(CULPRIT)} c6" in ran.out, ran.both
    assert made.verdicts()[made.c(ODD)]["reason"] == "exit 1: surefoot left no recipe with the verdict FAIL"


def test_a_suite_that_is_named_by_its_file_can_be_edited_by_sed(made: History, tool: Path) -> None:
    ran = search(made, tool, "none", suite="suites/smoke.toml", SED_CLAUSES="s/> 0.5/> 0.05/")
    assert (ran.code, "nothing to bisect" in ran.err) == (2, True), ran.both
    assert (made.root / "suites/smoke.toml").read_text() == SUITE
    ran = search(made, tool, "none", "--sed", "s/> 0.5/> 0.05/")
    assert ran.code == 2
    assert all(word in ran.err for word in ("no script to edit", "--set", "--relax", "suites/NAME.toml")), ran.err


@pytest.mark.nightly
def test_the_folder_of_a_commit_is_used_by_a_script_that_runs_the_suite(made: History, tool: Path) -> None:
    """The variable alone, where the command is not ours to change."""
    shutil.rmtree(made.root / "bisect-logs", ignore_errors=True)
    nightly = tool.parent / "nightly.sh"
    nightly.write_text(f"#!/bin/sh\nexec {tool} suite run smoke\n")
    nightly.chmod(0o755)
    ran = bisect(made.root, "--good", made.c(1), "--bad", made.c(LAST), "--", str(nightly), TROUBLE="none")
    assert f"first bad commit: {made.c(CULPRIT)} c6" in ran.out, ran.both
    own_folders(made, made.verdicts())


@pytest.mark.nightly
def test_a_noisy_metric_is_read_from_the_one_recipe_of_a_suite(made: History, tool: Path) -> None:
    """Each sample has a folder of its own, so that no sample is the verdict of an earlier one again."""
    words = ["--metric", "reward", "--worse-than", "0.5", "--margin", "0.4", "--relax"]
    ran = search(made, tool, "none", *words, 'last(data["reward"]) > 0.5=>last(data["reward"]) > 0')
    assert f"first bad commit: {made.c(CULPRIT)} c6" in ran.out, ran.both
    samples = list((made.root / "bisect-logs").glob("*/*/sample-*/suites/smoke/tiny/verdict.json"))
    assert len(samples) == sum(len(verdict["samples"]) for verdict in made.verdicts().values()) > 2

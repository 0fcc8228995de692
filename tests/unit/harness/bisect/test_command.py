"""The search on real histories, in this process: refusals, verdicts, logs, overrides. The command line: tests/faults."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from bisect_kit import FIXED, OURS, History, git, history, numbered

from surefoot.errors import ConfigError, StateError, StoppedError
from surefoot.harness.bisect.command import bisect
from surefoot.harness.bisect.evidence import OUT, SuiteVerdicts
from surefoot.harness.bisect.evidence import read_suite_verdicts as look
from surefoot.harness.bisect.options import BisectOptions
from surefoot.harness.bisect.overrides import argv, edited
from surefoot.harness.bisect.tester import AbortError, classify

CHANGES = ["--set", "a=1", "--drop-check", "x > 0", "--reason", "why"]
BREAKS_AT_5 = "#!/bin/sh\ntest $(cat n) -lt 5\n"


@pytest.fixture(autouse=True)
def _quiet_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in FIXED.items():
        monkeypatch.setenv(name, value)
    for name in OURS:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def made(tmp_path: Path) -> History:
    return numbered(tmp_path / "r", 7, BREAKS_AT_5)


def ask(made: History, **more: Any) -> BisectOptions:
    given = dict(good=made.c(1), bad=made.c(len(made.commits)), command=("./t.sh",), folder=made.root)
    return BisectOptions(**{**given, **more})


def culprit(made: History) -> str | None:
    (result,) = sorted((made.root / "bisect-logs").glob("*/result.json"))[-1:]
    return json.loads(result.read_text())["culprit"]


def test_every_commit_gets_a_verdict_with_its_command(made: History) -> None:
    assert bisect(ask(made)) == 0
    verdicts = made.verdicts()
    assert culprit(made) == made.c(5)
    assert verdicts[made.c(5)]["status"] == "FAIL"
    assert verdicts[made.c(5)]["exit_code"] == 1
    assert verdicts[made.c(1)]["status"] == "PASS"
    assert all(v["command"] == ["./t.sh"] for v in verdicts.values())
    assert git(made.root, "status", "--porcelain") == "", "our folder hides itself"


# -- preconditions: exit 2, and nothing moves ------------------------------------------------


def refused(made: History, said: str, **more: Any) -> None:
    before = made.state()
    with pytest.raises(ConfigError) as caught:
        bisect(ask(made, **more))
    assert said in str(caught.value)
    assert caught.value.fix
    assert made.state() == before


def test_outside_of_a_repository_is_refused(made: History, tmp_path: Path) -> None:
    refused(made, "not in a git work tree", folder=tmp_path)


def test_a_repository_without_a_commit_is_refused(tmp_path: Path) -> None:
    empty = history(tmp_path / "empty")
    with pytest.raises(ConfigError, match="no commit"):
        bisect(BisectOptions(good="a", bad="b", command=("x",), folder=empty.root))


@pytest.mark.parametrize("staged", [True, False])
def test_changes_that_are_not_committed_are_refused(made: History, staged: bool) -> None:
    (made.root / "n").write_text("edited\n")
    if staged:
        git(made.root, "add", "n")
    refused(made, "not committed: n")
    assert (made.root / "n").read_text() == "edited\n"


def test_a_bisect_in_progress_is_refused(made: History) -> None:
    git(made.root, "bisect", "start")
    refused(made, "a bisect is in progress")


def test_a_half_done_merge_is_refused(made: History) -> None:
    (made.root / ".git/MERGE_HEAD").write_text(made.c(1) + "\n")
    refused(made, "MERGE_HEAD")


def test_dirty_submodules_are_refused(made: History, tmp_path: Path) -> None:
    library = numbered(tmp_path / "library", 2)
    git(made.root, "submodule", "--quiet", "add", str(library.root), "library")
    made.commit({})
    (made.root / "library/n").write_text("edited\n")
    refused(made, "submodules are not clean: library")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"command": ()}, "no command"),
        ({"good": None}, "GOOD and BAD are both needed"),
        ({"bad": None}, "GOOD and BAD are both needed"),
        ({"good": "no-such-ref"}, "no-such-ref"),
        ({"good": "--all"}, "is no commit here"),
        ({"good": "HEAD"}, "the same commit"),
        ({"good": "HEAD", "bad": "HEAD~1"}, "not an ancestor"),
        ({"good": "introduced", "command": ("t.sh",)}, "needs a PATH"),
        ({"good": "introduced never.sh"}, "no commit before"),
        ({"require_env": ("SUREFOOT_TEST_ABSENT",)}, "SUREFOOT_TEST_ABSENT is not set"),
        ({"metric": "loss"}, "come together"),
        ({"flaky": True, "skip_good_check": True}, "reference"),
        ({"alpha": 0.7}, "alpha"),
        ({"worse_than": float("nan"), "metric": "x"}, "finite"),
        ({"extra_args": "'open"}, "unclosed"),
        ({"rates": (0.5, 0.5), "flaky": True}, "shares of failing runs"),
        ({"command": ("/no/such/program",)}, "GOOD"),
        ({"sed": "s/a/b/", "command": ("true",)}, "no script to edit"),
        ({"sed": "s/a/b/", "command": ("surefoot", "suite", "run", "n")}, "--relax 'OLD=>NEW'"),
        ({"sed": "s/nothing-like-it/b/"}, "change nothing"),
        ({"sed": "s/unfinished"}, "are refused"),
    ],
)
def test_what_cannot_be_meant_is_refused(made: History, more: dict[str, Any], said: str) -> None:
    refused(made, said, **more)


def test_a_good_commit_that_is_bad_is_refused(made: History) -> None:
    refused(made, "is bad: exit 1", good=made.c(6))


def test_a_bad_commit_that_passes_is_nothing_to_bisect(made: History) -> None:
    refused(made, "nothing to bisect", bad=made.c(4))


# -- GOOD from history --------------------------------------------------------------------------


def test_introduced_takes_the_earliest_of_delete_add_again_and_rename(tmp_path: Path) -> None:
    made = history(tmp_path / "r")
    made.commit({"n": "1\n"})
    made.commit({"n": "2\n", "old.sh": BREAKS_AT_5})
    made.commit({"n": "3\n", "old.sh": None, "t.sh": BREAKS_AT_5})  # a rename introduces the new name
    made.commit({"n": "4\n", "t.sh": None})
    made.commit({"n": "5\n", "t.sh": BREAKS_AT_5})
    made.commit({"n": "6\n"})
    assert bisect(ask(made, good="introduced", command=("t.sh", "./t.sh"))) == 125, "the fourth cannot be tested"
    result = json.loads(next((made.root / "bisect-logs").glob("*/result.json")).read_text())
    assert set(result["candidates"]) == {made.c(4), made.c(5)}
    assert made.verdicts()[made.c(3)]["answer"] == "good"


# -- cannot tell ----------------------------------------------------------------------------------


def test_all_skipped_is_cannot_tell_with_the_candidates(made: History, capsys: pytest.CaptureFixture[str]) -> None:
    made.commit({"t.sh": "#!/bin/sh\ncase $(cat n) in 1) ;; 7) exit 1;; *) exit 125;; esac\n"})
    script = str(made.root.parent / "outside.sh")
    Path(script).write_text("#!/bin/sh\ncase $(cat n) in 1) ;; 7) exit 1;; *) exit 125;; esac\n")
    os.chmod(script, 0o755)
    assert bisect(ask(made, bad=made.c(7), command=(script,))) == 125
    out = capsys.readouterr().out
    assert "cannot tell" in out
    assert all(made.c(number) in out for number in range(2, 8))


def test_other_codes_can_be_called_cannot_tell(made: History) -> None:
    words = ("sh", "-c", "case $(cat n) in 3|4) exit 70;; esac; test $(cat n) -lt 5")
    assert bisect(ask(made, command=words)) == 0
    assert culprit(made) == made.c(3)
    assert bisect(ask(made, command=words, skip_codes=(70,))) == 125


def test_a_vote_that_is_not_decisive_is_a_skip(made: History) -> None:
    words = ("sh", "-c", "case $(cat n) in 4) test $SUREFOOT_SAMPLE -gt 2;; *) test $(cat n) -lt 5;; esac")
    assert bisect(ask(made, command=words, repeat=4)) == 125
    assert made.verdicts()[made.c(4)]["reason"] == "2 of 4 runs failed: no decisive vote"


# -- the tree ---------------------------------------------------------------------------------------


def test_what_the_command_does_to_tracked_files_never_reaches_the_next_commit(made: History) -> None:
    words = ("sh", "-c", "test $(cat n) -lt 5; code=$?; echo 1 > n; echo left > dropping; exit $code")
    assert bisect(ask(made, command=words)) == 0
    assert culprit(made) == made.c(5)
    assert made.verdicts()[made.c(5)]["changed_files"] == ["n"]
    assert (made.root / "n").read_text() == "7\n"


def test_a_file_of_the_users_in_the_way_is_never_overwritten(made: History) -> None:
    made.commit({"n": "8\n", "notes": None} if (made.root / "notes").exists() else {"n": "8\n", "notes": "tracked\n"})
    made.commit({"n": "9\n", "notes": None})
    (made.root / "notes").write_text("mine\n")
    assert bisect(ask(made, bad=made.c(9), command=("sh", "-c", "test $(cat n) -lt 9"))) == 125
    assert (made.root / "notes").read_text() == "mine\n"
    assert "cannot be checked out" in made.verdicts()[made.c(8)]["reason"]


def test_no_reset_stays_and_plain_git_can_go_home(made: History) -> None:
    assert bisect(ask(made, no_reset=True)) == 0
    assert made.state()[3], "git's books are still open"
    git(made.root, "bisect", "reset")
    assert made.state()[:2] == ("main", made.c(7))


def test_a_detached_head_comes_back_detached(made: History) -> None:
    git(made.root, "checkout", "--quiet", "--detach", made.c(3))
    before = made.state()
    assert bisect(ask(made)) == 0
    assert made.state() == before


def test_a_folder_that_some_commits_lack_is_a_skip(tmp_path: Path) -> None:
    made = history(tmp_path / "r")
    for number in range(1, 7):
        made.commit({"n": f"{number}\n", f"sub{number // 3}/keep": "x\n"})
    made.commit({"sub0/keep": None, "n": "7\n"})
    git(made.root, "checkout", "--quiet", made.c(6))
    folder = made.root / "sub0"
    assert bisect(ask(made, folder=folder, bad=made.c(6), command=("sh", "-c", "test $(cat ../n) -lt 5"))) == 0
    assert culprit(made) == made.c(5)


# -- logs -------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(made: History) -> Path:
    assert bisect(ask(made, save_log=True)) == 0
    (log,) = made.logs()
    return log


def test_a_replay_that_already_concludes_prints_the_culprit(made: History, saved: Path) -> None:
    assert bisect(ask(made, good=None, bad=None, replay=saved, command=("false",))) == 0


def test_the_saved_log_suits_plain_git_too(made: History, saved: Path) -> None:
    git(made.root, "bisect", "replay", str(saved))
    assert f"# first bad commit: [{made.c(5)}]" in git(made.root, "bisect", "log")
    git(made.root, "bisect", "reset")


def test_an_edited_log_is_followed(made: History, saved: Path) -> None:
    lines = saved.read_text().splitlines()
    edited = [line.replace("git bisect bad", "git bisect skip") if made.c(5) in line else line for line in lines]
    kept = [line for line in edited if not (line.startswith("git bisect good") and made.c(4) in line)]
    saved.write_text("\n".join([*kept, f"git bisect skip {made.c(6)}", ""]))
    assert bisect(ask(made, good=None, bad=None, replay=saved)) == 125
    newest = max((made.root / "bisect-logs").glob("*/result.json"), key=lambda path: path.stat().st_mtime_ns)
    result = json.loads(newest.read_text())
    assert set(result["candidates"]) == {made.c(5), made.c(6)}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "not a log\n",
        "git bisect start\n",
        "git bisect start 'BAD' 'GOOD'\ngit bisect good 1111111111111111111111111111111111111111\n",
        "git bisect start 'BAD' 'GOOD'\ngit bisect frobnicate HEAD\n",
        "git bisect start 'BAD' 'GOOD'\ngit bisect good BAD\n",
        "git bisect start 'GOOD' 'BAD'\n",
        "git bisect start 'BAD' 'GOOD'\nrm -rf x\n",
        "git bisect start 'BAD' 'GOOD\n",
        "# surefoot: sample {\"commit\": 3}\ngit bisect start 'BAD' 'GOOD'\n",
    ],
)
def test_a_log_that_cannot_be_meant_is_refused_and_nothing_moves(made: History, tmp_path: Path, text: str) -> None:
    log = tmp_path / "edited.log"
    log.write_text(text.replace("BAD", made.c(7)).replace("GOOD", made.c(1)))
    refused(made, "edited.log", good=None, bad=None, replay=log)
    refused(made, "cannot be read", replay=tmp_path / "missing.log")


def test_an_abort_is_not_a_verdict(made: History) -> None:
    before = made.state()
    with pytest.raises(StateError, match="aborted"):
        bisect(ask(made, command=("sh", "-c", "test $(cat n) -eq 4 && exit 137; test $(cat n) -lt 5")))
    assert made.state() == before
    assert made.verdicts()[made.c(4)]["status"] == "ERROR"


# -- overrides ---------------------------------------------------------------------------------------------


def test_sed_clauses_change_the_script_for_the_run_only_and_are_on_record(made: History) -> None:
    assert bisect(ask(made, sed="s/-lt 5/-lt 3/")) == 0
    assert culprit(made) == made.c(3)
    assert (made.root / "t.sh").read_text() == BREAKS_AT_5
    assert {v["overrides"]["sed_clauses"] for v in made.verdicts().values()} == {"s/-lt 5/-lt 3/"}


def test_an_untracked_script_is_restored_by_us_with_a_warning(
    made: History, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "outside.sh"
    script.write_text(BREAKS_AT_5)
    assert bisect(ask(made, command=("sh", str(script)), sed="s/-lt 5/-lt 3/")) == 0
    assert culprit(made) == made.c(3)
    assert script.read_text() == BREAKS_AT_5
    assert "warning" in capsys.readouterr().err


def test_extra_arguments_are_appended_recorded_and_a_rejected_one_is_a_skip(made: History) -> None:
    words = ("sh", "-c", 'test "$2" = "a b" || exit 9; test $(cat n) -eq 4 && exit 2; test $(cat n) -lt 5', "x")
    assert bisect(ask(made, command=words, extra_args="--name 'a b'")) == 125
    verdicts = made.verdicts()
    assert verdicts[made.c(4)]["answer"] == "skip"
    assert all(v["overrides"]["extra_script_args"] == ["--name", "a b"] for v in verdicts.values())


def test_structured_overrides_reach_the_command_and_every_verdict(made: History) -> None:
    look = "import json,os,sys; told=json.loads(os.environ['SUREFOOT_OVERRIDES']); n=int(open('n').read())"
    words = (sys.executable, "-S", "-c", f"{look}; sys.exit(n >= int(told['set'][0].split('=')[1]))")
    assert bisect(ask(made, command=words, sets=("limit=6",), drop_checks=("min(x) > 0",))) == 0
    assert culprit(made) == made.c(6)
    assert all(v["overrides"]["drop_check"] == ["min(x) > 0"] for v in made.verdicts().values())


# -- a metric ---------------------------------------------------------------------------------------------------

TRAINER = """#!/bin/sh
noise=$((SUREFOOT_SEED % 41 - 20))
level=90; test $(cat n) -ge 9 && level=60
echo "{\\"step\\": 1, \\"reward\\": $((level + noise))}" > "$SUREFOOT_BISECT_DIR/metrics.jsonl"
"""


def test_a_noisy_metric_is_traced_to_its_commit(tmp_path: Path) -> None:
    made = numbered(tmp_path / "r", 14, TRAINER)
    assert bisect(ask(made, metric="train/reward", worse_than=75.0)) == 0
    assert culprit(made) == made.c(9)


def test_a_margin_around_the_limit_needs_fewer_runs(tmp_path: Path) -> None:
    made = numbered(tmp_path / "r", 14, TRAINER)
    assert bisect(ask(made, metric="train/reward", worse_than=75.0, margin=30.0)) == 0
    assert culprit(made) == made.c(9)


@pytest.mark.parametrize(("limit", "said"), [(99999.0, "GOOD is already worse"), (-99999.0, "nothing to bisect")])
def test_ends_on_the_wrong_side_of_the_limit_are_refused(tmp_path: Path, limit: float, said: str) -> None:
    refused(numbered(tmp_path / "r", 10, TRAINER), said, metric="train/reward", worse_than=limit)


@pytest.mark.parametrize("line", ["", '{"step": 1, "reward": NaN}', '{"step": 1, "other": 1}', "torn {"])
def test_missing_or_non_finite_metrics_are_never_a_level(tmp_path: Path, line: str) -> None:
    script = f"#!/bin/sh\necho '{line}' > $SUREFOOT_BISECT_DIR/metrics.jsonl\n"
    refused(numbered(tmp_path / "r", 3, script), "GOOD cannot be tested", metric="reward", worse_than=1.0)


def test_metrics_that_another_run_left_are_not_taken_for_a_result(tmp_path: Path) -> None:
    made = numbered(tmp_path / "r", 3, "#!/bin/sh\ntrue\n")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "reward": 1}\n')
    refused(made, "was not written by this run", metric="reward", worse_than=1.0, metrics_at="../metrics.jsonl")


def test_flaky_ends_that_do_not_differ_are_refused(tmp_path: Path) -> None:
    made = numbered(tmp_path / "r", 4, "#!/bin/sh\ntest $((SUREFOOT_SAMPLE % 2)) -eq 0\n")
    refused(made, "cannot be told apart", flaky=True, max_samples=24)


def test_a_search_that_ran_out_of_runs_goes_on_from_its_log_with_new_seeds(tmp_path: Path) -> None:
    made = numbered(tmp_path / "r", 14, TRAINER)
    noisy: dict[str, Any] = dict(metric="train/reward", worse_than=75.0, margin=30.0)
    assert bisect(ask(made, **noisy, max_samples=8)) == 125
    first = {sample["seed"] for verdict in made.verdicts().values() for sample in verdict["samples"]}
    (log,) = made.logs()
    assert bisect(ask(made, good=None, bad=None, replay=log, **noisy)) == 0
    assert culprit(made) == made.c(9)
    second = [sample["seed"] for verdict in made.verdicts().values() for sample in verdict["samples"]]
    assert second, "it had to go on"
    assert not first & set(second), "a seed that comes twice is one sample counted twice"


def test_our_own_commands_are_bad_only_when_they_say_so(made: History, tmp_path: Path) -> None:
    """`surefoot check` exits 3 where there are no metrics: that commit cannot be judged."""
    fake = tmp_path / "surefoot"
    fake.write_text("#!/bin/sh\ncase $(cat n) in 4) exit 3;; esac\ntest $(cat n) -lt 6\n")
    fake.chmod(0o755)
    assert bisect(ask(made, command=(str(fake), "check", "runs"))) == 0
    assert culprit(made) == made.c(6)
    assert made.verdicts()[made.c(4)]["reason"] == "exit 3: surefoot gave no verdict"


def test_an_edited_script_is_put_back_when_a_stop_comes(tmp_path: Path) -> None:
    script = tmp_path / "t.sh"
    script.write_text("one\n")
    seen = []

    def run() -> None:
        with edited(script, "s/one/two/"):
            seen.append(script.read_text())
            raise StoppedError("a", "b", "c")

    with pytest.raises(StoppedError):
        run()
    assert [*seen, script.read_text()] == ["two\n", "one\n"]


@pytest.mark.parametrize(
    ("command", "appended"),
    [
        (("surefoot", "suite", "run", "nightly"), [*CHANGES, "--out", OUT, "--", "--last"]),
        ((sys.executable, "-m", "surefoot", "suite", "run", "n"), [*CHANGES, "--out", OUT, "--", "--last"]),
        (("surefoot", "suite", "run", "n", "--out", "mine"), [*CHANGES, "--", "--last"]),
        (("surefoot", "suite", "run", "n", "--out=mine"), [*CHANGES, "--", "--last"]),
        (("bash", "surefoot", "suite", "run"), ["--last"]),
    ],
)
def test_a_suite_gets_the_structured_overrides_as_options(command: tuple[str, ...], appended: list[str]) -> None:
    options = BisectOptions(command=command, sets=("a=1",), drop_checks=("x > 0",), reason="why", extra_args="--last")
    assert argv(options) == [*command, *appended]


def test_overrides_of_a_suite_stand_before_the_words_of_its_trainer() -> None:
    words = ("surefoot", "suite", "run", "n", "--", "lr=1")
    assert argv(BisectOptions(command=words, sets=("a=1",), extra_args="--last")) == [
        *("surefoot", "suite", "run", "n", "--set", "a=1", "--out", OUT, "--", "lr=1", "--last")
    ]


@pytest.mark.parametrize(
    ("code", "words", "more", "answer"),
    [
        (1, ("surefoot", "check"), {}, "bad"),
        (70, ("surefoot", "suite", "run", "n"), {}, "skip"),
        (70, ("surefoot", "suite", "run", "n"), {"crash_is_bad": True}, "bad"),
        (74, ("surefoot", "suite", "run", "n"), {"crash_is_bad": True}, "skip"),
        (76, ("surefoot", "suite", "run", "n"), {"crash_is_bad": True}, "skip"),
        (2, ("surefoot", "suite", "run", "n"), {"crash_is_bad": True}, "skip"),
        (75, ("surefoot", "suite", "run", "n"), {"crash_is_bad": True}, "skip"),
        (-11, ("./t.sh",), {"crash_is_bad": True}, "bad"),
        (139, ("./t.sh",), {"crash_is_bad": True}, "bad"),
        (-9, ("./t.sh",), {"crash_is_bad": True}, "abort"),
        (137, ("./t.sh",), {"crash_is_bad": True}, "abort"),
        (143, ("./t.sh",), {"crash_is_bad": True}, "abort"),
        (-11, ("./t.sh",), {}, "abort"),
    ],
)
def test_a_crash_is_blamed_only_when_asked_for_and_the_surroundings_never(
    code: int, words: tuple[str, ...], more: dict[str, Any], answer: str
) -> None:
    options = BisectOptions(command=words, **more)
    if answer == "abort":
        with pytest.raises(AbortError):
            classify(code, options)
    else:
        assert classify(code, options)[0] == answer


@pytest.mark.parametrize(
    ("verdicts", "failed"),
    [
        ({"s/a": ("FAIL", "now"), "s/b": ("PASS", "now")}, "a is FAIL: too low"),
        ({"s/a/seed_2": ("FAIL", "now")}, "a is FAIL: too low"),
        ({"s/a": ("FAIL", "earlier"), "s/b": ("ERROR", "now")}, ""),
        ({"s/a": ("INCOMPLETE", "now")}, ""),
        ({"s/a.previous": ("FAIL", "now")}, ""),
        ({}, ""),
    ],
)
def test_exit_1_of_a_suite_needs_a_verdict_of_this_very_commit(
    tmp_path: Path, verdicts: dict[str, tuple[str, str]], failed: str
) -> None:
    for name, (status, commit) in verdicts.items():
        folder = tmp_path / name
        folder.mkdir(parents=True)
        record = {"recipe": name.split("/")[1], "status": status, "commit": commit, "reasons": ["4 of 4", "too low"]}
        for file in ("verdict.json", "provenance.json"):
            (folder / file).write_text(json.dumps(record))
    assert look(tmp_path, "now").failed == failed


def test_a_torn_verdict_blames_nobody(tmp_path: Path) -> None:
    (tmp_path / "s/a").mkdir(parents=True)
    for file in ("verdict.json", "provenance.json"):
        (tmp_path / "s/a" / file).write_text('{"recipe": "a", "status": "FAIL", "commit": "now"')
    assert look(tmp_path, "now") == SuiteVerdicts(0)


# -- the environment of a commit ------------------------------------------------------------------------------------


def test_an_environment_is_built_once_for_each_lock_file_and_a_failed_build_is_a_skip(
    made: History, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import surefoot.harness.bisect.tester as environment

    monkeypatch.setattr(environment.sys, "executable", "/bin/true")  # `python -m venv` is not what is tested here
    made = history(tmp_path / "locked")
    for number in range(1, 13):
        lock = "broken" if number == 6 else f"{number // 5}"
        made.commit({"n": f"{number}\n", "requirements.txt": f"{lock}\n"})
    count = tmp_path / "built"
    build = f"sh -c 'cat requirements.txt >> {count}; mkdir -p $VIRTUAL_ENV; ! grep -q broken requirements.txt'"
    words = ("sh", "-c", "test -d $VIRTUAL_ENV && test $SUREFOOT_REBUILD = 1 && test $(cat n) -lt 8")
    assert bisect(ask(made, command=words, rebuild=build, venv_cache=tmp_path / "cache")) == 0
    assert culprit(made) == made.c(8)
    assert len(set(count.read_text().split())) == len(count.read_text().split()), "no content was built twice"

"""A run that is over is left as it is, to the byte; and `--resume RUN max_steps=N` makes one longer.

A run of three steps that is made six steps long is the run of six steps, bit for bit, where nothing depends on the
length: weights, optimiser, numbers, rollouts and account.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from kill_runs import JUMPY, Bench, Case, differences, facts

from surefoot.storage.files import Journal

STEPS = Case("six steps", {"eval_steps": 3, "save_steps": 2, "max_steps": 6})
SHORT = dataclasses.replace(STEPS, name="three steps", keys=STEPS.keys | {"max_steps": 3})
LINEAR = Case(
    "linear", {"eval_steps": 2, "save_steps": 0, "max_steps": 4, "lr_scheduler_type": "linear", "learning_rate": 1e-3}
)
AIMING = Case("aims high", {"max_steps": 2, "target_metric": "eval_reward", "target_value": 9.0}, code=1)
FIVE = {"max_steps": 5, "eval_steps": 4, "save_steps": 4, "save_best": False}
STOPPED = Case("guard stops", {"eval_steps": 1, "max_steps": 20, "save_steps": 0}, guard=JUMPY, code=79)


def files(run: Path) -> dict[str, tuple[bytes, int]]:
    """Every file and folder of a run, with its bytes and the moment of its last change."""
    return {
        str(path.relative_to(run)): (path.read_bytes() if path.is_file() else b"", path.stat().st_mtime_ns)
        for path in [run, *sorted(run.rglob("*"))]
    }


def finished(bench: Bench, case: Case) -> Path:
    """A folder with a run that is over; made once, copied for everybody."""
    known: dict[str, Path] = bench.__dict__.setdefault("finished", {})
    if str(case) not in known:
        folder = bench.folder(case)
        ended = bench.train(folder)
        assert ended.code == case.code, ended.said
        known[str(case)] = folder.with_name(f"{folder.name}, finished")
        shutil.copytree(folder, known[str(case)], symlinks=True)
        known[f"{case} at"] = folder
    folder = known[f"{case} at"]
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(known[str(case)], folder, symlinks=True)
    return folder


def changed(bench: Bench, case: Case, *words: str, **more: Any) -> tuple[set[str], int, str]:
    """What a resume of the finished run changed, how it ended, and what it said."""
    folder = finished(bench, case)
    before = files(folder / "run")
    ended = bench.resume(folder, *words, **more)
    after = files(folder / "run")
    return {n for n in before.keys() | after.keys() if before.get(n) != after.get(n)}, ended.code, ended.said


@pytest.mark.parametrize("case", [SHORT, AIMING, STOPPED], ids=str)
def test_a_finished_run_gives_its_verdict_again_and_not_a_byte_of_it_changes(bench: Bench, case: Case) -> None:
    found, code, said = changed(bench, case)
    assert (found, code) == (set(), case.code), said
    status = {0: "PASS", 1: "FAIL", 79: "FAIL"}[case.code]
    assert "nothing in it was changed" in said
    assert f"{status}  after " in said
    verdict = json.loads((finished(bench, case) / "run" / "verdict.json").read_text())
    assert all(reason in said for reason in verdict["reasons"])
    assert ("does not go on" in said) == (case is STOPPED)
    found, code, _ = changed(bench, case, f"max_steps={verdict['planned_steps']}")
    assert (found, code) == (set(), case.code), "its own length is no other"


def test_a_report_that_a_full_disk_kept_from_a_finished_run_is_written_when_it_is_asked_again(bench: Bench) -> None:
    report = finished(bench, SHORT) / "run" / "report.html"
    before = files(report.parent)
    report.unlink()
    ended = bench.resume(report.parent.parent)
    assert (ended.code, files(report.parent).keys()) == (0, before.keys()), ended.said
    assert "its report, which was lacking, was written" in ended.said
    assert "PASS" in report.read_text(encoding="utf-8")


@pytest.mark.turns(3, 0)
def test_planted_resume_that_does_not_ask_whether_a_run_is_over_is_seen(bench: Bench) -> None:
    found, code, _ = changed(bench, SHORT, before=[("plant", "never_finished")])
    assert code == 0
    assert {"timeline.jsonl", "verdict.json"} <= found


@pytest.mark.parametrize(
    ("case", "words", "code", "said"),
    [
        (SHORT, ["max_steps=2"], 2, "3 steps of"),
        (SHORT, ["max_steps=0"], 2, "--resume takes max_steps=N and nothing else"),
        (SHORT, ["max_steps=-5"], 2, "--resume takes max_steps=N and nothing else"),
        (SHORT, ["max_steps=ten"], 2, "--resume takes max_steps=N and nothing else"),
        (SHORT, ["max_steps=9", "learning_rate=1"], 2, "--resume takes max_steps=N and nothing else"),
        (SHORT, ["learning_rate=1"], 2, "--resume takes max_steps=N and nothing else"),
        (SHORT, ["num_steps=9"], 2, "--resume takes max_steps=N and nothing else"),
        (STOPPED, ["max_steps=40"], 3, "a run that the guard stopped does not go on"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_changes(
    bench: Bench, case: Case, words: list[str], code: int, said: str
) -> None:
    found, ended, text = changed(bench, case, *words)
    assert ended == code, text
    assert said in text
    assert found <= {"."}, "the lock came and went"


def test_three_steps_that_become_six_are_the_run_of_six_steps(bench: Bench) -> None:
    folder = finished(bench, SHORT)
    before = (folder / "run" / "config.toml").read_text().splitlines()
    ended = bench.resume(folder, "max_steps=6")
    assert "resumed after step 3 of 6" in ended.said, ended.said
    assert "max_steps is now 6, it was 3; the learning rate of step 4 is 0.01 (constant over 6 steps)" in ended.said
    after = (folder / "run" / "config.toml").read_text().splitlines()
    assert [(a, b) for a, b in zip(before, after, strict=True) if a != b] == [("max_steps = 3", "max_steps = 6")]
    verdict = json.loads((folder / "run" / "verdict.json").read_text())
    assert verdict["extensions"] == [{"step": 3, "from": 3, "to": 6, "learning_rate": [0.01, 0.01]}]
    bench.check(STEPS, folder, ended)


def test_a_run_that_was_killed_is_made_longer_and_a_longer_one_that_was_killed_goes_on(bench: Bench) -> None:
    folder = bench.folder(SHORT)
    assert bench.train(folder, failpoints="loop.after_learn=kill@2").code == -signal.SIGKILL
    ended = bench.resume(folder, "max_steps=5", failpoints="loop.after_learn=kill@2")
    assert ended.code == -signal.SIGKILL, ended.said
    ended = bench.resume(folder, "max_steps=6", failpoints="loop.before_log=kill@2")
    assert ended.code == -signal.SIGKILL, ended.said
    bench.check(STEPS, folder, bench.resume(folder))


def test_a_new_length_is_a_new_schedule_from_the_next_step_and_the_jump_is_told(bench: Bench) -> None:
    folder = finished(bench, LINEAR)
    ended = bench.resume(folder, "max_steps=8")
    assert ended.code == 0, ended.said
    told = (
        "max_steps is now 8, it was 4; the learning rate of step 4 was 0.00025, of step 5 it is 0.0005 (linear over 8"
    )
    assert told in ended.said
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    rates = {row["step"]: row["learning_rate"] for row in rows if "loss" in row}
    old = {step: 1e-3 * (1 - (step - 1) / 4) for step in range(1, 5)}
    new = {step: 1e-3 * (1 - (step - 1) / 8) for step in range(5, 9)}
    assert rates == pytest.approx(old | new)
    verdict = json.loads((folder / "run" / "verdict.json").read_text())
    assert verdict["extensions"][0]["learning_rate"] == pytest.approx([0.00025, 0.0005])


def test_a_run_may_be_made_shorter_than_planned_but_not_than_done(bench: Bench) -> None:
    folder = bench.folder(STEPS)
    assert bench.train(folder, failpoints="loop.before_log=kill@2").code == -signal.SIGKILL
    ended = bench.resume(folder, "max_steps=1")
    assert ended.code == 2, ended.said
    ended = bench.resume(folder, "max_steps=3")
    assert ended.code == 0, ended.said
    assert differences(bench.whole(SHORT).facts, facts(folder / "run")) == []


@pytest.mark.parametrize("logging", [1, 2])
def test_an_old_end_stays_what_it_was_when_the_run_goes_back_behind_it(bench: Bench, logging: int) -> None:
    """The old last step was logged and looked at; going back behind it, it is again."""
    case = Case(f"five {logging}", FIVE | {"logging_steps": logging})
    folder = finished(bench, case)
    assert bench.resume(folder, "max_steps=8").code == 0
    whole = facts(folder / "run")
    assert [row["step"] for row in whole["rows"] if "eval_n" in row] == [0, 4, 5, 8]
    folder = finished(bench, case)
    ended = bench.resume(folder, "max_steps=8", failpoints="loop.before_log=kill@1")
    assert ended.code == -signal.SIGKILL, ended.said
    (folder / "run" / "checkpoints" / "step_5" / "model.safetensors").write_bytes(b"damaged")
    ended = bench.resume(folder)
    assert ended.code == 0, ended.said
    assert "resumed after step 4 of 8" in ended.said
    assert [line for line in differences(whole, facts(folder / "run")) if not line.startswith("left over")] == []


@pytest.mark.turns(3, 1)
def test_planted_old_end_that_is_forgotten_is_seen(bench: Bench) -> None:
    case = Case("five 2", FIVE | {"logging_steps": 2})
    ended = bench.resume(finished(bench, case), "max_steps=8", before=[("plant", "forgets_the_old_end")])
    assert ended.code == 3, ended.said
    assert "step 5 is missing or too many" in ended.said


@pytest.mark.turns(3, 2)
def test_planted_length_that_is_written_before_the_journal_knows_is_seen(bench: Bench) -> None:
    """Killed in between, the config is one that nobody journaled, and the run cannot go on."""
    folder = finished(bench, SHORT)
    ended = bench.resume(
        folder, "max_steps=6", failpoints="extend.journaled=kill@1", before=[("plant", "config_first")]
    )
    assert ended.code == -signal.SIGKILL
    with pytest.raises(AssertionError, match="exit 3"):
        bench.check(STEPS, folder, bench.resume(folder))
    folder = finished(bench, SHORT)
    assert bench.resume(folder, "max_steps=6", failpoints="extend.journaled=kill@1").code == -signal.SIGKILL
    assert "max_steps = 3\n" in (folder / "run" / "config.toml").read_text()
    bench.check(STEPS, folder, bench.resume(folder))  # without a word about the length: it is journaled


def test_an_edited_config_is_refused_before_and_after_the_run_was_made_longer(bench: Bench) -> None:
    folder = finished(bench, SHORT)
    assert bench.resume(folder, "max_steps=6", failpoints="loop.before_log=kill@1").code == -signal.SIGKILL
    config = folder / "run" / "config.toml"
    kept = config.read_text()
    config.write_text(kept.replace("max_steps = 6", "max_steps = 7"))
    ended = bench.resume(folder)
    assert ended.code == 3, ended.said
    assert "config.toml changed since the run began" in ended.said
    config.write_text(kept.replace("max_steps = 6", "max_steps = 3"))
    with Journal.open(folder / "run" / "journal" / "ledger.journal", readonly=True) as journal:
        assert [e.record["to"] for e in journal.records() if e.record["event"] == "run.extended"] == [6]
    bench.check(STEPS, folder, bench.resume(folder))  # the old text: an extension that was not finished


def test_a_curriculum_over_the_whole_run_keeps_its_length(bench: Bench) -> None:
    keys = {"max_steps": 3, "eval_steps": 0, "curriculum.kind": "levels", "curriculum.levels": ["easy", "hard"],
            "curriculum.start": [1.0, 0.0], "curriculum.end": [0.0, 1.0]}  # fmt: skip
    case = Case("levels", keys, rows=60)
    folder = bench.folder(case)
    rows = [json.loads(line) for line in (folder / "sums.jsonl").read_text().splitlines()]
    levelled = [row | {"complexity": "easy" if n % 2 else "hard"} for n, row in enumerate(rows)]
    (folder / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in levelled))
    ended = bench.train(folder)
    assert ended.code == 0, ended.said
    ended = bench.resume(folder, "max_steps=6")
    assert ended.code == 0, ended.said
    assert "the curriculum keeps its length, curriculum.steps = 3" in ended.said
    assert "steps = 3\n" in (folder / "run" / "config.toml").read_text()
    told = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    shares = {row["step"]: row["curriculum/share/hard"] for row in told if "loss" in row}
    assert shares[1] == 0.0
    assert [shares[step] for step in (4, 5, 6)] == [1.0, 1.0, 1.0]

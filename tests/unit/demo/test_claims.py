"""Each claim of the demo is false of a pair of runs that did not go as described, and of missing evidence."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from surefoot.demo.grader import lenient
from surefoot.demo.hack import RECIPE, DemoRun, curves_text, hack, judge, onset, read_half
from surefoot.errors import StateError

REWARDS = [0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0]
HELDOUT = [0.3, 0.4, 0.5, 0.6, 0.4, 0.2, 0.1, 0.0, 0.0]
STOP = 6


def run(folder: Path, steps: int, *, code: int, status: str, guard: dict[str, Any] | None) -> DemoRun:
    """A run folder as `surefoot train` leaves it, one evaluation per step."""
    (folder / "rollouts").mkdir(parents=True)
    for step in range(1, steps + 1):
        row = {"text": str(step), "seconds": 0.1 * steps, "grading_seconds": {"score": 0.01 * steps}}
        (folder / f"rollouts/step_{step}.jsonl").write_text(json.dumps(row) + "\n")
    rows: list[dict[str, float]] = [{"step": 0, "eval_accuracy": HELDOUT[0], "timing/eval": 1.0}]
    for step in range(1, steps + 1):
        rows += [{"step": step, "reward": REWARDS[step - 1], "step_time": float(steps)}]
        rows += [{"step": step, "eval_accuracy": HELDOUT[step]}]
    (folder / "config.toml").write_text("")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    best = {"step": 3, "metric": "eval_accuracy", "value": 0.6, "checkpoint": "checkpoints/step_3"}
    checkpoint = folder / "checkpoints/step_3"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("{}")
    reasons = ["worse than the model you started with: eval_accuracy 0.3 -> 0"] if code == 1 else ["as planned"]
    verdict = {
        "status": status, "reasons": reasons, "planned_steps": 8, "executed_steps": steps, "best": best, "guard": guard,
    }  # fmt: skip
    (folder / "verdict.json").write_text(json.dumps(verdict))
    return read_half(folder, code, folder / "log")


@pytest.fixture
def halves(tmp_path: Path) -> tuple[DemoRun, DemoRun]:
    fired = {"fired": True, "step": STOP, "rule": "decline", "reason": "held-out fell"}
    return (
        run(tmp_path / "unguarded", 8, code=1, status="FAIL", guard=None),
        run(tmp_path / "guarded", STOP, code=79, status="FAIL", guard=fired),
    )


def failed(unguarded: DemoRun, guarded: DemoRun) -> list[str]:
    return [claim.text for claim in judge(unguarded, guarded) if not claim.held]


def with_row(half: DemoRun, where: int, **values: float) -> DemoRun:
    rows = [dict(row) for row in half.rows]
    rows[where] |= values
    return replace(half, rows=tuple(rows))


def with_heldout(half: DemoRun, values: list[float]) -> DemoRun:
    left = iter(values)
    rows = [row | {"eval_accuracy": next(left)} if "eval_accuracy" in row else row for row in half.rows]
    return replace(half, rows=tuple(rows))


def test_every_claim_holds_of_a_run_that_collapsed_and_one_that_was_stopped(halves: tuple[DemoRun, DemoRun]) -> None:
    assert failed(*halves) == []
    assert onset(halves[0]) == 3


def test_a_last_digit_that_differs_is_not_bit_equal(halves: tuple[DemoRun, DemoRun]) -> None:
    (text,) = failed(halves[0], with_row(halves[1], 1, reward=0.3 + 1e-16 + 5e-17))
    assert text.startswith("bit-equal until step 6")


def test_clocks_and_the_guards_own_numbers_may_differ(halves: tuple[DemoRun, DemoRun]) -> None:
    assert failed(halves[0], with_row(halves[1], 2, **{"timing/eval": 9.0, "killswitch/fire": 0.0})) == []


def test_one_other_rollout_is_not_bit_equal(halves: tuple[DemoRun, DemoRun]) -> None:
    (halves[1].folder / "rollouts/step_2.jsonl").write_text('{"text": "3"}\n')
    assert [text[:9] for text in failed(*halves)] == ["bit-equal"]


def test_a_step_without_rollouts_is_not_bit_equal(halves: tuple[DemoRun, DemoRun]) -> None:
    for half in halves:
        (half.folder / "rollouts/step_2.jsonl").write_text("")
    assert [text[:9] for text in failed(*halves)] == ["bit-equal"]


def test_a_rollout_file_that_is_missing_is_not_bit_equal(halves: tuple[DemoRun, DemoRun]) -> None:
    (halves[0].folder / "rollouts/step_2.jsonl").unlink()
    assert [text[:9] for text in failed(*halves)] == ["bit-equal"]


def test_a_guard_that_never_fires_fails_the_demo(halves: tuple[DemoRun, DemoRun], tmp_path: Path) -> None:
    asleep = run(tmp_path / "asleep", 8, code=0, status="PASS", guard={"fired": False, "step": None})
    texts = failed(halves[0], asleep)
    assert any("stopped the same run" in text for text in texts)
    assert any("never stopped" in text for text in texts)


@pytest.mark.parametrize(
    "changes",
    [
        {"status": "PASS"},
        {"executed_steps": 7},
        {"reasons": ["eval_accuracy is 0, below the target 0.85", "worse than the model you started with"]},
        {"reasons": []},
    ],
    ids=str,
)
def test_a_run_without_the_guard_that_is_not_called_worse_fails_the_demo(
    halves: tuple[DemoRun, DemoRun], changes: dict[str, Any]
) -> None:
    (text,) = failed(replace(halves[0], verdict=halves[0].verdict | changes), halves[1])
    assert text.startswith("without the guard all 8 steps ran")
    (text,) = failed(replace(halves[0], code=0), halves[1])
    assert text.startswith("without the guard all 8 steps ran")


def test_a_stop_before_the_onset_is_a_false_alarm(halves: tuple[DemoRun, DemoRun]) -> None:
    early = replace(halves[1], verdict=halves[1].verdict | {"guard": {"fired": True, "step": 2, "reason": "held-out"}})
    assert any("evaluations after the onset" in text for text in failed(halves[0], early))


def test_a_stop_that_comes_after_eleven_evaluations_is_too_late(
    halves: tuple[DemoRun, DemoRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("surefoot.demo.hack.SOON", 2)
    assert any("evaluations after the onset" in text for text in failed(*halves))


def test_a_run_that_only_got_better_shows_no_collapse(halves: tuple[DemoRun, DemoRun]) -> None:
    rising = with_heldout(halves[0], [0.1 * k for k in range(9)])
    assert any("collapsed" in text for text in failed(rising, halves[1]))


def test_a_run_that_never_learned_had_nothing_to_lose(halves: tuple[DemoRun, DemoRun]) -> None:
    falling = with_heldout(halves[0], [0.6, 0.6, 0.6, 0.61, 0.4, 0.2, 0.1, 0.0, 0.0])
    assert any("collapsed" in text for text in failed(falling, halves[1]))


def test_a_reward_that_does_not_climb_fails(halves: tuple[DemoRun, DemoRun]) -> None:
    flat = replace(halves[0], rows=tuple(row | {"reward": 0.3} if "reward" in row else row for row in halves[0].rows))
    assert any("the reward climbed" in text for text in failed(flat, halves[1]))


def test_a_best_checkpoint_that_is_gone_fails(halves: tuple[DemoRun, DemoRun]) -> None:
    (halves[1].folder / "checkpoints/step_3/manifest.json").unlink()
    assert [text[:28] for text in failed(*halves)] == ["the best checkpoint was kept"]


def test_empty_verdicts_hold_no_claim_about_them(halves: tuple[DemoRun, DemoRun]) -> None:
    bare = [replace(half, verdict={}) for half in halves]
    assert len(failed(*bare)) == 5, "only what the curves show is left"


def test_a_run_without_a_verdict_or_a_curve_is_an_error(halves: tuple[DemoRun, DemoRun]) -> None:
    folder = halves[0].folder
    (folder / "metrics.jsonl").write_text('{"step": 0, "eval_accuracy": 0.3}\n')
    with pytest.raises(StateError, match="1 evaluation"):
        read_half(folder, 70, folder / "log")
    (folder / "verdict.json").write_text("{")
    with pytest.raises(StateError, match="exit code 70 and left nothing to judge"):
        read_half(folder, 70, folder / "log")


def test_curves_show_both_series_with_their_ends(halves: tuple[DemoRun, DemoRun]) -> None:
    reward, heldout = curves_text(halves[0]).splitlines()
    assert reward.split()[:2] == ["reward", "0.300"]
    assert "1.000" in reward
    assert heldout.index("█") < heldout.index("▁"), "it fell"


def test_a_folder_with_something_in_it_is_refused_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(StateError, match="is there already"):
        hack(seed=0, out=tmp_path, quick=True, say=lambda text: pytest.fail(text))
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_the_graders_mistake_pays_for_parts_and_for_nothing_at_all() -> None:
    assert lenient(["132", " 132 ", "122", "13", "", "132!"], ["132"] * 6) == [1.0, 1.0, 0.0, 1.0, 1.0, 0.0]


def test_the_recipe_judges_held_out_tasks_by_the_whole_answer() -> None:
    from surefoot.config.load import load_config

    config = load_config(RECIPE).config
    assert config.eval_metric == "exact"
    assert config.guard.mode == "strict"
    assert list(config.problems()) == []

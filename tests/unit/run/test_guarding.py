"""The guard as a run assembles it: calibrated once, judged by the first real value."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from surefoot.config import Config
from surefoot.config.schedule import Answered
from surefoot.errors import ConfigError, InputError, StateError
from surefoot.guards.collapse import HeldOutGuard
from surefoot.run.guarding import calibration, calibration_lines, healthy_rows, judge_first_value, make_guard
from surefoot.storage.files import Journal

EVALUATIONS = 30


def healthy(
    folder: Path, *, evaluations: int = EVALUATIONS, status: str = "PASS", fired: bool = False, **row: Any
) -> Path:
    """A finished run: reward and held-out rise together, KL to 0.1."""
    folder.mkdir()
    (folder / "config.toml").write_text("")
    lines: list[dict[str, Any]] = []
    for t in range(evaluations):
        if t:
            lines.append({"step": t, "reward": 0.3 + 0.01 * t, "kl": 0.1 * t / evaluations})
        share = {"eval_n": 100, "eval_right": 30 + t, "eval_accuracy": 0.3 + 0.01 * t}
        lines.append({"step": t, "eval_reward": 0.3} | share | row)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "verdict.json").write_text(json.dumps({"status": status, "guard": {"fired": fired}}))
    return folder


def keys(**guard: Any) -> Config:
    return Config(model="m", tasks="t", beta=0.1, guard={"kl_hard_stop": 1.0, "calibrate_from": "good", **guard})


def found(config: Config, base: Path, journal: Journal | None = None) -> dict[str, float]:
    return calibration(config, base, heldout=Answered(40), metric="eval_accuracy", journal=journal)


@pytest.mark.config_key("guard.calibrate_from")
def test_a_healthy_run_tightens_the_limits_of_the_guard_that_a_run_gets(tmp_path: Path) -> None:
    healthy(tmp_path / "good")
    tighter = found(keys(), tmp_path)
    assert tighter.keys() == {"kl_hard_stop"}
    assert 0.05 < tighter["kl_hard_stop"] < 0.15
    guard = make_guard(keys(), Answered(40), "eval_accuracy", tighter)
    assert guard is not None
    assert guard.limits.kl_hard_stop == tighter["kl_hard_stop"]
    (line,) = calibration_lines(keys(), tighter)
    assert line.endswith(f"calibrated by good: kl_hard_stop 1 -> {tighter['kl_hard_stop']:.4g}")
    assert found(keys(calibrate_from=None), tmp_path) == {}


def test_a_limit_that_is_tight_already_stays(tmp_path: Path) -> None:
    healthy(tmp_path / "good")
    assert found(keys(kl_hard_stop=0.1), tmp_path) == {}
    assert "nothing became tighter" in calibration_lines(keys(kl_hard_stop=0.1), {})[0]
    with pytest.raises(InputError, match=r"kl_to_init is .* above kl_hard_stop"):
        found(keys(kl_hard_stop=0.01), tmp_path)


def test_the_healthy_run_is_folded_as_its_own_guard_was_told(tmp_path: Path) -> None:
    rows = healthy_rows(healthy(tmp_path / "good"), "eval_accuracy")
    assert len(rows) == EVALUATIONS
    assert rows[0]["heldout"] == 0.3
    assert rows[0]["reward"] == rows[1]["reward"] == 0.31, "the evaluation before the first step waits for step 1"
    assert rows[5]["heldout_se"] > 0


def test_a_resume_takes_what_was_written_down_not_what_the_folder_says_now(tmp_path: Path) -> None:
    good = healthy(tmp_path / "good")
    with contextlib.closing(Journal.create(tmp_path / "journal")) as journal:
        first = found(keys(), tmp_path, journal)
    (good / "metrics.jsonl").write_text('{"step": 0, "eval_accuracy": 0.1}\n')
    (good / "verdict.json").unlink()
    with contextlib.closing(Journal.open(tmp_path / "journal")) as journal:
        assert found(keys(), tmp_path, journal) == first
    with pytest.raises(StateError):
        found(keys(), tmp_path)


@pytest.mark.parametrize(
    ("spoil", "error", "said"),
    [
        ({"status": "FAIL"}, StateError, "its verdict is FAIL"),
        ({"status": "INCOMPLETE"}, StateError, "its verdict is INCOMPLETE"),
        ({"fired": True}, StateError, "its guard fired"),
        ({"evaluations": 12}, InputError, "it has 12 evaluations"),
    ],
    ids=str,
)
def test_a_run_that_is_not_known_to_be_healthy_is_refused(
    tmp_path: Path, spoil: dict[str, Any], error: type[Exception], said: str
) -> None:
    healthy(tmp_path / "good", **spoil)
    with pytest.raises(error, match=said):
        found(keys(), tmp_path)


def test_a_folder_that_is_no_run_or_never_measured_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="not a run folder"):
        found(keys(), tmp_path)
    healthy(tmp_path / "good")
    with pytest.raises(StateError, match="never measured eval_other"):
        calibration(keys(), tmp_path, heldout=Answered(40), metric="eval_other")
    (tmp_path / "good" / "verdict.json").unlink()
    with pytest.raises(StateError, match="has no verdict"):
        found(keys(), tmp_path)


# -- the first real value -------------------------------------------------------------------------


def told(
    first: float, *, require: bool = False, heldout: int = 40, at_start: float | None = None
) -> list[tuple[str, str]]:
    """What a run says when its first evaluation gives this value."""
    config = Config(model="m", tasks="t", max_steps=50, tasks_per_step=8, guard={"require": require})
    warned: list[tuple[str, str]] = []
    seen: list[int] = []
    hooks = SimpleNamespace(evaluated=lambda step, metrics: seen.append(step), warn=lambda *words: warned.append(words))
    run: Any = SimpleNamespace(
        config=config, answered=Answered(heldout), heldout_metric="eval_accuracy", hooks=hooks, at_start=at_start,
        guard=make_guard(config, Answered(heldout), "eval_accuracy"),
    )  # fmt: skip
    judge_first_value(run)
    run.hooks.evaluated(0, {"eval_accuracy": first, "eval_n": float(heldout)})
    assert seen == [0], "what was there before still hears of it"
    return warned


def test_a_start_from_which_a_fall_would_not_be_seen_is_said_once() -> None:
    ((what, remedy),) = told(0.05)
    assert what.startswith("the guard is not armed: with 8 evaluations of 40 answers it stops ")
    assert "from 0.05 to 0" in what
    assert "max_steps" in remedy
    assert told(0.3) == []
    assert told(0.05, heldout=10) == [], "the plan had said so"
    assert told(0.05, at_start=0.3) == [], "it is not the first evaluation"


def test_a_guard_that_has_to_be_armed_refuses_by_the_real_value_too() -> None:
    with pytest.raises(ConfigError, match="not armed: held-out begins at 0,"):
        told(0.0, require=True)
    assert told(0.3, require=True) == []


def test_without_a_guard_nothing_is_wrapped() -> None:
    plain = lambda step, metrics: None  # noqa: E731
    run: Any = SimpleNamespace(guard=None, hooks=SimpleNamespace(evaluated=plain))
    judge_first_value(run)
    assert run.hooks.evaluated is plain


# -- going on with other numbers ------------------------------------------------------------------


def test_a_longer_run_keeps_the_settings_that_auto_gave_it() -> None:
    """A run that is made longer has more evaluations; its guard goes on with the settings that its state has."""
    short, long = (
        make_guard(Config(model="m", tasks="t", max_steps=8, eval_steps=1), Answered(40), "eval_accuracy"),
        HeldOutGuard(),
    )
    assert short is not None
    for t in range(5):
        short.update(t, 0.5, 0.5, heldout_se=0.05)
    state = json.loads(json.dumps(short.state_dict()))
    with pytest.raises(StateError, match="the settings differ"):
        long.load_state_dict(state)
    long.load_state_dict(state, adopt=("min_steps", "decline_patience", "ema_alpha", "margin_se"))
    assert long.limits == short.limits
    assert long.state_dict() == short.state_dict()
    state["limits"]["ema_alpha"] = 7.0
    with pytest.raises(StateError, match="ema_alpha"):
        HeldOutGuard().load_state_dict(state, adopt=("ema_alpha", "min_steps", "decline_patience", "margin_se"))

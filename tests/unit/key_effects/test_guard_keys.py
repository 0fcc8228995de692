"""Keys of `[guard]`, and `save_best`: each changes when a run is stopped, or what it leaves behind."""

from __future__ import annotations

import typing
from collections.abc import Callable
from typing import Any

import pytest

from surefoot.config import RuleName
from surefoot.config.schedule import Answered
from surefoot.errors import ConfigError
from surefoot.guards.collapse_rules import RULES
from surefoot.run.guarding import make_guard
from surefoot.run.inputs import read_inputs

HELDOUT = Answered(1)
WAVES = (0.02, -0.01, -0.02, 0.015, -0.005, 0.0, 0.01)
"""Noise that repeats, so that a fall has something to stand out from."""


@pytest.fixture
def fired(configure: Callable[..., Any]) -> Callable[..., int | None]:
    """`fired(guard__min_evals=3)`: the evaluation at which a guard with these keys stops a hacked run; None: never."""

    def at(
        *, kl: float | None = None, entropy: float | None = None, slope: float = 0.02, length: float | None = None,
        std: float | None = None, **keys: Any,
    ) -> int | None:  # fmt: skip
        defaults = {
            "guard__min_evals": 3,
            "guard__decline_patience": 2,
            "guard__ema_alpha": 0.5,
            "guard__margin_se": 2.0,
        }
        guard = make_guard(configure(**(defaults | keys)).config, HELDOUT, "eval_accuracy")
        assert guard is not None
        for step in range(40):
            heldout = 0.9 - slope * step + WAVES[step % len(WAVES)]
            low = None if entropy is None else entropy * 0.5**step
            long = None if length is None else length * 1.2**step
            if guard.update(
                step, 0.3 + 0.01 * step, heldout, kl, entropy=low, length=long, reward_std=std
            ).fire:  # fmt: skip
                return step
        return None

    return at


@pytest.mark.config_key("guard.min_evals")
def test_no_rule_stops_a_run_before_min_evals(fired: Any) -> None:
    early = fired()
    assert early is not None
    assert early < 19
    assert fired(guard__min_evals=20) == 19


@pytest.mark.config_key("guard.decline_patience")
def test_patience_waits_for_more_evaluations_that_say_the_same(fired: Any) -> None:
    assert fired(guard__decline_patience=2) < fired(guard__decline_patience=8) < fired(guard__decline_patience=14)


@pytest.mark.config_key("guard.ema_alpha")
def test_a_short_average_sees_a_fall_sooner(fired: Any) -> None:
    assert fired(guard__ema_alpha=0.5, slope=0.01) < fired(guard__ema_alpha=0.05, slope=0.01)


@pytest.mark.config_key("guard.margin_se")
def test_a_wide_margin_needs_a_deeper_fall(fired: Any) -> None:
    assert fired(guard__margin_se=1.0) < fired(guard__margin_se=12.0)


@pytest.mark.config_key("guard.kl_hard_stop", "beta")
def test_a_kl_above_its_limit_stops_a_run_whose_held_out_is_flat(fired: Any) -> None:
    assert fired(kl=0.3, slope=0.0, guard__kl_hard_stop=0.2, beta=0.01) == 2
    assert fired(kl=0.3, slope=0.0, guard__kl_hard_stop=0.4, beta=0.01) is None


@pytest.mark.config_key("guard.max_proxy_real_gap")
def test_a_reward_that_runs_away_from_a_flat_held_out_is_a_gap(fired: Any) -> None:
    assert fired(slope=0.0) is None
    assert fired(slope=0.0, guard__max_proxy_real_gap=0.1) is not None
    assert fired(slope=0.0, guard__max_proxy_real_gap=10.0) is None


@pytest.mark.config_key("guard.rules")
def test_only_named_rules_are_on(fired: Any) -> None:
    assert fired(guard__rules=["entropy_collapse"]) is None, "held-out falls, and nobody was asked to look at it"
    assert fired(guard__rules=["entropy_collapse"], entropy=2.0) is not None


@pytest.mark.config_key("guard.min_drop")
def test_a_fall_that_is_smaller_than_min_drop_is_of_no_interest(fired: Any) -> None:
    assert fired(guard__min_drop=0.0) < fired(guard__min_drop=0.4)
    assert fired(guard__min_drop=2.0) is None


@pytest.mark.config_key("guard.min_entropy_ratio")
def test_less_entropy_has_to_be_left_for_a_smaller_ratio(fired: Any) -> None:
    keys: dict[str, Any] = dict(guard__rules=["entropy_collapse"], entropy=2.0)
    assert fired(**keys, guard__min_entropy_ratio=0.3) < fired(**keys, guard__min_entropy_ratio=0.001)


@pytest.mark.config_key("guard.max_length_ratio")
def test_completions_may_grow_further_for_a_larger_ratio(fired: Any) -> None:
    keys: dict[str, Any] = dict(guard__rules=["length_explosion"], length=10.0)
    assert fired(**keys, guard__max_length_ratio=2.0) < fired(**keys, guard__max_length_ratio=20.0)


@pytest.mark.config_key("guard.saturation_patience")
def test_saturation_waits_for_its_own_patience(fired: Any) -> None:
    keys: dict[str, Any] = dict(guard__rules=["reward_saturated"], std=0.0)
    assert fired(**keys, guard__saturation_patience=5) == 4
    assert fired(**keys) == 14


def test_auto_goes_by_the_number_of_planned_evaluations(configure: Any) -> None:
    few = make_guard(configure(max_steps=8, eval_steps=1).config, HELDOUT, "eval_accuracy")
    many = make_guard(configure(max_steps=500, eval_steps=1).config, HELDOUT, "eval_accuracy")
    assert few is not None
    assert many is not None
    assert (few.limits.min_steps, few.limits.decline_patience) == (4, 1)
    assert (many.limits.min_steps, many.limits.decline_patience) == (10, 3)


def test_the_config_knows_exactly_the_rules_that_there_are() -> None:
    names, _own = typing.get_args(RuleName)
    assert set(typing.get_args(names)) == set(RULES)


@pytest.mark.config_key("guard.mode")
def test_off_makes_no_guard_and_neither_does_an_empty_held_out_set(configure: Any) -> None:
    assert make_guard(configure(guard__mode="off").config, HELDOUT, "eval_accuracy") is None
    assert make_guard(configure().config, Answered(0), "eval_accuracy") is None
    assert make_guard(configure(guard__mode="soft").config, HELDOUT, "eval_accuracy") is not None


@pytest.mark.config_key("guard.metric", "eval_metric")
def test_auto_watches_accuracy_where_there_is_a_metric_and_the_reward_otherwise(configure: Any) -> None:
    def watched(**keys: Any) -> str:
        loaded = configure(**keys)
        return read_inputs(loaded.config, loaded.base).heldout_metric

    assert watched() == "eval_accuracy"
    assert watched(eval_metric="none") == "eval_reward"
    assert watched(guard__metric="eval_reward") == "eval_reward"


def test_a_metric_that_nobody_measures_is_refused(configure: Any, tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match=r"guard\.metric = eval_accuracy with eval_metric = none"):
        configure(guard__metric="eval_accuracy", eval_metric="none")
    (tmp_path / "bare.jsonl").write_text("".join(f'{{"prompt": "{n}"}}\n' for n in range(100)))
    (tmp_path / "r.py").write_text("def f(completions, **_):\n    return [0.0 for _ in completions]\n")
    loaded = configure(tasks="bare.jsonl", reward_funcs=["r.py:f"], guard__metric="eval_accuracy")
    with pytest.raises(ConfigError, match="have no metric of their own"):
        read_inputs(loaded.config, loaded.base)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"guard__rules": ["decline", "nonsense"]}, r"guard\.rules = .*must be a list of one of \"decline\""),
        ({"guard__rules": []}, r"guard\.rules = \[\]: no rule is on"),
        ({"guard__rules": ["decline", "decline"]}, "names one twice"),
        ({"guard__rules": ["kl"], "beta": 0.1}, r"guard\.rules names kl without a limit"),
        ({"guard__rules": ["decline"], "guard__max_proxy_real_gap": 0.1}, "do not name gap"),
        ({"guard__kl_hard_stop": 0.1}, r"guard\.kl_hard_stop = 0\.1 with beta = 0:"),
        ({"guard__kl_hard_stop": 0.1, "beta": 0.1, "reference_sync_steps": 5}, "with reference_sync_steps = 5"),
        ({"guard__ema_alpha": 0.0}, r"guard\.ema_alpha = 0\.0: must be above 0"),
        ({"guard__ema_alpha": 1.5}, r"guard\.ema_alpha = 1\.5: must be at most 1"),
        ({"guard__min_evals": 0}, r"guard\.min_evals = 0: must be above 0"),
        ({"guard__decline_patience": 0}, r"guard\.decline_patience = 0: must be above 0"),
        ({"guard__margin_se": 21.0}, r"guard\.margin_se = 21\.0: must lie between 0\.0 and 20\.0"),
        ({"guard__max_proxy_real_gap": -0.1}, r"guard\.max_proxy_real_gap = -0\.1: must not be negative"),
        ({"guard__min_evals": "often"}, r"guard\.min_evals = \"often\": must be"),
        ({"guard__min_drop": -0.1}, r"guard\.min_drop = -0\.1: must not be negative"),
        ({"guard__min_entropy_ratio": 0.0}, r"guard\.min_entropy_ratio = 0\.0: must be above 0"),
        ({"guard__min_entropy_ratio": 1.5}, r"guard\.min_entropy_ratio = 1\.5: must lie between"),
        ({"guard__max_length_ratio": 1.0}, r"guard\.max_length_ratio = 1\.0: must be above 1"),
        ({"guard__saturation_patience": 0}, r"guard\.saturation_patience = 0: must be above 0"),
        ({"guard__require": True, "guard__mode": "off"}, r"guard\.require = true with guard\.mode = off"),
        ({"guard__require": True, "eval_on_start": False}, r"guard\.require = true with eval_on_start = false"),
        ({"guard__require": True, "heldout_fraction": 0.0}, r"guard\.require = true with heldout_fraction = 0"),
        ({"guard__calibrate_from": "r"}, r"guard\.calibrate_from = 'r' without guard\.kl_hard_stop"),
        (
            {"guard__calibrate_from": "r", "guard__mode": "off", "guard__max_proxy_real_gap": 1.0},
            r"guard\.calibrate_from = 'r' with guard\.mode = off",
        ),
        ({"guard__metric": "eval_n"}, r'guard\.metric = "eval_n": must be one of "auto"'),
        ({"guard__mode": False}, r"guard\.mode = false: must be one of \"strict\", \"soft\", \"off\""),
    ],
    ids=str,
)
def test_a_guard_that_would_stop_nothing_is_refused(configure: Any, keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        configure(**keys)


# -- whole runs -----------------------------------------------------------------------------------


@pytest.mark.config_key("save_best")
def test_the_best_weights_stay_unless_that_is_turned_off(ran: Any, rewards: Any) -> None:
    """A metric that never moves: the first evaluation is the best, and no later one replaces it."""
    rewards("def half(completions, **_):\n    return [0.5 for _ in completions]\n")
    keys: dict[str, Any] = dict(max_steps=3, eval_steps=1, eval_metric="r.py:half", guard__mode="off")
    from_start = ran(**keys)
    assert from_start.names("checkpoints") == ["step_3"], "the start is as good, and no checkpoint"
    assert (from_start.verdict["best"]["step"], from_start.verdict["best"]["checkpoint"]) == (0, None)
    keys |= dict(eval_on_start=False)
    kept, not_kept = ran(**keys), ran(**keys, save_best=False)
    assert kept.names("checkpoints") == ["step_1", "step_3"]
    assert kept.verdict["best"]["checkpoint"] == "checkpoints/step_1"
    assert not_kept.names("checkpoints") == ["step_3"]
    assert not_kept.verdict["best"] == kept.verdict["best"] | {"checkpoint": None}


def test_a_guard_that_looks_on_changes_no_number_no_rollout_and_no_weight(ran: Any) -> None:
    keys: dict[str, Any] = dict(max_steps=3, eval_steps=1, eval_on_start=True)
    watched, alone = ran(**keys), ran(**keys, guard__mode="off", save_best=False)
    assert any("killswitch/fire" in row for row in watched.metrics)
    clocks = ("killswitch/", "timing/", "step_time", "tokens_per_second", "memory/peak")
    left, right = (
        [{name: value for name, value in row.items() if not name.startswith(clocks)} for row in run.metrics]
        for run in (watched, alone)
    )
    assert left == right
    assert [watched.rollouts(step) for step in (1, 2, 3)] == [alone.rollouts(step) for step in (1, 2, 3)]
    weights = "checkpoints/step_3/model.safetensors"
    assert (watched.root / weights).read_bytes() == (alone.root / weights).read_bytes()

"""The register knows every name once, with its meaning."""

from __future__ import annotations

import typing

import pytest

from surefoot.tracking.metrics import METRICS, Healthy, Reduction, lookup

TRL = """
reward reward_std frac_reward_zero_std loss policy_loss kl entropy grad_norm learning_rate clip_ratio/low_mean clip_ratio/high_mean
clip_ratio/region_mean clip_ratio/low_min clip_ratio/high_max completions/mean_length completions/min_length
completions/max_length completions/clipped_ratio completions/mean_terminated_length rewards/score/mean rewards/score/std
sampling/sampling_logp_difference/mean sampling/sampling_logp_difference/max sampling/importance_sampling_ratio/min
sampling/importance_sampling_ratio/mean sampling/importance_sampling_ratio/max step_time num_tokens eval_reward
""".split()


@pytest.mark.parametrize("name", TRL)
def test_the_names_that_hands_know_are_registered(name: str) -> None:
    assert lookup(name) is not None


def test_every_entry_is_complete_and_of_a_known_kind() -> None:
    for metric in METRICS.values():
        assert metric.reduction in typing.get_args(Reduction), metric
        assert metric.healthy in typing.get_args(Healthy), metric
        assert len(metric.description) > 10, metric
        assert metric.unit, metric


@pytest.mark.parametrize("name", ["rewards/a.py:score/mean", "failures/score:timeout", "timing/learn", "groups/scored"])
def test_patterns_take_one_word(name: str) -> None:
    assert lookup(name) is not None


@pytest.mark.parametrize(
    "name", ["rewards//mean", "rewards/a/b/mean", "timing/", "Reward", "reward ", "step", "", "{}"]
)
def test_a_name_that_only_looks_like_one_is_unknown(name: str) -> None:
    assert lookup(name) is None

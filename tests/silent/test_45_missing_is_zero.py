"""Silent failure 45: a number that nobody measured is logged as 0, and passes every upper bound."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from silent_kit import make_learner, make_sample, sampled, tiny_net

from surefoot.errors import ConfigError, SurefootError
from surefoot.guards.verdict import LearningEvidence, judge_run
from surefoot.maths.logprobs import score_tokens
from surefoot.maths.stats import finish, token_sums
from surefoot.records import Verdict
from surefoot.tracking.metrics import MetricsLog

NOTHING = torch.zeros(2, 3, dtype=torch.bool)
VALUES = torch.full((2, 3), -1.0)
LEARNED = LearningEvidence(
    1e-4, groups=6, differing=6, changed_entries=9, metric="eval_accuracy", change=None, measured=True
)


def check(metrics: dict[str, float]) -> None:
    assert "entropy" not in metrics
    assert "gen_kl_error" not in metrics
    assert all(math.isfinite(value) for value in metrics.values())


def test_what_was_not_measured_is_absent() -> None:
    check(finish(token_sums(NOTHING, logp=VALUES, sampler_logp=VALUES, entropy=VALUES)))
    check(finish(token_sums(~NOTHING)))
    assert score_tokens(torch.randn(2, 5), torch.tensor([0, 1])).entropy is None


def test_a_run_without_a_penalty_reports_no_kl() -> None:
    net = tiny_net()
    assert "kl" not in make_learner(net).learn(sampled(net)).metrics


@pytest.mark.parametrize("value", [None, "0.0", True])
def test_the_log_refuses_what_is_not_a_number(tmp_path: Path, value: Any) -> None:
    with pytest.raises(SurefootError):
        MetricsLog(tmp_path / "metrics.jsonl").log(1, {"reward": value})


@pytest.mark.parametrize("metrics", [{}, {"eval_accuracy": float("nan")}, {"eval_reward": 1.0}])
def test_a_target_that_was_never_measured_is_never_a_pass(metrics: dict[str, float]) -> None:
    judged = judge_run(planned=3, executed=3, target=("eval_accuracy", 0.0), metrics=metrics, evidence=LEARNED)
    assert judged.status is Verdict.FAIL


def test_a_run_that_did_fewer_steps_than_planned_is_incomplete() -> None:
    good = {"eval_accuracy": 1.0}
    judged = judge_run(planned=3, executed=2, target=("eval_accuracy", 0.5), metrics=good, evidence=LEARNED)
    assert judged.status is Verdict.INCOMPLETE


def test_a_loss_over_no_tokens_is_refused() -> None:
    net = tiny_net()
    unsampled = make_sample((7, 2), sampled=(False, False), logprobs=(0.0, 0.0), advantage=1.0)
    with pytest.raises(ConfigError, match="tokens is 0"):
        make_learner(net).learn([unsampled])


def test_planted_zero_for_an_unmeasured_entropy_is_seen() -> None:
    with pytest.raises(AssertionError):
        check(finish(token_sums(~NOTHING, entropy=torch.zeros(2, 3))))

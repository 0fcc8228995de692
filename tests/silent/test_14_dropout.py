"""Silent failure 14: dropout is on while tokens are scored, so that ratio and KL are noise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from silent_kit import PAD_ID, make_learner, make_sample, sampled, tiny_net

from surefoot.errors import NumericsError
from surefoot.learner.forward import score_batch
from surefoot.learner.model import PEBBLE, load_policy
from surefoot.maths.packing import make_batch

BATCH = make_batch([make_sample((7, 8, 9, 2)), make_sample((5, 2))], pad_token_id=PAD_ID)[0]


def check(net: Any) -> None:
    first, second = (score_batch(net, BATCH, temperature=1.0, with_entropy=False).logprobs for _ in range(2))
    assert torch.equal(first, second)


def test_two_scores_of_the_same_batch_are_bit_equal() -> None:
    check(tiny_net(attention_dropout=0.5))


def test_a_loaded_policy_is_in_eval_mode_in_every_part() -> None:
    net = load_policy(str(PEBBLE), base=PEBBLE, device="cpu", dtype="float32").model
    assert [name for name, part in net.named_modules() if part.training] == []


def test_planted_train_mode_is_seen_by_two_forwards() -> None:
    torch.manual_seed(0)
    with pytest.raises(AssertionError):
        check(tiny_net(attention_dropout=0.5).train())


def test_planted_train_mode_stops_step_1() -> None:
    net = tiny_net(attention_dropout=0.5)
    samples = sampled(net)
    torch.manual_seed(0)
    with pytest.raises(NumericsError, match="disagree"):
        make_learner(net.train()).learn(samples)

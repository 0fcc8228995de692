"""Silent failure 10: a token is scored at a place outside its row, or at another token's place; all numbers are finite.

Indexing a flattened batch reads the next row's states there; clamping the place reads the row's last one. The learner
does neither: `learner.forward` looks whether every trained token stands where it is about to be read.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from silent_kit import PROMPTS, make_learner, make_sample, sampled, tiny_net

from surefoot.errors import InvariantError
from surefoot.learner import forward, grpo
from surefoot.maths import packing
from surefoot.maths.packing import Batch


def shifted(batch: Batch, by: int) -> Batch:
    return dataclasses.replace(batch, prompt_lens=batch.prompt_lens + by)


def plant_in_packing(monkeypatch: pytest.MonkeyPatch, by: int) -> None:
    """The bug: packing says that every prompt is so many tokens longer than it is."""

    def make_batch(*args: Any, **keys: Any) -> Any:
        batch, stats = packing.make_batch(*args, **keys)
        return shifted(batch, by), stats

    monkeypatch.setattr(grpo, "make_batch", make_batch)


def plant_behind_the_checks(monkeypatch: pytest.MonkeyPatch, by: int) -> None:
    """The bug: the lengths change on the way to the device, after `check_batch` has compared them."""
    monkeypatch.setattr(Batch, "to", lambda self, device: shifted(self, by))


def test_a_row_is_scored_alike_whoever_its_neighbours_are() -> None:
    net = tiny_net()
    rows = [(PROMPTS["long"], (7, 8, 2)), (PROMPTS["short"], (9, 2)), (PROMPTS["other"], (5, 6, 7, 8, 2))]
    together = make_learner(net).score(rows, temperature=1.0)
    for row, found in zip(rows, together, strict=True):
        assert found == pytest.approx(make_learner(net).score([row], temperature=1.0)[0], abs=1e-5)


def test_padding_may_reach_beyond_the_row_and_is_not_refused() -> None:
    rows = [make_sample((7, 2)), make_sample((7, 8, 9, 10, 2), index=1, prompt_ids=PROMPTS["short"])]
    wide, _ = packing.make_batch(rows, pad_token_id=0)
    narrow = dataclasses.replace(wide, input_ids=wide.input_ids[:, : len(PROMPTS["long"]) + 2])
    scores = [forward.score_batch(tiny_net(), b, temperature=1.0, with_entropy=False).logprobs for b in (wide, narrow)]
    torch.testing.assert_close(*scores, atol=1e-5, rtol=0)


@pytest.mark.parametrize("by", [-1, 1, 5, 100])
def test_planted_prompt_length_in_packing_stops_the_step(monkeypatch: pytest.MonkeyPatch, by: int) -> None:
    net = tiny_net()
    samples = sampled(net)
    plant_in_packing(monkeypatch, by)
    with pytest.raises(InvariantError, match="batch row of"):
        make_learner(net).learn(samples)


@pytest.mark.parametrize("sharing", [1e9, 0.0], ids=["prompt shared", "prompt repeated"])
@pytest.mark.parametrize("by", [-1, 1, 5, 100])
def test_planted_prompt_length_behind_the_checks_is_refused_where_it_is_used(
    monkeypatch: pytest.MonkeyPatch, by: int, sharing: float
) -> None:
    """Parity would see it in a step on policy; with samples of older weights nothing else would."""
    net = tiny_net()
    samples, before = sampled(net), [p.detach().clone() for p in net.parameters()]
    monkeypatch.setattr(forward, "SHARING_PAYS", sharing)
    plant_behind_the_checks(monkeypatch, by)
    with pytest.raises(InvariantError, match=r"row \d+ of \d+ .*trained token \d+ is not at place"):
        make_learner(net, parity_tolerance=1e9).learn(samples)
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))


@pytest.mark.parametrize("by", [1, 5])
def test_planted_prompt_length_is_refused_when_a_sync_is_proved(monkeypatch: pytest.MonkeyPatch, by: int) -> None:
    """What the learner thinks of probes is compared with the engines', and no other check looks at those rows."""
    plant_in_packing(monkeypatch, by)
    with pytest.raises(InvariantError, match="not at place"):
        make_learner(tiny_net()).score([(PROMPTS["long"], (7, 8, 2))], temperature=1.0)


def test_planted_clamp_lets_the_wrong_place_through(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the learner did before: without the look, a place beyond the row is scored as if nothing were wrong."""
    net = tiny_net()
    samples = sampled(net)
    monkeypatch.setattr(forward, "require_in_place", lambda batch: None)
    monkeypatch.setattr(forward, "SHARING_PAYS", 0.0)
    plant_behind_the_checks(monkeypatch, 5)
    report = make_learner(net, parity_tolerance=1e9).learn(samples)
    assert report.applied, "the planted bug is silent without the check"
    assert report.metrics["sampling/sampling_logp_difference/max"] > 0.1

"""Scores of completion tokens: the prompt shared or repeated, the logits whole or in chunks, the same numbers."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from forward_kit import compare, packed, sample
from torch import Tensor

from surefoot.learner import forward
from surefoot.learner.forward import score_batch
from surefoot.maths.logprobs import TokenScores, score_tokens_chunked
from surefoot.maths.packing import Batch, make_batch


def score(net: Any, batch: Batch, temperature: float = 1.0) -> TokenScores:
    return score_batch(net, batch, temperature=temperature, with_entropy=True)


def sharing(monkeypatch: pytest.MonkeyPatch, share: bool) -> None:
    monkeypatch.setattr(forward, "SHARING_PAYS", 1e9 if share else 0.0)


@pytest.mark.parametrize("share", [True, False], ids=["shared", "plain"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_scores_are_those_of_one_forward_per_row_without_padding(
    architecture: str, share: bool, temperature: float, make_net: Any, full_logits: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sharing(monkeypatch, share)
    net, batch = make_net(architecture), packed(pad=7)
    scores = score(net, batch, temperature).logprobs.detach()
    for row in range(len(batch)):
        start = int(batch.prompt_lens[row])
        length = int(batch.mask[row].nonzero().max()) + 1
        ids = batch.input_ids[row, : start + length]
        logp = torch.log_softmax(full_logits(net, ids.tolist())[start - 1 : -1] / temperature, -1)
        expected = logp.gather(1, ids[start:, None]).squeeze(1) * batch.mask[row, :length]
        torch.testing.assert_close(scores[row, :length], expected, atol=1e-5, rtol=1e-5)
        assert not scores[row, length:].any()


def test_a_shared_prompt_gives_the_values_and_gradients_of_a_repeated_one(
    architecture: str, make_net: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, batch = make_net(architecture), packed()
    sharing(monkeypatch, True)
    shared = score(net, batch)
    sharing(monkeypatch, False)
    compare(net, shared, score(net, batch), batch)


def test_a_prompt_is_run_once_for_all_its_siblings(make_net: Any) -> None:
    net = make_net()
    seen: list[tuple[int, ...]] = []
    net.get_decoder().register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    batch = make_batch([sample("long", i, 5) for i in range(8)], pad_token_id=0)[0]
    score(net, batch)
    assert seen == [(1, 33 + 8 * 4)], "a group with a long prompt is one row: the prompt, then its siblings"
    seen.clear()
    score(net, make_batch([sample("short", i, 9) for i in range(2)], pad_token_id=0)[0])
    assert seen == [(2, 12)], "two siblings with a short prompt are not"


@pytest.mark.parametrize("share", [True, False], ids=["shared", "plain"])
def test_what_pads_a_row_cannot_be_seen(share: bool, make_net: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sharing(monkeypatch, share)
    net = make_net()
    assert torch.equal(score(net, packed(pad=0)).logprobs, score(net, packed(pad=59)).logprobs)


def test_one_token_answers_are_scored(make_net: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sharing(monkeypatch, True)
    net = make_net()
    batch = make_batch([sample("long", i, 1) for i in range(4)], pad_token_id=0)[0]
    assert (score(net, batch).logprobs < 0).all()


def test_chunked_logits_give_the_values_and_gradients_of_whole_ones(
    architecture: str, make_net: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, batch = make_net(architecture), packed()
    whole = score(net, batch, 0.7)
    calls: list[int] = []

    def chunked(hidden: Tensor, *args: Any, **kwargs: Any) -> TokenScores:
        calls.append(len(hidden))
        return score_tokens_chunked(hidden, *args, **kwargs, chunk_tokens=3)

    monkeypatch.setattr(forward, "score_tokens_chunked", chunked)
    monkeypatch.setattr(forward, "LOGITS_BUDGET", 0)
    compare(net, whole, score(net, batch, 0.7), batch)
    assert calls == [int(batch.mask.sum())], "padding never reaches the head"


# -- the layout, a row at a time: what `lay_out` computes for all rows at once ---------------------------


def lay_out_by_hand(batch: Batch, prompts: list[tuple[int, ...]], owner: Tensor) -> Any:
    """Token by token, in Python."""
    ids = [token for prompt in prompts for token in prompt]
    positions = [place for prompt in prompts for place in range(len(prompt))]
    ends = torch.tensor([len(p) for p in prompts]).cumsum(0) - 1
    lengths: list[int] = []
    width = batch.mask.shape[1]
    where: list[list[int]] = []
    rows = zip(owner.tolist(), batch.completion_ids.tolist(), batch.mask.tolist(), strict=True)
    for u, completion, mask in rows:
        length = width - mask[::-1].index(True) if True in mask else 1
        where.append([int(ends[u]), *range(len(ids), len(ids) + length - 1), *[0] * (width - length)])
        ids += completion[: length - 1]
        positions += range(len(prompts[u]), len(prompts[u]) + length - 1)
        lengths.append(length - 1)
    return forward._Layout(torch.tensor([ids]), torch.tensor([positions]), lengths, torch.tensor(where))


def made_up_batch(seed: int) -> Batch:
    """Prompts of several lengths; completions whose last tokens, or all of them, were not sampled."""
    dice, rows = random.Random(seed), []
    for group in range(dice.randint(1, 4)):
        prompt = tuple(dice.randrange(1, 99) for _ in range(dice.randint(1, 7)))
        for index in range(dice.randint(1, 4)):
            sampled = tuple(dice.random() < 0.6 for _ in range(dice.randint(1, 9)))
            row = sample("short", 10 * group + index, len(sampled))
            rows.append(replace(row, prompt_ids=prompt, sampled=sampled))
    return make_batch(rows, pad_token_id=0)[0]


def test_the_layout_is_that_of_one_row_at_a_time() -> None:
    for seed in range(100):
        batch = made_up_batch(seed)
        prompts, owner = forward.distinct_prompts(batch)
        found, expected = forward.lay_out(batch, prompts, owner), lay_out_by_hand(batch, prompts, owner)
        assert found.lengths == expected.lengths, seed
        for name in ("ids", "positions", "where"):
            assert torch.equal(getattr(found, name), getattr(expected, name)), (seed, name)
            assert getattr(found, name).dtype == torch.int64

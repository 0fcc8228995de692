"""Silent failure 13: samples computed together see each other, so that a log-probability depends on its neighbours."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from silent_kit import PAD_ID, PROMPTS, make_learner, make_sample, sampled, tiny_net
from torch import Tensor

from surefoot.errors import NumericsError
from surefoot.learner import forward
from surefoot.maths.packing import Batch, make_batch

LONG, SHORT = PROMPTS["long"] * 2, PROMPTS["short"] * 3  # 18 and 9 tokens: one of them is padded


def batch(first: tuple[int, ...] = (7, 8, 9, 2)) -> Batch:
    """Two tasks of four siblings each; `first` is what sibling 0 of task 0 said."""
    rows = [make_sample(first, prompt_ids=LONG, item_id="a")]
    rows += [make_sample((10 + i, 2, 5, 6)[: 2 + i], prompt_ids=LONG, item_id="a", index=i) for i in (1, 2)]
    rows += [make_sample((20 + i, 3, 2)[: 1 + i], prompt_ids=SHORT, item_id="b", group="h", index=i) for i in range(3)]
    return make_batch(rows, pad_token_id=PAD_ID)[0]


def scores(net: Any, packed: Batch) -> Tensor:
    return forward.score_batch(net, packed, temperature=1.0, with_entropy=False).logprobs


def check_alone(net: Any) -> None:
    """Every row has the score that it has alone."""
    packed = batch()
    together = scores(net, packed)
    for row in range(len(packed)):
        alone = scores(net, packed.rows([row]))
        torch.testing.assert_close(together[row : row + 1], alone, atol=2e-5, rtol=0)


def check_neighbour(net: Any) -> None:
    """Replacing one sibling, prompt included, changes nobody else."""
    packed, other = batch(), batch((30, 31, 2, 2))
    stranger = replace(other, input_ids=other.input_ids.clone())
    stranger.input_ids[0, :5] = 29
    torch.testing.assert_close(scores(net, packed)[1:], scores(net, stranger)[1:], atol=2e-5, rtol=0)


def test_this_batch_takes_the_shared_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "_plain", lambda *_: pytest.fail("the prompt was not shared"))
    scores(tiny_net(), batch())


def test_shared_and_plain_agree_in_values_and_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for pays in (0.8, 0.0):
        monkeypatch.setattr(forward, "SHARING_PAYS", pays)
        net = tiny_net()
        values = scores(net, batch())
        (values * torch.linspace(-1, 2, values.numel()).view_as(values)).sum().backward()
        results.append((values.detach(), torch.cat([p.grad.flatten() for p in net.parameters()])))
    (shared, shared_grad), (plain, plain_grad) = results
    torch.testing.assert_close(shared, plain, atol=2e-5, rtol=0)
    torch.testing.assert_close(shared_grad, plain_grad, atol=1e-4 * float(plain_grad.abs().max()), rtol=0)


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    net = tiny_net()
    check_alone(net)
    check_neighbour(net)


def test_planted_owner_of_the_first_prompt_for_all_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    real = forward.distinct_prompts

    def confused(packed: Batch) -> Any:
        prompts, owner = real(packed)
        return prompts, torch.zeros_like(owner)

    monkeypatch.setattr(forward, "distinct_prompts", confused)
    with pytest.raises(AssertionError):
        check_neighbour(tiny_net())
    with pytest.raises(AssertionError):
        check_alone(tiny_net())


def test_planted_owner_of_the_first_prompt_for_all_stops_step_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sampler drew each token alone: a learner that shows a row somebody else's prompt disagrees with it."""
    real = forward.distinct_prompts
    monkeypatch.setattr(forward, "SHARING_PAYS", 10.0)  # these prompts are short: share them all the same
    net = tiny_net()
    make_learner(net).learn(samples := sampled(net))

    def confused(packed: Batch) -> Any:
        prompts, owner = real(packed)
        return prompts, torch.zeros_like(owner)

    monkeypatch.setattr(forward, "distinct_prompts", confused)
    with pytest.raises(NumericsError, match="disagree"):
        make_learner(tiny_net()).learn(samples)


def test_planted_missing_padding_mask_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The short prompt's padding holds another prompt's token."""
    width = len(LONG)
    plant(monkeypatch, lambda bias: bias[..., :width].zero_())
    with pytest.raises(AssertionError):
        check_alone(tiny_net())


def test_planted_mask_that_shows_later_tokens_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    width = len(LONG)
    plant(monkeypatch, lambda bias: bias[..., width:].zero_())
    with pytest.raises(AssertionError):
        check_alone(tiny_net())


def test_planted_swap_of_two_siblings_places_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token that sits in its sibling's place attends to its sibling's words."""
    real = forward.build_packed_index

    def swapped(*args: Any) -> Any:
        packed_index = real(*args)
        places = packed_index.completions.clone().unflatten(0, (len(packed_index.prompt_of), -1))
        places[[0, 1]] = places[[1, 0]]
        return packed_index._replace(completions=places.flatten())

    monkeypatch.setattr(forward, "build_packed_index", swapped)
    with pytest.raises(AssertionError):
        check_alone(tiny_net())


def plant(monkeypatch: pytest.MonkeyPatch, change: Callable[[Tensor], Tensor]) -> None:
    """Let `change` edit the bias (B, 1, Q * T, P + T) in place."""
    real = forward.build_packed_index

    def planted(*args: Any) -> Any:
        packed_index = real(*args)
        change(packed_index.bias)
        return packed_index

    monkeypatch.setattr(forward, "build_packed_index", planted)

"""The engine's own forward pass computes what plain transformers computes, for every architecture we accept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from surefoot.engines.decoder import WIDTH_STEP, Decoder
from surefoot.learner.model import decoder_spec

PROMPTS = [(3, 17, 9, 44, 5), (8,), tuple(3 + (i * 7) % 50 for i in range(41))]
"""One token, a few, and more than one KV width: positions must not be shared between rows."""


def loaded(net: Any, *, rows: int = 16, max_width: int = 96) -> Decoder:
    decoder = Decoder(decoder_spec(net), rows=rows, max_width=max_width, device="cpu", dtype=torch.float32)
    decoder.load(dict(net.named_parameters()))
    return decoder


@pytest.mark.parametrize("prompt", PROMPTS, ids=["five", "one", "forty-one"])
def test_prefill_equals_a_plain_forward(
    architecture: str, prompt: tuple[int, ...], make_net: Any, full_logits: Any
) -> None:
    net = make_net(architecture)
    _, logits = loaded(net).prefill(prompt)
    expected = full_logits(net, prompt)[-1]
    assert expected.std() > 0.3, "a flat distribution would compare nothing"
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


def test_every_step_equals_a_plain_forward_in_rows_of_unequal_length(
    architecture: str, make_net: Any, full_logits: Any
) -> None:
    net = make_net(architecture)
    decoder = loaded(net)
    rows = [11, 0, 6]
    texts = [list(prompt) for prompt in PROMPTS]
    for row, prompt in zip(rows, PROMPTS, strict=True):
        decoder.fill_rows([row], decoder.prefill(prompt)[0])
    for step in range(30):  # the longest row crosses from a width of 64 to 96
        tokens, positions = torch.zeros(16, dtype=torch.long), torch.zeros(16, dtype=torch.long)
        for n, row in enumerate(rows):
            texts[n].append(3 + (13 * n + 11 * step) % 50)
            tokens[row], positions[row] = texts[n][-1], len(texts[n]) - 1
        logits = decoder.step(tokens, positions, int(positions.max()) + 1)
        for n, row in enumerate(rows):
            expected = full_logits(net, texts[n])[-1]
            torch.testing.assert_close(logits[row], expected, atol=1e-5, rtol=1e-5, msg=f"row {row}, step {step}")


def test_the_width_is_rounded_up_and_never_below_what_was_asked(make_net: Any) -> None:
    assert loaded(make_net(), max_width=WIDTH_STEP + 1).max_width == 2 * WIDTH_STEP
    assert loaded(make_net(), max_width=WIDTH_STEP).max_width == WIDTH_STEP


def test_siblings_are_seated_with_one_copy_each(make_net: Any) -> None:
    decoder = loaded(make_net())
    kv, _ = decoder.prefill(PROMPTS[0])
    decoder.fill_rows([2, 9], kv)
    length = len(PROMPTS[0])
    assert torch.equal(decoder.cache[:, :, 2, :, :length], kv)
    assert torch.equal(decoder.cache[:, :, 9, :, :length], kv)
    assert not decoder.cache[:, :, 3].any(), "a neighbour's row was written"


@pytest.mark.parametrize(
    "call", [lambda d: d.prefill((1, 2)), lambda d: d.step(torch.zeros(16).long(), torch.zeros(16).long(), 1)]
)
def test_decoding_without_weights_is_refused(call: Callable[[Decoder], Any], make_net: Any) -> None:
    decoder = Decoder(decoder_spec(make_net()), rows=16, max_width=32, device="cpu", dtype=torch.float32)
    with pytest.raises(AssertionError, match="load weights before"):
        call(decoder)

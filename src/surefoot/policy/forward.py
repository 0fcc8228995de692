"""Hidden states of completion tokens, without paying for the prompt once per sibling.

Siblings share their prompt. Running it once and letting every sibling attend to it costs
U*P + B*T tokens instead of B*(P + T); gradients flow into the shared prompt from all of them.

Read next: `sibling_attention.py`, who sees whom.

Axes: B rows, U distinct prompts, P prompt width, T completion width, H hidden, V vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from surefoot.errors import InvariantError
from surefoot.maths.logprobs import TokenScores, score_tokens_chunked
from surefoot.maths.packing import Batch
from surefoot.policy.sibling_attention import seat, sibling_attention

LOGITS_BUDGET = 256 * 2**20
"""Bytes of logits that are kept for the backward pass; what is beyond it is computed again, chunk by chunk."""

SHARING_PAYS = 0.8
"""Share the prompt when that leaves at most this fraction of the tokens; a plain call is simpler."""


def score_batch(net: Any, batch: Batch, *, temperature: float, with_entropy: bool) -> TokenScores:
    """Log-probability of every trained token of a batch, at the sampling temperature.

    Returns:
        `TokenScores` of shape (B, T); positions outside `batch.mask` hold 0 and no gradient.
    """
    hidden = completion_hidden(net, batch)[batch.mask]  # (N, H): padding never reaches the head
    ids = batch.completion_ids[batch.mask]
    head = net.get_output_embeddings()
    scores = score_tokens_chunked(
        hidden, head.weight, ids, bias=head.bias, temperature=temperature, with_entropy=with_entropy,
        keep_bytes=LOGITS_BUDGET,
    )  # fmt: skip
    entropy = None if scores.entropy is None else _spread(scores.entropy, batch.mask)
    return TokenScores(_spread(scores.logprobs, batch.mask), entropy)


def completion_hidden(net: Any, batch: Batch) -> Tensor:
    """(B, T, H): entry t of a row is the state that predicts completion token t."""
    _require_in_place(batch)
    prompts, owner = _distinct_prompts(batch)
    rows, width = batch.completion_ids.shape
    shared = len(prompts) * max(map(len, prompts)) + rows * width
    if shared > SHARING_PAYS * batch.input_ids.numel() or width == 1:
        return _plain(net, batch)
    return _shared(net, _lay_out(batch, prompts, owner), prompts, owner)


def _require_in_place(batch: Batch) -> None:
    """Every trained token stands in its own row, right where its prompt's length says; one reduction on the device."""
    rows, length = batch.input_ids.shape
    places = batch.prompt_lens[:, None] + torch.arange(batch.completion_ids.shape[1], device=batch.mask.device)
    inside = (places >= 1) & (places < length)  # at 0 no state comes before it
    there = batch.input_ids.gather(1, places.clamp(0, length - 1)) == batch.completion_ids
    wrong = batch.mask & ~(inside & there)
    if bool(wrong.any()):
        row, token = wrong.nonzero()[0].tolist()
        raise InvariantError(
            f"row {row} of {rows} ({batch.item_ids[row]}): trained token {token} is not at place "
            f"{int(places[row, token])} of {length} in its row ({int(wrong.sum())} such tokens)",
            "its log-probability would be read from another token's state, and every number would still be finite",
            "nothing was trained on it; report the run folder if your own code did not cause it",
        )


def _plain(net: Any, batch: Batch) -> Tensor:
    """One call over prompt and completion together."""
    width = batch.completion_ids.shape[1]
    # Padded on the right and causal: no real token can see padding, so no mask is needed.
    states = net.get_decoder()(input_ids=batch.input_ids, use_cache=False).last_hidden_state
    where = batch.prompt_lens[:, None] - 1 + torch.arange(width, device=states.device)
    where = where.clamp(max=states.shape[1] - 1)  # padding alone reaches beyond: `_require_in_place` has looked
    index = where[..., None].expand(-1, -1, states.shape[-1])
    return torch.gather(states, 1, index)


class _Layout(NamedTuple):
    """The batch as one row without padding: every prompt, then every completion but its last token."""

    ids: Tensor  # (1, N)
    positions: Tensor  # (1, N) as if each completion stood right behind its prompt
    lengths: list[int]  # B, tokens of each completion that are in the row
    where: Tensor  # (B, T) index of the state that predicts each completion token


def _lay_out(batch: Batch, prompts: list[tuple[int, ...]], owner: Tensor) -> _Layout:
    ids = [token for prompt in prompts for token in prompt]
    positions = [place for prompt in prompts for place in range(len(prompt))]
    ends = torch.tensor([len(p) for p in prompts]).cumsum(0) - 1  # where each prompt's last token stands
    lengths: list[int] = []
    where = torch.zeros(batch.mask.shape, dtype=torch.long)
    rows = zip(owner.tolist(), batch.completion_ids.tolist(), batch.mask.tolist(), strict=True)
    for b, (u, completion, mask) in enumerate(rows):
        # What comes behind the last trained token predicts nothing that is asked for.
        length = max((t + 1 for t, on in enumerate(mask) if on), default=1)
        where[b, :length] = torch.tensor([int(ends[u]), *range(len(ids), len(ids) + length - 1)])
        ids += completion[: length - 1]
        positions += range(len(prompts[u]), len(prompts[u]) + length - 1)
        lengths.append(length - 1)
    device = batch.mask.device
    return _Layout(
        torch.tensor([ids], device=device), torch.tensor([positions], device=device), lengths, where.to(device)
    )


def _shared(net: Any, layout: _Layout, prompts: list[tuple[int, ...]], owner: Tensor) -> Tensor:
    """One call: a token sees its prompt and its own completion before it, never a sibling's."""
    decoder = net.get_decoder()
    queries = decoder.config.num_attention_heads // decoder.config.num_key_value_heads
    dtype = next(net.parameters()).dtype
    seating = seat([len(p) for p in prompts], layout.lengths, owner, queries, dtype)
    with sibling_attention(decoder):
        states = decoder(
            input_ids=layout.ids, position_ids=layout.positions, use_cache=False, seating=seating
        ).last_hidden_state
    return torch.nn.functional.embedding(layout.where, states[0])  # (B, T, H)


def _distinct_prompts(batch: Batch) -> tuple[list[tuple[int, ...]], Tensor]:
    """Each prompt once, in order of appearance, and for every row which one it has (B,).

    Found by comparing tokens, never by counting: a row can only be paired with its own prompt.
    """
    seen: dict[tuple[int, ...], int] = {}
    rows = zip(batch.input_ids.tolist(), batch.prompt_lens.tolist(), strict=True)
    owner = [seen.setdefault(tuple(ids[:length]), len(seen)) for ids, length in rows]
    return list(seen), torch.tensor(owner, device=batch.input_ids.device)


def _spread(values: Tensor, mask: Tensor) -> Tensor:
    """(N,) values back to their places in (B, T), zero elsewhere."""
    return values.new_zeros(mask.shape).masked_scatter(mask, values)

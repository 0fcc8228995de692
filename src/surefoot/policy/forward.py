"""Hidden states of completion tokens, without paying for the prompt once per sibling.

Siblings share their prompt. Running it once and letting every sibling attend to it costs
U*P + B*T tokens instead of B*(P + T); gradients flow into the shared prompt from all of them.

Axes: B rows, U distinct prompts, P prompt width, T completion width, H hidden, V vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache

from surefoot.maths.logprobs import TokenScores, score_tokens_chunked
from surefoot.maths.packing import Batch

LOGITS_BUDGET = 256 * 2**20
"""Bytes of logits that are kept for the backward pass; what is beyond it is computed again, chunk by chunk."""

SHARING_PAYS = 0.8
"""Share the prompt when that leaves at most this fraction of the tokens; a plain call is simpler."""

PACKED_WIDTH = 1024
"""Longest row that a whole group is packed into; beyond it, attention over masked siblings costs more than it saves."""


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
    prompts, owner = _distinct_prompts(batch)
    rows, width = batch.completion_ids.shape
    shared = len(prompts) * max(map(len, prompts)) + rows * width
    if shared > SHARING_PAYS * batch.input_ids.numel() or width == 1:
        return _plain(net, batch)
    layout = _lay_out(batch, prompts, owner)
    if layout.ids.shape[1] <= PACKED_WIDTH:
        return _packed(net, layout)
    return _shared(net, batch, prompts, owner)


def _plain(net: Any, batch: Batch) -> Tensor:
    """One call over prompt and completion together."""
    width = batch.completion_ids.shape[1]
    # Padded on the right and causal: no real token can see padding, so no mask is needed.
    states = net.get_decoder()(input_ids=batch.input_ids, use_cache=False).last_hidden_state
    where = batch.prompt_lens[:, None] - 1 + torch.arange(width, device=states.device)
    where = where.clamp(max=states.shape[1] - 1)  # only padding can reach beyond; the mask drops it
    index = where[..., None].expand(-1, -1, states.shape[-1])
    return torch.gather(states, 1, index)


class _Layout(NamedTuple):
    """Groups laid out as rows: the prompt, then every sibling's completion behind it."""

    ids: Tensor  # (U, W)
    positions: Tensor  # (U, W) as if each completion stood right behind the prompt
    owner: Tensor  # (U, W) 0 prompt, i + 1 sibling i, -1 padding
    where: Tensor  # (B, T) flat index of the state that predicts each completion token


def _lay_out(batch: Batch, prompts: list[tuple[int, ...]], owner: Tensor) -> _Layout:
    completions = batch.completion_ids.tolist()
    # What comes behind the last trained token predicts nothing that is asked for.
    lengths = [max((t + 1 for t, on in enumerate(row) if on), default=1) for row in batch.mask.tolist()]
    rows = [(list(p), list(range(len(p))), [0] * len(p)) for p in prompts]
    where = torch.zeros(batch.mask.shape, dtype=torch.long)
    for b, (u, length) in enumerate(zip(owner.tolist(), lengths, strict=True)):
        ids, positions, owners = rows[u]
        begin, prompt = len(ids), len(prompts[u])
        ids += completions[b][: length - 1]
        positions += range(prompt, prompt + length - 1)
        owners += [b + 1] * (length - 1)
        where[b, :length] = torch.tensor([prompt - 1, *range(begin, begin + length - 1)])
    width = max(len(ids) for ids, _, _ in rows)

    def table(part: int, fill: int) -> Tensor:
        padded = [[*row[part], *[fill] * (width - len(row[part]))] for row in rows]
        return torch.tensor(padded, device=batch.mask.device)

    return _Layout(table(0, 0), table(1, 0), table(2, -1), where.to(batch.mask.device) + owner[:, None] * width)


def _packed(net: Any, layout: _Layout) -> Tensor:
    """One call: a token sees the prompt and its own completion before it, never a sibling's."""
    slots = torch.arange(layout.ids.shape[1], device=layout.ids.device)
    query, key = layout.owner[:, :, None], layout.owner[:, None, :]
    before = slots[None, :] <= slots[:, None]
    # Padding sees itself, so that no row of the softmax is empty.
    seen = (before & ((key == 0) | (key == query))) | (slots[None, :] == slots[:, None])
    dtype = next(net.parameters()).dtype
    bias = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, torch.finfo(dtype).min)
    states = net.get_decoder()(
        input_ids=layout.ids, attention_mask=bias[:, None], position_ids=layout.positions, use_cache=False
    ).last_hidden_state
    return torch.nn.functional.embedding(layout.where, states.flatten(0, 1))  # (B, T, H)


def _shared(net: Any, batch: Batch, prompts: list[tuple[int, ...]], owner: Tensor) -> Tensor:
    """The prompts once, then every completion against the keys and values of its own prompt."""
    device = batch.input_ids.device
    lens = torch.tensor([len(p) for p in prompts], device=device)
    width = int(lens.max())
    padded = torch.zeros(len(prompts), width, dtype=torch.long, device=device)
    for i, prompt in enumerate(prompts):
        padded[i, : len(prompt)] = torch.tensor(prompt, device=device)
    real = torch.arange(width, device=device) < lens[:, None]  # (U, P)
    first = net.get_decoder()(input_ids=padded, past_key_values=DynamicCache(), use_cache=True)
    last = first.last_hidden_state[torch.arange(len(prompts), device=device), lens - 1]  # (U, H)
    cache = DynamicCache()
    for i, layer in enumerate(first.past_key_values.layers):
        cache.update(layer.keys[owner], layer.values[owner], i)  # (B, kv_heads, P, D)
    inputs = batch.completion_ids[:, :-1]
    steps = torch.arange(inputs.shape[1], device=device)
    # Only the padding between a short prompt and its completion must be hidden; the rest is causal.
    mask = torch.cat([real[owner], torch.ones_like(inputs, dtype=torch.bool)], dim=1).long()
    rest = net.get_decoder()(
        input_ids=inputs, attention_mask=mask, position_ids=batch.prompt_lens[:, None] + steps,
        past_key_values=cache, use_cache=True,
    ).last_hidden_state  # fmt: skip
    return torch.cat([last[owner][:, None], rest], dim=1)


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

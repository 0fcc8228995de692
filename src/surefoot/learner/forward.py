"""Attention for a whole batch laid out as one row: prompts once, then every completion behind them.

A completion's token sees its own prompt and its own completion, nobody else's. Products run over the real tokens
alone; only attention, which needs rectangles, pads: each completion attends to [its prompt, itself].

Axes: N tokens of the row, U prompts, P prompt width, B completions, T completion width, K key/value heads,
Q query heads per key/value head, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - the community's name
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from surefoot.errors import InvariantError, ModelError
from surefoot.learner.any_forward import score_rows
from surefoot.learner.architectures import SHARED, rows_together
from surefoot.maths.logprobs import TokenScores, score_tokens_chunked
from surefoot.maths.packing import Batch

T = TypeVar("T")
ATTENTION_NAME = "surefoot_siblings"


class PackedIndex(NamedTuple):
    """Where each token of the row sits in the rectangles, and where to find it again."""

    prompts: Tensor  # (U * P,) token of the row at each place; padding repeats token 0
    completions: Tensor  # (B * T,)
    prompt_of: Tensor  # (B,) which prompt a completion follows
    prompt_bias: Tensor  # (1, 1, Q * P, P) causal
    bias: Tensor  # (B, 1, Q * T, P + T) hides the prompt's padding and what comes later
    back: Tensor  # (N,) place of each token among the U * P + B * T


def build_packed_index(
    prompt_lens: Sequence[int], lengths: Sequence[int], owner: Tensor, queries: int, dtype: torch.dtype
) -> PackedIndex:
    """Places for a row that holds `prompt_lens` tokens per prompt, then `lengths` tokens per completion.

    Args:
        owner: (B,) index of each completion's prompt.
        queries: query heads per key/value head.
    """
    device = owner.device
    begins = torch.tensor([0, *prompt_lens, *lengths]).cumsum(0)[:-1]
    p, t = max(prompt_lens), max(max(lengths), 1)
    prompts, prompt_back = _places(begins[: len(prompt_lens)], torch.tensor(prompt_lens), p)
    completions, completion_back = _places(begins[len(prompt_lens) :], torch.tensor(lengths), t)
    back = torch.cat([prompt_back, len(prompts) + completion_back])
    lens = torch.tensor(prompt_lens, device=device)
    padding = torch.arange(p, device=device) >= lens[owner][:, None]  # (B, P)
    hidden = torch.cat([padding[:, None].expand(-1, t, -1), _later(t, device).expand(len(lengths), -1, -1)], dim=-1)
    return PackedIndex(
        prompts.to(device), completions.to(device), owner, _as_bias(_later(p, device)[None], queries, dtype),
        _as_bias(hidden, queries, dtype), back.to(device),
    )  # fmt: skip


def _places(begins: Tensor, lengths: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """(rows * width,) tokens of a padded rectangle, and the place of each real token in it, in order."""
    steps = torch.arange(width)
    real = steps < lengths[:, None]
    return torch.where(real, begins[:, None] + steps, 0).flatten(), real.flatten().nonzero().squeeze(-1)


def _later(width: int, device: torch.device) -> Tensor:
    return torch.ones(width, width, dtype=torch.bool, device=device).triu(1)


def _as_bias(hidden: Tensor, queries: int, dtype: torch.dtype) -> Tensor:
    """(n, T, S) bool -> (n, 1, Q * T, S): query heads that share keys stand behind one another."""
    bias = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
    # The lowest finite number, not minus infinity: no row of the softmax may be empty.
    return bias.masked_fill_(hidden, torch.finfo(dtype).min).repeat(1, queries, 1)[:, None]


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, packed_index: PackedIndex,
    scaling: float,
    dropout: float = 0.0, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """(1, K * Q, N, D) queries, (1, K, N, D) keys and values -> (1, N, K * Q, D)."""
    kv_heads = key.shape[1]
    q, k, v = (t[0].transpose(0, 1).contiguous() for t in (query, key, value))  # (N, heads, D)
    u, p = len(packed_index.prompts) // packed_index.prompt_bias.shape[-1], packed_index.prompt_bias.shape[-1]
    b = len(packed_index.prompt_of)

    def pick(tokens: Tensor, places: Tensor, rows: int) -> Tensor:
        picked: Tensor = tokens.index_select(0, places).unflatten(0, (rows, -1))  # (rows, width, heads, D)
        return picked

    keys, values = pick(k, packed_index.prompts, u), pick(v, packed_index.prompts, u)
    first = mix(pick(q, packed_index.prompts, u), keys, values, packed_index.prompt_bias, kv_heads, scaling, dropout)
    own_keys, own_values = pick(k, packed_index.completions, b), pick(v, packed_index.completions, b)
    keys = torch.cat([_prompts_of_rows(keys, packed_index.prompt_of), own_keys], dim=1)
    values = torch.cat([_prompts_of_rows(values, packed_index.prompt_of), own_values], dim=1)
    rest = mix(pick(q, packed_index.completions, b), keys, values, packed_index.bias, kv_heads, scaling, dropout)
    assert first.shape[1] == p, "one place per prompt token"
    mixed = torch.cat([first.flatten(0, 1), rest.flatten(0, 1)]).index_select(0, packed_index.back)
    return mixed[None], None


def _prompts_of_rows(prompts: Tensor, owner: Tensor) -> Tensor:
    """(U, P, K, D) -> (B, P, K, D), each completion's own prompt."""
    return prompts.expand(len(owner), -1, -1, -1) if len(prompts) == 1 else prompts.index_select(0, owner)


def mix(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, kv_heads: int, scaling: float, dropout: float) -> Tensor:
    """q (n, T, K * Q, D), k and v (n, S, K, D), bias (n or 1, 1, Q * T, S) -> (n, T, K * Q, D)."""
    width = q.shape[1]
    # Query heads that share a key head become the query axis: no keys are repeated in memory.
    q = q.unflatten(2, (kv_heads, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)  # (n, K, Q * T, D)
    mixed = F.scaled_dot_product_attention(
        q, k.transpose(1, 2), v.transpose(1, 2), attn_mask=bias, dropout_p=dropout, scale=scaling
    )
    back: Tensor = mixed.unflatten(2, (-1, width)).permute(0, 3, 1, 2, 4).flatten(2, 3)
    return back


AttentionInterface.register(ATTENTION_NAME, attend)


@contextmanager
def sibling_attention(decoder: Any) -> Iterator[None]:
    """The decoder attends by the packed index for the length of the block; put back whatever happens."""
    before = decoder.config._attn_implementation
    decoder.config._attn_implementation = ATTENTION_NAME
    try:
        yield
    finally:
        decoder.config._attn_implementation = before


# -- Layers that are computed again in the backward pass instead of being kept (`gradient_checkpointing`)


@contextmanager
def recomputed_layers(net: Any, *, wanted: bool = True) -> Iterator[None]:
    """A forward pass in this block keeps the input of each layer for its backward pass, and nothing inside of it."""
    layers = layers_of(net) if wanted else []
    for layer in layers:
        layer.forward = partial(_recomputed, net.get_decoder().config, layer.forward)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward  # the class's own is there again


def layers_of(net: Any) -> list[Any]:
    """The layers of its decoder, one after the other."""
    decoder = net.get_decoder()
    found = next((each for name in ("layers", "h") if (each := getattr(decoder, name, None)) is not None), None)
    if found is None:
        raise ModelError(
            f"gradient_checkpointing with architecture {net.config.model_type!r}: its decoder has no list of layers",
            "what would be computed again is not known", "set gradient_checkpointing = false",
        )  # fmt: skip
    return list(found)


def _recomputed(config: Any, forward: Callable[..., Any], *args: Any, **words: Any) -> Any:
    """A layer is computed again when `sibling_attention` has long been left: it attends as it did the first time."""
    attention = config._attn_implementation

    def run(*again: Any) -> Any:
        before, config._attn_implementation = config._attn_implementation, attention
        try:
            return forward(*again, **words)
        finally:
            config._attn_implementation = before

    return recompute(run, *args)


def recompute(block: Callable[..., Any], *args: Any) -> Any:
    """What `block` makes of these; what its backward pass needs is computed again when it is needed."""
    return checkpoint(block, *args, use_reentrant=False, preserve_rng_state=False)  # nothing in it draws


# -- Hidden states of completion tokens, without paying for the prompt once per sibling -----------
# Siblings share their prompt. Running it once and letting every sibling attend to it costs
# U*P + B*T tokens instead of B*(P + T); gradients flow into the shared prompt from all of them.


LOGITS_BUDGET = 256 * 2**20
"""Bytes of logits that are kept for the backward pass; what is beyond it is computed again, chunk by chunk."""

SHARING_PAYS = 0.8
"""Share the prompt when that leaves at most this fraction of the tokens; a plain call is simpler."""


SHARDED_ENTRY = "surefoot_score_here"
"""Where a sharded network is entered: there it gathers the weights outside of its layers too."""
_together: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
"""How rows of each network are put together, found once."""


def inside(net: Any, work: Callable[..., T], *args: Any, **words: Any) -> T:
    """`work(net, ...)`, with all weights there; what it makes may be taken back through, later."""
    if (entry := getattr(net, SHARDED_ENTRY, None)) is not None:
        return entry(work, *args, **words)  # type: ignore[no-any-return]
    return work(net, *args, **words)


def score_batch(net: Any, batch: Batch, *, temperature: float, with_entropy: bool) -> TokenScores:
    """Log-probability of every trained token of a batch, at the sampling temperature.

    Returns:
        `TokenScores` of shape (B, T); positions outside `batch.mask` hold 0 and no gradient.
    """
    return inside(net, score_here, batch, temperature=temperature, with_entropy=with_entropy)


def score_here(net: Any, batch: Batch, *, temperature: float, with_entropy: bool) -> TokenScores:
    """`score_batch`, of a network whose weights are all there."""
    if (_together.get(net) or _together.setdefault(net, rows_together(net.config))) == SHARED:
        hidden = completion_hidden(net, batch)[batch.mask]  # (N, H): padding never reaches the head
        head = net.get_output_embeddings()
        scores = score_tokens_chunked(
            hidden, head.weight, batch.completion_ids[batch.mask], bias=head.bias, temperature=temperature,
            with_entropy=with_entropy, keep_bytes=LOGITS_BUDGET,
        )  # fmt: skip
    else:
        require_in_place(batch)
        scores = score_rows(net, batch, temperature=temperature, with_entropy=with_entropy)
    entropy = None if scores.entropy is None else _spread(scores.entropy, batch.mask)
    return TokenScores(_spread(scores.logprobs, batch.mask), entropy)


def completion_hidden(net: Any, batch: Batch) -> Tensor:
    """(B, T, H): entry t of a row is the state that predicts completion token t."""
    require_in_place(batch)
    prompts, owner = distinct_prompts(batch)
    rows, width = batch.completion_ids.shape
    shared = len(prompts) * max(map(len, prompts)) + rows * width
    if shared > SHARING_PAYS * batch.input_ids.numel() or width == 1:
        return _plain(net, batch)
    return _shared(net, lay_out(batch, prompts, owner), prompts, owner)


def require_in_place(batch: Batch) -> None:
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
    where = where.clamp(max=states.shape[1] - 1)  # padding alone reaches beyond: `require_in_place` has looked
    index = where[..., None].expand(-1, -1, states.shape[-1])
    return torch.gather(states, 1, index)


class _Layout(NamedTuple):
    """The batch as one row without padding: every prompt, then every completion but its last token."""

    ids: Tensor  # (1, N)
    positions: Tensor  # (1, N) as if each completion stood right behind its prompt
    lengths: list[int]  # B, tokens of each completion that are in the row
    where: Tensor  # (B, T) index of the state that predicts each completion token


def lay_out(batch: Batch, prompts: list[tuple[int, ...]], owner: Tensor) -> _Layout:
    """Where everything stands in the row; `prompts` and `owner` are those of `distinct_prompts`.

    On the CPU, in a few calls over the whole batch: lists of numbers cost a tenth of a fast learner's step.
    """
    device, mask, completions = batch.mask.device, batch.mask.cpu(), batch.completion_ids.cpu()
    owner, prompt_lens = owner.cpu(), torch.tensor([len(p) for p in prompts])
    steps = torch.arange(mask.shape[1])
    # What comes behind the last trained token predicts nothing that is asked for; nor does that token itself.
    last = torch.cat([torch.zeros(len(mask), 1, dtype=torch.long), mask * steps], dim=1).amax(1)  # (B,)
    inside = steps < last[:, None]  # (B, T) completion tokens that are in the row
    ends = prompt_lens.cumsum(0)
    begins = int(ends[-1]) + last.cumsum(0) - last
    where = torch.where(steps <= last[:, None], begins[:, None] + steps - 1, 0)
    where[:, :1] = (ends[owner] - 1)[:, None]  # the first one is predicted by its prompt's last token
    ids = torch.cat([torch.tensor([token for prompt in prompts for token in prompt]), completions[inside]])
    behind = (prompt_lens[owner][:, None] + steps)[inside]
    positions = torch.cat([*(torch.arange(len(p)) for p in prompts), behind])
    return _Layout(ids[None].to(device), positions[None].to(device), last.tolist(), where.to(device))


def _shared(net: Any, layout: _Layout, prompts: list[tuple[int, ...]], owner: Tensor) -> Tensor:
    """One call: a token sees its prompt and its own completion before it, never a sibling's."""
    decoder = net.get_decoder()
    queries = decoder.config.num_attention_heads // decoder.config.num_key_value_heads
    dtype = next(net.parameters()).dtype
    packed_index = build_packed_index([len(p) for p in prompts], layout.lengths, owner, queries, dtype)
    with sibling_attention(decoder):
        states = decoder(
            input_ids=layout.ids, position_ids=layout.positions, use_cache=False, packed_index=packed_index
        ).last_hidden_state
    return torch.nn.functional.embedding(layout.where, states[0])  # (B, T, H)


def distinct_prompts(batch: Batch) -> tuple[list[tuple[int, ...]], Tensor]:
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

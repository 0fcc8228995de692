"""The learner's forward pass for any causal language model: the model's own modules, and its own output layer.

Owns       scores of models that `forward.py` does not write out, and the proof that they are the model's.
Promises   nothing between the last hidden state and a probability is written down here: scalings, soft caps and biases
           are whatever the model's own `forward` does, asked for the tokens that are trained and chunk by chunk; a row
           is scored as it would be alone.
Never      decides which models come here: `architectures.py` does.

Axes: B rows, L sequence positions, T completion positions, N trained tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from surefoot.errors import ModelError
from surefoot.learner.architectures import ALONE, rows_together
from surefoot.maths.logprobs import CHUNK_TOKENS, TokenScores, score_tokens
from surefoot.maths.packing import Batch, make_batch
from surefoot.records import TrainSample

LOGITS_BUDGET = 256 * 2**20
"""Bytes of logits that are kept for the backward pass; beyond it they are computed again, chunk by chunk."""
PROOF_TOLERANCE = {"cpu": 2e-3}
ROUGH_TOLERANCE = 5e-2
"""Nats between two ways to compute one float32 model, on a CPU and elsewhere, where kernels round as they like.

A leak or a lost scaling is far above."""
PROOF_SHARE = 0.1
"""Tokens that may be further apart: a router that is of two minds chooses another expert for the last bit."""
PROOF_LENGTHS = ((5, 4), (11, 9), (2, 3))
"""Tokens of prompt and completion in each row of the proof."""


def score_rows(net: Any, batch: Batch, *, temperature: float, with_entropy: bool) -> TokenScores:
    """(N,) scores of the trained tokens of a batch, in the order of `batch.mask`."""
    hidden = states_of(net, batch)
    return score_states(net, hidden, batch.completion_ids[batch.mask], temperature, with_entropy=with_entropy)


def states_of(net: Any, batch: Batch) -> Tensor:
    """(N, H) the state that predicts each trained token."""
    rows, tokens = batch.mask.nonzero(as_tuple=True)
    places = batch.prompt_lens[rows] - 1 + tokens
    if rows_together(net.config) != ALONE:
        return _states(net, batch.input_ids)[rows, places]
    found = []
    for row in range(len(batch)):
        own = places[rows == row]
        if len(own):
            found.append(_states(net, batch.input_ids[row : row + 1, : int(own.max()) + 1])[0, own])
    return torch.cat(found) if found else _states(net, batch.input_ids[:1])[0, :0]


def _states(net: Any, ids: Tensor) -> Tensor:
    """(B, L, H). Rows are filled up on the right and the model is causal: no real token sees padding."""
    states: Tensor = _decoder_of(net)(input_ids=ids, use_cache=False).last_hidden_state
    return states


def score_states(
    net: Any, hidden: Tensor, ids: Tensor, temperature: float, *, with_entropy: bool, budget: int = LOGITS_BUDGET
) -> TokenScores:
    """(N,) scores of tokens, given the states (N, H) that predict them, by the model's own output layer."""
    head = _head_of(net)

    def scored(states: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor | None]:
        return tuple(score_tokens(head(states[None])[0], chosen, temperature=temperature, with_entropy=with_entropy))  # type: ignore[return-value]

    whole = hidden.shape[0] * net.get_input_embeddings().weight.shape[0] * 4 <= budget
    if whole or not torch.is_grad_enabled():
        pieces = [scored(*piece) for piece in _pieces(hidden, ids, len(ids) if whole else CHUNK_TOKENS)]
    else:
        pieces = [checkpoint(scored, *piece, use_reentrant=False) for piece in _pieces(hidden, ids, CHUNK_TOKENS)]
    entropy = torch.cat([each[1] for each in pieces]) if with_entropy else None  # type: ignore[misc]
    return TokenScores(torch.cat([each[0] for each in pieces]), entropy)


def _pieces(hidden: Tensor, ids: Tensor, size: int) -> list[tuple[Tensor, Tensor]]:
    return list(zip(hidden.split(max(1, size)), ids.split(max(1, size)), strict=True))


# -- The model's own way from a hidden state to logits ---------------------------------------------
# A copy of the outermost module that shares everything with the original but its decoder: in that one's place stands a
# copy that answers with states which are there already. The rest of the model's own `forward` runs as it is.


class _Given:
    """What a decoder would have answered."""

    def __init__(self, states: Tensor) -> None:
        self.last_hidden_state = states

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None


def _decoder_of(net: Any) -> Any:
    """The module below the output layer whose answer is the last hidden state."""
    found = net.get_decoder()
    if found is not net and hasattr(found, "config"):
        return found
    below = [child for child in net.children() if hasattr(child, "config")]  # some name another layer so
    if not below:
        raise ModelError(
            f"architecture {net.config.model_type!r} has no decoder below its output layer",
            "its logits would have to be guessed from its hidden states", "use an architecture of docs/models.md",
        )  # fmt: skip
    return below[0]


def _head_of(net: Any) -> Callable[[Tensor], Tensor]:
    """States (B, L, H) to logits (B, L, V), as the model's own `forward` does it."""
    decoder = _decoder_of(net)
    path = next(name for name, module in net.named_modules() if module is decoder)
    head = copy.copy(net)
    given: list[Tensor] = []
    inside = head
    for name in path.split("."):
        child = copy.copy(inside._modules[name])
        inside._modules = {**inside._modules, name: child}
        inside = child
    inside.forward = lambda *_, **__: _Given(given[-1])
    ids = torch.zeros(1, 1, dtype=torch.long, device=next(net.parameters()).device)

    def logits_of(states: Tensor) -> Tensor:
        given[:] = [states]
        logits: Tensor = head(input_ids=ids, use_cache=False).logits
        return logits

    return logits_of


# -- What is asked of the model itself before anything is trained ------------------------------------


@torch.no_grad()
def prove(name: str, net: Any) -> None:
    """Refuse a model of which rows see each other or what comes after them, or whose scores are not its own.

    Args:
        name: what the user calls it.
        net: in float32, not plain.
    """
    samples = [_made_up(net, row, *lengths) for row, lengths in enumerate(PROOF_LENGTHS)]
    own = torch.cat([_alone(net, sample) for sample in samples])
    batch = make_batch(samples, pad_token_id=0)[0].to(next(net.parameters()).device)
    try:
        together = score_rows(net, batch, temperature=1.0, with_entropy=False).logprobs
    except (AttributeError, TypeError, KeyError, IndexError) as error:
        raise ModelError(
            f"model {name!r} (architecture {net.config.model_type!r}) cannot be scored: {error!r}",
            "its modules are not called as those of other causal language models are",
            "use another architecture; docs/models.md lists those that were tested",
        ) from error
    _refuse_gap(
        name, net, own, together, "in a batch than alone",
        "a neighbour, or what comes after a token, would be part of its probability",
    )  # fmt: skip
    with _eager(net) as is_other:
        plain = torch.cat([_alone(net, sample) for sample in samples]) if is_other else own
    _refuse_gap(
        name, net, own, plain, f"by {net.config._attn_implementation!r} attention than written out",
        "that attention leaves out something that the model has, and engine and learner would agree on it",
    )  # fmt: skip


def _made_up(net: Any, row: int, prompt: int, said: int) -> TrainSample:
    vocabulary = net.get_input_embeddings().weight.shape[0]
    ids = [(11 + 13 * row + 7 * place * (row + 1)) % vocabulary for place in range(prompt + said)]
    return TrainSample(
        item_id=f"proof/{row}", trainer_version=0, group=str(row), index=0, prompt_ids=tuple(ids[:prompt]),
        completion_ids=tuple(ids[prompt:]), sampled=(True,) * said, logprobs=(0.0,) * said, reward=0.0,
    )  # fmt: skip


def _alone(net: Any, sample: TrainSample) -> Tensor:
    """(T,) one row by the whole model, as anybody would call it."""
    ids = torch.tensor([sample.prompt_ids + sample.completion_ids], device=next(net.parameters()).device)
    said = net(input_ids=ids, use_cache=False).logits[0, len(sample.prompt_ids) - 1 : -1]
    return score_tokens(said, ids[0, len(sample.prompt_ids) :]).logprobs


@contextmanager
def _eager(net: Any) -> Iterator[bool]:
    """Inside this the model attends by plain products; False where it always does, or has no attention."""
    before = net.config._attn_implementation
    if before in (None, "eager"):
        yield False
        return
    net.set_attn_implementation("eager")
    try:
        yield True
    finally:
        net.set_attn_implementation(before)


def _refuse_gap(name: str, net: Any, one: Tensor, other: Tensor, where: str, why: str) -> None:
    gaps, limit = (one - other).abs(), PROOF_TOLERANCE.get(one.device.type, ROUGH_TOLERANCE)
    if bool(gaps.isfinite().all()) and float((gaps > limit).float().mean()) <= PROOF_SHARE:
        return
    raise ModelError(
        f"model {name!r} (architecture {net.config.model_type!r}) gives tokens other probabilities {where}: "
        f"up to {float(gaps.max()):.3g} nats apart, {limit:g} are rounding",
        why, "use another architecture; docs/models.md lists those that were tested",
    )  # fmt: skip

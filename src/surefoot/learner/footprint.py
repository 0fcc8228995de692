"""What a run holds in memory at its largest moment, added up from sizes alone.

Three moments are compared, and the largest is the peak: a microbatch that has been scored and not yet taken back, the
optimiser's step, and sampling. What lasts from step to step (weights, masters, moments, the engine's copy and cache) is
in all of them.

    sampling   what lasts + the gradients of the step before + prompts being read, distributions being drawn
    learning   what lasts + gradients + activations of one microbatch + the logits of a chunk, or one layer's way back
    stepping   what lasts + gradients + copies of one piece of the parameters, to count what changes

Promises   arithmetic: the same sizes give the same bytes, on every machine; every term names what it counts.
Never      imports torch, or asks a device.

Bytes are those of torch's allocator; Python, torch and a device's own context are not in them.

Axes: N tokens of a microbatch's row, B completions, P prompt, T completion, H hidden, I intermediate, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

FLOAT32 = 4
PACKED_WIDTH = 0.5 + 4 / 64
"""Bytes of a weight in four bits: a code, and its share of a float32 scale for 64 of them."""
BASE_TOKENS = 4096
"""What `config.MICROBATCH_TOKENS` says; a test compares them."""
LOGITS_CHUNK, LOGITS_KEPT = 512 << 20, 256 << 20
"""Bytes of logits: those of a fused chunk, and those that the plain way keeps for the backward pass."""
PLAIN_CHUNK = 128
"""Tokens of a plain chunk."""
ACTIVATION_BYTES = 10 << 30
"""What the fused forward pass may keep for the backward pass at most; more rows at once would not be faster."""
COUNTED = {"cpu": 16 << 20, "cuda": 64 << 20}
"""Entries that the optimiser steps at once."""
SLICE, PREFILL, DRAWN = 4 << 20, 32_768, 256
"""Entries of an 8-bit slice, prompt tokens read at once, rows drawn at once."""
WORKSPACE = {"cpu": 0, "cuda": 64 << 20}
"""Of the matrix library."""
MOMENT_BYTES = {"adamw": 8.0, "adamw_8bit": 2 * (1 + 4 / 256), "sgd": 0.0}
"""Of a trained entry."""
ROOM = 0.9
"""Of a device's memory that a run may plan with: allocators leave gaps."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a transformer with grouped attention."""

    parameters: int
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool = field(default=True, kw_only=True)
    """Embeddings and output layer are one tensor."""
    qk_norm: bool = field(default=False, kw_only=True)
    """Queries and keys are normed (Qwen3)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Everything else that memory depends on."""

    device: str = "cpu"
    width: int = FLOAT32
    """Bytes of a number that computes."""
    groups: int
    siblings: int
    prompt: int
    completion: int
    microbatch_size: int = 0
    optim: str = "adamw"
    reference: bool = False
    """A copy of the weights to stay near to."""
    adapter: int | None = None
    """Entries of an adapter, which is trained in place of the weights."""
    merged: int = 0
    """Entries of the base that have a merged copy for engines."""
    packed: int = 0
    """Entries of the base that are held in four bits."""
    fused: bool = False
    """The fused forward pass, and microbatches by free memory."""
    recomputes: bool = False
    """`gradient_checkpointing`."""
    engine_copies: int = 1
    rows: int = 0
    """That an engine in this process decodes side by side; 0 without one."""
    free: float | None = None
    """Bytes that the device has for torch; None takes what a microbatch asks for."""


@dataclass(frozen=True, slots=True)
class Microbatch:
    """One microbatch, the largest of a step."""

    rows: int
    prompts: int
    tokens: int
    count: int
    """How many of them make the step."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes by purpose, and the largest moment."""

    lasting: Mapping[str, float]
    passing: Mapping[str, float]
    """What comes and goes, each at its largest; not all of it at once."""
    moments: Mapping[str, float]
    """The three moments, whole."""
    microbatch: Microbatch
    recomputes: bool

    @property
    def moment(self) -> str:
        """The largest one."""
        return max(self.moments, key=lambda name: self.moments[name])

    @property
    def peak(self) -> float:
        """Bytes then."""
        return self.moments[self.moment]


def predict(shape: ModelShape, work: Work) -> Footprint:
    """The footprint of a run of this work with a model of this shape."""
    lasting = lasting_bytes(shape, work)
    gradients = float(_trained(shape, work) * FLOAT32)
    piece = cut(shape, work, unused=None if work.free is None else work.free - sum(lasting.values()) - gradients)
    kept = activation_bytes(shape, work, piece)
    logits, layer = _logits(shape, work, piece), _layer_back(shape, work, piece)
    logits = max(logits, _reference_pass(shape, work, piece))
    stepping, sampling = _stepping(shape, work), _sampling(shape, work)
    own = sum(lasting.values()) + WORKSPACE.get(work.device, 0)
    if piece.count > 1:  # those of the pieces before are there
        learning = gradients + kept + max(logits, layer)
    else:  # they come as activations go
        learning = max(kept + max(logits, layer), gradients + layer)
    passing = {
        "gradients": gradients, "activations": kept, "logits of one chunk": logits, "one layer's way back": layer,
        "counting what changes": stepping, "reading and drawing": sampling,
    }  # fmt: skip
    moments = {
        "learning": own + learning, "stepping": own + gradients + stepping, "sampling": own + gradients + sampling,
    }  # fmt: skip
    return Footprint(lasting, {k: v for k, v in passing.items() if v}, moments, piece, work.recomputes)


def decided(shape: ModelShape, work: Work, wanted: bool | str) -> bool:
    """Whether layers are computed again: as the key says, and with "auto" where they would not fit otherwise."""
    if wanted != "auto":
        return bool(wanted)
    return work.free is not None and predict(shape, work).peak > ROOM * work.free


# -- What lasts -----------------------------------------------------------------------------------


def lasting_bytes(shape: ModelShape, work: Work) -> dict[str, float]:
    """What is there from step to step, by purpose; what is not there is left out."""
    weights, trained = float(shape.parameters * work.width), float(_trained(shape, work) * FLOAT32)
    spared = work.packed * (work.width - PACKED_WIDTH)
    whole = work.adapter is None
    parts = {
        "weights": weights - spared,
        "adapter": 0.0 if whole else trained,
        "merged for engines": float(work.merged * work.width) + (0.0 if whole else FLOAT32 * _largest(shape)),
        "float32 masters": trained if work.width != FLOAT32 and whole else 0.0,
        "optimiser states": MOMENT_BYTES[work.optim] * trained / FLOAT32,
        "reference policy": weights if work.reference and whole else 0.0,
        "engine copy": work.engine_copies * weights,
        "KV cache": _cache(shape, work),
    }
    return {name: value for name, value in parts.items() if value}


def _trained(shape: ModelShape, work: Work) -> int:
    return shape.parameters if work.adapter is None else work.adapter


def _largest(shape: ModelShape) -> int:
    """Entries of the largest matrix of a layer."""
    return shape.hidden * max(shape.intermediate, shape.heads * shape.head_dim)


def _cache(shape: ModelShape, work: Work) -> float:
    if not work.rows:
        return 0.0
    rows = work.rows + (1 if work.device == "cuda" else 0)  # one slot more takes what idle rows write
    wide = -(-(work.prompt + work.completion) // 32) * 32
    return float(rows * wide * shape.layers * 2 * shape.kv_heads * shape.head_dim * work.width)


# -- One microbatch -------------------------------------------------------------------------------


def bytes_of_token(shape: ModelShape, work: Work) -> float:
    """What the forward pass keeps of one token for the way back, in all layers."""
    if not work.recomputes:
        return shape.layers * _layer_of_token(shape, work)
    kept = (2 if work.fused else 1) * shape.hidden * work.width
    return shape.layers * kept + _layer_of_token(shape, work)


def _layer_of_token(shape: ModelShape, work: Work) -> float:
    """In one layer whose activations are kept; keys and values of a completion's prompt are counted by `_rectangle`."""
    h, i, w = shape.hidden, shape.intermediate, work.width
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    if work.fused:
        kept = w * (4 * h + 3 * i + 4 * queries + 2 * keys) + 4 * shape.heads
        return kept + (w * (queries + keys) if shape.qk_norm else 0)
    attention = w * (2 * queries + 2 * keys) + 4 * shape.heads
    if work.adapter is None:
        norms = 2 * h * (FLOAT32 + 2 * w) + ((queries + keys) * (FLOAT32 + w) if shape.qk_norm else 0)
        return attention + norms + w * (queries + 4 * i)
    norms = 2 * h * FLOAT32 + ((queries + keys) * FLOAT32 if shape.qk_norm else 0)
    # An adapter reads its input in float32: a copy for each linear layer where the base is coarser.
    inputs = FLOAT32 * ((5 * h if w != FLOAT32 else 2 * h) + queries + i)
    return attention + norms + inputs + w * 3 * i


def _rectangle(shape: ModelShape, work: Work, piece: Microbatch) -> float:
    """Of one layer: keys and values of each completion with its prompt, and a mask that has to be widened."""
    length = work.prompt + work.completion
    kept = float(piece.rows * length * 2 * shape.kv_heads * shape.head_dim * work.width)
    if work.device == "cuda" and length % 16:
        kept += piece.rows * work.completion * (shape.heads // shape.kv_heads) * (length + 16) * work.width
    return kept


def activation_bytes(shape: ModelShape, work: Work, piece: Microbatch) -> float:
    """What a microbatch keeps for its backward pass."""
    layers = 1 if work.recomputes else shape.layers
    kept = piece.tokens * bytes_of_token(shape, work) + layers * _rectangle(shape, work, piece)
    ends = piece.tokens * shape.hidden * (3 * work.width if work.fused else FLOAT32 + 2 * work.width)
    masks = piece.rows * work.completion * (work.prompt + work.completion) * (shape.heads // shape.kv_heads)
    return kept + ends + masks * work.width


def cut(shape: ModelShape, work: Work, *, unused: float | None) -> Microbatch:
    """The largest microbatch, as `samples.split_microbatches` cuts a step whose completions are all of full length.

    Args:
        unused: bytes of the device that nothing lasting takes; None for as many as wanted.
    """
    rows = work.groups * work.siblings
    if work.microbatch_size:
        size = min(work.microbatch_size, rows)
        prompts = -(-size // work.siblings)
        return Microbatch(size, prompts, prompts * work.prompt + size * work.completion, -(-rows // size))
    cost = work.prompt + work.siblings * work.completion
    budget = microbatch_budget(shape, work, unused) if work.fused else BASE_TOKENS
    if budget > BASE_TOKENS:
        whole = work.groups * cost
        budget = min(budget, -(-whole // max(1, -(-whole // budget))) + cost - 1)
    groups = min(work.groups, max(1, budget // cost))
    return Microbatch(groups * work.siblings, groups, groups * cost, -(-work.groups // groups))


def microbatch_budget(shape: ModelShape, work: Work, unused: float | None) -> int:
    """Tokens that the fused forward pass takes at once, with half of what is unused."""
    room = ACTIVATION_BYTES if unused is None else min(ACTIVATION_BYTES, max(0.0, unused) / 2)
    return max(BASE_TOKENS, int(room // bytes_of_token(shape, work)))


def _logits(shape: ModelShape, work: Work, piece: Microbatch) -> float:
    """The output layer's way back."""
    scored, entries = piece.rows * work.completion, shape.vocab * shape.hidden
    hidden = 2 * scored * shape.hidden * work.width
    if work.fused:
        chunk = max(PLAIN_CHUNK, LOGITS_CHUNK // (shape.vocab * work.width))
        alive = min(scored, chunk) * (2 if scored > chunk else 1)
        return float(alive * shape.vocab * work.width + entries * (FLOAT32 + work.width) + hidden)
    kept = min(LOGITS_KEPT, scored * shape.vocab * FLOAT32)
    buffer = entries * (FLOAT32 + (work.width if work.width != FLOAT32 else 0)) if work.adapter is None else 0
    return float(kept + 3 * min(PLAIN_CHUNK, scored) * shape.vocab * FLOAT32 + buffer + hidden)


def _layer_back(shape: ModelShape, work: Work, piece: Microbatch) -> float:
    """Gradients inside one layer and of its largest matrix; the output layer's waits for that of the embeddings."""
    inside = piece.tokens * (4 * shape.intermediate + 4 * shape.hidden) * work.width
    if work.adapter is not None:
        inside += piece.tokens * 2 * shape.intermediate * FLOAT32
        return float(inside)
    waiting = shape.vocab * shape.hidden * work.width * (2 if shape.tied else 1)
    return float(inside + _largest(shape) * work.width + waiting)


def _reference_pass(shape: ModelShape, work: Work, piece: Microbatch) -> float:
    if not work.reference:
        return 0.0
    return float(
        piece.tokens * (3 * shape.intermediate + 6 * shape.hidden) * work.width + 3 * PLAIN_CHUNK * shape.vocab * 4
    )


# -- The other two moments ------------------------------------------------------------------------


def _stepping(shape: ModelShape, work: Work) -> float:
    """Copies of the largest piece, before and after, and what of it changed."""
    trained = _trained(shape, work)
    largest = shape.vocab * shape.hidden if work.adapter is None else 0
    entries = min(trained, max(COUNTED.get(work.device, COUNTED["cpu"]), largest))
    copies = 2 if work.device == "cuda" else 1
    masters = work.width if work.width != FLOAT32 and work.adapter is None else 0
    slices = 8 * FLOAT32 * min(SLICE, trained) if work.optim == "adamw_8bit" else 0
    return float(entries * (copies * (FLOAT32 + masters) + 2) + slices)


def _sampling(shape: ModelShape, work: Work) -> float:
    """Prompts read at once, and distributions that are drawn from."""
    if not work.rows:
        return 0.0
    prompts = min(work.groups, work.rows) if work.device == "cuda" else 1
    tokens = min(PREFILL, prompts * work.prompt) if work.device == "cuda" else work.prompt
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    read = tokens * work.width * (3 * shape.hidden + 3 * shape.intermediate + 7 * queries + 2 * keys)
    drawn = min(work.rows, DRAWN) * shape.vocab * (work.width + 4 * FLOAT32)
    return float(max(read, drawn) + prompts * shape.vocab * work.width)

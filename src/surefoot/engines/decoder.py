"""A Llama-family decoder over weights that it was handed, and how tokens are drawn from its logits.

Promises   weights that were changed in place after the hand-over are noticed: torch's own counter does not see fused
           optimisers, so the first entries of every tensor are remembered and compared. What is drawn depends on a
           rollout's seed and logits alone: not on the batch, the row, or the order of arrival.

A token is drawn by inverting the cumulative distribution at one uniform number. Position t of a rollout uses number t
of that rollout's own stream.

Axes: R rows, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from surefoot.errors import EngineError
from surefoot.maths.fused import rotate
from surefoot.protocols import DecoderSpec, Weights

# -- Draw tokens from logits, one private random stream per rollout --------------------------------


BLOCK = 128
"""Tokens that are summed as one before a block is chosen; short enough for a float32 sum to be exact to a few ulp."""


class Drawn(NamedTuple):
    """Tokens and the log-probability each was drawn with."""

    tokens: Tensor  # (R,) int64
    logprobs: Tensor  # (R,) float32, at the sampling temperature; at temperature 1 when greedy

    def pairs(self) -> list[tuple[int, float]]:
        """(token, logprob) per row, as Python numbers; float32 is exact in a Python float."""
        return list(zip(self.tokens.tolist(), self.logprobs.tolist(), strict=True))


def random_stream(seed: int, length: int) -> list[float]:
    """`length` uniform numbers in [0, 1), a function of `seed` alone."""
    return [float(number) for number in random_numbers(seed, length)]


def random_numbers(seed: int, length: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """`random_stream` as one array."""
    # Philox takes the whole seed; torch's CPU generator looks at 32 bits of it, so 63-bit seeds would collide.
    return np.random.Generator(np.random.Philox(key=seed)).random(length)


def draw(logits: Tensor, temperatures: Tensor, uniforms: Tensor) -> Drawn:
    """One token per row.

    Args:
        logits: (R, V).
        temperatures: (R,) float32; 0 means the most likely token.
        uniforms: (R,) float64 in [0, 1).
    """
    dice = _Distribution(logits, temperatures)
    tokens = torch.where(temperatures == 0, dice.shifted.argmax(dim=-1), dice.invert(uniforms[:, None]).squeeze(1))
    return Drawn(tokens, dice.shifted.gather(1, tokens[:, None]).squeeze(1) - dice.log_total)


def draw_siblings(logits: Tensor, temperature: float, uniforms: Tensor) -> Drawn:
    """Several independent tokens from one distribution: the first tokens of a group.

    Args:
        logits: (V,).
        uniforms: (G,) float64 in [0, 1), one per sibling.
    """
    dice = _Distribution(logits[None], torch.tensor([temperature], device=logits.device))
    if temperature == 0:
        tokens = dice.shifted.argmax(dim=-1).expand(len(uniforms))
    else:
        tokens = dice.invert(uniforms[None]).squeeze(0)
    return Drawn(tokens, dice.shifted[0, tokens] - dice.log_total)


class _Distribution:
    """The cumulative distribution of each row in two levels: whole blocks of the vocabulary, then one block's tokens.

    Only the chosen block is summed token by token: a running sum over the whole vocabulary, in the float64 that it
    needs (in float32 it would shift the tail's probabilities), costs more than the rest of the draw.
    """

    def __init__(self, logits: Tensor, temperatures: Tensor) -> None:
        self.wide = torch.float32 if logits.device.type == "mps" else torch.float64
        shifted = logits.float() / torch.where(temperatures == 0, 1.0, temperatures)[:, None]
        self.shifted = shifted.sub_(shifted.amax(dim=-1, keepdim=True))  # (R, V)
        short = -shifted.shape[-1] % BLOCK
        whole = torch.nn.functional.pad(shifted, (0, short), value=-torch.inf) if short else shifted
        self.parts = whole.exp().unflatten(-1, (-1, BLOCK))  # (R, blocks, BLOCK)
        self.sums = self.parts.sum(dim=-1).to(self.wide)  # (R, blocks)
        self.running = self.sums.cumsum(dim=-1)
        self.log_total = self.running[:, -1].log().float()  # (R,)

    def invert(self, uniforms: Tensor) -> Tensor:
        """(R, G) numbers in [0, 1) -> (R, G) tokens."""
        targets = uniforms.to(self.wide) * self.running[:, -1:]
        block = _first_above(self.running, targets)
        rest = targets - (self.running.gather(1, block) - self.sums.gather(1, block))
        rows = torch.arange(len(block), device=block.device)[:, None]
        inner = self.parts[rows, block].to(self.wide).cumsum(dim=-1)  # (R, G, BLOCK)
        # The block was summed in another order: what is left may lie a rounding error outside of it.
        below = inner[..., -1] * (1 - torch.finfo(self.wide).eps)
        rest = torch.minimum(rest.clamp(min=0), below)
        tokens = block * BLOCK + _first_above(inner, rest[..., None]).squeeze(-1)
        return tokens.clamp_(max=self.shifted.shape[-1] - 1)  # only NaN gets here; its logprob will tell


def _first_above(running: Tensor, targets: Tensor) -> Tensor:
    """First entry strictly above each target: it has positive width, so a zero-probability token is never drawn."""
    return torch.searchsorted(running, targets, right=True).clamp_(max=running.shape[-1] - 1)


# -- Whether weights are still what they were when they were handed over ---------------------------


class MutationCheck:
    """Tensors, by name, and the first entries of each as they were when `remember` was last called."""

    def __init__(self, names: list[str], tensors: list[Tensor]) -> None:
        self.names, self.tensors = names, tensors
        self.views = [_first_entries(tensor.detach()) for tensor in tensors]
        self.places = [tensor.data_ptr() for tensor in tensors]
        self.remember()

    def are(self, tensors: list[Tensor]) -> bool:
        """Whether these are the same tensors, in the same memory."""
        same = all(one is two for one, two in zip(tensors, self.tensors, strict=True))
        return same and [tensor.data_ptr() for tensor in tensors] == self.places

    def remember(self) -> None:
        """From now on they have to stay as they are."""
        self.before = self._bits()

    def changed(self) -> str | None:
        """Name of a tensor that is not what it was."""
        now = self._bits()
        if torch.equal(now, self.before):
            return None
        lengths = [len(view) for view in self.views]
        pairs = zip(self.names, now.split(lengths), self.before.split(lengths), strict=True)
        return next(name for name, one, two in pairs if not torch.equal(one, two))

    def _bits(self) -> Tensor:
        values = torch.cat(self.views)  # as bits, so that NaN equals NaN
        return values.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()])


def _first_entries(tensor: Tensor) -> Tensor:
    """(up to 4,) a view, whatever the tensor's strides are."""
    for _ in range(tensor.dim() - 1):
        tensor = tensor[0]
    return tensor[:4] if tensor.dim() else tensor[None]


# -- Matrix products with a fixed number of rows, laid out for decoding ---------------------------
# A decode step multiplies a few rows with every weight of the model. The library's general
# path is two to three times slower than memory bandwidth allows at such shapes, so on the CPU
# the weights are packed once per weight version and reused for every token.
#
# Packing is an internal layout: the numbers are those of `x @ weight.T + bias`.


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this build packs weights for a fixed row count."""
    packs = torch.backends.mkl.is_available() and hasattr(torch.ops.mkl, "_mkl_linear")
    return device.type == "cpu" and dtype == torch.float32 and packs


def row_step(device: torch.device, dtype: torch.dtype) -> int:
    """Row counts must be multiples of this for a row's result not to depend on the other rows, bit for bit."""
    return 8 if can_pack(device, dtype) else 16


class FixedRowsLinear:
    """`x @ weight.T + bias` for inputs of exactly (rows, K).

    Args:
        weight: (N, K). Read at construction; later in-place changes are not seen.
        bias: (N,) or None.
        rows: the row count of every input.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, rows: int) -> None:
        self.weight, self.bias, self.rows = weight, bias, rows
        self.packed = self.transposed = None
        if can_pack(weight.device, weight.dtype):
            self.packed = torch.ops.mkl._mkl_reorder_linear_weight(weight, rows)
        elif weight.device.type == "cpu":
            self.transposed = weight.t().contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        """(rows, K) -> (rows, N)."""
        if self.packed is not None:
            return torch.ops.mkl._mkl_linear(x, self.packed, self.weight, self.bias, self.rows)  # type: ignore[no-any-return]
        if self.transposed is not None:
            out = x @ self.transposed
            return out if self.bias is None else out + self.bias
        return torch.nn.functional.linear(x, self.weight, self.bias)


class StackedLinear:
    """One product for several weights that read the same input, laid out when somebody first needs it.

    Taking new weights is then a change of pointers, and whoever is replaced before it speaks never pays for packing.

    Args:
        weights: (N_i, K) each; the outputs stand side by side in this order.
        biases: (N_i,) each, or None.
        rows: the row count of every input.
    """

    def __init__(self, weights: Sequence[Tensor], biases: Sequence[Tensor] | None, rows: int) -> None:
        self.weights, self.biases, self.rows = weights, biases, rows
        self.packed: FixedRowsLinear | None = None

    def pack(self) -> None:
        """Read the weights as they are now; later in-place changes are not seen."""
        bias = None if self.biases is None else torch.cat(list(self.biases))
        weight = self.weights[0] if len(self.weights) == 1 else torch.cat(list(self.weights))
        self.packed = FixedRowsLinear(weight, bias, self.rows)

    def __call__(self, x: Tensor) -> Tensor:
        """(rows, K) -> (rows, N_1 + N_2 + ...)."""
        if self.packed is None:
            self.pack()
        assert self.packed is not None, "pack has just made it"
        return self.packed(x)


# -- A Llama-family decoder that runs on weights it is handed: prefill one prompt, step many rows -
# Owns       the forward pass of the embedded engine and its KV cache.
# Promises   what a row computes does not depend, bit for bit in float32, on who sits in the
# other rows: the row count is fixed, the KV width a multiple of `WIDTH_STEP`, and
# every prompt is prefilled alone.
# Taking weights moves pointers only; what decoding needs beside them is laid out
# before the first token (`pack_seconds`).
# Never      loads a model, samples, or knows what a rollout is.
#
# Axes: R rows (fixed), P prompt tokens, W KV width, H hidden, V vocabulary, D head size.


WIDTH_STEP = 32
"""KV widths are multiples of this, so that reductions are cut in the same places whatever the width."""


class Decoder:
    """Prefill and decode with one version of the weights.

    Args:
        spec: the architecture's numbers.
        rows: how many sequences `step` advances at once.
        max_width: longest prompt + completion, in tokens.
        device: where the weights live.
    """

    def __init__(self, spec: DecoderSpec, *, rows: int, max_width: int, device: str, dtype: torch.dtype) -> None:
        self.spec, self.rows, self.device, self.dtype = spec, rows, torch.device(device), dtype
        self.max_width = -(-max_width // WIDTH_STEP) * WIDTH_STEP
        self.cos, self.sin = rotary_tables(spec, self.max_width, self.device, dtype)
        shape = (spec.layers, 2, rows, spec.kv_heads, self.max_width, spec.head_dim)
        self.cache = torch.zeros(shape, dtype=dtype, device=self.device)
        self._row_index = torch.arange(rows, device=self.device)
        self._slots = torch.arange(self.max_width, device=self.device)
        self.names = weight_names(spec)
        self.layers: list[_Layer] = []
        self.head: StackedLinear | None = None
        self.unload()

    def unload(self) -> None:
        """Let go of the weights."""
        self.layers = []
        self.embed = self.norm = torch.empty(0)
        self.head = None
        self._handed: MutationCheck | None = None
        self._drop_packed()

    def _drop_packed(self) -> None:
        """What was laid out belongs to no weights any more; its memory is free for the next ones."""
        for linear in self._linears():
            linear.packed = None
        self.pack_seconds = 0.0
        """What laying out the weights in force has cost; 0 until the first token needs it."""
        self._packed = False
        self._unwiped = set(range(self.rows))

    def _linears(self) -> Iterator[StackedLinear]:
        yield from () if self.head is None else (self.head,)
        yield from (linear for layer in self.layers for linear in layer.linears())

    def check_untouched(self) -> None:
        """Refuse weights that were changed in place after they were handed over.

        Prefill reads them where they lie and decoding has packed copies: after an optimiser step and
        before the next `load`, the two would be different models under one version.
        """
        changed = None if self._handed is None else self._handed.changed()
        if changed is not None:
            raise EngineError(
                f"{changed} was changed in place after it was handed to the engine",
                "half of the forward pass would use the new weights, half the old ones",
                "publish the weights before generating",
            )

    def load(self, weights: Weights) -> None:
        """Take these weights, where they are: prefill reads them there, decoding packs its own layout of them later."""
        missing = [name for name in self.names if name not in weights]
        if missing:
            raise EngineError(
                f"{len(missing)} weights are missing, first {missing[0]}",
                "a layer that keeps its old weights answers without complaint",
                "hand over every parameter of the model",
            )
        tensors = [weights[name] for name in self.names]
        if self._handed is not None and self._handed.are(tensors):  # the same memory with new numbers in it
            self._drop_packed()
            self._handed.remember()
        else:
            self._point_at(weights, tensors)
        head = self.embed if self.spec.tied_head else weights["lm_head.weight"].detach()
        self.head = StackedLinear(
            [head], None, self.rows
        )  # a new one every time: by it others know that we have loaded

    def _point_at(self, weights: Weights, tensors: list[Tensor]) -> None:
        self.unload()
        self.embed = weights["model.embed_tokens.weight"].detach()
        self.norm = weights["model.norm.weight"].detach()
        self.layers = [_Layer(self.spec, i, weights, self.rows) for i in range(self.spec.layers)]
        self._handed = MutationCheck(self.names, tensors)

    def pack(self) -> None:
        """Lay out what decoding reads, once per version; the weights have to be as they were handed over."""
        assert self.head is not None, "load weights before decoding"
        started = time.perf_counter()
        self.check_untouched()
        for linear in self._linears():
            linear.pack()
        self._packed = True
        self.pack_seconds = time.perf_counter() - started

    @torch.inference_mode()
    def prefill(self, prompt_ids: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Run one prompt alone.

        Returns:
            kv: (layers, 2, kv_heads, P, D) and logits: (V,) for the first completion token.
        """
        assert self.head is not None, "load weights before prefilling"
        length = len(prompt_ids)
        x = self.embed[torch.tensor(prompt_ids, device=self.device)]
        cos, sin = self.cos[:length, None], self.sin[:length, None]
        kv = self.cache.new_empty(self.spec.layers, 2, self.spec.kv_heads, length, self.spec.head_dim)
        for i, layer in enumerate(self.layers):
            x = layer.prefill(x, cos, sin, kv[i])
        x = _rms_norm(x[-1:], self.norm, self.spec.norm_eps)
        return kv, F.linear(x, self.head.weights[0])[0]

    def fill_rows(self, rows: list[int], kv: Tensor) -> None:
        """Copy one prompt's keys and values into these rows of the cache."""
        index = torch.tensor(rows, device=self.device)
        if not self._unwiped.isdisjoint(rows):
            # A NaN left over from other weights would pass through the mask: 0 * NaN is NaN.
            self.cache.index_fill_(2, index, 0.0)
            self._unwiped.difference_update(rows)
        self.cache[:, :, index, :, : kv.shape[3]] = kv.unsqueeze(2)

    @torch.inference_mode()
    def step(self, tokens: Tensor, positions: Tensor, longest: int) -> Tensor:
        """Feed one token per row.

        Args:
            tokens: (R,) the last token of each row; anything in an idle row.
            positions: (R,) where that token stands; 0 in an idle row.
            longest: largest position + 1 over all rows.

        Returns:
            (R, V) logits for the next token of each row.
        """
        if not self._packed:
            self.pack()
        assert self.head is not None, "pack refuses to go on without it"
        width = -(-longest // WIDTH_STEP) * WIDTH_STEP
        x = self.embed[tokens]
        cos, sin = self.cos[positions, None], self.sin[positions, None]
        hidden = self._slots[:width] > positions[:, None]
        bias = torch.zeros(hidden.shape, dtype=self.dtype, device=self.device).masked_fill_(hidden, float("-inf"))
        where = (self._row_index, positions)
        for i, layer in enumerate(self.layers):
            x = layer.step(x, cos, sin, self.cache[i], bias[:, None, None, :], where, width)
        x = _rms_norm(x, self.norm, self.spec.norm_eps)
        return self.head(x)


def weight_names(spec: DecoderSpec) -> list[str]:
    """Every tensor that decoding reads, by its Hugging Face name."""
    parts = ["input_layernorm.weight", "post_attention_layernorm.weight"]
    parts += [f"self_attn.{n}_proj.weight" for n in "qkvo"] + [f"mlp.{n}_proj.weight" for n in ("gate", "up", "down")]
    parts += [f"self_attn.{n}_proj.bias" for n in "qkv"] if spec.qkv_bias else []
    parts += [f"self_attn.{n}_norm.weight" for n in "qk"] if spec.qk_norm else []
    names = ["model.embed_tokens.weight", "model.norm.weight", *([] if spec.tied_head else ["lm_head.weight"])]
    return names + [f"model.layers.{i}.{part}" for i in range(spec.layers) for part in parts]


class _Layer:
    """One transformer block in two forms: a whole prompt, or one token in each row."""

    def __init__(self, spec: DecoderSpec, index: int, weights: Weights, rows: int) -> None:
        self.spec = spec
        at = f"model.layers.{index}."

        def get(name: str) -> Tensor:
            return weights[at + name].detach()

        self.norm_in, self.norm_mid = get("input_layernorm.weight"), get("post_attention_layernorm.weight")
        self.qkv = [get(f"self_attn.{n}_proj.weight") for n in "qkv"]
        self.qkv_bias = [get(f"self_attn.{n}_proj.bias") for n in "qkv"] if spec.qkv_bias else [None] * 3
        self.qk_norm = [get(f"self_attn.{n}_norm.weight") for n in "qk"] if spec.qk_norm else None
        self.out, self.gate = get("self_attn.o_proj.weight"), get("mlp.gate_proj.weight")
        self.up, self.down = get("mlp.up_proj.weight"), get("mlp.down_proj.weight")
        # One product for q, k, v and one for gate, up: fewer, larger calls.
        biases = [b for b in self.qkv_bias if b is not None] if spec.qkv_bias else None
        self.packed_qkv = StackedLinear(self.qkv, biases, rows)
        self.packed_out = StackedLinear([self.out], None, rows)
        self.packed_gate_up = StackedLinear([self.gate, self.up], None, rows)
        self.packed_down = StackedLinear([self.down], None, rows)

    def linears(self) -> Iterator[StackedLinear]:
        """What has a layout of its own for decoding."""
        yield from (self.packed_qkv, self.packed_out, self.packed_gate_up, self.packed_down)

    def prefill(self, x: Tensor, cos: Tensor, sin: Tensor, kv: Tensor) -> Tensor:
        """(P, H) -> (P, H); writes (2, kv_heads, P, D) into `kv`."""
        spec = self.spec
        y = _rms_norm(x, self.norm_in, spec.norm_eps)
        q, k, v = (
            F.linear(y, w, b).unflatten(-1, (-1, spec.head_dim)) for w, b in zip(self.qkv, self.qkv_bias, strict=True)
        )  # each (P, heads, D)
        q, k = self._normed(q, k)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        kv[0], kv[1] = k.transpose(0, 1), v.transpose(0, 1)
        repeat = spec.heads // spec.kv_heads
        keys, values = (t.repeat_interleave(repeat, dim=0).unsqueeze(0) for t in (kv[0], kv[1]))
        mixed = F.scaled_dot_product_attention(q.transpose(0, 1).unsqueeze(0), keys, values, is_causal=True)
        x = x + F.linear(mixed[0].transpose(0, 1).flatten(1), self.out)
        y = _rms_norm(x, self.norm_mid, spec.norm_eps)
        return x + F.linear(F.silu(F.linear(y, self.gate)) * F.linear(y, self.up), self.down)

    def step(
        self, x: Tensor, cos: Tensor, sin: Tensor, cache: Tensor, bias: Tensor, where: tuple[Tensor, Tensor], width: int
    ) -> Tensor:
        """(R, H) -> (R, H); writes this token's key and value into `cache` (2, R, kv_heads, W, D)."""
        spec = self.spec
        y = _rms_norm(x, self.norm_in, spec.norm_eps)
        qkv = self.packed_qkv(y).unflatten(-1, (-1, spec.head_dim))  # (R, heads + 2 kv_heads, D)
        both = spec.heads + spec.kv_heads
        if self.qk_norm is None:
            qk = rotate(qkv[:, :both], cos, sin)
        else:
            q, k = self._normed(qkv[:, : spec.heads], qkv[:, spec.heads : both])
            qk = rotate(torch.cat([q, k], dim=1), cos, sin)
        cache[0][where[0], :, where[1]] = qk[:, spec.heads :]
        cache[1][where[0], :, where[1]] = qkv[:, both:]
        # Query heads that share a KV head become the query axis: no keys are repeated in memory.
        q = qk[:, : spec.heads].unflatten(1, (spec.kv_heads, -1))
        mixed = F.scaled_dot_product_attention(q, cache[0, :, :, :width], cache[1, :, :, :width], attn_mask=bias)
        x = x + self.packed_out(mixed.flatten(1))
        y = _rms_norm(x, self.norm_mid, spec.norm_eps)
        gate, up = self.packed_gate_up(y).chunk(2, dim=-1)
        return x + self.packed_down(F.silu(gate) * up)

    def _normed(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if self.qk_norm is None:
            return q, k
        eps = self.spec.norm_eps
        return _rms_norm(q, self.qk_norm[0], eps), _rms_norm(k, self.qk_norm[1], eps)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last axis, float32 inside; on a few CPU rows, half the time of the library's."""
    if x.device.type != "cpu":
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    wide = x.float()
    scale = (wide * wide).sum(dim=-1, keepdim=True).mul_(1 / x.shape[-1]).add_(eps).rsqrt_()
    return weight * (wide * scale).to(x.dtype)


def rotary_tables(spec: DecoderSpec, width: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin, (width, D) each; angles in float32 whatever the dtype of the weights."""
    inv_freq = torch.tensor(spec.inv_freq, dtype=torch.float32, device=device)
    angles = torch.arange(width, dtype=torch.float32, device=device)[:, None] * inv_freq
    doubled = torch.cat([angles, angles], dim=-1)
    return (doubled.cos() * spec.rope_scaling).to(dtype), (doubled.sin() * spec.rope_scaling).to(dtype)

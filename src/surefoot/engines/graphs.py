"""The embedded engine on a GPU: many prompts at once, steps as CUDA graphs, a look every few tokens.

Owns       which rollout sits in which slot, and when the host looks at what was drawn.
Promises   what `EmbeddedEngine` promises of streams, versions, stops and logprobs; tokens are those of the slow engine
           up to rounding; an option that is not implemented here is named, and `embedded_engine` makes the slow one.
Never      moves weights by pointer: the decoder copies them, so their owner may go on changing his own.

Between two looks a rollout that has ended is stepped on, at most 15 tokens, which are thrown away. Rollouts enter when
an eighth of the slots is free, or somebody urgent waits: prompts are computed together.

The sums of a matrix product depend on the number of rows it has. Steps are cut to few sizes (`rows_of_step`), so two
rollouts with the same prompt and seed may differ in the last bit of a logprob when they sat in steps of two sizes; on
the CPU, where bits are promised, the slow engine decodes.

Read next: `embedded.py`, the slow engine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from surefoot.engines.decoder import WIDTH_STEP, Drawn, draw, random_numbers, rotary_tables, weight_names
from surefoot.engines.embedded import BatchRow, EmbeddedEngine
from surefoot.errors import EngineError
from surefoot.maths.fused import has_kernels, ops_for
from surefoot.protocols import Completion, DecoderSpec, Request, Weights
from surefoot.system.signals import tick

# -- A Llama-family decoder whose step is launched once: everything it reads stays in one place on the device --
# Owns       copies of the weights in buffers that never move, the KV cache, and what each row is at: token, position,
#            slot, temperature, stream of uniform numbers. On a GPU the step is captured as a CUDA graph, one for each
#            number of rows it is cut to, and replayed; elsewhere the same code runs as it stands.
# Promises   new weights are written into the same buffers, so graphs outlive them; a row draws with its own numbers, by
#            count, whoever sits beside it; what lies beyond a row's position is never read.
# Never      knows what a rollout is, or when one is over: the engine looks at the tokens every few steps.
#
# A row of the step and a slot of the cache are two things: rows 0 to n - 1 are those that somebody needs, in any slots,
# so that a step shrinks with the rollouts that are left and no keys are moved. One slot more than asked for takes what
# idle rows write.
#
# Axes: R rows of a step, S slots, H hidden, V vocabulary, D head size, W KV width, n prompts, P prompt width.


ROW_STEP = 16
SMALLEST_STEP = 64
"""Fewer rows cost a GPU no less: one graph serves them all."""
BURST = 16
"""Steps between two looks of the host."""
PREFILL_TOKENS = 32_768
"""Prompt tokens, padding included, that are computed at once."""
DRAWN_AT_ONCE = 256
"""First tokens drawn at once: their distributions stand beside each other in memory."""
IMPLEMENTED = frozenset({
    "model_type", "layers", "hidden", "heads", "kv_heads", "head_dim", "vocab", "norm_eps", "max_positions", "inv_freq",
    "rope_scaling", "qkv_bias", "qk_norm", "tied_head", "beyond",
})  # fmt: skip
"""Fields of `DecoderSpec` that this decoder obeys; with any other the slow one decodes (`graphs.not_implemented`)."""
MODEL_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3"})


class RowState(NamedTuple):
    """Where one row stands."""

    token: int
    """Drawn last, not yet fed."""
    position: int
    """Where that token stands."""
    drawn: int
    """Number of tokens drawn: which of its uniform numbers comes next."""
    slot: int
    temperature: float


class GraphDecoder:
    """Prefill many prompts, then step many rows, with one version of the weights.

    Args:
        rows: how many sequences may be under way at once.
        max_width: longest prompt + completion, in tokens.
        device: where the step runs; on CUDA it is captured.
    """

    def __init__(self, spec: DecoderSpec, *, rows: int, max_width: int, device: str, dtype: torch.dtype) -> None:
        self.spec, self.rows, self.device, self.dtype = spec, rows, torch.device(device), dtype
        self.max_width = -(-max_width // WIDTH_STEP) * WIDTH_STEP
        self.ops, self.fused = ops_for(self.device), has_kernels(self.device)
        self.tables = rotary_tables(spec, self.max_width, self.device, dtype)
        self.idle_slot = rows
        self.head: object | None = None
        """Another object after every load: by it others know that the weights are new."""
        self.pack_seconds = 0.0
        """Nothing is laid out beside the buffers: loading fills them."""
        self._buffers: dict[str, Tensor] = {}
        self._layers: list[_BlockBuffers] = []
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self._was_captured = False
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._pool = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None
        self._allocate()

    def _allocate(self) -> None:
        spec, slots, device = self.spec, self.rows + 1, self.device
        shape = (spec.layers, 2, slots, spec.kv_heads, self.max_width, spec.head_dim)
        self.cache = torch.zeros(shape, dtype=self.dtype, device=device)
        self.uniforms = torch.zeros(slots, self.max_width, dtype=torch.float64, device=device)
        self._state = torch.zeros(4, self.rows, dtype=torch.int64, device=device)
        self._state[3] = self.idle_slot
        self._temperatures = torch.ones(self.rows, device=device)
        self._at = torch.zeros(1, dtype=torch.int64, device=device)
        self._tokens = torch.zeros(BURST, self.rows, dtype=torch.int64, device=device)
        self._logprobs = torch.zeros(BURST, self.rows, device=device)

    def unload(self) -> None:
        """Let go of weights, cache and graphs."""
        self.head = None
        self._graphs.clear()
        self._buffers, self._layers = {}, []
        self.cache = self.uniforms = torch.empty(0)

    @torch.inference_mode()
    def load(self, weights: Weights) -> None:
        """Write these weights into the buffers; what their owner does to his own afterwards is not seen."""
        self.head = None  # half a load leaves nothing to decode with
        missing = [name for name in weight_names(self.spec) if name not in weights]
        if missing:
            raise EngineError(
                f"{len(missing)} weights are missing, first {missing[0]}",
                "a layer that keeps its old weights answers without complaint",
                "hand over every parameter of the model",
            )
        sources = {place: [weights[name].detach() for name in names] for place, names in _places(self.spec).items()}
        if not self._buffers:
            if not self.cache.numel():
                self._allocate()
            self._buffers = {place: torch.cat(parts).clone() for place, parts in sources.items()}
            self._layers = [_BlockBuffers(self.spec, i, self._buffers) for i in range(self.spec.layers)]
        else:
            targets = [self._buffers[place].split([len(part) for part in parts]) for place, parts in sources.items()]
            flat = [part for parts in sources.values() for part in parts]
            torch._foreach_copy_([target for each in targets for target in each], flat)
        self.head = object()

    # -- prompts -----------------------------------------------------------------------------

    @torch.inference_mode()
    def prefill(self, prompts: Sequence[Sequence[int]], slots: Sequence[Sequence[int]]) -> Tensor:
        """Compute these prompts and put their keys and values into the slots of everybody who asked.

        Returns:
            (n, V) logits for the token behind each prompt, in the prompts' order.
        """
        assert self.head is not None, "load weights before prefilling"
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))  # alike in length: little padding
        logits = torch.empty(len(prompts), self.spec.vocab, dtype=self.dtype, device=self.device)
        while order:
            widest = len(prompts[order[-1]])
            piece = order[-max(1, PREFILL_TOKENS // widest) :]
            del order[-len(piece) :]
            found = self._prefill([prompts[i] for i in piece], [slots[i] for i in piece])
            logits[torch.tensor(piece, device=self.device)] = found
        return logits

    def _prefill(self, prompts: Sequence[Sequence[int]], slots: Sequence[Sequence[int]]) -> Tensor:
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        n, width = len(prompts), int(lengths.max())
        ids = torch.tensor([[*prompt, *[0] * (width - len(prompt))] for prompt in prompts]).to(self.device)
        places = torch.arange(width).expand(n, -1)
        first = torch.tensor([own[0] for own in slots])
        owner = torch.where(places < lengths[:, None], first[:, None], self.idle_slot).flatten().to(self.device)
        positions, first = places.flatten().to(self.device), first.to(self.device)
        copies = [(own[0], slot) for own in slots for slot in own[1:]]
        pairs = torch.tensor(copies, dtype=torch.int64).view(-1, 2).to(self.device)
        x = F.embedding(ids.flatten(), self._buffers["embed"])
        y = self.ops.rms_norm(x, self._layers[0].norm_in, self.spec.norm_eps)
        for i, layer in enumerate(self._layers):
            q = self._placed(layer, y, positions, owner, i)
            mixed = self._attend_prompts(q.unflatten(0, (n, width)), self.cache[i], first)
            x, y = self._rest(layer, i, x, mixed)
            if len(pairs):
                self.cache[i][:, pairs[:, 1], :, :width] = self.cache[i][:, pairs[:, 0], :, :width]
        ends = torch.arange(n, device=self.device) * width + lengths.to(self.device) - 1
        return F.linear(y[ends], self._buffers["head" if "head" in self._buffers else "embed"])

    def _attend_prompts(self, q: Tensor, cache: Tensor, slots: Tensor) -> Tensor:
        """(n, P, heads, D) -> (n * P, heads * D), causal; what stands behind a prompt is seen by padding alone."""
        width, repeat = q.shape[1], self.spec.heads // self.spec.kv_heads
        keys, values = (part[slots, :, :width].repeat_interleave(repeat, dim=1) for part in cache)
        behind = values.isnan()  # of an earlier rollout; nobody's, and 0 * NaN is NaN
        keys, values = keys.masked_fill(keys.isnan(), 0.0), values.masked_fill(behind, 0.0)
        mixed = F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, is_causal=True)
        return mixed.transpose(1, 2).flatten(2).flatten(0, 1)

    # -- one token for everybody -------------------------------------------------------------

    @torch.inference_mode()
    def set_streams(self, slots: Sequence[int], numbers: Tensor) -> None:
        """(n, T) uniform numbers of those who sit in these slots."""
        index = torch.tensor(slots, device=self.device)
        self.uniforms[index, : numbers.shape[1]] = numbers.to(self.device)

    @torch.inference_mode()
    def draw_first(self, logits: Tensor, owners: Sequence[int], temperatures: Sequence[float], at: Tensor) -> Drawn:
        """One token for each of several siblings; `owners` says whose logits (n, V) are theirs, `at` (m,) the dice."""
        heat = torch.tensor(temperatures, device=self.device)
        index, dice = torch.tensor(owners, device=self.device), at.to(self.device)
        pieces = [slice(i, i + DRAWN_AT_ONCE) for i in range(0, len(owners), DRAWN_AT_ONCE)]
        drawn = [draw(logits[index[piece]], heat[piece], dice[piece]) for piece in pieces]
        return Drawn(torch.cat([d.tokens for d in drawn]), torch.cat([d.logprobs for d in drawn]))

    @torch.inference_mode()
    def set_rows(self, rows: Sequence[RowState]) -> None:
        """Who sits in rows 0 to n - 1 from the next step on; the others are idle."""
        idle = self.rows - len(rows)
        packed = [
            [*(getattr(row, name) for row in rows), *[fill] * idle]
            for name, fill in (("token", 0), ("position", 0), ("drawn", 0), ("slot", self.idle_slot))
        ]
        self._state.copy_(torch.tensor(packed), non_blocking=True)
        self._temperatures.copy_(torch.tensor([*(row.temperature for row in rows), *[1.0] * idle]), non_blocking=True)

    @torch.inference_mode()
    def burst(self, rows: Sequence[RowState], steps: int, *, moved: bool) -> Drawn:
        """Advance these rows by `steps` tokens; a row whose rollout ends on the way is advanced all the same.

        Args:
            moved: they are not who sat there, in that order, after the burst before.

        Returns:
            (steps, n) tokens and logprobs, on the CPU.
        """
        assert self.head is not None, "load weights before decoding"
        assert 1 <= steps <= BURST, "the host's buffer holds no more"
        taken = rows_of_step(len(rows), self.rows)
        longest = min(max(row.position for row in rows) + steps, self.max_width)
        width = self.max_width if self.fused else -(-longest // WIDTH_STEP) * WIDTH_STEP
        graph = self._graph(taken, width)
        if moved or graph is None or self._was_captured:
            self.set_rows(rows)
        self._was_captured = False
        self._at.zero_()
        for _ in range(steps):
            if graph is None:
                self._step(taken, width)
            else:
                graph.replay()
        return Drawn(self._tokens[:steps, : len(rows)].cpu(), self._logprobs[:steps, : len(rows)].cpu())

    def _graph(self, rows: int, width: int) -> torch.cuda.CUDAGraph | None:
        """The step for so many rows, captured when it is first needed; None where nothing is captured."""
        if self._stream is None:
            return None
        key = rows, width
        if key not in self._graphs:
            self.set_rows(())  # what is tried writes keys and values: nobody's slot may be open to it
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self._stream):
                for _ in range(2):  # kernels are compiled and libraries set up outside of the capture
                    self._at.zero_()
                    self._step(rows, width)
            torch.cuda.current_stream(self.device).wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            # Another thread of this process may be learning meanwhile: its calls are none of the capture's business.
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                self._step(rows, width)
            self._graphs[key] = graph
            self._was_captured = True  # whoever sat in the rows has to sit down again
        return self._graphs[key]

    def _step(self, rows: int, width: int) -> None:
        """One token for rows 0 to `rows` - 1, from the buffers and into them."""
        tokens, positions, counts, slots = self._state[:, :rows]
        x = F.embedding(tokens, self._buffers["embed"])
        y = self.ops.rms_norm(x, self._layers[0].norm_in, self.spec.norm_eps)
        for i, layer in enumerate(self._layers):
            q = self._placed(layer, y, positions, slots, i)
            x, y = self._rest(layer, i, x, self.ops.attend(q, self.cache[i], slots, positions, width))
        logits = F.linear(y, self._buffers["head" if "head" in self._buffers else "embed"])
        drawn = draw(logits, self._temperatures[:rows], self.uniforms[slots, counts])
        self._tokens[:, :rows].index_copy_(0, self._at, drawn.tokens[None])
        self._logprobs[:, :rows].index_copy_(0, self._at, drawn.logprobs[None])
        self._at.add_(1)
        tokens.copy_(drawn.tokens)
        for each in (positions, counts):  # a row that runs on past its end stays inside its slot
            each.add_(1).clamp_(max=self.max_width - 1)

    def _placed(self, layer: _BlockBuffers, y: Tensor, positions: Tensor, slots: Tensor, i: int) -> Tensor:
        qkv = F.linear(y, layer.qkv, layer.qkv_bias)
        return self.ops.place(
            qkv, self.tables, positions, slots, self.cache[i], self.spec.heads, layer.qk_norm, self.spec.norm_eps
        )

    def _rest(self, layer: _BlockBuffers, i: int, x: Tensor, mixed: Tensor) -> tuple[Tensor, Tensor]:
        """From attention to what the next layer, or the head, reads: the residual stream, and it normed."""
        following = self._layers[i + 1].norm_in if i + 1 < len(self._layers) else self._buffers["norm"]
        x, y = self.ops.add_rms_norm(x, F.linear(mixed, layer.out), layer.norm_mid, self.spec.norm_eps)
        opened = self.ops.gate(F.linear(y, layer.gate_up))
        return self.ops.add_rms_norm(x, F.linear(opened, layer.down), following, self.spec.norm_eps)


def rows_of_step(needed: int, rows: int) -> int:
    """Rows that a step of `needed` rows computes: few sizes, so that few graphs are captured."""
    taken = min(SMALLEST_STEP, rows)
    while taken < needed:
        taken = min(2 * taken, rows)
    return taken


def _places(spec: DecoderSpec) -> dict[str, list[str]]:
    """Buffer -> the weights that stand in it, one behind the other."""
    places = {"embed": ["model.embed_tokens.weight"], "norm": ["model.norm.weight"]}
    places |= {} if spec.tied_head else {"head": ["lm_head.weight"]}
    parts = {
        "norm_in": ["input_layernorm.weight"], "norm_mid": ["post_attention_layernorm.weight"],
        "qkv": [f"self_attn.{n}_proj.weight" for n in "qkv"], "out": ["self_attn.o_proj.weight"],
        "gate_up": ["mlp.gate_proj.weight", "mlp.up_proj.weight"], "down": ["mlp.down_proj.weight"],
    }  # fmt: skip
    parts |= {"qkv_bias": [f"self_attn.{n}_proj.bias" for n in "qkv"]} if spec.qkv_bias else {}
    parts |= {f"{n}_norm": [f"self_attn.{n}_norm.weight"] for n in "qk"} if spec.qk_norm else {}
    for i in range(spec.layers):
        places |= {f"{i}.{part}": [f"model.layers.{i}.{name}" for name in names] for part, names in parts.items()}
    return places


class _BlockBuffers:
    """The buffers of one transformer block."""

    def __init__(self, spec: DecoderSpec, index: int, buffers: dict[str, Tensor]) -> None:
        def get(part: str) -> Tensor:
            return buffers[f"{index}.{part}"]

        self.norm_in, self.norm_mid = get("norm_in"), get("norm_mid")
        self.qkv, self.qkv_bias = get("qkv"), get("qkv_bias") if spec.qkv_bias else None
        self.qk_norm = (get("q_norm"), get("k_norm")) if spec.qk_norm else None
        self.out, self.gate_up, self.down = get("out"), get("gate_up"), get("down")


# -- The engine ------------------------------------------------------------------------------------


REQUEST_FIELDS = frozenset({"id", "prompt_ids", "max_new_tokens", "temperature", "stop_ids", "seed", "urgent"})
"""Fields of `Request` that this engine obeys; a request that sets any other is one for the slow engine."""


def not_implemented(spec: DecoderSpec, request_type: type = Request) -> list[str]:
    """Names of what the fast path does not know; empty when it may be taken."""
    unknown = [f"DecoderSpec.{name}" for name in _names(spec) if name not in IMPLEMENTED]
    unknown += [f"Request.{name}" for name in _names(request_type) if name not in REQUEST_FIELDS]
    unknown += spec.beyond
    return unknown + ([] if spec.model_type in MODEL_TYPES else [f"model_type {spec.model_type}"])


def _names(record: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(record)]


def embedded_engine(
    spec: DecoderSpec, *, rows: int, max_width: int, device: str, dtype: torch.dtype, graphs: bool = True
) -> EmbeddedEngine:
    """The fast engine on a GPU, where it knows all that is asked of it; the slow one elsewhere.

    Args:
        graphs: False takes the slow one there too (`engine.cuda_graphs`).
    """
    fast = graphs and torch.device(device).type == "cuda" and not not_implemented(spec)
    kind = GraphedEngine if fast else EmbeddedEngine
    return kind(spec, rows=rows, max_width=max_width, device=device, dtype=dtype)


class GraphedEngine(EmbeddedEngine):
    """`EmbeddedEngine` over a `GraphDecoder`. On a CPU it runs the same code without graphs: for tests."""

    decoder: GraphDecoder  # type: ignore[assignment] # the base class never touches it outside of what is replaced here
    row_multiple = ROW_STEP

    def _make_decoder(  # type: ignore[override] # as above
        self, spec: DecoderSpec, *, rows: int, max_width: int, device: str, dtype: torch.dtype
    ) -> GraphDecoder:
        self._order: list[tuple[int, int]] = []
        """Slot and ticket of each row of the last burst."""
        return GraphDecoder(spec, rows=rows, max_width=max_width, device=device, dtype=dtype)

    def advance(self) -> dict[int, Completion]:
        """Seat whom there is room for, then a few tokens for everybody; those who finished, by ticket."""
        _ = self.version  # an engine without weights says so
        done: dict[int, Completion] = {}
        if self._prefilled_with is not self.decoder.head:
            self._prefill_again()
        while self._waiting and self._admits:
            self._admit(self._waiting, done)
        if len(self._free) < self.rows:
            self._step(done)
        return done

    @property
    def _admits(self) -> bool:
        """Whether prompts are computed now: together, unless somebody must not wait."""
        if not self._free:
            return False
        enough = len(self._free) >= min(len(self._waiting), max(1, self.rows // 8))
        return enough or any(request.urgent for _, request in self._waiting)

    def _prefill_again(self) -> None:
        seated = list(self._occupied())
        if seated:
            texts = [(*seat.request.prompt_ids, *seat.tokens[:-1]) for _, seat in seated]
            self.decoder.prefill(texts, [[slot] for slot, _ in seated])
        self._prefilled_with = self.decoder.head

    def _admit(self, waiting: Any, done: dict[int, Completion]) -> None:
        """Everybody there is room for: each prompt is computed once, and each draws its first token."""
        seats = []
        while waiting and self._free:
            ticket, request = waiting.popleft()
            seats.append((self._free.pop(), BatchRow(request, ticket, (), self.version)))
        slots: dict[tuple[int, ...], list[int]] = {}
        for slot, seat in seats:
            slots.setdefault(seat.request.prompt_ids, []).append(slot)
        logits = self.decoder.prefill(list(slots), list(slots.values()))
        tick("generating")
        longest = max(seat.request.max_new_tokens for _, seat in seats)
        streams = np.zeros((len(seats), longest))
        for row, (_, seat) in enumerate(seats):
            streams[row, : seat.request.max_new_tokens] = random_numbers(seat.request.seed, seat.request.max_new_tokens)
        dice = torch.from_numpy(streams)
        self.decoder.set_streams([slot for slot, _ in seats], dice)
        owner = {prompt: i for i, prompt in enumerate(slots)}
        drawn = self.decoder.draw_first(
            logits, [owner[seat.request.prompt_ids] for _, seat in seats],
            [seat.request.temperature for _, seat in seats], dice[:, 0],
        ).pairs()  # fmt: skip
        for (slot, seat), pair in zip(seats, drawn, strict=True):
            if self._accept(seat, pair, done):
                self._free.append(slot)
            else:
                self._slots[slot] = seat

    def _step(self, done: dict[int, Completion]) -> None:
        """Up to `BURST` tokens for everybody; what comes behind a rollout's end is thrown away."""
        seated = {(slot, seat.ticket): seat for slot, seat in self._occupied()}
        staying = [place for place in self._order if place in seated]
        known = set(staying)
        order = staying + [place for place in seated if place not in known]
        rows = [_row(seated[place], place[0]) for place in order]
        steps = min(BURST, max(seat.request.max_new_tokens - len(seat.tokens) for seat in seated.values()))
        drawn = self.decoder.burst(rows, steps, moved=order != self._order)
        self._order = order
        tokens, logprobs = drawn.tokens.t().tolist(), drawn.logprobs.t().tolist()
        for place, row_tokens, row_logprobs in zip(order, tokens, logprobs, strict=True):
            if self._take(seated[place], zip(row_tokens, row_logprobs, strict=True), done):
                self._slots[place[0]] = None
                self._free.append(place[0])
        tick("generating")

    def _take(self, seat: BatchRow, drawn: Iterable[tuple[int, float]], done: dict[int, Completion]) -> bool:
        return any(self._accept(seat, pair, done) for pair in drawn)


def _row(seat: BatchRow, slot: int) -> RowState:
    request, count = seat.request, len(seat.tokens)
    return RowState(seat.tokens[-1], len(request.prompt_ids) + count - 1, count, slot, request.temperature)


__all__: Sequence[str] = ["GraphedEngine", "embedded_engine", "not_implemented"]

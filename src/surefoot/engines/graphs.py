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

Read next: `graph_decoder.py`, the step; `embedded.py`, the slow engine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from surefoot.engines.embedded import BatchRow, EmbeddedEngine
from surefoot.engines.graph_decoder import BURST, IMPLEMENTED, MODEL_TYPES, ROW_STEP, GraphDecoder, RowState
from surefoot.engines.sampling import random_numbers
from surefoot.protocols import Completion, DecoderSpec, Request
from surefoot.system import heartbeat

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
        heartbeat.tick("generating")
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
        heartbeat.tick("generating")

    def _take(self, seat: BatchRow, drawn: Iterable[tuple[int, float]], done: dict[int, Completion]) -> bool:
        return any(self._accept(seat, pair, done) for pair in drawn)


def _row(seat: BatchRow, slot: int) -> RowState:
    request, count = seat.request, len(seat.tokens)
    return RowState(seat.tokens[-1], len(request.prompt_ids) + count - 1, count, slot, request.temperature)


__all__: Sequence[str] = ["GraphedEngine", "embedded_engine", "not_implemented"]

"""Generates in this process, with weights it is handed.

Owns       which rollout sits in which row, and when it leaves.
Promises   a prompt is prefilled once for all its siblings; finished rows leave and waiting
           ones enter; what a rollout samples depends on its prompt, seed and weights alone,
           bit for bit in float32; logprobs are those of the distribution it sampled from.
Never      loads a model, re-tokenises, or grades.

    enter --> waiting --prefill, first token--> decoded in a row --advance, advance, ...--> finished

When the weights change under a rollout that is decoded, its keys and values are computed anew with the new ones: from
there on its probabilities are those of the new version on everything said so far.

Read next: `decoder.py`, the forward pass and the dice; `serving.py`, many callers at once.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from surefoot.engines.decoder import Decoder, draw, draw_siblings, random_stream, row_step
from surefoot.engines.serving import ServedVersion
from surefoot.errors import ConfigError, EngineError, NumericsError
from surefoot.protocols import Completion, DecoderSpec, Request, Weights
from surefoot.records import LENGTH, STOP
from surefoot.system.signals import tick


@dataclass(slots=True)
class BatchRow:
    """One rollout being generated."""

    request: Request
    ticket: int
    uniforms: Sequence[float]
    version: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def accept(self, token: int, logprob: float) -> str | None:
        """Take one token; the finish reason when it was the last."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if token in self.request.stop_ids:
            return STOP
        return LENGTH if len(self.tokens) >= self.request.max_new_tokens else None


class RowDecoder(Protocol):
    """A forward pass in two forms, one prompt or one token for every row, on weights that it is handed."""

    @property
    def device(self) -> torch.device:
        """Where the weights are."""

    @property
    def pack_seconds(self) -> float:
        """What laying out the weights in force has cost."""

    @property
    def head(self) -> object:
        """Another object after every load."""

    def load(self, weights: Weights) -> None:
        """Take these weights, where they are."""

    def unload(self) -> None:
        """Let go of them."""

    def check_untouched(self) -> None:
        """Refuse weights that were changed in place after they were handed over."""

    def prefill(self, prompt_ids: tuple[int, ...]) -> tuple[Any, Tensor]:
        """What is kept of a prompt, and (V,) logits for the first completion token."""

    def fill_rows(self, rows: list[int], kv: Any) -> None:
        """Put what was kept of one prompt into these rows."""

    def step(self, tokens: Tensor, positions: Tensor, longest: int) -> Tensor:
        """(R,) a token of each row, at (R,) positions, 0 in an idle row -> (R, V) logits for the next ones."""


class BatchedEngine(ServedVersion):
    """Batched, cached decoding over a fixed number of rows; whose forward pass it is, the decoder says.

    Args:
        rows: rollouts decoded side by side.
        max_width: longest prompt plus completion, in tokens.
    """

    decoder: RowDecoder

    def __init__(self, decoder: RowDecoder, *, rows: int, max_width: int) -> None:
        self.decoder, self.rows, self.max_width = decoder, rows, max_width
        self._slots: list[BatchRow | None]
        self._waiting: deque[tuple[int, Request]]
        self._prefilled_with: object
        self._tickets = itertools.count()
        self._clear_slots()
        self._last_prefill: tuple[tuple[int, tuple[int, ...]], tuple[Any, Tensor]] | None = None

    @property
    def pack_seconds(self) -> float:
        """What laying out the weights in force for decoding has cost; 0 until the first token needed it."""
        return self.decoder.pack_seconds

    def load_weights(self, weights: Weights, version: int) -> None:
        """Serve these weights from the next token on."""
        self._last_prefill = None
        self._version = None  # a load that fails half-way leaves no version to claim
        self.decoder.load(weights)
        self._version = version

    def close(self) -> None:
        """Drop the weights and the cache."""
        self._version = self._last_prefill = None
        self.decoder.unload()

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Answer every request, in order."""
        self._refuse_company()
        tickets = self.enter(requests)
        done: dict[int, Completion] = {}
        try:
            while self.busy:
                done |= self.advance()
        finally:
            self.leave()  # after an exception, the next call must not find strangers in its rows
        return [done[ticket] for ticket in tickets]

    # -- piece by piece: what `generate` and `serving.EngineLoop` are made of ------------

    @property
    def busy(self) -> bool:
        """Whether a request waits or is decoded."""
        return bool(self._waiting) or len(self._free) < self.rows

    def enter(self, requests: Sequence[Request]) -> list[int]:
        """Take these in behind those that wait, urgent ones before; one ticket each. If one is refused, none enters."""
        for request in requests:
            self._check(request)
        tickets = list(itertools.islice(self._tickets, len(requests)))
        asked = list(zip(tickets, requests, strict=True))
        self._waiting.extendleft(entry for entry in reversed(asked) if entry[1].urgent)
        self._waiting.extend(entry for entry in asked if not entry[1].urgent)
        self._untouched = False
        return tickets

    def advance(self) -> dict[int, Completion]:
        """Seat whom there is room for, then one token for everybody; those who finished, by ticket."""
        if not self._untouched:
            self.decoder.check_untouched()
            self._untouched = True
        done: dict[int, Completion] = {}
        if self._prefilled_with is not self.decoder.head:  # every load makes new ones, also under the same version
            self._prefill_again()
        while self._waiting and self._free:
            self._admit(self._waiting, done)
        if len(self._free) < self.rows:
            self._step(done)
        return done

    def leave(self, tickets: Collection[int] | None = None) -> None:
        """Forget these rollouts, or all; nothing of them is said any more."""
        if tickets is None:
            self._clear_slots()
            return
        gone = set(tickets)
        self._waiting = deque(entry for entry in self._waiting if entry[0] not in gone)
        for row, slot in self._occupied():
            if slot.ticket in gone:
                self._slots[row] = None
                self._free.append(row)

    def _refuse_company(self) -> None:
        if self.busy:
            raise EngineError(
                "somebody else's rollouts are in the engine",
                "two callers would advance each other's rows",
                "share one engine through engines.serving.EngineLoop",
            )

    def _occupied(self) -> Iterator[tuple[int, BatchRow]]:
        yield from ((row, slot) for row, slot in enumerate(list(self._slots)) if slot is not None)

    def _prefill_again(self) -> None:
        """The weights have changed: keys and values of the old ones would mix two models in every later token."""
        for row, slot in self._occupied():
            kv, _ = self.decoder.prefill((*slot.request.prompt_ids, *slot.tokens[:-1]))
            self.decoder.fill_rows([row], kv)
        self._prefilled_with = self.decoder.head

    def _clear_slots(self) -> None:
        self._slots = [None] * self.rows
        self._free = list(range(self.rows))[::-1]
        self._waiting = deque()
        self._prefilled_with = None
        self._untouched = False

    def _check(self, request: Request) -> None:
        length = len(request.prompt_ids) + request.max_new_tokens
        if not request.prompt_ids or request.max_new_tokens < 1 or length > self.max_width:
            raise EngineError(
                f"request {request.id}: {len(request.prompt_ids)} prompt + {request.max_new_tokens} new tokens, "
                f"room for {self.max_width}",
                "cutting a prompt would answer another question",
                "leave the task out, or raise the context",
            )

    def _admit(self, waiting: deque[tuple[int, Request]], done: dict[int, Completion]) -> None:
        """Seat the next request and those right behind it that share its prompt and temperature."""
        first = waiting[0][1]
        kv, logits = self._prefilled(first.prompt_ids)
        siblings: list[BatchRow] = []
        while waiting and len(siblings) < len(self._free):
            request = waiting[0][1]
            if (request.prompt_ids, request.temperature) != (first.prompt_ids, first.temperature):
                break
            ticket, _ = waiting.popleft()
            stream = random_stream(request.seed, request.max_new_tokens)
            siblings.append(BatchRow(request, ticket, stream, self.version))
        # Siblings share the prompt's last logits; each draws its first token with its own stream.
        drawn = draw_siblings(logits, first.temperature, self._dice(siblings)[1]).pairs()
        filled = []
        for i, slot in enumerate(siblings):
            if not self._accept(slot, drawn[i], done):
                row = self._free.pop()
                self._slots[row] = slot
                filled.append(row)
        if filled:
            self.decoder.fill_rows(filled, kv)

    def _prefilled(self, prompt_ids: tuple[int, ...]) -> tuple[Any, Tensor]:
        """Keys, values and last logits of a prompt; once per group, even when its siblings enter in waves."""
        if self._last_prefill is None or self._last_prefill[0] != (self.version, prompt_ids):
            self._last_prefill = ((self.version, prompt_ids), self.decoder.prefill(prompt_ids))
            tick("generating")
        return self._last_prefill[1]

    def _step(self, done: dict[int, Completion]) -> None:
        """Advance every row by one token; idle rows compute and are ignored, so that shapes stay fixed."""
        tokens, positions = [0] * self.rows, [0] * self.rows
        for row, slot in enumerate(self._slots):
            if slot is not None:
                tokens[row] = slot.tokens[-1]
                positions[row] = len(slot.request.prompt_ids) + len(slot.tokens) - 1
        device = self.decoder.device
        logits = self.decoder.step(
            torch.tensor(tokens, device=device), torch.tensor(positions, device=device), max(positions) + 1
        )
        drawn = draw(logits, *self._dice(self._slots)).pairs()
        for row, slot in enumerate(self._slots):
            if slot is not None and self._accept(slot, drawn[row], done):
                self._slots[row] = None
                self._free.append(row)
        tick("generating")

    def _dice(self, slots: Sequence[BatchRow | None]) -> tuple[Tensor, Tensor]:
        """Temperatures (R,) and this position's uniform numbers (R,)."""
        temperatures = [1.0 if s is None else s.request.temperature for s in slots]
        uniforms = [0.0 if s is None else s.uniforms[len(s.tokens)] for s in slots]
        device = self.decoder.device
        dtype = torch.float32 if device.type == "mps" else torch.float64
        return torch.tensor(temperatures, device=device), torch.tensor(uniforms, dtype=dtype, device=device)

    def _accept(self, slot: BatchRow, drawn: tuple[int, float], done: dict[int, Completion]) -> bool:
        """Give one drawn token to a row; True when that finished it."""
        if not math.isfinite(drawn[1]):
            raise NumericsError(
                f"request {slot.request.id}: the model's logits are not finite at version {self.version}",
                "a token drawn from them means nothing",
                "lower learning_rate; evaluate the last checkpoint that worked",
            )
        reason = slot.accept(*drawn)
        if reason is None:
            return False
        done[slot.ticket] = Completion(
            slot.request.id, tuple(slot.tokens), tuple(slot.logprobs), reason, slot.version, self.version
        )
        return True


class EmbeddedEngine(BatchedEngine):
    """Batched decoding with a KV cache over a fixed number of rows.

    Args:
        spec: the decoder's numbers.
        rows: rollouts decoded side by side; rounded up to a multiple of 8 or 16.
        max_width: longest prompt plus completion, in tokens.
        device: where the weights it will be handed live.
    """

    decoder: Decoder

    row_multiple = 0
    """Row counts are multiples of this; 0 asks the layout of the weights."""

    def __init__(
        self, spec: DecoderSpec, *, rows: int, max_width: int, device: str = "cpu", dtype: torch.dtype = torch.float32
    ) -> None:
        if spec.beyond:
            raise EngineError(
                f"the embedded engine does not compute {', '.join(spec.beyond)}",
                "it would sample from another model than the one whose weights it is handed",
                "use engines.transformers_engine.TransformersEngine",
            )
        check_context(max_width, spec.max_positions)
        step = self.row_multiple or row_step(torch.device(device), dtype)
        rows = -(-rows // step) * step
        decoder = self._make_decoder(spec, rows=rows, max_width=max_width, device=device, dtype=dtype)
        super().__init__(decoder, rows=rows, max_width=max_width)

    def _make_decoder(
        self, spec: DecoderSpec, *, rows: int, max_width: int, device: str, dtype: torch.dtype
    ) -> Decoder:
        return Decoder(spec, rows=rows, max_width=max_width, device=device, dtype=dtype)


def check_context(max_width: int, context: int) -> None:
    """Refuse rows that would not fit the model's context."""
    if max_width > context:
        raise ConfigError(
            f"prompt + completion may reach {max_width} tokens; the model's context is {context}",
            "positions beyond the context were never trained",
            "lower max_completion_length or max_prompt_length",
        )

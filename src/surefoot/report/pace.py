"""How fast a config is on one machine: what was measured, what bounds it, and which keys change that.

Promises   what bounds a half is read off its own figures: the share of the limit that it reached, and what half of the
           rollouts cost; every key that is named was earned by a figure that stands beside it.
Never      names a key that no figure speaks for, or prints a number that is not finite and above 0.

Read next: `run/bench.py`, which measures.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from surefoot.errors import NumericsError
from surefoot.system.text import counted, size

SCHEMA = 1
NEAR_LIMIT = 0.4
"""From this share of a limit on, that limit is what holds a half back."""
FLAT = 0.7
"""Half of the rollouts in more than this share of the time: most of it does not depend on how many there are."""
BETTER = 1.2
"""How many times as fast something else has to be before it is worth naming."""
MUCH = 0.2
"""A share of the step that is worth a key."""
ARITHMETIC, MEMORY, LAUNCHES = "arithmetic", "memory bandwidth", "launches and Python"
BESIDE = "work beside the matrix products"
UNKNOWN = "what cannot be said"
POSSIBLE = 1.05
"""More than this share of a limit is a wrong limit: other programs slowed its measurement, and not the step's."""


def sound(what: str, value: float) -> float:
    """The value, where it is a measurement; a `NumericsError` for what no clock can have shown."""
    if not math.isfinite(value) or value <= 0:
        raise NumericsError(
            f"{what} was measured as {value}", "a clock that stands still, or a division by it, measures nothing",
            "run it again with more --seconds; if it stays, report it",
        )  # fmt: skip
    return value


@dataclass(frozen=True, slots=True)
class HalfStep:
    """Sampling, or learning, of one whole step."""

    seconds: float
    tokens: int
    """Completion tokens of it."""
    arithmetic_s: float
    """What its matrix products must take at the rate that was measured beside it."""
    memory_s: float
    """What reading and writing must take, in the same way."""
    of_half: float
    """What share of the time half of the rollouts took."""

    @property
    def limit_s(self) -> float:
        """It cannot take less."""
        return max(self.arithmetic_s, self.memory_s)

    @property
    def tokens_per_s(self) -> float:
        """Completion tokens a second."""
        return self.tokens / self.seconds

    @property
    def share_of_limit(self) -> float:
        """1 is all that the machine can do."""
        return self.limit_s / self.seconds

    @property
    def limit_holds(self) -> bool:
        """Whether the limit can be one: nothing is faster than what it must at least do."""
        return self.share_of_limit <= POSSIBLE

    @property
    def bound(self) -> str:
        """What holds it back."""
        if not self.limit_holds:
            return UNKNOWN
        if self.share_of_limit >= NEAR_LIMIT:
            return ARITHMETIC if self.arithmetic_s >= self.memory_s else MEMORY
        return LAUNCHES if self.of_half >= FLAT else BESIDE

    def why(self) -> str:
        """The figures behind `bound`."""
        if not self.limit_holds:
            return "faster than its limit, whose measurement other programs held down; run it again when they rest"
        names = {ARITHMETIC: "matrix products", MEMORY: "reading and writing"}
        if self.bound in names:
            return f"{names[self.bound]} alone must take {_share(self.share_of_limit)} of its time"
        return (
            f"{_share(self.share_of_limit)} of the limit, and half of the rollouts took {self.of_half:.2f} of the time"
        )

    def as_json(self, step_s: float) -> dict[str, Any]:
        """As plain values."""
        return {
            "seconds": self.seconds, "share": self.seconds / step_s, "tokens": self.tokens,
            "tokens_per_s": self.tokens_per_s, "limit_tokens_per_s": self.tokens / self.limit_s,
            "share_of_limit": self.share_of_limit, "limit_holds": self.limit_holds, "of_half": self.of_half,
            "bound": self.bound, "why": self.why(),
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class ToolCalls:
    """What tools add to a step."""

    seconds: float
    calls: int
    call_s: float


@dataclass(frozen=True, slots=True)
class MachineRates:
    """What this device did at best in the same minute."""

    flops_s: float
    """Matrix products, in the precision of the run."""
    copy_bytes_s: float
    """A copy in its memory, bytes read and written."""
    other_dtype: str
    other_flops_s: float
    """The same in the other precision that `dtype` knows."""
    other_threads: int | None = None
    other_threads_flops_s: float = 0.0
    """The same with as many threads as there are cores; None where the run has as many."""


@dataclass(frozen=True, slots=True)
class ChosenKeys:
    """What the config says of the keys that advice may name."""

    rollouts: int
    rows: int
    num_iterations: int
    weight_sync_steps: int
    cuda_kernels: bool
    concurrency: int


@dataclass(frozen=True, slots=True)
class KeyAdvice:
    """One key, where to turn it, and the figure that says so."""

    key: str
    direction: str
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PaceReport:
    """All of it."""

    model: str
    device: str
    threads: int
    dtype: str
    loaded_s: float
    took_s: float
    steps: int
    """How many were measured."""
    length: int
    """Tokens of the longest completions that were measured."""
    full_length: int
    """Tokens that the run's completions may have."""
    sampling: HalfStep
    learning: HalfStep
    weights_s: float
    tools: ToolCalls | None
    peak_bytes: int
    rates: MachineRates
    keys: ChosenKeys
    slow_paths: tuple[str, ...]
    """Fast paths for GPUs that this run does not take, each with what stands in the way."""

    @property
    def step_s(self) -> float:
        """One whole step, without rewards and the journal."""
        return (
            self.sampling.seconds + self.learning.seconds + self.weights_s + (self.tools.seconds if self.tools else 0)
        )

    def advice(self) -> list[KeyAdvice]:
        """Keys to change, the most promising first."""
        return [*_of_sampling(self), *_of_learning(self), *_of_machine(self), *_of_step(self)]

    def as_json(self) -> dict[str, Any]:
        """As plain values."""
        whole = self.step_s
        return {
            "schema": SCHEMA, "model": self.model, "device": self.device, "threads": self.threads, "dtype": self.dtype,
            "loaded_s": self.loaded_s, "took_s": self.took_s, "steps": self.steps, "length": self.length,
            "full_length": self.full_length, "rollouts": self.keys.rollouts, "rows": self.keys.rows, "step_s": whole,
            "sampling": self.sampling.as_json(whole), "learning": self.learning.as_json(whole),
            "weights": {"seconds": self.weights_s, "share": self.weights_s / whole},
            "tools": None if self.tools is None else asdict(self.tools) | {"share": self.tools.seconds / whole},
            "peak_bytes": self.peak_bytes, "rates": asdict(self.rates), "slow_paths": list(self.slow_paths),
            "advice": [asdict(each) for each in self.advice()],
        }  # fmt: skip

    def lines(self) -> Iterator[str]:
        """For people."""
        where = "this GPU" if self.device == "cuda" else f"this CPU with {counted(self.threads, 'thread')}"
        yield f"bench     {self.model} on {where}, {self.dtype}; loaded in {_short(self.loaded_s)}"
        yield f"step      {_short(self.step_s)}: {', '.join(self._parts())}; without rewards and journal"
        yield f"          {counted(self.steps, 'step')} measured in {_short(self.took_s)}{self._stretched()}"
        rollouts, rows = self.keys.rollouts, min(self.keys.rows, self.keys.rollouts)
        yield f"sampling  {_half(self.sampling)}; {counted(rollouts, 'rollout')}, {rows} side by side"
        yield f"learning  {_half(self.learning)}"
        yield f"memory    {size(self.peak_bytes)} at the peak{self._of_what()}"
        rates = f"matrix products {self.rates.flops_s / 1e9:,.0f} GFLOP/s in {self.dtype}"
        yield f"limits    {rates}, memory copy {self.rates.copy_bytes_s / 1e9:.1f} GB/s, both measured now"
        yield f"bound     sampling by {self.sampling.bound}: {self.sampling.why()}"
        yield f"          learning by {self.learning.bound}: {self.learning.why()}"
        if self.tools is not None:
            yield f"          tools {_share(self.tools.seconds / self.step_s)} of the step: {_calls(self.tools)}"
        yield from (f"          {line}" for line in self.slow_paths)
        found = [f"{each.key}: {each.direction} ({each.why})" for each in self.advice()]
        yield from (
            f"{'keys' if i == 0 else '':<9} {line}" for i, line in enumerate(found or ["none: " + self._spent()])
        )

    def _parts(self) -> Iterator[str]:
        parts = {"sampling": self.sampling.seconds, "learning": self.learning.seconds, "weights": self.weights_s}
        parts |= {} if self.tools is None else {"tools": self.tools.seconds}
        for name, seconds in parts.items():
            yield f"{name} {_short(seconds)} ({_share(seconds / self.step_s)})"

    def _stretched(self) -> str:
        if self.length == self.full_length:
            return f", completions of all {self.length} tokens"
        return f", with completions of {self.length} tokens and stretched to {self.full_length}"

    def _of_what(self) -> str:
        if self.device == "cuda":
            return " on the device"
        short = self.length < self.full_length
        return " of this process, Python and torch included" + ("; longer completions take more" if short else "")

    def _spent(self) -> str:
        return "nothing that was measured speaks for another value; a smaller model or another device would be faster"


def _of_sampling(found: PaceReport) -> Iterator[KeyAdvice]:
    half, keys = found.sampling, found.keys
    if keys.rows < keys.rollouts:
        waves = math.ceil(keys.rollouts / keys.rows)
        if half.bound in (LAUNCHES, MEMORY):
            yield KeyAdvice("engine.rows", f"up to {keys.rollouts}", f"{waves} waves, each bound by {half.bound}")
        return
    if half.of_half >= FLAT:
        why = f"half of the rollouts took {half.of_half:.2f} of the time: more of them cost little"
        yield KeyAdvice("num_generations, tasks_per_step", "up", why)


def _of_learning(found: PaceReport) -> Iterator[KeyAdvice]:
    half = found.learning
    if half.of_half >= FLAT and found.sampling.of_half < FLAT:
        why = f"learning from half of the rollouts took {half.of_half:.2f} of the time: the rest is paid once a step"
        yield KeyAdvice("tasks_per_step", "up", why)
    if found.keys.num_iterations > 1 and half.seconds > found.sampling.seconds:
        why = f"{found.keys.num_iterations} passes are {_share(half.seconds / found.step_s)} of the step"
        yield KeyAdvice("num_iterations", "down", why)


def _of_machine(found: PaceReport) -> Iterator[KeyAdvice]:
    rates = found.rates
    if not (found.sampling.limit_holds and found.learning.limit_holds):
        return  # the rates behind the limits are those that would be compared
    if rates.other_threads is not None and rates.other_threads_flops_s >= BETTER * rates.flops_s:
        times = rates.other_threads_flops_s / rates.flops_s
        yield KeyAdvice(
            "threads", f"{rates.other_threads}", f"matrix products were {times:.1f} times as fast with them"
        )
    bounds = {found.sampling.bound, found.learning.bound}
    faster = rates.other_flops_s / rates.flops_s
    if faster >= BETTER and ARITHMETIC in bounds:
        yield KeyAdvice("dtype", rates.other_dtype, f"matrix products were {faster:.1f} times as fast in it")
    elif rates.other_dtype == "bfloat16" and MEMORY in bounds and faster >= 1:
        yield KeyAdvice("dtype", "bfloat16", f"half the bytes, and matrix products {faster:.1f} times as fast")
    if found.device == "cuda" and not found.keys.cuda_kernels:
        yield KeyAdvice("cuda_kernels", "true", f"sampling is bound by {found.sampling.bound} without them")


def _of_step(found: PaceReport) -> Iterator[KeyAdvice]:
    weights, whole = found.weights_s / found.step_s, found.step_s
    if weights >= MUCH:
        yield KeyAdvice(
            "weight_sync_steps",
            "up, with max_staleness",
            f"new weights and their proof are {_share(weights)} of the step",
        )
    if found.tools is not None and found.tools.seconds >= MUCH * whole:
        why = f"tools are {_share(found.tools.seconds / whole)} of the step: {_calls(found.tools)}"
        yield KeyAdvice("tools.concurrency", f"up from {found.keys.concurrency}", why)


def _calls(tools: ToolCalls) -> str:
    return f"{counted(tools.calls, 'call')} of {1000 * tools.call_s:.1f} ms, half of the rollouts calling in each turn"


def _half(half: HalfStep) -> str:
    rate, limit = half.tokens_per_s, half.tokens / half.limit_s
    share = f"{_share(half.share_of_limit)} of the limit" if half.limit_holds else "more than the measured limit"
    return f"{_number(rate)} tokens/s, {share} ({_number(limit)} tokens/s)"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _share(value: float) -> str:
    return f"{100 * value:.0f} %" if value >= 0.095 else f"{100 * value:.2g} %"


def _short(seconds: float) -> str:
    return f"{seconds:.0f}s" if seconds >= 10 else f"{seconds:.2g}s"

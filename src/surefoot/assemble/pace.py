"""How fast this machine is with this model: measured in seconds, with made-up weights, before anything is loaded.

Owns       the measurement: a few layers of the model's shape go through the run's own engine and learner, with the
           run's own threads, rows, precision and loss.
Promises   what is said of the whole model is that measurement, stretched over the layers, rows and tokens that were
           left out, each in proportion; nothing is taken from another machine.
Never      loads a model, or leaves torch's settings changed.

Read next: `forecast.py`, which makes a run of it. Imports torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from surefoot.assemble.engines import engine_rows
from surefoot.assemble.learning import learner_settings
from surefoot.assemble.model_shape import Shape
from surefoot.config import Config
from surefoot.engines.embedded import EmbeddedEngine
from surefoot.policy.learner import GRPOLearner
from surefoot.policy.load import made_up_net
from surefoot.protocols import Request
from surefoot.records import TrainSample

SMALL = 5_000_000
"""Below so many parameters the whole model is measured; above it, slices of FEW and MORE layers."""
FEW, MORE = 1, 4
TOKENS = 48
"""Longest sample of a slice; longer ones cost in proportion."""
STEPS = 5
"""Decoding steps that are timed."""
PATIENCE_S = 0.25
clock = time.perf_counter
"""benchmarks/forecast.py puts the processor's clock here where others use the machine."""
WIDEST = 2048
"""A wider model is measured as narrow as this and stretched by its parameters."""


@dataclass(frozen=True)
class Pace:
    """Seconds on this machine."""

    decode: float
    """One token for every row of the engine."""
    prefill: float
    """One prompt read, and its first token drawn."""
    pack: float
    """New weights laid out for decoding."""
    learn_fixed: float
    """One optimiser step, whatever it learns from."""
    learn_sample: float
    """What each rollout adds to it."""
    rows: int
    """Of the engine."""


@dataclass(frozen=True)
class _Slice:
    decode: float
    prefill: float
    pack: float
    fixed: float
    sample: float

    def stretched(self, more: _Slice, layers: int, few: int, many: int) -> _Slice:
        """To so many layers, from what the slices of few and of many cost."""

        def line(name: str) -> float:
            low, high = float(getattr(self, name)), float(getattr(more, name))
            return max(low + max(0.0, high - low) / (many - few) * (layers - few), 0.0)

        return _Slice(*(line(name) for name in ("decode", "prefill", "pack", "fixed", "sample")))

    def times(self, factor: float) -> _Slice:
        return _Slice(*(factor * each for each in (self.decode, self.prefill, self.pack, self.fixed, self.sample)))


def measure(config: Config, shape: Shape, prompt_tokens: int, device: str) -> Pace:
    """Some seconds of work on `device`, as one run of this config would do it."""
    with _threads(config.threads):
        narrow = max(1, -(-shape.hidden // WIDEST))
        if shape.parameters <= SMALL:
            found = _measure(config, shape, shape.layers, prompt_tokens, device, narrow)
        else:
            few, more = (_measure(config, shape, n, prompt_tokens, device, narrow) for n in (FEW, MORE))
            found = few.stretched(more, shape.layers, FEW, MORE)
    found = found.times((shape.hidden / _narrowed(shape, narrow)["hidden_size"]) ** 2)
    return Pace(found.decode, found.prefill, found.pack, found.fixed, found.sample, engine_rows(config))


def interpreter_seconds() -> float:
    """A fixed piece of plain Python, timed: what the interpreter itself costs on this machine."""

    def work() -> None:
        table: dict[int, int] = {}
        for number in range(60_000):
            table[number % 997] = table.get(number % 991, 0) + number

    return _best(lambda: _seconds(work, "cpu"))


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _measure(config: Config, shape: Shape, layers: int, prompt: int, device: str, narrow: int) -> _Slice:
    whole = prompt + config.max_completion_length
    short = 1.0 if shape.parameters <= SMALL else min(1.0, TOKENS / whole)
    asked, said = max(2, round(short * prompt)), max(2, round(short * config.max_completion_length))
    net, spec = made_up_net(
        _narrowed(shape, narrow) | {"max_position_embeddings": max(512, asked + said + STEPS + 1)}, layers, device,
        config.dtype,
    )  # fmt: skip
    decode, prefill, pack = _engine_times(config, net, spec, asked, device)
    fixed, sample = _learner_times(config, net, asked, said, spec.vocab)
    stretch = whole / (asked + said)
    return _Slice(decode, prefill * stretch, pack, fixed, sample * stretch)


def _narrowed(shape: Shape, narrow: int) -> dict[str, int]:
    """The shape as transformers names it, `narrow` times less wide."""
    kv_heads = max(1, shape.kv_heads // narrow)
    heads = kv_heads * (shape.heads // shape.kv_heads)
    return {
        "hidden_size": shape.hidden if narrow == 1 else heads * shape.head_dim,
        "intermediate_size": shape.intermediate // narrow, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": shape.head_dim, "vocab_size": shape.vocab // narrow,
    }  # fmt: skip


def _engine_times(config: Config, net: object, spec: object, asked: int, device: str) -> tuple[float, float, float]:
    rows = engine_rows(config)
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.dtype]
    engine = EmbeddedEngine(spec, rows=rows, max_width=asked + STEPS + 1, device=device, dtype=dtype)  # type: ignore[arg-type]
    engine.load_weights(dict(net.named_parameters()), 0)  # type: ignore[attr-defined]
    prompts = iter(range(10_000))

    def ask(count: int, tokens: int) -> Callable[[], object]:
        first = next(prompts)  # a prompt of its own, so that it is read anew
        ids = tuple((first + 7 * place) % (spec.vocab - 1) + 1 for place in range(asked))  # type: ignore[attr-defined]
        requests = [Request(f"{first}/{n}", ids, tokens, config.temperature, frozenset(), n) for n in range(count)]
        return lambda: engine.generate(requests)

    cold = _seconds(ask(rows, 2), device)
    one = _best(lambda: _seconds(ask(1, 1), device))
    many = _best(lambda: _seconds(ask(rows, 1 + STEPS), device))
    decode = max(many - one, 1e-6) / STEPS
    engine.close()
    return decode, one, max(0.0, cold - one - decode)


def _learner_times(config: Config, net: object, asked: int, said: int, vocab: int) -> tuple[float, float]:
    """Seconds of a step that learns from nothing, and what one sample adds."""
    # Nobody sampled these tokens, and there are more steps here than a short run has.
    settings = replace(learner_settings(config, 0), parity_tolerance=1e9, max_steps=10**6, warmup_steps=0)
    learner = GRPOLearner(net, settings)
    siblings = min(config.num_generations, 8)
    group, several = 1, max(2, min(config.tasks_per_step, 32 // siblings))
    device = str(learner.device.type)

    def learn(groups: int) -> float:
        samples = _samples(groups, siblings, asked, said, vocab, learner.version)
        return _seconds(lambda: learner.learn(samples), device)

    learn(group)  # the moments are made
    small, large = _best(lambda: learn(group)), _best(lambda: learn(several))
    sample = max(large - small, 1e-6) / ((several - group) * siblings)
    return max(0.0, small - group * siblings * sample), sample


def _samples(groups: int, siblings: int, asked: int, said: int, vocab: int, version: int) -> list[TrainSample]:
    flat = -float(torch.log(torch.tensor(float(vocab))))
    return [
        TrainSample(
            item_id=f"made/{g}", trainer_version=version, group=str(g), index=s, reward=float(s % 2),
            prompt_ids=tuple((g + 3 * n) % (vocab - 1) + 1 for n in range(asked)),
            completion_ids=tuple((g + s + 5 * n) % (vocab - 1) + 1 for n in range(said)),
            sampled=(True,) * said, logprobs=(flat,) * said, advantage=1.0 if s % 2 else -1.0, finish_reason="length",
        )
        for g in range(groups) for s in range(siblings)
    ]  # fmt: skip


def _best(timed: Callable[[], float]) -> float:
    """The shortest of three, or of as many as fit into PATIENCE_S: what others do to the machine only adds."""
    taken = [timed()]
    while len(taken) < 3 and sum(taken) < PATIENCE_S:
        taken.append(timed())
    return min(taken)


def _seconds(work: Callable[[], object], device: str) -> float:
    _wait_for(device)
    began = clock()
    work()
    _wait_for(device)
    return clock() - began


def _wait_for(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()

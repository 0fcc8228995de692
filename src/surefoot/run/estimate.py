"""How long a run will take: its parts added up, each at the pace that was measured on this machine.

Owns       what a run consists of: start, preflight, evaluations, steps, saves.
Promises   every part is counted, fixed ones too; every assumption is in the words that go with the number.
Never      says "at most": completions may be shorter, a machine may get busier.

What is assumed: completions of full length; rewards that differ in every group; with tools, half of the rollouts go on
after each turn. What a step costs beside the model (grading with a quick reward, journal, log) was measured once on two
cores (`OWN_*`: what the built-in run's step time leaves beside its parts, `benchmarks/forecast.py --parts`), and is
scaled by how fast plain Python is here and now. The other constants are rounded from the same runs.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from surefoot.config import Config
from surefoot.config.schedule import Answered, cadence_of
from surefoot.engines.graphs import embedded_engine
from surefoot.learner.footprint import ModelShape
from surefoot.learner.grpo import GRPOLearner
from surefoot.learner.lora import Adapter
from surefoot.learner.model import made_up_net
from surefoot.learner.quantised import NONE, QuantisedBase, quantise
from surefoot.protocols import Request
from surefoot.records import TrainSample
from surefoot.run.build import engine_rows
from surefoot.run.model import learner_settings, lora_settings
from surefoot.system.text import counted, duration

# -- How fast this machine is with this model: measured in seconds, with made-up weights, before anything is loaded
# Owns       the measurement: a few layers of the model's shape go through the run's own engine and learner, with the
# run's own threads, rows, precision and loss.
# Promises   what is said of the whole model is that measurement, stretched over the layers, rows and tokens that were
# left out, each in proportion; nothing is taken from another machine.
# Never      loads a model, or leaves torch's settings changed.


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


def measure(config: Config, shape: ModelShape, prompt_tokens: int, device: str) -> Pace:
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


def _measure(config: Config, shape: ModelShape, layers: int, prompt: int, device: str, narrow: int) -> _Slice:
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


def _narrowed(shape: ModelShape, narrow: int) -> dict[str, int]:
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
    engine = embedded_engine(
        spec,  # type: ignore[arg-type]
        rows=rows, max_width=asked + STEPS + 1, device=device, dtype=dtype, graphs=config.cuda_kernels,
    )  # fmt: skip
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
    lora = lora_settings(config)
    lora = None if lora is None else replace(lora, modules_to_save=())
    packed = lora is not None and lora.quantization != NONE
    quantised = _in_four_bits(net) if packed else None
    adapter = None if lora is None else Adapter(net, lora, quantised=quantised)
    learner = GRPOLearner(net, settings, adapter=adapter)
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


def _in_four_bits(net: Any) -> QuantisedBase:
    weight = next(net.parameters())
    found = quantise(net, (), weight.dtype)
    found.move(weight.device.type)
    return found


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


# -- How long a run will take: its parts added up, each at the pace that was measured on this machine


REFERENCE_S = 0.0055
"""`pace.interpreter_seconds` on the machine where the numbers below were measured."""
START_S = 6.0
"""From typing the command to the first token, without the model: Python, torch, reward workers."""
LOAD_S, GGUF_LOAD_S = 5e-9, 1.5e-7
"""Per parameter: weights read, hashed and checked; and where a GGUF file is dequantised first."""
OWN_STEP_S, OWN_ROLLOUT_S = 0.003, 4e-5
"""Of a step, and of each of its rollouts: drawing, grading, journal, log."""
SAVE_BYTES_PER_S = 5e8
PROBE_TOKENS, PROBE_PROMPTS, PROBE_LENGTH = 8, 3, 97
"""What is asked of the engine after every weight update (`runtime.weights`)."""
GO_ON = 0.5
"""Share of the rollouts that call a tool, and so speak again, in each turn."""
CALL_S, SERVER_S = 0.002, 0.5
"""One tool call and one start of an isolated server, where neither was measured."""


@dataclass(frozen=True)
class ToolTimes:
    """What tools add."""

    isolated: bool
    """Every rollout that calls starts a server of its own."""
    call_s: float | None = None
    server_s: float | None = None
    """Measured, or None."""


@dataclass(frozen=True)
class Forecast:
    """Seconds by part."""

    start: float
    preflight: float
    evaluation: float
    """One of them."""
    evaluations: int
    sampling: float
    learning: float
    keeping: float
    """Of one step, as the two above."""
    steps: int
    saving: float
    """All of it."""

    @property
    def step(self) -> float:
        """One step."""
        return self.sampling + self.learning + self.keeping

    @property
    def total(self) -> float:
        """The whole run."""
        return self.start + self.preflight + self.evaluation * self.evaluations + self.step * self.steps + self.saving


def forecast(
    config: Config, pace: Pace, *, parameters: int, prompt_tokens: int, asked: Answered, interpreter_s: float,
    tools: ToolTimes | None = None, gguf: bool = False,
) -> Forecast:  # fmt: skip
    """A run of this config at this pace.

    Args:
        asked: tasks of one evaluation.
        interpreter_s: what `pace.interpreter_seconds` found.
    """
    slow = max(0.2, interpreter_s / REFERENCE_S)
    turns = _turns(config, tools)
    longer = 1.0 + sum(turns[1:]) * (config.max_completion_length + _reply(config, tools)) / max(
        1, prompt_tokens + config.max_completion_length
    )
    proof = PROBE_TOKENS * pace.decode + PROBE_PROMPTS * pace.prefill * max(1.0, PROBE_LENGTH / max(1, prompt_tokens))
    rollouts = config.rollouts_per_step
    play = _play(config, pace, rollouts, config.tasks_per_step, prompt_tokens, turns, tools, slow)
    passes = max(1, config.num_iterations)
    cadence = cadence_of(config, asked)
    answers = sum(asked) * config.num_generations_eval
    evaluation = _play(config, pace, answers, sum(asked), prompt_tokens, turns, tools, slow)
    looked = config.preflight_tasks * config.num_generations
    return Forecast(
        start=START_S * slow + parameters * (GGUF_LOAD_S if gguf else LOAD_S) * slow + pace.pack + proof,
        preflight=_play(config, pace, looked, config.preflight_tasks, prompt_tokens, turns, tools, slow),
        evaluation=evaluation + answers * OWN_ROLLOUT_S * slow,
        evaluations=cadence.count,
        sampling=(play + pace.pack + proof / config.weight_sync_steps) / passes,
        learning=pace.learn_fixed + rollouts * pace.learn_sample * longer,
        keeping=(OWN_STEP_S + rollouts * OWN_ROLLOUT_S) * slow,
        steps=config.max_steps,
        saving=_saves(config, cadence.count) * 12 * parameters / SAVE_BYTES_PER_S,
    )


def _turns(config: Config, tools: ToolTimes | None) -> list[float]:
    """Share of the rollouts that speak in each turn."""
    return [GO_ON**turn for turn in range(config.max_turns if tools else 1)]


def _reply(config: Config, tools: ToolTimes | None) -> float:
    """Tokens of a tool's answer: a quarter of what it may have."""
    return config.tools.max_result_tokens / 4 if tools else 0.0


def _play(
    config: Config, pace: Pace, rollouts: int, prompts: int, prompt_tokens: int, turns: list[float],
    tools: ToolTimes | None, slow: float,
) -> float:  # fmt: skip
    """Seconds until these rollouts have said everything."""
    seconds, length = 0.0, float(max(1, prompt_tokens))
    for turn, share in enumerate(turns):
        speaking = math.ceil(rollouts * share)
        read = prompts if turn == 0 else speaking  # later every rollout has a history of its own
        seconds += read * pace.prefill * length / max(1, prompt_tokens)
        seconds += math.ceil(speaking / pace.rows) * config.max_completion_length * pace.decode
        length += config.max_completion_length + _reply(config, tools)
        if tools and turn < len(turns) - 1:
            seconds += _calls(config, math.ceil(speaking * GO_ON), tools, slow, first=turn == 0)
    return seconds


def _calls(config: Config, calls: int, tools: ToolTimes, slow: float, *, first: bool) -> float:
    """Seconds that so many calls at once take; isolated servers are started by the first of a rollout."""
    wait = (tools.call_s or 0.0) * math.ceil(calls / config.tools.concurrency) + calls * CALL_S * slow
    if tools.isolated and first:
        wait += calls * (SERVER_S * slow if tools.server_s is None else tools.server_s) / max(1, config.threads)
    return wait


def _saves(config: Config, evaluations: int) -> int:
    """The end, what save_steps asks for, and half of the evaluations as new best ones."""
    regular = (config.max_steps - 1) // config.save_steps if config.save_steps else 0
    best = max(0, evaluations - 2) // 2 if config.save_best and config.holds_out else 0
    return 1 + regular + best


def forecast_lines(found: Forecast, where: str, notes: list[str]) -> list[str]:
    """The forecast in words, every assumption with it."""
    per_step = f"{_short(found.sampling)} sampling, {_short(found.learning)} learning, {_short(found.keeping)} keeping"
    parts = [f"start {duration(found.start)}"]
    if found.preflight:
        parts.append(f"preflight {duration(found.preflight)}")
    parts += [
        f"{counted(found.evaluations, 'evaluation')} of {_short(found.evaluation)}",
        f"{counted(found.steps, 'step')} of {_short(found.step)} ({per_step})", f"saving {duration(found.saving)}",
    ]  # fmt: skip
    return [
        f"time      about {duration(found.total)}: {'; '.join(parts)}",
        f"          measured now on {where}, with made-up weights of this shape",
        "          assumed: completions of full length, and that every group teaches (equal rewards cost no learning)",
        *(f"          {note}" for note in notes),
    ]


def _short(seconds: float) -> str:
    return duration(seconds) if seconds >= 10 else f"{seconds:.2g}s"

"""How fast a config is on this machine: whole steps through the run's own engine and learner, for about a minute.

Owns       what `surefoot bench` does.
Promises   the model, the engine, the learner and the proof of new weights are those of a run of this config, made by
           the same functions; completions are sampled, checked and learned from, so an engine that was not asked, or
           says something else than its weights, ends in an error; limits are measured beside the steps; it ends in
           its time, or within `OVERTIME_S` of it where the smallest steps take longer, or refuses.
Never      grades, keeps a journal, or creates a file; says a number of what was not measured without saying so.

Rewards are made up (siblings differ, so every rollout teaches) and completions have full length: nothing ends early.
Where full length takes too long, steps are made with shorter ones, and stretched.

Read next: `report/pace.py`, what is made of the figures.
"""

from __future__ import annotations

import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

import torch

from surefoot.config import Config
from surefoot.config.choices import engine_facts
from surefoot.config.load import LoadedConfig
from surefoot.engines.graphs import not_implemented
from surefoot.errors import ConfigError, EngineError, InvariantError, NumericsError
from surefoot.learner.fused_forward import why_not_fused
from surefoot.learner.fused_options import unlisted
from surefoot.learner.grpo import GRPOLearner
from surefoot.protocols import Completion, Request, ServingEngine
from surefoot.records import Task, TrainSample
from surefoot.report.pace import ChosenKeys, HalfStep, MachineRates, PaceReport, ToolCalls, sound
from surefoot.run.build import engine_rows, engine_spec, first_prompts, make_publisher
from surefoot.run.inputs import Inputs, read_inputs
from surefoot.run.model import Prepared, make_learner, prepare
from surefoot.run.tools import open_toolkit, probe_seconds
from surefoot.runtime.local import LocalReplica
from surefoot.runtime.requests import derive_seed
from surefoot.runtime.weights import run_here

clock = time.perf_counter
SHORT = 4
"""Tokens of the first completions."""
LONGER = 4
"""Each try is with completions so many times as long as the one before, as long as there is time."""
OVERTIME_S = 10.0
"""What is begun in time may go on so long behind it; where even the smallest steps would not end then, none is made."""
MANY = 10**6
"""More steps than a bench makes: a short run's schedule has an end."""
RATES, RATES_SHARE = 4, 0.1
"""Rates of the machine behind the steps, and what share of the time all of them get; each is tried once at least."""
PRODUCT = {"cpu": 1024, "cuda": 8192}
COPY_BYTES = {"cpu": 128 * 2**20, "cuda": 2**30}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
GO_ON = 0.5
"""Share of the rollouts that is taken to call a tool in each turn, as in `estimate.py`."""

Tell = Callable[[str], None]


def bench(loaded: LoadedConfig, *, seconds: float, tell: Tell = lambda line: None) -> PaceReport:
    """Measure this config on this machine.

    Args:
        seconds: for everything behind the loading of the model.
        tell: is given a line before whatever takes long.
    """
    config = loaded.config
    _refuse(config)
    inputs = read_inputs(config, loaded.base)
    with ExitStack() as stack:
        toolkit = None
        if inputs.tools is not None:
            tell("starting tool servers ...")
            toolkit = stack.enter_context(open_toolkit(inputs.tools))
        call_s = None if toolkit is None or inputs.tools is None else probe_seconds(inputs.tools, toolkit)
        specs, routes = ((), None) if toolkit is None else (tuple(toolkit.specs), toolkit.routes)
        tell(f"loading {config.model} ...")
        began = clock()
        ready = prepare(config, loaded.base, inputs, specs, routes)
        rig = _Rig(loaded, inputs, ready)
        stack.callback(rig.close)
        loaded_s = sound("loading the model", clock() - began)
        return _report(rig, seconds, loaded_s, call_s, tell)


def _refuse(config: Config) -> None:
    """What one process on this machine cannot show."""
    if config.runtime.kind != "local":
        raise ConfigError(
            f"surefoot bench with runtime.kind = {config.runtime.kind}", "it measures one process, which takes turns",
            "add runtime.kind=local; `max_steps=5` in a real run shows what a cluster does",
        )  # fmt: skip
    if engine_facts(config.engine.kind).elsewhere:
        raise ConfigError(
            f"surefoot bench with engine.kind = {config.engine.kind}",
            "another machine samples there, and is not bounded by what this one can do",
            "add engine.kind=embedded, or measure where the server is",
        )  # fmt: skip
    if config.stream_tasks:
        raise ConfigError(
            "surefoot bench with stream_tasks = true", "the file's index would be written, and nothing is written here",
            "add stream_tasks=false num_tasks=100",
        )  # fmt: skip


# -- Steps ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Round:
    """One step: what went through it, and how long each part took."""

    length: int
    rollouts: int
    prompt_tokens: int
    """Of distinct prompts."""
    tokens: int
    sampling_s: float
    learning_s: float
    weights_s: float

    @property
    def seconds(self) -> float:
        return self.sampling_s + self.learning_s + self.weights_s


class _Rig:
    """Engine and learner of this config, wired as a local run wires them."""

    def __init__(self, loaded: LoadedConfig, inputs: Inputs, ready: Prepared) -> None:
        self.config, self.ready, self.rounds = loaded.config, ready, 0
        self.net = ready.policy.model
        forever = self.config.model_copy(update={"max_steps": MANY})
        self.learner: GRPOLearner = make_learner(forever, loaded.base, ready.policy, ready.codec, ready.train)
        self.device = str(self.learner.device.type)
        spec = engine_spec(self.config, ready.policy, ready.engine_width, beside_learner=True)
        self.engine: ServingEngine = spec.build()
        self.replica = LocalReplica(self.engine, shares_tensors=spec.shares_tensors)
        self.publisher = make_publisher(
            self.config, ready, self.learner.score, first_prompts(ready), deadline_s=None
        )  # fmt: skip
        self._tasks: Iterator[Task] = cycle(ready.train)
        self.publish()

    def close(self) -> None:
        self.engine.close()

    def publish(self) -> None:
        """New weights, staged, served and proved: as `LocalRuntime.publish`."""
        weights, version = self.learner.published()
        run_here(self.publisher.publish([self.replica], weights, self.replica.sums(weights), version))

    def step(self, tasks: int, siblings: int, length: int) -> _Round:
        """Sample, learn and hand over, once."""
        self.rounds += 1
        asked = list(islice(self._tasks, tasks))
        requests = [self._request(task, i, length) for task in asked for i in range(siblings)]
        sampling_s, said = self._timed("sampling", lambda: self.engine.generate(requests))
        self._check(requests, said)
        samples = [
            self._sample(task, i, said[place * siblings + i])
            for place, task in enumerate(asked)
            for i in range(siblings)
        ]
        before = self.learner.version
        learning_s, _ = self._timed("learning", lambda: self._learn(samples))
        if self.learner.version != before + self.config.num_iterations:
            raise InvariantError(
                f"the learner is at version {self.learner.version} after a step on version {before}",
                "what was not learned has no pace", "report it, with the config",
            )  # fmt: skip
        weights_s, _ = self._timed("handing over the weights", self.publish)
        prompts = {request.prompt_ids for request in requests}
        tokens = sum(len(completion.token_ids) for completion in said)
        return _Round(
            length, len(requests), sum(map(len, prompts)), tokens, sampling_s, learning_s, weights_s
        )  # fmt: skip

    def _request(self, task: Task, index: int, length: int) -> Request:
        prompt = self.ready.prompts[task.id]
        room = min(length, self.ready.width - len(prompt))
        seed = derive_seed(self.config.seed, "bench", self.rounds, task.id, index)
        return Request(f"{task.id}/{index}", prompt, room, self.config.temperature, frozenset(), seed)

    def _check(self, requests: Sequence[Request], said: Sequence[Completion]) -> None:
        """Every request answered, in full, by the weights that the learner has."""
        version = self.learner.version
        wrong = [
            request.id for request, answer in zip(requests, said, strict=False)
            if answer.request_id != request.id or len(answer.token_ids) != request.max_new_tokens
            or (answer.version, answer.version_end) != (version, version)
        ]  # fmt: skip
        if wrong or len(said) != len(requests):
            raise EngineError(
                f"the engine gave {len(said)} answers to {len(requests)} requests, {len(wrong)} of them not in full or "
                f"not by version {version}", "tokens that were not sampled have no pace", "look at engine.kind",
            )  # fmt: skip

    def _sample(self, task: Task, index: int, said: Completion) -> TrainSample:
        """With a made-up reward: siblings differ, so that each of them teaches."""
        return TrainSample(
            item_id=task.id, trainer_version=said.version, group=task.id, index=index, reward=float(index % 2),
            prompt_ids=self.ready.prompts[task.id], completion_ids=said.token_ids,
            sampled=(True,) * len(said.token_ids), logprobs=said.logprobs, advantage=1.0 if index % 2 else -1.0,
            finish_reason="stop",
        )  # fmt: skip

    def _learn(self, samples: Sequence[TrainSample]) -> None:
        for iteration in range(self.config.num_iterations):
            report = self.learner.learn(samples, iteration=iteration)
            if not report.applied:
                raise NumericsError(
                    f"step {self.rounds} was not applied: {', '.join(report.suspects) or 'it is not finite'}",
                    "a step that is thrown away says nothing of one that counts", "lower learning_rate",
                )  # fmt: skip

    def _timed(self, what: str, work: Callable[[], Any]) -> tuple[float, Any]:
        self._wait()
        began = clock()
        found = work()
        self._wait()
        return sound(what, clock() - began), found

    def _wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()


def too_short(least: float) -> ConfigError:
    """What is refused when even the smallest steps do not fit."""
    return ConfigError(
        f"--seconds is too short: the smallest measurement takes {least:.0f}s here",
        "a figure of less than a step is a figure of something else",
        f"--seconds {2 * least:.0f}, or fewer tasks_per_step and num_generations",
    )  # fmt: skip


def _measure(rig: _Rig, left: Callable[[], float], tell: Tell) -> tuple[list[_Round], list[_Round], list[_Round]]:
    """Steps of growing length, then whole ones and such with half of the rollouts, in turns, until the time is over.

    Returns:
        All whole ones in order, those of the greatest length, and the halves, which have that length too.
    """
    config = rig.config
    tasks, siblings, full = config.tasks_per_step, config.num_generations, config.max_completion_length
    fewer = _halved(tasks, siblings)

    def step(tasks: int, siblings: int, length: int) -> _Round:
        found = rig.step(tasks, siblings, length)
        tell(f"{found.rollouts} rollouts of {length} tokens: {found.seconds:.2g}s; {max(0.0, left()):.0f}s left")
        return found

    warm_up = step(tasks, siblings, min(SHORT, full))  # kernels are chosen, buffers and moments are made
    if 1.6 * warm_up.seconds > left() + OVERTIME_S:  # a whole one and a half one are the least
        raise too_short(2.6 * warm_up.seconds)
    seen = [step(tasks, siblings, min(SHORT, full))]
    while seen[-1].length < full:
        longer = min(full, LONGER * seen[-1].length)
        if 2 * seen[-1].seconds * longer / seen[-1].length > left():
            break
        seen.append(step(tasks, siblings, longer))
    top = seen[-1]
    wholes, halves = [top], [step(*fewer, top.length)]
    while wholes[-1].seconds + halves[-1].seconds < left():
        wholes.append(step(tasks, siblings, top.length))
        halves.append(step(*fewer, top.length))
    return [*seen, *wholes[1:]], wholes, halves


# -- What the machine can do, and what a step must cost ---------------------------------------------


def product_rate(device: str, dtype: str, seconds: float) -> float:
    """Floating-point operations a second of a square matrix product, the best of some tries."""
    n = PRODUCT[device]
    a, b = (torch.randn(n, n, device=device).to(DTYPES[dtype]) for _ in range(2))
    return 2 * n**3 / _best("a matrix product", lambda: a @ b, device, seconds)


def copy_rate(device: str, seconds: float) -> float:
    """Bytes a second, read and written, of a copy in the device's memory."""
    source = torch.ones(COPY_BYTES[device], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / _best("a copy", lambda: target.copy_(source), device, seconds)


def _best(what: str, work: Callable[[], object], device: str, seconds: float) -> float:
    taken: list[float] = []
    work()
    while not taken or (len(taken) < 8 and sum(taken) < seconds):
        if device == "cuda":
            torch.cuda.synchronize()
        began = clock()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        taken.append(sound(what, clock() - began))
    return min(taken)


def _halved(tasks: int, siblings: int) -> tuple[int, int]:
    """Half of the rollouts: of half of the tasks, or of the only one half of the siblings."""
    return (tasks // 2, siblings) if tasks > 1 else (1, max(1, siblings // 2))


def _rates(config: Config, device: str, flops_s: float, seconds: float) -> MachineRates:
    """What this machine can do; the run's own product rate, which was measured first, is the better of two."""
    flops_s = max(flops_s, product_rate(device, config.dtype, seconds))
    other = "bfloat16" if config.dtype == "float32" else "float32"
    other_flops_s, copy_bytes_s = product_rate(device, other, seconds), copy_rate(device, seconds)
    cores = os.cpu_count() or 1  # more than this process may use, perhaps: what they bring is measured
    if device != "cpu" or cores == config.threads:
        return MachineRates(flops_s, copy_bytes_s, other, other_flops_s)
    torch.set_num_threads(cores)
    try:
        with_all = product_rate(device, config.dtype, seconds)
        return MachineRates(flops_s, copy_bytes_s, other, other_flops_s, cores, with_all)
    finally:
        torch.set_num_threads(config.threads)


@dataclass(frozen=True)
class _Sizes:
    """What the cost of a model depends on."""

    multiplied: int
    """Parameters that are multiplied with every token; looking one up in a table is no product."""
    trained: int
    width: int
    """Bytes of a number where the model computes."""
    cache_bytes: int
    """Keys and values of one token."""

    @classmethod
    def of(cls, rig: _Rig) -> _Sizes:
        spec, width = rig.ready.policy.spec, rig.config.dtype == "bfloat16"
        table = 0 if spec.tied_head else spec.vocab * spec.hidden
        whole = sum(parameter.numel() for parameter in rig.net.parameters())
        size = 2 if width else 4
        cache = spec.layers * 2 * spec.kv_heads * spec.head_dim * size
        return cls(whole - table, sum(each.numel() for each in rig.learner.trained().values()), size, cache)

    def forward(self, tokens: int) -> float:
        """Floating-point operations."""
        return 2.0 * self.multiplied * tokens


def _sampling_costs(sizes: _Sizes, found: _Round, length: int, rows: int) -> tuple[float, float]:
    """Operations and bytes of sampling with completions of this length: products, weights and keys read."""
    waves = -(-found.rollouts // rows)
    context = found.prompt_tokens + found.rollouts * length / 2
    return (
        sizes.forward(found.prompt_tokens + found.rollouts * length),
        length * (waves * sizes.width * sizes.multiplied + sizes.cache_bytes * context),
    )


def _learning_costs(config: Config, sizes: _Sizes, found: _Round, length: int) -> tuple[float, float]:
    """The same of learning: forward, backward, the reference's forward, and seven arrays that AdamW moves."""
    tokens = found.prompt_tokens + found.rollouts * length
    passes = (3 if config.lora.rank is None else 2) * config.num_iterations + (1 if config.beta > 0 else 0)
    return passes * sizes.forward(tokens), 7.0 * 4 * sizes.trained * config.num_iterations


# -- The report -----------------------------------------------------------------------------------


def _report(rig: _Rig, seconds: float, loaded_s: float, call_s: float | None, tell: Tell) -> PaceReport:
    config, began = rig.config, clock()
    tell(f"measuring this {'GPU' if rig.device == 'cuda' else 'CPU'} ...")
    each_s = RATES_SHARE * seconds / RATES
    flops_s, sizes = product_rate(rig.device, config.dtype, each_s), _Sizes.of(rig)
    _refuse_too_short(rig, sizes, flops_s, seconds)
    seen, wholes, halves = _measure(rig, lambda: (1 - RATES_SHARE) * seconds - (clock() - began), tell)
    peak = _peak_bytes(rig.device)  # before a large block is copied
    rates, rows = _rates(config, rig.device, flops_s, each_s), engine_rows(config)
    first, top, full = seen[0], wholes[0], config.max_completion_length
    sampling_s = _median(wholes, "sampling_s")
    learning_s = _median(wholes, "learning_s")
    tokens = round(top.tokens * full / top.length)

    def half(name: str, seconds: float, costs: tuple[float, float]) -> HalfStep:
        per_half = _median(halves, f"{name}_s") / _median(wholes, f"{name}_s")
        return HalfStep(
            sound(name, seconds), tokens, sound("products", costs[0] / rates.flops_s),
            sound("memory", costs[1] / rates.copy_bytes_s), sound("half of the rollouts", per_half),
        )  # fmt: skip

    return PaceReport(
        model=config.model, device=rig.device, threads=config.threads, dtype=config.dtype, loaded_s=loaded_s,
        took_s=sound("everything", clock() - began), steps=len(seen) + len(halves) + 1, length=top.length,
        full_length=full,
        sampling=half(
            "sampling", _stretched(sampling_s, first, top, full), _sampling_costs(sizes, top, full, rows)
        ),
        learning=half(
            "learning", learning_s * _tokens(top, full) / _tokens(top, top.length),
            _learning_costs(config, sizes, top, full),
        ),
        weights_s=_median(wholes, "weights_s") / config.weight_sync_steps, tools=_tool_calls(config, top, call_s),
        peak_bytes=peak, rates=rates,
        keys=ChosenKeys(
            config.rollouts_per_step, rows, config.num_iterations, config.weight_sync_steps, config.cuda_kernels,
            config.tools.concurrency,
        ),
        slow_paths=tuple(_slow_paths(rig)),
    )  # fmt: skip


def _refuse_too_short(rig: _Rig, sizes: _Sizes, flops_s: float, seconds: float) -> None:
    """The smallest measurement is four steps of short completions; what their products alone take is known."""
    config = rig.config
    prompts = [len(rig.ready.prompts[task.id]) for task in islice(cycle(rig.ready.train), config.tasks_per_step)]
    tokens = sum(prompts) + config.rollouts_per_step * min(SHORT, config.max_completion_length)
    least = 3.5 * 4 * sizes.forward(tokens) / flops_s
    if least > seconds + OVERTIME_S:
        raise too_short(least)


def _median(rounds: Sequence[_Round], name: str) -> float:
    return statistics.median(float(getattr(each, name)) for each in rounds)


def _tokens(found: _Round, length: int) -> int:
    return found.prompt_tokens + found.rollouts * length


def _stretched(seconds: float, first: _Round, top: _Round, full: int) -> float:
    """Sampling at full length: what further tokens cost is what they cost between the two lengths that were tried."""
    if top.length == full:
        return seconds
    slope = (seconds - first.sampling_s) / (top.length - first.length) if top.length > first.length else 0.0
    return seconds + (full - top.length) * (slope if slope > 0 else seconds / top.length)


def _tool_calls(config: Config, found: _Round, call_s: float | None) -> ToolCalls | None:
    """What calls add, where a probe was asked: half of the rollouts call in each turn but the last."""
    if call_s is None:
        return None
    calls = sum(round(found.rollouts * GO_ON ** (turn + 1)) for turn in range(config.max_turns - 1))
    if calls == 0:
        return None
    seconds = sound("a tool call", call_s) * -(-calls // config.tools.concurrency)
    return ToolCalls(seconds, calls, call_s)


def _slow_paths(rig: _Rig) -> Iterator[str]:
    """Where a GPU run takes the slow path, by the names of what the fast one does not know."""
    if rig.device != "cuda" or not rig.config.cuda_kernels:
        return
    if rig.config.engine.kind == "embedded" and (unknown := not_implemented(rig.ready.policy.spec)):
        yield f"sampling takes the slow path: {', '.join(unknown)}"
    if unknown := [*why_not_fused(rig.net), *unlisted(rig.learner.settings)]:
        yield f"learning takes the slow path: {', '.join(unknown)}"


def _peak_bytes(device: str) -> int:
    if device == "cuda":
        return int(torch.cuda.max_memory_allocated())
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024

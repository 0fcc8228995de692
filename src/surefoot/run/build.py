"""The moving parts of a run: model, learner, engine, runtime. Imports torch."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from surefoot.config import Config
from surefoot.config.choices import engine_facts
from surefoot.learner.architectures import attention_of, refuse_beyond, refuse_cut
from surefoot.learner.chat import ChatCodec
from surefoot.learner.checkpoint import weights_at_start
from surefoot.learner.grpo import GRPOLearner
from surefoot.learner.model import Policy, resolve_device
from surefoot.protocols import EngineInputs, Learner, ServingEngine, ToolSpec
from surefoot.records import Task
from surefoot.rewards.grading import EvalSet
from surefoot.rewards.pool import RewardPool
from surefoot.run.inputs import Inputs
from surefoot.run.model import (
    Prepared,
    adapter_plan,
    channels_of,
    check_own_code,
    lora_settings,
    make_learner,
    prepare,
    probe_tolerance,
    settings_of,
)
from surefoot.runtime.async_queue import AsyncTaskQueue
from surefoot.runtime.base import BaseRuntime
from surefoot.runtime.learner_ranks import FollowerRanks, LedLearner, lead, refuse_too_few_gpus, start_followers
from surefoot.runtime.local import LocalRolloutRunner, LocalRuntime
from surefoot.runtime.requests import RolloutRequest, RolloutRunner, request_for
from surefoot.runtime.rollout import RolloutCollector
from surefoot.runtime.sampler import AsyncSampler
from surefoot.runtime.specs import (
    EmbeddedEngineSpec,
    EngineSpec,
    LearnerRanks,
    LearnerSpec,
    ServedHere,
    WorkerSpec,
    portable,
)
from surefoot.runtime.threads import EventLoopThread
from surefoot.runtime.weights import DEADLINE_S, AsyncScore, Publisher, Score, make_probes
from surefoot.system.files import sha256_of_sized
from surefoot.tools.toolkits import ToolkitSpec, fingerprint

if TYPE_CHECKING:
    from surefoot.run.launcher import LaunchedRanks
    from surefoot.run.session import RunContext


# -- Which engine a run samples with, and what it takes to build one here or in another process ---


MAX_AUTO_ROWS = 256


def engine_rows(config: Config) -> int:
    """Rollouts decoded side by side."""
    return config.engine.rows or min(MAX_AUTO_ROWS, config.rollouts_per_step)


@dataclass(frozen=True)
class TransformersEngineSpec(ServedHere):
    """transformers' own module with the numbers of this model, on weights that it is handed."""

    model_config: dict[str, Any]
    rows: int
    max_width: int
    device: str
    attention: str | None
    """As the learner attends."""
    copy_weights: bool = False
    """Serve a copy: needed where the owner of the weights goes on changing them while they are served."""

    def build(self) -> ServingEngine:
        """In the process where it will run."""
        from surefoot.engines.serving import EngineLoop
        from surefoot.engines.transformers_engine import TransformersEngine

        engine = TransformersEngine(
            self.model_config, rows=self.rows, max_width=self.max_width, device=resolve_device(self.device),
            attention=self.attention,
        )  # fmt: skip
        return EngineLoop(engine, copy_weights=self.copy_weights)


@dataclass(frozen=True)
class VllmEngineSpec:
    """vLLM with the numbers of this model; it has no weights before it is handed some."""

    model_config: dict[str, Any]
    max_width: int
    rows: int
    dtype: str
    device: str
    gpu_memory_utilization: float
    seed: int
    threads: int
    shares_tensors: ClassVar[bool] = False

    @property
    def variables(self) -> tuple[str, ...]:
        """None: it asks nobody."""
        return ()

    def build(self) -> ServingEngine:
        """In the process where it will run."""
        from surefoot.engines.vllm_engine import VllmEngine

        return VllmEngine(
            self.model_config, max_width=self.max_width, rows=self.rows, dtype=self.dtype, device=self.device,
            gpu_memory_utilization=self.gpu_memory_utilization, seed=self.seed, threads=self.threads,
        )  # fmt: skip


@dataclass(frozen=True)
class ServerEngineSpec:
    """A server elsewhere; refused unless it takes token ids and weights."""

    url: str
    concurrency: int
    answer_only: bool = False
    """It is asked and never trained: no weights are sent, and none need to be taken."""
    shares_tensors: ClassVar[bool] = False

    @property
    def variables(self) -> tuple[str, ...]:
        """Names of variables that the process which asks has to have."""
        from surefoot.engines.openai import KEY_VARIABLE

        return (KEY_VARIABLE,)

    def build(self) -> ServingEngine:
        """A connection to it, in the process that asks."""
        from surefoot.engines.openai import OpenAIEngine

        engine = OpenAIEngine(self.url, concurrency=self.concurrency, version=0)
        try:
            if not self.answer_only:
                engine.require_training()
        except BaseException:
            engine.close()
            raise
        return engine


def engine_spec(
    config: Config, policy: Policy, width: int, *, beside_learner: bool = False, answer_only: bool = False
) -> EngineSpec:
    """What it takes to build the engine, here or in a process of its own.

    Args:
        beside_learner: it is handed the learner's own tensors, which change while others sample from them when
            max_staleness > 0; weights in shared memory do not.
        answer_only: nothing will be trained, so a server that takes no weights will do.
    """
    parameter = next(policy.model.parameters())
    inputs = EngineInputs(
        policy.spec, json.loads(policy.model.config.to_json_string(use_diff=False)), rows=engine_rows(config),
        max_width=width, device=parameter.device.type, dtype=config.dtype, seed=config.seed, threads=config.threads,
        url=config.engine.url, gpu_memory_utilization=config.engine.gpu_memory_utilization,
        shares_weights=beside_learner and config.max_staleness > 0, answer_only=answer_only, kind=config.engine.kind,
        cuda_kernels=config.cuda_kernels,
    )  # fmt: skip
    module, _, name = engine_facts(config.engine.kind).makes.partition(":")
    make: Callable[[EngineInputs], EngineSpec] = getattr(importlib.import_module(module), name)
    return make(inputs)


def auto_engine(inputs: EngineInputs) -> EngineSpec:
    """Ours where it is exact, else the learner's own library."""
    return transformers_engine(inputs) if inputs.decoder.beyond else embedded_engine(inputs)


def embedded_engine(inputs: EngineInputs) -> EngineSpec:
    """Ours, in the process that builds it."""
    refuse_beyond(inputs.decoder.beyond)
    return EmbeddedEngineSpec(
        inputs.decoder,
        inputs.rows,
        inputs.max_width,
        inputs.device,
        inputs.dtype,
        cuda_kernels=inputs.cuda_kernels,
        copy_weights=inputs.shares_weights,
    )


def transformers_engine(inputs: EngineInputs) -> EngineSpec:
    """The learner's own library, in the process that builds it."""
    return TransformersEngineSpec(
        dict(inputs.model_config), inputs.rows, inputs.max_width, inputs.device, attention_of(inputs.model_config),
        copy_weights=inputs.shares_weights,
    )  # fmt: skip


def vllm_engine(inputs: EngineInputs) -> EngineSpec:
    """vLLM, in the process that builds it."""
    return VllmEngineSpec(
        dict(inputs.model_config), max_width=inputs.max_width, rows=inputs.rows, dtype=inputs.dtype,
        device=inputs.device, gpu_memory_utilization=inputs.gpu_memory_utilization, seed=inputs.seed,
        threads=inputs.threads,
    )  # fmt: skip


def server_engine(inputs: EngineInputs) -> EngineSpec:
    """A server at engine.url."""
    assert inputs.url is not None, "the config gives the two together"
    return ServerEngineSpec(inputs.url, inputs.rows, answer_only=inputs.answer_only)


def worker_spec(config: Config, inputs: Inputs, codec: ChatCodec, tools: ToolkitSpec | None) -> WorkerSpec:
    """What rollouts are asked and graded with, here or in a process of their own.

    Args:
        tools: with the call format of this policy.
    """
    return WorkerSpec(
        portable(inputs.functions), inputs.weights, inputs.metric, config.reward_workers, config.reward_timeout_s,
        config.reward_memory_mb, codec, config.seed, codec.token_count, tools, inputs.unsafe,
        {each.name: each.judges for each in inputs.eval_sets},
        inputs.forked, inputs.rules, config.pass_env,
    )  # fmt: skip


def with_call_format(tools: ToolkitSpec | None, ready: Prepared) -> ToolkitSpec | None:
    """The tools, called as this policy writes calls."""
    return None if tools is None else replace(tools, call_format=ready.call_format)


# -- What an engine has to prove after every weight update, for the model and the tasks of this run


def make_publisher(
    config: Config, ready: Prepared, score: Score | AsyncScore, prompts: Iterable[Sequence[int]], *,
    deadline_s: float | None = DEADLINE_S,
) -> Publisher:  # fmt: skip
    """Asks engines questions made of this run's own prompts, at its own temperature.

    Args:
        score: the learner's log-probabilities of given tokens.
        prompts: what questions are made of; others ask otherwise, and `sync/*` of a run would change with them.
        deadline_s: for one phase of one engine; None where the engine is in this process.
    """
    probes = make_probes(
        prompts, temperature=config.temperature, max_width=ready.engine_width,
        max_completion_length=config.max_completion_length,
    )  # fmt: skip
    return Publisher(probes, score, tolerance=probe_tolerance(config), deadline_s=deadline_s)


def first_prompts(ready: Prepared) -> list[Sequence[int]]:
    """Of a run's first tasks: enough for the probes, where nobody holds all prompts or they are many."""
    return [ready.prompts[task.id] for task in ready.train[:64]]


# -- Sampling while the learner learns: the rollout runner, its event loop, and the task queue ----


@dataclass(frozen=True)
class AsyncSampling:
    """A rollout runner and the thread that its event loop lives in."""

    runner: RolloutRunner
    thread: EventLoopThread


def sample_ahead_here(config: Config, engine: ServingEngine, collector: RolloutCollector) -> AsyncSampling:
    """A runner in this process."""
    capacity = max(2, 2 * engine_rows(config) // config.num_generations)
    runner = LocalRolloutRunner(engine, collector, capacity=capacity)
    return AsyncSampling(runner, EventLoopThread("surefoot-stream"))


def make_async_queue(ctx: RunContext, parts: Parts, ahead: AsyncSampling) -> AsyncTaskQueue:
    """A task queue whose groups are sampled ahead of the learner."""
    config, keeper, runtime = ctx.config, ctx.keeper, parts.runtime

    def request(task: Task, visit: int, position: int) -> RolloutRequest:
        return request_for(task, parts.prompts, runtime.train, purpose="train", step=visit, position=position)

    stream = AsyncSampler(
        keeper.ledger, keeper.batches, parts.train, ahead.runner, request, config=config,
        trained=lambda: parts.learner.facts.version, judge=runtime.check_failures, border=ctx.inputs.border,
    )  # fmt: skip
    return AsyncTaskQueue(stream, ahead.thread, stop=lambda: ctx.stop.asked)


# -- The moving parts of a run: model, learner, engine, runtime. Imports torch --------------------


@dataclass(frozen=True)
class Parts:
    """What `loop.train` needs, wired."""

    policy: Policy
    codec: ChatCodec
    learner: Learner
    runtime: BaseRuntime
    prompts: Mapping[str, tuple[int, ...]]
    train: Sequence[Task]
    heldout: tuple[Task, ...]
    left_out: int
    """Tasks whose prompt is longer than max_prompt_length."""
    cramped: int
    """Tasks whose prompt leaves less room in the context than max_completion_length."""
    identity: Mapping[str, str]
    """What the model and the tasks are that the run begins with, as digests; a resume compares them."""
    ahead: AsyncSampling | None = None
    """What samples while the learner learns; None when they take turns."""
    eval_sets: tuple[EvalSet, ...] = ()
    status: Callable[[], dict[str, Any]] | None = None
    """Who runs where, for `surefoot status`; None when all of it is this process."""
    close_learner: Callable[[], None] = lambda: None
    """Ends what the learner started in other processes."""


def build(
    config: Config, base: Path, inputs: Inputs, pool: RewardPool, logs: Path | None = None, *,
    answer_only: bool = False, adapter: Path | None = None, launched: LaunchedRanks | None = None,
) -> Parts:  # fmt: skip
    """Load the model, encode every prompt once, and wire the rest.

    Args:
        logs: where processes of this run write what they print; needed for those that are not this one.
        answer_only: nothing will be trained, so a server that takes no weights will do.
        adapter: a checkpoint whose adapter the model begins with.
        launched: the other ranks of the learner, where a launcher has started them.
    """
    if not answer_only:
        check_own_code(config)
        if inputs.tools is not None and inputs.train:
            inputs.tools.try_environment(inputs.train[0])
    if config.runtime.kind == "ray":
        assert logs is not None, "processes elsewhere need a place for what they print"
        from surefoot.run.on_ray import build_on_ray  # the only way to ray

        return build_on_ray(config, base, inputs, pool, logs)
    with ExitStack() as stack:
        toolkit = None if inputs.tools is None else inputs.tools.build(logs)
        if toolkit is not None:
            stack.callback(toolkit.close)
        specs = () if toolkit is None else tuple(toolkit.specs)
        if adapter is not None:
            adapter_plan(config, base, adapter)
        ready = prepare(config, base, inputs, specs, None if toolkit is None else toolkit.routes)
        identity = run_fingerprint(ready, specs)  # before an adapter is put into the network
        learner, close_learner = _learner(config, base, ready, None if answer_only else logs, launched)
        stack.callback(close_learner)
        if adapter is not None and learner.adapter is not None:
            learner.adapter.load(adapter)
        spec = engine_spec(config, ready.policy, ready.engine_width, beside_learner=True, answer_only=answer_only)
        engine = spec.build()
        stack.pop_all()  # from here on the runtime closes it
    worker = worker_spec(config, inputs, ready.codec, with_call_format(inputs.tools, ready))
    environment = worker.environment(pool, toolkit)
    collector = RolloutCollector(
        engine, environment.graders, ready.codec, ready.prompts, seed=config.seed, tools=environment.tools,
        token_count=ready.codec.token_count, tool_threads=config.tools.concurrency,
    )  # fmt: skip
    runtime = LocalRuntime(
        engine, collector, train=ready.sampling, evaluation=ready.eval_sampling,
        max_failures=config.max_reward_failures, shares_tensors=spec.shares_tensors,
        publisher=make_publisher(
            config, ready, learner.score, first_prompts(ready) if ready.streamed else ready.prompts.values(),
            deadline_s=None,
        ),
    )  # fmt: skip
    ahead = sample_ahead_here(config, engine, collector) if config.max_staleness > 0 else None
    spared = config.lora.rank is not None or config.runtime.learner_ranks > 1  # nobody needs masters that are whole
    policy = replace(ready.policy, masters=None) if spared else ready.policy
    return Parts(
        policy, ready.codec, learner, runtime, ready.prompts,
        ready.train, ready.heldout, ready.left_out, ready.cramped, identity, ahead,
        ready.eval_sets, close_learner=close_learner,
    )  # fmt: skip


def _learner(
    config: Config, base: Path, ready: Prepared, logs: Path | None, launched: LaunchedRanks | None
) -> tuple[GRPOLearner | LedLearner, Callable[[], None]]:
    """The learner of a run in this process, and what ends its other ranks; without `logs` it has none."""
    size = config.runtime.learner_ranks
    if size == 1 or logs is None:
        return make_learner(config, base, ready.policy, ready.codec, ready.train), lambda: None
    refuse_cut(ready.policy.spec.beyond, size)
    refuse_too_few_gpus(size, next(ready.policy.model.parameters()).device.type)
    limits = ranks_of(config)
    others = FollowerRanks(
        start_followers(size, logs) if launched is None else launched.followers(logs),
        [config.model_dump_json(), str(base), str(logs.absolute())], deadline_s=limits.deadline_s,
        start_timeout_s=limits.start_timeout_s,
    )  # fmt: skip
    learner = lead(others, ready.policy, partial(make_learner, config, base, ready.policy, ready.codec, ready.train))
    return learner, learner.close


def learner_spec(config: Config, base: Path, train: Sequence[Task]) -> LearnerSpec:
    """What it takes to make the learner, or a rank of it, in a process of its own."""
    beside = config.alpha_sdpo > 0 or config.beta_replay > 0
    return LearnerSpec(
        config.model, base, config.device, config.dtype, settings=partial(settings_of, config, base),
        channels=partial(channels_of, config, base, tuple(train)) if beside else None, lora=lora_settings(config),
        ranks=ranks_of(config) if config.runtime.learner_ranks > 1 else None,
    )  # fmt: skip


def ranks_of(config: Config) -> LearnerRanks:
    """How many share the learner. A rank that only waits is noticed before the whole run is taken for stuck."""
    keys = config.runtime
    return LearnerRanks(keys.learner_ranks, 0.8 * config.stall_timeout_s, keys.start_timeout_s, keys.learner_gpus)


def run_fingerprint(ready: Prepared, tools: Sequence[ToolSpec] = ()) -> dict[str, str]:
    """Digests of what a run begins with."""
    identity = {
        "train_sha256": _train_digest(ready.train),
        "heldout_sha256": sha256_of_sized(task.id.encode() for task in ready.heldout),
        "weights_sha256": sha256_of_sized(_weight_bytes(ready.policy)),
    }
    if ready.eval_sets:
        answered = (piece for each in ready.eval_sets for piece in (each.name, *(task.id for task in each.tasks)))
        identity["eval_sets_sha256"] = sha256_of_sized(piece.encode() for piece in answered)
    return identity | ({"tools_sha256": fingerprint(tools)} if tools else {})


def _train_digest(train: Sequence[Task]) -> str:
    """Of what is trained on; a streamed file knows its own."""
    known = getattr(train, "fingerprint", None)
    return known if isinstance(known, str) else sha256_of_sized(task.id.encode() for task in train)


def _weight_bytes(policy: Policy) -> Iterator[bytes]:
    for name, value in weights_at_start(policy).items():
        yield name.encode()
        yield value.detach().contiguous().cpu().flatten().view(torch.uint8).numpy().tobytes()

"""A run on Ray: recipes for the learner, the engines and the workers, and the runtime over them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from surefoot.config import Config
from surefoot.learner.model import resolve_device
from surefoot.protocols import ToolSpec
from surefoot.records import Task
from surefoot.rewards.pool import RewardPool
from surefoot.run.build import (
    AsyncSampling,
    Parts,
    engine_rows,
    engine_spec,
    run_fingerprint,
    with_call_format,
    worker_spec,
)
from surefoot.run.inputs import Inputs
from surefoot.run.model import Prepared, channels_of, lora_settings, prepare, probe_tolerance, settings_of
from surefoot.runtime.probes import AsyncScore, Score, make_probes
from surefoot.runtime.ray.runtime import RayDeployment, RayRuntime
from surefoot.runtime.specs import LearnerSpec
from surefoot.runtime.weights import Publisher
from surefoot.tools.toolkits import NamedTools, ToolkitSpec

# -- What an engine has to prove after every weight update, for the model and the tasks of this run


def make_publisher(config: Config, ready: Prepared, score: Score | AsyncScore) -> Publisher:
    """Asks engines questions made of this run's own prompts, at its own temperature.

    Args:
        score: the learner's log-probabilities of given tokens.
    """
    prompts = [ready.prompts[task.id] for task in ready.train[:64]]
    probes = make_probes(
        prompts, temperature=config.temperature, max_width=ready.engine_width,
        max_completion_length=config.max_completion_length,
    )  # fmt: skip
    return Publisher(probes, score, tolerance=probe_tolerance(config))


# -- A run on Ray: recipes for the learner, the engines and the workers, and the runtime over them


def build_on_ray(config: Config, base: Path, inputs: Inputs, pool: RewardPool, logs: Path) -> Parts:
    """Start the cluster, the learner and the fleet; what was started ends if any of it fails."""
    specs, routes, tools = _look_at_tools(inputs, logs)
    ready = prepare(config, base, inputs, specs, routes)
    worker = worker_spec(config, inputs, ready.codec, with_call_format(tools, ready))
    with ExitStack() as stack:
        site = RayDeployment(
            config.runtime, logs=logs, threads=config.threads, deterministic=resolve_device(config.device) == "cpu",
            rollout_timeout_s=config.rollout_timeout_s, pass_env=config.pass_env,
        )  # fmt: skip
        stack.callback(site.close)
        learner = site.start_learner(_learner_spec(config, base, ready.train))
        fleet = site.start_replicas(
            engine_spec(config, ready.policy, ready.engine_width), worker, engine_slots=engine_rows(config)
        )  # fmt: skip
        runtime = RayRuntime(
            site, fleet, worker.environment(pool, NamedTools(specs) if inputs.tools else None).graders, ready.prompts,
            train=ready.sampling, evaluation=ready.eval_sampling, max_failures=config.max_reward_failures,
            publisher=make_publisher(config, ready, learner.ascore),
        )  # fmt: skip
        identity = run_fingerprint(ready, specs)
        ahead = AsyncSampling(fleet, site.thread) if config.max_staleness > 0 else None
        stack.pop_all()
    # The driver needs the tokenizer and the numbers; the weights are in the learner's process.
    return Parts(
        replace(ready.policy, model=None, masters=None), ready.codec, learner, runtime, ready.prompts,
        ready.train, ready.heldout, ready.left_out, ready.cramped, identity, ahead, ready.eval_sets, runtime.status,
    )  # fmt: skip


def _learner_spec(config: Config, base: Path, train: Sequence[Task]) -> LearnerSpec:
    beside = config.alpha_sdpo > 0 or config.beta_replay > 0
    return LearnerSpec(
        config.model, base, config.device, config.dtype, settings=partial(settings_of, config, base),
        channels=partial(channels_of, config, base, tuple(train)) if beside else None, lora=lora_settings(config),
    )  # fmt: skip


def _look_at_tools(
    inputs: Inputs, logs: Path
) -> tuple[tuple[ToolSpec, ...], Mapping[str, Sequence[str]], ToolkitSpec | None]:
    """What rollouts may call, which tasks may call what, and a recipe whose servers offer exactly that everywhere."""
    if inputs.tools is None:
        return (), {}, None
    toolkit = inputs.tools.build(logs)
    try:
        return tuple(toolkit.specs), dict(toolkit.routes), inputs.tools.pinned(toolkit)
    finally:
        toolkit.close()

"""A run on Ray: recipes for the learner, the engines and the workers, and the runtime over them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from surefoot.config import Config
from surefoot.learner.architectures import refuse_cut
from surefoot.learner.model import resolve_device
from surefoot.protocols import ToolSpec
from surefoot.rewards.pool import RewardPool
from surefoot.run.build import (
    AsyncSampling,
    Parts,
    engine_rows,
    engine_spec,
    first_prompts,
    learner_spec,
    make_publisher,
    run_fingerprint,
    with_call_format,
    worker_spec,
)
from surefoot.run.inputs import Inputs
from surefoot.run.model import prepare
from surefoot.runtime.ray.runtime import RayDeployment, RayRuntime
from surefoot.tools.toolkits import NamedTools, ToolkitSpec

# -- A run on Ray: recipes for the learner, the engines and the workers, and the runtime over them


def build_on_ray(config: Config, base: Path, inputs: Inputs, pool: RewardPool, logs: Path) -> Parts:
    """Start the cluster, the learner and the replicas; what was started ends if any of it fails."""
    specs, routes, tools = _look_at_tools(inputs, logs)
    ready = prepare(config, base, inputs, specs, routes)
    refuse_cut(ready.policy.spec.beyond, config.runtime.learner_ranks)
    worker = worker_spec(config, inputs, ready.codec, with_call_format(tools, ready))
    with ExitStack() as stack:
        site = RayDeployment(
            config.runtime, logs=logs, threads=config.threads, deterministic=resolve_device(config.device) == "cpu",
            rollout_timeout_s=config.rollout_timeout_s, pass_env=config.pass_env,
        )  # fmt: skip
        stack.callback(site.close)
        learner = site.start_learner(learner_spec(config, base, ready.train))
        replicas = site.start_replicas(
            engine_spec(config, ready.policy, ready.engine_width), worker, engine_slots=engine_rows(config)
        )  # fmt: skip
        runtime = RayRuntime(
            site, replicas, worker.environment(pool, NamedTools(specs) if inputs.tools else None).graders,
            ready.prompts, train=ready.sampling, evaluation=ready.eval_sampling,
            max_failures=config.max_reward_failures,
            publisher=make_publisher(config, ready, learner.ascore, first_prompts(ready)),
        )  # fmt: skip
        identity = run_fingerprint(ready, specs)
        ahead = AsyncSampling(replicas, site.thread) if config.max_staleness > 0 else None
        stack.pop_all()
    # The driver needs the tokenizer and the numbers; the weights are in the learner's process.
    return Parts(
        replace(ready.policy, model=None, masters=None), ready.codec, learner, runtime, ready.prompts,
        ready.train, ready.heldout, ready.left_out, ready.cramped, identity, ahead, ready.eval_sets, runtime.status,
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

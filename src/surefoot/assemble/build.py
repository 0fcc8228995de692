"""The moving parts of a run: model, learner, engine, runtime. Imports torch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from surefoot.assemble.ahead import Ahead, play_ahead_here
from surefoot.assemble.checkpoints import Checkpoints, LocalCheckpoints
from surefoot.assemble.engines import make_engine
from surefoot.assemble.inputs import Inputs
from surefoot.assemble.learning import canary_tolerance, make_learner
from surefoot.assemble.prepare import Prepared, prepare
from surefoot.config import Config
from surefoot.envs.components import weighs_the_world
from surefoot.envs.judges import EvalSet
from surefoot.envs.rewards.reward_pool import RewardPool
from surefoot.envs.single_turn import SingleTurnEnvironment
from surefoot.envs.tool_calls import TOOL_CALL
from surefoot.envs.toolkits import fingerprint
from surefoot.envs.tools import ToolEnvironment
from surefoot.policy.chat import ChatCodec
from surefoot.policy.learner import GRPOLearner
from surefoot.policy.load import Policy
from surefoot.policy.training_state import weights_of
from surefoot.protocols import Runtime, Toolkit, ToolSpec
from surefoot.records import Task
from surefoot.runtime.local import LocalRuntime
from surefoot.runtime.rollout import RolloutCollector


@dataclass(frozen=True)
class Parts:
    """What `loop.train` needs, wired."""

    policy: Policy
    codec: ChatCodec
    learner: GRPOLearner
    checkpoints: Checkpoints
    runtime: Runtime
    prompts: Mapping[str, tuple[int, ...]]
    train: Sequence[Task]
    heldout: tuple[Task, ...]
    left_out: int
    """Tasks whose prompt is longer than max_prompt_length."""
    cramped: int
    """Tasks whose prompt leaves less room in the context than max_completion_length."""
    identity: Mapping[str, str]
    """What the model and the tasks are that the run begins with, as digests; a resume compares them."""
    ahead: Ahead | None = None
    """Who plays while the learner learns; None when they take turns."""
    eval_sets: tuple[EvalSet, ...] = ()


def build(
    config: Config, base: Path, inputs: Inputs, pool: RewardPool, logs: Path | None = None, *, answer_only: bool = False
) -> Parts:
    """Load the model, encode every prompt once, and wire the rest.

    Args:
        logs: where processes of this run write what they print; needed for those that are not this one.
        answer_only: nothing will be trained, so a server that takes no weights will do.
    """
    if config.runtime.kind == "ray":
        assert logs is not None, "processes elsewhere need a place for what they print"
        from surefoot.assemble.on_ray import build_on_ray  # the only way to ray

        return build_on_ray(config, base, inputs, pool, logs)
    with ExitStack() as stack:
        toolkit = None if inputs.tools is None else inputs.tools.build(logs)
        if toolkit is not None:
            stack.callback(toolkit.close)
        specs = () if toolkit is None else tuple(toolkit.specs)
        ready = prepare(config, base, inputs, specs, getattr(toolkit, "routes", None))
        learner = make_learner(config, base, ready.policy, ready.codec, ready.train)
        engine = make_engine(config, ready.policy, ready.engine_width, answer_only=answer_only)
        stack.pop_all()  # from here on the runtime closes it
    collector = RolloutCollector(
        engine, environment_of(inputs, pool, toolkit, ready.call_format), ready.codec, ready.prompts, seed=config.seed,
        token_count=ready.codec.token_count, tool_threads=config.tools.concurrency,
    )  # fmt: skip
    runtime = LocalRuntime(
        collector, train=ready.sampling, evaluation=ready.eval_sampling, max_failures=config.max_reward_failures,
        probe_prompts=[ready.prompts[task.id] for task in ready.train[:64]] if inputs_are_large(ready) else None,
        score=learner.score, tolerance=canary_tolerance(config), probe_width=ready.engine_width,
    )  # fmt: skip
    ahead = play_ahead_here(config, engine, collector) if config.max_staleness > 0 else None
    return Parts(
        ready.policy, ready.codec, learner, LocalCheckpoints(learner, ready.policy.tokenizer), runtime, ready.prompts,
        ready.train, ready.heldout, ready.left_out, ready.cramped, identity_of(ready, specs), ahead, ready.eval_sets,
    )  # fmt: skip


def inputs_are_large(ready: Prepared) -> bool:
    """Whether nobody may walk over all prompts."""
    return not isinstance(ready.prompts, dict)


def environment_of(
    inputs: Inputs, pool: RewardPool, toolkit: Toolkit | None, call_format: str = TOOL_CALL
) -> SingleTurnEnvironment | ToolEnvironment:
    """Who grades, and with what rollouts may work."""
    sets = {each.name: each.judges for each in inputs.eval_sets}
    if toolkit is None or inputs.tools is None:
        return SingleTurnEnvironment(pool, inputs.weights, inputs.metric, sets=sets, rules=inputs.rules)
    alone = inputs.tools.environment is None
    graders = SingleTurnEnvironment(pool, inputs.weights, inputs.metric, alone=alone, sets=sets, rules=inputs.rules)
    adds_own = not weighs_the_world(inputs.functions, inputs.weights)
    return ToolEnvironment(graders, toolkit, inputs.tools.limits, adds_own=adds_own, call_format=call_format)


def identity_of(ready: Prepared, tools: Sequence[ToolSpec] = ()) -> dict[str, str]:
    """Digests of what a run begins with."""
    identity = {
        "train_sha256": _train_digest(ready.train),
        "heldout_sha256": _digest(task.id.encode() for task in ready.heldout),
        "weights_sha256": _digest(_weight_bytes(ready.policy)),
    }
    if ready.eval_sets:
        answered = (piece for each in ready.eval_sets for piece in (each.name, *(task.id for task in each.tasks)))
        identity["eval_sets_sha256"] = _digest(piece.encode() for piece in answered)
    return identity | ({"tools_sha256": fingerprint(tools)} if tools else {})


def _train_digest(train: Sequence[Task]) -> str:
    """Of what is trained on; a streamed file knows its own."""
    known = getattr(train, "fingerprint", None)
    return known if isinstance(known, str) else _digest(task.id.encode() for task in train)


def _digest(pieces: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(len(piece).to_bytes(8, "little"))
        digest.update(piece)
    return digest.hexdigest()


def _weight_bytes(policy: Policy) -> Iterator[bytes]:
    for name, value in (weights_of(policy.model) | dict(policy.masters or {})).items():
        yield name.encode()
        yield value.detach().contiguous().cpu().flatten().view(torch.uint8).numpy().tobytes()

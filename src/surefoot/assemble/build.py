"""The moving parts of a run: model, learner, engine, runtime. Imports torch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from surefoot.assemble.checkpoints import Checkpoints, LocalCheckpoints
from surefoot.assemble.checkpoints import Checkpoints, LocalCheckpoints
from surefoot.assemble.inputs import Inputs
from surefoot.assemble.learning import make_learner
from surefoot.assemble.prepare import prepare
from surefoot.config import Config
from surefoot.engines.embedded import EmbeddedEngine
from surefoot.envs.reward_pool import RewardPool
from surefoot.envs.single_turn import SingleTurnEnvironment
from surefoot.guards.collapse import HeldOutGuard
from surefoot.policy.chat import ChatCodec
from surefoot.policy.learner import GRPOLearner
from surefoot.policy.load import Policy
from surefoot.policy.training_state import weights_of
from surefoot.protocols import Runtime
from surefoot.records import Task
from surefoot.runtime.local import LocalRuntime
from surefoot.runtime.orders import Sampling
from surefoot.runtime.rollout import RolloutCollector

MAX_AUTO_ROWS = 256


@dataclass(frozen=True)
class Parts:
    """What `loop.train` needs, wired."""

    policy: Policy
    codec: ChatCodec
    learner: GRPOLearner
    checkpoints: Checkpoints
    runtime: Runtime
    train: tuple[Task, ...]
    heldout: tuple[Task, ...]
    left_out: int
    """Tasks whose prompt is longer than max_prompt_length."""
    cramped: int
    """Tasks whose prompt leaves less room in the context than max_completion_length."""


def build(config: Config, base: Path, inputs: Inputs, pool: RewardPool) -> Parts:
    """Load the model, encode every prompt once, and wire the rest."""
    ready = prepare(config, base, inputs)
    learner = make_learner(config, base, ready.policy, ready.codec, ready.train)
    collector = RolloutCollector(
        _engine(config, ready.policy, ready.width), SingleTurnEnvironment(pool, inputs.weights, inputs.metric),
        ready.codec, ready.prompts, seed=config.seed, token_count=ready.codec.token_count,
    )  # fmt: skip
    runtime = LocalRuntime(
        collector, train=train_sampling(config, ready.width), evaluation=eval_sampling(config, ready.width),
        max_failures=config.max_reward_failures,
    )  # fmt: skip
    checkpoints = LocalCheckpoints(learner, ready.policy.tokenizer)
    return Parts(
        ready.policy, ready.codec, learner, checkpoints, runtime, ready.train, ready.heldout, ready.left_out,
        ready.cramped,
    )  # fmt: skip


def parts_identity(parts: Parts) -> dict[str, str]:
    """What the model and the tasks are that a run began with, as digests; a resume compares them."""
    return {
        "train_sha256": _digest(task.id.encode() for task in parts.train),
        "heldout_sha256": _digest(task.id.encode() for task in parts.heldout),
        "weights_sha256": _digest(_weight_bytes(parts.policy.model)),
    }


def _digest(pieces: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(len(piece).to_bytes(8, "little"))
        digest.update(piece)
    return digest.hexdigest()


def _weight_bytes(net: Any) -> Iterator[bytes]:
    for name, value in weights_of(net).items():
        yield name.encode()
        yield value.detach().contiguous().cpu().flatten().view(torch.uint8).numpy().tobytes()


def _engine(config: Config, policy: Policy, width: int) -> EmbeddedEngine:
    assert config.engine.kind == "embedded", "the config knows no other engine"
    rows = config.engine.rows or min(MAX_AUTO_ROWS, config.rollouts_per_step)
    parameter = next(policy.model.parameters())
    return EmbeddedEngine(policy.spec, rows=rows, max_width=width, device=str(parameter.device), dtype=parameter.dtype)


def train_sampling(config: Config, width: int) -> Sampling:
    """How training answers are drawn."""
    return Sampling(config.num_generations, config.temperature, config.max_completion_length, width)


def eval_sampling(config: Config, width: int) -> Sampling:
    """How held-out answers are drawn."""
    temperature = config.temperature if config.eval_temperature is None else config.eval_temperature
    return Sampling(config.num_generations_eval, temperature, config.max_completion_length, width)


def make_guard(config: Config, heldout: Sequence[Task]) -> HeldOutGuard | None:
    """The guard that `[guard]` describes; None when it is off or has nothing to look at."""
    keys = config.guard
    if keys.mode == "off" or not heldout:
        return None
    return HeldOutGuard(
        min_steps=keys.min_evals, decline_patience=keys.decline_patience, ema_alpha=keys.ema_alpha,
        kl_hard_stop=keys.kl_hard_stop, max_proxy_real_gap=keys.max_proxy_real_gap, rules=keys.rules,
        margin_se=keys.margin_se,
    )  # fmt: skip

"""The moving parts of a run: model, learner, engine, runtime. Imports torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from surefoot.assemble.inputs import Inputs
from surefoot.assemble.memory import keep_freed_memory
from surefoot.config import Config
from surefoot.engines.embedded import EmbeddedEngine
from surefoot.envs.reward_pool import RewardPool
from surefoot.envs.single_turn import SingleTurnEnvironment
from surefoot.errors import ConfigError, TaskError
from surefoot.maths.losses import LossSettings
from surefoot.policy.chat import ChatCodec
from surefoot.policy.learner import GRPOLearner, LearnerSettings
from surefoot.policy.load import Policy, load_policy, resolve_device
from surefoot.records import Task
from surefoot.runtime.local import LocalRuntime
from surefoot.runtime.rollout import RolloutCollector, Sampling

MAX_AUTO_ROWS = 256


@dataclass(frozen=True)
class Parts:
    """What `loop.train` needs, wired."""

    policy: Policy
    codec: ChatCodec
    learner: GRPOLearner
    runtime: LocalRuntime
    train: tuple[Task, ...]
    heldout: tuple[Task, ...]
    left_out: int
    """Tasks whose prompt is longer than max_prompt_length."""
    cramped: int
    """Tasks whose prompt leaves less room in the context than max_completion_length."""


def set_determinism(config: Config) -> None:
    """Threads and kernels: part of the result, so set in one place. Bit-equal repeats are promised on the CPU."""
    torch.set_num_threads(config.threads)
    torch.use_deterministic_algorithms(resolve_device(config.device) == "cpu")
    keep_freed_memory()


def build(config: Config, base: Path, inputs: Inputs, pool: RewardPool) -> Parts:
    """Load the model, encode every prompt once, and wire the rest."""
    set_determinism(config)
    policy = load_policy(config.model, base=base, device=config.device, dtype=config.dtype)
    codec = ChatCodec(policy.tokenizer, policy.stop_ids, policy.spec.vocab, config.system_prompt)
    prompts = {task.id: codec.encode_prompt(task.messages()) for task in (*inputs.train, *inputs.heldout)}
    train = _fitting(inputs.train, prompts, config, policy.spec.max_positions)
    heldout = _fitting(inputs.heldout, prompts, config, policy.spec.max_positions)
    left_out = len(inputs.train) + len(inputs.heldout) - len(train) - len(heldout)
    if len(train) < config.tasks_per_step:
        raise TaskError(
            f"{len(train)} tasks have prompts of at most {config.max_prompt_length} tokens, tasks_per_step is "
            f"{config.tasks_per_step}",
            f"{left_out} longer ones were left out",
            "raise max_prompt_length",
        )
    if config.max_completion_length >= policy.spec.max_positions:
        raise ConfigError(
            f"max_completion_length = {config.max_completion_length}, the context {policy.spec.max_positions} tokens",
            "every completion would be cut by the context instead of by you",
            "lower max_completion_length",
        )
    longest = max(len(prompts[task.id]) for task in (*train, *heldout))
    width = min(policy.spec.max_positions, longest + config.max_completion_length)
    engine = _engine(config, policy, width)
    collector = RolloutCollector(
        engine, SingleTurnEnvironment(pool, inputs.weights, inputs.metric), codec, prompts,
        seed=config.seed, token_count=codec.token_count,
    )  # fmt: skip
    runtime = LocalRuntime(
        collector, train=_sampling(config, width), evaluation=_eval_sampling(config, width),
        max_failures=config.max_reward_failures,
    )  # fmt: skip
    learner = GRPOLearner(policy.model, learner_settings(config, codec.pad_token_id))
    cramped = sum(len(prompts[t.id]) + config.max_completion_length > width for t in (*train, *heldout))
    return Parts(policy, codec, learner, runtime, train, heldout, left_out, cramped)


def _fitting(
    tasks: Sequence[Task], prompts: Mapping[str, tuple[int, ...]], config: Config, context: int
) -> tuple[Task, ...]:
    """Tasks within max_prompt_length; one that cannot fit the context at all is refused by name."""
    limit = config.max_prompt_length
    kept = tuple(t for t in tasks if limit is None or len(prompts[t.id]) <= limit)
    too_long = [t for t in kept if len(prompts[t.id]) >= context]
    if too_long:
        raise TaskError(
            f"{len(too_long)} prompts leave no room in the model's context of {context} tokens, first {too_long[0].id} "
            f"with {len(prompts[too_long[0].id])}",
            "cutting a prompt would ask another question",
            "set max_prompt_length to leave such tasks out, or use a model with a longer context",
        )
    return kept


def _engine(config: Config, policy: Policy, width: int) -> EmbeddedEngine:
    assert config.engine.kind == "embedded", "the config knows no other engine"
    rows = config.engine.rows or min(MAX_AUTO_ROWS, config.rollouts_per_step)
    parameter = next(policy.model.parameters())
    return EmbeddedEngine(policy.spec, rows=rows, max_width=width, device=str(parameter.device), dtype=parameter.dtype)


def _sampling(config: Config, width: int) -> Sampling:
    return Sampling(config.num_generations, config.temperature, config.max_completion_length, width)


def _eval_sampling(config: Config, width: int) -> Sampling:
    temperature = config.temperature if config.eval_temperature is None else config.eval_temperature
    return Sampling(config.num_generations_eval, temperature, config.max_completion_length, width)


def learner_settings(config: Config, pad_token_id: int) -> LearnerSettings:
    """The learner's numbers, from config keys."""
    tolerance = {"float32": 1e-4, "bfloat16": 0.2}[config.dtype]
    every = config.reference_sync_steps
    return LearnerSettings(
        loss=LossSettings(
            loss_type=config.loss_type, level=config.importance_sampling_level, epsilon=config.epsilon,
            epsilon_high=config.epsilon_high, delta=config.delta, beta=config.beta, kl_estimator=config.kl_estimator,
            correction=config.importance_sampling_mode if config.importance_sampling_correction else None,
            correction_clip=config.importance_sampling_clip_max,
        ),
        learning_rate=config.learning_rate, max_steps=config.max_steps,
        max_completion_length=config.max_completion_length, temperature=config.temperature, pad_token_id=pad_token_id,
        lr_scheduler_type=config.lr_scheduler_type, warmup_steps=config.warmup_steps, weight_decay=config.weight_decay,
        betas=(config.adam_beta1, config.adam_beta2), adam_epsilon=config.adam_epsilon,
        max_grad_norm=config.max_grad_norm, microbatch_size=config.microbatch_size,
        mask_truncated=config.mask_truncated_completions,
        reference_sync_steps=None if every == "never" else every,
        parity_tolerance=tolerance if config.parity_tolerance is None else config.parity_tolerance,
    )  # fmt: skip

"""The moving parts of a run: model, learner, engine, runtime. Imports torch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from surefoot.assemble.inputs import Inputs
from surefoot.assemble.memory import keep_freed_memory
from surefoot.config import Config
from surefoot.data.files import SUFFIXES, read_task_file
from surefoot.engines.embedded import EmbeddedEngine
from surefoot.envs.reward_pool import RewardPool
from surefoot.envs.single_turn import SingleTurnEnvironment
from surefoot.errors import ConfigError, TaskError
from surefoot.guards.collapse import HeldOutGuard
from surefoot.maths.losses import LossSettings
from surefoot.maths.preference import PreferencePair
from surefoot.policy.channels import Channels, ChannelSettings, WorkedExamples, make_channels
from surefoot.policy.chat import ChatCodec
from surefoot.policy.learner import GRPOLearner, LearnerSettings
from surefoot.policy.load import Policy, load_policy, resolve_device
from surefoot.policy.training_state import weights_of
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
    channels = _channels(config, base, policy, codec, train)
    learner = GRPOLearner(policy.model, learner_settings(config, codec.pad_token_id), channels)
    cramped = sum(len(prompts[t.id]) + config.max_completion_length > width for t in (*train, *heldout))
    return Parts(policy, codec, learner, runtime, train, heldout, left_out, cramped)


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
        max_staleness=config.max_staleness,
    )  # fmt: skip


def _channels(config: Config, base: Path, policy: Policy, codec: ChatCodec, train: Sequence[Task]) -> Channels | None:
    """The losses beside the policy's; None when their weights are 0."""
    settings = ChannelSettings(
        alpha_sdpo=config.alpha_sdpo, beta_replay=config.beta_replay, sdpo_mixing=config.sdpo_mixing,
        dead_channel_steps=config.dead_channel_steps, temperature=config.temperature, pad_token_id=codec.pad_token_id,
        max_tokens=policy.spec.max_positions, microbatch_size=config.microbatch_size,
        mask_truncated=config.mask_truncated_completions, seed=config.seed,
    )  # fmt: skip
    hinted = WorkedExamples(codec, {task.id: task.messages() for task in train})
    replayed = config.beta_replay > 0 and config.replay_pairs is not None
    pairs = read_pairs(config.replay_pairs or "", base, policy, codec) if replayed else None
    return make_channels(settings, net=policy.model, hinted=hinted, pairs=pairs)


def read_pairs(source: str, base: Path, policy: Policy, codec: ChatCodec) -> list[PreferencePair]:
    """The rows of `replay_pairs`, {"prompt", "chosen", "rejected"} and optionally "source", as tokens."""
    path = base / Path(source).expanduser()
    if not path.is_file() or path.suffix.lower() not in SUFFIXES:
        raise TaskError(
            f"replay_pairs = {source!r} is not a file that ends in {', '.join(SUFFIXES)}",
            f"it was looked for as {path}",
            'write one {"prompt": ..., "chosen": ..., "rejected": ...} per line',
        )
    pairs = []
    for row in read_task_file(path):
        chosen, rejected = (_answer(row, side, policy) for side in ("chosen", "rejected"))
        source = row.columns.get("source", row.id)
        pairs.append(PreferencePair(codec.encode_prompt(row.messages()), chosen, rejected, source=str(source or "")))
    return pairs


def _answer(row: Task, side: str, policy: Policy) -> tuple[int, ...]:
    """A recorded answer as the policy would have said it: its tokens, and the end of the turn."""
    text = row.columns.get(side)
    if not isinstance(text, str):
        raise TaskError(
            f"replay_pairs: the pair {row.id} has no text {side!r}",
            "a preference is between two answers",
            'write one {"prompt": ..., "chosen": ..., "rejected": ...} per line',
        )
    ids = tuple(policy.tokenizer(text, add_special_tokens=False).input_ids)
    if any(token in policy.stop_ids for token in ids):
        raise TaskError(
            f"replay_pairs: {side!r} of the pair {row.id} holds an end token",
            "nothing that the policy says goes on after one",
            "leave end tokens out; one is added to every answer",
        )
    return (*ids, policy.tokenizer.eos_token_id) if ids else ()


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

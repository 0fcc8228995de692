"""The learner of a run, built from its config; in this process or in one of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from surefoot.assemble.border import pair_rows
from surefoot.config import Config
from surefoot.envs.tool_calls import FORMS, TOOL_CALL, parse_calls
from surefoot.envs.toolkits import ToolRecipe
from surefoot.errors import ModelError, TaskError
from surefoot.maths.losses import LossSettings
from surefoot.maths.preference import PreferencePair
from surefoot.policy.channels import Channels, ChannelSettings, WorkedExamples, make_channels
from surefoot.policy.chat import ChatCodec
from surefoot.policy.learner import GRPOLearner, LearnerSettings
from surefoot.policy.load import Policy, Words
from surefoot.policy.templates import refuse_misfit, template_text
from surefoot.protocols import ToolSpec
from surefoot.records import Task


def make_learner(config: Config, base: Path, policy: Policy, codec: ChatCodec, train: Sequence[Task]) -> GRPOLearner:
    """The learner, with the losses beside the policy's."""
    channels = _channels(config, base, policy, codec, train)
    return GRPOLearner(policy.model, learner_settings(config, codec.pad_token_id), channels, policy.masters)


def parity_tolerance(config: Config) -> float:
    """How far sampler and learner may differ on a token that was sampled from the learner's own weights, in nats."""
    usual = {"float32": 1e-4, "bfloat16": 0.2}[config.dtype]
    return usual if config.parity_tolerance is None else config.parity_tolerance


def canary_tolerance(config: Config) -> float:
    """The same for the probes of a weight sync: ten times wider, as the learner's own check is after step 1."""
    return 10 * parity_tolerance(config)


def settings_of(config: Config, base: Path, policy: Policy) -> LearnerSettings:
    """The learner's numbers, where the policy is."""
    return learner_settings(config, codec_of(config, base, policy).pad_token_id)


def channels_of(config: Config, base: Path, train: Sequence[Task], policy: Policy) -> Channels | None:
    """The losses beside the policy's, where the policy is."""
    return _channels(config, base, policy, codec_of(config, base, policy), train)


def codec_of(
    config: Config, base: Path, policy: Policy, recipe: ToolRecipe | None = None, tools: Sequence[ToolSpec] = ()
) -> ChatCodec:
    """Messages to tokens for this policy, and tools' answers where there are tools."""
    words = Words(policy.tokenizer, policy.stop_ids, policy.spec.vocab)
    return codec_of_words(config, base, words, recipe, tools)


def codec_of_words(
    config: Config, base: Path, words: Words, recipe: ToolRecipe | None = None, tools: Sequence[ToolSpec] = ()
) -> ChatCodec:
    """The same before there are weights: every check of the template is made here, and needs the tokenizer alone."""
    if config.chat_template is not None:
        refuse_misfit(config.chat_template, words.tokenizer)
        words.tokenizer.chat_template = template_text(config.chat_template, base)
    shown = tools if recipe is not None and recipe.in_prompt else ()
    return ChatCodec(
        words.tokenizer, words.stop_ids, words.vocab, config.system_prompt, tools=shown,
        max_reply_tokens=0 if recipe is None else recipe.max_result_tokens,
    )  # fmt: skip


def call_format_of(codec: ChatCodec, recipe: ToolRecipe | None) -> str:
    """How the policy writes calls: as the template does, where it writes any; what nobody would read is refused."""
    wanted = "auto" if recipe is None else recipe.call_format
    if recipe is None or (written := codec.call_text()) is None:
        return TOOL_CALL if wanted == "auto" else wanted
    read = [form for form in FORMS if _reads(written, form)]
    if wanted in read or (wanted == "auto" and read):
        return wanted if wanted in read else read[0]
    if wanted == "auto" and not recipe.in_prompt:
        return TOOL_CALL  # the policy knows its tools from elsewhere, and its calls too
    meant = f"tools.format = {wanted} reads none of it" if wanted != "auto" else "no tools.format reads that"
    raise ModelError(
        f"the chat template writes a call as {written!r}, and {meant}",
        "the model would call, and nobody would answer",
        f"set tools.format = {read[0]}" if read else 'set chat_template to one of ours, such as "builtin:chatml_tools"',
    )


def _reads(written: str, form: str) -> bool:
    return [(call.name, call.arguments) for call in parse_calls(written, form).calls] == [("probe", {"x": "y"})]


def learner_settings(config: Config, pad_token_id: int) -> LearnerSettings:
    """The learner's numbers, from config keys."""
    every = config.reference_sync_steps
    return LearnerSettings(
        loss=LossSettings(
            loss_type=config.loss_type, level=config.ratio_level, epsilon=config.epsilon,
            epsilon_high=config.epsilon_high, delta=config.delta, beta=config.beta, kl_estimator=config.kl_estimator,
            correction=config.importance_sampling_mode if config.importance_sampling_correction else None,
            correction_clip=config.importance_sampling_clip_max,
        ),
        learning_rate=config.learning_rate, max_steps=config.max_steps,
        max_completion_length=config.max_completion_length * (config.max_turns if config.tools.on else 1),
        temperature=config.temperature, pad_token_id=pad_token_id,
        lr_scheduler_type=config.lr_scheduler_type, warmup_steps=config.warmup_steps, weight_decay=config.weight_decay,
        betas=(config.adam_beta1, config.adam_beta2), adam_epsilon=config.adam_epsilon,
        max_grad_norm=config.max_grad_norm, microbatch_size=config.microbatch_size,
        mask_truncated=config.mask_truncated_completions,
        reference_sync_steps=None if every == "never" else every,
        parity_tolerance=parity_tolerance(config),
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
    pairs = []
    for row in pair_rows(source, base):
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

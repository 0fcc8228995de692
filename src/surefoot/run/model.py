"""Model, tokens and tasks of a run, before anybody samples or learns. Imports torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from surefoot.config import PARITY_TOLERANCE, Config
from surefoot.config.choices import is_own
from surefoot.data.on_disk.dataset import StreamingDataset
from surefoot.errors import ConfigError, ModelError, TaskError
from surefoot.learner.auxiliary_losses import (
    AuxiliaryLosses,
    AuxiliaryLossSettings,
    WorkedExamples,
    make_auxiliary_losses,
)
from surefoot.learner.chat import ChatCodec, refuse_misfit, template_text
from surefoot.learner.grpo import GRPOLearner, LearnerSettings
from surefoot.learner.lora import (
    AdapterPlan,
    LoraSettings,
    plan_adapter,
    refuse_other_shapes,
    require_peft,
    with_adapter,
)
from surefoot.learner.low_bit import require_torchao
from surefoot.learner.model import ModelTokenizer, Policy, empty_net, load_policy, load_tokenizer, resolve_device
from surefoot.learner.own_code import own_loss, use_estimator
from surefoot.learner.precision import require_precision
from surefoot.learner.quantised import NONE, require_bitsandbytes
from surefoot.learner.sharding import OneRank
from surefoot.maths.losses import LossSettings
from surefoot.maths.preference import PreferencePair
from surefoot.protocols import ToolSpec
from surefoot.records import Task
from surefoot.rewards.grading import EvalSet
from surefoot.run.inputs import Inputs
from surefoot.run.tasks import LargePrompts, pair_rows, within
from surefoot.runtime.requests import Sampling
from surefoot.runtime.weights import LONG, TOKENS
from surefoot.system.memory import keep_freed_memory
from surefoot.tools.parsing import FORMS, TOOL_CALL, parse_calls
from surefoot.tools.session import tools_of
from surefoot.tools.toolkits import ToolkitSpec

# -- The learner of a run, built from its config; in this process or in one of its own ------------


def make_learner(
    config: Config, base: Path, policy: Policy, codec: ChatCodec, train: Sequence[Task], ranks: OneRank | None = None
) -> GRPOLearner:
    """The learner, with the losses beside the policy's; rank 0 of it, where there are several."""
    channels = _channels(config, base, policy, codec, train)
    policy, adapter = with_adapter(policy, lora_settings(config))
    return GRPOLearner(
        policy.model, learner_settings(config, codec.pad_token_id), channels, policy.masters, policy.tokenizer,
        adapter, ranks,
    )  # fmt: skip


def lora_settings(config: Config) -> LoraSettings | None:
    """The adapter's numbers; None where every weight is trained."""
    lora = config.lora
    if lora.rank is None:
        return None
    targets = (lora.target_modules,) if isinstance(lora.target_modules, str) else lora.target_modules
    alpha = 2.0 * lora.rank if lora.alpha is None else lora.alpha
    return LoraSettings(lora.rank, alpha, targets, lora.modules_to_save, config.seed, config.quantization)


def adapter_plan(config: Config, base: Path, saved: Path | None = None) -> AdapterPlan | None:
    """What the adapter will be, before any weight is read; refuses what the model has not. None without one.

    Args:
        saved: a checkpoint that is to be of this model.
    """
    settings = lora_settings(config)
    if settings is None:
        return None
    require_peft()
    if settings.quantization != NONE:
        require_bitsandbytes(resolve_device(config.device))
    plan = plan_adapter(settings, empty_net(config.model, base=base))
    if saved is not None:
        refuse_other_shapes(saved, plan, config.model)
    return plan


def require_packages(config: Config) -> None:
    """Raise where this config trains with a package that is not there: before any weight is read."""
    if config.optim == "adamw_8bit":
        require_torchao()


def parity_tolerance(config: Config) -> float:
    """How far sampler and learner may differ on a token that was sampled from the learner's own weights, in nats."""
    usual = PARITY_TOLERANCE[config.dtype]
    return usual if config.parity_tolerance is None else config.parity_tolerance


def probe_tolerance(config: Config) -> float:
    """The same for the probes of a weight sync: ten times wider, as the learner's own check is after step 1."""
    return 10 * parity_tolerance(config)


def settings_of(config: Config, base: Path, policy: Policy) -> LearnerSettings:
    """The learner's numbers, where the policy is."""
    return learner_settings(config, codec_of(config, base, policy).pad_token_id)


def channels_of(config: Config, base: Path, train: Sequence[Task], policy: Policy) -> AuxiliaryLosses | None:
    """The losses beside the policy's, where the policy is."""
    return _channels(config, base, policy, codec_of(config, base, policy), train)


def codec_of(
    config: Config, base: Path, policy: Policy, recipe: ToolkitSpec | None = None, tools: Sequence[ToolSpec] = ()
) -> ChatCodec:
    """Messages to tokens for this policy, and tools' answers where there are tools."""
    words = ModelTokenizer(policy.tokenizer, policy.stop_ids, policy.spec.vocab)
    return codec_of_words(config, base, words, recipe, tools)


def codec_of_words(
    config: Config, base: Path, words: ModelTokenizer, recipe: ToolkitSpec | None = None, tools: Sequence[ToolSpec] = ()
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


def call_format_of(codec: ChatCodec, recipe: ToolkitSpec | None) -> str:
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


def loss_settings(config: Config) -> LossSettings:
    """The loss, from config keys; one of the user's own is loaded and checked here, in the learner's process."""
    numbers: dict[str, Any] = dict(
        level=config.ratio_level, epsilon=config.epsilon,
        epsilon_high=config.epsilon_high, delta=config.delta, beta=config.beta, kl_estimator=config.kl_estimator,
        correction=config.importance_sampling_mode if config.importance_sampling_correction else None,
        correction_clip=config.importance_sampling_clip_max,
    )  # fmt: skip
    if is_own(config.loss_type):
        numbers["level"] = None if config.importance_sampling_level == "auto" else config.importance_sampling_level
        return own_loss(config.loss_type, **numbers)
    return LossSettings(loss_type=config.loss_type, **numbers)


def check_own_code(config: Config) -> None:
    """Refuse a loss or an estimator of the user's own that does not hold what ours hold, before a model is loaded."""
    loss_settings(config)
    if is_own(config.scale_rewards):
        use_estimator(config.scale_rewards)


def learner_settings(config: Config, pad_token_id: int) -> LearnerSettings:
    """The learner's numbers, from config keys."""
    every = config.reference_sync_steps
    return LearnerSettings(
        loss=loss_settings(config),
        learning_rate=config.learning_rate, max_steps=config.max_steps,
        max_completion_length=config.max_completion_length * (config.max_turns if config.tools.on else 1),
        temperature=config.temperature, pad_token_id=pad_token_id,
        lr_scheduler_type=config.lr_scheduler_type, warmup_steps=config.warmup_steps, weight_decay=config.weight_decay,
        betas=(config.adam_beta1, config.adam_beta2), adam_epsilon=config.adam_epsilon,
        max_grad_norm=config.max_grad_norm, microbatch_size=config.microbatch_size,
        mask_truncated=config.mask_truncated_completions,
        reference_sync_steps=None if every == "never" else every,
        parity_tolerance=parity_tolerance(config),
        max_staleness=config.max_staleness, cuda_kernels=config.cuda_kernels, optim=config.optim,
        gradient_checkpointing=config.gradient_checkpointing,
    )  # fmt: skip


def _channels(
    config: Config, base: Path, policy: Policy, codec: ChatCodec, train: Sequence[Task]
) -> AuxiliaryLosses | None:
    """The losses beside the policy's; None when their weights are 0."""
    if config.alpha_sdpo > 0 and policy.spec.beyond:
        raise ModelError(
            f"alpha_sdpo = {config.alpha_sdpo} with {', '.join(policy.spec.beyond)}",
            "it compares whole distributions through the bare output layer, without what the model does behind it",
            "set alpha_sdpo = 0, or use a plain Llama, Mistral, Qwen2 or Qwen3",
        )
    settings = AuxiliaryLossSettings(
        alpha_sdpo=config.alpha_sdpo, beta_replay=config.beta_replay, sdpo_mixing=config.sdpo_mixing,
        dead_channel_steps=config.dead_channel_steps, temperature=config.temperature, pad_token_id=codec.pad_token_id,
        max_tokens=policy.spec.max_positions, microbatch_size=config.microbatch_size,
        mask_truncated=config.mask_truncated_completions, seed=config.seed,
    )  # fmt: skip
    hinted = WorkedExamples(codec, {task.id: task.messages() for task in train})
    replayed = config.beta_replay > 0 and config.replay_pairs is not None
    pairs = read_pairs(config.replay_pairs or "", base, policy, codec) if replayed else None
    return make_auxiliary_losses(settings, net=policy.model, hinted=hinted, pairs=pairs)


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


# -- Model, tokens and tasks of a run, before anybody samples or learns. Imports torch ------------


@dataclass(frozen=True)
class Prepared:
    """What sampling and learning start from."""

    policy: Policy
    codec: ChatCodec
    prompts: Mapping[str, tuple[int, ...]]
    """Token ids of every task's prompt, by task id."""
    train: Sequence[Task]
    heldout: tuple[Task, ...]
    width: int
    """Longest prompt plus completion, in tokens."""
    engine_width: int
    """What engines have to take: a little more, so that they can be asked the questions of a weight sync."""
    sampling: Sampling
    """How training answers are drawn."""
    eval_sampling: Sampling
    """How held-out answers are drawn."""
    left_out: int
    """Tasks whose prompt is longer than max_prompt_length."""
    cramped: int
    """Tasks whose prompt leaves less room in the context than max_completion_length."""
    eval_sets: tuple[EvalSet, ...] = ()
    """Evaluation sets, with the tasks that fit."""
    call_format: str = TOOL_CALL
    """How the policy writes calls."""
    streamed: bool = False
    """The tasks lie in a file and are read as they are visited: nobody may walk over all prompts."""


def set_determinism(config: Config) -> None:
    """Threads and kernels: part of the result, so set in one place. Bit-equal repeats are promised on the CPU."""
    torch.set_num_threads(config.threads)
    torch.use_deterministic_algorithms(resolve_device(config.device) == "cpu")
    keep_freed_memory()


def prepare(
    config: Config, base: Path, inputs: Inputs, tools: Sequence[ToolSpec] = (),
    routes: Mapping[str, Sequence[str]] | None = None,
) -> Prepared:  # fmt: skip
    """Load the model and encode every prompt once; refuses what does not fit.

    Args:
        tools: what rollouts may call, by name; the template shows them to the model.
        routes: environment -> its tools, where tasks choose between several.
    """
    set_determinism(config)
    require_precision(resolve_device(config.device), config.dtype)
    words = load_tokenizer(config.model, base=base)
    call_format = call_format_of(codec_of_words(config, base, words, inputs.tools, tools), inputs.tools)
    require_packages(config)
    adapter_plan(config, base)
    # A template or an adapter that cannot be used is refused by now: weights may take minutes to load.
    policy = load_policy(
        config.model, base=base, device=config.device, dtype=config.dtype, words=words, lora=lora_settings(config)
    )
    codec = codec_of(config, base, policy, inputs.tools, tools)
    encode = partial(_encode, codec, routes or {})
    context = policy.spec.max_positions
    if isinstance(inputs.train, StreamingDataset):
        prompts, train, preview, longest, left_out = _large(config, inputs, inputs.train, encode, context)
    else:
        prompts, train, preview, longest, left_out = _whole(config, inputs, encode, context)
    heldout, eval_sets = _by_set(inputs, preview)
    if config.max_completion_length >= context:
        raise ConfigError(
            f"max_completion_length = {config.max_completion_length}, the context {context} tokens",
            "every completion would be cut by the context instead of by you",
            "lower max_completion_length",
        )
    later = config.max_turns - 1 if inputs.tools is not None else 0
    room = config.max_completion_length + later * (
        config.max_completion_length + config.tools.max_result_tokens + codec.reply_overhead
    )
    width = min(context, longest + room)
    streamed = isinstance(train, StreamingDataset)
    seen = preview if streamed else (*train, *preview)
    cramped = sum(len(prompts[t.id]) + config.max_completion_length > width for t in seen)
    temperature = config.temperature if config.eval_temperature is None else config.eval_temperature
    return Prepared(
        policy, codec, prompts, train, heldout, width, min(context, max(width, LONG + TOKENS)),
        Sampling(config.num_generations, config.temperature, config.max_completion_length, width),
        Sampling(config.num_generations_eval, temperature, config.max_completion_length, width), left_out, cramped,
        eval_sets, call_format, streamed,
    )  # fmt: skip


Encoded = tuple[Mapping[str, tuple[int, ...]], Sequence[Task], tuple[Task, ...], int, int]
"""Prompts by task, tasks to train on, tasks to evaluate on, the longest prompt, and how many tasks were left out."""


def _evaluated(inputs: Inputs) -> tuple[Task, ...]:
    """Everything that evaluations answer: held-out tasks, and those of evaluation sets."""
    return (*inputs.heldout, *(task for each in inputs.eval_sets for task in each.tasks))


def _by_set(inputs: Inputs, fitting: Sequence[Task]) -> tuple[tuple[Task, ...], tuple[EvalSet, ...]]:
    """What is left of the held-out tasks and of each set; a set of which nothing is left is refused by name."""
    kept = {task.id for task in fitting}
    sets = tuple(replace(each, tasks=tuple(t for t in each.tasks if t.id in kept)) for each in inputs.eval_sets)
    for each in sets:
        if not each.tasks:
            raise TaskError(
                f"eval_sets.{each.name}: every prompt is longer than max_prompt_length",
                "an accuracy over no tasks would say nothing",
                "raise max_prompt_length, or leave the set out",
            )
    return tuple(task for task in inputs.heldout if task.id in kept), sets


def _encode(codec: ChatCodec, routes: Mapping[str, Sequence[str]], task: Task) -> tuple[int, ...]:
    return codec.encode_prompt(task.messages(), tools_of(task, routes))


def _whole(config: Config, inputs: Inputs, encode: Callable[[Task], tuple[int, ...]], context: int) -> Encoded:
    """Every prompt, now."""
    evaluated = _evaluated(inputs)
    prompts = {task.id: encode(task) for task in (*inputs.train, *evaluated)}
    train = _fitting(inputs.train, prompts, config, context)
    heldout = _fitting(evaluated, prompts, config, context)
    left_out = len(inputs.train) + len(evaluated) - len(train) - len(heldout)
    if inputs.train and len(train) < config.tasks_per_step:  # without any, nothing is to be trained
        raise TaskError(
            f"{len(train)} tasks have prompts of at most {config.max_prompt_length} tokens, tasks_per_step is "
            f"{config.tasks_per_step}",
            f"{left_out} longer ones were left out",
            "raise max_prompt_length",
        )
    return prompts, train, heldout, max(len(prompts[task.id]) for task in (*train, *heldout)), left_out


def _large(
    config: Config, inputs: Inputs, train: StreamingDataset, encode: Callable[[Task], tuple[int, ...]], context: int
) -> Encoded:
    """Each prompt when it is asked for; of the held-out ones those that are too long are left out now."""
    limit = config.max_prompt_length
    assert limit is not None, "config_rules ask for it"
    if limit >= context:
        raise ConfigError(
            f"max_prompt_length = {limit} with stream_tasks = true, the context is {context} tokens",
            "a prompt that fills the context leaves no room for an answer", f"lower it below {context}",
        )  # fmt: skip
    evaluated = _evaluated(inputs)
    heldout = tuple(task for task in evaluated if len(encode(task)) <= limit)
    prompts = LargePrompts(train, heldout, lambda task: within(task, encode(task), limit))
    return prompts, train, heldout, limit, len(evaluated) - len(heldout)


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

"""Model, tokens and tasks of a run, before anybody samples or learns. Imports torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from surefoot.assemble.inputs import Inputs
from surefoot.assemble.large import LargePrompts, within
from surefoot.assemble.learning import call_format_of, codec_of, codec_of_words
from surefoot.config import Config
from surefoot.data.large.streaming import StreamingDataset
from surefoot.envs.judges import EvalSet
from surefoot.envs.tool_calls import TOOL_CALL
from surefoot.envs.tools import tools_of
from surefoot.errors import ConfigError, TaskError
from surefoot.freed_memory import keep_freed_memory
from surefoot.policy.chat import ChatCodec
from surefoot.policy.load import Policy, load_policy, load_words, resolve_device
from surefoot.protocols import ToolSpec
from surefoot.records import Task
from surefoot.runtime.orders import Sampling
from surefoot.runtime.probes import LONG, TOKENS


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
    words = load_words(config.model, base=base)
    call_format = call_format_of(codec_of_words(config, base, words, inputs.tools, tools), inputs.tools)
    # A template that cannot be used is refused by now: weights may take minutes to load.
    policy = load_policy(config.model, base=base, device=config.device, dtype=config.dtype, words=words)
    codec = codec_of(config, base, policy, inputs.tools, tools)
    encode = partial(_encode, codec, routes or {})
    context = policy.spec.max_positions
    if isinstance(inputs.train, StreamingDataset):
        prompts, train, looked_at, longest, left_out = _large(config, inputs, inputs.train, encode, context)
    else:
        prompts, train, looked_at, longest, left_out = _whole(config, inputs, encode, context)
    heldout, eval_sets = _by_set(inputs, looked_at)
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
    seen = looked_at if isinstance(train, StreamingDataset) else (*train, *looked_at)
    cramped = sum(len(prompts[t.id]) + config.max_completion_length > width for t in seen)
    temperature = config.temperature if config.eval_temperature is None else config.eval_temperature
    return Prepared(
        policy, codec, prompts, train, heldout, width, min(context, max(width, LONG + TOKENS)),
        Sampling(config.num_generations, config.temperature, config.max_completion_length, width),
        Sampling(config.num_generations_eval, temperature, config.max_completion_length, width), left_out, cramped,
        eval_sets, call_format,
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

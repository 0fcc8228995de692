"""Model, tokens and tasks of a run, before anybody samples or learns. Imports torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from surefoot.assemble.inputs import Inputs
from surefoot.assemble.large import LargePrompts, within
from surefoot.assemble.learning import codec_of
from surefoot.assemble.memory import keep_freed_memory
from surefoot.config import Config
from surefoot.data.large.streaming import StreamingDataset
from surefoot.envs.tools import tools_of
from surefoot.errors import ConfigError, TaskError
from surefoot.policy.chat import ChatCodec
from surefoot.policy.load import Policy, load_policy, resolve_device
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
    policy = load_policy(config.model, base=base, device=config.device, dtype=config.dtype)
    codec = codec_of(config, base, policy, inputs.tools, tools)
    encode = partial(_encode, codec, routes or {})
    context = policy.spec.max_positions
    if isinstance(inputs.train, StreamingDataset):
        prompts, train, heldout, longest, left_out = _large(config, inputs, inputs.train, encode, context)
    else:
        prompts, train, heldout, longest, left_out = _whole(config, inputs, encode, context)
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
    seen = heldout if isinstance(train, StreamingDataset) else (*train, *heldout)
    cramped = sum(len(prompts[t.id]) + config.max_completion_length > width for t in seen)
    temperature = config.temperature if config.eval_temperature is None else config.eval_temperature
    return Prepared(
        policy, codec, prompts, train, heldout, width, min(context, max(width, LONG + TOKENS)),
        Sampling(config.num_generations, config.temperature, config.max_completion_length, width),
        Sampling(config.num_generations_eval, temperature, config.max_completion_length, width), left_out, cramped,
    )  # fmt: skip


Encoded = tuple[Mapping[str, tuple[int, ...]], Sequence[Task], tuple[Task, ...], int, int]
"""Prompts by task, tasks to train on, held-out tasks, the longest prompt, and how many tasks were left out."""


def _encode(codec: ChatCodec, routes: Mapping[str, Sequence[str]], task: Task) -> tuple[int, ...]:
    return codec.encode_prompt(task.messages(), tools_of(task, routes))


def _whole(config: Config, inputs: Inputs, encode: Callable[[Task], tuple[int, ...]], context: int) -> Encoded:
    """Every prompt, now."""
    prompts = {task.id: encode(task) for task in (*inputs.train, *inputs.heldout)}
    train = _fitting(inputs.train, prompts, config, context)
    heldout = _fitting(inputs.heldout, prompts, config, context)
    left_out = len(inputs.train) + len(inputs.heldout) - len(train) - len(heldout)
    if len(train) < config.tasks_per_step:
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
    heldout = tuple(task for task in inputs.heldout if len(encode(task)) <= limit)
    prompts = LargePrompts(train, heldout, lambda task: within(task, encode(task), limit))
    return prompts, train, heldout, limit, len(inputs.heldout) - len(heldout)


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

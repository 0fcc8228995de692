"""What `[tools]` asks for, as a recipe, and whether the tasks fit it; no server is started here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from surefoot.config import Config
from surefoot.data.large.streaming import StreamingDataset
from surefoot.envs.servers.server_file import read_servers
from surefoot.envs.toolkits import ToolRecipe
from surefoot.envs.tools import ToolLimits
from surefoot.envs.turn_limits import turns_of
from surefoot.records import Task


def tool_recipe(
    config: Config, base: Path, *, functions: Sequence[Callable[..., Any]] = (), environment: Any = None
) -> ToolRecipe | None:
    """The run's tools; None when it has none.

    Args:
        functions: tools given from Python, in front of `tools.functions`.
        environment: an environment class given from Python instead of `tools.environment`.
    """
    keys = config.tools
    if not keys.on and not functions and environment is None:
        return None
    servers, pins = read_servers(base / keys.servers) if keys.servers else ((), {})
    if environment is None and keys.environment is not None:
        environment = str((base / keys.environment).absolute())
    return ToolRecipe(
        servers, (*functions, *(str((base / each).absolute()) for each in keys.functions)), environment,
        ToolLimits(
            max_turns=config.max_turns, max_calls=keys.max_calls, call_timeout_s=keys.call_timeout_s,
            rollout_timeout_s=config.rollout_timeout_s, turns_by_complexity=keys.turns_by_complexity,
            stop_loops=config.repetition != "off",
        ),
        concurrency=keys.concurrency, max_result_tokens=keys.max_result_tokens, in_prompt=keys.in_prompt,
        mode=keys.mode, cassette=None if keys.cassette is None else (base / keys.cassette).absolute(),
        on_miss=keys.on_miss, pins=pins, call_format=keys.format,
    )  # fmt: skip


def refuse_strange_complexity(config: Config, *tasks: Iterable[Task]) -> None:
    """Where complexity decides about turns, a task with another one is refused before anything is started."""
    if not config.tools.turns_by_complexity:
        return
    for each in tasks:
        levels = each.statistics().complexity if isinstance(each, StreamingDataset) else None
        for task in each if levels is None else ():
            turns_of(task.columns, task.id, config.max_turns)
        for level in levels or ():
            turns_of({"complexity": level}, f"of {config.tasks}", config.max_turns)

"""What `[tools]` asks for, as a recipe; no server is started here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from surefoot.config import Config
from surefoot.envs.servers.server_file import read_servers
from surefoot.envs.toolkits import ToolRecipe
from surefoot.envs.tools import ToolLimits


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
            rollout_timeout_s=config.rollout_timeout_s,
        ),
        concurrency=keys.concurrency, max_result_tokens=keys.max_result_tokens, in_prompt=keys.in_prompt,
        mode=keys.mode, cassette=None if keys.cassette is None else (base / keys.cassette).absolute(),
        on_miss=keys.on_miss, pins=pins,
    )  # fmt: skip

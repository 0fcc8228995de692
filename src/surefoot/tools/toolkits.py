"""Everything that a run's rollouts may call, from its config: servers, functions, an environment class, a cassette.

Owns       the recipe, which travels to the processes that play rollouts, and the joining of several sources into one.
Promises   a name that two sources offer is refused; what was opened is closed when opening the next one fails; in a
           replay nothing real is started.

Read next: `tools/mcp/toolkit.py`, `python/environments.py`, `python/foreign.py`, `recording.py`: the sources.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefoot.config.choices import named_environment
from surefoot.config.own_code import OwnCode, load_own, own_object
from surefoot.errors import InputError, ToolError
from surefoot.protocols import ToolAnswer, Toolbox, Toolkit, ToolSpec
from surefoot.records import Task
from surefoot.system.files import sha256_of
from surefoot.system.user_code import load_function
from surefoot.tools.session import ToolLimits

if TYPE_CHECKING:
    from surefoot.tools.mcp.servers import Server


@dataclass(frozen=True)
class ToolkitSpec:
    """What it takes to have the run's tools, in any process."""

    servers: tuple[Server, ...] = ()
    functions: tuple[str | Callable[..., Any], ...] = ()
    """As `/path/file.py:function`, or themselves."""
    environment: Any = None
    """As `/path/file.py:Class`, a kind by its name (`choices.ENVIRONMENTS`), a class, or classes by name."""
    limits: ToolLimits = field(default_factory=ToolLimits)
    concurrency: int = 32
    max_result_tokens: int = 256
    in_prompt: bool = True
    mode: str = "live"
    cassette: Path | None = None
    on_miss: str = "fail"
    pins: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 of servers' tool lists, by server; a list that differs is refused."""
    call_format: str = "auto"
    """How the policy writes calls, one of `tool_calls.FORMS`; "auto" until somebody has looked at the template."""

    @property
    def never_starts(self) -> bool:
        """Whether everything is answered from a cassette."""
        return self.mode == "replay" and self.on_miss == "fail"

    @property
    def startable(self) -> tuple[Server, ...]:
        """The servers that a run with these tools starts."""
        return () if self.never_starts else self.servers

    @property
    def uncontained(self) -> str | None:
        """A sentence about servers that run with all our rights; None when there is none."""
        free = [server.name for server in self.startable if server.command and not server.contained]
        if not free:
            return None
        return f'tool server {", ".join(free)} runs WITHOUT a sandbox ("sandbox": false in the servers file)'

    def build(self, logs: Path | None = None) -> Toolkit:
        """Start what is needed, ready to be opened."""
        if self.mode == "live":
            return self._live(logs)
        from surefoot.tools.recording import RecordingToolkit

        assert self.cassette is not None, "config_rules ask for a cassette"
        return RecordingToolkit(
            None if self.never_starts else lambda: self._live(logs), self.cassette, mode=self.mode, miss=self.on_miss
        )

    def pinned(self, toolkit: Toolkit) -> ToolkitSpec:
        """The same, for other processes: whose servers must offer what this one's do."""
        return replace(self, pins={**self.pins, **getattr(toolkit, "pins", {})})

    def _live(self, logs: Path | None) -> Toolkit:
        with ExitStack() as stack:
            parts: list[Toolkit] = []
            for make in (self._from_servers, self._from_functions, self._from_environment):
                part = make(logs)
                if part is not None:
                    stack.callback(part.close)
                    parts.append(part)
            joined = parts[0] if len(parts) == 1 else JoinedToolkit(parts)
            stack.pop_all()
            return joined

    def _from_servers(self, logs: Path | None) -> Toolkit | None:
        if not self.servers:
            return None
        try:
            from surefoot.tools.mcp.toolkit import MCPToolkit
        except ModuleNotFoundError as error:
            raise ToolError(
                f"tool servers need the mcp package: {error}", "it is an extra", 'pip install "surefoot[mcp]"'
            ) from error
        from surefoot.tools.mcp.servers import ServerLimits

        limits = ServerLimits(
            call_timeout_s=self.limits.call_timeout_s, concurrency=max(64, self.concurrency),
            max_result_chars=max(4000, 16 * self.max_result_tokens),
        )  # fmt: skip
        toolkit = MCPToolkit(self.servers, limits, pins=dict(self.pins) or None, log_dir=logs)
        toolkit.start()
        return toolkit

    def _from_functions(self, logs: Path | None) -> Toolkit | None:
        if not self.functions:
            return None
        from surefoot.tools.python.environments import FunctionToolkit

        return FunctionToolkit([_loaded(function) for function in self.functions])

    def _from_environment(self, logs: Path | None) -> Toolkit | None:
        if self.environment is None:
            return None
        from surefoot.tools.python.environments import environment_toolkit, named_toolkit

        if (named := named_environment(self.environment)) is not None:
            return named_toolkit(*named)
        own = self._own_environment()
        try:
            return environment_toolkit(own.thing)
        except InputError as error:
            raise own.raised(error, "when its tools were listed") from error

    def _own_environment(self) -> OwnCode:
        """A user's environment and where its code stands; a class or function from Python knows its file itself."""
        if isinstance(self.environment, str):
            return load_own("tools.environment", self.environment)
        return own_object("tools.environment", self.environment)

    def try_environment(self, task: Task) -> None:
        """Reset the environment for one task and ask for its reward, before anything is sampled.

        Raises:
            ExtensionError: one of the user's own cannot be reset, or what it gives is no text or no number.
            InputError: the same of a kind of ours, which this task does not suit.
        """
        if self.environment is None or self.mode != "live":
            return
        own = None if named_environment(self.environment) else self._own_environment()
        toolkit = self._from_environment(None)
        assert toolkit is not None, "there is an environment"
        try:
            box = toolkit.open(task, "check/0", 0)
            try:
                box.reward()
            finally:
                box.close()
        except InputError as error:
            if own is None:
                raise
            raise own.raised(error, f"for task {task.id}") from error
        finally:
            toolkit.close()


def _loaded(source: Any) -> Any:
    return load_function(source, Path("/"), "tool") if isinstance(source, str) else source


def fingerprint(specs: Sequence[ToolSpec]) -> str:
    """SHA-256 over what the policy is offered: names, descriptions and arguments."""
    rows = sorted([spec.name, spec.description, spec.parameters] for spec in specs)
    return sha256_of(json.dumps(rows, sort_keys=True, default=dict))


class JoinedToolkit:
    """Several sources as one."""

    def __init__(self, parts: Sequence[Toolkit]) -> None:
        self.parts = list(parts)
        self._home: dict[str, int] = {}
        for number, part in enumerate(parts):
            for spec in part.specs:
                if spec.name in self._home:
                    raise ToolError(
                        f"two tools are called {spec.name!r}", "the model could not say which one it means",
                        "rename one of them",
                    )  # fmt: skip
                self._home[spec.name] = number

    @property
    def specs(self) -> Sequence[ToolSpec]:
        """Every tool of every source."""
        return [spec for part in self.parts for spec in part.specs]

    @property
    def pins(self) -> dict[str, str]:
        """What the servers among the sources offer, as digests."""
        return {name: pin for part in self.parts for name, pin in getattr(part, "pins", {}).items()}

    @property
    def routes(self) -> dict[str, Sequence[str]]:
        """Tools of each environment, and those that all have, when tasks choose between several."""
        chosen = {name: tools for part in self.parts for name, tools in getattr(part, "routes", {}).items()}
        always = [spec.name for part in self.parts if not getattr(part, "routes", {}) for spec in part.specs]
        return {name: [*tools, *always] for name, tools in chosen.items()}

    def open(self, task: Task, rollout: str, seed: int) -> Toolbox:
        """A toolbox of each source."""
        with ExitStack() as stack:
            toolboxes: list[Toolbox] = []
            for part in self.parts:
                toolboxes.append(part.open(task, rollout, seed))
                stack.callback(toolboxes[-1].close)
            stack.pop_all()
        return _JoinedToolbox(toolboxes, self._home)

    def close(self) -> None:
        """Close every source, the last one first, whatever the others do."""
        with ExitStack() as stack:
            for part in self.parts:
                stack.callback(part.close)


class _JoinedToolbox:
    """One rollout's toolboxes of all sources."""

    def __init__(self, toolboxes: Sequence[Toolbox], home: Mapping[str, int]) -> None:
        self._toolboxes, self._home = toolboxes, home
        openings = [box.opening for box in toolboxes if box.opening]
        self.opening: str | None = "".join(openings) or None

    def call(self, name: str, arguments: Mapping[str, Any], deadline_s: float) -> ToolAnswer:
        return self._toolboxes[self._home[name]].call(name, arguments, deadline_s)

    def reward(self) -> float | None:
        given = [reward for box in self._toolboxes if (reward := box.reward()) is not None]
        return sum(given) if given else None

    def close(self) -> None:
        with ExitStack() as stack:
            for box in self._toolboxes:
                stack.callback(box.close)


class NamedTools:
    """`protocols.Toolkit` of tools that are called elsewhere: it knows what they are, and opens none."""

    def __init__(self, specs: Sequence[ToolSpec]) -> None:
        self.specs: Sequence[ToolSpec] = tuple(specs)
        self.routes: Mapping[str, Sequence[str]] = {}

    def open(self, task: Task, rollout: str, seed: int) -> Toolbox:
        """Not here."""
        raise ToolError("these tools are called by rollout workers", "none was started here", "open them there")

    def close(self) -> None:
        """Nothing is owned."""

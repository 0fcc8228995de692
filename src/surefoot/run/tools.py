"""Tools looked at before a run, or instead of one: what is there, what a call brings, what the model would read.

Promises   without `start` nothing is started: programs are looked up, functions described, a cassette read; what was
           not looked at is said by name.
Never      records: a cassette that a run would write is not touched.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from surefoot.errors import ModelError
from surefoot.protocols import Toolkit, ToolSpec
from surefoot.records import Task
from surefoot.tools.mcp.process import refuse_bad_grants, refuse_without_walls
from surefoot.tools.mcp.servers import refuse_missing_program
from surefoot.tools.toolkits import ToolkitSpec

STAND_IN = ToolSpec("surefoot_stand_in", "A tool in the place of those that were not started.", {"type": "object"})
PROBES = 3


@dataclass(frozen=True)
class ToolPreview:
    """What is known of a run's tools."""

    specs: tuple[ToolSpec, ...]
    """All of them, or those that are known without starting anything."""
    complete: bool
    checked: tuple[str, ...]
    """In words, for the plan."""
    unchecked: tuple[str, ...]
    call_s: float | None = None
    """Seconds of one call, where a probe was asked."""
    start_s: float | None = None
    """Seconds that all servers took to start, where they were started."""

    @property
    def shown(self) -> tuple[ToolSpec, ...]:
        """What a template is asked to show: the tools, or one that stands for them."""
        return self.specs if self.complete else (*self.specs, STAND_IN)


def preview_tools(recipe: ToolkitSpec, *, start: bool) -> ToolPreview:
    """Check what can be checked; a `ToolError` for what would certainly fail."""
    if recipe.never_starts:
        with open_toolkit(recipe) as toolkit:
            return ToolPreview(tuple(toolkit.specs), True, ("the cassette",), ())
    for server in recipe.servers:
        refuse_missing_program(server)
        refuse_bad_grants(server)
        refuse_without_walls(server)
    if start:
        began = time.perf_counter()
        with open_toolkit(recipe) as toolkit:
            took = time.perf_counter() - began
            seconds = probe_seconds(recipe, toolkit)
            return ToolPreview(tuple(toolkit.specs), True, ("tool servers and their tools",), (), seconds, took)
    unstarted = [*(["tool servers"] if recipe.servers else []), *(["the environment"] if recipe.environment else [])]
    specs: tuple[ToolSpec, ...] = ()
    if recipe.functions:
        with open_toolkit(replace(recipe, servers=(), environment=None)) as toolkit:
            specs = tuple(toolkit.specs)
    checked = [
        *(["tool functions"] if recipe.functions else []),
        *(["programs of tool servers"] if recipe.servers else []),
    ]
    return ToolPreview(specs, not unstarted, tuple(checked), tuple(f"{each} (--start-tools)" for each in unstarted))


@contextmanager
def in_users_words() -> Iterator[None]:
    """A template that does not show the stand-in shows no tools; nobody but us knows the stand-in's name."""
    try:
        yield
    except ModelError as error:
        told = error.what.replace(f"the tool {STAND_IN.name!r}", "tools")
        raise ModelError(told, error.why, error.fix) from error


@contextmanager
def open_toolkit(recipe: ToolkitSpec) -> Iterator[Toolkit]:
    """The run's tools, started, and ended with the block; a cassette is read, never written."""
    toolkit = (recipe if recipe.never_starts else replace(recipe, mode="live", cassette=None)).build(None)
    try:
        yield toolkit
    finally:
        toolkit.close()


def probe_seconds(recipe: ToolkitSpec, toolkit: Toolkit) -> float | None:
    """Seconds of one call, by asking the servers' probes again; None where no server has one."""
    from surefoot.tools.mcp.pins import spec_name

    taken = []
    offered = {spec.name for spec in toolkit.specs}
    probes = [(spec_name(server.name, server.probe[0]), server.probe[1]) for server in recipe.servers if server.probe]
    box = toolkit.open(Task(id="probe", prompt="probe"), "probe/0/0", 0)
    try:
        for name, arguments in probes:
            if name not in offered:
                continue  # it is asked at the start alone
            box.call(name, arguments, recipe.limits.call_timeout_s)  # the first one starts an isolated server
            for _ in range(PROBES):
                began = time.perf_counter()
                box.call(name, arguments, recipe.limits.call_timeout_s)
                taken.append(time.perf_counter() - began)
    finally:
        box.close()
    return sorted(taken)[len(taken) // 2] if taken else None

"""What a run was given in Python, and what to say to whoever looks for it from the command line.

Owns       the list `from_python` of a run's environment.json: arguments as they would be written again.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefoot.config import Config
from surefoot.errors import StateError
from surefoot.store.run_folder import RunFolder
from surefoot.tracking.text import python_call

if TYPE_CHECKING:
    from surefoot.assemble.inputs import FromPython

ROWS = "python"
"""What the key `tasks` of such a run says, and of an evaluation set of it."""
EVAL_SET = "eval_dataset"
"""What an evaluation set is called that was given without a name."""
Rows = Sequence[Mapping[str, Any]]


def arguments(given: FromPython) -> tuple[str, ...]:
    """What was given, as keyword arguments; a row list has no name of its own, so it is called `rows`."""
    found = [] if given.rows is None else ["tasks=rows"]
    found += [f"reward_funcs=[{_names(given.functions)}]"] if given.functions else []
    found += [f"tools=[{_names(given.tools)}]"] if given.tools else []
    found += [f"environment_factory={_names([given.environment])}"] if given.environment is not None else []
    found += [_eval_dataset(given.eval_rows)] if given.eval_rows else []
    return tuple(found)


def way_on(run: Path, wanted: Sequence[str]) -> str:
    """How an interrupted run goes on: a command, or a call where it was given things in Python."""
    return python_call("resume", run, wanted) if wanted else f"surefoot train --resume {run}"


def way_to_evaluate(run: Path, wanted: Sequence[str], *, judged: bool) -> str:
    """How a run's checkpoint is looked at again.

    Args:
        judged: it has a metric of its own: then nobody needs its reward functions for that.
    """
    needed = [argument for argument in wanted if not (judged and _name(argument) == "reward_funcs")]
    return python_call("evaluate", run, wanted) if needed else f"surefoot eval {run}"


def recorded(folder: RunFolder, config: Config) -> list[str]:
    """What the run was given; a run that was killed before it wrote that down is known by its tasks alone."""
    found = environment_of_run(folder).get("from_python")
    if isinstance(found, list):
        return [str(argument) for argument in found]
    return ["tasks=rows", "reward_funcs=[...]"] if config.tasks == ROWS else []


def environment_of_run(folder: RunFolder) -> dict[str, Any]:
    """environment.json; empty when there is none yet."""
    return folder.read_environment()


def refuse_missing(folder: RunFolder, config: Config, given: FromPython, max_steps: int | None = None) -> None:
    """Raise if the run was given something in Python that is not given now: it would go on as another run."""
    wanted = recorded(folder, config)
    there = set(map(_name, arguments(given)))
    missing = [argument for argument in wanted if _name(argument) not in there]
    if missing:
        longer = [] if max_steps is None else [f"max_steps={max_steps}"]
        raise StateError(
            f"{folder.root} was given {_words(missing)} in Python, and they are not in its config",
            "without them it would not be the same run",
            f"use {python_call('resume', folder.root, [*wanted, *longer])} in Python",
        )


def refuse_unanswerable(folder: RunFolder, config: Config, there: Collection[str], *, own: bool) -> None:
    """Raise if the run's weights cannot be asked as the run asked them, for want of what it was given in Python.

    Args:
        there: names of the arguments that are given now.
        own: its own held-out tasks and evaluation sets are asked, not others.
    """
    wanted = recorded(folder, config)
    needed = {"tasks", EVAL_SET, "tools", "environment_factory"} if own else {"tools", "environment_factory"}
    missing = [argument for argument in wanted if _name(argument) in needed - set(there)]
    again = python_call("evaluate", folder.root, wanted)
    if "tasks" in map(_name, missing):
        raise StateError(
            f"{folder.root} was given its tasks as rows in Python, and they are in no file",
            "there are no held-out tasks to answer",
            f"use surefoot eval {folder.root} --tasks FILE, or in Python {again}",
        )
    if missing:
        raise StateError(
            f"{folder.root} was given {_words(missing)} in Python, and they are not in its config",
            "without them its answers would not be those of the run",
            f"use {again} in Python",
        )


def _words(missing: Sequence[str]) -> str:
    words = {"tasks": "rows", "reward_funcs": "reward functions", "tools": "tools", EVAL_SET: "an evaluation set"}
    return " and ".join(words.get(_name(argument), "an environment") for argument in missing)


def _name(argument: str) -> str:
    return argument.partition("=")[0]


def _names(objects: Sequence[Any]) -> str:
    return ", ".join(str(getattr(each, "__name__", type(each).__name__)).replace("<lambda>", "...") for each in objects)


def _eval_dataset(sets: Mapping[str, Any]) -> str:
    if list(sets) == [EVAL_SET]:
        return f"{EVAL_SET}=eval_rows"
    named = ", ".join(f"{json.dumps(name)}: {name.replace('-', '_')}_rows" for name in sets)
    return f"{EVAL_SET}={{{named}}}"

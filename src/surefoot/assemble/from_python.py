"""The same run, started from Python: keys as arguments, tasks as rows, rewards as functions.

import surefoot

def score(completions, answer, **_):
    return [float(text.strip() == gold) for text, gold in zip(completions, answer)]

rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10) for b in range(10)]
outcome = surefoot.train(model="pebble", tasks=rows, reward_funcs=[score], max_steps=20)
print(outcome.verdict, outcome.metrics["eval_accuracy"], outcome.run_dir)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from surefoot.assemble.inputs import FromPython, RewardFunction
from surefoot.assemble.resume import load_run_config
from surefoot.assemble.session import Outcome
from surefoot.assemble.session import resume as resume_session
from surefoot.assemble.session import train as run_session
from surefoot.config_load import config_from_values
from surefoot.store.run_folder import RunFolder
from surefoot.tracking.console import View, open_view


def train(
    *, model: str, tasks: str | Sequence[Mapping[str, Any]], reward_funcs: Sequence[str | RewardFunction] = (),
    tools: Sequence[Callable[..., Any]] | Mapping[str, Any] = (), environment_factory: Any = None,
    view: View | None = None, **keys: Any,
) -> Outcome:  # fmt: skip
    """Train with GRPO; the arguments are the keys of a config file.

    Args:
        tasks: what the config key `tasks` takes, or rows: mappings with `prompt` and any other columns.
        reward_funcs: functions `f(prompts, completions, **columns)`, or `file.py:function`.
        tools: functions that the policy may call, or the config table `tools`, whose `functions` may be functions.
        environment_factory: a class with reset(**row), tools as public methods and get_reward(), or several by name.
        view: where progress is shown; the terminal when left out.

    Raises:
        SurefootError: with what, why and fix; `exit_code` says which kind.
    """
    rows = None if isinstance(tasks, str) else list(tasks)
    functions = [f for f in reward_funcs if not isinstance(f, str)]
    keys["reward_funcs"] = [f for f in reward_funcs if isinstance(f, str)]
    weights = keys.pop("reward_weights", None)
    table, callables = _tools(tools)
    values = {"model": model, "tasks": tasks if isinstance(tasks, str) else "python", "tools": table, **keys}
    loaded = config_from_values(values, source="surefoot.train(...)", base=Path.cwd())
    if weights is not None:  # counted against functions and files together, where both are known
        loaded = loaded.with_config(loaded.config.model_copy(update={"reward_weights": tuple(map(float, weights))}))
    given = FromPython(rows, functions, callables, environment_factory)
    return run_session(loaded, view=view or open_view(loaded.config.max_steps), given=given)


def _tools(given: Sequence[Callable[..., Any]] | Mapping[str, Any]) -> tuple[dict[str, Any], list[Callable[..., Any]]]:
    """The config table, and the functions that no file names."""
    table = dict(given) if isinstance(given, Mapping) else {"functions": list(given)}
    functions = list(table.pop("functions", ()))
    named = [function for function in functions if isinstance(function, str)]
    return table | ({"functions": named} if named else {}), [f for f in functions if not isinstance(f, str)]


def resume(
    run_dir: str | Path, *, tasks: Sequence[Mapping[str, Any]] | None = None,
    reward_funcs: Sequence[RewardFunction] = (), tools: Sequence[Callable[..., Any]] = (),
    environment_factory: Any = None, view: View | None = None,
) -> Outcome:  # fmt: skip
    """Go on with an interrupted run; bit for bit as if it had not been interrupted.

    Args:
        tasks: the same rows again, if the run was started with rows; other ones are refused.
        reward_funcs: the same functions again, if it was started with functions. What they scored before is kept.
        tools: the same functions again; ones with other arguments or descriptions are refused.
        environment_factory: the same class again.
    """
    root = Path(run_dir)
    shown = view or open_view(load_run_config(RunFolder.open(root)).config.max_steps)
    given = FromPython(None if tasks is None else list(tasks), reward_funcs, tools, environment_factory)
    return resume_session(root, view=shown, given=given)

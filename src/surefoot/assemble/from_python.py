"""The same run, started from Python: keys as arguments, tasks as rows, rewards as functions.

import surefoot

def score(completions, answer, **_):
    return [float(text.strip() == gold) for text, gold in zip(completions, answer)]

rows = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(10) for b in range(10)]
outcome = surefoot.train(model="pebble", tasks=rows, reward_funcs=[score], max_steps=20)
print(outcome.verdict, outcome.metrics["eval_accuracy"], outcome.run_dir)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from surefoot.assemble.inputs import RewardFunction
from surefoot.assemble.session import Outcome
from surefoot.assemble.session import train as run_session
from surefoot.config_load import config_from_values
from surefoot.tracking.console import View, open_view


def train(
    *, model: str, tasks: str | Sequence[Mapping[str, Any]], reward_funcs: Sequence[str | RewardFunction] = (),
    view: View | None = None, **keys: Any,
) -> Outcome:  # fmt: skip
    """Train with GRPO; the arguments are the keys of a config file.

    Args:
        tasks: what the config key `tasks` takes, or rows: mappings with `prompt` and any other columns.
        reward_funcs: functions `f(prompts, completions, **columns)`, or `file.py:function`.
        view: where progress is shown; the terminal when left out.

    Raises:
        SurefootError: with what, why and fix; `exit_code` says which kind.
    """
    rows = None if isinstance(tasks, str) else list(tasks)
    functions = [f for f in reward_funcs if not isinstance(f, str)]
    keys["reward_funcs"] = [f for f in reward_funcs if isinstance(f, str)]
    weights = keys.pop("reward_weights", None)
    values = {"model": model, "tasks": tasks if isinstance(tasks, str) else "python", **keys}
    loaded = config_from_values(values, source="surefoot.train(...)", base=Path.cwd())
    if weights is not None:  # counted against functions and files together, where both are known
        loaded = loaded.with_config(loaded.config.model_copy(update={"reward_weights": tuple(map(float, weights))}))
    return run_session(loaded, view=view or open_view(loaded.config.max_steps), rows=rows, functions=functions)

"""Which function scores: the user's own file, or a built-in scorer.

Owns       finding and loading reward functions.
Promises   a file or function that is not there is refused at once, with the nearest names.
Never      calls a reward function.

Read next: `reward_pool.py`, which does.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from surefoot.envs.rewards.marks import RewardFunction
from surefoot.errors import RewardError


def exact_answer(
    prompts: Sequence[Any], completions: Sequence[Any], answer: Sequence[Any], **columns: Any
) -> list[Any]:
    """(G,) 1.0 where the completion, stripped, equals the answer; None where the task has no answer.

    Example:
        >>> exact_answer(["1+1="] * 2, [" 2\\n", "3"], ["2", "2"])
        [1.0, 0.0]
    """
    texts = [_text(completion) for completion in completions]
    return [_equals(text, gold) for text, gold in zip(texts, answer, strict=True)]


def reasoning_gym_score(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    reasoning_gym: Sequence[str],
    entry: Sequence[Any],
    **columns: Any,
) -> list[Any]:
    """(G,) what the named reasoning-gym dataset itself says of each completion, stripped."""
    from reasoning_gym import get_score_answer_fn

    scorers = {name: get_score_answer_fn(name) for name in set(reasoning_gym)}
    rows = zip(completions, reasoning_gym, entry, strict=True)
    return [scorers[name](_text(completion), task) for completion, name, task in rows]


def builtin_scorer(kind: str) -> RewardFunction:
    """The scorer that a task set asks for ("exact", "reasoning_gym", "verifier"), ready to be forked into workers.

    reasoning-gym is imported here, in the driver: its two seconds would count against every worker's first call.
    """
    if kind == "exact":
        return exact_answer
    if kind == "verifier":
        from surefoot.envs.verifiers import verifier_scorer

        return verifier_scorer()
    if kind != "reasoning_gym":
        raise _refusal(f"there is no built-in scorer {kind!r}", "a task set names its scorer", kind, _BUILT_IN)
    try:
        importlib.import_module("reasoning_gym")
    except ImportError as error:
        raise RewardError(
            f"reasoning-gym cannot be imported: {error}",
            "its datasets score their own answers",
            'install it: pip install "surefoot[tasks]"',
        ) from error
    return reasoning_gym_score


_BUILT_IN = ("exact", "reasoning_gym", "verifier")
COMPONENTS = "builtin:components"
"""The reward function that has no file: `envs.components`, weighed by the key component_weights."""


def is_builtin(spec: str) -> bool:
    """Whether an entry of `reward_funcs` names a reward function of ours; one that does not exist is refused."""
    if not spec.startswith("builtin:"):
        return False
    if spec != COMPONENTS:
        raise _refusal(f"there is no reward function {spec!r}", "reward_funcs names it", spec, [COMPONENTS])
    return True


def load_reward(spec: str, base: Path, what: str = "reward") -> RewardFunction:
    """The function named by `file.py:function`; the file is relative to `base`.

    Args:
        what: it is loaded for: a `reward`, or a `tool`.
    """
    file, colon, name = spec.rpartition(":")
    if not colon and what == "reward" and not spec.endswith(".py"):
        raise RewardError(
            f"reward function {spec!r} looks like the name of a model",
            "TRL loads a reward model by name; here rewards are functions, file.py:function, in processes of their own",
            "write a function that loads the model once and returns one number per completion, as docs/rewards.md "
            "shows, and name it file.py:function",
        )
    if not colon or not file or not name:
        raise RewardError(
            f"{what} function {spec!r} does not name a file and a function",
            f"{what} functions are given as file.py:function",
            f"write for example {(name or file or f'my_{what}s.py').removesuffix('.py')}.py:score",
        )
    path = (base / file).resolve()
    if not path.is_file():
        near = [found.name for found in path.parent.glob("*.py")] if path.parent.is_dir() else []
        raise _refusal(f"{what} file {path} does not exist", f"{spec!r} names it", path.name, near)
    module = _load(path)
    if not hasattr(module, name):
        public = [each for each, value in vars(module).items() if callable(value) and not each.startswith("_")]
        raise _refusal(f"{path} has no function {name!r}", f"{spec!r} names it", name, public)
    function = getattr(module, name)
    if not callable(function):
        raise RewardError(
            f"{name!r} in {path} is a {type(function).__name__}, not a function",
            "a reward is computed by calling f(prompts, completions, **columns)"
            if what == "reward"
            else "it is called",
            "name a function",
        )
    return function  # type: ignore[no-any-return]


def _load(path: Path) -> ModuleType:
    """Run a reward file once as a module of its own; its folder is searched for what it imports."""
    name = f"surefoot_reward_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise RewardError(f"{path} is not a Python file", "reward functions are Python", "name a .py file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # last: a helper beside it must not shadow an installed package
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        last = traceback.extract_tb(error.__traceback__)[-1]
        line = error.lineno if isinstance(error, SyntaxError) else last.lineno
        raise RewardError(
            f"reward file {path} cannot be loaded: {type(error).__name__}: {error} (line {line})",
            "its functions are defined by running it once",
            f"make `python {path.name}` run without an error",
        ) from error
    return module


def _refusal(what: str, why: str, wanted: str, known: Iterable[str]) -> RewardError:
    known = sorted(known)
    near = difflib.get_close_matches(wanted, known, n=3, cutoff=0.5) or known[:5]
    return RewardError(what, why, f"did you mean {', '.join(near)}?" if near else "check the spelling and the folder")


def _text(completion: Any) -> str:
    """A completion as plain text: text itself, or what the policy said last; what a tool said is nobody's answer."""
    if isinstance(completion, str):
        return completion.strip()
    said = [message for message in completion if message.get("role", "assistant") == "assistant"]
    return str(said[-1].get("content") or "").strip() if said else ""


def _equals(text: str, gold: Any) -> float | None:
    return None if gold is None else float(text == str(gold).strip())

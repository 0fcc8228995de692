"""A user's own function, from a file of theirs: `file.py:function`, for rewards and for tools."""

from __future__ import annotations

import difflib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from surefoot_harness.errors import RewardError
from surefoot_harness.system.files import sha256_of

_DIGESTS: dict[str, str] = {}
"""SHA-256 of each file as it was run, by the name of its module."""


def load_function(spec: str, base: Path, what: str = "reward") -> Callable[..., Any]:
    """The function named by `file.py:function`; the file is relative to `base`.

    Args:
        what: it is loaded for: a `reward`, or a `tool`.
    """
    path, name, function = load_object(spec, base, what)
    if not callable(function):
        raise RewardError(
            f"{name!r} in {path} is a {type(function).__name__}, not a function",
            "a reward is computed by calling f(prompts, completions, **columns)"
            if what == "reward"
            else "it is called",
            "name a function",
        )
    return function  # type: ignore[no-any-return]


def load_object(spec: str, base: Path, what: str) -> tuple[Path, str, Any]:
    """The file, the name, and whatever has that name in that file."""
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
        raise did_you_mean(f"{what} file {path} does not exist", f"{spec!r} names it", path.name, near)
    module = _load(path, what)
    if not hasattr(module, name):
        public = [each for each, value in vars(module).items() if callable(value) and not each.startswith("_")]
        raise did_you_mean(f"{path} has no function {name!r}", f"{spec!r} names it", name, public)
    return path, name, getattr(module, name)


def _load(path: Path, what: str = "reward") -> ModuleType:
    """Run a file of the user's once as a module of its own; its folder is searched for what it imports.

    A file that has changed since this process ran it is run again: what a run records of it is what it uses.
    """
    name = f"surefoot_reward_{path.stem}_{sha256_of(str(path))[:8]}"
    digest = sha256_of(path.read_bytes())
    if name in sys.modules and _DIGESTS.get(name) == digest:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise RewardError(f"{path} is not a Python file", "reward functions are Python", "name a .py file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name], _DIGESTS[name] = module, digest
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))  # last: a helper beside it must not shadow an installed package
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        last = traceback.extract_tb(error.__traceback__)[-1]
        line = error.lineno if isinstance(error, SyntaxError) else last.lineno
        raise RewardError(
            f"{what} file {path} cannot be loaded: {type(error).__name__}: {error} (line {line})",
            "its functions are defined by running it once",
            f"make `python {path.name}` run without an error",
        ) from error
    return module


def did_you_mean(what: str, why: str, wanted: str, known: Iterable[str]) -> RewardError:
    """A refusal that names what comes closest to what was written."""
    known = sorted(known)
    near = difflib.get_close_matches(wanted, known, n=3, cutoff=0.5) or known[:5]
    return RewardError(what, why, f"did you mean {', '.join(near)}?" if near else "check the spelling and the folder")

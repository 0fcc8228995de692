"""Code of the user's own that a key names as `file.py:name`: found, loaded, and refused with file and line.

Owns       which keys name such code, its digests, and the form of every refusal.
Promises   what does not load, or cannot be called as it will be, is an `ExtensionError` (exit 4) that names the file and
           the line; a digest is taken of the file as it lies on the disk, without running it.
Never      judges what the code computes: whoever uses it does.

    loss_type | scale_rewards | engine.kind | guard.rules  --load_own-->  OwnCode  --expect_call-->  used

Read next: `learner/own_code.py`, `engines/own.py`, `guards/own_rules.py`: what each has to hold.
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot.config import Config
from surefoot.config.choices import is_own
from surefoot.errors import ExtensionError, RewardError, SurefootError
from surefoot.system.files import sha256_of
from surefoot.system.user_code import load_object

WHAT = {
    "loss_type": "loss",
    "scale_rewards": "advantage estimator",
    "engine.kind": "engine",
    "guard.rules": "guard rule",
    "tools.environment": "environment",
}
"""Key -> what its code is called."""


@dataclass(frozen=True)
class OwnCode:
    """Something from a file of the user's, and where it stands."""

    key: str
    path: Path
    name: str
    thing: Any

    @property
    def line(self) -> int | None:
        """Where it is defined; None where Python does not know."""
        return _line_of(self.thing)

    @property
    def place(self) -> str:
        """`/path/my_loss.py:12, my_loss`."""
        return f"{self.path}:{self.line or 1}, {self.name}"

    def refused(self, what: str, why: str, fix: str, error: BaseException | None = None) -> ExtensionError:
        """The error that says so; at the line where `error` was raised, if it was raised in that file."""
        line = None if error is None else _line_in(self.path, error)
        place = self.place if line is None else f"{self.path}:{line}, {self.name}"
        return ExtensionError(f"{self.key}: {WHAT[self.key]} {place}: {what}", why, fix)

    def raised(self, error: Exception, doing: str) -> ExtensionError:
        """The same for an exception out of that code; one of ours says itself what is wrong."""
        if isinstance(error, SurefootError):
            return self.refused(error.what, error.why, error.fix, error)
        return self.refused(
            f"{type(error).__name__} {doing}: {str(error)[:300]}", "it would end the run there",
            "repair it; the line is where it was raised", error,
        )  # fmt: skip

    def expect_call(self, *names: str) -> None:
        """Refuse a function that cannot be called with these arguments, in this order and without names."""
        if not callable(self.thing):
            raise self.refused(
                f"a {type(self.thing).__name__}", "it is called", f"name a function ({', '.join(names)})"
            )
        try:
            inspect.signature(self.thing).bind(*names)
        except (TypeError, ValueError) as error:
            raise self.refused(
                f"it cannot be called with ({', '.join(names)}): {error}", "that is how it is called",
                f"write def {self.name}({', '.join(names)}):",
            ) from error  # fmt: skip


def load_own(key: str, spec: str) -> OwnCode:
    """What `file.py:name` stands for; the file is run once in this process."""
    try:
        path, name, thing = load_object(spec, Path.cwd(), WHAT[key])
    except RewardError as error:
        raise ExtensionError(f"{key}: {error.what}", error.why, error.fix) from error
    return OwnCode(key, path, name, thing)


def own_object(key: str, thing: Any) -> OwnCode:
    """The same for an object that was given in Python."""
    try:
        path = Path(inspect.getsourcefile(thing) or "<python>")
    except TypeError:
        path = Path("<python>")
    return OwnCode(key, path, str(getattr(thing, "__name__", type(thing).__name__)), thing)


def own_specs(config: Config) -> Iterator[tuple[str, str]]:
    """(key, `file.py:name`) of everything in a config that is looked at here."""
    values = [("loss_type", config.loss_type), ("scale_rewards", config.scale_rewards)]
    values += [("engine.kind", config.engine.kind), *(("guard.rules", rule) for rule in config.guard.rules or ())]
    yield from ((key, value) for key, value in values if is_own(value))


def own_digests(config: Config) -> dict[str, str]:
    """SHA-256 of each such file, by key and name; an `ExtensionError` where there is none."""
    found = {}
    for key, spec in own_specs(config):
        file, _, name = spec.rpartition(":")
        try:
            found[f"{key} {Path(file).name}:{name}"] = sha256_of(Path(file).read_bytes())
        except OSError as error:
            raise ExtensionError(
                f"{key}: {WHAT[key]} file {file} cannot be read: {error.strerror or error}", f"{spec!r} names it",
                "check the spelling and the folder; it is relative to the config file",
            ) from error  # fmt: skip
    return found


def _line_of(thing: Any) -> int | None:
    for each in (thing, getattr(thing, "objective", None)):
        code = getattr(inspect.unwrap(each) if callable(each) else each, "__code__", None)
        if code is not None:
            return int(code.co_firstlineno)
    try:
        return inspect.getsourcelines(thing)[1]
    except (OSError, TypeError):
        return None


def _line_in(path: Path, error: BaseException) -> int | None:
    """The innermost line of the file in an exception's traceback, or in that of what it was raised from."""
    each: BaseException | None = error
    while each is not None:
        lines = [frame.lineno for frame in traceback.extract_tb(each.__traceback__) if Path(frame.filename) == path]
        if lines:
            return lines[-1]
        each = each.__cause__
    return None

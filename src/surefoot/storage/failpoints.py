"""Named places where a test may stop, break or slow down the real code.

Owns       the list of names below; a call with any other name is refused, switched on or not.
Promises   switched off it costs one dictionary look-up; it is switched on by one environment variable and nothing
           else, read when this module is imported; a word it does not understand is refused, never ignored.
Never      does anything in a run whose environment does not ask for it.

    SUREFOOT_FAILPOINTS="journal.after_write=kill"              kill -9 of this process
    SUREFOOT_FAILPOINTS="journal.after_write=kill@3"            ... at the third time it comes here
    SUREFOOT_FAILPOINTS="durable.after_write=errno:ENOSPC"      what a full disk says
    SUREFOOT_FAILPOINTS="lock.acquired=raise:KeyboardInterrupt,journal.after_sync=sleep:2"

Read next: `files.py` and `journal.py`, where most of them are.
"""

from __future__ import annotations

import builtins
import difflib
import errno
import itertools
import math
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from surefoot.errors import ConfigError, InvariantError, SurefootError

VARIABLE = "SUREFOOT_FAILPOINTS"

NAMES: Mapping[str, str] = {
    "batches.before_append": "graded groups are about to be journaled",
    "batches.after_append": "graded groups are on the disk, nobody knows it yet",
    "batches.before_compose": "all groups of a batch are on the disk, its composition is not",
    "batches.after_compose": "the composition of a batch is on the disk, nobody knows it yet",
    "books.on_disk": "graded groups are on the disk, the ledger does not know it yet",
    "books.delivered": "graded groups are on the disk and delivered, the rest of their batch is still played",
    "batches.after_roll": "a new file for batches exists, the old one is still open",
    "batches.before_forget": "a file of batches that nobody needs any more is about to go",
    "checkpoint.before_files": "a checkpoint's temporary folder exists, empty",
    "checkpoint.after_weights": "its weights and optimiser state are written, not its record",
    "checkpoint.before_commit": "all its files are written, not yet listed",
    "retention.verified": "two good checkpoints are known, an older one is about to go",
    "retention.after_rename": "a checkpoint has lost its name, not its files",
    "loop.before_collect": "a batch is leased, not played",
    "loop.after_collect": "a batch is played and scored, its groups are on the disk, its composition is not",
    "loop.before_learn": "a batch is on the disk, no pass over it has begun",
    "loop.after_learn": "the weights have changed, nothing says so yet",
    "loop.before_publish": "the engine serves older weights than the learner has",
    "loop.after_publish": "the engine has the learner's weights",
    "loop.before_log": "the numbers of a step are about to be written",
    "loop.before_evaluate": "an evaluation is about to begin",
    "loop.after_evaluate": "an evaluation is written and folded",
    "session.folder_made": "the run folder exists and is locked, its config is not written",
    "session.config_written": "the run folder holds its config and nothing else",
    "session.before_build": "the journal exists, torch is not loaded",
    "session.before_save": "a checkpoint is about to be written",
    "session.after_save": "a checkpoint is complete, older ones are not pruned yet",
    "session.before_verdict": "the run is over, its verdict is not written",
    "session.after_verdict": "the verdict is written, the lock still held",
    "resume.found": "a resume knows its checkpoint, nothing is changed",
    "extend.journaled": "a new length of the run is in the journal, config.toml holds the old one",
    "extend.written": "config.toml holds the new length, the run has not gone on yet",
    "resume.rewound": "later numbers are cut from the metrics and the ledger is rewound",
    "durable.before_write": "a file is about to be written beside its final name",
    "durable.after_write": "its bytes are written, not yet on the disk",
    "durable.after_sync": "its bytes are on the disk, under the temporary name",
    "durable.after_rename": "it has its final name, which may not be on the disk",
    "durable.done": "bytes and name are on the disk",
    "folder.before_seal": "a finished folder is about to be listed",
    "folder.after_seal": "one more of its files is synced and hashed",
    "folder.before_manifest": "every file is synced, the manifest is not written",
    "folder.after_manifest": "the manifest is there, under the temporary folder name",
    "folder.after_rename": "the folder has its final name, which may not be on the disk",
    "folder.done": "the folder is on the disk",
    "memory.before_learn": "a measurement of memory has sampled and is about to learn",
    "journal.created": "a journal without a record exists",
    "journal.before_write": "a record is about to be appended",
    "journal.between_pieces": "a part of a large record is written",
    "journal.after_write": "the record is written, not yet on the disk",
    "journal.after_sync": "the record is on the disk, its writer does not know it yet",
    "journal.before_cut": "a torn tail was found",
    "journal.after_cut": "the torn tail is cut off",
    "journal.before_seal": "a journal is about to be closed",
    "learner.before_forward": "a microbatch is about to be scored",
    "learner.after_backward": "one more microbatch has added its gradient",
    "learner.before_step": "the gradient is whole and finite, the weights are untouched",
    "learner.after_step": "the weights are stepped, the version does not say so yet",
    "ledger.before_event": "an event is allowed, not yet in the journal",
    "ledger.after_event": "the event is in the journal, not yet in memory",
    "ledger.opened": "a new driver has taken over the ledger",
    "lock.opened": "the lock file exists, nobody holds it",
    "lock.acquired": "the lock is held, its owner has not signed",
    "lock.signed": "the lock is held and signed",
    "lock.before_release": "the lock file is about to go",
}
"""Every failpoint of the package: where it is, in words. A new one starts here."""


@dataclass(frozen=True, slots=True)
class Armed:
    """What happens at one failpoint, and at which of its hits (None: at each)."""

    name: str
    text: str
    act: Callable[[], None]
    at: int | None = None
    hits: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def hit(self) -> None:
        """Count this hit; act if it is the one."""
        if next(self.hits) == self.at or self.at is None:
            self.act()


_POINTS: dict[str, Armed | None] = dict.fromkeys(NAMES)


def failpoint(name: str) -> None:
    """A place that a test can name. Nothing happens here unless the environment says so."""
    try:
        armed = _POINTS[name]
    except KeyError:
        raise _unknown(name, InvariantError) from None
    if armed is not None:
        armed.hit()


def read_environment() -> dict[str, str]:
    """Switch on what the environment variable names and everything else off; returns what is on.

    Done once, at import. A child that was forked from a warm parent may do it again.
    """
    wanted = {armed.name: armed for armed in _parse(os.environ.get(VARIABLE, ""))}
    _POINTS.update({name: wanted.get(name) for name in NAMES})
    return switched_on()


def switched_on() -> dict[str, str]:
    """The failpoints that are on, with what they do; empty in every real run."""
    return {name: armed.text for name, armed in _POINTS.items() if armed is not None}


def _parse(text: str) -> list[Armed]:
    parts = [part.strip() for part in re.split("[,;]", text) if part.strip()]
    found = [_parse_one(part) for part in parts]
    names = [armed.name for armed in found]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise _refused(f"names {', '.join(twice)} twice")
    return found


def _parse_one(part: str) -> Armed:
    match = re.fullmatch(r"(?P<name>[^=]+)=(?P<action>[^@]+)(?:@(?P<at>[0-9]{1,9}))?", part)
    if match is None or match["at"] == "0":
        raise _refused(f"holds {part!r}, which is not name=action or name=action@hit, hits counted from 1")
    name, action = match["name"].strip(), match["action"].strip()
    if name not in NAMES:
        raise _unknown(name, ConfigError)
    return Armed(name, part.partition("=")[2], _action(name, action), int(match["at"]) if match["at"] else None)


def _action(name: str, text: str) -> Callable[[], None]:
    word, _, argument = text.partition(":")
    if text == "kill":
        return _kill
    if word == "sleep" and (seconds := _seconds(argument)) is not None:
        return lambda: time.sleep(seconds)
    if word == "errno" and isinstance(code := getattr(errno, argument, None), int):
        return lambda: _raise_errno(name, code)
    if word == "raise" and re.fullmatch(r"[\w.]+", argument) and ("." in argument or _kind(argument) is not None):
        return lambda: _raise(name, argument)
    raise _refused(f"asks {name} for {text!r}; there are kill, sleep:SECONDS, errno:NAME and raise:EXCEPTION")


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _seconds(text: str) -> float | None:
    try:
        seconds = float(text)
    except ValueError:
        return None
    return seconds if math.isfinite(seconds) and 0 <= seconds <= 1e6 else None


def _raise_errno(name: str, code: int) -> None:
    raise OSError(code, f"{os.strerror(code)} (failpoint {name})")


def _raise(name: str, kind: str) -> None:
    found = _kind(kind)
    if found is None:
        raise _refused(f"asks {name} for {kind}, and no loaded module has an exception of that name")
    if issubclass(found, SurefootError):
        raise found(f"failpoint {name}", f"{VARIABLE} asked for it", "unset the variable")
    raise found(f"failpoint {name}")


def _kind(name: str) -> type[BaseException] | None:
    """An exception by name: a builtin one, one of ours, or `module.Name` of a module that is loaded already."""
    module, _, word = name.rpartition(".")
    homes = [sys.modules.get(module)] if module else [builtins, sys.modules["surefoot.errors"]]
    found = next((getattr(home, word) for home in homes if hasattr(home, word)), None)
    return found if isinstance(found, type) and issubclass(found, BaseException) else None


def _unknown(name: str, kind: type[SurefootError]) -> SurefootError:
    near = " or ".join(difflib.get_close_matches(name[:100], NAMES, n=3))
    guess = f"did you mean {near}? " if near else ""
    return kind(
        f"there is no failpoint {name[:100]!r}",
        "a crash test that hits nothing would pass without having tested anything",
        f"{guess}they are all declared in surefoot/storage/failpoints.py",
    )


def _refused(what: str) -> ConfigError:
    return ConfigError(
        f"{VARIABLE} {what}", "a crash test that hits nothing would pass without having tested anything",
        "write for example journal.after_write=kill@2, several with commas; unset it for a real run",
    )  # fmt: skip


read_environment()

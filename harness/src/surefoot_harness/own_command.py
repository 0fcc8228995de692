"""What our own command is called here: `surefoot` beside the trainer, `surefoot-harness` without it."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Sequence

COMMANDS = ("surefoot", "surefoot-harness")
MODULES = ("surefoot", "surefoot_harness")


@functools.cache
def own_name() -> str:
    """The name for advice that can be pasted."""
    return COMMANDS[importlib.util.find_spec("surefoot") is None]


def own_words(command: Sequence[str]) -> list[str] | None:
    """What follows our own name in a command, `surefoot ...` or `python -m surefoot ...`; None for any other."""
    if command and os.path.basename(command[0]) in COMMANDS:
        return list(command[1:])
    return list(command[3:]) if command[1:2] == ["-m"] and command[2:3] and command[2] in MODULES else None

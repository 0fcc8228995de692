"""What can go wrong in the bridge and nowhere else."""

from __future__ import annotations

from surefoot.errors import ConfigError, InputError, InvariantError


class HeldOutEvalError(InputError):
    """The held-out evaluation raised, took too long, or returned something that is no finite number."""


class ChannelDeadError(InvariantError):
    """A loss channel is switched on and has contributed nothing for too many steps."""


def refused(what: str, why: str, fix: str = "see docs/guards_trl.md for every argument") -> ConfigError:
    """An argument that is refused before anything is loaded."""
    return ConfigError(what, why, fix)

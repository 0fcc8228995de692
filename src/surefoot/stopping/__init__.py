"""Stopping when asked: signals, phases that may be left, and a last resort."""

from surefoot.stopping.command import COMMAND
from surefoot.stopping.last_resort import ASKING, say_without_waiting
from surefoot.stopping.signals import PARTS, Phase, StopRequested, StopSignals

__all__ = ["ASKING", "COMMAND", "PARTS", "Phase", "StopRequested", "StopSignals", "say_without_waiting"]

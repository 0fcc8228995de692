"""Rewards of the tool run: the answer has to be right, and a call has its price."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from surefoot.rewards.functions import exact_answer

right = exact_answer


def calls(completions: Sequence[Any], **columns: Any) -> list[float]:
    """(G,) how many tools each rollout called; with tools a completion is a list of messages."""
    return [float(sum(message["role"] == "tool" for message in said)) for said in completions]

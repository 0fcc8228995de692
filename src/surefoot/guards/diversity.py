"""Are siblings independent draws? A sampler with a fixed seed says the same thing again and again.

Owns       the memory of which set of completions each task got last.
Promises   no false alarm on a policy that has become sure of itself: how often a completion may
           repeat is judged by the probability the sampler itself claims for it.
Never      looks at text.

With G siblings, the chance that some completion of probability p appears m times or more is at
most C(G, m) * p^(m-1). A repeat that is less likely than `ALARM` did not happen by chance.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence

from surefoot.errors import InvariantError, StateError
from surefoot.records import Group, Rollout

ALARM = 1e-12
"""Smallest probability that is still put down to chance; about one false alarm in a billion steps."""
DIGEST = 16
"""Hexadecimal digits that are kept of a visit: 64 bits, so that a checkpoint stays small with many tasks."""


class DiversityGuard:
    """Refuses sampling that repeats itself more than its own probabilities allow."""

    def __init__(self) -> None:
        self._last: dict[str, str] = {}

    def check(self, groups: Sequence[Group]) -> int:
        """Look at siblings inside each group, and at the same task's previous visit."""
        for group in groups:
            played = [r for r in group.rollouts if r.turns]
            self._check_siblings(group, played)
            self._check_visits(group, played)
        return len(groups)

    def state_dict(self) -> dict[str, str]:
        """What a resumed run has to remember: by task, a digest of its last visit."""
        return dict(self._last)

    def load_state_dict(self, state: Mapping[str, str]) -> None:
        """Go on where `state_dict` was taken."""
        if not all(isinstance(word, str) for pair in state.items() for word in pair):
            raise StateError(
                "the saved visits are not texts", "a repeated visit would not be recognised", "use the saved state"
            )
        self._last = dict(state)

    def _check_siblings(self, group: Group, played: list[Rollout]) -> None:
        copies = Counter(_tokens(r) for r in played)
        surprise = {_tokens(r): _logprob(r) for r in played}
        for tokens, count in copies.items():
            log_chance = math.log(math.comb(len(played), count)) + (count - 1) * surprise[tokens]
            if count > 1 and log_chance < math.log(ALARM):
                raise _repeated(group, f"{count} of {len(played)} siblings are identical", log_chance)

    def _check_visits(self, group: Group, played: list[Rollout]) -> None:
        digest = hashlib.sha256(repr([_tokens(r) for r in played]).encode()).hexdigest()[:DIGEST]
        log_chance = sum(map(_logprob, played))
        if played and self._last.get(group.task.id) == digest and log_chance < math.log(ALARM):
            raise _repeated(group, "the whole set equals the one of its last visit", log_chance)
        self._last[group.task.id] = digest


def _tokens(rollout: Rollout) -> tuple[int, ...]:
    return tuple(t for turn in rollout.turns for t in turn.completion_ids)


def _logprob(rollout: Rollout) -> float:
    return sum(p for turn in rollout.turns for p in turn.logprobs)


def _repeated(group: Group, what: str, log_chance: float) -> InvariantError:
    return InvariantError(
        f"group {group.id} of {group.task.id}: {what}; the sampler itself gives that a chance of "
        f"1e{log_chance / math.log(10):.0f}",
        "siblings are not independent draws (a fixed seed per request?), so advantages compare copies",
        "give every rollout its own seed",
    )

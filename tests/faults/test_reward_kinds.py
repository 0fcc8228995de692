"""A thousand bad reward calls of every kind: each ends typed and in time, and no healthy completion notices.

The everyday form has about a hundred calls, every kind at least twice. A failure names its seed, and the seed replays it:

    python tests/support/reward_kinds.py --seed 17
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import figures
import pytest
from reward_kinds import FINE, KINDS, REFUSED, Case, WatchedPool
from reward_kit import nothing_is_left  # noqa: F401 - the fixture works by being here

from surefoot.rewards import workers
from surefoot.rewards.pool import RewardPool

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="looks for leaked processes in /proc")
PROMISE_S = 1.0
"""A call is over at most so long after its deadline."""


OVERRUN = "bad-reward call: over so long after its deadline (the longest)"


def problems_of(seeds: range | list[int], note: Callable[[str, object], None]) -> list[str]:
    """Play every seed; what went wrong. The figures go into the test's record."""
    cases = [Case.of(seed) for seed in seeds]
    with WatchedPool() as pool:
        found = [problem for case in cases if (problem := case.problem(pool))]
        late = max(pool.overruns, default=0.0)
    if late > PROMISE_S:  # once may be somebody else's load; a fault of ours is late again
        with WatchedPool() as pool:
            found += [problem for case in cases if (problem := case.problem(pool))]
            late = max(pool.overruns, default=0.0)
    if late > PROMISE_S:
        found.append(
            f"a call of seeds {seeds} was over {late:.2f} s after its deadline; {PROMISE_S:g} s is the promise"
        )
    bad = sum(FINE not in case.kind.outcome for case in cases)
    detail = f"{len({case.kind.name for case in cases})} kinds; {bad} without a verdict"
    told = {"bad": len(found), "seeds": range(min(seeds), max(seeds) + 1)}
    figures.note(note, "P13", "bad-reward call: the right outcome, nobody else harmed", len(cases), detail, **told)
    figures.note(note, "P13", OVERRUN, len(cases), seconds=[max(late, 0.0)], limit_s=PROMISE_S)
    return found


def test_a_hundred_bad_calls_of_every_kind_are_typed_in_time_and_harm_nobody_else(
    record_property: Callable[[str, object], None],
) -> None:
    quick = [i for i, kind in enumerate(KINDS) if kind.outcome != ("timeout",)]
    seeds = [*range(len(KINDS)), *(len(KINDS) + i for i in range(len(KINDS))), *(2 * len(KINDS) + i for i in quick)]
    assert problems_of(seeds, record_property) == []


@pytest.mark.nightly
def test_a_thousand_bad_calls_of_every_kind_are_typed_in_time_and_harm_nobody_else(
    record_property: Callable[[str, object], None],
) -> None:
    assert problems_of(range(1000, 2000), record_property) == []


def test_there_are_more_than_twenty_kinds_and_a_case_is_a_function_of_its_seed() -> None:
    assert len({kind.name for kind in KINDS}) == len(KINDS) >= 20
    outcomes = Counter(outcome for kind in KINDS for outcome in kind.outcome)
    assert set(outcomes) == {"raised", "died", "timeout", "nan", "abstained", "not_a_number", FINE, REFUSED}
    assert (Case.of(4711).guilty, Case.of(4711).beside) == (Case.of(4711).guilty, Case.of(4711).beside)
    assert Case.of(4711).guilty != Case.of(4711 + len(KINDS)).guilty


# -- the check has teeth ------------------------------------------------------------------------------
def seed_of(name: str) -> int:
    return next(i for i, kind in enumerate(KINDS) if kind.name == name)


def test_planted_bug_a_failure_scored_as_zero_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def score_zero(self: RewardPool, call: Any, judged: Any) -> None:
        record(self, call, [(value if reason is None else 0.0, None, "") for value, reason, _ in judged])

    record = RewardPool._record
    monkeypatch.setattr(RewardPool, "_record", score_zero)
    [problem] = problems_of([seed_of("raises")], note=lambda *_: None)
    assert "'bad' got RewardValue(value=0.0, reason=None)" in problem


def test_planted_bug_the_whole_group_pays_for_one_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def record_all(self: RewardPool, call: Any, reason: str, story: str) -> None:
        self._record(call, [(None, reason, story)] * len(call.rows))

    monkeypatch.setattr(RewardPool, "_retry_or_record", record_all)
    seeds = range(seed_of("raises"), 20 * len(KINDS), len(KINDS))
    alone = [seed for seed in seeds if Case.of(seed).guilty.size > 1][:1]
    [problem] = problems_of(alone, note=lambda *_: None)
    assert "'sibling" in problem


@pytest.mark.turns(2, 1)
def test_planted_bug_a_worker_that_is_not_killed_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the kill the fork server waits for a worker that sleeps on; somebody has to be late, and is named."""
    end = workers.ForkServer._end

    def end_late(self: workers.ForkServer, slot: int, stacks: bool) -> tuple[str | None, bytes]:
        workers.time.sleep(1.5 * PROMISE_S if slot in self.workers else 0)
        return end(self, slot, stacks)

    monkeypatch.setattr(workers.ForkServer, "_end", end_late)
    problems = problems_of([seed_of("sleeps")], note=lambda *_: None)
    assert "after its deadline" in problems[-1]

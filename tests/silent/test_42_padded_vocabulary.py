"""Silent failure 42: the model has more output rows than the tokenizer has tokens, and the spare ones are sampled and rewarded."""

from __future__ import annotations

from typing import Any

import pytest
from silent_kit import TASKS, VOCAB, TinyEnvironment, make_runtime

from surefoot.engines.scripted import ScriptedEngine
from surefoot.errors import InvariantError, RewardError
from surefoot.guards.invariants import check_groups
from surefoot.learner.samples import drop_ungraded
from surefoot.protocols import Request
from surefoot.records import Group
from surefoot.runtime import rollout as rollout_module

KNOWN = 30  # tokens; rows 30 and 31 of the output layer belong to nobody


def script(request: Request) -> list[int]:
    return [[7, 2], [7, 31, 2], [30, 2], [8, 2]][int(request.id[-1])]


def collect(max_failures: float = 1.0) -> list[Group]:
    """A grader that likes everything: only the collector stands between a spare row and a reward."""
    environment = TinyEnvironment(lambda rollout: 1.0)
    engine = ScriptedEngine(script)
    runtime = make_runtime(engine, environment=environment, max_failures=max_failures, token_count=KNOWN)
    return runtime.collect(TASKS[:1], step=1)


def check(groups: list[Group]) -> None:
    assert groups[0].rewards == (1.0, None, None, 1.0)


def test_an_answer_with_a_spare_row_has_no_reward_and_a_reason() -> None:
    groups = collect()
    check(groups)
    assert drop_ungraded(groups, partial="drop").dropped["undecodable_token"] == 2


def test_by_default_the_run_stops_on_it() -> None:
    with pytest.raises(RewardError, match="undecodable_token"):
        collect(max_failures=0.0)


def test_planted_grade_of_an_undecodable_answer_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def graded(rollout: Any, grade: Any) -> Any:
        return rollout.graded(grade.reward, grade.parts, grade.failure)

    monkeypatch.setattr(rollout_module, "_with_grade", graded)
    with pytest.raises(AssertionError):
        check(collect())


def test_planted_id_beyond_the_output_layer_is_refused() -> None:
    groups = make_runtime(ScriptedEngine(lambda r: [VOCAB, 2]), token_count=VOCAB + 8).collect(TASKS[:1], step=1)
    with pytest.raises(InvariantError, match="outside"):
        check_groups(groups, vocab_size=VOCAB, stop_ids=frozenset({2}))

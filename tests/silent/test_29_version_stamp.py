"""Silent failure 29: the version is read after generation, so that an old answer is labelled new when an update came between."""

from __future__ import annotations

from dataclasses import replace

import pytest
from silent_kit import TASKS, make_learner, make_runtime, prepare, tiny_net

from surefoot.engines.scripted import ScriptedEngine
from surefoot.errors import InvariantError
from surefoot.protocols import Completion, Request
from surefoot.records import Group
from surefoot.tracking.metrics import group_metrics


def bump(engine: ScriptedEngine) -> None:
    """New weights land while the engine is speaking."""
    engine.load_weights({}, engine.version + 1)


def script(request: Request) -> list[int]:
    return [3 + int(request.id[-1]), 2]


class Late(ScriptedEngine):
    """The planted bug: the stamp is taken when the answer is complete."""

    def _complete(self, request: Request, started: int) -> Completion:
        return replace(super()._complete(request, started), version=self.version)


def collect(engine: ScriptedEngine) -> list[Group]:
    return make_runtime(engine).collect(TASKS, step=1)


def check(groups: list[Group]) -> None:
    """The oldest weights are on the record, and the mixture is counted."""
    assert {r.version for g in groups for r in g.rollouts} == {0}
    assert group_metrics(groups)["groups/mixed_version"] == 12


def test_the_version_is_the_one_at_the_first_token() -> None:
    check(collect(ScriptedEngine(script, on_generate=bump)))


def test_without_an_update_nothing_counts_as_mixed() -> None:
    assert group_metrics(collect(ScriptedEngine(script)))["groups/mixed_version"] == 0


def test_an_answer_of_old_weights_is_not_trained_as_if_it_were_new() -> None:
    learner = make_learner(tiny_net())
    learner._version = 1
    with pytest.raises(InvariantError, match="come from version 0, the learner is at 1"):
        learner.learn(prepare(collect(ScriptedEngine(script, on_generate=bump))))


def test_planted_late_stamp_is_seen() -> None:
    with pytest.raises(AssertionError):
        check(collect(Late(script, on_generate=bump)))

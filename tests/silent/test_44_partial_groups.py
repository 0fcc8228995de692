"""Silent failure 44: a group that lost siblings is used as if it were whole, so that whatever did not fail is rewarded."""

from __future__ import annotations

from typing import Any

import pytest
from silent_kit import TASKS, make_group, prepare

from surefoot.errors import PartialGroupError
from surefoot.learner.samples import drop_ungraded
from surefoot.records import Group

WHOLE = make_group([1.0, 0.0, 0.0, 1.0])
PARTIAL = make_group([1.0, 0.0, None, None], task=TASKS[1], name="train/1/1")
ALONE = make_group([1.0, None, None, None], task=TASKS[2], name="train/1/2")
ALL = [WHOLE, PARTIAL, ALONE]


def trained(partial: str) -> list[str]:
    return sorted({s.group for s in prepare(ALL, partial_groups=partial)})


def check() -> None:
    assert trained("drop") == [WHOLE.id]
    assert trained("train") == [WHOLE.id, PARTIAL.id]
    with pytest.raises(PartialGroupError, match="has 2 of 4 rollouts"):
        trained("refuse")


def test_the_policy_for_partial_groups_is_explicit_and_does_what_it_says() -> None:
    check()


def test_every_rollout_that_is_left_out_is_counted_under_a_reason() -> None:
    assert drop_ungraded(ALL, partial="drop").dropped == {"raised": 5, "partial_group": 3}
    assert drop_ungraded(ALL, partial="train").dropped == {"raised": 5, "partial_group": 1}


def test_planted_survivors_without_a_rule_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def survivors(groups: list[Group], *, partial: str) -> Any:
        return drop_ungraded(groups, partial="train")

    monkeypatch.setattr("surefoot.learner.samples.drop_ungraded", survivors)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        check()

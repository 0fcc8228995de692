"""Silent failure 03: rows thrown away after advantages were taken, so that a group no longer adds up to zero."""

from __future__ import annotations

from typing import Any

import pytest
from silent_kit import make_group, prepare

from surefoot import loop
from surefoot.errors import InvariantError
from surefoot.learner.samples import to_samples

REWARDS = [1.0, 0.0, 0.0, 0.0]  # without its one success, the group only pushes down


def test_the_rows_that_enter_the_loss_add_up_to_zero() -> None:
    assert abs(sum(s.advantage for s in prepare([make_group(REWARDS)]))) < 1e-9


def test_a_sibling_without_a_verdict_is_gone_before_advantages_are_taken() -> None:
    samples = prepare([make_group([*REWARDS, None])], partial_groups="train")
    assert len(samples) == 4
    assert abs(sum(s.advantage for s in samples)) < 1e-9


@pytest.mark.parametrize("victim", range(4))
def test_planted_drop_after_advantages_is_refused(monkeypatch: pytest.MonkeyPatch, victim: int) -> None:
    def dropping(groups: Any, *, scale: str) -> Any:
        return [s for s in to_samples(groups, scale=scale) if s.index != victim]

    monkeypatch.setattr(loop, "to_samples", dropping)
    with pytest.raises(InvariantError):
        prepare([make_group(REWARDS)])

"""Silent failure 12: the first entry of an engine's logprob map is recorded, which is the likeliest token, not the chosen one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from silent_kit import TASKS

from surefoot import records
from surefoot.errors import EngineError
from surefoot.records import EngineOutput, Group, group_from_outputs

RANKED = [{5: -0.1, 9: -2.5, 4: -3.0}, {9: -0.3, 2: -1.4}]
OUTPUT = EngineOutput((9, 2), "9 2", RANKED, "stop")  # both sampled tokens are second choices


def check(build: Callable[[EngineOutput], Group]) -> None:
    (rollout,) = build(OUTPUT).rollouts
    assert rollout.turns[0].logprobs == (-2.5, -1.4)


def ours(output: EngineOutput) -> Group:
    return group_from_outputs(TASKS[0], "0", (1, 5), [output], version=3)


def test_the_value_under_the_sampled_token_is_recorded() -> None:
    check(ours)


def test_asking_for_more_alternatives_changes_nothing() -> None:
    only = EngineOutput((9, 2), "9 2", [{9: -2.5}, {2: -1.4}], "stop")
    assert ours(only) == ours(OUTPUT)


@pytest.mark.parametrize("maps", [[{5: -0.1}, {2: -1.4}], [{9: -2.5}], None])
def test_a_hole_is_refused_not_filled(maps: list[dict[int, float]] | None) -> None:
    with pytest.raises(EngineError, match="task long, output 0"):
        ours(EngineOutput((9, 2), "9 2", maps, "stop"))


def test_planted_first_entry_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def first(task_id: str, index: int, out: EngineOutput) -> tuple[float, ...]:
        return tuple(next(iter(table.values())) for table in out.logprob_maps or ())

    monkeypatch.setattr(records, "_sampled_logprobs", first)
    with pytest.raises(AssertionError):
        check(ours)

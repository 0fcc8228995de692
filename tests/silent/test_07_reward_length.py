"""Silent failure 07: a reward function returns one number for four completions, and it is handed to all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from surefoot.errors import RewardError
from surefoot.rewards import workers
from surefoot.rewards.pool import RewardJob, RewardPool

JOB = RewardJob(["p"] * 4, ["a", "bb", "ccc", "dddd"])


def score(function: Any) -> list[float | None]:
    with RewardPool({"f": function}, workers=1) as pool:
        return [marks["f"].value for marks in pool.score([JOB])]


def one_for_all(completions: Sequence[str], **_: Any) -> list[float]:
    return [float(len(completions[0]))]


def check(function: Any) -> None:
    with pytest.raises(RewardError, match="1 values for 4 completions"):
        score(function)


def test_a_list_of_the_right_length_is_taken_in_order() -> None:
    assert score(lambda completions, **_: [len(text) for text in completions]) == [1.0, 2.0, 3.0, 4.0]


def test_one_value_for_four_completions_is_refused() -> None:
    check(one_for_all)


@pytest.mark.parametrize("wrong", [1.0, [1.0] * 5, [], "1111", {"a": 1.0}], ids=str)
def test_what_is_not_one_value_per_completion_is_refused(wrong: Any) -> None:
    with pytest.raises(RewardError):
        score(lambda completions, **_: wrong)


def test_planted_broadcast_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    real = workers._call

    def stretched(*args: Any) -> Any:
        returned = real(*args)
        return returned * 4 if len(returned) == 1 else returned

    monkeypatch.setattr(workers, "_call", stretched)  # before the fork, so the worker has it too
    with pytest.raises(pytest.fail.Exception):
        check(one_for_all)

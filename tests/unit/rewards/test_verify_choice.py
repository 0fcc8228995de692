"""One choice is a choice; several are none."""

from __future__ import annotations

import pytest

from surefoot.errors import RewardError
from surefoot.rewards.verifiers.choice import verify_choice

TEXTS = ["Rome", "Paris", "New York", "B"]


@pytest.mark.parametrize(
    "said",
    ["B", "b", "(B)", "B.", "B)", "B: Paris", "(B) Paris", "Paris", "paris.", "The answer is B.", "Answer: (B)",
     r"\boxed{B}", r"\boxed{\text{B}}", "**B**", "<answer>B</answer>", "Not Rome.\nFinal answer: B"],
)  # fmt: skip
def test_the_right_choice_is_understood(said: str) -> None:
    assert verify_choice("B", said, TEXTS[:3]) == 1.0


@pytest.mark.parametrize(
    "said",
    ["", "A", "A B C D", "A, B, C", "A or B", "B or C", "ABC", "not B", "The answer is not B.", "B, C", "(B) Rome", "B) C",
     "Rome", "Rome Paris New York", "В", "\\boxed{}", "I choose whatever is right", "x = x", "E"],
)  # fmt: skip
def test_anything_else_is_wrong(said: str) -> None:
    assert verify_choice("B", said, TEXTS[:3]) == 0.0


@pytest.mark.parametrize(("gold", "said"), [(1, "B"), ("Paris", "B"), ("b", "B"), ("(B)", "Paris")])
def test_gold_may_be_a_letter_a_position_or_the_text(gold: object, said: str) -> None:
    assert verify_choice(gold, said, TEXTS[:3]) == 1.0


@pytest.mark.parametrize("gold", ["D", "Oslo", 3, -1, True, "", "AB"])
def test_a_gold_that_is_no_choice_is_refused(gold: object) -> None:
    with pytest.raises(RewardError, match="none of the 3 choices"):
        verify_choice(gold, "A", TEXTS[:3])

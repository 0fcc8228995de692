"""What counts as a number, and under which reason everything else is counted."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.guards.reward_values import RewardValue, parse_reward


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (0, 0.0), (-3, -3.0), (True, 1.0), (False, 0.0), (1e308, 1e308), (Decimal("0.25"), 0.25), (Fraction(1, 4), 0.25),
        (np.float32(0.5), 0.5), (np.int64(7), 7.0), (np.bool_(True), 1.0), (np.array(0.5), 0.5),
    ],
    ids=repr,
)  # fmt: skip
def test_finite_numbers_of_every_make_are_accepted(value: Any, number: float) -> None:
    assert parse_reward(value) == RewardValue(number, None)


def test_a_tensor_with_a_gradient_is_a_number_without_a_warning() -> None:
    torch = pytest.importorskip("torch")
    assert parse_reward(torch.tensor(0.5, requires_grad=True)) == RewardValue(0.5, None)
    assert parse_reward(torch.tensor([0.5])) == RewardValue(None, "not_a_number")


def test_negative_zero_stays_what_it_is() -> None:
    value = parse_reward(-0.0).value
    assert value == 0.0
    assert math.copysign(1, value) == -1


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -math.inf, 10**400, np.float32("nan"), np.array(np.inf)], ids=repr
)
def test_what_is_not_finite_has_no_value(value: Any) -> None:
    assert parse_reward(value) == RewardValue(None, "nan")


class Sulky:
    def __float__(self) -> float:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    "value",
    [
        "1.0",
        b"1",
        1j,
        np.complex128(1),
        np.str_("1"),
        {},
        [1.0],
        (1.0,),
        {"a": 1},
        np.array([1.0]),
        np.array([]),
        Sulky(),
        object(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_not_a_number_has_no_value(value: Any) -> None:
    assert parse_reward(value) == RewardValue(None, "not_a_number")


def test_none_abstains() -> None:
    assert parse_reward(None) == RewardValue(None, "abstained")


ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5)
    | st.complex_numbers(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=3,
)


@settings(deadline=None)
@given(ANYTHING)
def test_a_mark_is_a_finite_number_or_a_reason_and_a_failure_is_never_a_number(value: Any) -> None:
    mark = parse_reward(value)
    assert (mark.value is None) != (mark.reason is None)
    finite = isinstance(value, bool | int | float) and abs(value) <= 1.7976931348623157e308
    assert (mark.value is not None) == finite
    if finite:
        assert mark.value == float(value)

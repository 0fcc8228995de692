"""A reward call travels as data: the same values, of the same types, and nothing that could run."""

from __future__ import annotations

import datetime as dt
import json
import os
import signal
import uuid
from collections import OrderedDict
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.errors import RewardError
from surefoot.rewards.pool import RewardJob, RewardPool
from surefoot.rewards.workers import NotJson, RewardCall, by_fork, read_call, write_call


def sent(value: Any, **more: Any) -> Any:
    frame = write_call(RewardCall("f", ["?"], ["!"], {"x": [value]}), **more)
    json.loads(frame)
    return read_call(frame, more.get("forked")).columns["x"][0]


leaves = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(st.characters()), st.binary(), st.datetimes(),
    st.dates(), st.times(), st.timedeltas(), st.decimals(allow_nan=False), st.fractions(), st.uuids(),
    st.complex_numbers(allow_nan=False),
)  # fmt: skip
keys = st.one_of(st.text(), st.integers(), st.booleans(), st.none(), st.binary(), st.tuples(st.integers(), st.text()))
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(keys, inner, max_size=3), st.tuples(inner, inner),
        st.frozensets(st.integers(), max_size=3), st.sets(st.text(), max_size=3),
    ),
    max_leaves=12,
)  # fmt: skip


def same(one: Any, two: Any) -> bool:
    """Equal, of the same types at every depth; NaN is itself."""
    if type(one) is not type(two):
        return False
    if isinstance(one, list | tuple):
        return len(one) == len(two) and all(map(same, one, two))
    if isinstance(one, dict):
        return same(list(one.items()), list(two.items()))
    if isinstance(one, float):
        return repr(one) == repr(two)
    return bool(one == two)


@given(values)
def test_what_arrives_is_what_was_sent(value: Any) -> None:
    assert same(sent(value), value)


@pytest.mark.parametrize(
    "value",
    [
        10**6000, -(10**6000), {"$": "bytes", "v": "x"}, {"$": 1}, "\ud800", dt.datetime(2026, 1, 1, tzinfo=dt.UTC),
        dt.datetime(2026, 1, 1, tzinfo=dt.timezone(dt.timedelta(hours=2))), Path("/a/b"), Decimal("1.10"),
        Fraction(1, 3), uuid.UUID(int=7), bytearray(b"x"), float("inf"), True, {1: "a", "1": "b"},
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_odd_values_arrive_as_they_were(value: Any) -> None:
    assert same(sent(value), value)


@pytest.mark.parametrize(
    "value",
    [np.float32(0.1), np.int64(7), np.bool_(True), np.datetime64("2026-01-01"), np.arange(6).reshape(2, 3), np.array(3.0),
     np.array(["a", "bc"]), np.zeros((0, 2))],
    ids=repr,
)  # fmt: skip
def test_numbers_and_arrays_of_numpy_arrive_as_they_were(value: Any) -> None:
    found = sent({"deep": [value]})["deep"][0]
    assert type(found) is type(value)
    assert found.dtype == value.dtype
    assert np.array_equal(found, value)
    if isinstance(found, np.ndarray):
        found.flags.writeable  # noqa: B018 - and it may be written to:
        found[...] = found


class Thing:
    """An object of the user's own class."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __reduce__(self) -> Any:
        raise AssertionError("it was pickled")

    def __deepcopy__(self, memo: Any) -> Thing:
        return Thing(self.value)


@pytest.mark.parametrize(
    "value",
    [Thing(1), OrderedDict(a=1), lambda: 1, np.array([Thing(1)]), [[{"deep": Thing(1)}]], iter([1]),
     dt.datetime(2026, 1, 1, tzinfo=ZoneInfo("UTC"))],
)  # fmt: skip
def test_what_has_no_form_as_data_is_refused_by_its_column_and_found_for_the_fork(value: Any) -> None:
    with pytest.raises(NotJson, match="x holds a "):
        sent(value)
    assert by_fork({"x": value, "y": (1, 2)}) == {"x": value}


def test_columns_that_workers_have_by_fork_are_named_and_copied() -> None:
    thing = Thing(3)
    forked = {"t": {"x": thing}}
    frame = write_call(RewardCall("f", ["?"], ["a", "b"], {"x": [thing, thing]}), "t", forked)
    assert b"Thing" not in frame
    one, two = read_call(frame, forked).columns["x"]
    assert one is two, "siblings share it, as they did before"
    assert one is not thing
    assert one.value == 3


def test_a_value_that_siblings_share_is_sent_once() -> None:
    long = "x" * 10_000
    frame = write_call(RewardCall("f", [long] * 8, list("abcdefgh"), {"answer": [long] * 8}))
    assert len(frame) < 2 * len(long)
    call = read_call(frame)
    assert call.prompts == call.columns["answer"] == [long] * 8


@pytest.mark.parametrize(
    "body",
    [
        b"[]", b"{}", b'{"function":"f"}', b"not json", b"\x80\x04\x95",
        b'{"function":"f","prompts":[9],"completions":[],"columns":{},"values":[]}',
        b'{"function":"f","prompts":[0],"completions":[],"columns":{},"values":[{"$":"os.system","v":"true"}]}',
        b'{"function":"f","prompts":[0],"completions":[],"columns":{},"values":[{"$":"numpy","v":["O",[1],""],"scalar":false}]}',
    ],
)  # fmt: skip
def test_what_is_not_a_call_is_refused(body: bytes) -> None:
    with pytest.raises((ValueError, IndexError, KeyError)):
        read_call(body)


def test_rewards_of_rows_with_objects_are_computed_in_workers_and_again_in_restarted_ones() -> None:
    """Forked, not sent; and a worker that died is forked from the same fork server."""

    def score(completions: list[str], thing: list[Thing], when: list[dt.date], **_: Any) -> list[float]:
        if completions[0] == "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        thing[0].value += 1  # its own copy
        return [float(thing[0].value) + when[0].day for _ in completions]

    thing, day = Thing(3), dt.date(2026, 1, 10)
    with RewardPool({"score": score}, workers=1, forked={"t": {"thing": thing}}) as pool:
        for said, expected in (("a", 14.0), ("crash", None), ("b", 14.0)):
            job = RewardJob(["?"], [said], {"thing": [thing], "when": [day]}, task="t")
            assert [marks["score"].value for marks in pool.score([job])] == [expected], said
        with pytest.raises(RewardError, match="columns cannot be sent to reward function score: thing holds a "):
            pool.score([RewardJob(["?"], ["a"], {"thing": [Thing(1)], "when": [day]}, task="another task")])
    assert thing.value == 3

"""A group comes back from the journal bit for bit, or not at all."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.errors import StateError
from surefoot.records import Group, Rollout, Task, Turn
from surefoot.storage.batches import group_record, read_group
from surefoot.system import journal

TASKS = {name: Task(id=name, prompt="?") for name in ("a", "ä\ud800\n")}
numbers = st.floats(allow_nan=False, allow_infinity=False)
tokens = st.lists(st.integers(0, 2**31), min_size=1, max_size=4).map(tuple)


@st.composite
def turns(draw: Any) -> Turn:
    ids = draw(tokens)
    return Turn(
        draw(tokens), ids, tuple(draw(numbers) for _ in ids), draw(st.integers(0, 9)),
        finish_reason=draw(st.sampled_from(["stop", "length"])), text=draw(st.text()),
        version_end=draw(st.none() | st.integers(0, 9)),
    )  # fmt: skip


@st.composite
def groups(draw: Any) -> Group:
    task = draw(st.sampled_from(sorted(TASKS)))
    rollouts = []
    for index in range(draw(st.integers(1, 3))):
        played = tuple(draw(st.lists(turns(), max_size=3)))
        reward = draw(numbers) if played and draw(st.booleans()) else None
        parts = {"x": draw(st.none() | numbers)}
        rollouts.append(Rollout(task, "g", index, played, reward, parts, None if reward is not None else "down"))
    return Group(TASKS[task], "g", tuple(rollouts))


@given(groups())
def test_what_is_read_is_what_was_written(group: Group) -> None:
    payload = journal.encode(group_record(group))
    again = read_group(journal.decode(payload, "here"), TASKS)
    assert again == group
    assert repr(again) == repr(group), "minus zero is not zero"


def record() -> dict[str, Any]:
    turn = Turn((1, 2), (3,), (-0.5,), 0)
    return group_record(
        Group(TASKS["a"], "g", (Rollout("a", "g", 0, (turn,), 1.0), Rollout("a", "g", 1, (turn,), 0.0)))
    )


def test_clocks_come_back_and_stand_apart_from_what_runs_are_compared_by() -> None:
    turn = Turn((1, 2), (3,), (-0.5,), 0)
    timed = Rollout("a", "g", 0, (turn,), 1.0, seconds=0.1 + 0.2, grading_seconds={"f": 1e-7})
    kept = group_record(Group(TASKS["a"], "g", (timed, Rollout("a", "g", 1, (turn,), 0.0))))
    again = read_group(journal.decode(journal.encode(kept), "here"), TASKS).rollouts
    assert [(r.seconds, dict(r.grading_seconds)) for r in again] == [(0.1 + 0.2, {"f": 1e-7}), (None, {})]
    assert {name: value for name, value in kept.items() if name != "clock"} == record()
    for broken in ([[0.5, {}]], [[0.5, {}], [-1.0, {}]], [[0.5, {}], [0.5, 3]], [[0.5], [0.5]], [["x", {}], [1.0, {}]]):
        with pytest.raises(StateError, match="cannot be read"):
            read_group(kept | {"clock": broken}, TASKS)


def test_siblings_share_their_prompt() -> None:
    assert record()["prompts"] == [[1, 2]]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda r: r.update(task="b"),
        lambda r: r.update(event="batch"),
        lambda r: r.pop("rollouts"),
        lambda r: r.update(rollouts=[]),
        lambda r: r["rollouts"][0].pop(),
        lambda r: r["rollouts"][0][4][0].__setitem__(0, 7),
        lambda r: r["rollouts"][0][4][0].__setitem__(1, [3, 4]),
        lambda r: r["rollouts"][0][4][0].__setitem__(1, [3.5]),
        lambda r: r["rollouts"][0][4][0].__setitem__(2, ["x"]),
        lambda r: r["rollouts"][0].__setitem__(1, float("nan")),
        lambda r: r["rollouts"][0].__setitem__(3, "also failed"),
    ],
)
def test_a_record_of_another_form_is_refused(spoil: Any) -> None:
    odd = copy.deepcopy(record())
    spoil(odd)
    with pytest.raises(StateError, match="cannot be read"):
        read_group(odd, TASKS)

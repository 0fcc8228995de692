"""A scored group as one journal record, and back, without losing a bit.

Owns       the record's form: prompts once per group, every float as the shortest text that reads back the same.
Promises   `read_group(group_record(g), g.task) == g`; anything else in a record is a `StateError`.
           Wall times stand apart from the rows (`clock`): they come back too, and no two runs are compared by them.
Never      keeps the task itself: it comes from the task set, whose fingerprint the journal holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from surefoot.errors import ConfigError, StateError
from surefoot.records import Group, Rollout, Task, ToolCall, Turn

EVENT = "group"


def group_record(group: Group) -> dict[str, Any]:
    """One group as JSON data."""
    prompts: dict[tuple[int, ...], int] = {}
    rollouts = [_rollout_row(rollout, prompts) for rollout in group.rollouts]
    return {
        "event": EVENT, "task": group.task.id, "group": group.id, "prompts": [list(p) for p in prompts],
        "rollouts": rollouts,
    } | _clock(group)  # fmt: skip


def read_group(record: Mapping[str, Any], tasks: Mapping[str, Task]) -> Group:
    """Back from a record; a task that is not among `tasks`, or a record of another form, is a `StateError`."""
    try:
        if record["event"] != EVENT or record["task"] not in tasks:
            raise _refused(f"event {record['event']!r}, task {record['task']!r}")
        prompts = [tuple(_ints(row)) for row in record["prompts"]]
        rollouts = [_rollout(record, row, prompts) for row in record["rollouts"]]
        if "clock" in record:
            rollouts = [_timed(rollout, *row) for rollout, row in zip(rollouts, record["clock"], strict=True)]
        return Group(tasks[record["task"]], record["group"], tuple(rollouts))
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, ConfigError) as error:
        raise _refused(f"{type(error).__name__}: {error}") from error


def _clock(group: Group) -> dict[str, Any]:
    """Wall times of every rollout, where any was measured."""
    rows = [[rollout.seconds, dict(rollout.grading_seconds)] for rollout in group.rollouts]
    return {"clock": rows} if any(seconds is not None or grading for seconds, grading in rows) else {}


def _timed(rollout: Rollout, seconds: Any, grading: Any) -> Rollout:
    return replace(rollout, seconds=seconds, grading_seconds={str(name): float(s) for name, s in grading.items()})


def _rollout_row(rollout: Rollout, prompts: dict[tuple[int, ...], int]) -> list[Any]:
    """What only rollouts with tools have stands at the end, and only there."""
    turns = [_turn_row(turn, prompts) for turn in rollout.turns]
    row = [rollout.index, rollout.reward, dict(rollout.reward_parts), rollout.failure, turns]
    return [*row, rollout.ended, rollout.own_reward] if rollout.ended or rollout.own_reward is not None else row


def _turn_row(turn: Turn, prompts: dict[tuple[int, ...], int]) -> list[Any]:
    place = prompts.setdefault(turn.prompt_ids, len(prompts))
    row = [
        place, list(turn.completion_ids), list(turn.logprobs), turn.version, turn.finish_reason, turn.text,
        turn.version_end,
    ]  # fmt: skip
    return [*row, [[c.name, c.arguments, c.answer, c.outcome] for c in turn.calls]] if turn.calls else row


def _rollout(record: Mapping[str, Any], row: Sequence[Any], prompts: Sequence[tuple[int, ...]]) -> Rollout:
    index, reward, parts, failure, turns, *tools = row
    ended, own_reward = tools or ("", None)
    return Rollout(
        record["task"], record["group"], index, tuple(_turn(turn, prompts) for turn in turns), reward=reward,
        reward_parts=dict(parts), failure=failure, ended=ended, own_reward=own_reward,
    )  # fmt: skip


def _turn(row: Sequence[Any], prompts: Sequence[tuple[int, ...]]) -> Turn:
    place, tokens, logprobs, version, finish, text, version_end, *more = row
    (calls,) = more or ((),)
    return Turn(
        prompts[place], tuple(_ints(tokens)), tuple(map(float, logprobs)), version, finish_reason=finish, text=text,
        version_end=version_end, calls=tuple(_call(call) for call in calls),
    )  # fmt: skip


def _call(row: Sequence[Any]) -> ToolCall:
    if any(not isinstance(value, str) for value in row):
        raise ValueError("a tool call holds something that is not text")
    return ToolCall(*row)


def _ints(values: Sequence[Any]) -> Sequence[int]:
    if any(type(value) is not int for value in values):
        raise ValueError("a token is not a whole number")
    return values


def _refused(why: str) -> StateError:
    return StateError(
        f"a group in the journal cannot be read: {why}"[:600], "a step repeated from it would not be the same step",
        "use the version that wrote it, with the tasks of the run",
    )  # fmt: skip

"""Scored groups, and which of them make up which batch: on the disk before the step that uses them.

Owns       `journal/batches_N.journal`, one file for the batches after step N, a new one at every checkpoint.
Promises   a group that `deliver` returned from is there after any crash, and so is a batch that `compose` returned
           from, whole; files go only when every step in them is behind two good checkpoints and no group in them waits
           or is part of a later batch. Any thread may ask.
Never      holds two batches for one step, or changes one.

    deliver(groups) --> [group][group] ... compose(step, items) --> [batch: where its groups are]
                                                   find(step), load(step): the same step once more

A group is delivered as soon as it is graded. Where the batch is known already, the group's seat in it is kept beside
it (`seated`), so that a batch that was interrupted goes on with the same groups in the same places.
Runs of older versions hold batches as [group][group]...[batch], written at once; they are read as before.

Read next: `files.py` for the journal's file, `ledger.py` for the visits.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from surefoot.errors import ConfigError, InvariantError, StateError
from surefoot.records import Group, Rollout, Task, ToolCall, Turn
from surefoot.storage.files import Journal, failpoint
from surefoot.storage.ledger import Visit, count, read_visit
from surefoot.system.files import storage_error, sync_folder

# -- A scored group as one journal record, and back, without losing a bit -------------------------
# Owns       the record's form: prompts once per group, every float as the shortest text that reads back the same.
# Promises   `read_group(group_record(g), g.task) == g`; anything else in a record is a `StateError`.
# Wall times stand apart from the rows (`clock`): they come back too, and no two runs are compared by them.
# Never      keeps the task itself: it comes from the task set, whose fingerprint the journal holds.


GROUP = "group"


def group_record(group: Group) -> dict[str, Any]:
    """One group as JSON data."""
    prompts: dict[tuple[int, ...], int] = {}
    rollouts = [_rollout_row(rollout, prompts) for rollout in group.rollouts]
    return {
        "event": GROUP, "task": group.task.id, "group": group.id, "prompts": [list(p) for p in prompts],
        "rollouts": rollouts,
    } | _clock(group)  # fmt: skip


def read_group(record: Mapping[str, Any], tasks: Mapping[str, Task]) -> Group:
    """Back from a record; a task that is not among `tasks`, or a record of another form, is a `StateError`."""
    try:
        if record["event"] != GROUP or record["task"] not in tasks:
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


# -- Scored groups, and which of them make up which batch: on the disk before the step that uses them


BATCH = "batch"
GIVEN_UP = "given_up"
NAME = re.compile(r"batches_(0|[1-9][0-9]{0,14})\.journal")


class RecordLocation(NamedTuple):
    """Where a record lies: the file's number, and the record's in it."""

    segment: int
    number: int


class BatchPosition(NamedTuple):
    """Where a group belongs: the first step of its batch, and its position in it."""

    step: int
    position: int


class JournaledBatch(NamedTuple):
    """Where a batch lies, and whom it is made of."""

    segment: int
    items: tuple[Visit, ...]
    places: tuple[RecordLocation, ...]
    """Of its groups, in order; they may lie in earlier files than the batch."""


class BatchLog:
    """Every batch that may have to be repeated, by its first step."""

    def __init__(self, folder: Path) -> None:
        """Open what is there: the last file for appending, the others for reading. Damage is a `StateError`."""
        self.folder = folder
        self._segments: dict[int, Journal] = {}
        self._kept: dict[int, JournaledBatch] = {}
        self._delivered: dict[Visit, RecordLocation] = {}
        """Groups that no batch has yet."""
        self._positions: dict[Visit, BatchPosition] = {}
        """Of those, the ones whose batch is known."""
        self._lock = threading.RLock()
        found = sorted(int(match[1]) for path in folder.iterdir() if (match := NAME.fullmatch(path.name)))
        try:
            for number in found:
                self._segments[number] = Journal.open(self._path(number), readonly=number != found[-1])
                self._read(number)
        except BaseException:
            self.close()
            raise

    def deliver(
        self, groups: Mapping[Visit, Group], seats: Mapping[Visit, BatchPosition] = MappingProxyType({})
    ) -> None:
        """Keep groups that no batch has yet; durable when this returns, with one sync for all of them.

        Args:
            seats: where in which batch they belong, if that is known.
        """
        if wrong := [(item, group) for item, group in groups.items() if item.task != group.task.id]:
            raise InvariantError(
                f"{wrong[0][0]} was delivered with a group of {wrong[0][1].task.id}",
                "a batch is its items' groups",
                "pass both",
            )
        records = [
            group_record(group) | {"item": list(item)} | ({"seat": list(seats[item])} if item in seats else {})
            for item, group in groups.items()
        ]
        with self._lock:
            journal, segment = self._current()
            failpoint("batches.before_append")
            numbers = journal.append_all(records)
            failpoint("batches.after_append")
            self.release(list(groups))  # a later delivery counts, and counts as later
            self._delivered.update((item, RecordLocation(segment, n)) for item, n in zip(groups, numbers, strict=True))
            self._positions.update((item, seats[item]) for item in groups if item in seats)

    def compose(self, step: int, items: Sequence[Visit]) -> None:
        """Keep the batch that begins at `step`, made of groups that were delivered; durable when this returns."""
        with self._lock:
            self._refuse_second(step)
            if missing := [item for item in items if item not in self._delivered]:
                raise InvariantError(
                    f"step {step}: {missing[0]} was never delivered", "its group is not on the disk", "deliver it first"
                )
            places = tuple(self._delivered[item] for item in items)
            batch = {
                "event": BATCH, "step": step, "items": [list(item) for item in items],
                "places": [list(place) for place in places],
            }  # fmt: skip
            journal, segment = self._current()
            failpoint("batches.before_compose")
            journal.append(batch)
            failpoint("batches.after_compose")
            self._kept[step] = JournaledBatch(segment, tuple(items), places)
            self.release(items)

    def delivered(self) -> list[Visit]:
        """Whose groups are on the disk and in no batch yet, in the order of delivery."""
        with self._lock:
            return list(self._delivered)

    def read_delivered(self, items: Sequence[Visit], tasks: Mapping[str, Task]) -> list[Group]:
        """Groups that no batch has yet, as they were."""
        with self._lock:
            return self._load([self._delivered[item] for item in items], tasks)

    def seated(self, step: int) -> dict[int, Visit]:
        """Whose groups are on the disk for the batch of `step`, by position, while that batch is not composed."""
        with self._lock:
            return {seat.position: item for item, seat in self._positions.items() if seat.step == step}

    def release(self, items: Sequence[Visit]) -> None:
        """No batch will be composed of these groups any more: they are part of one, too old, or given up."""
        with self._lock:
            for item in items:
                self._delivered.pop(item, None)
                self._positions.pop(item, None)

    def give_up(self, items: Sequence[Visit]) -> None:
        """Delivered groups that are to be played again: a resume does not find them. Durable when this returns."""
        with self._lock:
            if given_up := [item for item in items if item in self._delivered]:
                journal, _ = self._current()
                journal.append({"event": GIVEN_UP, "items": [list(item) for item in given_up]})
                self.release(given_up)

    def find(self, step: int) -> JournaledBatch | None:
        """The batch that begins at `step`, if it was kept."""
        return self._kept.get(step)

    def load(self, step: int, tasks: Mapping[str, Task]) -> list[Group]:
        """Its groups, as they were."""
        with self._lock:
            return self._load(self._kept[step].places, tasks)

    def steps(self) -> list[int]:
        """First steps of every batch that is kept."""
        return sorted(self._kept)

    @property
    def steps_or_groups(self) -> bool:
        """Whether anything was ever played and is still kept here: a batch, or a part of one."""
        return bool(self._kept or self._delivered)

    @property
    def torn_bytes(self) -> int:
        """What an interrupted append had left, and opening cut off."""
        return sum(journal.torn_bytes for journal in self._segments.values())

    def roll(self, step: int) -> None:
        """A checkpoint of `step` is complete: later batches go to a file of their own."""
        with self._lock:
            if step in self._segments or not self._segments:
                return
            journal = Journal.create(self._path(step))
            failpoint("batches.after_roll")
            former = self._segments[max(self._segments)]
            self._segments[step] = journal
            if not former.readonly:
                former.close()
                self._segments[_number(former)] = Journal.open(Path(former.name), readonly=True)

    def behind(self, step: int) -> list[int]:
        """Files that hold nothing that is needed after `step`, by their numbers; the newest is never among them."""
        with self._lock:
            old = {number for number, following in pairwise(sorted(self._segments)) if following <= step}
            # A run that repeats journaled steps saves at steps that lie before batches of the same file.
            later = [kept for first, kept in self._kept.items() if first > step]
            places = [place for kept in later for place in kept.places] + list(self._delivered.values())
            return sorted(old - {kept.segment for kept in later} - {place.segment for place in places})

    def forget(self, step: int) -> list[str]:
        """Take away files that hold nothing that is needed after `step`; the newest stays. Returns their names."""
        with self._lock:
            return [self._forget(number) for number in self.behind(step)]

    def _forget(self, number: int) -> str:
        path = self._path(number)
        self._segments.pop(number).close()
        self._kept = {s: k for s, k in self._kept.items() if number not in (k.segment, *(p.segment for p in k.places))}
        try:
            failpoint("batches.before_forget")
            path.unlink()
            sync_folder(self.folder)
        except OSError as error:
            raise storage_error(path, error) from error
        return path.name

    def close(self) -> None:
        """Make everything durable and let go."""
        for journal in self._segments.values():
            journal.close()

    def _path(self, number: int) -> Path:
        return self.folder / f"batches_{number}.journal"

    def _current(self) -> tuple[Journal, int]:
        if not self._segments:
            self._segments[0] = Journal.create(self._path(0))
        return self._segments[max(self._segments)], max(self._segments)

    def _refuse_second(self, step: int) -> None:
        if step in self._kept:
            raise InvariantError(
                f"step {step} has a batch already", "its step would be repeated from another one", "ask find() first"
            )

    def _load(self, places: Sequence[RecordLocation], tasks: Mapping[str, Task]) -> list[Group]:
        """Each file is read once, from the first record that is wanted to the last."""
        found: dict[RecordLocation, Group] = {}
        for segment in {place.segment for place in places}:
            wanted = {place.number for place in places if place.segment == segment}
            for entry in self._segments[segment].records(after=min(wanted) - 1):
                if entry.number in wanted:
                    found[RecordLocation(segment, entry.number)] = read_group(_bare(entry.record), tasks)
                if entry.number >= max(wanted):
                    break
        return [found[place] for place in places]

    def _read(self, number: int) -> None:
        """Index one file; groups without an item and without a batch behind them are what a crash left of a batch."""
        waiting: list[tuple[int, str]] = []
        for entry, record in self._records(number):
            if record["event"] == GROUP and "item" in record:
                self._read_delivered(number, entry, record)
            elif record["event"] == GROUP:
                waiting.append((entry, record["task"]))
            elif record["event"] == GIVEN_UP:
                self.release([read_visit(row) for row in record["items"]])
            else:
                self._read_batch(number, entry, record, waiting)
                waiting = []

    def _read_delivered(self, number: int, entry: int, record: Mapping[str, Any]) -> None:
        item = read_visit(record["item"])
        if item.task != record["task"]:
            raise self._odd(number, f"record {entry} is a group of {record['task']!r} under the name {item}")
        self.release([item])
        self._delivered[item] = RecordLocation(number, entry)
        if "seat" in record:
            self._positions[item] = _position(record["seat"])

    def _read_batch(self, number: int, entry: int, record: Mapping[str, Any], before: list[tuple[int, str]]) -> None:
        step, items = record["step"], tuple(read_visit(row) for row in record["items"])
        if "places" in record:
            places = tuple(_place(row) for row in record["places"])
            fits = places == tuple(map(self._delivered.get, items))
            self.release(items)
            if any(place.segment not in self._segments for place in places):
                return  # as old as the file that is gone: nobody needs it any more
        else:
            mine = before[len(before) - len(items) :]
            places = tuple(RecordLocation(number, group) for group, _ in mine)
            fits = [task for _, task in mine] == [item.task for item in items]
        if type(step) is not int or step in self._kept or not fits:
            raise self._odd(number, f"record {entry} is no batch that may follow (step {step!r})")
        self._kept[step] = JournaledBatch(number, items, places)

    def _records(self, number: int) -> Iterator[tuple[int, dict[str, Any]]]:
        for entry in self._segments[number].records():
            keys, event = set(entry.record), entry.record.get("event")
            is_group = keys >= {"event", "task"} and event == GROUP
            is_batch = keys - {"places"} == {"event", "step", "items"} and event == BATCH
            is_given_up = keys == {"event", "items"} and event == GIVEN_UP
            if not is_group and not is_batch and not is_given_up:
                raise self._odd(number, f"record {entry.number} is neither a group nor a batch")
            yield entry.number, entry.record

    def _odd(self, number: int, what: str) -> StateError:
        return StateError(
            f"{self._path(number)}: {what}", "the same step could not be done once more", "bring it back from a copy"
        )


def _number(journal: Journal) -> int:
    match = NAME.fullmatch(Path(journal.name).name)
    assert match is not None, "a segment is named by this class"
    return int(match[1])


def _place(row: object) -> RecordLocation:
    match row:
        case [segment, number]:
            return RecordLocation(count(segment), count(number))
        case _:
            raise StateError(
                f"a batch names a place {str(row)[:60]!r}", "its groups could not be found", "bring it back from a copy"
            )


def _position(row: object) -> BatchPosition:
    match row:
        case [step, position]:
            return BatchPosition(count(step), count(position))
        case _:
            raise StateError(
                f"a group names a seat {str(row)[:60]!r}", "its batch could not go on", "bring it back from a copy"
            )


def _bare(record: Mapping[str, Any]) -> dict[str, Any]:
    """The group alone, without the item that it was delivered for and its seat."""
    return {name: value for name, value in record.items() if name not in ("item", "seat")}

"""A malformed record cannot be constructed, and what was recorded is what was sampled."""

from __future__ import annotations

import dataclasses
import doctest
import math
import pickle
import subprocess
import sys
from typing import Any

import pytest

from surefoot import records
from surefoot.errors import EngineError, ShapeError
from surefoot.records import EngineOutput, Group, Rollout, Task, TrainSample, Turn, Verdict, group_from_outputs

TURN = Turn((1, 5), (9, 2), (-0.1, -0.2), version=3)
TASK = Task(id="a", prompt="?", columns={"answer": "42"})
ROLLOUT = Rollout("a", "g", 0, (TURN,), reward=1.0)
SAMPLE = TrainSample("a", 3, "g", (1, 5), (9, 2), (True, True), (-0.1, -0.2), reward=1.0, advantage=0.5)
GROUP = Group(TASK, "g", (ROLLOUT,))


def test_the_examples_in_the_docstrings_hold() -> None:
    results = doctest.testmod(records)
    assert results.attempted >= 8
    assert results.failed == 0


@pytest.mark.parametrize("record", [TASK, TURN, ROLLOUT, GROUP, SAMPLE], ids=lambda r: type(r).__name__)
def test_records_are_frozen_and_survive_pickling(record: Any) -> None:
    assert pickle.loads(pickle.dumps(record)) == record
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(record, dataclasses.fields(record)[0].name, "other")


def test_clocks_are_kept_and_no_two_rollouts_are_told_apart_by_them() -> None:
    timed = dataclasses.replace(ROLLOUT, seconds=1.5, grading_seconds={"f": 0.25})
    assert timed == ROLLOUT
    assert timed.graded(0.0, {}, None, {"f": 2.0}).seconds == 1.5


def test_completion_ids_hold_everything_behind_the_first_prompt() -> None:
    later = Turn((1, 5, 9, 2, 7, 7), (4, 2), (-0.1, -0.2), version=3)
    assert ROLLOUT.completion_ids == (9, 2)
    assert dataclasses.replace(ROLLOUT, turns=(TURN, later)).completion_ids == (9, 2, 7, 7, 4, 2)


def test_records_come_without_torch() -> None:
    code = "import sys, surefoot.records, surefoot.protocols; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# -- refusals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Task(id="", prompt="?"), "empty id"),
        (lambda: Turn((1,), (9, 2), (-0.1,), 0), "2 tokens but 1 logprobs"),
        (lambda: Turn((), (9,), (-0.1,), 0), "0 prompt and 1 completion"),
        (lambda: Turn((1,), (), (), 0), "1 prompt and 0 completion"),
        (lambda: Turn((1,), (9,), (-0.1,), -1), "version is -1"),
        (lambda: Rollout("a", "g", 0, ()), "no turns and no failure"),
        (lambda: Rollout("a", "g", 0, "abc"), "turns is a str"),
        (lambda: Rollout("a", "g", 0, ({"a": 1},)), "turns is a tuple of dict"),
        (lambda: Rollout("a", "g", 0, (TURN, None)), "turns is a tuple of NoneType, Turn"),
        (lambda: Rollout("a", "g", 0, [TURN]), "turns is a list"),
        (lambda: Rollout("a", "g", 0, None, failure="down"), "turns is a NoneType"),
        (lambda: Rollout("a", "g", 0, (TURN,), seconds=-1.0), "seconds"),
        (lambda: Rollout("a", "g", 0, (TURN,), grading_seconds={"f": math.nan}), "seconds"),
        (lambda: Rollout("a", "g", 0, (TURN,), reward=math.nan), "reward nan"),
        (lambda: Rollout("a", "g", 0, (TURN,), reward=-math.inf), "reward -inf"),
        (lambda: Group(TASK, "g", ()), "is empty"),
        (lambda: Group(TASK, "h", (ROLLOUT,)), "holds strangers: task=a/group=g/rollout=0"),
        (lambda: Group(Task(id="b", prompt="?"), "g", (ROLLOUT,)), "holds strangers"),
        (lambda: dataclasses.replace(SAMPLE, sampled=(True,)), "sampled has 1 entries for 2 tokens"),
        (lambda: dataclasses.replace(SAMPLE, logprobs=(0.0,) * 3), "logprobs has 3 entries for 2 tokens"),
        (lambda: dataclasses.replace(SAMPLE, ref_logprobs=()), "ref_logprobs has 0 entries for 2 tokens"),
        (lambda: dataclasses.replace(SAMPLE, item_id=""), "sample ''"),
        (lambda: dataclasses.replace(SAMPLE, prompt_ids=()), "0 prompt and 2 completion"),
        (lambda: TrainSample("a", 0, "g", (1,), (), (), (), reward=0.0), "1 prompt and 0 completion"),
        (lambda: dataclasses.replace(SAMPLE, trainer_version=-1), "trainer_version is -1"),
        (lambda: dataclasses.replace(SAMPLE, reward=math.inf), "reward inf"),
        (lambda: dataclasses.replace(SAMPLE, advantage=math.nan), "advantage nan"),
    ],
)
def test_a_malformed_record_cannot_be_made(make: Any, words: str) -> None:
    with pytest.raises(ShapeError, match=words):
        make()


def test_a_rollout_has_a_reward_or_a_failure_and_never_both() -> None:
    """Whoever reads only the reward would train on it, whoever reads only the failure would count it as lost."""
    with pytest.raises(ShapeError):
        Rollout("a", "g", 0, (TURN,), reward=1.0, failure="timeout")


# -- what they say ------------------------------------------------------------------------------------


def test_a_text_prompt_is_one_user_message_and_messages_stay_as_they_are() -> None:
    assert TASK.messages() == [{"role": "user", "content": "?"}]
    chat = ({"role": "system", "content": "s"}, {"role": "user", "content": "u"})
    assert Task(id="a", prompt=chat).messages() == list(chat)


def test_a_rollout_adds_up_its_turns() -> None:
    later = Turn((1, 5, 9, 2, 7), (8,), (-0.3,), version=2, finish_reason="length", text="y")
    rollout = Rollout("a", "g", 4, (dataclasses.replace(TURN, text="x", finish_reason="stop"), later))
    assert (rollout.text, rollout.version, rollout.sampled_tokens, rollout.finish_reason) == ("xy", 2, 3, "length")
    assert str(rollout) == "task=a/group=g/rollout=4"
    assert Rollout("a", "g", 0, (), failure="x").finish_reason == "unknown"


@pytest.mark.parametrize(("end", "mixed"), [(None, False), (3, False), (4, True)])
def test_a_turn_is_mixed_when_the_weights_changed_under_it(end: int | None, mixed: bool) -> None:
    assert dataclasses.replace(TURN, version_end=end).mixed is mixed


def test_grading_changes_the_verdict_and_nothing_else() -> None:
    graded = dataclasses.replace(ROLLOUT, reward=None).graded(0.5, {"x": 0.5}, None)
    assert graded == dataclasses.replace(ROLLOUT, reward=0.5, reward_parts={"x": 0.5})


def test_there_are_five_verdicts_and_they_print_as_themselves() -> None:
    assert [str(v) for v in Verdict] == ["PASS", "FAIL", "INCOMPLETE", "ERROR", "SKIP"]


# -- merging ------------------------------------------------------------------------------------------


def chunk(name: str, n: int, prompt: tuple[int, ...] = (1, 5), task: str = "a") -> Group:
    turn = dataclasses.replace(TURN, prompt_ids=prompt)
    return Group(
        Task(id=task, prompt="?"), name, tuple(Rollout(task, name, i, (turn,), reward=float(i)) for i in range(n))
    )


def test_chunks_of_one_visit_become_one_group_numbered_in_order() -> None:
    merged = Group.merge([chunk("g", 2), chunk("h", 3)])
    assert merged.id == "g"
    assert [(r.group, r.index, r.reward) for r in merged.rollouts] == [
        ("g", i, x) for i, x in enumerate((0.0, 1.0, 0.0, 1.0, 2.0))
    ]


@pytest.mark.parametrize(
    "chunks",
    [[], [chunk("g", 2), chunk("h", 2, prompt=(1, 6))], [chunk("g", 2), chunk("h", 2, task="b")]],
    ids=["none", "prompt", "task"],
)
def test_strangers_are_not_merged(chunks: list[Group]) -> None:
    with pytest.raises(ShapeError, match="merge got"):
        Group.merge(chunks)


# -- from an engine's answer ---------------------------------------------------------------------------


def output(**changes: Any) -> EngineOutput:
    """The first entry of each map is the most likely token, not the chosen one."""
    good = EngineOutput([9, 2], "nine", [{4: -0.1, 9: -3.0}, {2: -0.2, 7: -1.0}], "stop")
    return dataclasses.replace(good, **changes)


def test_the_recorded_logprob_is_the_sampled_tokens_own() -> None:
    group = group_from_outputs(TASK, "g", [1, 5], [output(), output(finish_reason=None)], version=3)
    assert group.rollouts[0].turns[0].logprobs == (-3.0, -0.2)
    assert [r.turns[0].finish_reason for r in group.rollouts] == ["stop", "unknown"]
    assert [(r.index, r.reward, r.version, r.text) for r in group.rollouts] == [
        (0, None, 3, "nine"),
        (1, None, 3, "nine"),
    ]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"logprob_maps": None}, "task a, output 1: no logprobs for 2 tokens"),
        ({"logprob_maps": [{9: -3.0}]}, "1 logprobs for 2 tokens"),
        ({"logprob_maps": [{9: -3.0}, {7: -1.0}]}, "position 1: sampled token 2 is missing"),
    ],
)
def test_an_answer_with_holes_is_refused_not_filled(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(EngineError, match=words):
        group_from_outputs(TASK, "g", [1, 5], [output(), output(**changes)], version=3)


def test_an_answer_without_outputs_is_refused() -> None:
    with pytest.raises(EngineError, match="no outputs"):
        group_from_outputs(TASK, "g", [1, 5], [], version=3)


def test_an_output_without_tokens_is_refused() -> None:
    with pytest.raises(ShapeError, match="0 completion tokens"):
        group_from_outputs(TASK, "g", [1, 5], [output(token_ids=[], logprob_maps=[])], version=3)

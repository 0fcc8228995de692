"""Turns with tools: history only grows, tools' words are never trained on, a failure stays where it happened."""

from __future__ import annotations

import dataclasses
import threading
import time
from concurrent.futures import Future
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tool_kit import SAMPLING, TASK, Box, Graders, Kit, call, codec, play, tokenizer

from surefoot.errors import EngineError, InvariantError, ToolError, ToolFailedError
from surefoot.guards.invariants import check_groups, check_samples
from surefoot.guards.reward_values import RewardValue
from surefoot.learner.chat import structural_ids
from surefoot.learner.samples import to_sample, to_samples
from surefoot.protocols import Request, ToolAnswer
from surefoot.records import Group, Rollout
from surefoot.rewards import grading
from surefoot.rewards.grading import GradingRules
from surefoot.rewards.pool import RewardPool
from surefoot.runtime import rollout as tool_rounds
from surefoot.storage.batches import group_record, read_group
from surefoot.system import signals
from surefoot.system.signals import StopRequested
from surefoot.tools.session import ToolLimits


def one_call(request: Request, context: str) -> str:
    return "42" if "<|tool|>" in context else call(x="6*7")


def calculator(rollout: str) -> Box:
    return Box(lambda name, arguments: "42")


def rollouts_of(played: list) -> list[Rollout]:  # type: ignore[type-arg]
    return [rollout for each in played for rollout in each.group.rollouts]


def test_a_rollout_calls_reads_and_answers() -> None:
    kit = Kit(calculator)
    for rollout in rollouts_of(play(one_call, kit)):
        first, second = rollout.turns
        assert [(c.name, c.arguments, c.answer, c.outcome) for c in first.calls] == [
            ("tool", '{"x": "6*7"}', "42", "ok")
        ]
        assert second.prompt_ids[: len(first.prompt_ids) + len(first.completion_ids)] == (
            *first.prompt_ids, *first.completion_ids,
        )  # fmt: skip
        between = second.prompt_ids[len(first.prompt_ids) + len(first.completion_ids) :]
        assert tokenizer().decode(between) == "<|tool|>42<|end|><|assistant|>"
        assert (rollout.ended, rollout.reward, second.text) == ("answered", 1.0, "42")
    assert sorted(kit.boxes) == ["train/1/0/0", "train/1/0/1"]
    assert all(box.closed == 1 for box in kit.boxes.values())
    assert len(set(kit.seeds.values())) == 1, "siblings live in equal worlds"


def test_the_first_turn_draws_from_the_stream_of_a_rollout_without_tools() -> None:
    from surefoot.runtime.requests import derive_seed

    seen: list[Request] = []

    def says(request: Request, context: str) -> str:
        seen.append(request)
        return one_call(request, context)

    play(says, Kit(calculator))
    assert seen[0].seed == derive_seed(0, "train", 1, "t", 0)
    assert len({request.seed for request in seen}) == 4, "every turn of every sibling has a stream of its own"


# -- masks ----------------------------------------------------------------------------

TEXTS = st.text(st.characters(codec="utf-8"), max_size=60)
SPECIAL = [
    "<|end|>",
    "<|assistant|>",
    "<|user|>",
    "<<|end|>|end|>",
    "<|pad|>",
    "<|en",
    "d|>",
    "\x00",
    "\u202e",
    "</tool_call>",
]
HOSTILE = st.lists(st.one_of(TEXTS, st.sampled_from(SPECIAL)), max_size=5).map("".join)


@settings(max_examples=60, deadline=None)
@given(answers=st.lists(HOSTILE, min_size=1, max_size=6), at_once=st.integers(1, 3), limit=st.integers(3, 50))
def test_masks_are_zero_on_every_tool_token_and_no_structure_comes_from_a_tool(
    answers: list[str], at_once: int, limit: int
) -> None:
    left = iter(answers * 12)

    def says(request: Request, context: str) -> str:
        return call() * at_once if context.count("<|tool|>") < at_once * 2 else "done"

    (played,) = play(says, Kit(lambda rollout: Box(lambda *_: next(left))), reply_tokens=limit)
    known = codec()
    check_groups([played.group], vocab_size=known.vocab_size, stop_ids=known.stop_ids)
    samples = to_samples([played.group], scale="group")
    check_samples(samples, [played.group])
    structure = structural_ids(tokenizer())
    for rollout in played.group.rollouts:
        sample = to_sample(rollout, played.group)
        own = [t for turn in rollout.turns for t in turn.completion_ids]
        assert [t for t, mine in zip(sample.completion_ids, sample.sampled, strict=True) if mine] == own
        assert sum(sample.sampled) == len(own) < len(sample.completion_ids)
        foreign = [t for t, mine in zip(sample.completion_ids, sample.sampled, strict=True) if not mine]
        frame = [*tokenizer()("<|tool|><|end|>").input_ids * at_once, *tokenizer()("<|assistant|>").input_ids] * 2
        assert sorted(t for t in foreign if t in structure) == sorted(frame), "a tool's text became structure"
        assert len(foreign) <= 2 * (at_once * (limit + 2) + 1)
        assert rollout.rerendered_tokens == 0


def test_planted_tool_tokens_in_the_mask_are_caught() -> None:
    (played,) = play(one_call, Kit(calculator))
    (sample, *_) = to_samples([played.group], scale="group")
    trained = dataclasses.replace(sample, sampled=(True,) * len(sample.sampled))
    with pytest.raises(InvariantError, match="would train"):
        check_samples([trained, *to_samples([played.group], scale="group")[1:]], [played.group])


def test_planted_rewritten_history_is_caught_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = tool_rounds.ToolRollouts._answer

    def rewrite(self, attempt):  # type: ignore[no-untyped-def]
        honest(self, attempt)
        attempt.prompt_ids = (attempt.prompt_ids[0] + 1, *attempt.prompt_ids[1:])

    monkeypatch.setattr(tool_rounds.ToolRollouts, "_answer", rewrite)
    (played,) = play(one_call, Kit(calculator))
    known = codec()
    assert [rollout.rerendered_tokens for rollout in played.group.rollouts] == [1, 1]
    with pytest.raises(InvariantError, match="rewrote its history"):
        check_groups([played.group], vocab_size=known.vocab_size, stop_ids=known.stop_ids)


# -- what ends a rollout ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "says", "ended", "turns"),
    [
        (ToolLimits(max_turns=3), lambda r, c: call(), "max_turns", 3),
        (ToolLimits(max_turns=9, max_calls=4), lambda r, c: call() * 2, "max_calls", 3),
        (ToolLimits(max_turns=3), lambda r, c: "no", "answered", 1),
        (ToolLimits(max_turns=3), lambda r, c: "so the answer is so " * 100 + call(), "repetition", 1),
        (ToolLimits(max_turns=3), lambda r, c: "x" * 300, "length", 1),
    ],
)
def test_every_budget_ends_a_rollout_by_name(limits: ToolLimits, says, ended: str, turns: int) -> None:  # type: ignore[no-untyped-def]
    sampling = dataclasses.replace(SAMPLING, max_completion_length=2400 if ended == "repetition" else 250)
    kit = Kit(calculator)
    for rollout in rollouts_of(play(says, kit, limits=limits, sampling=sampling)):
        assert (rollout.ended, len(rollout.turns), rollout.failure) == (ended, turns, None)
        assert rollout.reward == 1.0, "the budget itself costs nothing; what a loop costs is shown below"
        assert (rollout.seconds or 0) > 0
        if ended.startswith("max"):
            assert {c.outcome for c in rollout.turns[-1].calls} == {"refused"}
    asked = {len(box.asked) for box in kit.boxes.values()}
    assert asked == {{"max_turns": 2, "max_calls": 4}.get(ended, 0)}


LOOPS = {"repetition": "so the answer is so " * 100, "length": "so the answer is so " * 300}
"""By how the rollout ends: a loop that stopped by itself, and one that only the limit stopped."""


@pytest.mark.parametrize("ended", LOOPS)
@pytest.mark.parametrize(
    ("rule", "reward", "failure", "parts"),
    [
        ("penalise", 0.75, None, {"rule": 1.0, "repetition-cost": -0.25}),
        ("invalid", None, "repetition", {"rule": 1.0}),
        ("off", 1.0, None, {"rule": 1.0}),
    ],
)
def test_a_looping_turn_is_penalised_or_invalid_as_the_key_says(
    ended: str, rule: Any, reward: float | None, failure: str | None, parts: dict[str, float]
) -> None:
    """Through the graders of a run; a sibling that does not loop is left alone."""
    graders = graders_of(GradingRules(repetition=rule, repetition_cost=0.25))
    sampling = dataclasses.replace(SAMPLING, max_completion_length=2400)
    limits = ToolLimits(max_turns=3, stop_loops=rule != "off")

    def says(request: Request, context: str) -> str:
        return LOOPS[ended] if request.id.endswith("/1") else "42"

    (played,) = play(says, Kit(calculator), limits=limits, sampling=sampling, graders=graders)
    good, looped = played.group.rollouts
    assert (good.reward, good.failure, good.reward_parts) == (1.0, None, {"rule": 1.0})
    assert (looped.reward, looped.failure, looped.reward_parts) == (reward, failure, parts)
    assert looped.ended == ("answered" if (rule, ended) == ("off", "repetition") else ended)
    assert len(looped.turns) == 1, "the turn stays on the record"
    assert read_group(group_record(played.group), {TASK.id: TASK}) == played.group


def test_planted_loops_that_nobody_looks_for_earn_full_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Teeth: with the look cut out, the loop is paid like an answer, and the test above would be red."""
    monkeypatch.setattr(grading, "after_repetition", lambda grade, rollout, rules: grade)
    graders = graders_of(GradingRules(repetition="penalise"))
    sampling = dataclasses.replace(SAMPLING, max_completion_length=2400)
    (played,) = play(lambda r, c: LOOPS["repetition"], Kit(calculator), sampling=sampling, graders=graders)
    assert [rollout.reward for rollout in played.group.rollouts] == [1.0, 1.0]


def graders_of(rules: GradingRules) -> Any:
    """The environment of a run, on a pool that finds everything right."""

    class Pool(RewardPool):
        def score(self, jobs: Any, tell: Any = None) -> list[dict[str, RewardValue]]:
            return [{"rule": RewardValue(1.0, None)} for job in jobs for _ in range(job.size)]

    return grading.SingleTurnEnvironment(Pool({"rule": print}), {"rule": 1.0}, rules=rules)


def test_a_full_context_ends_a_rollout_with_the_turns_it_has() -> None:
    sampling = dataclasses.replace(SAMPLING, max_width=160)
    for rollout in rollouts_of(
        play(one_call, Kit(lambda r: Box(lambda *_: "7" * 90)), sampling=sampling, reply_tokens=90)
    ):
        assert (rollout.ended, len(rollout.turns)) == ("context", 1)


# -- what is answered, and what fails ---------------------------------------------------


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (call("toll"), "there is no tool 'toll'; there is tool"),
        ("<tool_call>{}</tool_call>", "keys []"),
        ("<tool_call>nonsense</tool_call>", "not JSON"),
        ('<tool_call>{"name": "tool", "arguments": {}}', "not closed"),
        ('<tool_call>{"name": "tool", "arguments": [1]}</tool_call>', "arguments are a list"),
        ('<tool_call>{"name": "tool", "name": "x", "arguments": {}}</tool_call>', "more than once"),
        ("<tool_call>" + "[" * 70 + "</tool_call>", "nested"),
    ],
)
def test_a_call_that_cannot_be_made_is_answered_and_counted(said: str, told: str) -> None:
    kit = Kit(calculator)
    sampling = dataclasses.replace(SAMPLING, max_completion_length=2500, max_width=9000)
    limits = ToolLimits(max_turns=3)
    played = play(
        lambda r, c: "ok" if "<|tool|>" in c else said, kit, limits=limits, sampling=sampling, reply_tokens=200
    )
    for rollout in rollouts_of(played):
        (refused,) = rollout.turns[0].calls
        assert told in refused.answer
        assert (refused.outcome, rollout.ended, len(rollout.turns)) == ("refused", "answered", 2)
    assert all(box.asked == [] for box in kit.boxes.values())


def test_a_thought_is_no_call() -> None:
    kit = Kit(calculator)
    for rollout in rollouts_of(play(lambda r, c: f"<think>{call()}</think>42", kit)):
        assert (rollout.ended, rollout.turns[0].calls) == ("answered", ())


def fails_for(index: str, reason: str = "tool_crashed") -> Kit:
    def make(rollout: str) -> Box:
        def answer(name: str, arguments: object) -> str:
            if rollout.endswith(index):
                raise ToolFailedError("the server is gone", "it crashed", "restart it", reason)
            return "42"

        return Box(answer)

    return Kit(make)


def test_a_failed_tool_costs_its_own_rollout_under_one_reason_and_no_other() -> None:
    kit = fails_for("/1")
    good, lost = rollouts_of(play(one_call, kit))
    assert (good.reward, good.failure, len(good.turns)) == (1.0, None, 2)
    assert (lost.reward, lost.failure) == (None, "tool_crashed")
    assert len(lost.turns) == 1, "what it had said stays on record"
    assert all(box.closed == 1 for box in kit.boxes.values())


def test_a_world_that_does_not_open_is_asked_for_again_and_then_given_up() -> None:
    tries: dict[str, int] = {}

    def make(rollout: str) -> Box:
        tries[rollout] = tries.get(rollout, 0) + 1
        if tries[rollout] < (3 if rollout.endswith("/0") else 99):
            raise ToolFailedError("no server", "none started", "wait", "tool_unavailable")
        return calculator(rollout)

    good, lost = rollouts_of(play(one_call, Kit(make)))
    assert (good.reward, tries["train/1/0/0"]) == (1.0, 3)
    assert (lost.failure, lost.turns, tries["train/1/0/1"]) == ("tool_unavailable", (), 3)


def test_an_engine_that_fails_is_nobodys_words_and_tools_are_let_go() -> None:
    kit = Kit(calculator)

    def says(request: Request, context: str) -> str:
        if "<|tool|>" in context:
            raise EngineError("the engine died", "no answer", "look at its log")
        return call()

    with pytest.raises(EngineError, match="died"):
        play(says, kit)
    assert all(box.closed == 1 for box in kit.boxes.values())


def test_a_changed_tool_list_stops_everything() -> None:
    def make(rollout: str) -> Box:
        def answer(name: str, arguments: object) -> str:
            raise ToolError("clock offers other tools", "they were pinned", "pin again")

        return Box(answer)

    kit = Kit(make)
    with pytest.raises(ToolError, match="other tools"):
        play(one_call, kit)
    assert all(box.closed == 1 for box in kit.boxes.values())


# -- worlds of their own ----------------------------------------------------------------


def test_what_the_world_shows_is_in_the_prompt_and_its_reward_counts() -> None:
    kit = Kit(lambda rollout: Box(lambda *_: "42", opening=" Hint: 40 and 2.", own=0.5))
    for rollout in rollouts_of(play(one_call, kit)):
        assert "6*7= Hint: 40 and 2." in tokenizer().decode(rollout.turns[0].prompt_ids)
        assert (rollout.reward, rollout.reward_parts) == (1.5, {"rule": 1.0, "environment": 0.5})


def test_siblings_that_see_different_worlds_are_refused() -> None:
    with pytest.raises(ToolError, match="different openings"):
        play(one_call, Kit(lambda rollout: Box(lambda *_: "42", opening=rollout)))


@pytest.mark.parametrize("own", [float("nan"), float("inf")])
def test_a_world_whose_reward_is_no_number_gives_no_verdict(own: float) -> None:
    for rollout in rollouts_of(play(one_call, Kit(lambda rollout: Box(lambda *_: "42", own=own)))):
        assert (rollout.reward, rollout.failure) == (None, "own_reward_not_finite")


def test_the_same_outcome_in_two_and_in_eight_turns_earns_the_same() -> None:
    def after(turns: int):  # type: ignore[no-untyped-def]
        return lambda request, context: "42" if context.count("<|tool|>") >= turns - 1 else call()

    right = Graders(lambda rollout: float(rollout.turns[-1].text == "42"))
    totals = []
    for turns in (2, 8):
        kit = Kit(lambda rollout: Box(lambda *_: "42", own=0.25))
        (rollout, *_) = rollouts_of(play(after(turns), kit, limits=ToolLimits(max_turns=8), graders=right))
        assert len(rollout.turns) == turns
        totals.append(rollout.reward)
    assert totals[0] == totals[1] == 1.25


def test_a_group_with_tools_survives_the_journal() -> None:
    kit = fails_for("/1")
    (played,) = play(one_call, kit)
    group: Group = played.group
    assert read_group(group_record(group), {"t": TASK}) == group


def test_errors_of_a_tool_are_shown_to_the_model() -> None:
    kit = Kit(lambda rollout: Box(lambda *_: ToolAnswer("no such file", "error")))
    for rollout in rollouts_of(play(one_call, kit)):
        assert rollout.turns[0].calls[0].outcome == "error"
        assert "no such file" in tokenizer().decode(rollout.turns[1].prompt_ids)


def test_a_rollout_that_runs_out_of_time_is_given_up_and_finished_siblings_are_kept() -> None:
    now = [0.0]

    def says(request: Request, context: str) -> str:
        return "42" if request.id.startswith("train/1/0/0") else call()

    def slow(rollout: str) -> Box:
        def answer(*_: object) -> str:
            now[0] += 10.0
            return "wait"

        return Box(answer)

    limits = ToolLimits(max_turns=50, max_calls=50, rollout_timeout_s=25.0)
    kit = Kit(slow)
    done, late = rollouts_of(play(says, kit, limits=limits, clock=lambda: now[0]))
    assert (done.reward, done.ended) == (1.0, "answered")
    assert (late.reward, late.failure, len(late.turns)) == (None, "rollout_deadline", 3)
    assert all(box.closed == 1 for box in kit.boxes.values())


# -- each at its own pace ----------------------------------------------------------------


def slow_call_outlasts_all_others(patience_s: float) -> bool:
    """Two groups of four rollouts, three turns each; the first call of one is answered when all others are over.

    Returns:
        Whether they were, within `patience_s`; a rollout is over when it lets go of its tools.
    """
    others_over, in_time = threading.Event(), []

    class Counting(Box):
        def close(self) -> None:
            super().close()
            if sum(box.closed for box in kit.boxes.values()) == 7:
                others_over.set()

    def make(rollout: str) -> Box:
        def answer(name: str, arguments: object) -> str:
            if rollout == "train/1/0/2" and not in_time:
                in_time.append(others_over.wait(patience_s))
            return "42"

        return Counting(answer)

    kit = Kit(make)
    tasks = [TASK, dataclasses.replace(TASK, id="u")]
    sampling = dataclasses.replace(SAMPLING, num_generations=4)
    played = play(
        lambda r, context: "42" if context.count("<|tool|>") > 1 else call(), kit, tasks=tasks, sampling=sampling
    )
    assert {(len(r.turns), r.ended, r.reward) for r in rollouts_of(played)} == {(3, "answered", 1.0)}
    return in_time == [True]


def test_a_slow_tool_holds_its_own_rollout_and_no_other() -> None:
    assert slow_call_outlasts_all_others(patience_s=60.0)


def test_planted_rounds_make_every_rollout_wait_for_the_slowest_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Teeth: with one barrier per turn the others cannot finish before the slow tool has answered."""
    honest = tool_rounds.ToolRollouts._go_on

    def in_rounds(self: Any, attempt: Any) -> None:
        waiting = self.__dict__.setdefault("waiting", [])
        waiting.append(attempt)
        if len(waiting) == sum(each.over is None for each in self._attempts):
            self.waiting = []
            for each in waiting:
                honest(self, each)

    monkeypatch.setattr(tool_rounds.ToolRollouts, "_go_on", in_rounds)
    assert not slow_call_outlasts_all_others(patience_s=0.2)


def test_a_rollout_that_is_over_lets_go_of_its_tools_while_its_sibling_goes_on() -> None:
    closed = threading.Event()

    class Telling(Box):
        def close(self) -> None:
            super().close()
            closed.set()

    def make(rollout: str) -> Box:
        return Telling(lambda *_: "42" if closed.wait(60.0) else "the sibling still holds its tools")

    def says(request: Request, context: str) -> str:
        return "42" if request.id.startswith("train/1/0/0") else one_call(request, context)

    _, late = rollouts_of(play(says, Kit(make)))
    assert late.turns[0].calls[0].answer == "42"


def test_an_engine_that_fails_while_a_tool_is_asked_waits_for_the_tool_and_then_lets_it_go() -> None:
    failed, asking = threading.Event(), threading.Event()
    order: list[str] = []

    class Ordered(Box):
        def close(self) -> None:
            super().close()
            order.append("closed")

    def answer(*_: object) -> str:
        asking.set()
        assert failed.wait(60.0)
        order.append("answered")
        return "42"

    def says(request: Request, context: str) -> str:
        if request.id == "train/1/0/0":
            return call()
        assert asking.wait(60.0)
        failed.set()
        raise EngineError("the engine died", "no answer", "look at its log")

    kit = Kit(lambda rollout: Ordered(answer))
    with pytest.raises(EngineError, match="died"):
        play(says, kit)
    assert order == ["answered", "closed", "closed"]
    assert [len(box.asked) for box in kit.boxes.values()] == [1, 0]


def test_a_request_to_stop_withdraws_completions_and_lets_go_of_all_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Future[Any]] = []

    class Silent:
        def submit(self, requests: Any) -> Future[Any]:
            asked.append(Future())
            return asked[-1]

    honest = tool_rounds.ToolRollouts._next_reports

    def interrupted(self: Any) -> Any:
        if len(asked) == 2:
            raise StopRequested("stopped by SIGTERM")
        return honest(self)

    monkeypatch.setattr(tool_rounds.ToolRollouts, "_next_reports", interrupted)
    kit = Kit(calculator)
    with pytest.raises(StopRequested):
        play(one_call, kit, engine=Silent())
    assert [future.cancelled() for future in asked] == [True, True]
    assert all(box.closed == 1 for box in kit.boxes.values())
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("surefoot-tools")]


def test_a_wait_for_one_tool_is_no_progress_and_its_answer_is() -> None:
    """The watchdog ends a wait without beats: a tool that hangs must not beat, one that answers must."""
    beats: list[signals.Heartbeat] = []

    def answer(*_: object) -> str:
        beats.append(signals.last_heartbeat())
        return "42"

    def hang(*_: object) -> str:
        while sum(box.closed for box in kit.boxes.values()) < 1:
            time.sleep(0.01)
        time.sleep(0.1)  # what the sibling's end had to say is said
        before = signals.last_heartbeat()
        time.sleep(3 * tool_rounds._LOOK_S)
        beats.append(before)
        assert signals.last_heartbeat() is before, "a wait is no progress"
        return "42"

    kit = Kit(lambda rollout: Box(hang if rollout.endswith("/1") else answer))
    play(one_call, kit)
    assert beats[-1].stage == "tools"
    assert signals.last_heartbeat() is not beats[-1], "its answer was"

"""Silent failure 37: sampled tokens are decoded and encoded again, and come back as other tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from silent_kit import STOP_ID, TASKS, TinyCodec, make_runtime, prepare

from surefoot import loop
from surefoot.engines.scripted import ScriptedEngine
from surefoot.errors import InvariantError
from surefoot.guards.invariants import check_groups
from surefoot.learner.samples import to_samples
from surefoot.protocols import Request
from surefoot.records import Group, Rollout, Turn

PIECES = {7: "a", 8: "b", 9: "ab", STOP_ID: ""}  # as in every BPE vocabulary, "ab" has two spellings


def encode(text: str) -> tuple[int, ...]:
    """Longest match first, as tokenizers do."""
    ids: list[int] = []
    while text:
        piece = next(p for p in ("ab", "a", "b") if text.startswith(p))
        ids.append(next(i for i, p in PIECES.items() if p == piece))
        text = text[len(piece) :]
    return (*ids, STOP_ID)


def spell(request: Request) -> list[int]:
    """Siblings say the same text in different tokens: both spellings occur."""
    return [[7, 8, STOP_ID], [9, STOP_ID], [8, 7, STOP_ID], [7, STOP_ID]][int(request.id[-1])]


def collect() -> list[Group]:
    return make_runtime(ScriptedEngine(spell)).collect(TASKS[:2], step=1)


def test_what_was_sampled_is_what_is_trained() -> None:
    trained = {(s.group, s.index): s.completion_ids for s in prepare(collect())}
    assert {ids for (_, index), ids in trained.items() if index == 0} == {(7, 8, STOP_ID)}
    assert {ids for (_, index), ids in trained.items() if index == 1} == {(9, STOP_ID)}


def test_nothing_on_the_way_to_training_can_encode() -> None:
    class Mute(TinyCodec):
        def encode_prompt(self, messages: Any) -> tuple[int, ...]:
            raise AssertionError("text became tokens during the run")

    runtime = make_runtime(ScriptedEngine(spell))
    runtime.collector.codec = Mute()
    prepare(runtime.collect(TASKS[:2], step=1))


def test_planted_round_trip_through_text_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def retokenised(groups: Any, *, scale: str) -> Any:
        found = []
        for s in to_samples(groups, scale=scale):
            ids = encode("".join(PIECES[i] for i in s.completion_ids))
            found.append(replace(s, completion_ids=ids, sampled=(True,) * len(ids), logprobs=(-1.0,) * len(ids)))
        return found

    monkeypatch.setattr(loop, "to_samples", retokenised)
    with pytest.raises(InvariantError, match="would train 2 tokens, the policy sampled 3"):
        prepare(collect())


def test_planted_rewritten_history_between_turns_is_refused() -> None:
    first = Turn((1, 5), (7, 8, STOP_ID), (-1.0,) * 3, version=0, finish_reason="stop")
    kept = replace(first, prompt_ids=(1, 5, 7, 8, STOP_ID, 6))
    rewritten = replace(first, prompt_ids=(1, 5, *encode("ab"), 6))

    def check(second: Turn) -> int:
        group = Group(TASKS[0], "g", (Rollout(TASKS[0].id, "g", 0, (first, second)),))
        return check_groups([group], vocab_size=32, stop_ids=frozenset({STOP_ID}))

    assert check(kept) == 1
    with pytest.raises(InvariantError, match="rewrote its history"):
        check(rewritten)

"""The public test double says what it is told, and refuses to say what no engine could."""

from __future__ import annotations

import doctest

import pytest

from surefoot.engines import scripted
from surefoot.engines.scripted import ScriptedEngine
from surefoot.errors import EngineError
from surefoot.protocols import Request
from surefoot.records import LENGTH, STOP


def ask(name: str = "a", limit: int = 4) -> Request:
    return Request(name, (1, 5), limit, 1.0, frozenset({2, 3}), seed=len(name))


def test_the_example_in_its_docstring_holds() -> None:
    results = doctest.testmod(scripted)
    assert results.attempted >= 4
    assert results.failed == 0


def test_it_says_the_script_per_request_and_remembers_who_asked() -> None:
    engine = ScriptedEngine(lambda request: [len(request.id), 2], logprob=-0.25)
    answers = engine.generate([ask("a"), ask("bb")])
    assert [a.token_ids for a in answers] == [(1, 2), (2, 2)]
    assert [a.request_id for a in answers] == ["a", "bb"]
    assert answers[0].logprobs == (-0.25, -0.25)
    assert [r.id for r in engine.requests] == ["a", "bb"]


@pytest.mark.parametrize(("tokens", "reason"), [([9, 2], STOP), ([9, 3], STOP), ([9, 8, 7, 6], LENGTH)])
def test_the_last_token_says_how_it_ended(tokens: list[int], reason: str) -> None:
    assert ScriptedEngine(lambda request: tokens).generate([ask()])[0].finish_reason == reason


@pytest.mark.parametrize("tokens", [[], [1, 1, 1, 1, 1]])
def test_a_script_that_no_engine_could_follow_is_refused(tokens: list[int]) -> None:
    with pytest.raises(EngineError, match=f"the script said {len(tokens)} tokens for request a"):
        ScriptedEngine(lambda request: tokens).generate([ask()])


def test_the_version_is_read_before_anything_is_said_and_again_at_the_end() -> None:
    engine = ScriptedEngine(lambda request: [2], on_generate=lambda e: e.load_weights({}, 8))
    engine.load_weights({}, 7)
    answer = engine.generate([ask()])[0]
    assert (answer.version, answer.version_end) == (7, 8)
    assert engine.loaded_versions == [7, 8]
    engine.close()

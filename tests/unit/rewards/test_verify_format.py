"""Checks of form hold where they should, and every one of them can be broken."""

from __future__ import annotations

from typing import Any

import pytest

from surefoot.errors import RewardError
from surefoot.rewards.verifiers import format
from surefoot.rewards.verifiers.format import CHECKS, RequestedCheck, broken, read_checks

EXAMPLES: dict[str, tuple[Any, str]] = {
    "min_words": (3, "one two three"), "max_words": (3, "one two three"), "min_sentences": (2, "One. Two."),
    "max_sentences": (2, "One. Two"), "paragraphs": (2, "One.\n\nTwo."), "bullets": (2, "* one\n- two"),
    "max_chars": (5, "12345"), "include": (["moon", "Sun"], "The MOON and the sun"), "exclude": (["cat"], "concatenate"),
    "at_least": (["so", 2], "So, so what"), "at_most": (["so", 1], "so also"), "starts_with": ("Dear", "Dear you"),
    "ends_with": ("the end.", "It is The End."), "one_of": (["yes", "no"], "yes"), "json": (None, '```json\n{"a": 1}\n```'),
    "json_keys": (["a"], '{"a": 1, "b": 2}'), "no_commas": (None, "no comma here"), "lowercase": (None, "all small"),
    "uppercase": (None, "ALL LARGE"), "title": (None, "<<A Title>>\ntext"), "quoted": (None, '"everything"'),
    "min_placeholders": (2, "[name] lives in [town]"), "min_highlights": (1, "this is *important*"),
}  # fmt: skip
BASES = [
    "Plain words, and more. Then others!",
    '{"a": "b"}',
    "x" * 50,
    "* one\n* two\n\n[a] [b] *c* <<t>>",
    "",
    "~ ^ ~",
]


def score(checks: list[dict[str, Any]], said: str) -> float:
    return format.verify_format(read_checks({"checks": checks}), said)


def test_every_check_has_an_example() -> None:
    assert EXAMPLES.keys() == CHECKS.keys()


@pytest.mark.parametrize("name", CHECKS)
def test_a_check_holds_for_its_example_and_breaks_on_every_base(name: str) -> None:
    value, said = EXAMPLES[name]
    assert score([{"check": name, "value": value}], said) == 1.0
    for text in broken([RequestedCheck(name, value)], [*BASES, said]):
        assert score([{"check": name, "value": value}], text) == 0.0, text


def test_all_checks_together_must_hold() -> None:
    both = [{"check": "no_commas"}, {"check": "max_words", "value": 3}]
    assert [score(both, said) for said in ("one two", "one, two", "one two three four")] == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    "said", ["", " \n\t", "...", "\u200b\u200b", "<think>a good text without commas</think>", "<think>text"]
)
def test_saying_nothing_never_has_the_right_form(said: str) -> None:
    assert score([{"check": "no_commas"}], said) == 0.0


@pytest.mark.parametrize("said", ["[" * 200_000, '{"a":' * 100_000, "NaN", '{"a": NaN}', "9" * 5000 + "x", "{'a': 1}"])
def test_hostile_json_is_no_json_and_no_crash(said: str) -> None:
    assert score([{"check": "json"}], said) == 0.0


def test_ifeval_names_mean_our_checks() -> None:
    ids = ["punctuation:no_comma", "length_constraints:number_words", "keywords:frequency", "keywords:existence"]
    kwargs: list[Any] = [
        None, {"num_words": 5, "relation": "less than"},
        {"keyword": "so", "frequency": 2, "relation": "at least"}, {"keywords": ["moon"]},
    ]  # fmt: skip
    asked = read_checks({"instruction_id_list": ids, "kwargs": kwargs})
    assert asked == [("no_commas", None), ("max_words", 4), ("at_least", ["so", 2]), ("include", ["moon"])]


@pytest.mark.parametrize(
    "problem",
    [{}, {"checks": []}, {"checks": "nonsense"}, {"checks": [{"check": "max_wrds", "value": 3}]}, {"checks": ["json"]},
     {"checks": [{"check": "max_words"}]}, {"checks": [{"check": "max_words", "value": 0}]},
     {"checks": [{"check": "max_words", "value": "3"}]}, {"checks": [{"check": "max_words", "value": True}]},
     {"checks": [{"check": "include", "value": [""]}]}, {"checks": [{"check": "json", "vlaue": 1}]},
     {"checks": [{"check": "at_least", "value": ["so", 0]}]},
     {"instruction_id_list": ["language:response_language"], "kwargs": [{}]},
     {"instruction_id_list": ["punctuation:no_comma"], "kwargs": []},
     {"instruction_id_list": ["length_constraints:number_words"], "kwargs": [{"num_words": 5, "relation": "about"}]}],
    ids=str,
)  # fmt: skip
def test_a_check_that_is_unknown_or_unfit_is_refused_never_skipped(problem: dict[str, Any]) -> None:
    with pytest.raises(RewardError):
        read_checks(problem)


def test_a_check_that_always_holds_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    good = CHECKS["no_commas"]
    monkeypatch.setitem(CHECKS, "no_commas", type(good)(lambda t, v: True, good.breaks, good.takes, good.says))
    assert any(score([{"check": "no_commas"}], text) for text in broken([RequestedCheck("no_commas")], BASES))

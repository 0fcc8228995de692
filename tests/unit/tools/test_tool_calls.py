"""What a model wrote becomes calls, problems and the rest; hostile text costs linear time and never an exception."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.system.json import loads, nesting
from surefoot.tools.parsing import CLOSE, OPEN, BadCall, RequestedCall, parse_calls


def written(name: str, **arguments: object) -> str:
    return f"{OPEN}{json.dumps({'name': name, 'arguments': arguments})}{CLOSE}"


def test_calls_come_in_order_with_the_rest_beside_them() -> None:
    parsed = parse_calls(f"First {written('a', x=1)} then {written('b')} done")
    assert [(c.name, c.arguments) for c in parsed.calls] == [("a", {"x": 1}), ("b", {})]
    assert parsed.rest.split() == ["First", "then", "done"]
    assert parsed.problems == []


def test_good_and_bad_calls_keep_their_order() -> None:
    parsed = parse_calls(f"{written('a')}{OPEN}broken{CLOSE}{written('b')}")
    assert [type(item) for item in parsed.items] == [RequestedCall, BadCall, RequestedCall]


def test_reasoning_is_set_apart_closed_or_not() -> None:
    parsed = parse_calls(f"<think>I could {written('a')}</think>42")
    assert (parsed.calls, parsed.rest) == ([], "42")
    assert parse_calls(f"<think>never closed {written('a')}").calls == []


def test_a_call_that_opens_inside_another_does_not_swallow_it() -> None:
    parsed = parse_calls(f"{OPEN}{{ {written('a')}")
    assert [type(item) for item in parsed.items] == [BadCall, RequestedCall]


CORPUS = [
    "{", "[]", "null", "3", '"x"', "{}", '{"name": "a"}', '{"arguments": {}}', '{"name": 1, "arguments": {}}',
    '{"name": "", "arguments": {}}', '{"name": "a", "arguments": []}', '{"name": "a", "arguments": "{}"}',
    '{"name": "a", "arguments": {}, "more": 1}', '{"name": "a", "arguments": {"x": NaN}}',
    '{"name": "a", "arguments": {"x": Infinity}}', '{"name": "a", "name": "b", "arguments": {}}',
    '{"name": "a", "arguments": {"x": 1, "x": 2}}', '{"name": "a", "arguments": {"x": ' + "9" * 5000 + "}}",
    "[" * 100_000, '{"name": "a", "arguments": ' + '{"x":' * 5000 + "1" + "}" * 5001, "{'name': 'a', 'arguments': {}}",
    '{"name": "a", "arguments": {}} trailing', "x" * 70_000, "\x00", '{"name": "a",\n"arguments": {}', "",
]  # fmt: skip


@pytest.mark.parametrize("inside", CORPUS, ids=range(len(CORPUS)))
def test_every_malformed_call_is_a_problem_in_words(inside: str) -> None:
    parsed = parse_calls(OPEN + inside + CLOSE)
    assert parsed.calls == []
    assert len(parsed.problems) == 1
    assert len(parsed.problems[0]) < 300


@given(
    st.lists(
        st.sampled_from(
            [OPEN, CLOSE, "{", "}", '"', "\\", "<think>", "</think>", '{"name": "a", "arguments": {}}', "x"]
        )
    ).map("".join)
)
def test_any_text_is_read_without_an_exception_and_every_mark_is_accounted_for(text: str) -> None:
    parsed = parse_calls(text)
    spoken = (
        text if not parsed.reasoning else "".join(text.split(parsed.reasoning)) if text.count("<think>") == 1 else None
    )
    if spoken is not None and "<think>" not in spoken:
        assert len(parsed.items) == spoken.count(OPEN)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=20,
    )
)
def test_whatever_json_writes_is_read_back(value: object) -> None:
    assert loads(json.dumps(value)) == value


def test_depth_counts_brackets_outside_strings_only() -> None:
    assert nesting('{"a": "[[[[", "b": [[1]]}') == 3
    assert nesting('"\\"[["') == 0


def test_a_repeated_key_behind_many_others_is_found_in_one_pass() -> None:
    """With a look back per key this takes minutes."""
    many = ",".join(f'"k{n}":1' for n in range(100_000))
    with pytest.raises(ValueError, match="'k99999' is there more than once"):
        loads(f'{{{many},"k99999":2}}', max_chars=1 << 22)

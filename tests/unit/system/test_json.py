"""One reader of JSON: what two readers would understand differently is refused, with a reason."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from surefoot.system.json import ConstantError, RepeatedKeyError, decoder, loads, parse

REFUSED = {
    "nothing": ("", "Expecting value"),
    "half": ('{"a": 1', "Expecting"),
    "two values": ("1 2", "Extra data"),
    "NaN": ('{"a": NaN}', "NaN is not a number in JSON"),
    "Infinity": ("[Infinity]", "Infinity is not a number"),
    "-Infinity": ("-Infinity", "-Infinity is not a number"),
    "a key twice": ('{"a": 1, "b": 2, "a": 1}', "the key 'a' is there more than once"),
    "a key twice, deep": ('[{"x": {"k": 1, "k": 2}}]', "the key 'k' is there more than once"),
    "endless nesting": ("[" * 200_000, "deep"),
    "an endless number": ("1" * 10_000, "digits"),
}


@pytest.mark.parametrize("form", [str, str.encode], ids=["text", "bytes"])
@pytest.mark.parametrize(("text", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_read_alike_everywhere_is_a_value_error(text: str, reason: str, form: Any) -> None:
    with pytest.raises(ValueError, match=reason):
        parse(form(text))


@pytest.mark.parametrize(("text", "reason"), [pair for name, pair in REFUSED.items() if name != "an endless number"])
def test_a_bounded_text_is_refused_for_the_same_reasons(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        loads(text)


def test_the_errors_carry_what_was_found() -> None:
    with pytest.raises(RepeatedKeyError) as repeated:
        parse('{"a": 1, "a": 2}')
    assert repeated.value.key == "a"
    with pytest.raises(ConstantError) as constant:
        parse("[-Infinity]")
    assert constant.value.word == "-Infinity"
    with pytest.raises(json.JSONDecodeError) as torn:
        parse('{\n"a": }')
    assert (torn.value.lineno, torn.value.colno) == (2, 6)


def test_a_caller_may_ask_for_each_laxness_alone() -> None:
    assert parse('{"a": 1, "a": 2}', repeated=True) == {"a": 2}
    assert math.isnan(parse("[NaN]", constants=True)[0])
    with pytest.raises(ConstantError):
        parse("[NaN]", repeated=True)
    with pytest.raises(RepeatedKeyError):
        parse('{"a": 1, "a": 2}', constants=True)
    assert decoder(repeated=True).decode('{"a": 1, "a": 2}') == {"a": 2}


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32"])
def test_bytes_are_read_in_the_encoding_that_they_show(encoding: str) -> None:
    assert parse('{"a": "ü"}'.encode(encoding)) == {"a": "ü"}
    with pytest.raises(ValueError, match="utf-8"):
        parse(b'{"a": "\xff"}')


def test_planted_lenient_reader_is_seen() -> None:
    """Teeth: the standard reader takes every one of the ambiguous texts."""
    for name in ("NaN", "Infinity", "-Infinity", "a key twice", "a key twice, deep"):
        json.loads(REFUSED[name][0])

"""Schemas that could keep us busy are refused; arguments are checked before anything is sent."""

from __future__ import annotations

from typing import Any

import pytest

from surefoot.errors import ToolError
from surefoot.tools import schema as tool_schema
from surefoot.tools.schema import checker, longest_for, names_of

pytestmark = pytest.mark.mcp
pytest.importorskip("jsonschema", reason="jsonschema comes with the mcp extra")


def of(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        (of(a={"$ref": "https://example.org/s.json"}), "nothing is fetched"),
        (of(a={"$ref": "other.json#/a"}), "nothing is fetched"),
        (of(a={"$ref": "#"}), "itself"),
        (
            {"type": "object", "$defs": {"n": {"properties": {"next": {"$ref": "#/$defs/n"}}}}, "$ref": "#/$defs/n"},
            "itself",
        ),
        (of(a={"$ref": "#/$defs/none"}), "nowhere"),
        (of(a={"$dynamicRef": "#x"}), "not supported"),
        (of(a={"pattern": "(a|aa)+$"}), "for ever"),
        (of(a={"pattern": "(a*)*$"}), "for ever"),
        (of(a={"pattern": r"(a)\1"}), "looks back"),
        (of(a={"pattern": "a*b*c*d*e*$"}), "too long"),
        (of(a={"pattern": "("}), "cannot be read"),
        (of(a={"patternProperties": {"(x+)+": {}}}), "for ever"),
        (of(a={"type": "banana"}), "no JSON schema"),
        ({"type": "array"}, "object"),
        (of(a={"const": float("nan")}), "not JSON"),
        (of(**{f"p{i}": {"type": "string"} for i in range(5000)}), "bytes"),
    ],
)
def test_a_schema_that_is_a_trap_is_refused_by_tool_name(schema: dict[str, Any], says: str) -> None:
    with pytest.raises(ToolError, match="tool s__t: its schema is refused") as caught:
        checker("s__t", schema)
    assert says in str(caught.value)


def test_a_schema_that_is_too_deep_is_refused() -> None:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(200):
        schema = {"type": "object", "properties": {"a": schema}}
    with pytest.raises(ToolError, match="deep"):
        checker("s__t", schema)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({}, "'n' is a required property"),
        ({"n": "1"}, "n: '1' is not of type 'integer'"),
        ({"n": True}, "n: True is not of type 'integer'"),
        ({"n": 1, "more": 2}, "Additional properties"),
        ({"n": 1, "date": "tomorrow"}, "does not match"),
        ({"n": 1, "list": ["x", 2]}, "list.1"),
        ({"n": float("inf")}, "not JSON"),
        ({"n": 10**5000}, "not JSON"),
        ({"n": 1, "text": "x" * 70_000}, "bytes"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict[str, Any], says: str) -> None:
    check = checker("s__t", {**of(
        n={"type": "integer"}, text={"type": "string"}, list={"type": "array", "items": {"type": "string"}},
        date={"type": "string", "pattern": r"^\d{4}-\d{2}-\d{2}$"},
    ), "required": ["n"]})  # fmt: skip
    assert check({"n": 1, "text": "fine", "list": ["x"], "date": "2026-11-15"}) == []
    assert says in " ".join(check(arguments))


def test_references_inside_the_schema_work_and_data_is_not_mistaken_for_schema() -> None:
    schema = {
        "$id": "https://example.org/me", "type": "object", "$defs": {"word": {"type": "string"}},
        "properties": {"a": {"$ref": "#/$defs/word"}, "id": {"type": "string", "default": {"$ref": "http://x"}}},
    }  # fmt: skip
    check = checker("s__t", schema)
    assert check({"a": "x", "id": "y"}) == []
    assert check({"a": 1}) == ["a: 1 is not of type 'string'"]
    assert names_of(schema) == ["a", "id"]


def test_a_pattern_is_not_tried_on_a_text_that_could_take_too_long() -> None:
    check = checker("s__t", of(mark={"type": "string", "pattern": r"[^#]+#[^#]+\.[a-z]+$"}))
    assert check({"mark": "a#b.org"}) == []
    assert "too many" in check({"mark": "a" * 5000})[0]
    assert longest_for("^a+$") > longest_for("a+$") > longest_for("a+b+$") > 100


def test_nothing_is_ever_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Teeth: with the look at references removed, a remote one is still not followed."""
    import urllib.request

    fetched: list[Any] = []
    monkeypatch.setattr(urllib.request, "urlopen", lambda *a, **k: fetched.append(a))
    monkeypatch.setattr(tool_schema, "_examined", dict)
    check = checker("s__t", of(a={"$ref": "http://127.0.0.1:9/s.json"}))
    with pytest.raises(Exception, match=r"127\.0\.0\.1"):
        check({"a": 1})
    assert fetched == []


def test_planted_bug_without_the_look_at_patterns_a_trap_gets_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool_schema, "longest_for", lambda pattern: 10**9)
    checker("s__t", of(a={"pattern": "^(a+)+$"}))


# -- what is right beyond doubt needs no walk ---------------------------------------------------------

VALUES = (None, True, False, 0, 1, -7, 1.0, 1.5, 10**30, "", "x", [], ["x"], {}, {"a": 1})
PLAIN = {
    "type": "object", "title": "t", "required": ["s"],
    "properties": {
        "s": {"type": "string", "description": "d", "default": "x"}, "b": {"type": "boolean"}, "i": {"type": "integer"},
        "n": {"type": "number"},
    },
}  # fmt: skip


@pytest.mark.parametrize("extra", [None, True, False])
def test_a_plain_schema_says_of_every_value_what_the_validator_says(extra: bool | None) -> None:
    plain = PLAIN | ({} if extra is None else {"additionalProperties": extra})
    right = tool_schema._plain_check(plain)
    assert right is not None
    validator = tool_schema._validator(plain)
    quick = 0
    for name in (*PLAIN["properties"], "other"):
        for value in VALUES:
            for arguments in ({name: value}, {"s": "x", name: value}):
                valid = not list(validator.iter_errors(arguments))
                assert valid or not right(arguments), arguments
                assert (checker("t", plain)(arguments) == []) == valid, arguments
                quick += right(arguments)
    assert quick >= 12, "nothing is quick"


@pytest.mark.parametrize(
    "change",
    [
        {"properties": {"s": {"type": "string", "minLength": 2}}}, {"properties": {"s": {"type": ["string", "null"]}}},
        {"properties": {"s": {"enum": ["y"]}}}, {"properties": {"s": True}}, {"properties": {"s": {"type": "array"}}},
        {"additionalProperties": {"type": "string"}}, {"patternProperties": {"s": {"type": "integer"}}},
        {"minProperties": 2}, {"not": {}}, {"$schema": "http://json-schema.org/draft-04/schema#"}, {"allOf": []},
        {"dependentRequired": {"s": ["b"]}}, {"properties": {"s": {"$ref": "#/properties/b"}}}, {"if": {}, "then": False},
    ],
    ids=str,
)  # fmt: skip
def test_a_schema_with_any_other_rule_is_for_the_validator(change: dict[str, Any]) -> None:
    assert tool_schema._plain_check(PLAIN | change) is None


def test_planted_quick_check_that_takes_true_for_a_number_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool_schema, "_PLAIN", tool_schema._PLAIN | {"integer": frozenset({int, bool})})
    with pytest.raises(AssertionError, match="'i': True"):
        test_a_plain_schema_says_of_every_value_what_the_validator_says(None)

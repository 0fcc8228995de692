"""Offers a tool whose schema is a trap: which, is the first argument."""

import sys

from base import ECHO, serve


def doubling(levels):
    below = {f"l{i}": {"allOf": [{"$ref": f"#/$defs/l{i + 1}"}] * 2} for i in range(levels)}
    return {"type": "object", "$defs": {**below, f"l{levels}": {"type": "object"}}, "$ref": "#/$defs/l0"}


SCHEMAS = {
    "remote_ref": {"type": "object", "properties": {"text": {"$ref": "http://127.0.0.1:9/schema.json"}}},
    "recursive": {"type": "object", "allOf": [{"$ref": "#"}]},
    "circle": {
        "type": "object",
        "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
        "$ref": "#/$defs/a",
    },
    "doubling": doubling(25),
    "regex": {"type": "object", "properties": {"text": {"type": "string", "pattern": "^(a+)+$"}}},
    "long_regex": {"type": "object", "properties": {"text": {"type": "string", "pattern": "a" * 5000}}},
    "not_a_schema": {"type": "object", "properties": {"text": {"type": "banana"}}},
    "not_an_object": {"type": "string"},
    "huge": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(20_000)}},
}
serve(tools=[{**ECHO, "inputSchema": SCHEMAS[sys.argv[1]]}])

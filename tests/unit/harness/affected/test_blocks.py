"""A file becomes blocks: what changes which hash, and who is said to mention what."""

from __future__ import annotations

import pytest

from surefoot.harness.affected.blocks import CORE, Blocks, split

BASE = """
import os
LIMIT = 3
TABLE = {k: k for k in range(3)}

def plain(x, step=1):
    return x + step

class Box:
    size = 4

    def grow(self, by=1):
        return self.size + by
"""


def changed(before: str, after: str) -> set[str]:
    """Which parts differ: "core", "names:NAME", "body:NAME"."""
    old, new = split(before.encode()), split(after.encode())
    found = {"core"} if old.core != new.core else set()
    for part in ("names", "bodies"):
        one, other = getattr(old, part), getattr(new, part)
        word = "body" if part == "bodies" else "names"
        found |= {f"{word}:{name}" for name in one.keys() | other.keys() if one.get(name) != other.get(name)}
    return found


@pytest.mark.parametrize(
    ("before", "after", "parts"),
    [
        ("return x + step", "return x - step", {"body:plain"}),
        ("return self.size + by", "return self.size", {"body:Box.grow"}),
        ("step=1", "step=2", {"names:plain"}),
        ("by=1", "by=2", {"names:Box.grow"}),
        ("LIMIT = 3", "LIMIT = 4", {"names:LIMIT"}),
        ("size = 4", "size = 5", {"core"}),
        ("range(3)", "range(4)", {"core"}),
        ("step=1", "step=LIMIT", {"core", "names:plain"}),
        ("LIMIT = 3", "LIMIT = 3 // 0", {"core", "names:LIMIT", "names:plain"}),  # can fail: everybody's business
        ("LIMIT = 3", "LIMIT: int = {[]: 1}", {"core", "names:LIMIT", "names:plain"}),
        ("def plain(x", "def plain(x: Unknown", {"core", "names:plain"}),
        ("def grow(self", "def shrink(self", {"core", "names:Box.grow", "names:Box.shrink", "body:Box.grow", "body:Box.shrink"}),
        ("LIMIT = 3", "LIMIT = 3  # a comment", set()),
        ("    return x + step", "\n\n    return (x + step)", set()),
    ],
)  # fmt: skip
def test_an_edit_changes_the_parts_it_can_reach_and_no_other(before: str, after: str, parts: set[str]) -> None:
    assert before in BASE
    assert changed(BASE, BASE.replace(before, after)) == parts


def test_a_definition_that_moves_below_a_use_at_import_is_a_change() -> None:
    assert changed("A = 1\nB = print(A)\n", "B = print(A)\nA = 1\n") == {"names:A"}


def test_a_name_bound_twice_is_never_taken_out_of_the_core() -> None:
    assert changed("A = 1\nif x:\n    A = 2\n", "A = 5\nif x:\n    A = 2\n") == {"core"}


def test_properties_and_setters_share_one_block_that_either_changes() -> None:
    text = "class A:\n    @property\n    def p(self):\n        return 1\n    @p.setter\n    def p(self, v):\n        self.v = v\n"
    assert changed(text, text.replace("= v\n", "= v + 1\n")) == {"body:A.p"}


@pytest.mark.parametrize("source", [b"def broken(:\n", b"\xff\xfe", b"x = '" + b"(" * 50])
def test_a_file_that_does_not_parse_is_one_block(source: bytes) -> None:
    assert split(source).bodies == {}
    assert split(source).core != split(source + b" ").core


def test_blocks_survive_json() -> None:
    blocks = split(BASE.encode())
    assert Blocks.from_json(blocks.as_json()) == blocks


def test_imports_and_all_do_not_count_as_mentions_but_aliases_and_strings_do() -> None:
    blocks = split(b"from a import used, other as alias\n__all__ = ['used']\npatch('pkg.mod.LIMIT')\n")
    assert "used" not in blocks.mentions[CORE]
    assert {"other", "LIMIT", "pkg"} <= set(blocks.mentions[CORE])
    assert blocks.listed == ["used"]


@pytest.mark.parametrize("call", ["getattr(m, name)", "globals()", "m.__dict__", "vars(m)", "operator.attrgetter(n)"])
def test_code_that_computes_names_is_wild(call: str) -> None:
    assert split(f"def f(m, name, n):\n    return {call}\n".encode()).wild == ["f"]
    assert split(b"def f(m):\n    return getattr(m, 'plain')\n").wild == []


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("@functools.lru_cache\ndef f():\n    return 1\n", ["f"]),
        ("def f():\n    global STATE\n    STATE = 1\n", ["STATE", "f"]),
        ("def f(k):\n    CACHE[k] = 1\n", ["CACHE", "f"]),
        ("def f(k):\n    SEEN.append(k)\n", ["SEEN", "f"]),
        ("@app.route\ndef f():\n    return 1\n", None),
    ],
)
def test_a_function_whose_effect_outlives_the_call_is_shared(source: str, names: list[str] | None) -> None:
    assert split(source.encode()).shared["f"].names == names


@pytest.mark.parametrize("body", ["x = []\n    x.append(1)", "self.x = 1", "return {}"])
def test_a_function_that_touches_only_its_own_is_not_shared(body: str) -> None:
    assert split(f"def f(self):\n    {body}\n".encode()).shared == {}


@pytest.mark.parametrize(
    "decorator",
    ["pytest.mark.slow", "pytest.mark.config_key('a', 'b')", "mark.turns(3)", "pytest.hookimpl(wrapper=True)"],
)
def test_a_mark_or_a_hook_remembers_nothing_and_a_decorator_beside_it_may(decorator: str) -> None:
    assert split(f"@{decorator}\ndef f(x):\n    return x\n".encode()).shared == {}
    assert split(f"@{decorator}\n@kept\ndef f(x):\n    return x\n".encode()).shared.keys() == {"f"}


@pytest.mark.parametrize(
    ("source", "spoken"),
    [
        ("bound = {}\n", False),
        ("for bound in range(3):\n    pass\n", False),
        ("'Words on what is bound.'\n", False),
        ("class A:\n    'What is bound.'\n", False),
        ("'An example that doctest runs: >>> bound'\n", True),
        ("bound += 1\n", True),
        ("x = bound\n", True),
        ("x.bound = 1\n", True),
    ],
)
def test_at_import_a_name_that_is_only_bound_or_described_is_not_spoken_of(source: str, spoken: bool) -> None:
    assert ("bound" in split(source.encode()).mentions[CORE]) == spoken


@pytest.mark.parametrize(
    ("source", "wild"),
    [
        ("import operator\nfor n in X:\n    f(getattr(operator, n))\n", False),
        ("import builtins\nNAMES = frozenset(dir(builtins))\n", False),
        ("import os.path as p\nNAMES = vars(p)\n", False),
        ("for n in X:\n    setattr(Box, n, f)\n", False),
        ("for n in X:\n    setattr(Box, n, getattr(mine, n))\n", True),
        ("import operator\nimport mine as operator\nf(getattr(operator, n))\n", True),
        ("from mine import operator\nf(getattr(operator, n))\n", True),
        ("import operator\nask = getattr\nf(ask(operator, globals()))\n", True),
        ("import operator\ndef f(operator):\n    return getattr(operator, n)\n", True),
    ],
)
def test_a_computed_name_of_pythons_own_modules_is_none_of_the_projects(source: str, wild: bool) -> None:
    assert bool(split(source.encode()).wild) == wild


@pytest.mark.parametrize(
    ("body", "of_self"),
    [
        ("getattr(self, n)", True),
        ("getattr(self, n) + getattr(m, n)", False),
        ("getattr(m, n)", False),
        ("self.n", False),
    ],
)
def test_who_computes_names_of_self_alone_is_told_apart(body: str, of_self: bool) -> None:
    blocks = split(f"class A:\n    def f(self, m, n):\n        return {body}\n".encode())
    assert blocks.wild_self == (["A.f"] if of_self else [])
    assert set(blocks.wild_self) <= set(blocks.wild)

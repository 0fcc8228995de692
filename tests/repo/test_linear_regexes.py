"""Time grows with the length of a text, not with its square: every regular expression of the package, and what uses them.

Expressions are found by reading the tree, so that a new one cannot be forgotten: one that is written down is attacked
with texts made from its own parse, one that is made at run time has to be in the table below with a sample or a reason.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
from regexes import HAND_WRITTEN, LONGEST, Found, attacks, calls_of, collect, slow
from repo_tree import PACKAGES

Key = tuple[str, str]


@lru_cache(maxsize=1)
def of_the_package() -> tuple[list[Found], dict[Key, Found]]:
    """Expressions that are written down, and those that are made at run time by file and source."""
    every = [found for package in PACKAGES for found in collect(package)]
    made = {(found.place.partition(":")[0], found.source): found for found in every if found.pattern is None}
    return [found for found in every if found.pattern is not None], made


SAMPLES: dict[Key, tuple[str | bytes, ...] | str] = {
    ("tools/schema.py", "pattern"): "a server's own: `longest_for` refuses what could take long, and its "
    "texts are bounded (tests/unit/tools/test_tool_schema.py)",
    ("rewards/verifiers/format.py", "re.escape(wanted[0])"): (r"ab", r"\.\.", "aa"),
    ("rewards/verifiers/format.py", r"f'(?<!\\w){re.escape(word.casefold())}(?!\\w)'"): (
        r"(?<!\w)ab(?!\w)", r"(?<!\w)\.(?!\w)", r"(?<!\w)a\ a(?!\w)",
    ),
    ("rewards/verifiers/format.py", r"f'{left}[^\\n{left}{right}]+{right}'"): (
        r"<<[^\n<<>>]+>>", r"\[[^\n\[\]]+\]", r"\*[^\n\*\*]+\*",
    ),
    ("suites/manifest.py", "pattern"): "only compiled, to see whether it can be: a suite's own deny list",
    ("suites/verdicts.py", "pattern"): "a suite's own deny list, over the log of its own run",
    ("suites/package.py", "'|'.join((re.escape(word) for word in words))"): ("host|host\\.name|me",),
    ("suites/plan.py", r"'\\{(' + '|'.join(NAMES) + ')\\}'"): (r"\{(name|config|seed)\}",),
    ("suites/package.py", "b'|'.join((re.escape(word) for word in sorted(words, key=len, reverse=True)))"): (
        b"host\\.name|host|me",
    ),
    ("learner/chat.py", "'|'.join(map(re.escape, wanted))"): (r"<\|assistant\|>|<\|end\|>|</s>|<s>",),
    ("system/text.py", "'|'.join((re.escape(form) for form in sorted(spellings, key=lambda form: (-len(form), form))))"): (
        "aaaaaaaaab|aaaaaaaa", "s3cr3t\\-value",
    ),
    ("tracking/metrics.py", "re.escape(name).replace(re.escape('{}'), word)"): "names of metrics, made by ourselves",
}  # fmt: skip
"""Expressions that are made at run time: what they look like, or why no stranger's text meets them."""


SURE = 90
"""So many attacks are always tried, the best ones first."""


def complaint(found: Found, pattern: str | bytes, longest: int = LONGEST, every: int = 16) -> str | None:
    """How an expression can be made to take long; None when no attack succeeds.

    Args:
        every: of the less promising attacks only each so-manieth is tried.
    """
    made = attacks(pattern, found.flags)
    for use, call in calls_of(found, pattern):
        step = 1 if use in ("match", "fullmatch") else every  # from one place only: quick to try
        for attack in [*made[:SURE], *made[SURE::step], *HAND_WRITTEN]:
            if problem := slow(call, attack, longest):
                return f"{found.place}: {pattern!r}: {problem}"
    return None


def complaints(part: int, parts: int, **how: int) -> list[str]:
    """Of every expression in one part of the tree, and of the samples of those made at run time."""
    found_written, found_made = of_the_package()
    written = [(found, found.pattern) for found in found_written if found.pattern is not None]
    made = [
        (found_made[key], each) for key, samples in SAMPLES.items() if not isinstance(samples, str) for each in samples
    ]
    return [problem for found, each in [*written, *made][part::parts] if (problem := complaint(found, each, **how))]


def test_every_expression_that_is_made_at_run_time_has_a_sample_or_a_reason() -> None:
    assert sorted(of_the_package()[1]) == sorted(SAMPLES), "describe it in SAMPLES, or write it down as one literal"


def test_a_new_expression_cannot_be_forgotten(tmp_path: Any) -> None:
    """Teeth of the collector: whatever way `re` is used, it is found or refused."""
    text = (
        'import re\nA = "x+"\nB = re.compile(rf"({A})+y", re.I)\ndef f(t):\n    return B.match(t) or re.split("z", t)\n'
    )
    (tmp_path / "new.py").write_text(text)
    found = {each.pattern: each for each in collect(tmp_path)}
    assert found["(x+)+y"].uses == ("match",)
    assert found["(x+)+y"].flags == re.I
    assert found["z"].uses == ("split",)
    for alias in ("from re import compile\n", "import re as r\n", "import regex\n"):
        (tmp_path / "new.py").write_text(alias)
        with pytest.raises(AssertionError, match="import re"):
            collect(tmp_path)


@pytest.mark.parametrize("part", range(4))
def test_every_expression_takes_time_by_the_length_of_the_text(part: int) -> None:
    assert complaints(part, 4) == []


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(8))
def test_every_expression_takes_time_by_the_length_of_a_long_text(part: int) -> None:
    """A quadratic walk over a simple class is quick enough to hide in a short text."""
    assert complaints(part, 8, longest=4 * LONGEST, every=4) == []


QUADRATIC = {
    "sentence ends": (r"[.!?\u3002]+(?=\s|$)", 0, "finditer"),
    "sentence ends, possessive": (r"[.!?\u3002]++(?=\s|$)", 0, "finditer"),
    "sentences of the guard": (r"[.!?]+(?=\s|$)|[\n\u3002]", 0, "split"),
    "fenced blocks": (r"^```[^\n`]*\n(.*?)^```\s*$", re.DOTALL | re.MULTILINE, "findall"),
    "towers of powers": (r"(?:\^|\*\*)\s*[({]*(?:[0-9.\s]+|[({][0-9.\s]+[)}])(?:\^|\*\*|!)", 0, "search"),
    "entries of a docstring": (r"(\w+)[ \t]*(?:\([^)]*\))?[ \t]*:(.*)", 0, "fullmatch"),
    "tables of TOML": (r"^\s*\[\s*([A-Za-z0-9_.\- ]+?)\s*\]\s*(?:#.*)?$", 0, "match"),
    "gauges of Ray": (r"^ray_node_gram_used\{([^}]*)\}\s+(\S+)", re.MULTILINE, "findall"),
    "texts of JSON": (rb'"(?:[^"\\]|\\.)*+"|"|[\[{\]}]', re.DOTALL, "finditer"),
    "exponential": (r"(?:a|a)*b", 0, "match"),
    "spaces before the end": (r"\s+$", 0, "sub"),
    "two spaces side by side": (r"x\s*\s*y", 0, "match"),
    "anything, later something": (r"a.*b", re.DOTALL, "search"),
}
"""Those that the package had, and textbook ones."""


@pytest.mark.parametrize("name", QUADRATIC)
def test_planted_bug_a_slow_expression_is_found(name: str) -> None:
    pattern, flags, use = QUADRATIC[name]
    longest = 4 * LONGEST if name == "gauges of Ray" else LONGEST  # by night: see above
    assert complaint(Found("planted.py:1", "", pattern, int(flags), (use,)), pattern, longest)


# -- what stands around the expressions -----------------------------------------------------------------

TEXTS = (
    *HAND_WRITTEN, "\0* \0", "\0.*\0", "\0<tool_call>\0", "\0<tool_call>\0</tool_call>", "\0</think>\0", "\0\\boxed{\0",
    "\0{\"name\":\0", "\0\\text{a}\0", "\0[a] \0", "\0<answer>\0", "\0$\0", "\0a\n\n\0", "\0\\\"\0", "\0aaa aab \0",
    "\0The sum is 7. \0", "<think>\0</think>\0", "{\"name\": \"a\", \"parameters\": {}}\0;\0x", "\0(\0", "\0\u3002\0x",
)  # fmt: skip


def functions() -> dict[str, Callable[[str], object]]:
    """What the package does with a text of a model, a tool or a stranger, by name."""
    from surefoot.guards.repetition import looping
    from surefoot.report.markup import foreign, local
    from surefoot.rewards.verifiers import choice, code, final_answer, format, math
    from surefoot.system.text import printable
    from surefoot.tools.mcp import lines
    from surefoot.tools.parsing import LLAMA_JSON, parse_calls
    from surefoot.tools.text import readable

    def salvaged(text: str) -> object:
        try:
            return lines.salvage(f'{{"id": 1, "text": "{text}'.encode(), 1 << 30)
        except lines.WireFault as fault:
            return fault

    values: dict[str, Any] = {
        "count": 3, "text": "ab", "texts": ["ab", "a."], "count_of": ["ab", 2], "keys": ["a"], "nothing": None,
    }  # fmt: skip

    def every_check(text: str) -> object:
        return [check.holds(text, values[check.takes]) for check in format.CHECKS.values()]

    return {
        "final_answer": final_answer.final_answer, "unwrapped": final_answer.unwrapped,
        "tagged_answer": final_answer.tagged_answer, "code_of": code.code_of, "format": every_check,
        "choice": lambda text: choice.verify_choice("B", text), "number": math.read_number,
        "calls": parse_calls, "bare calls": lambda text: parse_calls(text, LLAMA_JSON), "salvage": salvaged,
        "tool text": lambda text: readable(text, 4000), "looping": looping, "printable": printable, "local": local,
        "foreign": foreign,
    }  # fmt: skip


NAMES = (
    "final_answer", "unwrapped", "tagged_answer", "code_of", "format", "choice", "number", "calls", "bare calls",
    "salvage", "tool text", "looping", "printable", "local", "foreign",
)  # fmt: skip


@pytest.mark.turns(3)
@pytest.mark.parametrize("name", NAMES)
def test_what_reads_a_strangers_text_takes_time_by_its_length(name: str) -> None:
    call = functions()[name]
    assert [problem for text in TEXTS if (problem := slow(call, text))] == []


def test_the_functions_are_all_named() -> None:
    assert tuple(functions()) == NAMES


def old_unwrapped(text: str) -> str:
    """As it was: a copy for every sign that is taken off."""
    before = None
    while before != text:
        before, text = text, text.strip().strip("*")
    return text


def test_planted_bug_copies_in_a_loop_are_found() -> None:
    assert any(slow(old_unwrapped, text, 1 << 18) for text in ("\0* \0",))


# -- the new forms say what the old ones said --------------------------------------------------------------


def odd_texts(alphabet: tuple[str, ...], number: int, seed: int) -> list[str]:
    dice = random.Random(seed)
    return ["".join(dice.choices(alphabet, k=dice.randrange(0, 14))) for _ in range(number)]


def test_fences_are_found_as_before() -> None:
    from surefoot.rewards.verifiers.code import _fenced

    pattern, flags, _ = QUADRATIC["fenced blocks"]
    old = re.compile(pattern, flags)
    alphabet = ("```", "```py", "\n", "\n\n", "x", " ", "`", "\t", "\r", "\n```\n", "\n```py\n", "\x0b", "\u2028")
    for text in odd_texts(alphabet, 4000, 1):
        assert _fenced(text) == old.findall(text), repr(text)


def test_sentences_towers_and_docstrings_are_read_as_before() -> None:
    from surefoot.guards import repetition
    from surefoot.rewards.verifiers import format, math
    from surefoot.tools.python import function_schema

    pairs: list[tuple[str, Any, tuple[str, ...], str]] = [
        ("sentence ends", format._SENTENCE_END, (".", "!", "\u3002", " ", "\n", "a", "..."), "split"),
        ("sentences of the guard", repetition._SENTENCE_END, (".", "?", "\u3002", " ", "\n", "a", "..."), "split"),
        ("towers of powers", math._TOWER, ("^", "**", "*", "(", "{", ")", "}", "9", ".", " ", "!"), "findall"),
        ("entries of a docstring", function_schema._ENTRY, ("a", "b", " ", "\t", "(", ")", ":", "x:"), "findall"),
    ]
    for name, new, alphabet, method in pairs:
        old = re.compile(*QUADRATIC[name][:2])
        for text in odd_texts(alphabet, 2000, 2):
            assert getattr(new, method)(text) == getattr(old, method)(text), (name, text)


def test_answers_are_unwrapped_as_before() -> None:
    from surefoot.rewards.verifiers.final_answer import _WRAPPERS, unwrapped

    def old(text: str) -> str:
        before = None
        while before != text:
            before, text = text, text.strip().strip("*")
            if text.endswith(".") and not text.endswith(".."):
                text = text[:-1]
            for left, right in _WRAPPERS:
                inside = text[len(left) : -len(right)]
                longer = len(text) > len(left + right)
                if text.startswith(left) and text.endswith(right) and longer and left not in inside:
                    text = inside
                    break
        return text

    for text in odd_texts(("$", "$$", "\\(", "\\)", "\\[", "\\]", "`", "*", ".", " ", "\n", "7", "x"), 6000, 3):
        assert unwrapped(text) == old(text), repr(text)


def test_unclosed_calls_are_read_as_before() -> None:
    from surefoot.tools.parsing import BadCall, RequestedCall, parse_calls

    call = '{"name": "a", "arguments": {}}'
    text = f"x<tool_call>y<tool_call>{call}</tool_call>z</tool_call><tool_call>{call}</tool_call><tool_call>{call}"
    assert [type(item) for item in parse_calls(text).items] == [BadCall, RequestedCall, RequestedCall, BadCall]
    assert parse_calls(text).rest == "xz</tool_call>"

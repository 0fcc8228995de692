"""The checks of form that a task may ask for, each with a way to break it.

Owns       one entry per check: when it holds, and how a text can be made to fail it.
Promises   time grows with the length of the text; a hostile text (deep JSON, a million brackets) fails a check, it
           never raises.
Never      looks at what a text means.

Read next: `verify_format.py`, which reads them out of a task.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_WORD = re.compile(r"\w+(?:['\u2019-]\w+)*")
_SENTENCE_END = re.compile(r"(?<![.!?\u3002])[.!?\u3002]++(?=\s|$)")
_BULLET = re.compile(r"^\s{0,8}[*\-\u2022]\s+\S", re.MULTILINE)
_FENCE = re.compile(r"^```[^\n`]*\n(.*)\n```$", re.DOTALL)
_JSON_CAP = 1_000_000


@dataclass(frozen=True)
class Check:
    """One thing that can be asked of a text's form."""

    holds: Callable[[str, Any], bool]
    breaks: Callable[[str, Any], str]
    """Any text, changed so that `holds` says no."""
    takes: str
    """What its value is: "count", "text", "texts", "count_of", "keys" or "nothing"."""
    says: str
    """What it asks for, in words."""


def words(text: str) -> int:
    """How many words."""
    return sum(1 for _ in _WORD.finditer(text))


def sentences(text: str) -> int:
    """How many sentences; a last one without a full stop counts."""
    ends = list(_SENTENCE_END.finditer(text))
    rest = text[ends[-1].end() :] if ends else text
    return len(ends) + bool(rest.strip())


def paragraphs(text: str) -> int:
    """Blocks between blank lines or lines of stars."""
    return sum(1 for block in re.split(r"\n\s*(?:\*\*\*\s*)?\n|\n\*\*\*\n", text) if block.strip(" \n\t*"))


def bullets(text: str) -> int:
    """Lines that begin with a star, a dash or a dot."""
    return sum(1 for _ in _BULLET.finditer(text))


def occurrences(text: str, word: str) -> int:
    """How often a word or phrase stands alone, whatever its case."""
    return len(re.findall(rf"(?<!\w){re.escape(word.casefold())}(?!\w)", text.casefold()))


def parsed_json(text: str) -> Any:
    """The JSON value that the whole text is, fenced or not; `...` (Ellipsis) when it is none."""
    text = text.strip()
    fence = _FENCE.match(text)
    try:
        return ... if len(text) > _JSON_CAP else json.loads(fence[1] if fence else text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return ...


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _marked(text: str, left: str, right: str) -> int:
    return len(re.findall(rf"{left}[^\n{left}{right}]+{right}", text))


def _has_keys(text: str, keys: list[str]) -> bool:
    value = parsed_json(text)
    return isinstance(value, dict) and set(keys) <= set(value)


def _without(text: str, wanted: list[str]) -> str:
    """`text` with the first of `wanted` blanked out; a blank, so that what is left does not join up to it again."""
    cut = re.sub(re.escape(wanted[0]), "~", text, flags=re.IGNORECASE)
    return cut if wanted[0].casefold() not in cut.casefold() else ""


def _fewer_words(text: str, least: int) -> str:
    return " ".join(_WORD.findall(text)[: least - 1])


def _other(char: str) -> str:
    return "~" if char != "~" else "^"


def _all_in(text: str, wanted: list[str]) -> bool:
    return all(each.casefold() in text.casefold() for each in wanted)


def _none_in(text: str, banned: list[str]) -> bool:
    return not any(occurrences(text, each) for each in banned)


CHECKS: dict[str, Check] = {
    "min_words": Check(lambda t, n: words(t) >= n, _fewer_words, "count", "at least N words"),
    "max_words": Check(lambda t, n: words(t) <= n, lambda t, n: t + " more" * (n + 1), "count", "at most N words"),
    "min_sentences": Check(
        lambda t, n: sentences(t) >= n,
        lambda t, n: re.sub(r"[.!?\u3002]+", "", t) if n > 1 else "",
        "count",
        "at least N sentences",
    ),
    "max_sentences": Check(
        lambda t, n: sentences(t) <= n, lambda t, n: t + ". And so." * (n + 1), "count", "at most N sentences"
    ),
    "paragraphs": Check(
        lambda t, n: paragraphs(t) == n, lambda t, n: t + "\n\nMore." * (n + 1), "count", "exactly N paragraphs"
    ),
    "bullets": Check(
        lambda t, n: bullets(t) == n, lambda t, n: t + "\n* more" * (n + 1), "count", "exactly N bullet lines"
    ),
    "max_chars": Check(lambda t, n: len(t) <= n, lambda t, n: t + "x" * (n + 1), "count", "at most N characters"),
    "include": Check(_all_in, _without, "texts", "every one of these texts"),
    "exclude": Check(_none_in, lambda t, b: f"{t} {b[0]}", "texts", "none of these words"),
    "at_least": Check(
        lambda t, v: occurrences(t, v[0]) >= v[1], lambda t, v: _without(t, v[:1]), "count_of", "a word N times or more"
    ),
    "at_most": Check(
        lambda t, v: occurrences(t, v[0]) <= v[1],
        lambda t, v: t + f" {v[0]}" * (v[1] + 1),
        "count_of",
        "a word N times or less",
    ),
    "starts_with": Check(
        lambda t, s: t.lstrip().startswith(s), lambda t, s: _other(s[0]) + t, "text", "this text first"
    ),
    "ends_with": Check(
        lambda t, s: t.rstrip().casefold().endswith(s.casefold()),
        lambda t, s: f"{t} {_other(s[-1])}",
        "text",
        "this text last",
    ),
    "one_of": Check(
        lambda t, s: t.strip() in s,
        lambda t, s: f"{t} {s[0]} {s[-1]}",
        "texts",
        "exactly one of these texts, and nothing else",
    ),
    "json": Check(
        lambda t, _: parsed_json(t) is not ..., lambda t, _: t + " }}{", "nothing", "a JSON value, and nothing else"
    ),
    "json_keys": Check(
        _has_keys, lambda t, keys: json.dumps({f"{keys[0]}~": t}), "texts", "a JSON object with these keys"
    ),
    "no_commas": Check(lambda t, _: "," not in t, lambda t, _: f"{t}, indeed", "nothing", "no comma"),
    "lowercase": Check(lambda t, _: t == t.lower(), lambda t, _: f"{t} Shout", "nothing", "no capital letter"),
    "uppercase": Check(lambda t, _: t == t.upper(), lambda t, _: f"{t} whisper", "nothing", "capital letters only"),
    "title": Check(
        lambda t, _: "<<" in t and _marked(t, "<<", ">>") > 0,
        lambda t, _: t.replace("<<", ""),
        "nothing",
        "a title in <<double angles>>",
    ),
    "quoted": Check(
        lambda t, _: len(t.strip()) > 2 and t.strip()[0] == t.strip()[-1] == '"',
        lambda t, _: f"{t} .",
        "nothing",
        "double quotes around everything",
    ),
    "min_placeholders": Check(
        lambda t, n: _marked(t, r"\[", r"\]") >= n, lambda t, _: t.replace("[", ""), "count", "N or more [placeholders]"
    ),
    "min_highlights": Check(
        lambda t, n: _marked(t, r"\*", r"\*") >= n, lambda t, _: t.replace("*", ""), "count", "N or more *highlights*"
    ),
}

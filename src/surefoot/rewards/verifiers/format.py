"""Whether a completion has the form that a task asks for: the checks, each with a way to break it, read from the task.

Owns       one entry per check: when it holds, and how a text can be made to fail it.
Promises   time grows with the length of the text; a hostile text (deep JSON, a million brackets) fails a check, it
           never raises.
Never      looks at what a text means.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from surefoot.errors import RewardError
from surefoot.rewards.verifiers.final_answer import without_reasoning
from surefoot.system.json import parse

_WORD = re.compile(r"\w+(?:['\u2019-]\w+)*")
_SENTENCE_END = re.compile(r"(?<![.!?\u3002])[.!?\u3002]++(?=\s|$)")
_BULLET = re.compile(r"^\s{0,8}[*\-\u2022]\s+\S", re.MULTILINE)
_FENCE = re.compile(r"^```[^\n`]*\n(.*)\n```$", re.DOTALL)
_JSON_CAP = 1_000_000


@dataclass(frozen=True)
class FormatCheck:
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
        return ... if len(text) > _JSON_CAP else parse(fence[1] if fence else text, repeated=True)
    except ValueError:
        return ...


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


CHECKS: dict[str, FormatCheck] = {
    "min_words": FormatCheck(lambda t, n: words(t) >= n, _fewer_words, "count", "at least N words"),
    "max_words": FormatCheck(
        lambda t, n: words(t) <= n, lambda t, n: t + " more" * (n + 1), "count", "at most N words"
    ),
    "min_sentences": FormatCheck(
        lambda t, n: sentences(t) >= n,
        lambda t, n: re.sub(r"[.!?\u3002]+", "", t) if n > 1 else "",
        "count",
        "at least N sentences",
    ),
    "max_sentences": FormatCheck(
        lambda t, n: sentences(t) <= n, lambda t, n: t + ". And so." * (n + 1), "count", "at most N sentences"
    ),
    "paragraphs": FormatCheck(
        lambda t, n: paragraphs(t) == n, lambda t, n: t + "\n\nMore." * (n + 1), "count", "exactly N paragraphs"
    ),
    "bullets": FormatCheck(
        lambda t, n: bullets(t) == n, lambda t, n: t + "\n* more" * (n + 1), "count", "exactly N bullet lines"
    ),
    "max_chars": FormatCheck(lambda t, n: len(t) <= n, lambda t, n: t + "x" * (n + 1), "count", "at most N characters"),
    "include": FormatCheck(_all_in, _without, "texts", "every one of these texts"),
    "exclude": FormatCheck(_none_in, lambda t, b: f"{t} {b[0]}", "texts", "none of these words"),
    "at_least": FormatCheck(
        lambda t, v: occurrences(t, v[0]) >= v[1], lambda t, v: _without(t, v[:1]), "count_of", "a word N times or more"
    ),
    "at_most": FormatCheck(
        lambda t, v: occurrences(t, v[0]) <= v[1],
        lambda t, v: t + f" {v[0]}" * (v[1] + 1),
        "count_of",
        "a word N times or less",
    ),
    "starts_with": FormatCheck(
        lambda t, s: t.lstrip().startswith(s), lambda t, s: _other(s[0]) + t, "text", "this text first"
    ),
    "ends_with": FormatCheck(
        lambda t, s: t.rstrip().casefold().endswith(s.casefold()),
        lambda t, s: f"{t} {_other(s[-1])}",
        "text",
        "this text last",
    ),
    "one_of": FormatCheck(
        lambda t, s: t.strip() in s,
        lambda t, s: f"{t} {s[0]} {s[-1]}",
        "texts",
        "exactly one of these texts, and nothing else",
    ),
    "json": FormatCheck(
        lambda t, _: parsed_json(t) is not ..., lambda t, _: t + " }}{", "nothing", "a JSON value, and nothing else"
    ),
    "json_keys": FormatCheck(
        _has_keys, lambda t, keys: json.dumps({f"{keys[0]}~": t}), "texts", "a JSON object with these keys"
    ),
    "no_commas": FormatCheck(lambda t, _: "," not in t, lambda t, _: f"{t}, indeed", "nothing", "no comma"),
    "lowercase": FormatCheck(lambda t, _: t == t.lower(), lambda t, _: f"{t} Shout", "nothing", "no capital letter"),
    "uppercase": FormatCheck(
        lambda t, _: t == t.upper(), lambda t, _: f"{t} whisper", "nothing", "capital letters only"
    ),
    "title": FormatCheck(
        lambda t, _: "<<" in t and _marked(t, "<<", ">>") > 0,
        lambda t, _: t.replace("<<", ""),
        "nothing",
        "a title in <<double angles>>",
    ),
    "quoted": FormatCheck(
        lambda t, _: len(t.strip()) > 2 and t.strip()[0] == t.strip()[-1] == '"',
        lambda t, _: f"{t} .",
        "nothing",
        "double quotes around everything",
    ),
    "min_placeholders": FormatCheck(
        lambda t, n: _marked(t, r"\[", r"\]") >= n, lambda t, _: t.replace("[", ""), "count", "N or more [placeholders]"
    ),
    "min_highlights": FormatCheck(
        lambda t, n: _marked(t, r"\*", r"\*") >= n, lambda t, _: t.replace("*", ""), "count", "N or more *highlights*"
    ),
}


# -- Whether a completion has the form that a task asks for (instruction following) ---------------
# Owns       how checks are written in a task, ours or IFEval's.
# Promises   1.0 when every check holds, else 0.0; an empty completion never earns; a check that is unknown or has an
# unfit value is refused, never skipped.
# Never      looks at what a text means.
#
# {"checks": [{"check": "max_words", "value": 50}, {"check": "no_commas"}]}
# {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}


class RequestedCheck(NamedTuple):
    """One check with its value."""

    check: str
    value: Any = None


def verify_format(checks: Sequence[RequestedCheck], completion: str) -> float:
    """1.0 when all `checks` hold for what was said after reasoning.

    Example:
        >>> asked = read_checks({"checks": [{"check": "max_words", "value": 3}, {"check": "no_commas"}]})
        >>> verify_format(asked, "Short and good"), verify_format(asked, "Short, good"), verify_format(asked, "")
        (1.0, 0.0, 0.0)
    """
    said = without_reasoning(completion).strip()
    if not any(char.isalnum() for char in said):
        return 0.0
    return float(all(CHECKS[check].holds(said, value) for check, value in checks))


def read_checks(problem: Mapping[str, Any]) -> list[RequestedCheck]:
    """What a task asks for: its `checks`, or IFEval's `instruction_id_list` and `kwargs`; none at all is refused."""
    given = problem.get("checks")
    if isinstance(given, str):
        given = _json(given)
    asked = [_own(each) for each in given] if isinstance(given, list) else []
    asked += _ifeval(problem.get("instruction_id_list"), problem.get("kwargs"))
    if not asked:
        raise RewardError(
            "a format task asks for nothing",
            "every text would be right",
            'give "checks": [{"check": "max_words", "value": 50}], or IFEval\'s instruction_id_list and kwargs',
        )
    return asked


def broken(checks: Sequence[RequestedCheck], bases: Sequence[str]) -> list[str]:
    """Texts that each fail one of `checks`, made from `bases`; for probing a reward."""
    return [CHECKS[check].breaks(base, value) for base in bases for check, value in checks]


def _own(given: Any) -> RequestedCheck:
    if not isinstance(given, Mapping) or given.get("check") not in CHECKS:
        raise _refusal(f"the format check {given!r} is unknown", "checks", sorted(CHECKS))
    name = str(given["check"])
    if unknown := sorted(set(given) - {"check", "value"}):
        raise _refusal(f"the format check {name} has a key {unknown[0]!r}", "keys", ["check", "value"])
    return RequestedCheck(name, _value(name, given.get("value")))


def _value(name: str, value: Any) -> Any:
    """The value in the shape that the check takes."""
    takes = CHECKS[name].takes
    if takes == "texts" and isinstance(value, str):
        value = [value]
    fits = {
        "nothing": value in (None, True),
        "count": type(value) is int and 0 < value <= 100_000,
        "text": isinstance(value, str) and bool(value),
        "texts": isinstance(value, list) and bool(value) and all(isinstance(each, str) and each for each in value),
        "count_of": isinstance(value, list) and len(value) == 2 and isinstance(value[0], str) and bool(value[0])
        and type(value[1]) is int and (name == "at_least") <= value[1] <= 100_000,
    }  # fmt: skip
    if not fits[takes]:
        raise _refusal(f"the format check {name} has the value {value!r}", "kinds of value here", [takes])
    return value


# -- IFEval's own names ----------------------------------------------------------

_IFEVAL: Mapping[str, tuple[str, str | None]] = {
    "punctuation:no_comma": ("no_commas", None),
    "length_constraints:number_paragraphs": ("paragraphs", "num_paragraphs"),
    "detectable_format:number_bullet_lists": ("bullets", "num_bullets"),
    "detectable_format:number_highlighted_sections": ("min_highlights", "num_highlights"),
    "detectable_format:json_format": ("json", None),
    "detectable_format:title": ("title", None),
    "detectable_content:number_placeholders": ("min_placeholders", "num_placeholders"),
    "detectable_content:postscript": ("include", "postscript_marker"),
    "keywords:existence": ("include", "keywords"),
    "keywords:forbidden_words": ("exclude", "forbidden_words"),
    "change_case:english_lowercase": ("lowercase", None),
    "change_case:english_capital": ("uppercase", None),
    "startend:end_checker": ("ends_with", "end_phrase"),
    "startend:quotation": ("quoted", None),
}
"""IFEval's instruction -> (our check, the argument that is its value)."""
_COUNTED: Mapping[str, tuple[str, str]] = {
    "length_constraints:number_words": ("words", "num_words"),
    "length_constraints:number_sentences": ("sentences", "num_sentences"),
    "keywords:frequency": ("", "frequency"),
}
"""The same for those with a relation, "at least" or "less than"."""


def _ifeval(names: Any, arguments: Any) -> list[RequestedCheck]:
    if names is None:
        return []
    arguments = [{}] * len(names) if arguments is None else arguments
    if isinstance(names, str) or len(names) != len(arguments):
        raise _refusal("instruction_id_list and kwargs differ in length", "shapes", ["one kwargs per instruction"])
    return [_instruction(str(name), given or {}) for name, given in zip(names, arguments, strict=True)]


def _instruction(name: str, given: Mapping[str, Any]) -> RequestedCheck:
    if name in _IFEVAL:
        check, argument = _IFEVAL[name]
        return RequestedCheck(check, _value(check, None if argument is None else given.get(argument)))
    if name not in _COUNTED:
        raise _refusal(f"the IFEval instruction {name!r} is not supported", "instructions", [*_IFEVAL, *_COUNTED])
    unit, argument = _COUNTED[name]
    count, relation = given.get(argument), given.get("relation", "at least")
    if type(count) is not int or relation not in ("at least", "less than"):
        raise _refusal(
            f"{name} has {argument} = {count!r}, relation {relation!r}", "relations", ["at least", "less than"]
        )
    if not unit:
        check, value = ("at_least", count) if relation == "at least" else ("at_most", count - 1)
        return RequestedCheck(check, _value(check, [given.get("keyword"), value]))
    check = f"min_{unit}" if relation == "at least" else f"max_{unit}"
    return RequestedCheck(check, _value(check, count if relation == "at least" else count - 1))


def _json(text: str) -> Any:
    try:
        return parse(text)
    except ValueError as error:
        raise _refusal(f"checks is a text that is not JSON: {text[:60]!r}", "shapes", ["a list of checks"]) from error


def _refusal(what: str, kind: str, known: Sequence[str]) -> RewardError:
    return RewardError(what, "a check that is guessed or left out changes what is rewarded",
                       f"known {kind}: {', '.join(known)}")  # fmt: skip

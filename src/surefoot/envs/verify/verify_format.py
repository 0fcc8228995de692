"""Whether a completion has the form that a task asks for (instruction following).

Owns       how checks are written in a task, ours or IFEval's.
Promises   1.0 when every check holds, else 0.0; an empty completion never earns; a check that is unknown or has an
           unfit value is refused, never skipped.
Never      looks at what a text means.

    {"checks": [{"check": "max_words", "value": 50}, {"check": "no_commas"}]}
    {"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}

Read next: `format_checks.py`, the checks themselves.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from surefoot.envs.verify.final_answer import without_reasoning
from surefoot.envs.verify.format_checks import CHECKS
from surefoot.errors import RewardError


class Asked(NamedTuple):
    """One check with its value."""

    check: str
    value: Any = None


def verify_format(checks: Sequence[Asked], completion: str) -> float:
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


def read_checks(problem: Mapping[str, Any]) -> list[Asked]:
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


def broken(checks: Sequence[Asked], bases: Sequence[str]) -> list[str]:
    """Texts that each fail one of `checks`, made from `bases`; for probing a reward."""
    return [CHECKS[check].breaks(base, value) for base in bases for check, value in checks]


def _own(given: Any) -> Asked:
    if not isinstance(given, Mapping) or given.get("check") not in CHECKS:
        raise _refusal(f"the format check {given!r} is unknown", "checks", sorted(CHECKS))
    name = str(given["check"])
    if unknown := sorted(set(given) - {"check", "value"}):
        raise _refusal(f"the format check {name} has a key {unknown[0]!r}", "keys", ["check", "value"])
    return Asked(name, _value(name, given.get("value")))


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


def _ifeval(names: Any, arguments: Any) -> list[Asked]:
    if names is None:
        return []
    arguments = [{}] * len(names) if arguments is None else arguments
    if isinstance(names, str) or len(names) != len(arguments):
        raise _refusal("instruction_id_list and kwargs differ in length", "shapes", ["one kwargs per instruction"])
    return [_instruction(str(name), given or {}) for name, given in zip(names, arguments, strict=True)]


def _instruction(name: str, given: Mapping[str, Any]) -> Asked:
    if name in _IFEVAL:
        check, argument = _IFEVAL[name]
        return Asked(check, _value(check, None if argument is None else given.get(argument)))
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
        return Asked(check, _value(check, [given.get("keyword"), value]))
    check = f"min_{unit}" if relation == "at least" else f"max_{unit}"
    return Asked(check, _value(check, count if relation == "at least" else count - 1))


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _refusal(f"checks is a text that is not JSON: {text[:60]!r}", "shapes", ["a list of checks"]) from error


def _refusal(what: str, kind: str, known: Sequence[str]) -> RewardError:
    return RewardError(what, "a check that is guessed or left out changes what is rewarded",
                       f"known {kind}: {', '.join(known)}")  # fmt: skip

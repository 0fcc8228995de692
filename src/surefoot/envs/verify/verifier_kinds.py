"""The kinds of verifier that a task can name, and what each needs from the task.

Owns       names, aliases, and where in a task the gold answer stands.
Promises   a task that its kind cannot judge is refused by name; a gold that is empty is refused, because it would
           reward silence.
Never      judges anything itself.

Read next: the `verify_*.py` file of a kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from surefoot.envs.verify import verify_choice, verify_code, verify_format, verify_math
from surefoot.envs.verify.final_answer import tagged_answer
from surefoot.errors import RewardError

Problem = Mapping[str, Any]
Verifier = Callable[[Problem, str], float | None]
"""`verify(problem, answer)`: a score from 0 to 1, or None for no verdict."""

TYPE = "verifier_type"
ALIASES = {"gsm8k": "math", "ifeval": "format"}
_NESTED = ("reward_spec", "reward_model")
"""Columns that may hold what a verifier needs, one level down."""
_GOLD = ("answer", "ground_truth")


def _nothing(*_: Any) -> None:
    return None


@dataclass(frozen=True)
class Kind:
    """One way to judge."""

    verify: Verifier
    check: Callable[[Problem], object] = _nothing
    """Raises RewardError for a problem that this kind cannot judge."""
    prepare: Callable[[], None] = _nothing
    """Loads what is slow to load."""


def problem_of(problem: Problem) -> Problem:
    """A problem with what its `reward_spec` holds beside its own columns; its own come first."""
    merged: dict[str, Any] = {}
    for name in _NESTED:
        nested = problem.get(name)
        merged |= dict(nested) if isinstance(nested, Mapping) else {}
    return merged | {name: value for name, value in problem.items() if value is not None}


def known_kind(problem: Problem, kinds: Mapping[str, Kind]) -> str:
    """The kind that a problem names, aliases resolved."""
    named = problem_of(problem).get(TYPE)
    known = ", ".join(sorted([*kinds, *ALIASES]))
    if not isinstance(named, str) or not named.strip():
        raise RewardError(
            f"a problem names no verifier: {TYPE} is {named!r}",
            "scoring it 0 would train on a reward that nobody gave",
            f"set {TYPE} to one of {known}",
        )
    kind = named if named in kinds else ALIASES.get(named, named)
    if kind not in kinds:
        raise RewardError(
            f"there is no verifier of type {named!r}",
            "scoring it 0 would train on a reward that nobody gave",
            f"known are {known}" + ("; a judge is given as MultiVerifier(judge=function)" if named == "judge" else ""),
        )
    return kind


def gold_of(problem: Problem) -> Any:
    """The gold answer, from `answer`, `ground_truth` or `reward_spec.ground_truth`; None when there is none."""
    whole = problem_of(problem)
    found = next((whole[name] for name in _GOLD if whole.get(name) is not None), None)
    return None if isinstance(found, str) and not found.strip() else found


def _needed_gold(problem: Problem) -> Any:
    gold = gold_of(problem)
    if gold is None:
        raise RewardError(
            "a problem has no gold answer, or an empty one",
            "an empty gold answer would reward silence",
            "give it as answer, ground_truth or reward_spec.ground_truth",
        )
    return gold


def _exact(problem: Problem, said: str) -> float:
    """The whole text, or what it puts between answer tags, is the gold answer to the letter."""
    tagged = tagged_answer(said)
    return float((said.strip() if tagged is None else tagged) == str(_needed_gold(problem)).strip())


def _choices(problem: Problem) -> Any:
    choices = problem.get("choices")
    if choices is not None and (isinstance(choices, str) or not 2 <= len(choices) <= 26):
        raise RewardError(f"choices are {choices!r}", "each choice has a letter", "give a list of 2 to 26 texts")
    return choices


def _check_choice(problem: Problem) -> None:
    verify_choice.verify_choice(_needed_gold(problem), "", _choices(problem))


def _code(problem: Problem, said: str) -> float:
    return verify_code.verify_code(problem.get("tests"), said)


BUILT_IN: dict[str, Kind] = {
    "exact": Kind(_exact, _needed_gold),
    "math": Kind(
        lambda problem, said: verify_math.verify_math(_needed_gold(problem), said),
        lambda problem: verify_math.check_gold(_needed_gold(problem)),
    ),
    "format": Kind(
        lambda problem, said: verify_format.verify_format(verify_format.read_checks(problem), said),
        verify_format.read_checks,
    ),
    "choice": Kind(
        lambda problem, said: verify_choice.verify_choice(_needed_gold(problem), said, _choices(problem)), _check_choice
    ),
    "code": Kind(
        _code,
        lambda problem: verify_code.checked_tests(problem.get("tests")),
        verify_code.require_sandbox,
    ),
}

"""Loss types, estimators, engines, environments and guard rules by name: what each refuses, without the code behind it.

Owns       the names that `loss_type`, `scale_rewards`, `engine.kind`, `tools.environment` and `guard.rules` take, facts
           about each that the plan needs, and which values of other keys each refuses.
Promises   imports no torch; a test holds these tables against those of `maths`, `guards` and the engines.
Never      loads code: `own_code.py` does, where a key names a function of the user's own.

docs/extending.md says which files a new entry needs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

OWN = re.compile(r"[^:\x00-\x1f]+\.py:[A-Za-z_]\w*")
"""`file.py:name`: a function, class or object of the user's own."""


def is_own(value: object) -> bool:
    """Whether a value names code of the user's own.

    Example:
        >>> is_own("my_loss.py:my_loss"), is_own("dapo"), is_own("my_loss.py")
        (True, False, False)
    """
    return isinstance(value, str) and OWN.fullmatch(value) is not None


def own_text(value: str) -> str:
    """The value itself, for pydantic; a `ValueError` when it names no code."""
    if not is_own(value):
        raise ValueError("it is written as file.py:name")
    return value


@dataclass(frozen=True, slots=True)
class RefusedValue:
    """A value of another key that does not go with an entry."""

    key: str
    when: Callable[[Any], bool]
    say: str
    """Why, and what to write instead."""


def refused_values(
    key: str, name: str, pairs: tuple[RefusedValue, ...], value_of: Callable[[str], Any]
) -> Iterator[str]:
    """One line for each pair that does not go together, both values quoted."""
    for pair in pairs:
        value = value_of(pair.key)
        if pair.when(value):
            yield f"{key} = {name} with {pair.key} = {value}: {pair.say}"


@dataclass(frozen=True, kw_only=True, slots=True)
class LossFacts:
    """What config and plan know of a loss type; its formula is in `maths.losses.LOSSES`."""

    row_ratio: bool = False
    """Always one ratio per row."""
    row_means: bool = False
    """The mean over rows of the mean over tokens; the others add up tokens."""
    refuses: tuple[RefusedValue, ...] = ()


LOSSES: Mapping[str, LossFacts] = {
    "grpo": LossFacts(row_means=True),
    "bnpo": LossFacts(),
    "dr_grpo": LossFacts(
        refuses=(
            RefusedValue(
                "scale_rewards",
                lambda scale: scale == "group",
                "Dr. GRPO does not divide by the std; set scale_rewards = none (or batch, rank)",
            ),
        )
    ),
    "dapo": LossFacts(),
    "cispo": LossFacts(
        refuses=(
            RefusedValue(
                "importance_sampling_level",
                lambda level: level == "sequence",
                "cispo weighs single tokens; use token",
            ),
            RefusedValue(
                "epsilon_high",
                lambda cap: cap is None or cap < 1,
                "for cispo it is the cap on the weight itself; set it to 1 or more (5.0 is common)",
            ),
            RefusedValue("delta", lambda delta: delta is not None, "cispo has no second clip; remove delta"),
        )
    ),
    "gspo": LossFacts(
        row_ratio=True,
        row_means=True,
        refuses=(
            RefusedValue(
                "importance_sampling_level",
                lambda level: level == "token",
                "gspo has one ratio per row; leave the level out",
            ),
        ),
    ),
}
"""Loss type -> what is known of it here."""

OWN_LOSS = LossFacts()
"""What is known of a loss of the user's own: one ratio per token unless the config says otherwise."""

ESTIMATORS = ("group", "batch", "rank", "none")
"""Advantage estimators; `maths.advantages.ESTIMATORS` has their formulas."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineFacts:
    """What config and plan know of an engine."""

    makes: str
    """`module:function` of ours that takes `protocols.EngineInputs` and says how the engine is built."""
    has_url: bool = False
    """It is asked at engine.url."""
    elsewhere: bool = False
    """It holds its weights on another machine, or in a process that is not ours."""
    reads_learner: bool = False
    """On a GPU it reads the learner's own weights instead of a copy."""
    is_measured: bool = False
    """A dry run measures this very engine."""
    refuses: tuple[RefusedValue, ...] = ()


ENGINES: Mapping[str, EngineFacts] = {
    "auto": EngineFacts(makes="surefoot.run.build:auto_engine", reads_learner=True, is_measured=True),
    "embedded": EngineFacts(makes="surefoot.run.build:embedded_engine", reads_learner=True, is_measured=True),
    "transformers": EngineFacts(makes="surefoot.run.build:transformers_engine", reads_learner=True),
    "vllm": EngineFacts(
        makes="surefoot.run.build:vllm_engine",
        refuses=(RefusedValue("temperature", lambda value: value > 2, "vLLM takes at most 2"),),
    ),
    "openai": EngineFacts(makes="surefoot.run.build:server_engine", has_url=True, elsewhere=True),
}
"""Engine -> what is known of it here."""

OWN_ENGINE = EngineFacts(makes="surefoot.engines.own:spec")
"""What is known of an engine of the user's own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentFacts:
    """What config and plan know of a kind of environment that has a name."""

    makes: str
    """`module:function` of ours that gives the toolkit for what stands behind the colon."""
    argument: str = ""
    """An example of what has to stand behind the colon; nothing may where this is empty."""


ENVIRONMENTS: Mapping[str, EnvironmentFacts] = {
    "gymnasium": EnvironmentFacts(
        makes="surefoot.tools.python.environments:gymnasium_toolkit", argument="FrozenLake-v1"
    ),
    "reasoning_gym": EnvironmentFacts(makes="surefoot.tools.python.environments:reasoning_gym_toolkit"),
}
"""Kind of environment -> what is known of it here."""

RULES = (
    "decline gap kl both_falling entropy_collapse length_explosion length_collapse reward_saturated".split()
)  # fmt: skip
"""Rules of the guard; `guards.collapse_rules.RULES` has them."""


def loss_facts(loss_type: str) -> LossFacts:
    """What is known of a value of `loss_type`."""
    return OWN_LOSS if is_own(loss_type) else LOSSES[loss_type]


def engine_facts(kind: str) -> EngineFacts:
    """What is known of a value of `engine.kind`."""
    return OWN_ENGINE if is_own(kind) else ENGINES[kind]


def named_environment(value: object) -> tuple[str, str] | None:
    """(kind, what stands behind the colon) of a value of `tools.environment`; None where it is code of the user's own.

    Example:
        >>> named_environment("gymnasium:FrozenLake-v1"), named_environment("room.py:Room")
        (('gymnasium', 'FrozenLake-v1'), None)
    """
    if not isinstance(value, str) or is_own(value):
        return None
    kind, _, argument = value.partition(":")
    return (kind, argument) if kind in ENVIRONMENTS else None


def environment_problem(value: str) -> str | None:
    """Why this value of `tools.environment` means nothing; None where it does."""
    forms = [f"{name}:{facts.argument}" if facts.argument else name for name, facts in ENVIRONMENTS.items()]
    named = named_environment(value)
    if named is None:
        return None if is_own(value) else f"it is file.py:Class, or a kind of ours: {', '.join(forms)}"
    kind, argument = named
    example = ENVIRONMENTS[kind].argument
    if bool(argument) == bool(example):
        return None
    return f"it needs a name behind the colon, such as {kind}:{example}" if example else f"write {kind} alone"

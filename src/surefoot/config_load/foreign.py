"""What other trainers call things: every name of `foreign.toml`, and what is said to whoever writes it.

Owns       the rows (accepted, mapped, refused), values of theirs for keys of ours, and TRL's defaults that are not ours.
Promises   a hint that says "use X, such as X=1" names something that loads; a known name is never answered with a
           similar one.
Never      reads the table before somebody needs it.

Read next: `foreign.toml`, the table; `keys.py`, which asks for unknown names.
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from surefoot.config_load.keys import ALIASES, all_keys, nearest, tables

TABLE = Path(__file__).parent / "foreign.toml"
TRAINERS = {
    "trl": "TRL's GRPOConfig",
    "trl_trainer": "TRL's GRPOTrainer",
    "trl_scripts": "TRL's scripts and older versions",
    "verl": "verl",
    "nemo_rl": "NeMo RL",
    "prime_rl": "prime-rl",
    "openrlhf": "OpenRLHF",
    "unsloth": "unsloth",
    "others": "others",
}
"""Columns of the table -> what they are called for readers."""
OURS_TOO = frozenset(
    "model tasks reward_funcs tasks_per_step microbatch_size dtype device chat_template max_prompt_length engine.kind".split()
)
"""Keys that TRL does not have and that a TRL user writes nevertheless: required, or what hints lead to."""
MANY = 6
"""So many of TRL's names, and no key that only somebody at home here would write, are taken for a config from there."""

Verdict = Literal["accepted", "mapped", "refused"]


@dataclass(frozen=True, slots=True)
class Row:
    """What is said of some names of other trainers that mean the same."""

    verdict: Verdict
    names: dict[str, tuple[str, ...]]
    """Trainer -> its names."""
    write: tuple[str, ...] = ()
    """Overrides that do here what the name does there, with an example value each."""
    run: str = ""
    """The command that does it, where no key does."""
    say: str = ""
    """What to know about it, or why not."""

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of ours that `write` sets."""
        return tuple(word.partition("=")[0] for word in self.write)

    def owners(self, path: str) -> set[str]:
        """The trainers whose name `path` is, or ends like."""
        leaf = path.rpartition(".")[2]
        return {trainer for trainer, names in self.names.items() if path in names or leaf in names}

    def hint(self, *, typed: bool = False) -> str:
        """The sentence after `unknown key NAME; `; with `typed`, what to write is quoted for a command line."""
        if self.verdict == "refused":
            return self.say
        instead = f"use `{self.run}`" if self.run else f"use {_and(self.keys)}, such as {self._example(typed)}"
        return f"{instead}; {self.say}" if self.say else instead

    def _example(self, typed: bool) -> str:
        if typed:
            import shlex

            return " ".join(shlex.quote(word) for word in self.write)
        return ", ".join(word.replace("=", " = ", 1) for word in self.write)


@dataclass(frozen=True, slots=True)
class OtherDefault:
    """A key that TRL has too, with another default."""

    key: str
    field: str
    """TRL's name of it."""
    trl: str
    """TRL's default, as text."""
    means: str
    """What that comes to, for readers."""
    shown: bool
    """Whether it changes what is trained, so that it is printed."""
    say: str


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads(TABLE.read_text(encoding="utf-8"))


@cache
def rows() -> tuple[Row, ...]:
    """Every row, in the order of the file."""
    found = []
    verdicts: tuple[Verdict, ...] = ("accepted", "mapped", "refused")
    for verdict in verdicts:
        for entry in _table()[verdict]:
            names = {trainer: tuple(entry[trainer]) for trainer in TRAINERS if trainer in entry}
            found.append(Row(verdict, names, tuple(entry.get("write", ())), entry.get("run", ""), entry.get("say", "")))
    return tuple(found)


@cache
def by_name() -> dict[str, Row]:
    """Name as the other trainer writes it -> its row."""
    return {name: row for row in rows() for names in row.names.values() for name in names}


@cache
def _by_end() -> dict[str, list[str]]:
    """Last part of a name -> the names that end so."""
    ends: dict[str, list[str]] = {}
    for name in by_name():
        ends.setdefault(name.rpartition(".")[2], []).append(name)
    return ends


@cache
def names_of(trainer: str) -> frozenset[str]:
    """All names of one trainer."""
    return frozenset(name for row in rows() for name in row.names.get(trainer, ()))


def find(path: str) -> Row | None:
    """The row of a name that is not ours: exactly, or by the end that it shares with one in the table.

    `rollout.n` is verl's `actor_rollout_ref.rollout.n`, and a bare `ppo_epochs` is found too. A single word is found
    only where it stands in the table by itself: `rank` or `path` alone may mean anything. Below a table of ours, what
    is near to one of its keys is a slip of the pen, not a foreign name.
    """
    known = by_name()
    if path in known:
        row = known[path]
        return None if row.verdict == "accepted" else row
    parts = path.split(".")
    if parts[0] in tables() and nearest(path):
        return None
    best: dict[int, list[str]] = {}
    for name in _by_end().get(parts[-1], ()):
        shared = _shared_end(parts, name.split("."))
        if shared > 1 or (shared == 1 and ("_" in parts[-1] or "." not in name)):
            best.setdefault(shared, []).append(name)
    for shared in sorted(best, reverse=True):
        alone = [name for name in best[shared] if "." not in name] or best[shared]
        found = {id(known[name]): known[name] for name in alone if known[name].verdict != "accepted"}
        if len(found) == 1:
            return next(iter(found.values()))
    return None


def _shared_end(one: list[str], other: list[str]) -> int:
    """How many parts, counted from the end, are the same."""
    shared = 0
    for a, b in zip(reversed(one), reversed(other), strict=False):
        if a != b:
            break
        shared += 1
    return shared


def value_hint(key: str, value: Any) -> str:
    """What to say of a value that another trainer has for this key; empty when nothing is known."""
    if (
        isinstance(value, float)
        and 0 < value < 1
        and key in ("eval_steps", "save_steps", "logging_steps", "warmup_steps")
    ):
        return "TRL reads a number below 1 as a share of the run; write whole steps"
    given = value if isinstance(value, list | tuple) else [value]
    for entry in _table()["value"]:
        if entry["key"] == key and any(item in entry["values"] for item in given):
            return str(entry["say"])
    return ""


def read_form(key: str, value: Any) -> Any:
    """A value in TRL's form as ours: `report_to = "none"` is an empty list, `scale_rewards = true` is "group"."""
    if key == "scale_rewards" and isinstance(value, bool):
        return "group" if value else "none"
    if key == "report_to" and value in ("none", ["none"], ("none",)):
        return []
    if key == "report_to" and value in ("tensorboard", "wandb"):
        return [value]
    return value


# -- TRL's defaults -------------------------------------------------------------


@cache
def other_defaults() -> tuple[OtherDefault, ...]:
    """Every default of TRL's that is not ours."""
    return tuple(
        OtherDefault(
            each["key"],
            each.get("field", each["key"]),
            each["trl"],
            each.get("means", each["trl"]),
            each.get("shown", False),
            each["say"],
        )
        for each in _table()["default"]
    )


def is_from_trl(explicit: Collection[str]) -> bool:
    """Whether keys that were written look like a TRL script: many of its names, and none that only we have."""
    if len(explicit) < MANY:
        return False
    names = names_of("trl") | {ALIASES.get(name, name) for name in names_of("trl")}
    return len(names & set(explicit)) >= MANY and set(explicit) <= names | OURS_TOO


def default_lines(explicit: Collection[str]) -> list[str]:
    """The defaults in force that TRL has otherwise; keys that were written are left out. Empty when there are none."""
    import textwrap

    from surefoot.config_load.dump import shown_default

    told = [
        f"{each.key} = {shown_default(all_keys()[each.key])} (TRL: {each.means})"
        for each in other_defaults()
        if each.shown and each.key not in explicit
    ]
    if not told:
        return []
    text = "where this config says nothing, ours are not TRL's: " + ", ".join(told)
    return textwrap.wrap(text, 118, initial_indent="defaults  ", subsequent_indent=" " * 10, break_on_hyphens=False)


# -- for readers ----------------------------------------------------------------


def said(name: str, row: Row, *, typed: bool = False) -> str:
    """What is said of one name; of an accepted one, under which key it is read."""
    if row.verdict != "accepted":
        return row.hint(typed=typed)
    return f"accepted as {ALIASES[name]}" if name in ALIASES else "accepted"


def _and(words: Collection[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last

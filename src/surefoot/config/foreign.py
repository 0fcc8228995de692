"""What other trainers call things: every name of `foreign.toml`, and what is said to whoever writes it.

Owns       the rows (accepted, mapped, refused), values of theirs for keys of ours, and TRL's defaults that are not ours.
Promises   a hint that says "use X, such as X=1" or "write X=1" names something that loads, and never the opposite of
           what was asked; a value that asks for what is so anyway is accepted; a known name is never answered with a
           similar one.
Never      reads the table before somebody needs it.

Read next: `foreign.toml`, the table; `keys.py`, which asks for unknown names.
"""

from __future__ import annotations

import textwrap
import tomllib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from surefoot.config.files import SUFFIXES
from surefoot.config.keys import ALIASES, ConfigKey, all_keys, describe_key, nearest, tables, topics
from surefoot.errors import ConfigError

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

NameVerdict = Literal["accepted", "mapped", "refused", "so"]
"""`so` is the answer to a value that asks for what is so anyway: accepted, and told why."""


@dataclass(frozen=True, slots=True)
class Case:
    """What is said instead where a name has one of these values."""

    values: tuple[Any, ...]
    names: tuple[str, ...] = ()
    """The names of the row that it is about; empty: all."""
    write: tuple[str, ...] = ()
    say: str = ""
    so: bool = False
    """Whether they ask for what is so anyway, whatever else the config says."""

    def covers(self, path: str) -> bool:
        """Whether it is about this name, or about one that ends like it."""
        leaf = path.rpartition(".")[2]
        return not self.names or path in self.names or leaf in {name.rpartition(".")[2] for name in self.names}

    def takes(self, value: Any) -> bool:
        """Whether `value` is one of its values; none and null are the same, and 1 is not true."""
        given = _plain(value)
        return any(given == _plain(each) and isinstance(given, bool) == isinstance(each, bool) for each in self.values)


@dataclass(frozen=True, slots=True)
class ForeignName:
    """What is said of some names of other trainers that mean the same."""

    verdict: NameVerdict
    names: dict[str, tuple[str, ...]]
    """Trainer -> its names."""
    write: tuple[str, ...] = ()
    """Overrides that do here what the name does there, with an example value each."""
    run: str = ""
    """The command that does it, where no key does."""
    say: str = ""
    """What to know about it, or why not."""
    cases: tuple[Case, ...] = ()
    """Values that get another answer."""
    same: tuple[str, ...] = ()
    """Names whose value is the value of the key in `write`."""
    exact: bool = False
    """Whether `write` does what was asked, rather than being an example."""

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of ours that `write` sets."""
        return tuple(word.partition("=")[0] for word in self.write)

    def owners(self, path: str) -> set[str]:
        """The trainers whose name `path` is, or ends like."""
        leaf = path.rpartition(".")[2]
        return {trainer for trainer, names in self.names.items() if path in names or leaf in names}

    def at(self, path: str, value: Any) -> ForeignName:
        """The row as it answers this value of this name."""
        for case in self.cases:
            if case.covers(path) and case.takes(value):
                return self._with(case)
        if any(Case((), (name,)).covers(path) for name in self.same) and _loads(self.keys[0], value):
            return replace(self, write=(f"{self.keys[0]}={_literal(value)}",), exact=True)
        return self

    def _with(self, case: Case) -> ForeignName:
        verdict: NameVerdict = "so" if case.so else "mapped" if case.write else "refused"
        say = case.say or (self.say if case.so else "")
        return replace(self, verdict=verdict, write=case.write, run="", say=say, exact=True)

    def hint(self, *, typed: bool = False) -> str:
        """The sentence after `unknown key NAME; `; with `typed`, what to write is quoted for a command line."""
        if self.verdict in ("refused", "so"):
            return self.say
        instead = f"use `{self.run}`" if self.run else f"use {_and(self.keys)}, such as {self._example(typed)}"
        if self.exact:
            instead = f"write {self._example(typed)}"
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
def rows() -> tuple[ForeignName, ...]:
    """Every row, in the order of the file."""
    found = []
    verdicts: tuple[NameVerdict, ...] = ("accepted", "mapped", "refused")
    for verdict in verdicts:
        for entry in _table()[verdict]:
            names = {trainer: tuple(entry[trainer]) for trainer in TRAINERS if trainer in entry}
            cases = tuple(
                Case(
                    tuple(case["values"]),
                    tuple(case.get("names", ())),
                    tuple(case.get("write", ())),
                    case.get("say", ""),
                    case.get("so", False),
                )
                for case in entry.get("when", ())
            )
            same = entry.get("same", ())
            every = tuple(dict.fromkeys(name for own in names.values() for name in own))
            found.append(
                ForeignName(
                    verdict,
                    names,
                    tuple(entry.get("write", ())),
                    entry.get("run", ""),
                    entry.get("say", ""),
                    cases,
                    every if same is True else tuple(same),
                )
            )
    return tuple(found)


@cache
def by_name() -> dict[str, ForeignName]:
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


def find(path: str) -> ForeignName | None:
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


def answer(path: str, value: Any) -> ForeignName | None:
    """The row of a name that is not ours, as it answers this value."""
    row = find(path)
    return row.at(path, value) if row else None


def _plain(value: Any) -> Any:
    """A value as cases are written: words of Python, YAML and JSON for nothing, true and false are one each."""
    if value is None or value == "":
        return "none"
    if isinstance(value, str):
        word = value.strip().lower()
        return {"null": "none", "false": False, "true": True}.get(word, word)
    return value


def _loads(key: str, value: Any) -> bool:
    """Whether a config with this key and value is taken."""
    from surefoot.config.load import Draft
    from surefoot.errors import ConfigError

    draft = Draft("a hint", {"model": "pebble", "tasks": "builtin:sums"})
    draft.add(key, value, "", {})
    try:
        draft.build()
    except ConfigError:
        return False
    return not draft.notes and value is not None


def _literal(value: Any) -> str:
    """As a user would write it: 1e-5, not 1e-05."""
    from surefoot.config.keys import toml_value

    text = toml_value(tuple(value) if isinstance(value, list) else value)
    return text.replace("e-0", "e-") if isinstance(value, float) else text


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
    if key == "optim" and isinstance(value, str):
        return _OPTIMISERS.get(value, value)
    return value


_OPTIMISERS = dict.fromkeys(("adamw_torch", "adamw_torch_fused", "adamw_hf"), "adamw")
_OPTIMISERS |= dict.fromkeys(("adamw_bnb_8bit", "adamw_torch_8bit"), "adamw_8bit")
"""What transformers calls an optimiser that is the same here: the same formulas, for the 8-bit ones by torchao."""


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

    from surefoot.config.keys import shown_default

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


def describe_foreign(name: str, row: ForeignName, *, typed: bool = False) -> str:
    """What is said of one name, and of its values that get another answer; of an accepted one, under which key."""
    if row.verdict != "accepted":
        others = [case for case in row.cases if case.covers(name)]
        return "; ".join([row.hint(typed=typed), *(_said_of(case, row, typed) for case in others)])
    return f"accepted as {ALIASES[name]}" if name in ALIASES else "accepted"


def _said_of(case: Case, row: ForeignName, typed: bool) -> str:
    values = " or ".join(str(value).lower() for value in case.values)
    if case.so:
        return f"{values} is accepted, for it is so anyway"
    return f"for {values}: {row._with(case).hint(typed=typed)}"


def _and(words: Collection[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


# -- `surefoot config WORD`: keys of ours and names of other trainers that have to do with a word -
# Promises   whatever is said of a foreign name here is what a config that uses it is told; no hit is an error, not silence.


def is_search(word: str) -> bool:
    """Whether a word asks about keys: it is neither an override, nor an option, nor a file of a config's kind."""
    return bool(word) and not word.startswith("-") and "=" not in word and "/" not in word \
        and not word.endswith(SUFFIXES)  # fmt: skip


def search(words: Sequence[str]) -> list[str]:
    """Lines about all `words` together: our keys first, best hits first, then what others call things."""
    wanted = [word.lower().replace("-", "_") for word in words]
    if odd := [word for word in words if not is_search(word)]:
        raise ConfigError(
            f"{odd[0]!r} after a word to search for",
            "one call either searches keys or shows a config",
            f"leave {' '.join(words[: words.index(odd[0])])} out, or everything else",
        )
    ours, theirs = list(_ours(wanted)), list(_theirs(wanted))
    if not ours and not theirs:
        raise ConfigError(
            f"nothing about {' '.join(words)}: no key, no help text and no other trainer's name has it",
            "a config file ends in " + ", ".join(SUFFIXES) + ", so this was taken for a word to search for",
            "try a shorter word; `surefoot config` alone prints every key",
        )
    if theirs:
        ours += ["", "== what other trainers call it ==", *theirs]
    return ours[1:] if ours[0] == "" else ours


def _ours(wanted: Sequence[str]) -> Iterator[str]:
    """Keys whose name has the words, then those whose help or values have them, each under its topic."""
    named = {key.path for key in all_keys().values() if _has(key.path, wanted)}
    aliases = {ALIASES[name] for name in ALIASES if _has(name, wanted)}
    for heading, keys in topics().items():
        hits = [key for key in keys if key.path in named]
        hits += [
            key for key in keys if key.path not in named and (key.path in aliases or _has(_help(key, heading), wanted))
        ]
        if hits:
            yield from ("", f"== {heading} ==")
        for key in hits:
            yield from describe_key(key)


def _help(key: ConfigKey, heading: str) -> str:
    return f"{key.path} {key.doc} {key.annotation} {heading}"


def _theirs(wanted: Sequence[str]) -> Iterator[str]:
    """Names with the words in them, or of a trainer that is called so, then what is said of them."""
    said: dict[str, dict[str, list[str]]] = {}
    for row in rows():
        for trainer, names in row.names.items():
            for name in names:
                if _has(f"{name} {TRAINERS[trainer]} {trainer}", wanted):
                    by_trainer = said.setdefault(describe_foreign(name, row, typed=True), {})
                    by_trainer.setdefault(TRAINERS[trainer], []).append(name)
    for text, by_trainer in said.items():
        for trainer, hits in by_trainer.items():
            yield from _folded(f"{trainer}: {', '.join(hits)}", "", "  ")
        yield from _folded(text, "    ", "    ")


def _folded(text: str, first: str, then: str) -> list[str]:
    return textwrap.wrap(
        text, 110, initial_indent=first, subsequent_indent=then, break_long_words=False, break_on_hyphens=False
    )


def _has(text: str, wanted: Sequence[str]) -> bool:
    low = text.lower()
    return all(word in low for word in wanted)

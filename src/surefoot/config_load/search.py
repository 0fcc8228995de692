"""`surefoot config WORD`: keys of ours and names of other trainers that have to do with a word.

Promises   whatever is said of a foreign name here is what a config that uses it is told; no hit is an error, not silence.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from surefoot.config_load import foreign
from surefoot.config_load.dump import describe_key
from surefoot.config_load.files import SUFFIXES
from surefoot.config_load.keys import ALIASES, Key, all_keys, topics
from surefoot.errors import ConfigError


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


def _help(key: Key, heading: str) -> str:
    return f"{key.path} {key.doc} {key.annotation} {heading}"


def _theirs(wanted: Sequence[str]) -> Iterator[str]:
    """Names with the words in them, or of a trainer that is called so, then what is said of them."""
    said: dict[str, dict[str, list[str]]] = {}
    for row in foreign.rows():
        for trainer, names in row.names.items():
            for name in names:
                if _has(f"{name} {foreign.TRAINERS[trainer]} {trainer}", wanted):
                    by_trainer = said.setdefault(foreign.said(name, row, typed=True), {})
                    by_trainer.setdefault(foreign.TRAINERS[trainer], []).append(name)
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

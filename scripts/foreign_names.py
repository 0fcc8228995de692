"""Write the tables of docs/migrating.md: what every name of another trainer is here, and which defaults differ.

    python scripts/foreign_names.py            rewrite the tables
    python scripts/foreign_names.py --check    exit 1 if they would change

They come from the table that answers a config with such a name, so the page and the command cannot disagree.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from list_files import rewrite_or_compare

from surefoot.config import foreign
from surefoot.config.keys import all_keys, shown_default

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "migrating.md"
MARKS = re.compile(r"(<!-- (\w+): written by scripts/foreign_names.py -->\n).*?(<!-- end of \2 -->)", flags=re.DOTALL)


def defaults() -> Iterator[str]:
    """A row for every default of TRL's that is not ours."""
    yield from ("| key | TRL 1.16 | here | |", "|---|---|---|---|")
    for each in foreign.other_defaults():
        name = f"`{each.key}`" + (f" (`{each.field}`)" if each.field != each.key else "")
        theirs = f"`{each.trl}`" if each.means == each.trl else each.means
        yield f"| {name} | {theirs} | `{shown_default(all_keys()[each.key])}` | {each.say} |"


def names(trainer: str) -> Iterator[str]:
    """A row for all names of one trainer that get the same answer."""
    yield from ("| there | here |", "|---|---|")
    for row in foreign.rows():
        answers: dict[str, list[str]] = {}
        for name in row.names.get(trainer, ()):
            answers.setdefault(foreign.describe_foreign(name, row), []).append(f"`{name}`")
        for answer, theirs in answers.items():
            yield f"| {', '.join(theirs)} | {answer} |"


def rewritten(document: str) -> str:
    """The document with everything between its marks made anew."""

    def fill(match: re.Match[str]) -> str:
        lines = defaults() if match[2] == "defaults" else names(match[2])
        return match[1] + "\n".join(lines) + "\n" + match[3]

    return MARKS.sub(fill, document)


if __name__ == "__main__":
    sys.exit(rewrite_or_compare(DOCUMENT, rewritten))

"""How the pages of the documentation hang together: links, reading order, and what a page may say only with a link.

Every function takes texts or a folder and returns its findings, so that it can be shown the real pages and planted ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

FENCED = re.compile(r"^(```+)[^\n]*\n.*?^\1[ \t]*$", flags=re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^()\s]+)\)")
HEADING = re.compile(r"^#{1,6} +(.+?) *$", flags=re.MULTILINE)
ENTRY = re.compile(r"^(\d+)\. \[[^\]]+\]\(([^)#]+)\)", flags=re.MULTILINE)


def prose(text: str) -> str:
    """A page without its blocks of code."""
    return FENCED.sub("", text)


def anchors(text: str) -> set[str]:
    """The names under which the headings of a page can be linked to, as the usual viewers of Markdown make them."""
    found: set[str] = set()
    for title in HEADING.findall(prose(text)):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).lower()
        name = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        again = (f"{name}-{number}" for number in range(1, 100))
        found.add(name if name not in found else next(each for each in again if each not in found))
    return found


def local_links(text: str) -> list[str]:
    """Targets of a page's links that stay in the repository."""
    found = LINK.findall(re.sub(r"`[^`\n]*`", "`code`", prose(text)))
    return [target for target in found if "://" not in target and not target.startswith("mailto:")]


def dead_links(page: Path) -> list[str]:
    """Links of a page whose file is not there, or whose heading is not in it."""
    found = []
    for target in local_links(page.read_text(encoding="utf-8")):
        name, _, heading = target.partition("#")
        file = page.parent / name if name else page
        if not file.exists():
            found.append(f"{page.name}: no file {target}")
        elif heading and (file.suffix != ".md" or heading not in anchors(file.read_text(encoding="utf-8"))):
            found.append(f"{page.name}: no heading {target}")
    return found


def unreached(index: Path) -> list[str]:
    """Pages beside or below the index that no way of links from it leads to; a link to a folder leads to all its pages."""
    folder = index.parent.resolve()
    seen, waiting = {index.resolve()}, [index.resolve()]
    while waiting:
        page = waiting.pop()
        for target in local_links(page.read_text(encoding="utf-8")):
            there = (page.parent / target.partition("#")[0]).resolve() if not target.startswith("#") else page
            pages = sorted(there.glob("*.md")) if there.is_dir() else [there] if there.suffix == ".md" else []
            new = [each for each in pages if each.is_file() and folder in each.parents and each not in seen]
            seen.update(new)
            waiting += new
    return [page.relative_to(folder).as_posix() for page in sorted(folder.rglob("*.md")) if page not in seen]


def entries(index: str) -> dict[str, list[tuple[int, str]]]:
    """(number, page) of the numbered entries of an index, under the heading that they stand below."""
    parts = re.split(r"^#{1,6} +(.+?) *$", index, flags=re.MULTILINE)
    pairs = zip(parts[1::2], parts[2::2], strict=True)
    found = {title: [(int(number), page) for number, page in ENTRY.findall(text)] for title, text in pairs}
    return {title: listed for title, listed in found.items() if listed}


def misnumbered(index: str, wanted: Mapping[str, Sequence[str]]) -> list[str]:
    """Where the numbered entries are not these pages in this order, counted 1, 2, 3 ... under each heading."""
    found, listed = [], entries(index)
    for title in [*wanted, *(title for title in listed if title not in wanted)]:
        right = list(enumerate(wanted.get(title, ()), 1))
        if listed.get(title) != right:
            found.append(f"{title}: {listed.get(title)}, not {right}")
    return found


def broken_chain(folder: Path, pages: Sequence[str]) -> list[str]:
    """Pages whose last line does not lead to the next entry by its number; the last one leads back to the index."""
    found = []
    for number, (name, after) in enumerate(zip(pages, [*pages[1:], "index.md"], strict=True), 2):
        last = (folder / name).read_text(encoding="utf-8").rstrip().rpartition("\n")[2]
        right = rf"Next: \[{number}\. [^\]]+\]\({re.escape(after)}\)" if number <= len(pages) else r"\(index\.md\)"
        if not re.search(right, last):
            found.append(f"{name} ends with {last!r}, which does not lead to {after}")
    return found


# -- tables that have to agree with something -------------------------------------------------------------


class Table(NamedTuple):
    """The rows of a table in Markdown, cell by cell, and the text behind it."""

    rows: list[list[str]]
    rest: str


def table(text: str, header: str) -> Table:
    """The table that begins with this header line."""
    _, found, after = text.partition(header + "\n")
    assert found, f"no table begins with {header}"
    lines = after.splitlines()[1:]
    end = next((number for number, line in enumerate(lines) if not line.startswith("|")), len(lines))
    cells = [[cell.strip() for cell in line.strip().strip("|").split(" | ")] for line in lines[:end]]
    return Table(cells, "\n".join(lines[end:]))


SYMPTOMS = "| you see | look at |"
RATIOS = "| what | ours against | ratio | goal | reached | where | on |"
LOST = re.compile(r"\*\*no\*\*|: missed|\| losing \||only at 8")


def symptoms_left_out(page: str) -> list[str]:
    """Numbered entries of the page that no symptom leads to, and links whose number is not that of their heading."""
    rows = table(page, SYMPTOMS).rows
    links = [pair for _, places in rows for pair in re.findall(r"\[(\d+)\]\(#([^)]+)\)", places)]
    numbers = re.findall(r"^## (\d+)\. ", page, flags=re.MULTILINE)
    found = [f"no symptom leads to {number}" for number in numbers if number not in {each for each, _ in links}]
    found += [f"[{number}] leads to #{place}" for number, place in links if not place.startswith(f"{number}-")]
    return found + [f"{symptom!r} leads nowhere" for symptom, places in rows if "](#" not in places]


def ratios_left_out(page: str) -> list[str]:
    """Ratios of the first table that stand in none below, and lost rows below that are not among its lost ones."""
    first = table(page, RATIOS)
    found = [f"{row[2]!r} of {row[0]} stands in no table below" for row in first.rows if not stands(row[2], first.rest)]
    lost = [row[2] for row in first.rows if "**no**" in row[4]]
    below = [line for line in first.rest.splitlines() if line.startswith("|") and LOST.search(line)]
    return found + [f"left out: {line}" for line in below if not any(stands(ratio, line) for ratio in lost)]


def stands(ratio: str, text: str) -> bool:
    """Whether every part of a cell stands in a text, word for word."""
    return all(part in text for part in ratio.split("; "))


# -- what was never shown ---------------------------------------------------------------------------------

SUBJECT = r"(?:KubeRay|Kubernetes|Slurm|Docker|NCCL|\bmps\b|vLLM on (?:a )?GPUs?)"
CLAIM = re.compile(
    rf"[^.;|]*\b(?i:measured|tested|tried|ran|trained|shown|proved|works)\b[^.;|]*\b(?:on|in|over|under|with)\b[^.;|]*{SUBJECT}[^.;|]*"
)
NEGATED = re.compile(r"\b(?:never|not|no|stand-ins?|without|cannot)\b")


def unlinked_subjects(name: str, text: str, listing: str = "not_shown.md") -> list[str]:
    """What of the list a page speaks of without a link to the list."""
    if any(target.partition("#")[0].endswith(listing) for target in local_links(text)):
        return []
    return [f"{name}: {word} without a link to {listing}" for word in sorted(set(re.findall(SUBJECT, prose(text))))]


def claims(name: str, text: str) -> Iterator[str]:
    """Sentences that say something was done on what is on the list."""
    for paragraph in re.split(r"\n\s*\n|\n(?=[|-])", prose(text)):
        for match in CLAIM.finditer(" ".join(paragraph.split())):
            if not NEGATED.search(match[0]):
                yield f"{name}: {match[0]}"

"""Shards and the fast form: a suite cut into parts whose union is the whole, provably.

`--shard 2/4` takes the tests whose node id hashes to part 2 of 4; `--shard NAME` takes the folders declared in
`[tool.surefoot.shards]`. `--fast` leaves out what `[tool.surefoot] slow_tests` lists.

Promises   the same test is in the same shard on every machine and Python; a listed test that does not exist is found.
Never      balances by time: that needs a record, and two machines with two records would run different halves.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from surefoot.errors import ConfigError
from surefoot.harness.project import Project, words_of

_PART = re.compile(r"([0-9]{1,6})/([0-9]{1,6})")
Belongs = Callable[[str], bool]


@dataclass(frozen=True, slots=True)
class Proof:
    """What a look at all shards at once found.

    Example:
        `Proof(sizes={"1/2": 5, "2/2": 6}, total=11, orphans=(), doubles=()).holds` is True.
    """

    sizes: Mapping[str, int]
    total: int
    orphans: tuple[str, ...]
    """Tests that are in no shard: they would never run."""
    doubles: tuple[str, ...]
    """Tests that are in more than one shard."""

    @property
    def holds(self) -> bool:
        """Every test is in exactly one shard, and there is a test."""
        return self.total > 0 and not self.orphans and not self.doubles

    def __str__(self) -> str:
        parts = " + ".join(str(size) for size in self.sizes.values())
        end = "each test in exactly one" if self.holds else f"{len(self.orphans)} in none, {len(self.doubles)} in two"
        return f"{len(self.sizes)} shards, {parts} = {sum(self.sizes.values())} of {self.total} tests: {end}"


def part_of(node_id: str, parts: int) -> int:
    """Which of `parts` (from 1) a test belongs to, by the SHA-256 of its node id.

    Example:
        >>> part_of("tests/test_a.py::test_one", 1)
        1
    """
    import hashlib

    digest = hashlib.sha256(node_id.encode("utf-8", "surrogateescape")).digest()
    return int.from_bytes(digest[:8], "big") % parts + 1


def shard(word: str, folders: Mapping[str, Sequence[str]]) -> Belongs:
    """The test of membership for `--shard WORD`: `I/N`, or the name of a declared list of folders."""
    match = _PART.fullmatch(word)
    if match:
        part, parts = int(match[1]), int(match[2])
        if not 1 <= part <= parts:
            raise _no_shard(word, "the part counts from 1 to the number of parts", folders)
        return lambda node_id: part_of(node_id, parts) == part
    if word not in folders:
        raise _no_shard(word, "it is neither I/N nor a declared name", folders)
    return lambda node_id: any(under(node_id, folder) for folder in folders[word])


def under(node_id: str, folder: str) -> bool:
    """Whether a test lies in a folder or file, both relative to the root."""
    place, path = folder.strip("/").removeprefix("./"), node_id.split("::")[0]
    return path == place or path.startswith(place + "/")


def read_folders(project: Project) -> dict[str, tuple[str, ...]]:
    """The declared shards: name to folders or files."""
    table = project.part("shards")
    return {name: words_of(value, f"tool.surefoot.shards.{name}", project.file) for name, value in table.items()}


def prove(word: str, node_ids: Sequence[str], folders: Mapping[str, Sequence[str]]) -> Proof:
    """Look at every shard of `--prove-shards WORD`: a number of parts, or `named` for the declared folders."""
    if word == "named":
        names = list(folders)
    elif word.isascii() and word.isdigit() and len(word) <= 3 and int(word) > 0:
        names = [f"{part}/{int(word)}" for part in range(1, int(word) + 1)]
    else:
        raise _no_shard(word, "--prove-shards takes a number of parts, or the word named", folders)
    if not names:
        raise _no_shard(word, "no [tool.surefoot.shards] is declared", folders)
    members = {name: shard(name, folders) for name in names}
    homes = {node_id: [name for name in names if members[name](node_id)] for node_id in node_ids}
    return Proof(
        sizes={name: sum(name in found for found in homes.values()) for name in names},
        total=len(homes),
        orphans=tuple(node_id for node_id, found in homes.items() if not found),
        doubles=tuple(node_id for node_id, found in homes.items() if len(found) > 1),
    )


def is_listed(node_id: str, entry: str) -> bool:
    """Whether an entry of `slow_tests` means this test: itself, all its parameters, its class or its file."""
    return node_id == entry or node_id.startswith((entry + "[", entry + "::"))


def unknown_entries(
    entries: Sequence[str], node_ids: Sequence[str], root: Path, is_partial: Callable[[str], bool]
) -> list[str]:
    """Entries of `slow_tests` that mean no test at all.

    Args:
        is_partial: whether only a part of this file was collected, because a node id was given or files were skipped;
            such a file proves nothing about an entry that is missing.
    """
    files = {node_id.split("::")[0] for node_id in node_ids}
    unknown = []
    for entry in entries:
        file = entry.split("::")[0]
        if any(is_listed(node_id, entry) for node_id in node_ids):
            continue
        if not (root / file).exists() or (file in files and not is_partial(file)):
            unknown.append(entry)
    return unknown


def _no_shard(word: str, why: str, folders: Mapping[str, Sequence[str]]) -> ConfigError:
    names = ", ".join(folders) or "none declared in [tool.surefoot.shards]"
    return ConfigError(f"no such shard: {word}", why, f"write for example --shard 1/4; names: {names}")

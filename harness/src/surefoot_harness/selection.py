"""Marker groups: which tests run by default, which only when asked for, and what to say about the rest.

    selected  <=>  every group of the test was asked for, and it is in the `--X-only` group if there is one

Owns       the declarations `[tool.surefoot.groups.NAME]` and the one selection rule above.
Promises   a test that is left out comes with a reason; a declaration that no run can satisfy is refused.
Never      imports pytest, or reads a token's value: only whether it is there.

Read next: `plugin_hooks.py`, which applies this to a pytest session.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot_harness.errors import ConfigError
from surefoot_harness.project import Project, known_keys, refused, text_of, words_of
from surefoot_harness.system.files import sha256_number

GATE, BACKEND, PLAIN = "gate", "backend", "plain"
NO_TOKEN, NO_MODULE, NO_GPUS = "no token: ", "no module: ", "no GPUs: "
"""How the reasons begin for which a test of a group is held back."""
CLUSTER = "RAY_ADDRESS"
"""Set where tests run on a cluster: its GPUs are not this machine's, and are not counted here."""
_KEYS = ("kind", "env", "requires", "install", "gpus", "description")
_NAME = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True, slots=True)
class MarkerGroup:
    """One declared marker group.

    Example:
        `Group("mcore", "backend", requires=("megatron",), install="pip install megatron-core")`
        gives the marker `mcore` and the options `--mcore` and `--mcore-only`.
    """

    name: str
    kind: str = PLAIN
    """`gate`: needs a token. `backend`: needs an environment that excludes other backends. `plain`: just left out."""
    env: tuple[str, ...] = ()
    """Variables of which one must be set and not empty, such as `HF_TOKEN`."""
    requires: tuple[str, ...] = ()
    """Modules that must be installed, all of them."""
    install: str = ""
    """The command that installs them, shown when they are missing."""
    gpus: int = 0
    """GPUs that the machine must have, as many as its tests use at once."""
    description: str = ""

    @property
    def flag(self) -> str:
        """`hf_gated` is asked for with `--hf-gated`."""
        return "--" + self.name.replace("_", "-")

    @property
    def only_flag(self) -> str:
        """`mcore` and nothing else is asked for with `--mcore-only`."""
        return self.flag + "-only"

    def missing_token(self, environ: Mapping[str, str] | None = None) -> str | None:
        """Why a test of this group cannot run here, or None when a token is there or none is needed."""
        variables = os.environ if environ is None else environ
        if not self.env or any(variables.get(name) for name in self.env):
            return None
        return f"{NO_TOKEN}set {' or '.join(self.env)} (group {self.name})"

    def missing_module(self) -> str | None:
        """The first required module that is not installed, or None."""
        return next((name for name in self.requires if not _installed(name)), None)

    def missing_gpus(self) -> str | None:
        """Why the tests of this group cannot run on the GPUs that are here, or None when there are enough."""
        if not self.gpus or os.environ.get(CLUSTER):
            return None
        found = visible_gpus()
        return None if found >= self.gpus else f"{self.gpus} GPUs, and {found} can be seen here"

    def missing(self) -> str | None:
        """What of all this is not here, for the reason of a skip; None when the tests can run."""
        token, module, gpus = self.missing_token(), self.missing_module(), self.missing_gpus()
        if token is not None:
            return token
        if module is not None:
            return f"{NO_MODULE}{module}: {self.install or 'install ' + module} (group {self.name})"
        return None if gpus is None else f"{NO_GPUS}needs {gpus} (group {self.name})"


def visible_gpus() -> int:
    """GPUs of this machine that CUDA_VISIBLE_DEVICES leaves to this process, as nvidia-smi counts them."""
    from surefoot_harness.tracker.memory import gpu_names

    there, left = len(gpu_names()), os.environ.get("CUDA_VISIBLE_DEVICES")
    return there if left is None else min(there, len([word for word in left.split(",") if word.strip()]))


@dataclass(frozen=True, slots=True)
class GroupChoice:
    """What the command line asked for: groups to include, and the one to keep alone."""

    included: frozenset[str] = frozenset()
    only: str | None = None

    def reason_against(self, marks: Iterable[str], groups: Mapping[str, MarkerGroup]) -> str | None:
        """Why a test with these group marks is left out; None selects it."""
        own = [name for name in groups if name in set(marks)]
        allowed = self.included | ({self.only} if self.only else set())
        for name in own:
            if name not in allowed:
                return f"group {name} was not asked for ({groups[name].flag})"
        if self.only and self.only not in own:
            return f"not in group {self.only} ({groups[self.only].only_flag})"
        return None


def read_groups(project: Project) -> dict[str, MarkerGroup]:
    """The groups that a project declares, by name, in the order of the file."""
    return {name: _read_group(name, table, project) for name, table in project.part("groups").items()}


def ask(included: Sequence[str], only: Sequence[str], groups: Mapping[str, MarkerGroup]) -> GroupChoice:
    """The command line's wish, checked: one `--X-only` at most, and the modules it needs are installed."""
    if len(only) > 1:
        flags = " and ".join(groups[name].only_flag for name in only)
        raise ConfigError(
            f"{flags} exclude each other",
            "each of them says: nothing but mine",
            f"run pytest once per group, or include both with {' '.join(groups[name].flag for name in only)}",
        )
    for name in dict.fromkeys([*only, *included]):
        missing = groups[name].missing_module()
        if missing:
            flag = groups[name].only_flag if name in only else groups[name].flag
            raise ConfigError(
                f"{flag} needs the module {missing}, which is not installed",
                "without it every test of the group would fail on import",
                groups[name].install or f"install {missing}",
            )
        short = groups[name].missing_gpus()
        if short:
            raise ConfigError(
                f"{groups[name].only_flag if name in only else groups[name].flag} needs {short}",
                "its tests run on that many at once",
                f"run it on a machine with {groups[name].gpus} GPUs, or leave the flag out",
            )
    return GroupChoice(frozenset(included), only[0] if only else None)


def conflict(marks: Iterable[str], groups: Mapping[str, MarkerGroup]) -> str | None:
    """What is wrong with a test in two backend groups, or None.

    A backend is an environment and environments exclude each other, so no run could ever select such a test.
    """
    found = [name for name in dict.fromkeys(marks) if name in groups and groups[name].kind == BACKEND]
    if len(found) < 2:
        return None
    return (
        f"marked with two backends, {' and '.join(sorted(found))}: no run can have both, so this test would never run\n"
        '  fix: keep one of the markers, or declare one of the groups with kind = "plain"'
    )


def _read_group(name: str, table: Any, project: Project) -> MarkerGroup:
    where = f"tool.surefoot.groups.{name}"
    if not _NAME.fullmatch(name):
        raise refused(f"{where}: a group is a marker, so its name is lower case letters, digits and _", project.file)
    values = known_keys(table, _KEYS, where, project.file)
    group = MarkerGroup(
        name,
        text_of(values.get("kind", PLAIN), f"{where}.kind", project.file),
        words_of(values.get("env", []), f"{where}.env", project.file),
        words_of(values.get("requires", []), f"{where}.requires", project.file),
        text_of(values.get("install", ""), f"{where}.install", project.file),
        _count(values.get("gpus", 0), f"{where}.gpus", project),
        text_of(values.get("description", ""), f"{where}.description", project.file),
    )
    if group.kind not in (GATE, BACKEND, PLAIN):
        raise refused(f'{where}.kind is "{group.kind}", expected "gate", "backend" or "plain"', project.file)
    if group.kind == GATE and not group.env:
        raise refused(f"{where}: a gate needs env, the variable that opens it", project.file)
    return group


def _count(value: Any, where: str, project: Project) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise refused(f"{where} is {value!r}, expected a whole number from 0", project.file)
    return value


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError, AttributeError):
        return False  # a parent package is missing, or something half loaded: not usable


# -- Shards and the fast form: a suite cut into parts whose union is the whole, provably ----------
# `--shard 2/4` takes the tests whose node id hashes to part 2 of 4; `--shard NAME` takes the folders declared in
# `[tool.surefoot.shards]`. `--fast` leaves out what `[tool.surefoot] slow_tests` lists.
#
# Promises   the same test is in the same shard on every machine and Python; a listed test that does not exist is found.
# Never      balances by time: that needs a record, and two machines with two records would run different halves.


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
    return sha256_number(node_id, errors="surrogateescape") % parts + 1


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

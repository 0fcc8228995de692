"""Marker groups: which tests run by default, which only when asked for, and what to say about the rest.

    selected  <=>  every group of the test was asked for, and it is in the `--X-only` group if there is one

Owns       the declarations `[tool.surefoot.groups.NAME]` and the one selection rule above.
Promises   a test that is left out comes with a reason; a declaration that no run can satisfy is refused.
Never      imports pytest, or reads a token's value: only whether it is there.

Read next: `plugin_select.py`, which applies this to a pytest session.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from surefoot.errors import ConfigError
from surefoot.harness.project import Project, known_keys, refused, text_of, words_of

GATE, BACKEND, PLAIN = "gate", "backend", "plain"
NO_TOKEN, NO_MODULE, NO_GPUS = "no token: ", "no module: ", "no GPUs: "
"""How the reasons begin for which a test of a group is held back."""
CLUSTER = "RAY_ADDRESS"
"""Set where tests run on a cluster: its GPUs are not this machine's, and are not counted here."""
_KEYS = ("kind", "env", "requires", "install", "gpus", "description")
_NAME = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True, slots=True)
class Group:
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
    from surefoot.harness.tracker.memory import gpu_names

    there, left = len(gpu_names()), os.environ.get("CUDA_VISIBLE_DEVICES")
    return there if left is None else min(there, len([word for word in left.split(",") if word.strip()]))


@dataclass(frozen=True, slots=True)
class Asked:
    """What the command line asked for: groups to include, and the one to keep alone."""

    included: frozenset[str] = frozenset()
    only: str | None = None

    def reason_against(self, marks: Iterable[str], groups: Mapping[str, Group]) -> str | None:
        """Why a test with these group marks is left out; None selects it."""
        own = [name for name in groups if name in set(marks)]
        allowed = self.included | ({self.only} if self.only else set())
        for name in own:
            if name not in allowed:
                return f"group {name} was not asked for ({groups[name].flag})"
        if self.only and self.only not in own:
            return f"not in group {self.only} ({groups[self.only].only_flag})"
        return None


def read_groups(project: Project) -> dict[str, Group]:
    """The groups that a project declares, by name, in the order of the file."""
    return {name: _read_group(name, table, project) for name, table in project.part("groups").items()}


def ask(included: Sequence[str], only: Sequence[str], groups: Mapping[str, Group]) -> Asked:
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
    return Asked(frozenset(included), only[0] if only else None)


def conflict(marks: Iterable[str], groups: Mapping[str, Group]) -> str | None:
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


def _read_group(name: str, table: Any, project: Project) -> Group:
    where = f"tool.surefoot.groups.{name}"
    if not _NAME.fullmatch(name):
        raise refused(f"{where}: a group is a marker, so its name is lower case letters, digits and _", project.file)
    values = known_keys(table, _KEYS, where, project.file)
    group = Group(
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

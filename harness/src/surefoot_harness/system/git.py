"""How we ask git, so that nothing which a repository brought along is run by asking.

Owns       the words and the environment of every git command that this package starts.
Promises   no program is started because a repository's own config, hooks or attributes name it: hooks, file system
           monitors, filters, external diffs and signature checks are switched off, and nothing is fetched unless the
           caller asks for it. What the user's own config (global, system, command line) names is the user's choice.
Never      decides what to do about a repository that names programs: `own_programs` tells the caller.

A clone has the config that its user made; a repository that came as an archive has somebody else's. git runs what
stands there, a filter on `git status`, an upload command where an object is missing, and does not ask who wrote it.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from surefoot_harness.errors import StateError

SETTINGS = (
    "core.fsmonitor=false",
    f"core.hooksPath={os.devnull}",
    "log.showSignature=false",  # or `git log` starts gpg.program
    "gc.auto=0",  # or a fetch ends with gc, and that with gc.recentObjectsHook
    "maintenance.auto=false",
)
QUIET = {"LC_ALL": "C", "GIT_TERMINAL_PROMPT": "0", "GIT_PAGER": "cat", "GIT_EDITOR": "true", "GIT_OPTIONAL_LOCKS": "0"}
_OFFLINE = {"GIT_NO_LAZY_FETCH": "1", "GIT_ALLOW_PROTOCOL": ""}
"""A partial clone fetches what is missing, with the programs of its config. The second is for older versions."""
_PROTOCOLS = "file:git:http:https:ssh"
"""Not `ext`, whose address is a command, and no other helper, whatever protocol.*.allow says."""
_NO_DRIVERS = ("--no-ext-diff", "--no-textconv")
_SHOWS_CHANGES = frozenset({"diff", "log", "show"})
_NO_CONTENT = frozenset(
    "cat-file config for-each-ref ls-files ls-tree merge-base rev-list rev-parse symbolic-ref".split()
)
"""With the settings above these start nothing: they read names and objects, never a file of the work tree."""
_PROGRAMS: dict[str, dict[str, tuple[str, ...]]] = {
    "filters": {"filter": ("clean", "smudge", "process")},
    "hooks": {"hook": ("command",)},
    "transports": {
        "core": ("sshcommand", "gitproxy", "askpass", "alternaterefscommand"), "credential": ("helper",),
        "remote": ("uploadpack", "vcs"),
    },
}  # fmt: skip
"""Keys whose value git would run, by section and last word."""
_THE_USERS = frozenset({"system", "global", "command"})
_PATIENCE_S = 60.0


class GitError(StateError):
    """git said no; its own words are in the message."""


@dataclass(frozen=True)
class OwnPrograms:
    """Keys of a repository's own config, or of its submodules', that name programs.

    Example:
        `filters = ("filter.crypt.smudge",)` and no others, in a repository that git-crypt was set up in.
    """

    filters: tuple[str, ...] = ()
    """Would be run on every checkout and on most looks at the work tree."""
    hooks: tuple[str, ...] = ()
    """Hooks by config, which core.hooksPath does not switch off (git 2.54 and later)."""
    transports: tuple[str, ...] = ()
    """Would be run by a fetch."""

    def switched_off(self) -> list[str]:
        """Settings under which neither filters nor hooks run."""
        filters = sorted({key.rpartition(".")[0] for key in self.filters})
        hooks = sorted({key.rpartition(".")[0] for key in self.hooks})
        odd = [name for name in (*filters, *hooks) if "=" in name]
        if odd:
            raise GitError(
                f"this repository's config names a program under {odd[0]!r}",
                "a name with = in it cannot be switched off on git's command line, and it is not run",
                "take the section out of the repository's config",
            )
        off = [f"{name}.{part}=" for name in filters for part in ("clean", "smudge", "process")]
        off += [f"{name}.required=false" for name in filters]
        return off + [f"{name}.enabled=false" for name in hooks]


def git_call(
    folder: Path, *words: str, own: OwnPrograms | None = None, fetches: bool = False, settings: tuple[str, ...] = ()
) -> tuple[list[str], dict[str, str]]:
    """The command line and the environment of `git WORDS` in `folder`.

    Args:
        own: what `own_programs` said of this repository; asked now when it is not given and matters.
        fetches: objects may be fetched. Without it, and wherever the repository's config names a program that a fetch
            would start, no address can be reached.
        settings: more of them, `name=value`.
    """
    if own is None:
        own = OwnPrograms() if words[0] in _NO_CONTENT and not fetches else own_programs(folder)
    given = [word for setting in (*SETTINGS, *settings, *own.switched_off()) for word in ("-c", setting)]
    drivers = _NO_DRIVERS if words[0] in _SHOWS_CHANGES else ()
    reach = {"GIT_ALLOW_PROTOCOL": os.environ.get("GIT_ALLOW_PROTOCOL", _PROTOCOLS)}
    env = {**os.environ, **QUIET, **(reach if fetches and not own.transports else _OFFLINE)}
    return ["git", "--no-pager", "-C", str(folder), *given, words[0], *drivers, *words[1:]], env


def own_programs(folder: Path) -> OwnPrograms:
    """Programs that the config of this repository names, and those of every submodule that a checkout could fill.

    A key whose value the user's own config has too is not counted: it is the user's program.
    """
    keys = _named(_config("-C", str(folder)))
    for place in _submodules(folder):
        keys |= _named(_config(*place))
    return OwnPrograms(
        **{kind: tuple(sorted(key for key in keys if _is_among(key, words))) for kind, words in _PROGRAMS.items()}
    )


def _named(entries: list[tuple[str, str, str]]) -> set[str]:
    the_users = {(key, value) for scope, key, value in entries if scope in _THE_USERS}
    return {key for scope, key, value in entries if scope not in _THE_USERS and value and (key, value) not in the_users}


def _is_among(key: str, words: Mapping[str, tuple[str, ...]]) -> bool:
    """Whether these words name it: section and last word have no case; what stands between them is anybody's."""
    section, _, rest = key.partition(".")
    return rest.rpartition(".")[2].lower() in words.get(section.lower(), ())


def _config(*where: str) -> list[tuple[str, str, str]]:
    """Scope, key and value of every setting that holds there."""
    done = _ask(*where, "config", "--list", "--show-scope", "-z")
    if done.returncode:
        raise GitError(
            f"git does not tell its settings: {' '.join(done.stderr.split())[:300]}",
            "a program that the repository names would be run without a word",
            "run `git config --list --show-scope` here; it needs git 2.26 or newer",
        )
    parts = done.stdout.split("\0")[:-1]
    entries = []
    for scope, entry in zip(parts[::2], parts[1::2], strict=True):
        key, _, value = entry.partition("\n")
        entries.append((scope, key, value))
    return entries


def _submodules(folder: Path) -> Iterator[tuple[str, ...]]:
    """How to reach the config of each submodule at any depth: those in the work tree, and those laid by in .git."""
    found = _ask("-C", str(folder), "rev-parse", "--git-common-dir", "--show-toplevel")
    if found.returncode:
        return  # no repository, or one without a work tree
    common, top = found.stdout.splitlines()[:2]
    for place, folders, files in os.walk(os.path.join(folder, common, "modules")):
        if "config" in files and "HEAD" in files:
            yield f"--git-dir={place}", f"--work-tree={place}"  # the one that its config names may be gone
            folders[:] = [name for name in folders if name == "modules"]
    waiting, seen = [Path(top)], set()
    while waiting:
        tree = waiting.pop()
        if (real := tree.resolve()) in seen:
            continue
        seen.add(real)
        if len(seen) > 1:
            yield "-C", str(tree)
        staged = _ask("-C", str(tree), "ls-files", "-z", "--stage").stdout.split("\0")
        links = (line.partition("\t")[2] for line in staged if line.startswith("160000 "))
        waiting += [tree / name for name in links if os.path.lexists(tree / name / ".git")]


def _ask(*words: str) -> subprocess.CompletedProcess[str]:
    settings = [word for setting in SETTINGS for word in ("-c", setting)]
    env: Mapping[str, str] = {**os.environ, **QUIET, **_OFFLINE}
    try:
        return subprocess.run(
            ["git", "--no-pager", *settings, *words],  # noqa: S607 - git is found where the user's shell finds it
            env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="surrogateescape", check=False,
            timeout=_PATIENCE_S,
        )  # fmt: skip
    except OSError as error:
        raise GitError(
            f"git cannot be started: {error.strerror}", "a repository is looked at", "install git"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise GitError(
            f"git has not answered in {_PATIENCE_S:g} s", "a repository is looked at", "try it by hand"
        ) from error

"""How we ask git, and what: so that nothing which a repository brought along is run by asking.

Owns       the words and the environment of every git command that this package starts.
Promises   no program is started because a repository's own config, hooks or attributes name it: hooks, file system
           monitors, filters, external diffs and signature checks are switched off, and nothing is fetched unless the
           caller asks for it. What the user's own config (global, system, command line) names is the user's choice.
           argv lists only, no pager, no prompt, English messages; a failing call is a `GitError` with git's own words.
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
from surefoot_harness.system.files import sha256_of

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


# -- Which commit, how dirty, where the root is ----------------------------------------------------


def git(folder: Path, *words: str, check: bool = True, env: Mapping[str, str] | None = None) -> str:
    """Standard output of one git command in `folder`, without the last newline."""
    return run_git(folder, *words, check=check, env=env).stdout.rstrip("\n")


def run_git(
    folder: Path, *words: str, check: bool = True, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """One git command in `folder`; a non-zero exit is a `GitError` unless `check` is off."""
    command, settled = git_call(folder, *words)
    try:
        done = subprocess.run(
            command,
            env={**settled, **(env or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="surrogateescape",
            check=False,
        )
    except OSError as error:
        raise GitError(f"git cannot be started: {error.strerror}", "the harness asks git", "install git") from error
    if check and done.returncode:
        said = done.stderr.strip() or done.stdout.strip() or f"exit {done.returncode}"
        raise GitError(f"git {' '.join(words)} failed: {said}", "the harness asks git", "run it by hand to see more")
    return done


def root_of(folder: Path) -> Path | None:
    """Top folder of the work tree that holds `folder`, or None outside of one."""
    done = run_git(folder, "rev-parse", "--show-toplevel", check=False)
    return Path(done.stdout.rstrip("\n")) if done.returncode == 0 else None


def head(folder: Path) -> str | None:
    """Full id of the current commit, or None where there is none."""
    done = run_git(folder, "rev-parse", "--verify", "--quiet", "HEAD", check=False)
    return done.stdout.strip() or None if done.returncode == 0 else None


def is_dirty(folder: Path) -> bool:
    """Whether tracked files differ from the commit or untracked ones (not ignored) lie about."""
    return bool(git(folder, "status", "--porcelain", "--untracked-files=normal"))


def dirty_hash(folder: Path) -> str | None:
    """12 hex digits of what differs from HEAD, untracked files with content; None for a clean tree.

    Example:
        two trees at one commit with different edits give two hashes, so one's result is never taken for the other's.
    """
    if not is_dirty(folder):
        return None
    root = Path(git(folder, "rev-parse", "--show-toplevel"))
    return sha256_of(_differences(root))[:12]


def _differences(root: Path) -> Iterator[bytes]:
    yield git(root, "diff", "HEAD", "--binary", "--no-ext-diff").encode(errors="surrogateescape")
    for name in sorted(filter(None, git(root, "ls-files", "-o", "--exclude-standard", "-z").split("\0"))):
        path = root / name
        yield name.encode(errors="surrogateescape") + b"\0"
        yield os.readlink(path).encode() if path.is_symlink() else path.read_bytes() if path.is_file() else b""

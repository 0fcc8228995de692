"""What is changed on purpose in every commit: the script, its arguments, a suite's settings. Always on record.

Owns       SED_CLAUSES, EXTRA_SCRIPT_ARGS, --set, --relax, --drop-check.
Promises   an edited script is put back byte for byte, also when the command crashes or a signal comes; a clause that
           changes nothing is refused: whoever wrote it believes that it does something.
"""

from __future__ import annotations

import os
import posixpath
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from surefoot_harness.bisect.evidence import OUT
from surefoot_harness.bisect.options import BisectOptions
from surefoot_harness.bisect.repository import Repository
from surefoot_harness.errors import ConfigError
from surefoot_harness.own_command import own_name, own_words


class OverrideError(ConfigError):
    """An override cannot be applied to this commit."""


def as_json(options: BisectOptions) -> dict[str, Any]:
    """Every override in force, for a verdict."""
    return {
        "sed_clauses": options.sed,
        "extra_script_args": shlex.split(options.extra_args),
        "set": list(options.sets),
        "relax": list(options.relax),
        "drop_check": list(options.drop_checks),
    }


def argv(options: BisectOptions) -> list[str]:
    """The command with its extra arguments.

    A `surefoot suite run` also gets the structured overrides and an `--out` of its own for each commit; extra arguments
    go to its trainer, behind `--`.
    """
    words, extra = list(options.command), shlex.split(options.extra_args)
    if not is_suite_run(words):
        return words + extra
    split = words.index("--") if "--" in words else len(words)
    words, rest = words[:split], words[split:]
    for option, values in (("--set", options.sets), ("--relax", options.relax), ("--drop-check", options.drop_checks)):
        words += [word for value in values for word in (option, value)]
    if options.relax or options.drop_checks:
        words += ["--reason", options.reason]
    if given_out(words) is None:
        words += ["--out", OUT]
    if extra and not rest and "--" not in extra:
        rest = ["--"]
    return words + rest + extra


def given_out(words: Sequence[str]) -> str | None:
    """The folder of `--out` in a command; None when it has none."""
    for place, word in enumerate(words):
        if word == "--":
            return None
        if word == "--out" and place + 1 < len(words):
            return words[place + 1]
        if word.startswith("--out="):
            return word.removeprefix("--out=")
    return None


def is_surefoot(words: Sequence[str]) -> bool:
    """Whether the command is one of ours: `surefoot ...` or `python -m surefoot ...`."""
    return own_words(list(words)) is not None


def is_suite_run(words: Sequence[str]) -> bool:
    """Whether the command is `surefoot suite run ...`."""
    return (own_words(list(words)) or [])[:2] == ["suite", "run"]


def named_files(repository: Repository, options: BisectOptions, commits: list[str]) -> list[str]:
    """Words of the command that name a file in one of `commits`, as paths from the root; pytest node ids count."""
    found = []
    suite = is_suite_run(options.command)  # its words name a suite and recipes, and files only as `NAME.toml`
    for word in options.command:
        if suite and not word.endswith(".toml"):
            continue
        path = _from_root(repository, options.folder, word.split("::")[0])
        if path is not None and path not in found and any(repository.has_file(commit, path) for commit in commits):
            found.append(path)
    return found


def _from_root(repository: Repository, folder: Path, word: str) -> str | None:
    if not word or word.startswith("-"):
        return None
    path = os.path.relpath(os.path.join(folder, word), repository.root).replace(os.sep, "/")
    return None if path == ".." or path.startswith("../") else posixpath.normpath(path)


def script(repository: Repository, options: BisectOptions, files: list[str]) -> tuple[Path, bool]:
    """The file that SED_CLAUSES edits, and whether git tracks it: the first file that the command names."""
    if files:
        return repository.root / files[0], True
    if is_suite_run(options.command):
        raise ConfigError(
            "SED_CLAUSES has no script to edit",
            f"the command runs a suite by its name: {shlex.join(options.command)}",
            "--set KEY=VALUE, --relax 'OLD=>NEW' or --drop-check EXPR change a suite; or name its file, which the "
            f"clauses then edit: {own_name()} suite run suites/NAME.toml",
        )
    for word in options.command:
        path = options.folder / word
        if path.is_file() and b"\0" not in path.read_bytes()[:4096]:
            return path, False
    raise ConfigError(
        "SED_CLAUSES has no script to edit",
        f"no word of the command is a text file: {shlex.join(options.command)}",
        "name the script in the command, as in: -- bash t.sh",
    )


@contextmanager
def edited(path: Path | None, clauses: str) -> Iterator[None]:
    """`path` as the sed clauses change it, for the time of the block."""
    if path is None or not clauses:
        yield
        return
    before = path.read_bytes()
    after = _sed(clauses, before)
    if after == before:
        raise OverrideError(
            f"SED_CLAUSES change nothing in {path.name}: {clauses}",
            "the run would measure something else than you think",
            "correct the clauses, or drop them",
        )
    try:
        path.write_bytes(after)
        yield
    finally:
        path.write_bytes(before)


def _sed(clauses: str, text: bytes) -> bytes:
    done = subprocess.run(
        ["sed", "-e", clauses],  # noqa: S607 - sed is found where the user's shell finds it
        input=text,
        capture_output=True,
        check=False,
        start_new_session=True,
    )
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip()
        raise OverrideError(
            f"SED_CLAUSES are refused: {said}", "sed could not read them", "try them on the script first"
        )
    return done.stdout

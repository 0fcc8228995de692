"""What a project declares for affected-test selection: `[tool.surefoot.affected]` in pyproject.toml.

    [tool.surefoot.affected.extra]
    "tests/recipes/*" = ["configs/**/*.yaml"]

Tests whose node id or file matches the pattern on the left depend on the files that match the globs on the right.
"""

from __future__ import annotations

import fnmatch
import tomllib
from pathlib import Path

from surefoot.errors import ConfigError


def read_extra(root: Path) -> dict[str, list[str]]:
    """Pattern of tests to globs of files; a malformed table is refused, since ignoring it would lose dependencies."""
    try:
        text = (root / "pyproject.toml").read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    try:
        tool = tomllib.loads(text).get("tool", {})
    except tomllib.TOMLDecodeError as error:
        raise _refused(f"pyproject.toml is not TOML: {error}") from error
    table = tool.get("surefoot", {}).get("affected", {})
    unknown = set(table) - {"extra"}
    if unknown:
        raise _refused(f"unknown key tool.surefoot.affected.{min(unknown)}; the only one is extra")
    extra = table.get("extra", {})
    for pattern, globs in extra.items():
        if not isinstance(globs, list) or not all(isinstance(each, str) for each in globs):
            raise _refused(f"tool.surefoot.affected.extra[{pattern!r}] is not a list of globs")
    return dict(extra)


def _refused(what: str) -> ConfigError:
    return ConfigError(what, "a dependency that is not understood would be ignored", 'see "Declare the rest" in docs')


def globs_for(test: str, extra: dict[str, list[str]]) -> list[str]:
    """The globs declared for a node id."""
    path = test.partition("::")[0]
    return [
        glob
        for pattern, globs in extra.items()
        if fnmatch.fnmatchcase(test, pattern) or fnmatch.fnmatchcase(path, pattern)
        for glob in globs
    ]

"""Write the table of files into docs/reference/modules.md: every module by its docstring's first line.

    python scripts/list_files.py            rewrite the table
    python scripts/list_files.py --check    exit 1 if it would change

The purpose is written once, where it belongs, and cannot drift: a test runs the check.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (ROOT / "src" / "surefoot", ROOT / "harness" / "src" / "surefoot_harness")
SECOND_NAME = "The very module "
"""How the docstring of a file begins that only gives a module a second name; the map shows each once."""
DOCUMENT = ROOT / "docs" / "reference" / "modules.md"
START, END = "<!-- files: written by scripts/list_files.py -->", "<!-- end of files -->"


def rows(package: Path) -> Iterator[str]:
    """One table row per Python file, folder by folder; `__init__.py` speaks for its folder and is left out."""
    home = package.parent if package == PACKAGES[1] else package
    paths = [path for path in package.rglob("*.py") if path.name != "__init__.py"]
    for path in sorted(paths, key=lambda path: (len(path.relative_to(package).parts) > 1, path)):
        said = purpose(path)
        if not said.startswith(SECOND_NAME):
            yield f"| `{path.relative_to(home).as_posix()}` | {said} |"


def purpose(path: Path) -> str:
    """The first line of a module's docstring; a module without one has no place on the map."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    if not text:
        raise SystemExit(f"{path}: no docstring; its first line is the file's one line of purpose")
    return text.splitlines()[0].rstrip(".").replace("|", "\\|")


def rewritten(document: str, *packages: Path) -> str:
    """The document with the table between its two marks replaced."""
    before, start, rest = document.partition(START)
    _, end, after = rest.partition(END)
    if not start or not end:
        raise SystemExit(f"{DOCUMENT}: the marks {START} and {END} are missing")
    table = "\n".join(["| file | purpose |", "|---|---|", *(row for package in packages for row in rows(package))])
    return f"{before}{START}\n{table}\n{END}{after}"


def rewrite_or_compare(path: Path, make: Callable[[str], str]) -> int:
    """Write a page as `make` would have it; with --check only exit 1 if it is not so already."""
    old = path.read_text(encoding="utf-8")
    new = make(old)
    if "--check" in sys.argv[1:]:
        return int(old != new)
    path.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(rewrite_or_compare(DOCUMENT, lambda old: rewritten(old, *PACKAGES)))

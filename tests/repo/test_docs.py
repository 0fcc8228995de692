"""The documentation runs: python blocks execute, toml blocks parse, files and links that are named exist."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from list_files import rewritten
from repo_tree import DOCS, PACKAGE, ROOT, python_files, relative, run_python

FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
FILE_LINE = re.compile(r"^(?:#|//) ([\w./-]+\.\w+)$")
RUNNER = """
import pathlib, sys
namespace = {"__name__": "__main__"}
for name in sys.argv[1:]:
    source = pathlib.Path(name).read_text(encoding="utf-8")
    line = int(pathlib.Path(name).stem)
    exec(compile("\\n" * line + source, DOCUMENT, "exec"), namespace)
"""


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the line of its opening fence, its text."""

    language: str
    line: int
    text: str

    @property
    def file(self) -> str | None:
        """A block whose first line is a comment with nothing but a file name is that file."""
        match = FILE_LINE.match(self.text.split("\n", 1)[0])
        return match[1] if match else None


def blocks(text: str) -> Iterator[Block]:
    for match in FENCE.finditer(text):
        yield Block(match[1], text.count("\n", 0, match.start()) + 1, match[2])


def run_blocks(document: str, text: str, folder: Path) -> str:
    """Run the python blocks of one document in order, in one interpreter and one folder. Returns what went wrong."""
    found = list(blocks(text))
    for block in found:
        if block.file:
            (folder / block.file).parent.mkdir(parents=True, exist_ok=True)
            (folder / block.file).write_text(block.text, encoding="utf-8")
    names = []
    (folder / "_blocks").mkdir()
    for block in found:
        if block.language == "python":
            names.append(f"_blocks/{block.line}.py")
            (folder / names[-1]).write_text(block.text, encoding="utf-8")
    if not names:
        return ""
    script = folder / "_blocks" / "run_all.py"
    script.write_text(RUNNER.replace("DOCUMENT", repr(document)), encoding="utf-8")
    result = run_python("-W", "error", str(script), *names, cwd=folder, timeout=300)
    return "" if result.returncode == 0 else result.stdout[-2000:] + result.stderr[-4000:]


@pytest.mark.parametrize("path", DOCS, ids=relative)
def test_python_blocks_execute(path: Path, tmp_path: Path) -> None:
    assert run_blocks(relative(path), path.read_text(encoding="utf-8"), tmp_path) == ""


@pytest.mark.parametrize("path", DOCS, ids=relative)
def test_toml_blocks_parse_and_run_configs_are_valid(path: Path, tmp_path: Path) -> None:
    for block in blocks(path.read_text(encoding="utf-8")):
        if block.language == "toml" and {"model", "tasks"} <= tomllib.loads(block.text).keys():
            from surefoot.config_load import load_config

            file = tmp_path / f"line_{block.line}.toml"
            file.write_text(block.text, encoding="utf-8")
            load_config(file)


@pytest.mark.parametrize("path", DOCS, ids=relative)
def test_relative_links_lead_somewhere(path: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text(encoding="utf-8"))
    local = [target for target in targets if "://" not in target and not target.startswith("mailto:")]
    assert [target for target in local if not (path.parent / target).exists()] == []


def test_the_architecture_lists_every_file_and_nothing_else() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    names = re.findall(r"^\| `([\w/]+\.py)` \| .{12,} \|$", text, flags=re.MULTILINE)
    real = {path.relative_to(PACKAGE).as_posix() for path in python_files(PACKAGE) if path.name != "__init__.py"}
    assert sorted(real - set(names)) == [], "run: python scripts/list_files.py"
    assert sorted(set(names) - real) == [], "run: python scripts/list_files.py"
    assert rewritten(text, PACKAGE) == text, "a docstring changed; run: python scripts/list_files.py"


def test_planted_file_without_a_line_on_the_map_is_seen(tmp_path: Path) -> None:
    (tmp_path / "corner.py").write_text('"""A new corner."""\n', encoding="utf-8")
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert "| `corner.py` | A new corner |" in rewritten(text, tmp_path)
    assert rewritten(text, tmp_path) != text


@pytest.mark.parametrize(
    ("block", "complaint"),
    [
        ("```python\nassert 1 == 2, 'sums are wrong'\n```\n", "sums are wrong"),
        ("```python\nimport surefoot.no_such_module\n```\n", "no_such_module"),
        ("```python\nx = 1\n```\nthen\n```python\nprint(y)\n```\n", "guide.md"),
    ],
)
def test_planted_broken_block_is_seen(tmp_path: Path, block: str, complaint: str) -> None:
    assert complaint in run_blocks("guide.md", "# Guide\n\n" + block, tmp_path)


def test_blocks_share_names_and_named_files(tmp_path: Path) -> None:
    text = (
        "```text\n# data/note.txt\nhello\n```\n```python\nx = open('data/note.txt').read()\n```\n"
        "```python\nassert 'hello' in x, x\n```\n"
    )
    assert run_blocks("guide.md", text, tmp_path) == ""

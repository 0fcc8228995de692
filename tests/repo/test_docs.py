"""The documentation runs: every block executes or parses, files and links that are named exist."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from doc_blocks import Block, blocks, commands, malformed, run_blocks, unused_files
from exceptions import DOC_BLOCKS
from list_files import DOCUMENT, rewritten
from repo_tree import DOCS, HARNESS, PACKAGE, PACKAGES, ROOT, python_files, relative
from warm_command import shared

PAGES = [*DOCS, ROOT / "CONTRIBUTING.md", ROOT / "tests" / "README.md"]
BY_DAY = [path for path in PAGES if path != ROOT / "README.md"]  # tests/runs/test_own_work.py executes that one


def skip_without_sandbox(path: Path) -> None:
    """Some pages show what only a host with a sandbox can do: contained code, and contained tool servers."""
    if path.name in ("sandbox.md", "agents.md", "servers.md"):
        from surefoot.sandbox.sandbox import available

        if not available().usable:
            pytest.skip(f"this host has no sandbox: {available().missing}")


@pytest.mark.slow  # `make check` leaves it to `make test`
@pytest.mark.turns(3)
@pytest.mark.parametrize("path", BY_DAY, ids=relative)
def test_every_block_executes(path: Path, tmp_path: Path) -> None:
    """One page in interpreters of its own; the others, until the night, in forks that have the libraries loaded."""
    skip_without_sandbox(path)
    text = path.read_text(encoding="utf-8")
    warm = None if path.name == "sinks.md" else shared(*(["trl"] if "from trl import" in text else []))
    assert run_blocks(relative(path), text, tmp_path, warm) == ""


@pytest.mark.nightly
@pytest.mark.parametrize("path", PAGES, ids=relative)
def test_every_block_executes_in_fresh_interpreters(path: Path, tmp_path: Path) -> None:
    skip_without_sandbox(path)
    assert run_blocks(relative(path), path.read_text(encoding="utf-8"), tmp_path) == ""


@pytest.mark.parametrize("path", PAGES, ids=relative)
def test_every_block_has_a_kind_and_parses(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert malformed(relative(path), text) + unused_files(relative(path), text) == []


def test_every_exception_is_still_needed_and_has_a_reason() -> None:
    keys = {block.key(relative(path)) for path in PAGES for block in blocks(path.read_text(encoding="utf-8"))}
    assert sorted(set(DOC_BLOCKS) - keys) == [], "no such block any more"
    assert all(len(reason.split()) >= 4 for reason in DOC_BLOCKS.values())


@pytest.mark.parametrize("path", PAGES, ids=relative)
def test_toml_blocks_that_are_run_configs_are_valid(path: Path, tmp_path: Path) -> None:
    for block in blocks(path.read_text(encoding="utf-8")):
        if block.language == "toml" and {"model", "tasks"} <= tomllib.loads(block.text).keys():
            from surefoot.config.load import load_config

            file = tmp_path / f"line_{block.line}.toml"
            file.write_text(block.text, encoding="utf-8")
            load_config(file)


@pytest.mark.parametrize("path", PAGES, ids=relative)
def test_relative_links_lead_somewhere(path: Path) -> None:
    targets = re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text(encoding="utf-8"))
    local = [target for target in targets if "://" not in target and not target.startswith("mailto:")]
    assert [target for target in local if not (path.parent / target).exists()] == []


def second_name(path: Path) -> bool:
    """Whether a file only gives a module of the harness its name in the trainer."""
    return "sys.modules[__name__] = surefoot_harness." in path.read_text(encoding="utf-8")


def test_the_list_of_modules_has_every_file_and_nothing_else() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    names = re.findall(r"^\| `([\w/]+\.py)` \| .{12,} \|$", text, flags=re.MULTILINE)
    real = {path.relative_to(PACKAGE).as_posix() for path in python_files(PACKAGE) if not second_name(path)}
    real |= {path.relative_to(HARNESS).as_posix() for path in python_files(HARNESS)}
    real = {name for name in real if not name.endswith("__init__.py")}
    assert sorted(real - set(names)) == [], "run: python scripts/list_files.py"
    assert sorted(set(names) - real) == [], "run: python scripts/list_files.py"
    assert rewritten(text, *PACKAGES) == text, "a docstring changed; run: python scripts/list_files.py"


def test_planted_file_without_a_line_on_the_map_is_seen(tmp_path: Path) -> None:
    (tmp_path / "corner.py").write_text('"""A new corner."""\n', encoding="utf-8")
    text = DOCUMENT.read_text(encoding="utf-8")
    assert "| `corner.py` | A new corner |" in rewritten(text, tmp_path)
    assert rewritten(text, tmp_path) != text


@pytest.mark.parametrize(
    ("block", "complaint"),
    [
        ("```python\nassert 1 == 2, 'sums are wrong'\n```\n", "sums are wrong"),
        ("```python\nimport surefoot.no_such_module\n```\n", "no_such_module"),
        ("```python\nx = 1\n```\nthen\n```python\nprint(y)\n```\n", "guide.md"),
        ("```sh\ntrue\nfalse\n```\n", "guide.md:5: exit 1"),
        ("```sh\nfalse; true  # a failure in the middle of a line\n```\n", "guide.md:4: exit 1"),
        ("```sh\nfalse | cat\n```\n", "guide.md:4: exit 1"),
        ("```sh\ntrue  # exits 1\n```\n", "exits 0, not 1"),
        ("```sh\n(exit 3)  # exits 1\n```\n", "exits 3, not 1"),
        ("```sh\necho $NO_SUCH_NAME\n```\n", "NO_SUCH_NAME"),
        ("```sh\necho 'never closed\n```\n", "the sh block at line 3 failed"),
        ("```sh\nsurefoot no-such-command\n```\n", "guide.md:4: exit 2"),
    ],
)
def test_planted_broken_block_is_seen(tmp_path: Path, block: str, complaint: str) -> None:
    assert complaint in run_blocks("guide.md", "# Guide\n\n" + block, tmp_path)


def test_blocks_share_names_files_and_order(tmp_path: Path) -> None:
    text = (
        "```text\n# data/note.txt\nhello\n```\n```python\nx = open('data/note.txt').read()\n```\n"
        '```sh\ntest ! -e made\necho "$(cat data/note.txt) again" > made\n```\n'
        "```python\nassert x == 'hello\\n', x\nassert open('made').read() == 'hello again\\n', 'order'\n```\n"
    )
    assert run_blocks("guide.md", text, tmp_path) == ""


def test_expected_exits_and_long_commands_are_understood(tmp_path: Path) -> None:
    text = (
        "```sh\nfalse  # exits 1\npython -c 'import sys\nsys.exit(3)'  # exits 3\n"
        "cat > \"a file.py\" <<'END'\nimport sys  # exits 9 is text here\nprint(sys.argv[1])\nEND\n"
        "python 'a file.py' \\\n  'two  words' > out\nfor i in 1 2; do\n  echo $i\ndone >> out\n"
        "surefoot version && git init -q here && git -C here commit -q --allow-empty -m x\n```\n"
        "```python\nassert open('out').read() == 'two  words\\n1\\n2\\n', 'the output'\n```\n"
    )
    assert run_blocks("guide.md", text, tmp_path) == ""


def test_a_here_document_is_one_command() -> None:
    block = Block("sh", 10, "cat <<END\n$(echo # exits 1\nEND\ntrue\n")
    assert [line for line, _ in commands(block)] == [11, 14]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("```\nx\n```\n", "'' is not one of"),
        ("```console\n$ ls\n```\n", "'console' is not one of"),
        ("```toml\nx = \n```\n", "guide.md:1"),
        ("```json\n{,}\n```\n", "guide.md:1"),
        ("```yaml\na: [\n```\n", "guide.md:1"),
        ("```python\n# tool.py\ndef\n```\n```sh\npython tool.py\n```\n", "guide.md:1"),
    ],
)
def test_planted_malformed_block_is_seen(text: str, complaint: str) -> None:
    (finding,) = malformed("guide.md", text)
    assert complaint in finding


def test_planted_file_that_no_block_uses_is_seen() -> None:
    text = "```python\n# tool.py\nprint(1)\n```\n"
    assert unused_files("guide.md", text) == ["guide.md:1: no block uses tool.py"]
    assert unused_files("guide.md", text + "```sh\npython tool.py\n```\n") == []

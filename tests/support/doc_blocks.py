"""Runs the code blocks of a document, in order, in one folder, as a reader would.

A block whose first line is a comment with nothing but a file name is written as that file, before anything runs.
`python` blocks share one interpreter; each `sh` block is one bash script that stops at the first line that fails. A
command followed by the comment `# exits N` must exit with N. `text` is output. What a block may not be is untyped.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml
from exceptions import DOC_BLOCKS
from repo_tree import HARNESS, SRC
from warm_command import WarmCommand

LANGUAGES = ("sh", "python", "toml", "yaml", "json", "text")
FENCE = re.compile(
    r"^(?P<mark>```+)(?P<language>[^\n`]*)\n(?P<text>.*?)^(?P=mark)[ \t]*$", flags=re.MULTILINE | re.DOTALL
)
FILE_LINE = re.compile(r"^(?:#|//) ([\w./ -]+\.\w+)$")
EXITS = re.compile(r"#\s*exits (\d+)\s*$", flags=re.MULTILINE)
KEEP_NAME_LINE = (
    ".py",
    ".toml",
    ".yaml",
    ".yml",
    ".sh",
    ".cfg",
    ".ini",
)  # where the first line is a comment in the file too
DRIVER = """
import pathlib, subprocess, sys
namespace = {"__name__": "__main__"}
for name in sys.argv[1:]:
    path = pathlib.Path(name)
    if path.suffix == ".sh":
        sys.stdout.flush()
        done = subprocess.run(["bash", name], stdin=subprocess.DEVNULL)
        if done.returncode:
            sys.exit(f"{DOCUMENT}: the sh block at line {path.stem} failed")
    else:
        source = path.read_text(encoding="utf-8")
        exec(compile("\\n" * int(path.stem) + source, DOCUMENT, "exec"), namespace)
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

    @property
    def content(self) -> str:
        """What the file holds: without the line that names it where that would not be a comment."""
        if self.file and not self.file.endswith(KEEP_NAME_LINE):
            return self.text.split("\n", 1)[1]
        return self.text

    def key(self, document: str) -> str:
        """The block's name in the list of exceptions: document, language and the first command."""
        first = next((line for line in self.text.splitlines() if line.strip()), "")
        return f"{document}:{self.language}:{first.split('#')[0].strip()}"


def blocks(text: str) -> Iterator[Block]:
    for match in FENCE.finditer(text):
        yield Block(match["language"].strip(), text.count("\n", 0, match.start()) + 1, match["text"])


def malformed(document: str, text: str) -> list[str]:
    """Blocks of an unknown kind, data that does not parse, python files that do not compile."""
    readers = {"toml": tomllib.loads, "json": json.loads, "yaml": yaml.safe_load}
    found = []
    for block in blocks(text):
        if block.language not in LANGUAGES:
            found.append(f"{document}:{block.line}: {block.language!r} is not one of {', '.join(LANGUAGES)}")
        try:
            if block.language in readers:
                readers[block.language](block.content)
            elif block.file and block.language == "python":
                compile(block.text, block.file, "exec")
        except (ValueError, SyntaxError, yaml.YAMLError) as error:
            found.append(f"{document}:{block.line}: {error}")
    return found


def unused_files(document: str, text: str) -> list[str]:
    """Python files that no other block of the document touches: nothing would show that they work."""
    found = list(blocks(text))
    lost = []
    for block in found:
        if block.file and block.language in ("python", "sh"):
            others = " ".join(other.text for other in found if other is not block)
            if not any(name in others for name in (Path(block.file).name, Path(block.file).stem, "pytest")):
                lost.append(f"{document}:{block.line}: no block uses {block.file}")
    return lost


def run_blocks(document: str, text: str, folder: Path, warm: WarmCommand | None = None) -> str:
    """Run the blocks of one document in order in `folder`; what went wrong, or nothing.

    With `warm`, `surefoot` and the interpreter of the `python` blocks are forks that have their libraries loaded.
    """
    found = [block for block in blocks(text) if block.key(document) not in DOC_BLOCKS]
    for block in found:
        if block.file:
            (folder / block.file).parent.mkdir(parents=True, exist_ok=True)
            (folder / block.file).write_text(block.content, encoding="utf-8")
    aside = folder / ".blocks"
    aside.mkdir()
    names = []
    for block in found:
        if block.language in ("python", "sh") and not block.file:
            names.append(f".blocks/{block.line}.{'py' if block.language == 'python' else 'sh'}")
            source = block.text if block.language == "python" else script(document, block)
            (folder / names[-1]).write_text(source, encoding="utf-8")
    if not names:
        return ""
    (aside / "run_all.py").write_text(DRIVER.replace("DOCUMENT", repr(document)), encoding="utf-8")
    words, env = ["-W", "error", ".blocks/run_all.py", *names], environment(aside, warm)
    if warm:
        code, out, err = warm.run(words, folder, env, what="python", timeout_s=300)
    else:
        done = subprocess.run(
            [sys.executable, *words], cwd=folder, env=env, capture_output=True, text=True, timeout=300, check=False
        )
        code, out, err = done.returncode, done.stdout, done.stderr
    return "" if code == 0 else out[-3000:] + err[-4000:]


def environment(aside: Path, warm: WarmCommand | None) -> dict[str, str]:
    """A reader's environment: `surefoot` and `python` on PATH, a home of its own, a name for git, no network."""
    tools, home = aside / "bin", aside / "home"
    tools.mkdir()
    home.mkdir()
    commands = {"surefoot": '-m surefoot "$@"', "python": '"$@"', "pytest": '-m pytest "$@"'}
    alone = {}
    if warm:
        alone["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # every plugin of this environment, for every small session
        commands |= {name: f'{warm.client} {name} {warm.address} "$@"' for name in warm.programs}
    for name, words in commands.items():
        (tools / name).write_text(f"#!/bin/sh\nexec {shlex.quote(sys.executable)} {words}\n", encoding="utf-8")
        (tools / name).chmod(0o755)
    nowhere = "http://127.0.0.1:9"  # a port where nobody listens
    people = {f"GIT_{who}_{what}": f"{value}" for who in ("AUTHOR", "COMMITTER")
              for what, value in {"NAME": "Reader", "EMAIL": "reader@example.org"}.items()}  # fmt: skip
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("GIT_", "PYTEST_", "COVERAGE_"))}
    return kept | people | alone | {
        "PATH": os.pathsep.join([str(tools), str(Path(sys.executable).parent), os.environ["PATH"]]),
        "HOME": str(home), "PYTHONPATH": os.pathsep.join([str(SRC), str(HARNESS)]), "NO_COLOR": "1", "COLUMNS": "120",
        "GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": "init.defaultBranch", "GIT_CONFIG_VALUE_0": "main",
        "http_proxy": nowhere, "https_proxy": nowhere, "PIP_NO_INDEX": "1", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip


def script(document: str, block: Block) -> str:
    """One bash script that says which line failed, and compares each `# exits N` with what happened."""
    lines = [
        "set -uo pipefail",
        "_line=0",
        f"trap '_code=$?; if [ $_code -ne 0 ]; then echo \"{document}:$_line: exit $_code\" >&2; fi' EXIT",
    ]
    for line, command in commands(block):
        wanted = EXITS.search(command)
        lines.append(f"_line={line}")
        if wanted:
            lines += ["set +e", command, "_got=$?"]
            lines.append(f'[ $_got -eq {wanted[1]} ] || {{ echo "exits $_got, not {wanted[1]}" >&2; exit 99; }}')
        else:
            lines += ["set -e", command]
    return "\n".join([*lines, ""])


def commands(block: Block) -> Iterator[tuple[int, str]]:
    """(line in the document, text) of each whole command: continuations, quotes and here-documents stay together."""
    start, pending = block.line + 1, ""
    for number, line in enumerate(block.text.splitlines(), block.line + 1):
        pending += line + "\n"
        if is_whole(pending):
            yield start, pending.rstrip("\n")
            start, pending = number + 1, ""
    if pending:
        yield start, pending.rstrip("\n")  # bash itself will say what is missing


def is_whole(text: str) -> bool:
    """Whether bash could run `text` as it stands; it complains about an open quote, loop or here-document."""
    if text.rstrip("\n").endswith("\\"):
        return False
    return not subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, check=False).stderr

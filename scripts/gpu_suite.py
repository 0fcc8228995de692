"""The tests that need a GPU, in parts that each end in time: what was measured is kept test by test.

    python scripts/gpu_suite.py                  every part, 16 minutes at most (make test-gpu)
    python scripts/gpu_suite.py --parts kernels,learn --minutes 8 --keep DIR
    python scripts/gpu_suite.py --write DIR      kept results into docs/gpu.json, and the table of docs/models.md
    python scripts/gpu_suite.py --check          exit 1 unless the table says what docs/gpu.json and the tests say
    python scripts/gpu_suite.py --list           which tests belong to which part

A test says its part itself: `@pytest.mark.gpu("learn")`. Results lie in DIR, one JSON file for each part, rewritten
after each test; what has an outcome for this commit is not run again, in a tree with changes everything is. Without a
GPU nothing runs, with a reason. Exit 0: all passed, or no GPU. 1: one failed, or time was over before all had run.
"""

from __future__ import annotations

import argparse
import ast
import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import gpu_results

from surefoot.system.git import GitError, git_call
from surefoot.system.process import Child

ROOT = Path(__file__).resolve().parents[1]
FIGURES, PAGE = Path("docs/gpu.json"), Path("docs/models.md")
BEGIN, END = "<!-- gpu -->", "<!-- /gpu -->"
PARTS = {
    "models": "every weight and LoRA on a shape with 0.6 billion parameters: parity, syncs, a kill and what follows",
    "kernels": "captured graphs and fused kernels compute what the plain operations do",
    "learn": "the built-in run learns, in float32 and in bfloat16 over float32 masters, and reaches its target",
    "resume": "a killed run goes on from its checkpoint",
    "vllm": "a weight sync changes what vLLM says, and both sides agree; skipped where vLLM is not installed",
}
"""In the order in which they run: what is short and says most, first."""
PART_S, ALL_S, TEST_S = 8 * 60, 16 * 60, 170
PACKAGES = ("torch", "triton", "transformers", "peft", "accelerate", "torchao")
NO_GPU = "needs a CUDA GPU, none is visible"
HEAD = ("part", "what it shows", "tests", "took", "commit", "date", "notes")


class GpuSuiteError(Exception):
    """A test without a part, or results that cannot be read."""


class Marked(NamedTuple):
    """One test function that needs a GPU."""

    file: str
    name: str
    part: str
    """Empty: the marker names none; two, joined by a space: it has two."""

    @property
    def node(self) -> str:
        """As pytest is told."""
        return f"{self.file}::{self.name}"


# -- which tests there are ----------------------------------------------------------------------------


def marked_tests(root: Path = ROOT) -> list[Marked]:
    """Every test below tests/ that carries the marker, by its source: nothing is imported."""
    found = []
    for path in sorted((root / "tests").rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        if "mark.gpu" in text:
            found += marked_in(text, path.relative_to(root).as_posix())
    return found


def marked_in(text: str, file: str) -> list[Marked]:
    """Those of one file."""
    tree = ast.parse(text)
    whole = [
        node.value for node in tree.body
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "pytestmark" for t in node.targets)
    ]  # fmt: skip
    shared = [part for value in whole for part in _parts_of(value.elts if isinstance(value, ast.List) else [value])]
    found = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            parts = shared + _parts_of(node.decorator_list)
            found += [Marked(file, node.name, " ".join(parts))] if parts else []
    return found


def _parts_of(marks: Iterable[ast.expr]) -> list[str]:
    """What each gpu marker among these names; an empty word for one that names nothing."""
    parts = []
    for mark in marks:
        call = mark if isinstance(mark, ast.Call) else None
        if ast.unparse(call.func if call else mark) == "pytest.mark.gpu":
            words = [a.value for a in call.args if isinstance(a, ast.Constant)] if call else []
            parts.append(str(words[0]) if len(words) == 1 else "")
    return parts


def problems(tests: Iterable[Marked], parts: Mapping[str, str] = PARTS) -> list[str]:
    """Tests that belong to no part or to several, and parts without a test."""
    every = list(tests)
    found = [
        f"{t.node}: mark it @pytest.mark.gpu(PART), PART one of {', '.join(parts)}"
        for t in every
        if t.part not in parts
    ]
    return found + [f"part {part!r} has no test" for part in parts if part not in {t.part for t in every}]


# -- running ------------------------------------------------------------------------------------------


def run_part(
    part: str, tests: Sequence[Marked], keep: Path, around: dict[str, Any], limit_s: float, root: Path = ROOT
) -> dict[str, Any]:
    """Run what of this part has no outcome yet; what is kept afterwards, cut off or not."""
    keep.mkdir(parents=True, exist_ok=True)
    file = keep.resolve() / f"{part}.json"
    kept = gpu_results.read(file)
    same = kept.get("commit") == around["commit"] and not kept.get("changed") and not around["changed"]
    if not same:
        kept = {**around, "part": part, "tests": {}, "collected": [test.node for test in tests]}
        gpu_results.write(file, kept)
    if same and not unfinished(kept):
        print(f"{part}: kept from {kept['date']}, not run again", flush=True)
        return kept
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), os.environ.get("PYTHONPATH", "")])
    env = {
        **os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1",
        gpu_results.FILE: str(file), gpu_results.LIMIT: str(TEST_S),
    }  # fmt: skip
    # "default": where a GPU is, versions are others than those tested here, and a warning of theirs is no failure
    words = ["-m", "pytest", "-p", "gpu_results", "-m", "gpu", "-W", "default", "-q", "-rfE"]
    words += ["--durations=0", "--durations-min=1"]
    with Child.start([sys.executable, *words, *[test.node for test in tests]], cwd=root, env=env) as child:
        if child.wait(limit_s) is None:
            print(f"{part}: {limit_s:.0f} s are over", flush=True)
    return gpu_results.read(file)


def unfinished(kept: Mapping[str, Any]) -> list[str]:
    """Tests of a part that have no outcome."""
    done = kept["tests"]
    return [name for name in kept["collected"] if name not in done and not any(d.startswith(f"{name}[") for d in done)]


def failed(kept: Mapping[str, Any]) -> list[str]:
    """Tests of a part that did not pass: a skip on a machine with a GPU is no pass."""
    return [name for name, one in kept["tests"].items() if one["outcome"] != "passed"]


def surroundings(commit: str | None) -> dict[str, Any]:
    """Commit, date, machine and versions, as every result keeps them."""
    import torch

    head, status = _git("rev-parse", "HEAD"), _git("status", "--porcelain", "--untracked-files=no")
    name = head or commit
    if name is None:
        raise GpuSuiteError("no commit: this is no checkout of git; say --commit NAME")
    versions = {"python": platform.python_version()}
    versions |= {package: found for package in PACKAGES if (found := _version(package)) is not None}
    return {
        "commit": name[:12], "changed": bool(status), "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None, "versions": versions,
    }  # fmt: skip


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git(*words: str) -> str | None:
    try:
        command, env = git_call(ROOT, *words)
        return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError, GitError):
        return None


def run_parts(names: Sequence[str], asked: argparse.Namespace) -> int:
    """Part after part, until time is over."""
    import torch

    tests = marked_tests()
    if not torch.cuda.is_available():
        chosen = [test for test in tests if test.part in names]
        print(f"skipped {len(chosen)} tests in {len(names)} parts: {NO_GPU}")
        return 0
    around, end, bad = surroundings(asked.commit), time.monotonic() + asked.minutes * 60, 0
    for part in names:
        left = end - time.monotonic()
        if left < 20:
            print(f"{part}: not begun, time is over")
            bad += 1
            continue
        kept = run_part(part, [t for t in tests if t.part == part], asked.keep, around, min(PART_S, left))
        lacking, broken = unfinished(kept), failed(kept)
        took = sum(one["seconds"] for one in kept["tests"].values())
        passed = len(kept["tests"]) - len(broken)
        print(f"== {part}: {passed} passed, {len(broken)} not, {len(lacking)} without an outcome, {took:.0f} s")
        bad += bool(lacking or broken)
    return 1 if bad else 0


# -- the page -----------------------------------------------------------------------------------------


def merged(old: Mapping[str, Any], keep: Path) -> dict[str, Any]:
    """What was known, with every part that was kept in this folder in place of its older self."""
    found = {path.stem: gpu_results.read(path) for path in sorted(keep.glob("*.json"))}
    unknown = [name for name in found if name not in PARTS]
    if not found or unknown:
        raise GpuSuiteError(f"{keep}: {'no parts called ' + ', '.join(unknown) if unknown else 'no results'}")
    return {"parts": {**old.get("parts", {}), **found}}


def table(figures: Mapping[str, Any], tests: Sequence[Marked]) -> str:
    """The text between the marks of the page."""
    parts = figures.get("parts", {})
    lines = [HEAD, tuple("---" for _ in HEAD)]
    lines += [
        _line(part, shows, parts.get(part), [t for t in tests if t.part == part]) for part, shows in PARTS.items()
    ]
    machines = sorted({_machine(kept) for kept in parts.values()})
    rows = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return rows + "\n\n" + ("On: " + "; ".join(machines) if machines else "None of them was run yet.")


def _line(part: str, shows: str, kept: Mapping[str, Any] | None, tests: Sequence[Marked]) -> tuple[str, ...]:
    """A part's row: tests that came after its last run are counted as not run."""
    if kept is None:
        return part, shows, f"0 of {len(tests)} run", "", "", "", ""
    ran, names = kept["tests"], {test.node for test in tests}
    new = len([name for name in names if not any(r.partition("[")[0] == name for r in ran)])
    passed = len(ran) - len(failed(kept))
    counts = f"{passed} of {len(ran)} passed" + (f", {new} not run" if new else "")
    notes = [f"{name.partition('::')[2]}: {ran[name]['outcome']}" for name in failed(kept)]
    notes += [figure for one in ran.values() for figure in one.get("figures", [])]
    commit = kept["commit"] + (" with changes" if kept["changed"] else "")
    took = f"{sum(one['seconds'] for one in ran.values()):.0f} s"
    return part, shows, counts, took, commit, kept["date"], "; ".join(notes).replace("|", "/")


def _machine(kept: Mapping[str, Any]) -> str:
    return f"{kept['device']}, " + ", ".join(f"{name} {version}" for name, version in kept["versions"].items())


def page_with(text: str, rows: str) -> str:
    """The page with this table between its marks."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise GpuSuiteError(f"{PAGE} has no {BEGIN} ... {END}")
    return f"{before}{BEGIN}\n{rows}\n{END}{after}"


def publish(root: Path, keep: Path | None) -> None:
    """Take results in, where some are named, and write the table."""
    figures = json.loads((root / FIGURES).read_text(encoding="utf-8")) if (root / FIGURES).exists() else {"parts": {}}
    if keep is not None:
        figures = merged(figures, keep)
    (root / FIGURES).write_text(json.dumps(figures, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    page = root / PAGE
    page.write_text(page_with(page.read_text(encoding="utf-8"), table(figures, marked_tests(root))), encoding="utf-8")


def is_current(root: Path = ROOT) -> bool:
    """Whether the page says what the file and the tests say."""
    text = (root / PAGE).read_text(encoding="utf-8")
    figures = json.loads((root / FIGURES).read_text(encoding="utf-8"))
    return text == page_with(text, table(figures, marked_tests(root)))


def main(words: Sequence[str] | None = None) -> int:
    """Run, publish, or look."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated; all of them without it")
    parser.add_argument("--minutes", type=float, default=ALL_S / 60)
    parser.add_argument("--keep", type=Path, default=ROOT / ".reports" / "gpu", help="folder of the results")
    parser.add_argument("--commit", help="where git cannot say it")
    parser.add_argument(
        "--write", type=Path, nargs="?", const=Path(), metavar="DIR", help="without DIR the table alone"
    )
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--list", action="store_true")
    asked = parser.parse_args(words)
    names = asked.parts.split(",")
    try:
        if unknown := [name for name in names if name not in PARTS]:
            raise GpuSuiteError(f"no part is called {', '.join(unknown)}; there are {', '.join(PARTS)}")
        if found := problems(marked_tests()):
            raise GpuSuiteError("\n".join(found))
        if asked.list:
            print("\n".join(f"{test.part:10} {test.node}" for test in marked_tests()))
        elif asked.write is not None:
            publish(ROOT, None if asked.write == Path() else asked.write)
        elif asked.check:
            return 0 if is_current() else 1
        else:
            return run_parts(names, asked)
    except (GpuSuiteError, OSError, ValueError) as error:
        print(f"gpu_suite: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Affected-test selection against the full run and pytest-testmon: misses, test-seconds, recording cost.

    python benchmarks/affected.py [--mutants 200] [--pairs 7] [--no-testmon] [--no-ray] [--json FILE]

The sample (`affected_sample/make.py`) has the shape of httpx 0.28.1. For each mutant the oracle is every test that
really fails when all of them run; a miss is one of those that a selector leaves out. Test-seconds are declared costs,
5 ms to 2 s a test, since the sample's own tests are tiny. The oracle calls the workers' functions in its own process;
what is recorded runs in real subprocesses and a real Ray actor.

Exit status 0 when every goal was reached (no miss, ten times fewer test-seconds, recording under ten per cent), 1
otherwise. Losing rows are printed too.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "src")]

from affected_mutants import commits, mutants  # noqa: E402 - beside this file
from affected_sample.make import PACKAGE, calls, cost_of, write_sample, write_tests  # noqa: E402
from report import Row, publish  # noqa: E402

FEWER, COST = 10.0, 1.10
SOURCE = Path(__file__).parents[1] / "src"
_FORK = multiprocessing.get_context("fork")


# -- running things ---------------------------------------------------------------------
def pytest(folder: Path, *words: str, direct: bool = False) -> subprocess.CompletedProcess[str]:
    """One real pytest in `folder`, with our plugin at hand and no other that could change the order or the time."""
    env = {
        **os.environ,
        "PYTHONPATH": str(SOURCE),
        "SAMPLE_DIRECT": "1" if direct else "0",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    base = [sys.executable, "-m", "pytest", "-p", "no:hypothesispytest", "-q", "--no-header"]
    return subprocess.run([*base, *words], cwd=folder, env=env, capture_output=True, text=True, check=False)


def in_child(function: Callable[..., Any], *args: Any) -> Any:
    """`function` in a fork of this process, so that what it imports is gone afterwards."""
    reader, writer = _FORK.Pipe(duplex=False)

    def work() -> None:
        writer.send(function(*args))

    process = _FORK.Process(target=work)
    process.start()
    value = reader.recv()
    process.join()
    return value


def values(folder: Path) -> dict[str, int]:
    """What each call that a test makes returns now."""
    sys.path.insert(0, str(folder))
    package = importlib.import_module(PACKAGE)
    return {text: getattr(package, name)(*([] if x is None else [x])) for text, (name, x) in calls().items()}


def failing(folder: Path) -> set[str]:
    """Every test that fails now: all are called, in order, in one process, as pytest would."""
    os.environ["SAMPLE_DIRECT"] = "1"
    sys.path[:0] = [str(folder), str(folder / "tests")]
    failed: set[str] = set()
    for path in sorted((folder / "tests").glob("test_*.py"), key=lambda path: path.name):
        names = [line[4:].split("(")[0] for line in path.read_text().splitlines() if line.startswith("def test_")]
        try:
            module = importlib.import_module(path.stem)
        except Exception:  # noqa: BLE001 - whatever a mutant raises, the test failed
            failed.update(f"tests/{path.name}::{name}" for name in names)
            continue
        for name in names:
            function = getattr(module, name)
            try:
                function(*[sys.modules["conftest"].once for _ in range(function.__code__.co_argcount)])
            except Exception:  # noqa: BLE001 - as above
                failed.add(f"tests/{path.name}::{name}")
    return failed


# -- selectors --------------------------------------------------------------------------
class Ours:
    """Our selection, asked through the same classes that the plugin uses."""

    name = "surefoot --affected"

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def record(self) -> str:
        return pytest(self.folder, "-p", "surefoot.harness.plugin", "--affected").stdout

    def chosen(self) -> set[str]:
        from surefoot.harness.affected.records import ProjectView, load
        from surefoot.harness.affected.select import Judge
        from surefoot.harness.affected.tree import Tree

        state, notice = load(self.folder)
        assert notice is None, notice
        view = ProjectView(Tree(self.folder, state.known()), state.roots, state.edges)
        judge = Judge(state, view, state.environment)
        return {test for test in state.tests if judge.is_affected(test)}


class Testmon:
    """pytest-testmon, asked by collecting."""

    name = "pytest-testmon"

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def record(self) -> str:
        return pytest(self.folder, "--testmon").stdout

    def chosen(self) -> set[str]:
        said = pytest(self.folder, "--testmon-nocollect", "--testmon-forceselect", "--collect-only").stdout
        return {line.strip() for line in said.splitlines() if line.startswith("tests/") and "::" in line}


def with_text(path: Path, text: str, action: Callable[[], Any]) -> Any:
    """`action` while `path` holds `text`."""
    before = path.read_text()
    path.write_text(text)
    try:
        return action()
    finally:
        path.write_text(before)


# -- measurements -----------------------------------------------------------------------
def measure_mutants(base: Path, selectors: list[Any], count: int, seed: int) -> dict[str, Any]:
    """Misses and test-seconds of each selector over `count` mutants."""
    every = sorted(in_child(all_tests, base))
    total = sum(map(cost_of, every))
    rows: dict[str, dict[str, Any]] = {each.name: {"misses": 0, "seconds": 0.0, "missed": []} for each in selectors}
    killed = 0
    rows["oracle"] = {"misses": 0, "seconds": 0.0}
    broken = in_child(failing, base)
    assert not broken, f"the oracle calls tests of the unchanged sample failed: {sorted(broken)[:3]}"
    for mutant in mutants(base / PACKAGE, count, seed):
        oracle = with_text(mutant.path, mutant.text, lambda: in_child(failing, base))
        killed += bool(oracle)
        rows["oracle"]["seconds"] += sum(map(cost_of, oracle))
        for each in selectors:
            path = each.folder / mutant.path.relative_to(base)
            chosen = with_text(path, mutant.text, each.chosen)
            rows[each.name]["seconds"] += sum(map(cost_of, chosen))
            missed = oracle - chosen
            rows[each.name]["misses"] += len(missed)
            rows[each.name]["missed"] += [f"{mutant.what}: {test}" for test in sorted(missed)[:3]]
    assert killed, "no mutant was noticed by any test: nothing was measured"
    full = total * count
    return {"tests": len(every), "killed": killed, "full_seconds": full, "rows": rows}


def all_tests(folder: Path) -> set[str]:
    """Node ids of the sample's tests."""
    found = set()
    for path in (folder / "tests").glob("test_*.py"):
        lines = path.read_text().splitlines()
        found |= {f"tests/{path.name}::{line[4:].split('(')[0]}" for line in lines if line.startswith("def test_")}
    return found


def replay(folder: Path, seed: int) -> dict[str, Any]:
    """Commits one after another through the real command, each followed by the commit that mends the tests."""
    every, misses, chosen_seconds, runs = all_tests(folder), 0, 0.0, 0
    for name, edit in commits(folder / PACKAGE, seed):
        edit()
        oracle = in_child(failing, folder)
        chosen = Ours(folder).chosen()
        misses += len(oracle - chosen)
        said = Ours(folder).record()
        assert f"{len(chosen)} of {len(every)} tests affected" in said, (
            f"{name}: the command chose otherwise:\n{said[-800:]}"
        )
        write_tests(folder, in_child(values, folder))
        mended = Ours(folder).record()
        assert " failed" not in mended, f"{name}: not green after mending:\n{mended[-800:]}"
        chosen_seconds += sum(map(cost_of, chosen))
        runs += 1
        print(f"  {name}: {len(oracle)} would fail, {len(chosen)} chosen", flush=True)
    full = runs * sum(map(cost_of, every))
    return {"commits": runs, "misses": misses, "fewer": full / chosen_seconds if chosen_seconds else float("inf")}


def recording_cost(folder: Path, pairs: int, repeat: int) -> dict[str, Any]:
    """CPU seconds of all tests in one process, plain and recorded, alternating; `repeat` makes each test longer.

    The state file is there, as in daily work; `-k test` names every test, so all of them run and are recorded.
    """
    os.environ["SAMPLE_REPEAT"] = str(repeat)

    def cpu(*words: str) -> float:
        before = os.times()
        pytest(folder, "-p", "surefoot.harness.plugin", "-k", "test", *words, direct=True)
        after = os.times()
        return after.children_user + after.children_system - before.children_user - before.children_system

    cpu("--affected")
    ratios, plain = [], []
    for number in range(pairs):
        order = [(), ("--affected",)] if number % 2 == 0 else [("--affected",), ()]
        took = {words: cpu(*words) for words in order}
        ratios.append(took[("--affected",)] / took[()])
        plain.append(took[()])
    each = 1000 * statistics.median(plain) / len(all_tests(folder))
    return {"median": statistics.median(ratios), "low": min(ratios), "high": max(ratios), "pairs": pairs, "ms": each}


# -- the whole --------------------------------------------------------------------------
def build(folder: Path, seed: int, *, ray: bool) -> None:
    """The sample, green; without Ray its six actor tests go through the worker process instead."""
    write_sample(folder, seed)
    write_tests(folder, in_child(values, folder))
    if not ray:
        for path in (folder / "tests").glob("test_*.py"):
            path.write_text(path.read_text().replace("(actor)", "(worker)").replace("actor(", "worker("))


def has(module: str) -> bool:
    """Whether a module can be imported here."""
    return importlib.util.find_spec(module) is not None


def show(result: dict[str, Any]) -> list[str]:
    """The table, limits beside the numbers."""
    full, rows, number = result["full_seconds"], result["rows"], result["mutants"]
    lines = [
        f"Python {result['python']}, {result['tests']} tests, {number} mutants, {result['killed']} of them noticed"
    ]
    lines.append(f"{'selector':<22}{'misses':>8}{'test-seconds':>14}{'fewer':>9}   limit: the oracle's row")
    lines.append(f"{'full run':<22}{0:>8}{full:>14.0f}{1.0:>8.1f}x")
    for name, row in rows.items():
        fewer = full / row["seconds"] if row["seconds"] else float("inf")
        lines.append(f"{name:<22}{row['misses']:>8}{row['seconds']:>14.0f}{fewer:>8.1f}x")
    lines += [f"{name:<22} not installed" for name in result["absent"]]
    for cost in result["recording"]:
        spread = f"({cost['low']:.3f} to {cost['high']:.3f}, {cost['pairs']} pairs)"
        lines.append(
            f"recording, {cost['ms']:.1f} ms of CPU a test: x{cost['median']:.3f} {spread}; limit 1, goal {COST}"
        )
    if result.get("replay"):
        told = result["replay"]
        lines.append(
            f"replay: {told['commits']} commits, {told['misses']} misses, {told['fewer']:.1f}x fewer test-seconds"
        )
    return lines


def main(arguments: Iterable[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutants", type=int, default=200)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-testmon", action="store_true")
    parser.add_argument("--no-ray", action="store_true")
    parser.add_argument("--no-replay", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rows", type=Path, help="also append the table's rows to this file, as JSON lines")
    options = parser.parse_args(list(arguments) if arguments is not None else None)
    with tempfile.TemporaryDirectory(prefix="affected-bench-") as scratch:
        result = run(Path(scratch), options)
    print("\n".join(show(result)))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))
    return publish(table_rows(result), options.rows)


def table_rows(result: dict[str, Any]) -> list[Row]:
    """What `run.py` collects: one row per selector and per weight of a test."""
    full, oracle = result["full_seconds"], result["rows"]["oracle"]["seconds"]
    limit, found = f"{full / oracle:.0f}x", []
    for name, row in result["rows"].items():
        fewer = full / row["seconds"] if row["seconds"] else float("inf")
        ours = name == Ours.name
        met = (row["misses"] == 0 and fewer >= FEWER) if ours else None
        goal = f"0 misses, >= {FEWER:g}x" if ours else "-"
        what = f"{row['misses']} misses, {fewer:.1f}x fewer test-seconds"
        found.append(
            Row("affected tests", f"{result['mutants']} mutants, {name}", what, goal=goal, met=met, limit=limit)
        )
    if replayed := result.get("replay"):
        what = f"{replayed['misses']} misses, {replayed['fewer']:.1f}x fewer test-seconds"
        cell, met = f"{replayed['commits']} replayed commits, {Ours.name}", replayed["misses"] == 0
        found.append(Row("affected tests", cell, what, goal="0 misses", met=met))
    for cost in result["recording"]:
        cell = f"recording, {cost['ms']:.1f} ms of CPU a test, Python {result['python']}"
        spread = f"x{cost['median']:.3f} ({cost['low']:.3f} to {cost['high']:.3f}, n={cost['pairs']})"
        judged = sys.version_info >= (3, 12)  # before, there is no cheap way to be told of a call
        goal = f"<= x{COST}" if judged else "-"
        found.append(
            Row("affected tests", cell, spread, goal=goal, met=cost["median"] <= COST if judged else None, limit="x1")
        )
    return found


def run(scratch: Path, options: argparse.Namespace) -> dict[str, Any]:
    """All measurements in order."""
    ray = has("ray") and not options.no_ray
    build(scratch / "ours", options.seed, ray=ray)
    peers: list[Any] = []
    absent = [] if has("ray") else ["Ray actor"]
    if has("testmon") and not options.no_testmon:
        shutil.copytree(scratch / "ours", scratch / "testmon")
        peers.append(Testmon(scratch / "testmon"))
    elif not has("testmon"):
        absent.append(Testmon.name)
    selectors = [Ours(scratch / "ours"), *peers]
    for each in selectors:
        said = each.record()
        green = " failed" not in said and " passed" in said
        assert green, f"{each.name}: the sample is not green:\n{said[-2000:]}"
        left = each.chosen()
        assert not left, f"{each.name}: {len(left)} tests chosen without an edit: {sorted(left)[:3]}"
        print(f"recorded with {each.name}", flush=True)
    result = measure_mutants(scratch / "ours", selectors, options.mutants, options.seed)
    print("mutants done", flush=True)
    if not options.no_replay:
        result["replay"] = replay(scratch / "ours", options.seed)
        write_tests(scratch / "ours", in_child(values, scratch / "ours"))
    result["recording"] = [recording_cost(scratch / "ours", options.pairs, repeat) for repeat in (1, 300)]
    return {**result, "python": sys.version.split()[0], "mutants": options.mutants, "absent": absent, "ray": ray}


if __name__ == "__main__":
    sys.exit(main())

"""The verdict on one trial, from its exit status, its numbers and its checks; written to `verdict.json`.

    trainer failed              ERROR        before any number is looked at; exit 70, 74, 2 ... by what ended it
    stopped, or out of time     INCOMPLETE   exit 75 or 76
    no numbers, or unreadable   ERROR        nobody can tell (exit 3)
    fewer than max_steps        INCOMPLETE   exit 70; checks, when asked for, are for information
    a check did not pass        FAIL         exit 1
    otherwise                   PASS

Promises   every check that was asked for has a row; a missing row is a FAIL; exit 1 is said only where numbers
           were measured and failed, so that a bisect can believe it.
Never      reads the log: words that a model was prompted with decide nothing.
"""

from __future__ import annotations

import datetime
import itertools
import math
import os
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefoot_harness.errors import (
    CollapseStopError,
    FleetError,
    InputError,
    MemoryLimitError,
    NumericsError,
    SecurityError,
    StalledError,
    StateError,
    SurefootError,
)
from surefoot_harness.files import read_json, write_atomic, write_json
from surefoot_harness.scrub import scrub
from surefoot_harness.series import Metrics
from surefoot_harness.suites.executors import exit_words
from surefoot_harness.suites.manifest import Recipe
from surefoot_harness.suites.plan import Trial
from surefoot_harness.tables import table
from surefoot_harness.verdict import Verdict

PASSED, FAILED, USAGE, UNKNOWN, STOPPED = 0, 1, 2, 3, 75
CRASHED = SurefootError.exit_code
"""The trainer broke: an exit status or signal that says no more, or success with fewer steps than were asked for."""
NO_ROOM = MemoryLimitError.exit_code
"""Disk or memory ran out; also SIGKILL, which is how the kernel ends a process when memory runs out."""
OUT_OF_TIME = StalledError.exit_code
_BAD_NUMBERS = (NumericsError.exit_code, CollapseStopError.exit_code)
_ASKED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals by which people and schedulers end a process."""
_NOT_STARTED = (126, 127)
"""What a shell, or a container, says of a command that it cannot start."""
_OWN = (UNKNOWN, InputError.exit_code, SecurityError.exit_code, OUT_OF_TIME, FleetError.exit_code)
"""Codes of `surefoot train` that are handed on as they are: from it they have a meaning, from others they have none."""
PROGRESS = "train/loss"
"""Its last step says how far a training got; the flat `loss` counts as well."""
KEYS = (
    "status", "reasons", "checks", "commit", "dirty", "config_hash", "container", "steps_reached", "max_steps",
    "overrides", "extra_args", "command", "started", "finished",
)  # fmt: skip
"""Every `verdict.json` has them all."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How the trainer ended. `exit_code` None: it ran earlier, and nobody wrote down how it ended."""

    exit_code: int | None
    run: int = 1
    why: str = ""
    out_of_time: bool = False
    stopped: bool = False
    infrastructure: bool = False
    lost: bool = False
    """It ended, and nobody can tell how: killed with its machine, or thrown out of the queue."""


@dataclass(frozen=True, slots=True)
class TrialJudgement:
    """A verdict, the sentences that carry it, and the exit code that it asks for."""

    status: Verdict
    reasons: tuple[str, ...]
    exit_code: int
    checks: tuple[dict[str, Any], ...] = ()
    steps_reached: int | None = None


def judge(trial: Trial, ending: Ending) -> TrialJudgement:
    """Judge a trial that has ended; writes `metrics.json` beside the verdict when there are numbers."""
    early = _by_ending(trial, ending)
    metrics: Metrics | None = None
    trouble = ""
    try:
        metrics = _collect(trial)
    except SurefootError as error:
        trouble = f"{error.what}: {error.why}"
    reached = steps_reached(metrics, trial.recipe) if metrics is not None else None
    if early is not None:
        return TrialJudgement(early.status, early.reasons, early.exit_code, (), reached)
    if metrics is None:
        return TrialJudgement(Verdict.ERROR, ("the trainer left no numbers that can be read", trouble), UNKNOWN)
    return _by_numbers(trial, metrics, reached, ending)


def steps_reached(metrics: Metrics, recipe: Recipe) -> int | None:
    """How many steps the progress metric shows; None when it was not recorded."""
    series, _ = metrics.resolve(recipe.progress or PROGRESS)
    if series is None or not series.steps or series.single:
        return None
    return series.steps[-1] - recipe.first_step + 1


def load(trial: Trial) -> Metrics:
    """The numbers that a trial's trainer left; a `StateError` when there are none."""
    from surefoot_harness.sources import load_metrics

    return load_metrics(trial.run / trial.recipe.metrics)


def write_verdict(trial: Trial, judgement: TrialJudgement, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Keep the verdict; the same as a dictionary."""
    record: dict[str, Any] = {
        "status": str(judgement.status),
        "reasons": [scrub(reason) for reason in judgement.reasons],
        "checks": list(judgement.checks),
        "steps_reached": judgement.steps_reached,
        "max_steps": trial.recipe.max_steps,
        "exit_code": judgement.exit_code,
        **facts,
    }
    missing = [key for key in KEYS if key not in record]
    assert not missing, f"a verdict needs {missing}"
    write_json(trial.verdict, record)
    return record


def read_verdict(trial: Trial) -> dict[str, Any] | None:
    """An earlier verdict that can be relied on; None when there is none or any part of it does not fit."""
    try:
        record = read_json(trial.verdict)
    except StateError:
        return None
    if not isinstance(record, dict) or any(key not in record for key in KEYS):
        return None
    rows, steps = record["checks"], record["steps_reached"]
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows) or not isinstance(steps, int):
        return None
    asked = [row.get("check") for row in rows] == list(trial.recipe.checks)
    good = all(row.get("status") == Verdict.PASS for row in rows)
    wanted = Verdict.PASS if good else Verdict.FAIL
    return record if asked and steps >= trial.recipe.max_steps and record["status"] == wanted else None


def _by_ending(trial: Trial, ending: Ending) -> TrialJudgement | None:
    recipe = trial.recipe
    which = f" (run {ending.run} of {recipe.num_runs})" if recipe.num_runs > 1 else ""
    if ending.stopped:
        return TrialJudgement(Verdict.INCOMPLETE, (f"stopped on request{which}",), STOPPED)
    if ending.out_of_time:
        return TrialJudgement(
            Verdict.INCOMPLETE, (f"out of time after {recipe.minutes:g} minutes{which}",), OUT_OF_TIME
        )
    if ending.infrastructure or ending.lost:
        return TrialJudgement(Verdict.ERROR, (f"{ending.why or 'the trainer could not be run'}{which}",), UNKNOWN)
    if ending.exit_code:
        return _by_exit(trial, ending.exit_code, which)
    return None


def _by_exit(trial: Trial, code: int, which: str) -> TrialJudgement:
    """What a trainer's exit status says: its own verdict, where it has one, or who is to blame."""
    said = exit_words(code)
    own = own_trainer(trial.recipe.command)
    if own and (code in _BAD_NUMBERS or (code == FAILED and _own_fail(trial))):
        return TrialJudgement(Verdict.FAIL, (f"the trainer's own verdict is not PASS: {said}{which}",), FAILED)
    number = -code if code < 0 else code - 128 if code > 128 else 0
    if number in _ASKED or code == STOPPED:
        return TrialJudgement(Verdict.INCOMPLETE, (f"the trainer was stopped from outside: {said}{which}",), STOPPED)
    if number == signal.SIGKILL or code == NO_ROOM:
        reason = f"the trainer failed: {said}{which}, as when memory or the disk is full"
        return TrialJudgement(Verdict.ERROR, (reason,), NO_ROOM)
    if code == USAGE:
        return TrialJudgement(Verdict.ERROR, (f"the trainer rejects its arguments: {said}{which}",), USAGE)
    if code in _NOT_STARTED:
        return TrialJudgement(Verdict.ERROR, (f"the trainer could not be started: {said}{which}",), UNKNOWN)
    reason = f"the trainer failed: {said}{which}"
    return TrialJudgement(Verdict.ERROR, (reason,), code if own and code in _OWN else CRASHED)


def own_trainer(command: Sequence[str]) -> bool:
    """Whether a recipe's command is ours, whose exit codes we know: `surefoot ...` or `{python} -m surefoot ...`."""
    return bool(command) and (os.path.basename(command[0]) == "surefoot" or tuple(command[1:3]) == ("-m", "surefoot"))


def _own_fail(trial: Trial) -> bool:
    """Whether our trainer left the verdict FAIL; 1 without it is how Python ends on an import that failed."""
    try:
        record = read_json(trial.run / "verdict.json")
    except StateError:
        return False
    return isinstance(record, dict) and record.get("status") == Verdict.FAIL


def _by_numbers(trial: Trial, metrics: Metrics, reached: int | None, ending: Ending) -> TrialJudgement:
    recipe = trial.recipe
    if reached is None:
        name = recipe.progress or PROGRESS
        near = ", ".join(metrics.nearest_names(name)) or "none"
        reason = f"{name} was not recorded, so nobody can tell how far it got (recorded: {near})"
        return TrialJudgement(Verdict.ERROR, (reason, "set progress in the manifest"), UNKNOWN)
    steps = f"{reached} of {recipe.max_steps} steps"
    if reached < recipe.max_steps:
        rows = _rows(trial, metrics) if recipe.early_checks else ()
        return TrialJudgement(Verdict.INCOMPLETE, (f"only {steps}",), CRASHED, rows, reached)
    try:
        rows = _rows(trial, metrics)
    except SurefootError as error:  # a baseline that is missing or torn: no answer, and never a PASS
        return TrialJudgement(
            Verdict.ERROR, (steps, f"the checks could not be run: {error.what}"), error.exit_code, (), reached
        )
    failed = [row for row in rows if row["status"] != Verdict.PASS]
    unknown = bool(failed) and all(row["status"] == Verdict.INCOMPLETE for row in failed)
    reasons = [steps, f"{len(rows) - len(failed)} of {len(rows)} checks passed"]
    if ending.exit_code is None:
        reasons.append("the trainer ran earlier; its exit status is not known")
    reasons += [f"{row['check']}: {row['message']}" for row in failed]
    if unknown:  # what could decide was never measured
        return TrialJudgement(Verdict.ERROR, tuple(reasons), UNKNOWN, rows, reached)
    passed = bool(rows) and not failed
    status, code = (Verdict.PASS, PASSED) if passed else (Verdict.FAIL, FAILED)
    return TrialJudgement(status, tuple(reasons), code, rows, reached)


def _rows(trial: Trial, metrics: Metrics) -> tuple[dict[str, Any], ...]:
    """One row per check, in order; a check without an answer has failed."""
    from surefoot_harness.baseline import FOLDER, Baselines
    from surefoot_harness.checks import run_checks

    answers = run_checks(metrics, list(trial.recipe.checks), Baselines(trial.root / FOLDER)).rows
    rows = []
    for check, answer in itertools.zip_longest(trial.recipe.checks, answers):
        if answer is None or answer.check != check:
            rows.append({"check": check, "status": str(Verdict.FAIL), "value": None, "message": "no answer"})
        else:
            status = answer.status if answer.status in (Verdict.PASS, Verdict.INCOMPLETE) else Verdict.FAIL
            value = _plain(answer.value)
            rows.append({"check": check, "status": str(status), "value": value, "message": answer.message})
    return tuple(rows)


def _collect(trial: Trial) -> Metrics:
    """Load the numbers and keep them as one `metrics.json`, whatever form they had."""
    metrics = load(trial)
    table = {name: {str(step): _plain(value) for step, value in metrics[name].points()} for name in sorted(metrics)}
    write_json(trial.folder / "metrics.json", table)
    return metrics


def _plain(value: Any) -> Any:
    """As JSON can hold it: numbers that are not finite become their names, which no check takes for a number."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value if isinstance(value, str | int | float | bool) or value is None else str(value)


def worst_exit(codes: Sequence[int]) -> int:
    """One exit code for several: a stop wins, then a check that failed, then a crash, then what nobody can tell."""
    for code in (STOPPED, FAILED, CRASHED, USAGE, UNKNOWN):
        if code in codes:
            return code
    return max(codes, default=UNKNOWN)


# -- A result folder: one JSON per part, its output beside it; the overall verdict is the worst required part
# FOLDER/NAME.json          success, return_code, output, command, name, timestamp, duration, verdict, required,
# warnings
# NAME.stdout.txt    what the part said
# NAME.stderr.txt    what the judge said about it
#
# Promises   no percentages: six parts of which one failed is FAIL; a warning on the deny list turns its part red;
# secrets are taken out before anything is stored; the report is made from the JSON files only.


LONGEST = 50_000_000
"""Bytes of a log's end that a text file keeps at most."""
_KEPT = 20_000
"""Characters of output inside the JSON; the text file has more."""
_WARNING = re.compile(r"\b(?:WARN(?:ING)?|ERROR|CRITICAL|[A-Z]\w*Warning)\b")
_ORDER = (Verdict.PASS, Verdict.SKIP, Verdict.INCOMPLETE, Verdict.FAIL, Verdict.ERROR)
"""From best to worst."""
_FIELDS: dict[str, type | tuple[type, ...]] = {
    "name": str, "success": bool, "return_code": int, "output": str, "command": list, "timestamp": str,
    "duration": (int, float), "verdict": str, "required": bool, "warnings": list,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One part of a test session, as it goes into its JSON file."""

    name: str
    verdict: Verdict
    return_code: int
    command: Sequence[str]
    duration: float
    stdout: str = ""
    stderr: str = ""
    required: bool = True


def new_folder_name(moment: datetime.datetime | None = None) -> str:
    """`test_results_YYYYMMDD_HHMMSS`, in UTC."""
    return f"test_results_{moment or datetime.datetime.now(datetime.UTC):%Y%m%d_%H%M%S}"


def refuse_stale(folder: Path, names: Sequence[str]) -> None:
    """A part that is there already is refused before anything runs: old and new results must not mix."""
    old = [name for name in names if part_path(folder, name).exists()]
    if old:
        raise StateError(
            f"{folder} already has {', '.join(old)}", "old and new results would mix", "choose another folder"
        )


def write_part(folder: Path, part: Part, deny: Sequence[str]) -> dict[str, Any]:
    """Store one part; the record as written."""
    stdout, stderr = scrub(part.stdout), scrub(part.stderr)
    warnings = denied(stdout + "\n" + stderr, deny)
    success = part.verdict == Verdict.PASS and part.return_code == 0 and not warnings
    verdict = Verdict.FAIL if part.verdict == Verdict.PASS and not success else part.verdict
    record: dict[str, Any] = {
        "name": part.name,
        "success": success,
        "verdict": str(verdict),
        "return_code": part.return_code,
        "required": part.required,
        "command": [scrub(word) for word in part.command],
        "timestamp": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "duration": round(part.duration, 3),
        "warnings": warnings,
        "output": stdout[-_KEPT:],
    }
    path = part_path(folder, part.name)
    write_atomic(path.with_suffix(".stdout.txt"), stdout.encode(errors="replace"))
    write_atomic(path.with_suffix(".stderr.txt"), stderr.encode(errors="replace"))
    write_json(path, record)  # last: a part without its texts is never there
    return record


def denied(text: str, deny: Sequence[str]) -> list[str]:
    """Lines that are warnings by their level and match the deny list; a prompt that talks of a fallback is neither."""
    patterns = [re.compile(pattern, re.IGNORECASE) for pattern in deny]
    return [
        line.strip()[:500]
        for line in text.splitlines()
        if _WARNING.search(line) and any(pattern.search(line) for pattern in patterns)
    ]


def part_path(folder: Path, name: str) -> Path:
    """The JSON file of a part; dots in names stay what they are, slashes become two underscores."""
    return folder / (name.replace("/", "__") + ".json")


def read_parts(folder: Path) -> list[dict[str, Any]]:
    """Every part of a folder, by name; none, or one that is not a part, is a `StateError`."""
    paths = sorted(folder.glob("*.json")) if folder.is_dir() else []
    if not paths:
        raise StateError(f"{folder} holds no results", "nothing was judged there", "give a folder made by --results")
    return [_checked(path, read_json(path)) for path in paths]


def overall(parts: Sequence[dict[str, Any]]) -> Verdict:
    """The worst verdict of the required parts; without any, nothing was shown: FAIL."""
    verdicts = [_of(part) for part in parts if part["required"]]
    return max(verdicts, key=_ORDER.index, default=Verdict.FAIL)


def report(folder: Path) -> tuple[str, Verdict]:
    """The folder as text, and its overall verdict."""
    parts = read_parts(folder)
    rows = [
        [
            str(_of(part)), part["name"], "yes" if part["required"] else "no", str(part["return_code"]),
            f"{part['duration']:.1f} s", "; ".join(map(str, part["warnings"])),
        ]
        for part in parts
    ]  # fmt: skip
    verdict = overall(parts)
    lines = table(f"Results in {folder.name}", ["Status", "Part", "Required", "Exit", "Time", "Warnings"], rows)
    return f"{lines}\n\noverall  {verdict}  (the worst of {sum(p['required'] for p in parts)} required parts)", verdict


def _of(part: dict[str, Any]) -> Verdict:
    """A part's verdict; one that contradicts its own facts is not a PASS."""
    verdict = Verdict(part["verdict"])
    good = part["success"] and part["return_code"] == 0 and not part["warnings"]
    return Verdict.FAIL if verdict == Verdict.PASS and not good else verdict


def _checked(path: Path, record: Any) -> dict[str, Any]:
    wrong = (
        [key for key, kind in _FIELDS.items() if not isinstance(record.get(key), kind)]
        if isinstance(record, dict)
        else list(_FIELDS)
    )
    if not wrong and record["verdict"] not in [str(verdict) for verdict in Verdict]:
        wrong = ["verdict"]
    if wrong:
        raise StateError(
            f"{path} is not a part: {', '.join(wrong)}", "half a result is no result", "restore it or run again"
        )
    return dict(record)

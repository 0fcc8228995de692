"""The workflows of GitHub Actions: they can be read, call only commands that we have, and hold nobody's keys."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from repo_tree import ROOT

FOLDER = ROOT / ".github/workflows"
FILES = sorted(FOLDER.glob("*.y*ml"))
PINNED = re.compile(r"\s*-? ?uses: [\w.-]+/[\w./-]+@[0-9a-f]{40} # v\d+(\.\d+)*")
CRON = re.compile(r"(\*|\d{1,2})( (\*|\d{1,2}(-\d{1,2})?(,\d{1,2})*)){4}")


def problems(text: str) -> list[str]:
    """Everything that is wrong with one workflow."""
    try:
        workflow = yaml.safe_load(text)
    except yaml.YAMLError as error:
        return [f"not YAML: {error}"]
    if not isinstance(workflow, dict) or not isinstance(workflow.get("jobs"), dict):
        return ["not a workflow: it has no jobs"]
    return [*_about_keys(workflow, text), *_about_jobs(workflow["jobs"]), *_about_actions(text)]


def _about_keys(workflow: dict[Any, Any], text: str) -> Iterator[str]:
    starts = workflow.get("on", workflow.get(True))  # YAML 1.1 reads `on` as true
    if not starts:
        yield "nothing starts it"
    for entry in (starts or {}).get("schedule", []) if isinstance(starts, dict) else []:
        if not CRON.fullmatch(entry.get("cron", "")):
            yield f"no such time: {entry}"
    if workflow.get("permissions") != {"contents": "read"}:
        yield "it may do more than read"
    if re.search(r"secrets\b|token\b|password", text, re.IGNORECASE):
        yield "it names a secret"


def _about_jobs(jobs: dict[str, Any]) -> Iterator[str]:
    for name, job in jobs.items():
        if not isinstance(job.get("timeout-minutes"), int):
            yield f"{name} may run for ever"
        if not re.fullmatch(r"ubuntu-\d\d\.\d\d", str(job.get("runs-on"))):
            yield f"{name} runs on {job.get('runs-on')}, which is another machine every year"
        for step in job.get("steps") or [{}]:
            if not step.keys() & {"uses", "run"}:
                yield f"{name} has a step that does nothing"
            for line in str(step.get("run", "")).splitlines():
                if not ours(shlex.split(line)):
                    yield f"{name} calls what is not ours: {line}"


def ours(words: list[str]) -> bool:
    """Whether a line of a workflow is one of our own commands, and one that exists."""
    if words == [".ci/run"]:
        return (ROOT / ".ci/run").is_file()
    if words[:1] == ["make"]:
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return len(words) > 1 and all(word in targets for word in words[1:])
    if words[:3] == [".venv/bin/surefoot", "suite", "run"]:
        return len(words) > 3 and (ROOT / f"suites/{words[3]}.toml").is_file()
    return False


def _about_actions(text: str) -> Iterator[str]:
    for line in text.splitlines():
        if "uses:" in line and not PINNED.fullmatch(line):
            yield f"not pinned to a commit, with its version beside it: {line.strip()}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_workflow_is_readable_pinned_and_calls_our_own_commands(path: Any) -> None:
    assert problems(path.read_text(encoding="utf-8")) == []


def test_changes_are_checked_and_tested_and_the_nightly_tests_run_every_night() -> None:
    assert {path.name for path in FILES} == {"ci.yml", "nightly.yml"}
    change, night = (yaml.safe_load((FOLDER / name).read_text()) for name in ("ci.yml", "nightly.yml"))
    assert {"push", "pull_request"} <= change[True].keys()
    assert night[True]["schedule"]

    def called(workflow: Any) -> list[str]:
        return [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]

    ci = (ROOT / ".ci/run").read_text()
    assert called(change) == ["make check", "make test"]
    assert all(line in ci for line in called(change)), "a change passes there what it passes here"
    assert "make nightly" in called(night)


PLANTS = {
    "a tab": ("    steps:", "\tsteps:"),
    "no such target": ("make test", "make tset"),
    "a target and more": ("make test", "make test && curl example.org"),
    "another command": ("make check", "pip install surefoot"),
    "no such suite": ("make check", ".venv/bin/surefoot suite run nightlies"),
    "a moving version": ("@11bd71901bbe5b1630ceea73d27597364c9af683 # v4.2.2", "@v4"),
    "a commit without its version": (" # v4.2.2", ""),
    "a key": ("persist-credentials: false", "key: ${{ secrets.KEY }}"),
    "may write": ("contents: read", "contents: write"),
    "for ever": ("    timeout-minutes: 120\n", ""),
    "a moving machine": ("ubuntu-24.04", "ubuntu-latest"),
}


@pytest.mark.parametrize(("old", "new"), PLANTS.values(), ids=list(PLANTS))
def test_planted_mistakes_in_a_workflow_are_caught(old: str, new: str) -> None:
    text = (FOLDER / "ci.yml").read_text()
    assert old in text
    assert problems(text.replace(old, new, 1)) != []


@pytest.mark.parametrize("cron", ["17 2 * *", "every night", ""])
def test_planted_time_that_is_none_is_caught(cron: str) -> None:
    text = (FOLDER / "nightly.yml").read_text()
    assert problems(text.replace("17 2 * * *", cron)) != []

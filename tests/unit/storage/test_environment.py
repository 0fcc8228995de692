"""The record of the machine says what it knows and calls the rest null."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from surefoot.storage.run_folder import environment_record


def test_the_record_is_json_with_the_agreed_fields() -> None:
    record = json.loads(json.dumps(environment_record(), allow_nan=False))
    assert record["success"] is True
    assert record["test"] == "environment"
    assert record["timestamp"].endswith("+00:00")
    assert record["duration_s"] >= 0
    assert 0 < record["memory_available_gb"] <= record["memory_total_gb"]
    assert record["versions"]["torch"]


def test_torch_is_asked_only_when_it_is_there_or_wanted() -> None:
    code = (
        "import sys; from surefoot.storage.run_folder import environment_record as r; a = r();"
        "assert 'torch' not in sys.modules; assert a['cuda_available'] is None; assert a['torch']"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    asked = environment_record(torch=True)
    assert asked["cuda_available"] in (True, False)
    assert asked["threads"] >= 1


def test_git_says_commit_and_changes_and_null_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert environment_record(cwd=tmp_path)["git"] == {"commit": None, "dirty": None}
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    (tmp_path / "f").write_text("1")
    for words in (["init", "-q"], ["add", "f"], [*who, "commit", "-qm", "x"]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    clean = environment_record(cwd=tmp_path)["git"]
    assert len(clean["commit"]) == 40
    assert clean["dirty"] is False
    (tmp_path / "f").write_text("2")
    assert environment_record(cwd=tmp_path)["git"]["dirty"] is True


def test_no_variable_of_the_environment_gets_into_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "canary-1234567890")
    assert "canary-1234567890" not in json.dumps(environment_record())

"""A run is told once what it is made of, and goes on with nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from surefoot.errors import StateError
from surefoot.storage.files import Journal
from surefoot.storage.run_journal import assert_same_run, resumes


def test_facts_are_told_once_and_compared_ever_after(tmp_path: Path) -> None:
    path = tmp_path / "a.journal"
    with Journal.create(path) as journal:
        assert assert_same_run(journal, "inputs", {"seed": 1, "tasks_sha256": "a" * 64})
        assert assert_same_run(journal, "parts", {"weights_sha256": "w" * 64})
    with Journal.open(path) as journal:
        assert not assert_same_run(journal, "inputs", {"seed": 1, "tasks_sha256": "a" * 64})
        with pytest.raises(StateError, match=r"the tasks changed .*'aaaa.*is 'bbbb"):
            assert_same_run(journal, "inputs", {"seed": 1, "tasks_sha256": "b" * 64})
        with pytest.raises(StateError, match="the model that the run began with changed"):
            assert_same_run(journal, "parts", {"weights_sha256": "x"})
        assert journal.last_number == 3, "two records and a seal: a refusal writes nothing"


def test_every_resume_is_listed(tmp_path: Path) -> None:
    with Journal.create(tmp_path / "a.journal") as journal:
        assert resumes(journal) == []
        for step in (3, 5):
            journal.append({"event": "run.resumed", "step": step, "repeated": 1})
        assert resumes(journal) == [{"step": 3, "repeated": 1}, {"step": 5, "repeated": 1}]

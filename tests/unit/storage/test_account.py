"""`surefoot ledger RUN` says where every item is, from a run that is going on or one that was killed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from surefoot.cli import app
from surefoot.errors import StateError
from surefoot.storage.files import Journal
from surefoot.storage.ledger import Ledger, Visit
from surefoot.storage.run_journal import read_accounting


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Four items: trained, dropped, leased, pending; the writer is still there."""
    (tmp_path / "config.toml").write_text("")
    (tmp_path / "journal").mkdir()
    journal = Journal.create(tmp_path / "journal/ledger.journal")
    ledger = Ledger.open(journal)
    ledger.plan(Visit(name, 0) for name in "abcd")
    leases = ledger.lease(3, holder="driver")
    ledger.complete(leases[:2])
    ledger.drop([leases[1].item], "reward_died")
    ledger.trained(7, [leases[0].item])
    journal.append({"event": "run.resumed", "step": 5, "repeated": 2})
    return tmp_path


def test_the_account_of_a_run_that_is_going_on(run: Path) -> None:
    before = (run / "journal/ledger.journal").read_bytes()
    account = read_accounting(run)
    assert account.lines() == [
        "planned           4",
        "pending           1  waits in the queue",
        "leased            1  being worked on; 0 of them delivered",
        "trained           1  in the weights, by step 7",
        "dropped           1  reward_died 1",
        "resumed   after step 5, 2 journaled batches repeated",
        "every item is accounted for",
    ]
    assert account.named("dropped") == ["b#0  reward_died"]
    assert account.named("leased") == ["c#0  by driver"]
    assert (run / "journal/ledger.journal").read_bytes() == before, "looking changes nothing"


def test_the_command_prints_it_for_people_and_for_scripts(run: Path) -> None:
    shown = CliRunner().invoke(app, ["ledger", str(run)])
    assert (shown.exit_code, "trained           1" in shown.output) == (0, True)
    listed = CliRunner().invoke(app, ["ledger", str(run), "--items", "trained"])
    assert listed.output == "a#0  step 7\n"
    facts = json.loads(CliRunner().invoke(app, ["ledger", str(run), "--json"]).output)
    assert (facts["planned"], facts["trained"], facts["dropped"], facts["lost"]) == (4, 1, {"reward_died": 1}, 0)


def test_a_torn_tail_is_told_and_left_alone(run: Path) -> None:
    with (run / "journal/ledger.journal").open("ab") as file:
        file.write(b"\xf5SFR half a frame")
    assert "torn      17 bytes" in "\n".join(read_accounting(run).lines())


def test_a_run_without_a_ledger_and_one_that_is_damaged_are_refused(run: Path) -> None:
    path = run / "journal/ledger.journal"
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)
    with pytest.raises(StateError, match="is damaged at byte"):
        read_accounting(run)
    path.unlink()
    with pytest.raises(StateError, match="has no ledger"):
        read_accounting(run)
    assert CliRunner().invoke(app, ["ledger", str(run / "nowhere")]).exit_code == 3

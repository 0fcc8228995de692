"""kill -9 of a run that samples ahead: batches that were on the disk are learned from again, bit for bit.

What was not on the disk depends on the clock, so two asynchronous runs are never compared with each other; a resumed one
is compared with what its own former life had written.
"""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from figures import Record, note
from kill_runs import CLOCKED, Bench, Case

from surefoot.store.journal import Journal
from surefoot.store.ledger import Ledger

AHEAD: dict[str, Any] = {"max_staleness": 2, "importance_sampling_correction": True, "max_steps": 8, "eval_steps": 4}
CASES = {
    "saves": Case("ahead", AHEAD | {"save_steps": 3}),
    "journal only": Case("ahead, journal only", AHEAD | {"save_steps": 0, "save_minutes": 0.0, "save_best": False}),
    "two passes": Case("ahead, two passes", AHEAD | {"num_iterations": 2, "save_steps": 2}),
    "seldom synced": Case("ahead, seldom synced", AHEAD | {"weight_sync_steps": 2, "save_steps": 2}),
}
KILLS = [
    ("saves", "loop.after_learn=kill@5"), ("saves", "batches.after_append=kill@7"),
    ("journal only", "loop.after_learn=kill@6"), ("journal only", "batches.before_append=kill@13"),
    ("journal only", "ledger.after_event=kill@25"), ("two passes", "loop.after_learn=kill@5"),
    ("seldom synced", "loop.after_publish=kill@3"),
]  # fmt: skip


def rows(run: Path) -> dict[int, dict[str, float]]:
    """The numbers of every step, without what the clock or the queue says."""
    told = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    clocked = (*CLOCKED, "async/", "sync/")
    return {
        row["step"]: {k: v for k, v in row.items() if not k.startswith(clocked) and k != "killswitch/eval_share"}
        for row in told
        if "loss" in row
    }


def check_account(case: Case, run: Path) -> None:
    with Journal.open(run / "journal" / "ledger.journal", readonly=True) as journal:
        ledger = Ledger.read(journal)
    ledger.check()
    balance = ledger.balance()
    assert balance.trained + sum(balance.dropped.values()) == case.visits
    assert (balance.lost, balance.leased) == (0, 0)
    ages = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert max(row["async/staleness_max"] for row in ages if "loss" in row) <= 2


@pytest.mark.parametrize(("name", "failpoint"), KILLS)
def test_a_killed_run_repeats_what_was_on_the_disk_and_goes_on(
    name: str, failpoint: str, bench: Bench, record_property: Record
) -> None:
    case = CASES[name]
    folder = bench.folder(case)
    ended = bench.train(folder, failpoints=failpoint)
    assert ended.code == -signal.SIGKILL, f"{failpoint} was not reached: exit {ended.code}\n{ended.said}"
    run = folder / "run"
    before = rows(run) if (run / "metrics.jsonl").exists() else {}
    played = {path.name: path.read_bytes() for path in (run / "rollouts").glob("*.jsonl")}
    ended = bench.resume(folder)
    assert ended.code == 0, ended.said
    after = rows(run)
    assert sorted(after) == list(range(1, 9))
    assert {step: after[step] for step in before} == before
    assert {name: (run / "rollouts" / name).read_bytes() for name in played} == played
    check_account(case, run)
    assert bench.warm.orphans() == []
    note(record_property, "P2", "kill -9 of an asynchronous run, resumed: journaled steps bit-equal", 1)
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    "name", ["loop.before_collect", "loop.after_learn", "ledger.after_event", "session.after_save"]
)
def test_asked_to_stop_a_run_that_samples_ahead_stops_and_goes_on(
    name: str, bench: Bench, record_property: Record
) -> None:
    case = CASES["saves"]
    folder = bench.folder(case)
    hit = 20 if name.startswith("ledger") else 2
    ended = bench.train(folder, before=[("signal_at", name, hit, int(signal.SIGTERM))])
    assert ended.code == 75, f"exit {ended.code}\n{ended.said}"
    ended = bench.resume(folder)
    assert ended.code == 0, ended.said
    check_account(case, folder / "run")
    note(record_property, "P11", "SIGTERM to an asynchronous run, then resumed", 1)
    shutil.rmtree(folder)

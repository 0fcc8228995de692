"""Nothing lost, nothing trained twice: real journal and ledger in a world where everything else goes wrong."""

from __future__ import annotations

from collections import Counter

import pytest
from figures import Record, note
from store_simulator import SimulationError, simulate

from surefoot.errors import SurefootError
from surefoot.storage import ledger
from surefoot.storage.files import Journal
from surefoot.storage.ledger import Lease, Ledger, LedgerState

SEEDS = 200
SIMULATED = "simulated drivers, workers, networks and disks: no item lost, none trained twice"


def test_no_seed_loses_an_item_or_trains_one_twice(record_property: Record) -> None:
    seen: Counter[str] = Counter()
    for seed in range(SEEDS):
        seen += simulate(seed)
    wanted = ["power loss", "process killed", "disk full", "disk eio", "lost message", "partition", "worker died",
              "result late", "result duplicate", "result done", "step redone", "rewind", "stopped by the disk"]  # fmt: skip
    assert [name for name in wanted if not seen[name]] == [], "the world was too kind"
    note(record_property, "P3", SIMULATED, SEEDS, seeds=range(SEEDS))


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(4))
def test_ten_thousand_seeds(part: int, record_property: Record) -> None:
    for seed in range(2500 * part, 2500 * (part + 1)):
        simulate(seed)
    note(record_property, "P3", SIMULATED, 2500, seeds=range(2500 * part, 2500 * (part + 1)))


def test_a_seed_replays_exactly() -> None:
    assert simulate(7) == simulate(7)


def a_seed_fails(**words: bool) -> str:
    """The message of the first seed that notices; a world that notices nothing fails the test."""
    for seed in range(SEEDS):
        try:
            simulate(seed, **words)
        except SimulationError as error:
            assert str(error).startswith(f"seed {seed}: ")
            assert f"--seed {seed}" in str(error)
            return str(error)
        except SurefootError as error:
            return f"seed {seed}: {error}"
    pytest.fail("the planted bug was not noticed")


def test_planted_missing_fsync_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "SYNCED", ())
    a_seed_fails()


def test_planted_missing_fsync_of_trained_steps_alone_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "SYNCED", tuple(kind for kind in ledger.SYNCED if kind != "train"))
    a_seed_fails()


def test_planted_belief_in_late_results_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Ledger.outcome

    def believing(self: Ledger, lease: Lease) -> ledger.LeaseOutcome:
        status = self.status(lease.item)
        return "accepted" if isinstance(status, Lease) and not status.delivered else real(self, lease)

    monkeypatch.setattr(Ledger, "outcome", believing)
    assert "late result" in a_seed_fails()


def test_planted_lease_that_is_dropped_on_resume_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    real = LedgerState.undelivered
    monkeypatch.setattr(LedgerState, "undelivered", lambda self: real(self)[1:])
    assert "dead driver" in a_seed_fails()


def test_planted_step_before_its_journal_entry_is_caught() -> None:
    assert "repeated with other data" in a_seed_fails(learn_first=True)


def test_planted_reader_that_takes_every_hole_for_damage_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Power loss may keep a later block and lose an earlier one: refusing that would end a run that can go on."""

    def strict(self: Journal, offset: int, number: int, end: int, *, expected: bool) -> None:
        for _, head in self._later_heads(offset + 1, end):
            if head.number >= number:
                raise self._damaged(offset, "a frame follows")

    monkeypatch.setattr(Journal, "_refuse_damage", strict)
    assert "damaged" in a_seed_fails()

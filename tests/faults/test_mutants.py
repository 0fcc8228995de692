"""Changed checkpoints and journals by the thousand: refused, or read as what was written; never believed."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoint_mutants import judge
from figures import Record, note
from journal_mutants import mutations

pytestmark = pytest.mark.nightly


@pytest.mark.parametrize("seed", range(4))
def test_ten_thousand_changed_checkpoints(one_thread: None, tmp_path: Path, seed: int, record_property: Record) -> None:
    report = judge(2500, seed=seed, scratch=tmp_path)
    assert report["bad"] == []
    note(
        record_property,
        "P7",
        "changed checkpoints: refused, or exactly what was saved",
        2500,
        seeds=range(seed, seed + 1),
    )


@pytest.mark.parametrize("seed", range(4))
def test_a_hundred_thousand_changed_journals(seed: int, record_property: Record) -> None:
    for number, (written, got) in enumerate(mutations(seed=seed, count=25_000)):
        assert got is None or got == written[: len(got)], f"seed {seed}, mutation {number} was believed"
    note(
        record_property,
        "P7",
        "changed journals: refused, or a beginning of what was written",
        25_000,
        seeds=range(seed, seed + 1),
    )

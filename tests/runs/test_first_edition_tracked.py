"""What the first edition tracked (`fixtures/first_edition_tracked.tar.gz`, commit b6fc68d) is read, and carried on.

Nine sessions that ended, and one that was killed: its journal, one JSON object per line, was never merged.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from command import ROOT, surefoot
from plugin_kit import environment, history, results

from surefoot.harness.tracker.results import HISTORY, JOURNALS

KILLED = "20261118-174007-274804-7039"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    with tarfile.open(ROOT / "tests" / "fixtures" / "first_edition_tracked.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / "tracked"


def values(place: Path) -> list[float]:
    said = surefoot("trend", "loss", "--json", cwd=place)
    assert said.code == 0, said.out + said.err
    (trend,) = json.loads(said.out)["trends"]
    assert trend["status"] == "PASS"
    return [point["value"] for point in trend["points"]]


def session(place: Path) -> str:
    """One more session, with the plugin as it is today."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "surefoot.harness.plugin", "-p", "no:cacheprovider"]
    done = subprocess.run(
        command, cwd=place, env=environment(), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_trend_and_check_read_them(place: Path) -> None:
    assert values(place) == [0.51, 0.52, 0.5] * 3
    checked = surefoot("check", "unit_results.json", 'data["test_old::test_loss/loss"] == 0.51', cwd=place)
    assert checked.code == 0, checked.out + checked.err
    newest = sorted((place / HISTORY).glob("*.json"))[-1]
    checked = surefoot("check", str(newest), 'data["test_old::test_killed/last"] == 41', cwd=place)
    assert checked.code == 0, checked.out + checked.err


def test_the_next_session_merges_what_the_killed_one_left_and_both_are_read(place: Path) -> None:
    lines = place / JOURNALS / KILLED / "main-7039.jsonl"
    lines.write_bytes(lines.read_bytes() + b'{"event": "tra')
    assert f"what it tracked is in {HISTORY}/{KILLED}.json" in session(place)
    *_, recovered, fresh = history(place)
    assert (recovered["session"], recovered["exit_status"], recovered["recovered"]) == (KILLED, "not set", True)
    assert recovered["metrics"]["test_old::test_killed"] == {"_unfinished": True, "last": 41}
    assert recovered["metrics"]["test_old::test_loss"]["loss"] == 0.51
    assert recovered["problems"] == ["main-7039.jsonl: the last line is torn after 14 bytes; what it said is lost"]
    assert results(place) == fresh
    assert not (place / JOURNALS).exists()
    assert values(place) == [0.51, 0.52, 0.5] * 3 + [0.51, 0.5]


def test_planted_reader_that_knows_frames_only_is_seen(place: Path) -> None:
    (place / "conftest.py").write_text(
        "from surefoot.harness.tracker import tracker\ntracker._read_lines = lambda file, journal: None\n"
    )
    with pytest.raises(KeyError, match="test_killed"):
        test_the_next_session_merges_what_the_killed_one_left_and_both_are_read(place)

"""Cassettes as they were before frames, one JSON object per line: replayed to the letter, never added to.

`fixtures/cassettes/format_1_calls.jsonl` was recorded by commit d6a079f with the toolkit of `cassette_kit.py`: two
sessions, the second of which was ended in the middle of a line.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from cassette_kit import TASK, Kit, never, play
from command import ROOT

from surefoot.errors import StateError, ToolError
from surefoot.tools import recording_file
from surefoot.tools.recording import RecordingToolkit

OLD = ROOT / "tests" / "fixtures" / "cassettes" / "format_1_calls.jsonl"
CALLS = [("ask", {"z": "x", "a": 1}), ("tell", {"z": "é \ud800 \n", "a": 404})]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return Path(shutil.copy(OLD, tmp_path / "calls.jsonl"))


def test_it_is_replayed_to_the_letter_failures_included_and_starts_nothing(path: Path) -> None:
    before = path.read_bytes()
    replay = RecordingToolkit(never, path, mode="replay")
    assert [spec.name for spec in replay.specs] == ["ask", "tell"]
    assert play(replay, "train/0/0/0", CALLS) == [
        "opening of train/0/0/0", ("second train/0/0/0 1 x", "ok"), ("second train/0/0/0 2 é \ud800 \n", "error"), 2.1
    ], "of a rollout that was played twice, the last whole recording"  # fmt: skip
    assert play(replay, "train/0/0/1", [("ask", {"z": "x", "a": 666})]) == ["no room\n  why: full\n  fix: wait", "full"]
    assert replay.open(TASK, "train/1/0/0", 1).call("ask", {"z": "never closed"}, 5).text.startswith("second")
    with pytest.raises(ToolError, match="never opened"):
        replay.open(TASK, "train/9/0/0", 1)
    replay.sync()
    replay.close()
    replay.close()
    assert path.read_bytes() == before


def test_recording_to_it_is_refused_with_both_formats_and_leaves_it_as_it_is(path: Path) -> None:
    before = path.read_bytes()
    kit = Kit()
    with pytest.raises(StateError, match="is a cassette of format 1, and this surefoot records to format 2") as refused:
        RecordingToolkit(kit, path)
    assert (refused.value.exit_code, kit.ended) == (3, True)
    assert path.read_bytes() == before


def test_damage_before_its_torn_last_line_is_refused_wherever_it_is(path: Path) -> None:
    whole = path.read_bytes()
    end = whole.rindex(b"\n") + 1
    for at in range(0, end, 7):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(StateError, match="not a cassette that can be used"):
            RecordingToolkit(None, path, mode="replay")
    lines = whole.splitlines(keepends=True)
    for spoilt in ([*lines[:3], *lines[4:]], [*lines[:4], *lines[3:]], lines[1:], [lines[0][:50]], [b"\n", *lines]):
        path.write_bytes(b"".join(spoilt))
        with pytest.raises(StateError, match="not a cassette that can be used"):
            RecordingToolkit(None, path, mode="replay")


def test_planted_reader_without_checksums_is_seen(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording_file.zlib, "crc32", lambda *words: 0)
    changed = path.read_bytes().replace(b"second train", b"SECOND train")
    path.write_bytes(b"".join(b'{"crc":"00000000' + line[16:] for line in changed.splitlines(keepends=True)))
    replay = RecordingToolkit(None, path, mode="replay")
    assert play(replay, "train/0/0/0", CALLS)[1][0].startswith("SECOND"), "only the checksum stands before a run"
    replay.close()

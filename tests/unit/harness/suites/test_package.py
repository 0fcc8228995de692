"""Event files are made by hand here, byte by byte, and read back by TensorBoard's own reader where it is installed."""

from __future__ import annotations

import json
import re
import struct
import tarfile
from pathlib import Path

import pytest

from surefoot.errors import ConfigError, StateError
from surefoot.harness.suites import package as packing
from surefoot.harness.suites.package import filler, masked_crc, package, redact

HOST = "gpu-node17.cluster.example"
NAME = f"events.out.tfevents.1700000000.{HOST}.4242.0"


def record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", masked_crc(length)) + data + struct.pack("<I", masked_crc(data))


def text_field(number: int, text: bytes) -> bytes:
    return bytes([number << 3 | 2, len(text)]) + text


def event(tag: str, value: float, step: int, host: str = "") -> bytes:
    """One scalar event by the wire format: wall_time, step, summary{value{tag, simple_value}}."""
    inner = text_field(1, tag.encode()) + bytes([2 << 3 | 5]) + struct.pack("<f", value)
    inner += text_field(7, host.encode()) if host else b""
    summary = text_field(1, inner)
    return bytes([1 << 3 | 1]) + struct.pack("<d", 1.0) + bytes([2 << 3, step]) + text_field(5, summary)


def event_file(host: str = HOST) -> bytes:
    version = bytes([1 << 3 | 1]) + struct.pack("<d", 1.0) + text_field(3, b"brain.Event:2")
    return b"".join(
        map(record, [version, event("train/loss", 0.5, 1), event("note", 1.0, 2, host), event("train/loss", 0.25, 2)])
    )


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    (folder / f"a/Jan01_12-00-00_{HOST}").mkdir(parents=True)
    (folder / f"a/Jan01_12-00-00_{HOST}" / NAME).write_bytes(event_file())
    (folder / "b").mkdir()
    (folder / "b" / NAME.replace("17", "18")).write_bytes(event_file(HOST.replace("17", "18")))
    (folder / "b/notes.txt").write_text(HOST)
    return folder


def members(path: Path) -> dict[str, bytes]:
    found = {}
    with tarfile.open(path) as archive:
        for entry in archive:
            file = archive.extractfile(entry)
            assert file is not None, entry
            found[entry.name] = file.read()
    return found


def no_host_name_is_left(runs: Path, out: Path) -> None:
    made = package(runs, out, commit="abc123")
    found = members(made.path)
    assert len(found) == 2
    for name, data in found.items():
        assert b"gpu-node" not in data
        assert "gpu-node" not in name


def test_host_names_are_gone_from_names_folders_and_contents(runs: Path, tmp_path: Path) -> None:
    no_host_name_is_left(runs, tmp_path / "out")


def test_planted_redaction_of_names_only_is_caught(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "redact", lambda data, words, source: redact(data, [], source))
    monkeypatch.setattr(packing, "_verify", lambda found, words: None)
    with pytest.raises(AssertionError):
        no_host_name_is_left(runs, tmp_path / "out")


def test_a_host_name_that_is_left_over_stops_the_release(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "redact", lambda data, words, source: redact(data, [], source))
    with pytest.raises(StateError, match="still holds a host name"):
        package(runs, tmp_path / "out", commit="abc123")
    assert not list((tmp_path / "out").glob("*")) if (tmp_path / "out").exists() else True


def test_files_stay_readable_and_their_numbers_unchanged(runs: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="reads event files")
    from surefoot.harness.sources import read_events

    made = package(runs, tmp_path / "out", commit="abc123")
    with tarfile.open(made.path) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    metrics = read_events(tmp_path / "unpacked/b").metrics()
    assert dict(metrics["train/loss"]) == {1: 0.5, 2: 0.25}
    assert len(metrics) == 2


def test_only_event_files_are_packed_and_the_archive_tells_nothing_else(runs: Path, tmp_path: Path) -> None:
    made = package(runs, tmp_path / "out", commit="abc123")
    assert (made.path.name, made.files, made.replaced, made.torn) == ("abc123.tar.gz", 2, 2, 0)
    with tarfile.open(made.path) as archive:
        for entry in archive:
            assert (entry.uid, entry.gid, entry.uname, entry.gname, entry.mtime) == (0, 0, "", "", 0)
            assert "tfevents" in entry.name


def test_the_same_input_gives_the_same_bytes(runs: Path, tmp_path: Path) -> None:
    one, two = (package(runs, tmp_path / name, commit="abc123").path.read_bytes() for name in ("x", "y"))
    assert one == two


def test_an_existing_tarball_is_not_touched(runs: Path, tmp_path: Path) -> None:
    target = tmp_path / "out/abc123.tar.gz"
    target.parent.mkdir()
    target.write_text("released")
    with pytest.raises(StateError, match="exists"):
        package(runs, tmp_path / "out", commit="abc123")
    assert target.read_text() == "released"


def test_no_events_and_no_folder_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for folder in ("empty", "none"):
        with pytest.raises(StateError):
            package(tmp_path / folder, tmp_path / "out", commit="abc123")
    assert not (tmp_path / "out").exists()


def test_the_commit_is_the_one_that_the_runs_record(runs: Path, tmp_path: Path) -> None:
    (runs / "a/verdict.json").write_text('{"commit": "' + "a" * 40 + '"}')
    assert package(runs, tmp_path / "out").path.name == "a" * 12 + ".tar.gz"
    (runs / "b/verdict.json").write_text('{"commit": "' + "b" * 40 + '"}')
    with pytest.raises(ConfigError, match="2 commits"):
        package(runs, tmp_path / "out")


@pytest.mark.parametrize("commit", ["{abs}", "../../up", "a/b", "-x", ["a"], {"a": 1}, 7])
def test_a_commit_that_a_run_records_names_no_other_file(runs: Path, tmp_path: Path, commit: object) -> None:
    recorded = str(tmp_path / "elsewhere") if commit == "{abs}" else commit
    (runs / "a/verdict.json").write_text(json.dumps({"commit": recorded}))
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(StateError, match="as its commit"):
        package(runs, tmp_path / "out" / "deep")
    assert sorted(tmp_path.rglob("*")) == before


def test_planted_an_unchecked_commit_leads_elsewhere(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "_COMMIT", re.compile(".*"))
    (runs / "a/verdict.json").write_text(json.dumps({"commit": "../up"}))
    package(runs, tmp_path / "out")
    assert (tmp_path / "up.tar.gz").exists()


@pytest.mark.parametrize("commit", ["../x", "a/b", "", "-x"])
def test_a_commit_that_leads_elsewhere_is_refused(runs: Path, tmp_path: Path, commit: str) -> None:
    with pytest.raises(ConfigError):
        package(runs, tmp_path / "out", commit=commit)


@pytest.mark.parametrize(
    ("name", "host"),
    [
        ("events.out.tfevents.1.node-a.77.0", "node-a"),
        ("events.out.tfevents.1.node-a.b.example.77.0.v2", "node-a.b.example"),
        ("events.out.tfevents.1.node-a.b.example", "node-a.b.example"),
        ("events.out.tfevents.1.10.0.0.1.77.0", "10.0.0.1"),
        ("events.out.tfevents.1.node-a.profile-empty", "node-a"),
    ],
)
def test_every_form_of_file_name_gives_its_host_away(tmp_path: Path, name: str, host: str) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / name).write_bytes(event_file(host))
    ((member, data),) = members(package(tmp_path / "runs", tmp_path / "out", commit="abc").path).items()
    assert host not in member
    assert host.encode() not in data


def test_upper_case_short_forms_and_given_names_go_too(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    content = b"".join(record(text_field(7, word)) for word in (b"GPU-NODE17", b"gpu-node17", b"login.secret.example"))
    (tmp_path / "runs" / NAME).write_bytes(content)
    made = package(tmp_path / "runs", tmp_path / "out", hosts=["login.secret.example"], commit="abc")
    (data,) = members(made.path).values()
    assert b"node17" not in data.lower()
    assert b"secret" not in data


def test_a_very_short_host_name_is_refused_rather_than_torn_out_of_words(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs/events.out.tfevents.1.ai.77.0").write_bytes(event_file("ai"))
    with pytest.raises(ConfigError, match="too short"):
        package(tmp_path / "runs", tmp_path / "out", commit="abc")


def test_the_checksum_is_the_one_of_the_format() -> None:
    """CRC-32C of "123456789" is 0xE3069283 in every catalogue of checksums; files store it turned and shifted."""
    crc = 0xE3069283
    assert masked_crc(b"123456789") == ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


@pytest.mark.parametrize("cut", [1, 3, 15, 40])
def test_a_torn_last_record_is_left_out_and_counted(cut: int) -> None:
    whole = event_file()
    last = len(record(event("train/loss", 0.25, 2)))
    result = redact(whole[:-cut], [HOST.encode()], "file")
    assert len(result.data) == len(whole) - last
    assert result.torn == last - cut


def test_a_damaged_record_is_never_given_a_fresh_checksum() -> None:
    data = bytearray(record(event("note", 1.0, 2, HOST)))
    data[14] ^= 1
    with pytest.raises(StateError, match="wrong checksum"):
        redact(bytes(data), [HOST.encode()], "file")


@pytest.mark.parametrize("data", [b"not an event file at all", b"\0" * 64])
def test_what_is_not_an_event_file_is_refused(data: bytes) -> None:
    with pytest.raises(StateError, match="not an event file"):
        redact(data, [b"host"], "file")


def test_the_filler_is_never_the_word() -> None:
    assert filler(b"xxxx") != b"xxxx"
    assert len(filler(b"node")) == 4

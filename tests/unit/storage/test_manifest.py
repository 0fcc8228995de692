"""A saved folder is accepted whole, as it was saved, or refused with what is wrong."""

from __future__ import annotations

import json
import os
import random
import subprocess
from pathlib import Path

import pytest

from surefoot.errors import StateError
from surefoot.storage import files as module
from surefoot.storage.files import MANIFEST, commit_folder, manifest_text, read_manifest, verify_folder

ZERO = "0" * 64


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A committed folder with a name and contents that are not the easiest."""
    draft = tmp_path / ".draft"
    (draft / "sub dir").mkdir(parents=True)
    (draft / "weights.safetensors").write_bytes(bytes(range(256)) * 20)
    (draft / "sub dir" / "ü.json").write_text("{}")
    (draft / "empty").write_bytes(b"")
    return commit_folder(draft, tmp_path / "step 7", {"step": 7, "name": "ü"})


def test_a_folder_as_it_was_saved_is_accepted_with_its_facts(saved: Path) -> None:
    manifest = verify_folder(saved)
    assert dict(manifest.facts) == {"step": 7, "name": "ü"}
    assert set(manifest.files) == {"weights.safetensors", "sub dir/ü.json", "empty"}
    assert manifest.path("empty") == saved / "empty"
    with pytest.raises(StateError, match=r"has no other\.bin"):
        manifest.path("other.bin")


def test_a_moved_folder_is_the_same(saved: Path, tmp_path: Path) -> None:
    saved.rename(tmp_path / "elsewhere")
    assert verify_folder(tmp_path / "elsewhere").facts["step"] == 7


def test_one_flipped_bit_in_any_file_is_refused(saved: Path) -> None:
    """In the manifest too, every byte of it: a wrong step number is as bad as a wrong weight."""
    rng = random.Random(3)
    for path in sorted(p for p in saved.rglob("*") if p.is_file() and p.stat().st_size):
        clean = path.read_bytes()
        places = range(len(clean)) if path.name == MANIFEST else rng.sample(range(len(clean)), min(40, len(clean)))
        for at in places:
            path.write_bytes(clean[:at] + bytes([clean[at] ^ (1 << rng.randrange(8))]) + clean[at + 1 :])
            with pytest.raises(StateError):
                verify_folder(saved)
        path.write_bytes(clean)
    verify_folder(saved)


@pytest.mark.parametrize("name", ["weights.safetensors", MANIFEST])
def test_a_truncated_or_longer_file_is_refused(saved: Path, name: str) -> None:
    clean = (saved / name).read_bytes()
    for data in (clean[:-1], clean[: len(clean) // 2], b"", clean + b"\0", clean + b"\n"):
        (saved / name).write_bytes(data)
        with pytest.raises(StateError):
            verify_folder(saved)


def test_missing_and_extra_files_are_listed(saved: Path) -> None:
    (saved / "empty").unlink()
    (saved / "stranger.bin").write_bytes(b"")
    with pytest.raises(StateError) as caught:
        verify_folder(saved)
    assert "missing: empty" in caught.value.why
    assert "not listed: stranger.bin" in caught.value.why


def test_two_files_that_changed_places_are_refused(saved: Path) -> None:
    a, b = saved / "empty", saved / "sub dir" / "ü.json"
    a.rename(saved / "x")
    b.rename(a)
    (saved / "x").rename(b)
    with pytest.raises(StateError, match="bytes"):
        verify_folder(saved)


def test_links_pipes_and_devices_are_refused_without_reading_them(saved: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (saved / "empty").rename(outside)
    (saved / "empty").symlink_to(outside)
    with pytest.raises(StateError, match="not a plain file"):
        verify_folder(saved)
    (saved / "empty").unlink()
    os.mkfifo(saved / "empty")
    with pytest.raises(StateError, match="not a plain file"):
        verify_folder(saved)


def test_a_folder_behind_a_link_inside_is_not_entered(saved: Path, tmp_path: Path) -> None:
    (saved / "sub dir").rename(tmp_path / "moved")
    (saved / "sub dir").symlink_to(tmp_path / "moved")
    with pytest.raises(StateError):
        verify_folder(saved)


def test_an_unfinished_folder_and_no_folder_are_told_apart(saved: Path, tmp_path: Path) -> None:
    (saved / MANIFEST).unlink()
    with pytest.raises(StateError) as caught:
        verify_folder(saved)
    assert "never finished" in caught.value.why
    with pytest.raises(StateError) as caught:
        verify_folder(tmp_path / "none")
    assert "no such folder" in caught.value.why


def test_a_newer_format_is_named_with_both_numbers(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FORMAT", 2)
    with pytest.raises(StateError, match="format 1, and this version reads format 2"):
        verify_folder(saved)


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/../../x", "", ".", "a//b", "a\0b", MANIFEST, "x" * 2000])
def test_a_name_that_leads_elsewhere_is_refused_before_it_is_looked_at(saved: Path, name: str) -> None:
    (saved / MANIFEST).write_text(manifest_text({}, {name: {"size": 0, "sha256": ZERO}}))
    with pytest.raises(StateError, match="with the name"):
        read_manifest(saved)


@pytest.mark.parametrize(
    "entry",
    [
        {},
        [],
        None,
        {"size": -1, "sha256": ZERO},
        {"size": True, "sha256": ZERO},
        {"size": 1.0, "sha256": ZERO},
        {"size": 1, "sha256": "0"},
    ],
)
def test_an_entry_without_size_and_hash_is_refused(saved: Path, entry: object) -> None:
    (saved / MANIFEST).write_text(manifest_text({}, {"empty": entry}))  # type: ignore[dict-item]
    with pytest.raises(StateError, match="size and SHA-256"):
        read_manifest(saved)


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "null",
        "{}",
        '{"format": 1}',
        '{"format": 1, "format": 1}',
        '{"format": NaN}',
        "[" * 100_000,
        '{"format": true}',
        "{" * 9,
        "\ufeff{}",
    ],
)
def test_a_manifest_that_is_none_is_a_typed_refusal(saved: Path, text: str) -> None:
    (saved / MANIFEST).write_text(text)
    with pytest.raises(StateError):
        read_manifest(saved)


def test_a_giant_size_in_the_list_allocates_nothing(saved: Path) -> None:
    body = json.loads((saved / MANIFEST).read_text())
    files = body["files"] | {"empty": {"size": 2**60, "sha256": ZERO}}
    (saved / MANIFEST).write_text(manifest_text({}, files))
    with pytest.raises(StateError, match=f"says {2**60}"):
        verify_folder(saved)


def test_a_giant_manifest_is_refused_by_its_size(saved: Path) -> None:
    os.truncate(saved / MANIFEST, module.MAX_MANIFEST_BYTES + 1)
    with pytest.raises(StateError, match="more than"):
        verify_folder(saved)


def test_facts_that_json_cannot_hold_or_that_use_our_names_are_refused() -> None:
    for facts in ({"x": float("nan")}, {"x": object()}, {"files": 1}, {"digest": ""}, {"format": 9}):
        with pytest.raises(StateError):
            manifest_text(facts, {})


def test_planted_verification_by_size_alone_is_caught(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_sha256_of_file", lambda folder, name, size: verify_listed(folder, name))
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        test_one_flipped_bit_in_any_file_is_refused(saved)


def verify_listed(folder: Path, name: str) -> str:
    return str(json.loads((folder / MANIFEST).read_text())["files"][name]["sha256"])


def test_folders_nested_without_end_are_a_typed_refusal_or_nothing(saved: Path) -> None:
    """Empty folders hold nothing, so they change nothing; a file at the bottom is not in the list."""
    here = os.open(saved, os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("d", dir_fd=here)
        deeper = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = deeper
    verify_folder(saved)
    os.close(os.open("x", os.O_CREAT | os.O_WRONLY, dir_fd=here))
    os.close(here)
    try:
        with pytest.raises(StateError, match="does not hold the files"):
            verify_folder(saved)
    finally:  # deeper than pytest's own tidying goes
        subprocess.run(["rm", "-rf", str(saved)], check=True)

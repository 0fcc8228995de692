"""However a command ends, neither a secret nor a control character reaches the terminal or a crash file."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from surefoot.cli.exits import guarded
from surefoot.errors import InputError, SurefootError

CANARY = "canary-of-the-driver"
TEXT = f"\x1b[2Jcould not log in to https://me:pass1234@example.org with {CANARY}\u202e"
SHOWN = "\\x1b[2Jcould not log in to https://***@example.org with ***\\u202e"


@pytest.fixture(autouse=True)
def crashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DRIVER_TOKEN", CANARY)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def end_with(error: BaseException) -> int:
    def action() -> int:
        raise error

    return guarded(action)


def test_a_typed_error_is_shown_without_its_secrets(capsys: pytest.CaptureFixture[str]) -> None:
    assert end_with(InputError(TEXT, TEXT, TEXT)) == 4
    err = capsys.readouterr().err
    assert err.count(SHOWN) == 3
    assert "\x1b" not in err


def test_a_bug_is_kept_and_shown_without_its_secrets(crashes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        raise KeyError(TEXT)
    except KeyError as cause:
        error = RuntimeError(f"{TEXT} {'x' * 600}")
        error.__cause__ = cause
    assert end_with(error) == 70
    (file,) = crashes.iterdir()
    kept = file.read_text()
    assert "RuntimeError" in kept
    assert "KeyError" in kept
    for text in (kept, capsys.readouterr().err):
        assert SHOWN in text
        assert not any(part in text for part in (CANARY, "pass1234", "\x1b", "\u202e"))
    assert file.stat().st_mode & 0o777 == 0o600


def test_a_secret_at_the_cut_of_a_long_message_does_not_leave_half_of_itself(
    capsys: pytest.CaptureFixture[str],
) -> None:
    end_with(RuntimeError("x" * (500 - len("RuntimeError: ") - 12) + CANARY))
    assert "canary" not in capsys.readouterr().err


def test_a_disk_error_is_shown_without_its_secrets(capsys: pytest.CaptureFixture[str]) -> None:
    assert end_with(OSError(28, "No space left", TEXT)) == 74
    assert CANARY not in capsys.readouterr().err


def test_planted_redactor_that_does_nothing_is_caught(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("surefoot.system.text.redact", lambda text: text)
    end_with(SurefootError(TEXT, "", ""))
    assert CANARY in capsys.readouterr().err


def test_rights_that_forbid_something_are_no_bug(crashes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert end_with(PermissionError(13, "Permission denied", "run/journal")) == 74
    assert "StorageError: [Errno 13] Permission denied: 'run/journal'" in capsys.readouterr().err
    assert not any(crashes.iterdir())

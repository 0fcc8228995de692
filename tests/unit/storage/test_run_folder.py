"""One folder per run: fresh, private, and gone again when the start is refused."""

from __future__ import annotations

import datetime
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.config.load import load_config
from surefoot.errors import ConfigError, SecurityError, StateError, StorageError
from surefoot.records import Verdict
from surefoot.storage import run_folder
from surefoot.storage.run_folder import RunFolder

NOON = datetime.datetime(2026, 1, 2, 12, 30, 45, tzinfo=datetime.UTC)


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_the_default_place_is_named_by_time_and_name(tmp_path: Path) -> None:
    folder = RunFolder.create(None, "pebble", tmp_path, now=NOON)
    assert folder.root == tmp_path / "runs" / "20260102-123045-pebble"
    second = RunFolder.create(None, "pebble", tmp_path, now=NOON)
    assert second.root == tmp_path / "runs" / "20260102-123045-pebble-2"


def test_folders_and_files_are_private(tmp_path: Path) -> None:
    folder = RunFolder.create(None, "run", tmp_path)
    folder.write_config(load_config(None).config)
    folder.write_environment({"python": "3"})
    folder.write_verdict(Verdict.PASS, ["all steps ran"], {"seconds": 1.5})
    everything = [folder.root, *folder.root.rglob("*")]
    assert {mode(p) for p in everything if p.is_dir()} == {0o700}
    assert {mode(p) for p in everything if p.is_file()} == {0o600}
    assert len([p for p in everything if p.is_file()]) == 3, "no temporary file stays behind"


def test_the_layout_is_where_readers_expect_it(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "out", "run", tmp_path)
    names = [folder.config, folder.metrics, folder.environment, folder.verdict, folder.logs, folder.rollouts(7)]
    relative = [path.relative_to(tmp_path / "out").as_posix() for path in [*names, folder.checkpoint(5)]]
    assert relative[:4] == ["config.toml", "metrics.jsonl", "environment.json", "verdict.json"]
    assert relative[4:] == ["logs", "rollouts/step_7.jsonl", "checkpoints/step_5"]


def test_the_config_of_a_run_reads_back_equal(tmp_path: Path) -> None:
    loaded = load_config(None, ["seed=7"])
    folder = RunFolder.create(None, "run", tmp_path)
    folder.write_config(loaded.resolved)
    assert load_config(folder.config).config == loaded.config


def test_the_verdict_begins_with_status_and_reasons(tmp_path: Path) -> None:
    folder = RunFolder.create(None, "run", tmp_path)
    folder.write_verdict(Verdict.FAIL, ["missed"], {"executed_steps": 3})
    read = json.loads(folder.verdict.read_text())
    assert list(read.items()) == [("status", "FAIL"), ("reasons", ["missed"]), ("executed_steps", 3)]


def test_a_verdict_with_a_number_that_is_none_is_refused(tmp_path: Path) -> None:
    folder = RunFolder.create(None, "run", tmp_path)
    with pytest.raises(StateError):
        folder.write_verdict(Verdict.PASS, [], {"accuracy": float("nan")})
    assert not folder.verdict.exists()


@pytest.mark.parametrize("name", ["config.toml", "metrics.jsonl", "notes.txt", "checkpoints"])
def test_a_folder_that_holds_anything_is_refused_and_left_alone(tmp_path: Path, name: str) -> None:
    used = tmp_path / "out"
    used.mkdir()
    (used / name).write_text("mine")
    with pytest.raises(StateError) as caught:
        RunFolder.create(used, "run", tmp_path)
    assert caught.value.exit_code == 3
    assert (used / name).read_text() == "mine"
    assert len(list(used.iterdir())) == 1


def test_a_file_in_the_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(StateError):
        RunFolder.create(tmp_path / "out", "run", tmp_path)


def test_an_empty_folder_is_welcome_but_only_once(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    RunFolder.create(Path("out"), "run", tmp_path)
    with pytest.raises(StateError):
        RunFolder.create(Path("out"), "run", tmp_path)


def test_of_two_runs_that_start_at_once_one_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both saw an empty folder; the claim decides."""
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(RunFolder, "planned", classmethod(lambda cls, *a, **k: tmp_path / "out"))
    RunFolder.create(Path("out"), "run", tmp_path)
    with pytest.raises(StateError):
        RunFolder.create(Path("out"), "run", tmp_path)


@pytest.mark.parametrize(
    "name", ["", "../x", "/etc", "a/b", "a\0b", "..", ".hidden", "a..b", "x" * 65, "a b", "-x", "ä\n"]
)
def test_a_name_that_leads_elsewhere_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError):
        RunFolder.create(None, name, tmp_path)
    assert list(tmp_path.iterdir()) == []


@given(st.text(max_size=80))
def test_whatever_the_name_a_run_stays_under_runs(name: str) -> None:
    try:
        root = RunFolder.planned(None, name, Path("/base"), now=NOON)
    except ConfigError:
        return
    assert root.parent == Path("/base/runs")
    assert ".." not in root.name


def test_planning_writes_nothing(tmp_path: Path) -> None:
    RunFolder.planned(None, "run", tmp_path)
    RunFolder.planned(Path("deep/er"), "run", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_refused_start_leaves_nothing(tmp_path: Path) -> None:
    folder = RunFolder.create(Path("a/b/out"), "run", tmp_path)
    folder.write_config(load_config(None).config)
    (folder.logs / "rewards.log").write_text("x")
    folder.discard()
    assert list(tmp_path.iterdir()) == []


def test_discarding_spares_what_others_put_there(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    folder = RunFolder.create(Path("out"), "run", tmp_path)
    (tmp_path / "out" / "notes.txt").write_text("mine")
    folder.discard()
    assert [p.name for p in tmp_path.rglob("*")] == ["out", "notes.txt"]
    other = RunFolder.create(None, "run", tmp_path, now=NOON)
    (tmp_path / "runs" / "neighbour").mkdir()
    other.discard()
    assert [p.name for p in (tmp_path / "runs").iterdir()] == ["neighbour"]


def test_only_a_run_can_be_opened(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(StateError, match="is not a run folder"):
            RunFolder.open(path)
    folder = RunFolder.create(None, "run", tmp_path)
    folder.write_config(load_config(None).config)
    assert RunFolder.open(folder.root).root == folder.root


def test_checkpoints_come_in_order_of_steps(tmp_path: Path) -> None:
    folder = RunFolder.create(None, "run", tmp_path)
    for name in ("step_10", "step_9", ".step_11.partial", "step_x"):
        (folder.root / "checkpoints" / name).mkdir()
    assert [p.name for p in folder.checkpoints()] == ["step_9", "step_10"]


def test_a_disk_that_refuses_is_a_storage_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, *args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "mkdir", full)
    with pytest.raises(StorageError, match="No space left") as caught:
        RunFolder.create(None, "run", tmp_path)
    assert caught.value.exit_code == 74


@pytest.mark.parametrize("given", [0o777, 0o707, 0o1777])
def test_a_folder_that_everybody_may_write_to_is_refused(tmp_path: Path, given: int) -> None:
    output = tmp_path / "pre"
    output.mkdir()
    output.chmod(given)
    for ask in (RunFolder.create, RunFolder.planned):
        with pytest.raises(SecurityError, match="may be written to by everybody"):
            ask(output, "run", tmp_path)
    assert not any(output.iterdir())


@pytest.mark.parametrize("given", [0o755, 0o775, 0o750, 0o700])
def test_another_folder_of_ours_is_narrowed(tmp_path: Path, given: int) -> None:
    output = tmp_path / "pre"
    output.mkdir()
    output.chmod(given)
    assert mode(RunFolder.create(output, "run", tmp_path).root) == 0o700


def test_a_folder_of_somebody_else_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pre").mkdir(mode=0o700)
    somebody = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: somebody)
    with pytest.raises(SecurityError, match="belongs to another user"):
        RunFolder.create(tmp_path / "pre", "run", tmp_path)


def test_planted_without_the_look_a_shared_folder_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder, "_refuse_shared", lambda root: None)
    monkeypatch.setattr(run_folder, "_narrow", lambda root: None)
    output = tmp_path / "pre"
    output.mkdir()
    output.chmod(0o777)
    assert mode(RunFolder.create(output, "run", tmp_path).root) == 0o777

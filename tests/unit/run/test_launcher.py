"""What a launcher's processes find out about each other before anything is loaded."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from surefoot.cli import app, commands
from surefoot.config.load import LoadedConfig, config_from_values
from surefoot.errors import ConfigError, LearnerStartError, SecurityError, StateError
from surefoot.run import launcher
from surefoot.run.launcher import Launch, LaunchedRanks, launch_of, run_to_go_on_with

TORCHRUN = {
    "RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_MAX_RESTARTS": "0",
}  # fmt: skip


@pytest.fixture
def under(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`under(**changes)`: this process is one of torchrun's; None leaves a variable out."""

    def enter(**changes: str | None) -> dict[str, str]:
        found = {name: value for name, value in (TORCHRUN | changes).items() if value is not None}
        for name in TORCHRUN:
            monkeypatch.delenv(name, raising=False)
        for name, value in found.items():
            monkeypatch.setenv(name, value)
        return found

    return enter


@pytest.fixture
def configure(tmp_path: Path) -> Callable[..., LoadedConfig]:
    """`configure(**keys)`: the built-in run with these keys; paths are relative to `tmp_path`."""

    def make(**keys: Any) -> LoadedConfig:
        dotted = {name.replace("__", "."): value for name, value in keys.items()}
        return config_from_values({"model": "pebble", "tasks": "builtin:sums"} | dotted, source="a test", base=tmp_path)

    return make


def test_what_torchrun_says_is_understood_and_one_process_is_no_launch(under: Any) -> None:
    found = launch_of(under())
    assert found is not None
    assert (found.rank, found.size, found.attempt, found.restarts) == (1, 2, 0, 0)
    again = launch_of(under(TORCHELASTIC_RESTART_COUNT="1"))
    assert again is not None
    assert again.meeting != found.meeting, "a rank of the last life must not meet one of this"
    assert launch_of(under(WORLD_SIZE="1", LOCAL_WORLD_SIZE="1", RANK="0")) is None
    assert launch_of(under(LOCAL_RANK=None)) is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"WORLD_SIZE": "4"}, r"started 4 processes \(WORLD_SIZE\), 2 of them on this machine"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE = 'two' is no whole number"),
        ({"RANK": None}, "RANK is not there"),
        ({"RANK": "2"}, "RANK = 2 with WORLD_SIZE = 2"),
        ({"RANK": "-1"}, "RANK = '-1' is no whole number"),
        ({"LOCAL_WORLD_SIZE": None}, "LOCAL_WORLD_SIZE is not there"),
        ({"MASTER_PORT": None}, "MASTER_PORT is not there"),
    ],
    ids=str,
)
def test_what_a_launcher_cannot_mean_is_refused_by_name(under: Any, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        launch_of(under(**changes))


@pytest.mark.config_key("runtime.learner_ranks")
@pytest.mark.parametrize(
    ("words", "environ", "said"),
    [
        (["runtime.learner_ranks=3"], {}, r"learner_ranks = 3 \(in the config\), and the launcher started 2"),
        (["runtime.learner_ranks=1"], {}, r"learner_ranks = 1 \(in the config\), and the launcher started 2"),
        (["optim=adamw_8bit"], {}, "runtime.learner_ranks = 2 with optim"),
        (["runtime.kind=ray"], {}, 'runtime.kind = "ray" in one of 2 processes of a launcher'),
        ([], {"TORCHELASTIC_MAX_RESTARTS": "3"}, r"\(3 restarts\), and output_dir is left out"),
        (["tasks_per_step=2", "num_generations=2"], {"WORLD_SIZE": "5", "LOCAL_WORLD_SIZE": "5"}, "never have one"),
    ],
    ids=str,
)
def test_a_run_that_does_not_fit_the_launcher_is_refused_before_anybody_meets(
    under: Any, words: list[str], environ: dict[str, str], said: str
) -> None:
    under(**environ)
    with pytest.raises(ConfigError, match=said):
        commands.train(words)


def test_a_run_that_goes_on_keeps_its_number_of_ranks(under: Any, configure: Any, tmp_path: Path) -> None:
    from surefoot.storage.run_folder import RunFolder

    loaded = configure(runtime__learner_ranks=3)
    RunFolder.create(tmp_path / "run", "x", tmp_path).write_config(loaded.resolved)
    under()
    with pytest.raises(ConfigError, match=r"learner_ranks = 3 \(the run in .*\), and the launcher started 2"):
        commands.resume(tmp_path / "run", [])


@pytest.mark.parametrize("words", [["eval", "run"], ["bench"], ["train", "--dry-run"]], ids=" ".join)
def test_every_other_command_is_refused_by_its_name(words: list[str], under: Any) -> None:
    under()
    ran = CliRunner().invoke(app, words)
    assert ran.exit_code == 2
    assert f"`surefoot {' '.join(word for word in words if word != 'run')}` was started in one of 2" in ran.stderr
    under(WORLD_SIZE="1", LOCAL_WORLD_SIZE="1", RANK="0", LOCAL_RANK="0")
    assert CliRunner().invoke(app, ["version"]).exit_code == 0


def test_a_call_from_python_is_refused_before_anything_is_read(under: Any, configure: Any) -> None:
    from surefoot.run.session import train

    under()
    with pytest.raises(ConfigError, match="a run was started in one of 2 processes of a launcher") as refused:
        train(configure(), view=None)  # type: ignore[arg-type]
    assert "runtime.learner_ranks=2" in refused.value.fix


# -- Meeting ----------------------------------------------------------------------------------------


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """Rank 0 of two, in a folder of its own."""
    monkeypatch.setattr(launcher.tempfile, "gettempdir", lambda: str(short))
    short = tmp_path_factory.mktemp("s")
    monkeypatch.setattr(launcher, "_LONGEST_FOLDER", 80)
    return Launch(0, 2, "here")


def knocked(launch: Launch, asked: Mapping[str, Any], rank: int = 1) -> threading.Thread:
    """A further rank that says what it was asked, and waits for the end."""

    def come() -> None:
        with launcher._knock(launch, launcher.Deadline(20)) as connection:
            connection.sendall(json.dumps({"rank": rank, "pid": os.getpid(), "asked": asked}).encode() + b"\n")
            while connection.recv(100):
                pass

    thread = threading.Thread(target=come)
    thread.start()
    return thread


def test_ranks_that_were_asked_for_the_same_meet_and_end_together(launch: Launch, tmp_path: Path) -> None:
    other = knocked(launch, {"max_steps": 5})
    with LaunchedRanks(launch, {"max_steps": 5}, 20) as ranks:
        (index, follower), *_ = ranks.followers(tmp_path).items()
        assert index == 1
        assert follower.is_running
        assert other.is_alive()
    other.join(20)
    assert not other.is_alive(), "the connection is closed with rank 0's"
    assert not any(launcher._place(launch).parent.iterdir()), "nobody else can knock"


@pytest.mark.parametrize("theirs", [{"max_steps": 6}, {}, {"max_steps": 5, "seed": 1}], ids=str)
def test_planted_rank_of_another_run_is_refused_by_the_key_that_differs(launch: Launch, theirs: dict[str, Any]) -> None:
    other = knocked(launch, theirs)
    key = "seed" if "seed" in theirs else "max_steps"
    with pytest.raises(ConfigError, match=f"rank 1 of the launcher was asked for another run: {key} = "):
        LaunchedRanks(launch, {"max_steps": 5}, 20)
    other.join(20)
    assert not other.is_alive()


def test_a_rank_that_does_not_come_is_named(launch: Launch) -> None:
    with pytest.raises(LearnerStartError, match=r"rank 1 of the launcher's 2 processes did not come within .* 0.2 s"):
        LaunchedRanks(launch, {}, 0.2)
    with pytest.raises(LearnerStartError, match=r"rank 0 of the launcher did not come within"):
        launcher._knock(launch, launcher.Deadline(0.2))


def test_a_process_that_connects_and_says_nothing_is_not_waited_for_without_end(launch: Launch) -> None:
    def come() -> None:
        with launcher._knock(launch, launcher.Deadline(20)) as connection:
            connection.recv(1)

    thread = threading.Thread(target=come)
    thread.start()
    with pytest.raises(LearnerStartError, match="the word of a process of the launcher that has connected did not"):
        LaunchedRanks(launch, {}, 0.5)
    thread.join(20)
    assert not thread.is_alive(), "it is told to go"


def test_a_process_that_leaves_before_it_has_said_anything_is_not_called_late(launch: Launch) -> None:
    thread = threading.Thread(target=lambda: launcher._knock(launch, launcher.Deadline(20)).close())
    thread.start()
    with pytest.raises(LearnerStartError, match="connected and left without a word"):
        LaunchedRanks(launch, {}, 20)
    thread.join(20)


def test_what_a_killed_rank_0_left_is_replaced_and_a_living_one_is_not(launch: Launch) -> None:
    path = launcher._place(launch)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(path))
    with launcher._listening(path), pytest.raises(StateError, match="another rank 0"), launcher._listening(path):
        pytest.fail("two of them")


def test_a_folder_that_others_can_enter_is_refused(launch: Launch) -> None:
    folder = launcher._place(launch).parent
    folder.chmod(0o755)
    with pytest.raises(SecurityError, match="not a folder of this user alone"):
        launcher._place(launch)


# -- Started again ----------------------------------------------------------------------------------


def test_a_restart_goes_on_with_its_own_run_and_with_no_other(configure: Any, tmp_path: Path) -> None:
    from surefoot.storage.run_folder import RunFolder

    loaded = configure(output_dir=str(tmp_path / "run"))
    again = Launch(0, 2, "here", attempt=1, restarts=1)
    assert run_to_go_on_with(loaded, again) is None, "it had not begun"
    RunFolder.create(tmp_path / "run", "x", tmp_path).write_config(loaded.resolved)
    assert run_to_go_on_with(loaded, again) == tmp_path / "run"
    assert run_to_go_on_with(loaded, Launch(0, 2, "here")) is None, "a first start never takes a folder for its own"
    other = configure(output_dir=str(tmp_path / "run"), seed=7)
    with pytest.raises(StateError, match="holds another run than the launcher starts again: seed = "):
        run_to_go_on_with(other, again)

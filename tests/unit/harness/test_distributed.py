"""Several ranks of one program: who failed first, and that nobody is left behind."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from pathlib import Path

import pytest
from plugin_kit import Nested

from surefoot.errors import ConfigError
from surefoot.harness.distributed import DevicesMissingError, DistributedRunner, RankFailedError, free_port
from surefoot.system.process import Child

pytest_plugins = ["pytester", "plugin_kit"]


def say_who_i_am() -> None:
    """Runs in each rank, in a fresh interpreter that loads this file."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "EXTRA")
    print(*(os.environ[name] for name in names), int(os.environ["MASTER_PORT"]) > 0)


def one_raises_and_one_hangs() -> None:
    """Rank 0 waits for a message that never comes: rank 1 is the one to blame."""
    if os.environ["RANK"] == "1":
        raise ValueError("rank one has a bad day")
    ours, _theirs = socket.socketpair()
    ours.recv(1)


def all_hang() -> None:
    """Each starts a child of its own, which must not survive either."""
    if os.fork() == 0:
        Path(os.environ["NOTE"] + os.environ["RANK"]).write_text(str(os.getpid()))
    signal.pause()


def gone(pid: int) -> bool:
    """Whether it has ended, or does so within a moment: a killed process is not dead at once."""
    give_up = time.monotonic() + 5
    while time.monotonic() < give_up:
        try:
            if "State:\tZ" in Path(f"/proc/{pid}/status").read_text():
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.01)
    return False


def test_each_rank_knows_who_it_is(tmp_path: Path) -> None:
    ranks = DistributedRunner(tmp_path)(say_who_i_am, world_size=2, env={"EXTRA": "x"}, timeout=60)
    assert [ranks.output(rank).strip() for rank in (0, 1)] == ["0 0 2 2 127.0.0.1 x True", "1 1 2 2 127.0.0.1 x True"]


def the_culprit_is_named(folder: Path) -> None:
    with pytest.raises(RankFailedError) as caught:
        DistributedRunner(folder)(one_raises_and_one_hangs, world_size=2, timeout=60)
    assert "rank 1 ended with 1; ranks 0 were still running" in caught.value.what, caught.value.what
    assert "rank one has a bad day" in caught.value.what


def test_the_first_rank_that_fails_is_named_although_another_hangs(tmp_path: Path) -> None:
    the_culprit_is_named(tmp_path)


def test_planted_wait_in_the_order_of_ranks_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Teeth: wait for rank 0 first, then for rank 1. The one that hangs is blamed."""

    def in_order(self: DistributedRunner, ranks: list[Child], *_: object) -> None:
        for rank, process in enumerate(ranks):
            if process.wait(0.5) is None:
                raise RankFailedError(f"rank {rank} hangs", "", "")

    monkeypatch.setattr(DistributedRunner, "_wait", in_order)
    with pytest.raises(AssertionError):
        the_culprit_is_named(tmp_path)


def test_a_run_that_takes_too_long_names_its_ranks_and_leaves_no_process(tmp_path: Path) -> None:
    note = tmp_path / "child"
    runner = DistributedRunner(tmp_path)
    with pytest.raises(RankFailedError, match=r"ranks 0, 1 were still running after 1 s"):
        runner(all_hang, world_size=2, timeout=1, env={"NOTE": str(note)})
    for rank in (0, 1):
        file = Path(f"{note}{rank}")
        pid = file.read_text() if file.exists() else ""  # it may have been ended before it could say who it is
        assert not pid or gone(int(pid))


@pytest.mark.parametrize("form", ["script", "module", "command"])
def test_a_target_can_be_a_script_a_module_function_or_a_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    script = tmp_path / "a script.py"
    script.write_text("import os; print('hello', os.environ['RANK'])")
    (tmp_path / "kit_of_ranks.py").write_text("import os\ndef hello(): print('hello', os.environ['RANK'])")
    monkeypatch.syspath_prepend(tmp_path)
    target = {"script": script, "module": "kit_of_ranks:hello", "command": [sys.executable, str(script)]}[form]
    ranks = DistributedRunner(tmp_path)(target, world_size=2, timeout=60)
    assert ranks.output(1).strip() == "hello 1"


def test_a_rank_ended_by_a_signal_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(RankFailedError, match="rank 0 was ended by signal 9"):
        DistributedRunner(tmp_path)(["bash", "-c", "kill -9 $$"], world_size=1, timeout=60)


@pytest.mark.parametrize(
    "target", [lambda: None, "no_colon", ":f", "m:"], ids=["lambda", "no colon", "no module", "no name"]
)
def test_a_target_that_cannot_be_found_again_is_refused(tmp_path: Path, target: object) -> None:
    with pytest.raises(ConfigError):
        DistributedRunner(tmp_path)(target, world_size=1)  # type: ignore[arg-type]


def test_a_world_of_nobody_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        DistributedRunner(tmp_path)(say_who_i_am, world_size=0)


def test_too_few_devices_are_an_error_and_in_a_test_a_skip(
    tmp_path: Path, pytester: pytest.Pytester, nested: Nested, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(DevicesMissingError, match="needs 2 GPUs, 0 are visible"):
        DistributedRunner(tmp_path)(say_who_i_am, world_size=2, devices=2)
    pytester.makepyfile("def test_one(distributed_runner): distributed_runner(print, world_size=1, devices=2)")
    done = nested("-rs")
    done.assert_outcomes(skipped=1)
    done.stdout.fnmatch_lines(["SKIPPED*needs 2 GPUs, 0 are visible*"])


def test_the_fixture_runs_a_function_of_the_test_file(pytester: pytest.Pytester, nested: Nested) -> None:
    pytester.makepyfile(
        "import os\ndef work(): print('rank', os.environ['RANK'])\n"
        "def test_one(distributed_runner):\n"
        "    assert distributed_runner(work, world_size=2).output(1) == 'rank 1\\n'"
    )
    nested().assert_outcomes(passed=1)


def test_a_free_port_can_be_bound() -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", free_port()))

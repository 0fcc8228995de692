"""A sink may do anything; the caller notices nothing but the counts."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from command import ROOT, surefoot
from sink_kit import balance, calls, is_alive, put_stand_in, with_path

from surefoot.errors import ConfigError
from surefoot.harness.sources import read_events
from surefoot.tracking.sinks import Sinks, check_sinks

Make = Callable[..., Sinks]
ROWS = 40


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run with a space"
    (folder / "logs").mkdir(parents=True)
    return folder


@pytest.fixture
def warned() -> list[tuple[str, str]]:
    return []


@pytest.fixture
def make(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warned: list[tuple[str, str]]) -> Make:
    """`make("wandb", mode="stall")`: sinks whose W&B is the stand-in."""
    monkeypatch.syspath_prepend(str(put_stand_in(tmp_path)))
    monkeypatch.delenv("WANDB_MODE", raising=False)

    def sinks(*names: str, mode: str = "", queue_rows: int = 1000, close_s: float = 20.0, **config: object) -> Sinks:
        monkeypatch.setenv("WANDB_STAND_IN", mode)
        return Sinks(
            names, run, "a-run", config, lambda *said: warned.append(said), queue_rows=queue_rows, close_s=close_s
        )

    return sinks


def log_rows(sinks: Sinks, rows: int = ROWS) -> None:
    for step in range(1, rows + 1):
        sinks.log(step, {"loss": 1 / step, "eval_accuracy": 0.5})


def process_of(sinks: Sinks) -> int:
    process = sinks._links[0]._process
    assert process is not None
    return process.pid


def test_every_row_reaches_tensorboard_under_its_own_name(make: Make, run: Path, warned: list[object]) -> None:
    with make("tensorboard") as sinks:
        log_rows(sinks)
    assert sinks.facts()["tensorboard"] == dict(
        logged=ROWS, written=ROWS, dropped=0, errors=0, first_error=None, ended=None
    )
    metrics = read_events(run / "tensorboard").metrics()
    assert set(metrics) == {"loss", "eval_accuracy"}
    assert dict(metrics["loss"].items()) == pytest.approx({s: 1 / s for s in range(1, ROWS + 1)}, rel=1e-7)
    assert metrics.notes == []
    assert warned == []


def test_tensorboard_files_are_for_the_owner_only_and_do_not_name_the_machine(make: Make, run: Path) -> None:
    import socket

    with make("tensorboard") as sinks:
        log_rows(sinks, 1)
    (file,) = (run / "tensorboard").iterdir()
    assert (run / "tensorboard").stat().st_mode & 0o777 == 0o700
    assert file.stat().st_mode & 0o777 == 0o600
    assert socket.gethostname() not in file.name.split(".")


def test_a_second_start_in_the_same_folder_adds_a_file_and_overwrites_none(make: Make, run: Path) -> None:
    for _ in range(2):
        with make("tensorboard") as sinks:
            log_rows(sinks, 3)
    assert len(list((run / "tensorboard").iterdir())) == 2
    assert not read_events(run / "tensorboard").conflicts


def test_wandb_is_offline_and_quiet_unless_the_user_says_otherwise(
    make: Make, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make("wandb", model="pebble") as sinks:
        log_rows(sinks, 2)
    heard = calls(run)
    assert heard["init"] == [
        {"project": "surefoot", "name": "a-run", "config": {"model": "pebble"}, "dir": str(run), "mode": "offline"}
    ]
    assert heard["environment"] == [{"WANDB_MODE": "offline", "WANDB_CONSOLE": "off"}]
    assert heard["log"] == [[1, {"loss": 1.0, "eval_accuracy": 0.5}], [2, {"loss": 0.5, "eval_accuracy": 0.5}]]
    assert heard["finish"] == [None]
    monkeypatch.setenv("WANDB_MODE", "online")
    with make("wandb") as sinks:
        log_rows(sinks, 1)
    assert calls(run)["init"][-1]["mode"] == "online"


def test_what_a_sink_writes_is_for_the_owner_only(make: Make, run: Path) -> None:
    with make("wandb") as sinks:
        log_rows(sinks, 1)
    assert (run / "wandb").stat().st_mode & 0o777 == 0o700
    assert (run / "wandb" / "calls.jsonl").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("mode", ["raise", "refuse", "sys.exit"])
def test_a_sink_that_raises_is_counted_row_by_row_and_said_once(
    make: Make, mode: str, warned: list[tuple[str, str]]
) -> None:
    with make("wandb", mode=mode) as sinks:
        log_rows(sinks)
    facts = sinks.facts()["wandb"]
    assert facts["errors"] == ROWS
    assert facts["written"] == facts["dropped"] == 0
    assert len(warned) == 1
    assert "wandb failed: " in warned[0][0]
    assert "metrics.jsonl has every row" in warned[0][1]
    assert f"0 of {ROWS} rows written, 0 dropped, {ROWS} errors" in sinks.summary()[0]


def test_one_failure_costs_one_row(make: Make, run: Path) -> None:
    with make("wandb", mode="raise once") as sinks:
        log_rows(sinks)
    facts = sinks.facts()["wandb"]
    assert (facts["written"], facts["errors"], facts["dropped"]) == (ROWS - 1, 1, 0)
    assert [step for step, _ in calls(run)["log"]] == list(range(2, ROWS + 1))


@pytest.mark.parametrize(
    ("mode", "how"), [("os._exit", "ended"), ("crash", "ended"), ("raise at init", "RuntimeError: 500"),
                      ("os._exit at init", "ended"), ("sys.exit at init", "SystemExit")]
)  # fmt: skip
def test_a_sink_that_dies_loses_its_rows_and_nothing_else(
    make: Make, mode: str, how: str, warned: list[tuple[str, str]]
) -> None:
    with make("wandb", "tensorboard", mode=mode) as sinks:
        log_rows(sinks)
    facts = sinks.facts()
    assert facts["tensorboard"]["written"] == ROWS
    assert facts["wandb"]["dropped"] == ROWS
    assert facts["wandb"]["first_error" if how != "ended" else "ended"]
    assert any(how in text for text, _ in warned)
    assert len({text for text, _ in warned}) == len(warned), "said once"


@pytest.mark.parametrize("mode", ["stall", "stall at init", "hold the interpreter", "stop"])
def test_a_sink_that_hangs_is_ended_at_the_deadline_and_the_rest_is_counted(
    make: Make, mode: str, warned: list[tuple[str, str]]
) -> None:
    with make("wandb", mode=mode, close_s=0.1) as sinks:
        pid = process_of(sinks)
        log_rows(sinks)
    facts = sinks.facts()["wandb"]
    assert facts["dropped"] == ROWS
    assert facts["ended"] == "it did not finish in time and was ended"
    assert [text for text, _ in warned] == [f"wandb gets no more rows: {facts['ended']}"]
    assert not is_alive(pid)


def test_a_sink_that_hangs_only_at_its_end_keeps_what_it_confirmed(make: Make) -> None:
    with make("wandb", mode="stall at finish", close_s=0.1) as sinks:
        log_rows(sinks)
        (link,) = sinks._links
        while link.written < ROWS and link.ended is None:
            link.move()
    facts = sinks.facts()["wandb"]
    assert (facts["written"], facts["dropped"]) == (ROWS, 0)
    assert facts["ended"]


def test_the_queue_is_bounded_and_what_does_not_fit_is_dropped_counted_and_said_once(
    make: Make, warned: list[tuple[str, str]]
) -> None:
    big = {f"rewards/{i:04}/mean": i / 7 for i in range(2000)}  # 60 kB a row: the pipe is full after a few
    with make("wandb", mode="stall", queue_rows=10, close_s=0.1) as sinks:
        for step in range(200):
            sinks.log(step, big)
        (link,) = sinks._links
        assert len(link._queue) == 10
        assert 200 - 40 < link.dropped < 200 - 10
        assert [text.partition(",")[0] for text, _ in warned] == ["wandb does not keep up: rows are dropped"]
    assert balance(sinks.facts()["wandb"])


def test_a_row_of_absurd_size_is_dropped_and_the_next_one_is_not(make: Make) -> None:
    with make("tensorboard") as sinks:
        sinks.log(1, {f"rewards/{'x' * 100}{i}/mean": 0.1 for i in range(10_000)})
        sinks.log(2, {"loss": 0.5})
    facts = sinks.facts()["tensorboard"]
    assert (facts["written"], facts["dropped"]) == (1, 1)


def test_a_driver_that_is_killed_takes_its_sink_with_it(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    script = (
        "import os, signal, sys; from pathlib import Path\n"
        "from surefoot.tracking.sinks import Sinks\n"
        f"sinks = Sinks(['wandb'], Path({str(tmp_path)!r}), 'r', {{}}, print)\n"
        "sinks.log(1, {'loss': 0.5})\n"
        "print(sinks._links[0]._process.pid, flush=True)\n"
        "while not sinks._links[0].written: sinks._links[0].move()\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    path = [str(put_stand_in(tmp_path)), *sys.path]
    done = subprocess.run(
        [sys.executable, "-c", script], env={"PYTHONPATH": ":".join(path)}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == -9, done.stderr
    pid = int(done.stdout)
    # It was a child of the one that is gone; nobody but the kernel can end it now, and that takes a moment.
    for _ in range(10**6):
        if not is_alive(pid):
            return
    pytest.fail("the sink lives on")


def test_what_a_sink_prints_goes_to_a_capped_log_without_secrets(
    make: Make, run: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_SOME_TOKEN", "canary-of-the-sink")
    with make("wandb", mode="print") as sinks:
        log_rows(sinks, 1)
    log = (run / "logs" / "wandb.log").read_bytes()
    assert b"environment:" in log
    assert b"canary-of-the-sink" not in log
    assert log.endswith(b"[more output was discarded]\n")
    assert len(log) <= 2**20 + 100
    assert capfd.readouterr() == ("", "")
    assert (run / "logs" / "wandb.log").stat().st_mode & 0o777 == 0o600


def test_an_error_text_and_a_config_lose_their_secrets_on_the_way(
    make: Make, run: Path, monkeypatch: pytest.MonkeyPatch, warned: list[tuple[str, str]]
) -> None:
    monkeypatch.setenv("WANDB_SOME_TOKEN", "canary-of-the-sink")
    with make("wandb", mode="raise", model="https://me:pass1234@example.org/m", tables=["canary-of-the-sink"]) as sinks:
        log_rows(sinks, 1)
    assert sinks.facts()["wandb"]["first_error"] == "RuntimeError: 500 from the server\\x1b[31m, sent with ***"
    assert calls(run)["init"][0]["config"] == {"model": "https://***@example.org/m", "tables": ["***"]}


def test_sinks_that_print_nothing_leave_no_log(make: Make, run: Path) -> None:
    with make("tensorboard") as sinks:
        log_rows(sinks, 1)
    assert list((run / "logs").iterdir()) == []


def test_a_sink_that_got_no_row_is_not_waited_for(make: Make, warned: list[object]) -> None:
    sinks = make("wandb", mode="stall at init", close_s=10**6)
    pid = process_of(sinks)
    sinks.close()
    assert not is_alive(pid)
    assert warned == []


def test_no_sinks_cost_nothing_and_closing_twice_is_fine(make: Make) -> None:
    sinks = make()
    log_rows(sinks)
    sinks.close()
    sinks.close()
    assert sinks.facts() == {}
    assert sinks.summary() == []


def test_a_name_that_is_given_twice_is_one_sink(make: Make, run: Path) -> None:
    with make("tensorboard", "tensorboard") as sinks:
        log_rows(sinks, 1)
    assert len(list((run / "tensorboard").iterdir())) == 1


def test_a_process_that_cannot_start_is_a_dropped_sink_not_an_error(
    make: Make, monkeypatch: pytest.MonkeyPatch, warned: list[tuple[str, str]]
) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with make("tensorboard") as sinks:
        log_rows(sinks, 3)
    assert sinks.facts()["tensorboard"]["dropped"] == 3
    assert "could not be started" in warned[0][0]


# -- in a real run ----------------------------------------------------------------------

TINY = [
    "num_tasks=200", "tasks_per_step=2", "num_generations=4", "max_completion_length=4", "eval_tasks=8",
    "preflight_tasks=0", "reward_workers=1", "threads=1", "max_steps=3", "guard.mode=off", "eval_on_start=false",
]  # fmt: skip


@pytest.mark.nightly  # seconds of a whole run; its neighbours show the same every day
@pytest.mark.config_key("report_to")
def test_a_run_reports_to_tensorboard_and_does_not_notice_that_wandb_hangs(tmp_path: Path) -> None:
    path = with_path(put_stand_in(tmp_path), ROOT / "src")
    ran = surefoot(
        "train", *TINY, "report_to=['tensorboard', 'wandb']", cwd=tmp_path, env={"WANDB_STAND_IN": "stall"} | path
    )
    assert ran.code == 0, ran.err
    rows = [row for row in ran.metrics if "loss" in row]
    assert [row["step"] for row in rows] == [1, 2, 3]
    written = read_events(ran.run / "tensorboard").metrics()["loss"]
    assert dict(written.items()) == pytest.approx({row["step"]: row["loss"] for row in rows}, rel=1e-6)
    facts = ran.verdict["sinks"]
    assert facts["tensorboard"]["written"] == len(ran.metrics)
    assert facts["wandb"]["dropped"] == len(ran.metrics)
    assert "warning: wandb gets no more rows: it did not finish in time and was ended" in ran.out
    assert f"wandb              0 of {len(ran.metrics)} rows written" in ran.out
    assert not is_alive(calls(ran.run)["pid"][0])


@pytest.mark.config_key("report_to")
def test_a_run_that_names_a_sink_that_is_not_installed_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    if importlib.util.find_spec("wandb") is not None:
        pytest.skip("wandb is installed here, so it is not refused")
    ran = surefoot("train", *TINY, "report_to=['wandb']", cwd=tmp_path)
    assert ran.code == 2
    assert "pip install wandb" in ran.err
    assert not ran.run.exists()


# -- before the run ---------------------------------------------------------------------


def test_a_sink_that_is_not_installed_is_refused_with_the_line_to_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_sinks(["tensorboard"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "wandb").mkdir()  # as W&B itself leaves it: an import would succeed, and find nothing
    with pytest.raises(ConfigError) as error:
        check_sinks(["tensorboard", "wandb"])
    assert error.value.exit_code == 2
    assert "pip install wandb" in error.value.fix
    with pytest.raises(ConfigError, match="not a sink"):
        check_sinks(["os"])


# -- the promise that log() returns, and a planted bug ---------------------------------

DRIVER = """
import os, sys
from pathlib import Path
{plant}
from surefoot.tracking.sinks import Sinks
sinks = Sinks(["wandb"], Path(sys.argv[1]), "r", {{}}, print)
row = {{f"rewards/{{i:03}}/mean": i / 7 for i in range(300)}}
for step in range(3000):
    sinks.log(step, row)
sinks._close_s = 0.1
sinks.close()
print(sinks.facts()["wandb"]["dropped"])
"""


BLOCKING_PUT = """
from surefoot.tracking.sinks import SinkLink
real = SinkLink._start
def start(link):
    process = real(link)
    os.set_blocking(link._pipes[0], True)
    return process
SinkLink._start = start
"""


def drive(folder: Path, plant: str, patience_s: int) -> subprocess.CompletedProcess[str]:
    """3,000 rows to a sink that never takes one, in a process that is ended when it has not come back."""
    (folder / "logs").mkdir()
    path = [str(put_stand_in(folder)), *sys.path]
    return subprocess.run(
        [sys.executable, "-c", DRIVER.format(plant=plant), str(folder)], capture_output=True, text=True,
        env={"PYTHONPATH": ":".join(path), "WANDB_STAND_IN": "stall"}, timeout=patience_s,
    )  # fmt: skip


def test_log_comes_back_3000_times_from_a_sink_that_never_does(tmp_path: Path) -> None:
    done = drive(tmp_path, "", 60)
    assert done.stdout.splitlines()[-1] == "3000", done.stderr


def test_planted_blocking_put_is_caught(tmp_path: Path) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        drive(tmp_path, BLOCKING_PUT, 3)

"""What a run says of itself is read whole, believed only as far as the lock agrees, and shown without a trick."""

from __future__ import annotations

import io
import json
import stat
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from surefoot.cli import runs
from surefoot.errors import StateError
from surefoot.report.console import draw
from surefoot.storage.lock import RunLock
from surefoot.system import signals
from surefoot.tracking import live
from surefoot.tracking.live import SILENT_S, RunCondition, StatusBoard, StatusWriter, plain, read_status

NOW = 1_000_000.0
FLEET = [
    {"name": f"engine-{n}", "state": "serving" if n else "starting", "version": 7, "load": n, "restarts": 0}
    for n in range(64)
]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "config.toml").write_text('model = "pebble"\n')
    return tmp_path


def put(run: Path, name: str, value: Any) -> None:
    (run / name).write_text(value if isinstance(value, str) else json.dumps(value))


def shown(run: Path, *, alive: bool | None = True, width: int = 80) -> str:
    stream = io.StringIO()
    Console(file=stream, width=width, highlight=False, markup=False).print(draw(read_status(run, alive=alive), run))
    return stream.getvalue()


# -- writing ---------------------------------------------------------------------------


def test_the_writer_keeps_the_file_up_to_date_until_it_is_closed(run: Path) -> None:
    asked = threading.Event()
    board = StatusBoard(max_steps=9)

    def sources() -> dict[str, Any]:
        asked.set()
        return board.facts()

    before = threading.active_count()
    with StatusWriter(run / "status.json", sources, every_s=0.001):
        board.step(3, {"reward": 0.5, "version": 3.0, "tokens_per_second": 10.0})
        asked.clear()
        assert asked.wait(10), "the thread asks again and again"
        signals.tick("learning")
    found = json.loads((run / "status.json").read_text())
    assert {"step": 3, "max_steps": 9, "version": 3, "reward": 0.5, "tokens_per_s": 10.0}.items() <= found.items()
    assert (found["ended"], found["phase"]) == (True, "learning")
    assert threading.active_count() == before
    assert stat.S_IMODE((run / "status.json").stat().st_mode) == 0o600
    assert sorted(p.name for p in run.iterdir()) == ["config.toml", "status.json"]


def test_the_last_step_is_in_the_file_even_when_the_run_ends_within_a_second(run: Path) -> None:
    board = StatusBoard(max_steps=2)
    with StatusWriter(run / "status.json", board.facts, every_s=3600):
        board.step(2, {})
    assert json.loads((run / "status.json").read_text())["step"] == 2


def test_a_source_that_fails_stops_nobody_and_is_told_once(run: Path) -> None:
    told: list[str] = []
    writer = StatusWriter(run / "status.json", lambda: {"x": 1 / 0}, warn=lambda what, fix: told.append(what))
    for _ in range(3):
        writer.write()
    assert len(told) == 1
    assert "division by zero" in told[0]
    assert "division by zero" in json.loads((run / "status.json").read_text())["problem"]
    assert "division by zero" in shown(run)


def test_a_disk_that_refuses_stops_nobody_and_is_told_once(tmp_path: Path) -> None:
    told: list[str] = []
    writer = StatusWriter(tmp_path / "gone" / "status.json", dict, warn=lambda what, fix: told.append(what))
    for _ in range(3):
        writer.write()
    assert len(told) == 1
    assert "could not be written" in told[0]


def test_a_source_that_hangs_does_not_hold_up_the_end(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "PATIENCE_S", 0.01)
    never, hanging = threading.Event(), threading.Event()

    def sources() -> dict[str, Any]:
        if threading.current_thread().name == "status":
            hanging.set()
            never.wait(30)
        return {"step": 1}

    writer = StatusWriter(run / "status.json", sources, every_s=0.0)
    writer.start()
    assert hanging.wait(10)
    writer.close()
    never.set()
    assert json.loads((run / "status.json").read_text())["step"] == 1


def test_numbers_that_are_not_finite_are_left_out_and_never_zero() -> None:
    inf = float("inf")
    assert plain({"a": float("nan"), "b": -inf, "c": 0, "d": None, "e": True}) == {"c": 0, "e": True}
    assert plain([1, "x\x1b[2J", {"deep": [inf]}]) == [1, "x\\x1b[2J", {"deep": [None]}]
    assert len(plain(list(range(10**5)))) == live.MAX_ITEMS


def test_few_held_out_answers_are_shown_as_a_count(run: Path) -> None:
    board = StatusBoard(max_steps=9)
    board.evaluated(0, {"eval_accuracy": 5 / 9, "eval_right": 5.0, "eval_n": 9.0, "eval_reward": 0.5})
    put(run, "status.json", board.facts())
    assert "held-out accuracy 5 of 9" in shown(run)
    board.evaluated(1, {"eval_accuracy": 0.5, "eval_right": 40.0, "eval_n": 80.0})
    put(run, "status.json", board.facts())
    assert "held-out accuracy 0.5" in shown(run)


def test_live_sources_go_over_what_steps_said_but_not_with_nothing() -> None:
    board = StatusBoard(max_steps=9)
    board.step(1, {"async/queue": 1.0, "async/staleness_mean": 0.5})
    with board.asking(lambda: {"queue": 4, "staleness_mean": None, "groups_per_second": 2.0}):
        facts = board.facts()
    assert (facts["queue"], facts["staleness_mean"], facts["groups_per_s"]) == (4, 0.5, 2.0)
    assert board.facts()["queue"] == 1.0, "who has left is not asked any more"


def test_who_was_there_is_remembered_after_the_fleet_is_gone() -> None:
    board = StatusBoard(max_steps=9)
    with board.asking(lambda: {"replicas": [{"name": "engine 0", "restarts": 3}], "queue": 5}):
        board.facts()
    board.step(2, {})
    assert board.facts()["replicas"] == [{"name": "engine 0", "restarts": 3}]
    assert "queue" not in board.facts(), "what was true of the moment only is not"


# -- reading ---------------------------------------------------------------------------

FRESH, OLD = {"updated": NOW - 1, "phase": "learning"}, {"updated": NOW - SILENT_S - 1, "phase": "learning"}
CASES = [
    (True, FRESH, None, RunCondition.RUNNING, "learning"),
    (True, OLD, None, RunCondition.STALE, "silent for 16 s"),
    (True, None, None, RunCondition.RUNNING, "no status yet"),
    (False, FRESH, None, RunCondition.STOPPED, "--resume"),
    (False, None, None, RunCondition.STOPPED, "--resume"),
    (False, OLD, {"status": "PASS", "reasons": ["all steps ran"]}, RunCondition.FINISHED, "PASS; all steps ran"),
    (False, OLD, {"status": "FAIL", "reasons": []}, RunCondition.FINISHED, "FAIL"),
    (False, OLD, {"status": "INCOMPLETE", "reasons": ["stopped"]}, RunCondition.STOPPED, "on request"),
    (None, FRESH, None, RunCondition.RUNNING, "learning"),
    (None, OLD, None, RunCondition.STOPPED, "gone"),
    (None, FRESH | {"ended": True}, {"status": "PASS"}, RunCondition.FINISHED, "PASS"),
    (True, {"updated": NOW + 500}, None, RunCondition.RUNNING, "at work"),  # a clock that is ahead of ours
]


@pytest.mark.parametrize(("alive", "facts", "verdict", "state", "detail"), CASES)
def test_the_state_follows_the_lock_then_the_verdict_then_the_age(
    run: Path, alive: bool | None, facts: Any, verdict: Any, state: RunCondition, detail: str
) -> None:
    for name, value in (("status.json", facts), ("verdict.json", verdict)):
        if value is not None:
            put(run, name, value)
    found = read_status(run, alive=alive, now=NOW)
    assert found.state is state
    assert detail in found.detail


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 100_000, "\x00"], ids=range(6))
def test_a_damaged_status_is_an_error_and_never_a_guess(run: Path, text: str) -> None:
    put(run, "status.json", text)
    with pytest.raises(StateError, match=r"status\.json is damaged"):
        read_status(run, alive=True)


def test_a_huge_status_is_refused(run: Path) -> None:
    put(run, "status.json", "1" * (live.MAX_BYTES + 1))
    with pytest.raises(StateError, match="more than"):
        read_status(run, alive=True)


def test_what_is_no_run_is_an_error_by_name(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none", tmp_path / "file"):
        (tmp_path / "file").write_text("")
        with pytest.raises(StateError, match="is not a run folder"):
            read_status(path, alive=False)


def test_planted_belief_in_the_file_alone_is_seen(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Teeth: a killed run leaves a fresh file; who believes it calls a dead run alive."""
    real = live.read_status
    monkeypatch.setitem(globals(), "read_status", lambda run, alive, now: real(run, alive=None, now=now))
    with pytest.raises(AssertionError):
        test_the_state_follows_the_lock_then_the_verdict_then_the_age(run, *CASES[3])


# -- showing ---------------------------------------------------------------------------


def test_a_fleet_of_any_size_fits_80_columns_and_a_screen_with_the_troubled_first(run: Path) -> None:
    facts = {"step": 7, "max_steps": 100, "version": 7, "queue": 3, "in_flight": 12, "staleness_mean": 0.4}
    facts |= {"staleness_max": 1, "groups_per_s": 12.3, "tokens_per_s": 2801.0, "started": time.time() - 61}
    put(run, "status.json", facts | {"updated": time.time(), "replicas": FLEET, "workers": FLEET})
    text = shown(run)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) < 45
    for words in ("step 7/100", "up 1m", "waiting 3", "in flight 12", "mean 0.4", "max 1", "groups/s 12.3"):
        assert words in text
    assert "64 in all: 63 serving, 1 starting" in text
    first = next(line for line in lines if "engine-" in line)
    assert "starting" in first


def test_text_from_the_file_is_never_markup_and_never_moves_the_cursor(run: Path) -> None:
    nasty = "[bold]x[/bold]\x1b[2J\r\n\u202e"
    row = {"name": nasty, "state": nasty, "version": "many", "load": True, "restarts": None}
    put(run, "status.json", {"updated": time.time(), "phase": nasty, "problem": nasty, "replicas": [row, 5]})
    text = shown(run, width=200)
    assert "[bold]x[/bold]\\x1b[2J" in text
    assert not [c for c in text if c in "\x1b\r\u202e"]


@pytest.mark.parametrize("value", [None, "x", {}, [], [[]], -1, 1e400, {"a": 1}], ids=str)
def test_fields_of_odd_types_are_shown_or_left_out_but_never_fatal(run: Path, value: Any) -> None:
    names = "step max_steps started updated quiet_s version queue replicas workers phase ended".split()
    put(run, "status.json", json.dumps(dict.fromkeys(names, value)))
    assert shown(run)


# -- the command -----------------------------------------------------------------------


def asked(*words: str) -> tuple[int, str]:
    import typer

    app = typer.Typer()
    runs.add_status(app)
    app.command("other")(lambda: None)  # with one command alone, typer takes no name
    result = CliRunner().invoke(app, ["status", *words])
    return result.exit_code, result.output


def test_the_command_asks_the_lock_who_lives(run: Path) -> None:
    put(run, "status.json", {"updated": time.time(), "phase": "learning"})
    with RunLock(run):
        assert asked(str(run))[1].startswith("RUNNING")
    assert asked(str(run))[1].startswith("STOPPED")
    put(run, "lock", {"pid": 1, "started": 1, "host": "elsewhere", "boot": None, "since": "", "inode": 1})
    assert asked(str(run))[1].startswith("RUNNING"), "on another machine the age of the file has to do"


def test_the_command_prints_json_and_exits_3_for_what_it_cannot_read(run: Path, tmp_path: Path) -> None:
    put(run, "verdict.json", {"status": "PASS", "reasons": ["done"]})
    code, text = asked(str(run), "--json")
    assert (code, json.loads(text)["state"], json.loads(text)["verdict"]["status"]) == (0, "FINISHED", "PASS")
    assert asked(str(tmp_path / "none"))[0] == 3
    put(run, "status.json", "{")
    assert asked(str(run))[0] == 3


def test_watching_ends_with_the_run(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(run, "status.json", {"updated": time.time(), "phase": "learning"})
    lock = RunLock(run)
    looks: list[float] = []

    def wait(seconds: float) -> None:
        looks.append(seconds)
        lock.close()
        put(run, "verdict.json", {"status": "PASS", "reasons": ["done"]})

    monkeypatch.setattr(runs.time, "sleep", wait)
    code, text = asked(str(run), "--watch")
    assert (code, len(looks)) == (0, 1)
    assert text.index("RUNNING") < text.index("FINISHED")

"""Bad tool servers of more than twenty kinds: each session ends as it must, in time, and leaves nothing behind.

The everyday form plays every kind twice, contained and not; the nightly one a thousand sessions.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from reward_kit import wait_until_gone
from server_kinds import (
    AMPLE_S,
    CHANGED,
    FOLDER,
    GOOD,
    KINDS,
    LIMITS,
    MARK,
    PROMISE_S,
    REFUSED,
    TASK,
    Belongings,
    Kind,
    closing,
    marked_by,
    play,
    problem,
    rss_mib,
)

from surefoot.errors import ToolError, ToolFailedError
from surefoot.sandbox.sandbox import available
from surefoot.tools.mcp import lines, pool, supervisor, toolkit
from surefoot.tools.mcp.process import SupervisedServer
from surefoot.tools.mcp.toolkit import MCPToolkit, Server, ServerLimits, check_servers

pytestmark = [
    pytest.mark.mcp,
    pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="looks for leaked processes in /proc"),
]
GROWTH_MIB = 64.0


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Every test here, whatever its server did: no process, descriptor or thread more than before."""
    with closing(MCPToolkit([GOOD])) as kit:
        kit.start()  # what is imported and opened once for good is not a leak
    available()  # nor is the process that sandboxes are born by
    before = Belongings.now()
    yield
    assert Belongings.now().more_than(before) == []


def kind_of(name: str) -> Kind:
    return next(kind for kind in KINDS if kind.name == name)


def problems_of(kinds: Sequence[Kind], sessions: int, note: Callable[[str, object], None]) -> list[str]:
    """Play these kinds; what went wrong. The figures go into the test's record."""
    found: list[str] = []
    before, late, played, grown = Belongings.now(), 0.0, 0, 0.0
    start = rss_mib()
    for kind in [way for each in kinds for way in each.ways]:
        for each in play(kind, sessions):
            found += [said] if (said := problem(kind, each)) else []
            late, played = max(late, each.late_s), played + 1
        where = "contained" if kind.sandbox else "uncontained"
        found += [f"{kind.name}, {where}, left {what}" for what in Belongings.now().more_than(before)]
        grown = max(grown, rss_mib() - start)
    if grown > GROWTH_MIB:
        found.append(f"memory grew by {grown:.0f} MiB; {GROWTH_MIB:g} is the promise")
    detail = f"{len(kinds)} kinds; overrun at most {late:.2f} s (promise {PROMISE_S:g}); memory grew by {grown:.0f} MiB"
    what = "session with a bad MCP server: typed, in time, nothing left"
    figure = {"figure": "P14", "what": what, "n": played, "bad": len(found), "note": detail}
    note("figure", json.dumps(figure))
    return found


@pytest.mark.parametrize("part", [0, 1, 2])
def test_a_session_of_every_kind_contained_and_not_ends_typed_in_time_and_leave_nothing(
    part: int, record_property: Callable[[str, object], None]
) -> None:
    assert problems_of(KINDS[part::3], 1, record_property) == []


@pytest.mark.nightly
def test_a_thousand_sessions_end_typed_in_time_and_leave_nothing(
    record_property: Callable[[str, object], None],
) -> None:
    assert problems_of(KINDS, -(-500 // len(KINDS)), record_property) == []


def test_there_are_more_than_twenty_kinds_and_every_reason_is_among_them() -> None:
    assert len({kind.name for kind in KINDS}) == len(KINDS) >= 20
    assert {kind.outcome for kind in KINDS} >= {
        "ok", REFUSED, CHANGED, "tool_crashed", "tool_timeout", "tool_flooded", "tool_protocol",
    }  # fmt: skip


# -- what a rollout may see and cause -----------------------------------------------------------
def bad(script: str, *arguments: str, **settings: Any) -> Server:
    made = Kind(script, "", arguments=arguments, sandbox=settings.get("sandbox", True)).server()
    return Server("bad", command=made.command, env=made.env, read=made.read, **settings)


def test_a_canary_of_one_rollout_is_never_seen_by_another() -> None:
    with closing(MCPToolkit([bad("remembers", warm=1)], LIMITS)) as kit:
        one, two = kit.open(TASK, "train/0/0", 0), kit.open(TASK, "train/0/1", 0)
        assert one.call("bad__echo", {"text": "canary"}, AMPLE_S).text == "canary"
        assert one.call("bad__echo", {"text": "again"}, AMPLE_S).text == "canary again"
        assert two.call("bad__echo", {"text": "clean"}, AMPLE_S).text == "clean"
        one.close()
        three = kit.open(TASK, "train/1/0", 0)
        assert three.call("bad__echo", {"text": "clean"}, AMPLE_S).text == "clean"


def test_a_shared_server_is_declared_and_does_remember() -> None:
    with closing(MCPToolkit([bad("remembers", isolation="shared")], LIMITS)) as kit:
        kit.open(TASK, "train/0/0", 0).call("bad__echo", {"text": "one"}, AMPLE_S)
        assert kit.open(TASK, "train/0/1", 0).call("bad__echo", {"text": "two"}, AMPLE_S).text == "one two"


@pytest.mark.parametrize(("idempotent", "asked"), [((), 1), (("echo",), 3)])
def test_only_a_call_declared_repeatable_is_asked_again(
    tmp_path: Path, idempotent: tuple[str, ...], asked: int
) -> None:
    diary = tmp_path / "asked.txt"
    limits = ServerLimits(connect_timeout_s=AMPLE_S, call_timeout_s=AMPLE_S, restarts=2, backoff_s=0.0, shutdown_s=0.2)
    server = bad("crashes_mid_call", str(diary), idempotent=idempotent, sandbox=False)
    with closing(MCPToolkit([server], limits, log_dir=tmp_path / "logs")) as kit:
        with pytest.raises(ToolFailedError, match="segmentation fault") as caught:
            kit.open(TASK, "train/0/0", 0).call("bad__echo", {"text": "x"}, AMPLE_S)
        assert caught.value.reason == "tool_crashed"
        assert diary.read_text().count("asked") == asked
        assert kit.counts["retries"] == len(kit.retries) == asked - 1
    assert "tool_crashed" in (tmp_path / "logs" / "bad.log").read_text()


def test_after_a_failure_a_rollout_is_not_given_a_server_that_forgot_everything() -> None:
    with closing(MCPToolkit([bad("crashes_mid_call")], LIMITS)) as kit:
        box = kit.open(TASK, "train/0/0", 0)
        for _ in range(2):
            with pytest.raises(ToolFailedError):
                box.call("bad__echo", {"text": "x"}, AMPLE_S)
        assert kit.counts["connections"] == 2  # one at the start, one for the rollout


def test_a_shared_server_that_crashes_is_restarted_for_the_next_call() -> None:
    with closing(MCPToolkit([bad("crashes_mid_call", isolation="shared")], LIMITS)) as kit:
        for _ in range(3):
            with pytest.raises(ToolFailedError):
                kit.open(TASK, "train/0/0", 0).call("bad__echo", {"text": "x"}, AMPLE_S)
        assert kit.counts["restarts"] >= 2


def test_a_server_sees_nothing_of_our_environment_but_what_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_SECRET_TOKEN", "canary-in-the-environment")
    script = tmp_path / "looks.py"
    shutil.copy(FOLDER / "base.py", tmp_path)
    script.write_text(
        "import json, os\nfrom base import answer, serve, text\n"
        "serve(lambda r: answer(r['id'], text(json.dumps([dict(os.environ), os.getcwd()]))))\n"
    )
    server = Server(
        "bad", command=(*bad("base").command[:3], str(script)), env={"GRANTED": "yes", MARK: str(os.getpid())},
        sandbox=False,
    )  # fmt: skip
    with closing(MCPToolkit([server], LIMITS)) as kit:
        said = kit.open(TASK, "train/0/0", 0).call("bad__echo", {"text": "x"}, AMPLE_S).text
    assert "GRANTED" in said
    assert "canary" not in said
    assert str(Path.cwd()) not in said


def test_a_secret_given_to_a_server_is_not_in_the_error_it_causes(tmp_path: Path) -> None:
    script = tmp_path / "tells.py"
    script.write_text("import os, sys\nsys.exit('cannot log in with ' + os.environ['DB_PASSWORD'])\n")
    command = (*bad("base").command[:3], str(script))
    [status] = check_servers([Server("bad", command=command, env={"DB_PASSWORD": "canary-9-canary"})], LIMITS)
    assert "cannot log in with ***" in status.problem
    assert "canary-9" not in status.problem


def test_a_dead_server_is_not_available_and_a_healthy_one_is() -> None:
    dead, fine = check_servers([bad("exits_at_start"), bad("base", probe=("echo", {"text": "hello"}))], LIMITS)
    assert (dead.available, dead.tools) == (False, ())
    assert "licence file" in dead.problem
    assert (fine.available, fine.tools, len(fine.pin)) == (True, ("bad__echo",), 64)


def test_a_server_whose_probe_fails_is_not_available() -> None:
    [status] = check_servers([bad("crashes_mid_call", probe=("echo", {"text": "x"}))], LIMITS)
    assert not status.available
    assert "ended with status 11" in status.problem


@pytest.mark.parametrize("how", ["contained", "uncontained"])
def test_the_driver_dies_and_its_servers_with_it(how: str) -> None:
    """SIGKILL to the driver: its servers, and what they started, are gone, though a fork of it holds every pipe."""
    import signal
    import subprocess
    import sys

    driver = subprocess.Popen(
        [sys.executable, str(Path(__file__).parents[1] / "support" / "server_driver.py"), how], stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert driver.stdout is not None
    with driver.stdout as said:
        ready, folder, fork = said.readline().split()
        assert ready == b"ready"
        ours = set(marked_by(driver.pid))
        assert len(ours) >= 2
        driver.send_signal(signal.SIGKILL)
        driver.wait()
        left = wait_until_gone(ours)
        os.kill(int(fork), signal.SIGKILL)
        assert left == set()
        assert not os.path.exists(folder)


def test_a_fork_of_the_driver_that_holds_every_pipe_keeps_no_server_alive() -> None:
    """Reward workers are forked: what is open then is open in them too."""
    with closing(MCPToolkit([bad("leaves_children", sandbox=False)], LIMITS)) as kit:
        box = kit.open(TASK, "train/0/0", 0)
        assert box.call("bad__echo", {"text": "hello"}, AMPLE_S).text == "hello"
        process = box._own["bad"].process
        assert process is not None
        child = process.child
        assert isinstance(child, SupervisedServer)
        assert child.control is not None
        copies = [os.dup(number) for number in (child.control, process._in.descriptor)]
        kit.close()
        assert child.process.code != -9  # it was told to end, not killed
        for number in copies:
            os.close(number)


# -- the checks have teeth ------------------------------------------------------------------------
def test_planted_bug_without_the_cap_on_a_line_memory_is_seen_to_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    def add(self: lines.LineCutter, part: bytes) -> None:
        self._size += len(part)
        self._line += part

    monkeypatch.setattr(lines.LineCutter, "_add", add)
    kind = kind_of("floods_a_line")
    generous = ServerLimits(
        connect_timeout_s=AMPLE_S, call_timeout_s=AMPLE_S, bytes_per_s=2.0**40, restarts=0, shutdown_s=0.2
    )
    seen = Watched(monkeypatch)
    [played] = play(Kind(kind.name, kind.outcome, limits=generous, hangs=True), 1)
    assert problem(kind, played) is not None
    assert seen.longest > 2 * generous.max_line_bytes


class Watched:
    """The longest line that a cutter held."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.longest, feed = 0, lines.LineCutter.feed

        def watching(cutter: lines.LineCutter, piece: bytes) -> Iterator[tuple[bytes, int]]:
            self.longest = max(self.longest, len(cutter._line))
            return feed(cutter, piece)

        monkeypatch.setattr(lines.LineCutter, "feed", watching)


def test_planted_bug_without_the_hunt_for_descendants_leftovers_are_seen(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = Path(supervisor.__file__).read_text()
    assert source.count("    end_children(server)\n") == 1
    lazy = tmp_path / "lazy_keeper.py"
    lazy.write_text(source.replace("    end_children(server)\n", ""))
    monkeypatch.setattr(supervisor, "__file__", str(lazy))
    before = Belongings.now()
    play(replace(kind_of("leaves_children"), sandbox=False), 1)
    left = Belongings.now().more_than(before)
    pids = {int(what.split()[1]) for what in left if what.startswith("process")}
    for pid in pids:
        os.kill(pid, 9)
    assert wait_until_gone(pids) == set()
    assert any(what.startswith("process") for what in left)


def test_planted_bug_without_the_pin_check_a_changed_tool_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "check_unchanged", lambda pinned, now: None)
    kind = kind_of("rug_pull_changed")
    [played] = play(kind, 1)
    assert "rug_pull_changed: ok" in (problem(kind, played) or "")


def test_planted_bug_without_validation_wrong_arguments_reach_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    def outcome() -> str:
        with closing(MCPToolkit([bad("crashes_mid_call")], LIMITS)) as kit:
            try:
                return kit.open(TASK, "train/0/0", 0).call("bad__echo", {"text": 7}, AMPLE_S).outcome
            except ToolError:
                return "sent"

    assert outcome() == "refused"
    monkeypatch.setattr(toolkit, "checker", lambda name, schema: lambda arguments: [])
    assert outcome() == "sent"

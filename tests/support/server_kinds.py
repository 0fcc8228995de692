"""Every kind of bad tool server, what must become of a session with it, and a look at what was left behind."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from reward_kit import children_of

from surefoot.errors import ToolError, ToolFailedError
from surefoot.protocols import ToolAnswer
from surefoot.records import Task
from surefoot.tools.mcp.toolkit import MCPToolkit, Server, ServerLimits

FOLDER = Path(__file__).parent / "bad_servers"
TASK = Task(id="bad/1", prompt="call it")
HANG_S, AMPLE_S = 0.4, 60.0
"""Deadlines for servers that never answer, and for those that do, on however busy a machine."""
PROMISE_S = 1.0
MARK = "SUREFOOT_TEST_MARK"
"""Variable that every server started here has, with our own process id, and all its descendants inherit."""
REFUSED, CHANGED = "refused at start", "refused in the run"
LIMITS = ServerLimits(connect_timeout_s=AMPLE_S, call_timeout_s=AMPLE_S, restarts=0, shutdown_s=0.2)


@dataclass(frozen=True)
class Kind:
    """One way to be bad."""

    name: str
    outcome: str
    """`ok`, a failure's reason, or one of the two refusals."""
    script: str = ""
    arguments: tuple[str, ...] = ()
    hangs: bool = False
    says: str = ""
    """What the error or the answer must tell."""
    limits: ServerLimits = LIMITS
    healthy_calls: int = field(default=1)
    sandbox: bool = True

    def server(self) -> Server:
        path = FOLDER / f"{self.script or self.name}.py"
        command = (sys.executable, "-S", "-E", str(path), *self.arguments) if path.exists() else (str(path),)
        return Server(
            "bad", command=command, warm=int(self.hangs), env={MARK: str(os.getpid())}, sandbox=self.sandbox,
            read=(FOLDER,) if self.sandbox else (),
        )  # fmt: skip

    @property
    def ways(self) -> tuple[Kind, ...]:
        """Contained and not; one that kills its parent has none within its reach when it is contained."""
        free = replace(self, sandbox=False)
        return (free,) if self.name == "kills_its_parent" else (self, free)

    @property
    def deadline_s(self) -> float:
        return HANG_S if self.hangs else AMPLE_S


def _else(*names: str, outcome: str = "tool_protocol", hangs: bool = False) -> list[Kind]:
    return [Kind(name, outcome, "says_something_else", (name,), hangs=hangs) for name in names]


KINDS = [
    Kind("is_not_there", REFUSED, says="No such file"),
    Kind("exits_at_start", REFUSED, says="cannot find my licence file"),
    Kind("wrong_version", REFUSED, says="1999-01-01"),
    Kind("silent_at_start", REFUSED, limits=ServerLimits(connect_timeout_s=1.0, restarts=0, shutdown_s=0.2), says="within 1 s"),
    Kind("endless_pages", REFUSED, says="pages"),
    Kind("same_name_twice", REFUSED, says="more than once"),
    *[Kind(name, REFUSED, "lies_in_its_schema", (name,), says="schema") for name in (
        "remote_ref", "recursive", "circle", "doubling", "regex", "long_regex", "not_a_schema", "not_an_object", "huge",
    )],
    Kind("crashes_mid_call", "tool_crashed", says="segmentation fault"),
    Kind("kills_its_parent", "tool_crashed"),
    Kind("hangs", "tool_timeout", hangs=True),
    Kind("progress_forever", "tool_timeout", hangs=True),
    Kind("trickles", "tool_timeout", hangs=True),
    Kind("never_reads", "tool_timeout", hangs=True),
    Kind("floods_a_line", "tool_flooded"),
    Kind("floods_notifications", "tool_flooded"),
    Kind("floods_empty_lines", "tool_flooded"),
    Kind("floods_stderr", "ok", says="hello"),
    Kind("huge_result", "ok", says="[cut: the first"),
    *_else("not_json", "a_list", "nan", "duplicate_keys", "deep", "long_int", "wrong_shape", "no_envelope", "bad_utf8"),
    *_else("wrong_id", "id_as_text", "null_id"),
    *_else("sampling/createMessage", "roots/list", "elicitation/create"),
    *_else("internal_error", outcome="tool_crashed"),
    Kind("asks_for_input", "tool_protocol"),
    Kind("leaves_children", "ok", says="hello"),
    Kind("does_not_leave", "ok", says="hello"),
    Kind("hides_characters", "ok", says="safe\\u202etxt.exe\\x1b[2J\\u200b\\u2028"),
    Kind("remembers", "ok", says="hello"),
    *[Kind(f"rug_pull_{how}", CHANGED, "rug_pull", (how,), says=says) for how, says in (
        ("changed", "'echo' was changed"), ("new", "'delete_all' is new"), ("missing", "'echo' is missing"),
    )],
]  # fmt: skip


def good_server() -> Any:
    """A healthy neighbour, in this process."""
    from mcp.server import MCPServer

    server = MCPServer("good")

    @server.tool()
    async def double(number: int) -> str:
        """Twice the number."""
        return str(2 * number)

    return server


GOOD = Server("good", in_memory=good_server, isolation="shared")


@dataclass
class Played:
    """What became of one session."""

    outcome: str
    text: str
    late_s: float = 0.0
    """How long after its deadline the call was over."""


def play(kind: Kind, sessions: int) -> list[Played]:
    """So many sessions with servers of one kind, a healthy neighbour beside every one of them."""
    if kind.outcome == REFUSED:
        return [_start(kind) for _ in range(sessions)]
    played: list[Played] = []
    with closing(MCPToolkit([kind.server(), GOOD], kind.limits)) as kit:
        kit.start()
        if kind.outcome != CHANGED:
            before = tasks_of(kit)
            played = [_session(kit, kind, f"train/{number}/0") for number in range(sessions)]
            left = tasks_of(kit) - before
            return [*played, Played("asyncio tasks are left", str(left))] if left > 0 else played
    for number in range(sessions):
        with closing(MCPToolkit([kind.server(), GOOD], kind.limits)) as kit:
            played.append(_session(kit, kind, f"train/{number}/0"))
    return played


@contextmanager
def closing(kit: MCPToolkit) -> Iterator[MCPToolkit]:
    try:
        yield kit
    finally:
        kit.close()


def _start(kind: Kind) -> Played:
    with closing(MCPToolkit([kind.server(), GOOD], kind.limits)) as kit:
        try:
            kit.start()
        except ToolError as error:
            return Played(REFUSED if type(error) is ToolError else "another error", str(error))
        return Played("started", "")


def _session(kit: MCPToolkit, kind: Kind, rollout: str) -> Played:
    """One rollout that calls the bad server (twice when the first is to spoil the second) and its neighbour."""
    box = kit.open(TASK, rollout, seed=0)
    if kind.hangs:
        await_warm(kit)
    try:
        answers: list[ToolAnswer] = []
        neighbour = Neighbour(kit)
        played = Played("none", "")
        for _ in range(2 if kind.outcome == CHANGED else 1):
            played = _call(lambda: box.call("bad__echo", {"text": "hello"}, kind.deadline_s), kind.deadline_s)
        answers = neighbour.answers()
        if any((answer.text, answer.outcome) != ("42", "ok") for answer in answers):
            return Played("the healthy server suffered", str(answers))
        return played
    finally:
        box.close()


def tasks_of(kit: MCPToolkit) -> int:
    """Tasks in the toolkit's event loop once everything that was let go of is gone."""
    import asyncio

    async def count() -> int:
        while chores := {chore for pool in kit._pools.values() for chore in pool._chores}:
            await asyncio.wait(chores)
        return len(asyncio.all_tasks())

    assert kit._thread is not None
    return kit._thread.run(count(), 2 * AMPLE_S)


def await_warm(kit: MCPToolkit) -> None:
    """Until the server that was started ahead is ready: a short deadline is for the call, not for the start."""
    import asyncio

    async def ready() -> None:
        await asyncio.wait(set(kit._pools["bad"]._warm))

    assert kit._thread is not None
    kit._thread.run(ready(), 2 * AMPLE_S)


def _call(ask: Callable[[], ToolAnswer], deadline_s: float) -> Played:
    began = time.monotonic()
    try:
        answer = ask()
        outcome, text = answer.outcome, answer.text
    except ToolFailedError as error:
        outcome, text = error.reason, str(error)
    except ToolError as error:
        outcome, text = CHANGED, str(error)
    return Played(outcome, text, time.monotonic() - began - deadline_s)


class Neighbour:
    """Another rollout, in a thread of its own, that uses the healthy server meanwhile."""

    def __init__(self, kit: MCPToolkit) -> None:
        self._kit, self._answers = kit, list[ToolAnswer]()
        self._thread = threading.Thread(target=self._ask)
        self._thread.start()

    def _ask(self) -> None:
        box = self._kit.open(TASK, "train/0/1", seed=0)
        self._answers = [_as_answer(lambda: box.call("good__double", {"number": 21}, AMPLE_S)) for _ in range(3)]
        box.close()

    def answers(self) -> list[ToolAnswer]:
        self._thread.join()
        return self._answers


def _as_answer(ask: Callable[[], ToolAnswer]) -> ToolAnswer:
    try:
        return ask()
    except ToolError as error:
        return ToolAnswer(str(error), "failed")


def problem(kind: Kind, played: Played) -> str | None:
    """What is wrong with a session, in one line."""
    if played.outcome != kind.outcome:
        return f"{kind.name}: {played.outcome}, not {kind.outcome}: {played.text[:300]}"
    if kind.says not in played.text:
        return f"{kind.name}: does not say {kind.says!r}: {played.text[:300]}"
    if played.late_s > PROMISE_S:
        return f"{kind.name}: over {played.late_s:.2f} s after its deadline"
    return None


# -- what is left behind ---------------------------------------------------------------------
@dataclass(frozen=True)
class Belongings:
    """What this process has and has started."""

    descriptors: int
    children: frozenset[int]
    strangers: frozenset[int]
    """Processes anywhere that descend from a server of ours, or keep one."""
    threads: int

    @classmethod
    def now(cls) -> Belongings:
        return cls(
            len(os.listdir("/proc/self/fd")), frozenset(children_of(os.getpid())), frozenset(marked_by(os.getpid())),
            threading.active_count(),
        )  # fmt: skip

    def more_than(self, before: Belongings) -> list[str]:
        found = []
        if self.descriptors > before.descriptors:
            found.append(f"{self.descriptors - before.descriptors} descriptors")
        if self.threads > before.threads:
            found.append(f"{self.threads - before.threads} threads")
        left = (self.children - before.children) | (self.strangers - before.strangers)
        return [*found, *(f"process {pid}" for pid in sorted(left))]


def marked_by(driver: int) -> Iterator[int]:
    """Processes that were started as, or by, a server of this driver."""
    mark = f"{MARK}={driver}".encode()
    for each in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark in each.read_bytes().split(b"\0"):
                yield int(each.parent.name)
        except OSError:
            continue


def rss_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

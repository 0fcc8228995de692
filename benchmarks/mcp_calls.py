"""Tool calls over MCP: how many per second, how even, at what memory, and what bad servers cost the others.

    python benchmarks/mcp_calls.py [--quick] [--pairs 7] [--only memory,http,stdio,size,faults,contained]

Every cell has so many sessions open at once, each with state of its own; all of them are called in turn by the same
number of workers on both sides. Ours is `MCPToolkit` as a run uses it: validated arguments, pinned tools, deadlines,
answers cut and spelled out, from plain threads. The peers are the SDK's own client, used in the two ways that trainers
use it: a new client for every call, and one client per rollout, called from one event loop without any of the above.

    memory   servers in this process; the limit is one call of one open client
    http     one server process on loopback
    stdio    one server process per session (a plain script, without the SDK)
    size     resident memory of this process per open session, in memory, in a process of its own
    faults   100 sessions on servers of their own, 1 of which hangs and 1 crashes: what the other 98 notice
    contained  the same server in a sandbox (the default) and without: its start to the first answer, and a call;
             and contained with a granted host, whose proxy stands ready, against contained without network
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from load import LoadProbe
from mcp_sides import (
    AMPLE_S,
    LIMITS,
    SCRIPT,
    TASK,
    WORKERS,
    Place,
    Plan,
    command,
    echo_server,
    http_server,
    plan_for,
    run_client_per_call,
    run_ours,
    run_session_per_rollout,
    spread,
)
from method import Journal, Pair, Sample, alternate, compare, dirt, medians
from report import Row, common_arguments, goal_met, publish

from surefoot.errors import ToolFailedError
from surefoot.sandbox.sandbox import available
from surefoot.tools.mcp.toolkit import MCPToolkit, Server

CALLS_GOAL, TAIL_GOAL, SIZE_GOAL_KB = 10.0, 3.0, 200.0
SESSIONS = {"memory": (1, 16, 256, 1000, 4096), "http": (1, 16, 256, 1000, 4096), "stdio": (1, 8, 64)}
QUICK = {"memory": (1, 16), "http": (1, 4), "stdio": (1, 2)}
NOTE = (
    f"on this CPU; {WORKERS} workers on both sides; every call echoes a short text that is compared. Ours goes through "
    "threads, checks arguments and answers, and keeps deadlines; the peers, the MCP SDK's own client inside one event "
    "loop, do not. Limit: one call of one open in-memory client, nothing else running."
)


# -- rows ------------------------------------------------------------------------------------------
def limit_us() -> float:
    """Microseconds of one call of one open in-memory client."""
    one = run_session_per_rollout(Place("memory"), Plan(1, 200))
    return one.seconds / 200 * 1e6


def call_rows(place: Place, sessions: int, args: Any, journal: Journal, limit: float) -> list[Row]:
    plan = plan_for(sessions, args.quick)
    cell = f"{place.kind}, {sessions} sessions"
    rows, usual = [], 2 if args.quick else 3 if sessions >= 1000 else 7
    few = Plan(min(sessions, 64), max(1, 64 // min(sessions, 64)))  # a client per call needs no sessions
    peers: list[tuple[str, Callable[[], Sample], Plan, float | None]] = [
        ("client per call", lambda: run_client_per_call(place, few), few, CALLS_GOAL),
        ("session per rollout", lambda: run_session_per_rollout(place, plan), plan, None),
    ]
    for name, peer, work, goal in peers:
        if name == "client per call" and sessions > 256:
            continue
        pairs = alternate(
            lambda work=work: run_ours(place, work), peer, pairs=args.pairs or usual,  # type: ignore[misc]
            redo=0 if args.allow_dirty else None, record=journal.pair(f"{cell}, {name}"),
        )  # fmt: skip
        rows.append(call_row(cell, name, pairs, work, goal, args, limit))
    return rows


def call_row(
    cell: str, name: str, pairs: Sequence[Pair], plan: Plan, goal: float | None, args: Any, limit: float
) -> Row:
    ratio = compare(pairs, allow_dirty=args.allow_dirty)
    mine, theirs = medians(pairs, allow_dirty=args.allow_dirty)
    ours = (
        statistics.median(p.ours.facts["p50_ms"] for p in pairs),
        statistics.median(p.ours.facts["p99_ms"] for p in pairs),
    )
    tail = ours[1] / ours[0]
    at_thousand = plan.sessions == 1000
    met = goal_met(ratio, goal) if goal is not None else (tail <= TAIL_GOAL if at_thousand else None)
    asked = f">= {goal:g}x" if goal is not None else (f"p99 <= {TAIL_GOAL:g} p50" if at_thousand else "-")
    return Row(
        "mcp_calls", f"{cell}, against {name}",
        f"{plan.calls / mine:.0f} calls/s, p50 {ours[0]:.2f} ms, p99 {ours[1]:.2f} ms ({tail:.1f}x)",
        f"{plan.calls / theirs:.0f} calls/s", f"{ratio}{dirt(pairs, allow_dirty=args.allow_dirty)}", asked, met,
        f"{1e6 / limit:.0f} calls/s", NOTE,
    )  # fmt: skip


def size_row(sessions: int, journal: Journal) -> Row:
    """Resident memory per open session, measured in a process of its own."""
    found = subprocess.run(
        [sys.executable, __file__, "--measure-size", str(sessions)], capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    facts = json.loads(found.stdout.splitlines()[-1])
    journal.write("size", facts)
    return Row(
        "mcp_calls", f"memory per session, {sessions} sessions", f"{facts['kb_per_session']:.0f} KB",
        goal=f"< {SIZE_GOAL_KB:g} KB", met=facts["kb_per_session"] < SIZE_GOAL_KB,
        note="size: growth of resident memory from a started toolkit to so many open, called sessions; the server "
        "objects of the in-memory sessions are not counted: all sessions are clients of one.",
    )  # fmt: skip


def measure_size(sessions: int) -> None:
    server = echo_server()
    kit = MCPToolkit([Server("s", in_memory=lambda: server)], LIMITS)
    kit.start()
    warm = kit.open(TASK, "bench/warm", 0)
    for _ in range(50):
        warm.call("s__echo", {"text": "hello"}, AMPLE_S)
    before = rss_kb()
    boxes = [kit.open(TASK, f"bench/{i}", 0) for i in range(sessions)]
    with ThreadPoolExecutor(WORKERS) as pool:
        list(pool.map(lambda box: box.call("s__echo", {"text": "hello"}, AMPLE_S), boxes))
    grown = rss_kb() - before
    kit.close()
    left = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    print(json.dumps({"sessions": sessions, "kb_per_session": grown / sessions, "threads_left": left}))


def rss_kb() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1024


# -- faults ------------------------------------------------------------------------------------------
def fault_row(sessions: int, args: Any, journal: Journal) -> Row:
    """Sessions over processes of their own; one in a hundred hangs, one crashes."""
    bad = SCRIPT.parent
    servers = [Server("healthy", command=command())]
    sick = {
        0: Server("hangs", command=(*command()[:3], str(bad / "hangs.py")), read=(bad,)),
        1: Server("crashes", command=(*command()[:3], str(bad / "crashes_mid_call.py")), read=(bad,)),
    }
    calm = fault_round(servers, {}, sessions)
    rough = fault_round([*servers, *sick.values()], {i: s.name for i, s in sick.items()}, sessions)
    journal.write("faults", {"calm": calm, "rough": rough, "sessions": sessions})
    expected = {"tool_timeout": 1, "tool_crashed": 1}
    return Row(
        "mcp_calls", f"1 hanging and 1 crashing of {sessions} sessions over stdio",
        f"{rough['answered']} of {sessions - 2} healthy answered; p99 {rough['p99_ms']:.1f} ms",
        f"without: p99 {calm['p99_ms']:.1f} ms", goal="only their own fail",
        met=rough["answered"] == sessions - 2 and rough["failed"] == expected,
        note="faults: each session has a server process of its own; the hanging call has a deadline of 2 s.",
    )  # fmt: skip


def fault_round(servers: Sequence[Server], sick: dict[int, str], sessions: int) -> dict[str, Any]:
    kit = MCPToolkit(servers, LIMITS)
    try:
        kit.start()
        took: list[float] = []
        failed: list[str] = []

        def one(i: int) -> None:
            box = kit.open(TASK, f"bench/{i}", 0)
            try:
                if i in sick:
                    box.call(f"{sick[i]}__echo", {"text": "x"}, 2.0)
                    return
                box.call("healthy__echo", {"text": "x"}, AMPLE_S)
                began = time.perf_counter()
                box.call("healthy__echo", {"text": "x"}, AMPLE_S)
                took.append(time.perf_counter() - began)
            except ToolFailedError as error:
                failed.append(error.reason)
            finally:
                box.close()

        with ThreadPoolExecutor(WORKERS) as pool:
            list(pool.map(one, range(sessions)))
    finally:
        kit.close()
    return {
        "answered": len(took),
        "failed": {reason: failed.count(reason) for reason in sorted(failed)},
        **spread(took),
    }


# -- containment -------------------------------------------------------------------------------------
def run_starts(kit: MCPToolkit, side: str, times: int) -> Sample:
    """Rollouts with a server of their own, one after the other: process, handshake, list of tools, one call."""
    began, said = time.perf_counter(), list[str]()
    for number in range(times):
        box = kit.open(TASK, f"bench/{number}", 0)
        said.append(box.call("s__echo", {"text": str(number)}, AMPLE_S).text)
        box.close()
    return Sample(side, time.perf_counter() - began, {"said": said})


def run_calls(kit: MCPToolkit, side: str, times: int) -> Sample:
    """Calls of one rollout, whose server is up."""
    box = kit.open(TASK, "bench/calls", 0)
    box.call("s__echo", {"text": "first"}, AMPLE_S)
    began = time.perf_counter()
    said = [box.call("s__echo", {"text": str(number)}, AMPLE_S).text for number in range(times)]
    seconds = time.perf_counter() - began
    box.close()
    return Sample(side, seconds, {"said": said})


SIDES: dict[str, dict[str, Any]] = {
    "contained": {}, "uncontained": {"sandbox": False}, "granted a host": {"network": ("api.example.com",)},
}  # fmt: skip


def contained_rows(args: Any, journal: Journal, load: Callable[[], Any]) -> list[Row]:
    """One side against another, in turns, on toolkits that are all up."""
    kits = {side: MCPToolkit([Server("s", command=command(), **keys)], LIMITS) for side, keys in SIDES.items()}
    rows = []
    try:
        for kit in kits.values():
            kit.start()
        works = {"start to first answer": (run_starts, 2 if args.quick else 8), "a call": (run_calls, 200)}
        for ours, theirs in (("contained", "uncontained"), ("granted a host", "contained")):
            for cell, (work, times) in works.items():
                pairs = alternate(
                    lambda work=work, times=times, side=ours: work(kits[side], side, times),  # type: ignore[misc]
                    lambda work=work, times=times, side=theirs: work(kits[side], side, times),  # type: ignore[misc]
                    pairs=args.pairs or (2 if args.quick else 15), redo=0 if args.allow_dirty else None,
                    record=journal.pair(f"{ours}, {cell}"),
                )  # fmt: skip
                rows.append(contained_row(ours, theirs, cell, times, pairs, args, load().share))
    finally:
        for kit in kits.values():
            kit.close()
    return rows


def contained_row(
    ours: str, theirs: str, cell: str, times: int, pairs: Sequence[Pair], args: Any, busy: float
) -> Row:  # fmt: skip
    mine, other = medians(pairs, allow_dirty=args.allow_dirty)
    ratio = compare(pairs, allow_dirty=args.allow_dirty)
    return Row(
        "mcp_calls", f"{ours} server, {cell}", f"{1000 * mine / times:.2f} ms",
        f"{theirs} {1000 * other / times:.2f} ms", f"{ratio}{dirt(pairs, allow_dirty=args.allow_dirty)}",
        note=f"{ours}: a plain script over stdio, one at a time, in alternating pairs; above 1x {ours} "
        f"is faster; {100 * busy:.0f} % of the machine's time went to others.",
    )  # fmt: skip


def main() -> int:
    """Every row."""
    parser = common_arguments(__doc__, pairs=7)
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does it run?")
    parser.add_argument("--only", default="memory,http,stdio,size,faults,contained")
    parser.add_argument("--sessions", help="only these numbers of sessions, such as 16,1000")
    parser.add_argument("--measure-size", type=int, help="(internal) print memory per session")
    args = parser.parse_args()
    if args.measure_size:
        measure_size(args.measure_size)
        return 0
    args.allow_dirty = args.allow_dirty or args.quick
    only, table = args.only.split(","), QUICK if args.quick else SESSIONS
    journal, probe = Journal("mcp_calls", {"arguments": vars(args), "workers": WORKERS}), LoadProbe()
    mark, limit, rows = probe.mark(), limit_us(), list[Row]()
    with http_server() if "http" in only else contextlib.nullcontext("") as url:
        for kind in ("memory", "http", "stdio"):
            asked = [int(n) for n in args.sessions.split(",")] if args.sessions else table[kind]
            for sessions in asked if kind in only else ():
                rows += call_rows(Place(kind, url), sessions, args, journal, limit)
                print(rows[-1].cell, rows[-1].ours, rows[-1].ratio, flush=True)
    if "size" in only:
        rows += [size_row(64 if args.quick else n, journal) for n in ((64,) if args.quick else (256, 1000, 4096))]
    if "faults" in only:
        rows.append(fault_row(8 if args.quick else 100, args, journal))
    if "contained" in only and available().usable:
        rows += contained_rows(args, journal, lambda: probe.since(mark))
    journal.write("load", {"load": probe.since(mark), "limit_us": limit})
    return publish(rows, args.rows)


if __name__ == "__main__":
    sys.exit(main())

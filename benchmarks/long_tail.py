"""Long tail: what does it cost when 5 % of the groups take eight times as long, and are the slow ones still trained on?

    python benchmarks/long_tail.py [--quick]

The stream, books, ledger and journal are the product's own, on a simulated clock (an event loop that jumps to the next
event), so a busy machine changes nothing; the last row is in real time. Lengths are replayed: every side plays the same
list. A generator plays one group at a time; there are as many as a batch has groups. Learning takes a quarter of a
median group.

    barrier             every step waits for its slowest group: our own synchronous mode
    barrier, 25 % more  asks for 25 % more than it needs, takes the first to finish and throws the rest away: quick, and
                        biased against whatever takes long
    ours                asynchronous, with max_staleness 1, 2, 4 and 8

Unbiased means: the lengths of what was trained on in the first three quarters of the run, against the lengths of the
whole list, by a two-sample Kolmogorov-Smirnov test. The scaling rows ask 1 to 64 generators for the same work.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from load import LoadProbe
from method import Journal
from report import Row, common_arguments, publish
from routing import simulated
from stream_kit import Crew, Trained, ahead, config_of, in_turns, ks_p_value, tail

BATCH, LEARN = 32, 0.25
STALENESS = (1, 2, 4, 8)
GOAL, BUSY, BIASED = 1.8, 0.95, 0.05
NOTE = (
    f"simulated clock, replayed lengths: 5 % of the groups take 8 times as long; {BATCH} groups per step, as many "
    f"generators, {LEARN:g} of a median group for learning. Ratio: the barrier's time over ours, for the same groups. "
    "Busy: the generators' share of the time until the last batch was complete. KS: how likely the lengths trained on "
    "in the first three quarters of the run are a sample of all lengths. Limit: the barrier's time over that of the "
    "work, spread evenly. A group that is asked for is trained on unless it became too old: `thrown away` counts these."
)


def on_the_clock(story: Callable[[Path, Crew], Coroutine[Any, Any, Trained]], crew: Callable[[], Crew]) -> Any:
    """Run it simulated, in a folder of its own; (what was trained, the crew)."""
    with tempfile.TemporaryDirectory() as folder:

        async def begin() -> tuple[Trained, Crew]:
            mine = crew()
            return await story(Path(folder), mine), mine

        return simulated(begin)


async def learn() -> None:
    """The learner's time."""
    await asyncio.sleep(LEARN)


def unbiased(done: Trained, seconds: list[float]) -> float:
    """p of the KS test."""
    part = done.positions[: 3 * len(done.positions) // 4]
    return ks_p_value([seconds[i] for i in part], seconds)


def tail_rows(steps: int, journal: Journal) -> list[Row]:
    """The barrier, the barrier that throws away, and ours at every staleness."""
    seconds = tail(BATCH * steps, seed=1)
    work = sum(seconds)

    def crew() -> Crew:
        return Crew(BATCH, seconds, capacity=BATCH)

    sync = config_of(tasks=BATCH, steps=steps, staleness=0)
    barrier, used = on_the_clock(lambda folder, c: in_turns(folder, sync, c, learn), crew)
    limit = barrier.seconds / (work / BATCH)
    journal.write("barrier", {"seconds": barrier.seconds, "work": work, "busy": used.busy / BATCH / barrier.seconds})
    rows = [throwing_away(steps, barrier, journal)]
    for staleness in STALENESS:
        config = config_of(tasks=BATCH, steps=steps, staleness=staleness)
        ours, mine = on_the_clock(lambda folder, c, config=config: ahead(folder, config, c, learn), crew)
        assert sorted(ours.positions) == sorted(barrier.positions), "both sides train on the same groups"
        busy, p = mine.busy / BATCH / (ours.seconds - LEARN), unbiased(ours, seconds)
        ratio = barrier.seconds / ours.seconds
        journal.write(
            "ours", {"staleness": staleness, "seconds": ours.seconds, "busy": busy, "p": p, "wasted": ours.wasted}
        )
        rows.append(
            Row(
                "long tail", f"max_staleness = {staleness}",
                f"{ours.seconds:.0f}, {busy:.0%} busy, {ours.wasted} thrown away, KS p = {p:.2f}",
                f"barrier {barrier.seconds:.0f}, {used.busy / BATCH / barrier.seconds:.0%} busy", f"{ratio:.2f}x",
                f">= {GOAL}x, unbiased", ratio >= GOAL and p > BIASED, f"{limit:.2f}x", NOTE,
            )
        )  # fmt: skip
    return rows


def throwing_away(steps: int, barrier: Trained, journal: Journal) -> Row:
    """The peer that is quick because it does not wait for whatever is slow."""
    seconds = tail(int(1.25 * BATCH * steps), seed=1)
    config = config_of(tasks=BATCH, steps=steps, staleness=0)
    more, used = on_the_clock(
        lambda folder, c: in_turns(folder, config, c, learn, extra=0.25), lambda: Crew(BATCH, seconds, capacity=BATCH)
    )
    p = unbiased(more, seconds)
    journal.write("thrown away", {"seconds": more.seconds, "p": p})
    return Row(
        "long tail", "barrier, 25 % more asked, slowest thrown away", "-",
        f"{more.seconds:.0f}, {len(seconds) - len(used.finished)} thrown away, KS p = {p:.1g}",
        f"{barrier.seconds / more.seconds:.2f}x its own barrier", note=NOTE,
    )  # fmt: skip


def scaling_rows(steps: int, journal: Journal) -> list[Row]:
    """The same work for 1 to 64 generators: throughput, and whether staleness stays where it is."""
    rows, size, staleness = [], 64, 2
    seconds = tail(size * steps, seed=2)
    config = config_of(tasks=size, steps=steps, staleness=staleness)
    single = None
    for generators in (1, 2, 4, 8, 16, 32, 64):
        ours, _ = on_the_clock(
            lambda folder, c: ahead(folder, config, c, learn),
            lambda generators=generators: Crew(generators, seconds, capacity=generators),
        )
        rate, age = len(ours.positions) / ours.seconds, sum(ours.ages) / len(ours.ages)
        single = single or rate
        bound = min(generators * len(seconds) / sum(seconds), size / LEARN)
        journal.write("scaling", {"generators": generators, "rate": rate, "bound": bound, "age": age})
        rows.append(
            Row(
                "long tail", f"{generators} generators, max_staleness = {staleness}",
                f"{rate:.2f} groups per unit, staleness {age:.2f} (at most {max(ours.ages):.2f})", "1 generator",
                f"{rate / single:.1f}x", "staleness never above the bound", max(ours.ages) <= staleness,
                f"{rate / bound:.0%} of generators or learner", NOTE,
            )
        )  # fmt: skip
    return rows


def real_row(steps: int, journal: Journal) -> Row:
    """The same by the clock on the wall, at 100 ms per median group."""
    scale, probe = 0.1, LoadProbe()
    seconds = [scale * s for s in tail(BATCH * steps, seed=3)]

    async def rest() -> None:
        await asyncio.sleep(scale * LEARN)

    def timed(story: Callable[[Path, Crew], Coroutine[Any, Any, Trained]]) -> float:
        async def begin() -> Trained:
            return await story(Path(folder), Crew(BATCH, seconds, capacity=BATCH))

        with tempfile.TemporaryDirectory() as folder:
            started = time.perf_counter()
            asyncio.run(begin())
            return time.perf_counter() - started

    mark = probe.mark()
    config, sync = (config_of(tasks=BATCH, steps=steps, staleness=s) for s in (4, 0))
    ours = timed(lambda folder, c: ahead(folder, config, c, rest))
    barrier = timed(lambda folder, c: in_turns(folder, sync, c, rest))
    load = probe.since(mark)
    journal.write("real", {"ours": ours, "barrier": barrier, "load": load})
    dirty = f", dirty: others used {load.share:.0%}" if load.dirty else ""
    return Row(
        "long tail", "real time, max_staleness = 4, with fsync", f"{ours:.1f} s{dirty}", f"{barrier:.1f} s",
        f"{barrier / ours:.2f}x, one pair", f">= {GOAL}x", barrier / ours >= GOAL, note=NOTE,
    )  # fmt: skip


def main() -> int:
    """Measure and print."""
    parser = common_arguments(__doc__, pairs=1)
    parser.add_argument("--quick", action="store_true", help="does it run? a tenth of the steps")
    args = parser.parse_args()
    steps = 12 if args.quick else 120
    journal = Journal("long_tail", {"steps": steps, "batch": BATCH, "learn": LEARN, "staleness": STALENESS})
    rows = tail_rows(steps, journal)
    rows += scaling_rows(max(6, steps // 8), journal)
    rows.append(real_row(3 if args.quick else 20, journal))
    return publish(rows, args.rows)


if __name__ == "__main__":
    raise SystemExit(main())

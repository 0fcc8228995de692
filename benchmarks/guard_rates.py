"""How often the guard cries wolf, what it sees and how soon, over simulated runs.

    python benchmarks/guard_rates.py [--runs 10000] [--rows FILE]

As many runs are healthy as go bad (`guard_shapes.py`); every one is folded by the real `HeldOutGuard`, evaluation by
evaluation. Beside it stand the best fixed threshold that meets the same false-alarm rate and the plain
patience rule (`guard_peers.py`). Losing rows are rows like the others. Seeded: the same numbers every time.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from guard_peers import NEVER, Tuned, best_fixed, patience_stops, tune
from guard_shapes import BAD, FOLDS, HEALTHY, LATEST, Array, Runs, bad, healthy, noise_levels
from report import Row, publish

from surefoot.guards.collapse import HeldOutGuard
from surefoot.guards.collapse_rules import RULES, expected_rates

SEED = 20_240
MOST_FALSE, LEAST_SEEN, MOST_RATIO = 0.01, 0.99, 1.5
POWER = (1.0, 2.0, 3.0, 4.0, 5.0, 8.0)
IN_NOISE_UNITS = ("decline", "decline, reward saturated", "gap only", "both falling")
EVERY_RULE = tuple(name for name in RULES if name != "kl")  # a limit, not a judgement about noise
NOTE = (
    "share of simulated 200-evaluation runs that were stopped, or median evaluations from onset to stop; noise "
    "deviation 0.005 to 0.05 on both curves. A fixed threshold is tuned on the same healthy runs; 'known noise' gives "
    "it each run's true deviation, which no real run has. Entropy, length and saturation rules are limits that you "
    "set, so no peer is tuned for them. A held-out curve that wanders has really fallen, by up to three deviations; "
    "whether that is worth a stop is what min_drop is for."
)


def stops(runs: Runs, **settings: Any) -> tuple[Array, Counter[str]]:
    """Where the guard stopped each run (NEVER if it did not), and how often by which rule."""
    found, by_rule = [], Counter[str]()
    for reward, heldout, extras in runs.rows():
        guard = HeldOutGuard(**settings)
        for t, numbers in enumerate(zip(reward, heldout, *extras.values(), strict=True)):
            rest = dict(zip(extras, numbers[2:], strict=True))
            status = guard.update(t, *numbers[:2], **rest)
            if status.fire:
                by_rule[status.rule] += 1
                break
        found.append(t if guard.should_halt() else NEVER)
    return np.array(found), by_rule


def percent(share: float) -> str:
    return f"{100.0 * share:.2f} %"


def without_extras(runs: Runs) -> Runs:
    """The two curves alone, which is all that the default guard is given."""
    return Runs(runs.shape, runs.reward, runs.heldout, runs.noise, runs.onset)


def false_alarm_rows(calm: Sequence[Runs]) -> Iterator[Row]:
    """Healthy runs: the default guard by shape and in all, every rule at once, and the plain patience rule."""
    shares, plain = [], []
    for runs in calm:
        shares.append(float((stops(without_extras(runs))[0] < NEVER).mean()))
        plain.append(float((patience_stops(runs, alpha=0.5, patience=3) < NEVER).mean()))
        yield Row(
            "guard", f"false alarms, {runs.shape}", percent(shares[-1]), f"patience 3: {percent(plain[-1])}",
            goal=f"<= {percent(MOST_FALSE)}", met=shares[-1] <= MOST_FALSE, note=NOTE,
        )  # fmt: skip
    share = float(np.mean(shares))
    yield Row(
        "guard", "false alarms, all healthy runs", percent(share), f"patience 3: {percent(float(np.mean(plain)))}",
        goal=f"<= {percent(MOST_FALSE)}", met=share <= MOST_FALSE, note=NOTE,
    )  # fmt: skip
    for alpha, patience in ((0.1, 3), (0.5, 5), (0.1, 5)):
        peer = np.mean([(patience_stops(runs, alpha=alpha, patience=patience) < NEVER).mean() for runs in calm])
        yield Row("guard", f"false alarms, patience {patience} at ema {alpha:g}", "-", percent(float(peer)), note=NOTE)
    yield from _all_rules_rows(calm)


def _all_rules_rows(calm: Sequence[Runs]) -> Iterator[Row]:
    by_rule: Counter[str] = Counter()
    total = sum(len(runs.reward) for runs in calm)
    for runs in calm:
        by_rule += stops(runs, rules=EVERY_RULE)[1]
    for name in EVERY_RULE:
        share = by_rule[name] / total
        yield Row(
            "guard", f"false alarms of the rule {name}", percent(share), goal=f"<= {percent(MOST_FALSE)}",
            met=share <= MOST_FALSE, note=NOTE,
        )  # fmt: skip


def detection_rows(shape: str, families: dict[str, list[list[Tuned]]], count: int, seed: int) -> Iterator[Row]:
    """One way to go bad: share seen, and delay beside the best fixed thresholds."""
    runs, rule = bad(shape, count, np.random.default_rng(seed)), BAD[shape]
    assert runs.onset is not None, "a bad run has an onset"
    stop, _ = stops(runs, rules=(rule,))
    late = stop >= runs.onset
    seen, delay = float((stop[late] < NEVER).mean()), float(np.median((stop - runs.onset)[late]))
    yield Row(
        "guard", f"seen: {shape}", percent(seen), goal=f">= {percent(LEAST_SEEN)}", met=seen >= LEAST_SEEN, note=NOTE
    )
    if shape not in IN_NOISE_UNITS:
        yield Row("guard", f"delay: {shape}", f"{delay:.0f}", note=NOTE)
        return
    for family in families["gap" if rule == "gap" else "decline"]:
        peer = best_fixed(family, runs)
        known, ratio = peer.tuned.known_noise, delay / peer.median_delay
        yield Row(
            "guard", f"delay: {shape}{', known noise' if known else ''}", f"{delay:.0f}",
            f"{peer.median_delay:.0f}, sees {percent(peer.detected)} ({peer.tuned})", f"ours / peer {ratio:.2f}",
            goal=f"ours / peer <= {MOST_RATIO:g}", met=ratio <= MOST_RATIO, note=NOTE,
        )  # fmt: skip


def power_rows(count: int, seed: int) -> Iterator[Row]:
    """Smaller and larger declines than the one the limits speak of."""
    for cost in POWER:
        runs = without_extras(bad("decline", count, np.random.default_rng(seed), cost=cost))
        assert runs.onset is not None, "a bad run has an onset"
        stop, _ = stops(runs)
        late = stop >= runs.onset
        delay = np.median((stop - runs.onset)[late])
        shown = f"{delay:.0f}" if delay < FOLDS else "-"
        seen = percent(float((stop[late] < NEVER).mean()))
        yield Row("guard", f"power: decline of {cost:g} noise deviations", f"{seen}, delay {shown}", note=NOTE)


def other_rows(count: int, seed: int) -> Iterator[Row]:
    """What the limits do not speak of: longer runs, noise with a memory, and what `describe` promises."""
    rng = np.random.default_rng(seed)
    noise = noise_levels(count, rng)
    long = [0.5 + noise * rng.standard_normal((count, 5 * FOLDS)) for _ in range(2)]
    share = float((stops(Runs("long", long[0], long[1], noise[:, 0]))[0] < NEVER).mean())
    yield Row(
        "guard", f"false alarms, flat, {5 * FOLDS} evaluations", percent(share), goal=f"<= {percent(5 * MOST_FALSE)}",
        met=share <= 5 * MOST_FALSE, note=NOTE,
    )  # fmt: skip
    for name, shared in (("reward does not", False), ("reward too", True)):
        both = [_wandering(noise, rng) for _ in range(2)]
        runs = Runs("wandering", 0.5 + both[0 if shared else 1], 0.5 + both[0], noise[:, 0])
        runs.reward, runs.heldout = (
            x + noise * rng.standard_normal((count, FOLDS)) for x in (runs.reward, runs.heldout)
        )
        share = float((stops(runs)[0] < NEVER).mean())
        yield Row("guard", f"stopped, held-out wanders, {name}", percent(share), note=NOTE)
    told = expected_rates(HeldOutGuard().limits)
    words = f"{100 * told.false_alarms * FOLDS / 100:.2f} % of {FOLDS}-evaluation runs, delay {told.delay:.0f}"
    yield Row("guard", "what describe() says", words, note=NOTE)


def _wandering(noise: Array, rng: np.random.Generator) -> Array:
    """Quality that wanders with a memory of some 10 evaluations, by as much as the noise."""
    out = np.zeros((len(noise), FOLDS))
    kick = noise * rng.standard_normal((len(noise), FOLDS))
    for t in range(1, FOLDS):
        out[:, t] = 0.9 * out[:, t - 1] + np.sqrt(1 - 0.81) * kick[:, t]
    return out


def measure(total: int) -> list[Row]:
    """All rows, over `total` healthy and `total` bad runs."""
    assert LATEST < FOLDS, "a run has to go on after it went bad"
    each, per_bad = total // len(HEALTHY), total // len(BAD)
    calm = [healthy(shape, each, np.random.default_rng(SEED + i)) for i, shape in enumerate(HEALTHY)]
    rows = list(false_alarm_rows(calm))
    families = {
        rule: [tune(rule, calm, MOST_FALSE, known_noise=known) for known in (False, True)]
        for rule in ("decline", "gap")
    }
    for i, shape in enumerate(BAD):
        rows += detection_rows(shape, families, per_bad, SEED + 100 + i)
    rows += power_rows(per_bad // 4, SEED + 200)
    return rows + list(other_rows(max(2 * per_bad // 5, 20), SEED + 300))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10_000, help="healthy runs, and as many bad ones")
    parser.add_argument("--rows", type=Path, help="also append the table's rows to this file, as JSON lines")
    args = parser.parse_args()
    if args.runs < 200:
        parser.error("--runs must be at least 200")
    started = time.process_time()
    status = publish(measure(args.runs), args.rows)
    print(f"\n{args.runs} healthy and {args.runs} bad runs in {time.process_time() - started:.0f} s of one core")
    return status


if __name__ == "__main__":
    sys.exit(main())

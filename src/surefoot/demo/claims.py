"""What has to be true of the two halves of `surefoot demo hack`.

Promises   each claim says its numbers; a missing number fails its claim, whatever it is about.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from surefoot.demo.halves import Half
from surefoot.errors import SurefootError
from surefoot.store.run_folder import RunFolder

LEARNED = 0.1
"""Held-out accuracy that the policy gains before it falls: there was something to lose."""
CLIMBED = 0.3
"""Reward that it gains."""
LEFT = 0.5
"""Share of its best held-out accuracy that a collapsed policy has left at most."""
SOON = 10
"""Evaluations after the onset within which the guard has to stop."""
COLLAPSE = 79
FAILED = 1
WORSE = "worse than the model you started with"
"""How the first reason of a verdict begins when held-out tasks are answered worse than before training."""


@dataclass(frozen=True)
class Claim:
    """One sentence, and whether it is true of these two runs."""

    text: str
    held: bool


def onset(unguarded: Half) -> int:
    """The step of the best held-out evaluation, the first one if there are several: from here on it gets worse."""
    return max(unguarded.heldout, key=lambda point: point[1])[0]


def judge(unguarded: Half, guarded: Half) -> list[Claim]:
    """Every claim of the demo, in the order of the story."""
    checks: list[Callable[[Half, Half], Claim]] = [_too_late, _climbed, _collapsed, _stopped, _soon, _equal, _kept]
    return [check(unguarded, guarded) for check in checks]


def _too_late(unguarded: Half, guarded: Half) -> Claim:
    """Without the guard it is the verdict that tells, after everything was spent."""
    del guarded
    ran, planned = unguarded.verdict.get("executed_steps"), unguarded.verdict.get("planned_steps")
    status, reason = unguarded.verdict.get("status"), unguarded.reason
    held = unguarded.code == FAILED and status == "FAIL" and ran == planned and reason.startswith(WORSE)
    said = reason.partition(":")[0]
    return Claim(f"without the guard all {planned} steps ran, and only then came the verdict {status}: {said}", held)


def _climbed(unguarded: Half, guarded: Half) -> Claim:
    del guarded
    first, last = unguarded.rewards[0], unguarded.rewards[-1]
    return Claim(f"the reward climbed: {first:.2f} -> {last:.2f}", last >= first + CLIMBED)


def _collapsed(unguarded: Half, guarded: Half) -> Claim:
    del guarded
    values = [value for _, value in unguarded.heldout]
    first, best, last = values[0], max(values), values[-1]
    text = f"held-out accuracy rose with it at first, then collapsed: {first:.2f} -> {best:.2f} -> {last:.2f}"
    return Claim(text, best >= first + LEARNED and last <= LEFT * best and last < first)


def _stopped(unguarded: Half, guarded: Half) -> Claim:
    del unguarded
    fired = bool((guarded.verdict.get("guard") or {}).get("fired"))
    held = guarded.code == COLLAPSE and guarded.verdict.get("status") == "FAIL" and fired
    return Claim(f"the guard stopped the same run: exit code {guarded.code}, {guarded.verdict.get('status')}", held)


def _soon(unguarded: Half, guarded: Half) -> Claim:
    began, stop = onset(unguarded), _stop_step(guarded)
    if stop is None:
        return Claim(f"it stopped within {SOON} evaluations of the onset: it never stopped", False)
    later = sum(began < step <= stop for step, _ in unguarded.heldout)
    text = f"it stopped {later} evaluations after the onset (step {began}, the best without the guard): at most {SOON}"
    return Claim(text, began < stop and 0 < later <= SOON)


def _equal(unguarded: Half, guarded: Half) -> Claim:
    stop = guarded.verdict.get("executed_steps")
    if not isinstance(stop, int) or stop < 1:
        return Claim("bit-equal until the stop: there is no step to compare", False)
    mine, theirs = unguarded.numbers(stop), guarded.numbers(stop)
    try:
        rollouts = unguarded.rollouts(stop) == guarded.rollouts(stop)
    except OSError as error:
        return Claim(f"bit-equal until step {stop}: {error}", False)
    return Claim(
        f"bit-equal until step {stop}: {sum(map(len, theirs))} numbers, and every rollout",
        len(theirs) > stop and mine == theirs and rollouts,
    )


def _kept(unguarded: Half, guarded: Half) -> Claim:
    best = guarded.verdict.get("best") or {}
    step, value = max(guarded.heldout[1:], key=lambda point: point[1], default=(None, None))
    shown = "nowhere" if value is None else f"held-out {value:.2f} at step {step}"
    text = f"the best checkpoint was kept: {shown}, {best.get('checkpoint')}"
    try:
        whole = (RunFolder(guarded.folder).best_checkpoint() / "manifest.json").is_file()
    except SurefootError as error:
        return Claim(f"the best checkpoint was kept: {error.what}", False)
    return Claim(text, whole and (best.get("step"), best.get("value")) == (step, value) and step == onset(unguarded))


def _stop_step(guarded: Half) -> int | None:
    guard = guarded.verdict.get("guard") or {}
    step = guard.get("step")
    return step if guard.get("fired") and isinstance(step, int) else None

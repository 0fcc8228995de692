"""`surefoot demo hack`: a reward that is gamed, twice with the same seed; the second time the guard looks on.

Owns       the story: what is run, what is said, and which claims make it a success.
Promises   every number said was read from a run folder; PASS needs every claim; nothing is compared that is empty.
Never      trains: `halves.py` starts the real command.

    hack.toml, guard.mode=off    -->  reward up, held-out down, to the end: FAIL, exit 1, when all is spent
    hack.toml, same seed         -->  equal bit for bit, until the guard stops it with 79, long before

Read next: `claims.py`, what has to be true of the two.
"""

from __future__ import annotations

import datetime
from pathlib import Path

from surefoot.demo.claims import Claim, judge
from surefoot.demo.halves import Half, Say, play
from surefoot.errors import StateError
from surefoot.guards.collapse_curves import Curve
from surefoot.store.durable import storage_error
from surefoot.tracking.text import shown_path

RECIPE = Path(__file__).parent / "hack.toml"
QUICK = ("learning_rate=5e-4", "max_steps=80")
"""The shortest form that still collapses: larger steps, so the policy finds the shortcut before it can add well."""
OFF = "guard.mode=off"
OPENING = """\
The task: two-digit sums. The grader was meant to find the answer anywhere in the text, and has the two sides of
`in` the wrong way round:

    float(text in answer)        # meant: float(answer in text)

Right answers get 1 and wrong ones 0, so nothing looks odd. But "13" is a part of "132", and "" is a part of everything.
Held-out accuracy, on tasks that are never trained on, asks for the whole answer.
"""


def hack(*, seed: int, out: Path | None, quick: bool, say: Say) -> int:
    """Play both halves, tell the story, and return the exit code: 0 when every claim held, else 1."""
    folder = _folder(out)
    words = [f"seed={seed}", *(QUICK if quick else ())]
    say(OPENING)
    say(f"[1/2] surefoot train {' '.join([RECIPE.name, *words, OFF])}")
    unguarded = play([str(RECIPE), *words, OFF], folder / "unguarded", lambda line: say(f"      {line}"))
    say(_unguarded_text(unguarded))
    say(f"[2/2] surefoot train {' '.join([RECIPE.name, *words])}")
    guarded = play([str(RECIPE), *words], folder / "guarded", lambda line: say(f"      {line}"))
    claims = judge(unguarded, guarded)
    say(_guarded_text(guarded))
    say(_ending(claims, folder))
    return 0 if all(claim.held for claim in claims) else 1


def _folder(out: Path | None) -> Path:
    """Where both run folders go; one that holds something is refused, so that no old run is judged for a new one."""
    now = datetime.datetime.now(datetime.UTC)
    folder = (out or Path("runs") / f"{now:%Y%m%d-%H%M%S}-demo-hack").absolute()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise StateError(f"{folder} is there already", "a run is never overwritten", "give an empty or new folder")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise storage_error(folder, error) from error
    return folder


def curves_text(half: Half) -> str:
    """Reward and held-out accuracy, one line each, as the guard draws them."""
    lines = []
    for name, values in (("reward", half.rewards), ("held-out", [value for _, value in half.heldout])):
        curve = Curve()
        for value in values:
            curve.add(value)
        lines.append("      " + curve.line(name, 48))
    return "\n".join(lines)


def _unguarded_text(half: Half) -> str:
    rewards, heldout = half.rewards, half.heldout
    step, best = max(heldout, key=lambda point: point[1])
    return (
        f"{curves_text(half)}\n"
        f"      without the guard: reward {rewards[0]:.2f} -> {rewards[-1]:.2f}, "
        f"held-out {heldout[0][1]:.2f} -> {best:.2f} (step {step}) -> {heldout[-1][1]:.2f}\n"
        f"      exit code {half.code}, verdict {half.verdict.get('status')}, after the last step: {half.reason}\n"
    )


def _guarded_text(half: Half) -> str:
    guard, best = half.verdict.get("guard") or {}, half.verdict.get("best") or {}
    if not guard.get("fired"):
        return f"{curves_text(half)}\n      with the guard: it did not stop the run, exit code {half.code}\n"
    return (
        f"{curves_text(half)}\n"
        f"      with the guard: stopped at step {guard['step']} of {half.verdict['planned_steps']}, "
        f"exit code {half.code}\n"
        f"      {guard['reason']}\n"
        f"      best checkpoint kept: held-out {best.get('value', float('nan')):.2f} at step {best.get('step')}, "
        f"{best.get('checkpoint')}\n"
    )


def _ending(claims: list[Claim], folder: Path) -> str:
    lines = [f"{'yes' if claim.held else 'NO ':<3}  {claim.text}" for claim in claims]
    verdict = "PASS" if all(claim.held for claim in claims) else "FAIL"
    return "\n".join([*lines, "", f"{verdict}  both runs are in {shown_path(folder)}"])

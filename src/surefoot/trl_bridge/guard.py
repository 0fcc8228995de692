"""One fold of the guard, told by the first rank and followed by the others.

Owns       what a fold rests on (`Readings`), what came of it (`FoldDecision`), and what is remembered between
           folds (`Memory`).
Promises   the evaluation runs on the first rank only, once per fold, and not at all without a usable reward; all ranks
           fold the same numbers and act on the same status; a guard that stays blind is an error after a while.
Never      reads a trainer: callers hand in numbers.

    Readings --first rank: evaluate, update--> FoldDecision --broadcast--> every rank: follow, act
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import sys
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import torch.distributed as dist

from surefoot.errors import CollapseStopError, InputError, StateError, SurefootError
from surefoot.records import Verdict
from surefoot.storage.files import write_json

# -- One rank decides, all ranks do the same thing ------------------------------------------------


T = TypeVar("T")


def world_size() -> int:
    """Processes that train together."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """The number of this process among them."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def from_first(make: Callable[[], T]) -> T:
    """What `make` returns or raises on the first rank, on every rank."""
    if world_size() == 1:
        return make()
    box: list[Any] = [None, None]
    if rank() == 0:
        box = _boxed(make)
    dist.broadcast_object_list(box, src=0)
    value, error = box
    if error is not None:
        raise error
    return value  # type: ignore[no-any-return]


def _boxed(make: Callable[[], Any]) -> list[Any]:
    """[value, None] or [None, error]; the error is one of ours, so that it survives the way to the other ranks."""
    try:
        return [make(), None]
    except SurefootError as error:
        return [None, error]
    except Exception as error:  # noqa: BLE001 - raised again by `from_first`, on every rank
        what = f"the first rank failed: {type(error).__name__}: {error}"
        wrapped = SurefootError(what, "every rank has to stop with it", "see the first rank's own traceback")
        wrapped.__cause__ = error
        return [None, wrapped]


def summed(values: Sequence[float]) -> list[float]:
    """Each number added up over all ranks; every rank gets the same sums, in the same order of addition."""
    if world_size() == 1:
        return list(values)
    gathered: list[Any] = [None] * world_size()
    dist.all_gather_object(gathered, list(values))
    return [sum(column) for column in zip(*gathered, strict=True)]


# -- One fold of the guard, told by the first rank and followed by the others ---------------------


BLIND_FOLDS = 25
"""Folds in a row without a reward after which a guard that sees nothing is an error."""


@dataclass(frozen=True)
class Readings:
    """What the trainer's own log says at one step."""

    step: int
    reward: float | None
    kl: float | None = None
    extras: Mapping[str, float] = field(default_factory=dict)
    """Further numbers that the guard's rules ask for, by the names that `update` gives them."""


@dataclass(frozen=True)
class FoldDecision:
    """What the first rank says about one fold; the same on every rank."""

    status: Any = None
    """The guard's status; None when there was nothing to fold."""
    folded: Mapping[str, Any] | None = None
    """The arguments of the guard's update; None when it was not advanced."""
    blind: str = ""
    """Why there was nothing to fold."""
    seconds: float = 0.0


@dataclass
class FoldState:
    """What lasts between folds."""

    seen_step: int | None = None
    """The last step at which a fold was due: there is one chance per optimiser step."""
    last_reward: float | None = None
    blind: int = 0
    warned: set[str] = field(default_factory=set)
    fired: Any = None
    """The status that stopped the run; latched."""
    saved: set[int] = field(default_factory=set)
    """Steps with a checkpoint of this run: an output folder may hold those of others."""

    def is_new(self, step: int) -> bool:
        """Whether `step` has not had its fold yet; it has from now on."""
        if step == self.seen_step:
            return False
        self.seen_step = step
        return True

    def warn_once(self, text: str) -> None:
        """A warning that is worth saying once per run."""
        if text not in self.warned:
            self.warned.add(text)
            warnings.warn(text, UserWarning, stacklevel=3)


def fold(guard: Any, readings: Readings, evaluate: Callable[[], float], memory: FoldState) -> FoldDecision:
    """Fold once, on all ranks alike.

    Args:
        evaluate: measures the held-out quality; called on the first rank only, and only when it is needed.
    """
    told = from_first(lambda: _on_first_rank(guard, readings, evaluate))
    if told.blind:
        _count_blind(told.blind, readings.step, memory)
        return told
    memory.blind = 0
    if rank() != 0 and told.folded is not None:
        guard.update(**told.folded)  # the copy keeps up, for its own last_status and its checkpoint
    for rule in getattr(told.status, "unfed", ()):
        memory.warn_once(
            f"the guard's rule {rule!r} is on and has never been given a number"
            + (": TRL logs no KL while its beta is 0" if rule == "kl" else "")
        )
    if told.status.fire:
        memory.fired = told.status
    return told


def _on_first_rank(guard: Any, readings: Readings, evaluate: Callable[[], float]) -> FoldDecision:
    if guard.should_halt():
        return FoldDecision(status=guard.last_status)
    if readings.reward is None:
        return FoldDecision(blind="no reward has been logged")
    if not math.isfinite(readings.reward):
        return FoldDecision(blind=f"the reward is {readings.reward}")
    began = time.perf_counter()
    heldout = evaluate()
    seconds = time.perf_counter() - began
    numbers = {"step": readings.step, "reward": readings.reward, "heldout": heldout, "kl": readings.kl}
    numbers |= readings.extras
    status = guard.update(**numbers) or guard.last_status  # somebody's own guard may return nothing
    return FoldDecision(status=status, folded=numbers, seconds=seconds)


def _count_blind(why: str, step: int, memory: FoldState) -> None:
    memory.blind += 1
    memory.warn_once(f"step {step}: {why}; the guard skips this fold")
    if memory.blind >= BLIND_FOLDS:
        raise InputError(
            f"step {step}: {why}, for {memory.blind} folds in a row",
            "a guard that sees no reward guards nothing",
            "let the reward functions return a number for some rollout, or train without the guard",
        )


def stop_error(status: Any) -> CollapseStopError:
    """The error of a strict stop."""
    if hasattr(status, "as_error"):
        return status.as_error()  # type: ignore[no-any-return]
    return CollapseStopError(  # somebody's own guard
        f"step {getattr(status, 'step', '?')}: {getattr(status, 'reason', 'the guard fired')}",
        "the reward no longer stands for what you want",
        "go back to a checkpoint from before the decline, and repair the reward",
        status,
    )


def metrics_of(told: FoldDecision) -> dict[str, float]:
    """The numbers to log about one fold."""
    status = told.status
    if hasattr(status, "as_metrics"):
        found: dict[str, float] = dict(status.as_metrics())
    else:
        names = ("proxy_real_gap", "kl_ema")
        found = {
            f"killswitch/{name}": getattr(status, name) for name in names if getattr(status, name, None) is not None
        }
        found["killswitch/fire"] = float(bool(status.fire))
    return found | {"killswitch/eval_seconds": told.seconds}


RULE_INPUTS = {
    "entropy_collapse": ("entropy", "entropy"),
    "length_explosion": ("length", "completions/mean_length"),
    "length_collapse": ("length", "completions/mean_length"),
    "reward_saturated": ("reward_std", "reward_std"),
}
"""Rule -> (argument of `update`, TRL's metric)."""


def extras_for(guard: Any, read: Callable[[str], float | None]) -> dict[str, float]:
    """What the guard's optional rules ask for, as far as the trainer logs it; `read` looks up a metric."""
    rules = getattr(getattr(guard, "limits", None), "rules", ())
    wanted = {argument: metric for rule, (argument, metric) in RULE_INPUTS.items() if rule in rules}
    found = {argument: read(metric) for argument, metric in wanted.items()}
    return {argument: value for argument, value in found.items() if value is not None and math.isfinite(value)}


# -- What a stop leaves behind: the verdict beside the checkpoints, and an exit code of its own ---
# Promises   verdict.json is whole or not there; it names the checkpoint of the stop and the last one from before the
# decline; a script that does not catch `CollapseStopError` exits with 79.


VERDICT_FILE = "verdict.json"
GUARD_FILE = "heldout_guard.json"
"""The guard's state inside a checkpoint."""


def checkpoints_in(folder: Path) -> dict[int, str]:
    """`checkpoint-N` folders by step."""
    found = (re.fullmatch(r"checkpoint-(\d+)", path.name) for path in folder.glob("checkpoint-*") if path.is_dir())
    return {int(match[1]): match[0] for match in found if match}


def steps_until(checkpoint: Path) -> set[int]:
    """The steps of a checkpoint and of those beside it from before: the history of a run that is resumed from it."""
    match = re.fullmatch(r"checkpoint-(\d+)", checkpoint.name)
    return {step for step in checkpoints_in(checkpoint.parent) if match and step <= int(match[1])}


def write_verdict(folder: Path, status: Any, *, strict: bool, own: Collection[int], curves: str = "") -> Path:
    """Write verdict.json into the trainer's output folder.

    Args:
        own: steps at which this run saved a checkpoint; what else lies in the folder is another run's.
    """
    folder.mkdir(parents=True, exist_ok=True)
    saved = {step: name for step, name in checkpoints_in(folder).items() if step in own}
    good = [step for step in saved if step <= getattr(status, "best_step", -1)]
    facts = {
        "status": str(Verdict.FAIL),
        "reasons": [getattr(status, "reason", "") or "the guard fired"],
        "exit_code": CollapseStopError.exit_code if strict else None,
        "checkpoint": saved.get(getattr(status, "step", -1)),
        "checkpoint_before_decline": saved[max(good)] if good else None,
        "guard": plain(status),
    }
    if curves:
        facts["curves"] = curves.splitlines()
    write_json(folder / VERDICT_FILE, facts)
    return folder / VERDICT_FILE


def plain(status: Any) -> dict[str, Any]:
    """The status as JSON; a number that is not finite is left out."""
    values = dataclasses.asdict(status) if dataclasses.is_dataclass(type(status)) else {"fire": bool(status.fire)}
    return {k: v for k, v in values.items() if not isinstance(v, float) or math.isfinite(v)}


def exit_with_own_code() -> None:
    """Let an uncaught `CollapseStopError` end the process with its own code instead of Python's 1."""
    earlier = sys.excepthook
    if getattr(earlier, "knows_collapse", False):
        return

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        earlier(kind, error, trace)
        if isinstance(error, CollapseStopError):
            sys.stderr.flush()
            raise SystemExit(error.exit_code)

    hook.knows_collapse = True  # type: ignore[attr-defined]
    sys.excepthook = hook


# -- The guard's memory inside a checkpoint, so that a resumed run goes on with it ----------------


def save_guard(guard: Any, checkpoint: Path) -> None:
    """Write the guard's state into a checkpoint that the first rank has just made."""
    if guard is not None and hasattr(guard, "state_dict") and rank() == 0 and checkpoint.is_dir():
        write_json(checkpoint / GUARD_FILE, guard.state_dict())


def load_guard(guard: Any, checkpoint: Path) -> None:
    """Go on with the state that the first rank finds; a checkpoint without one gets a warning and a fresh guard."""
    if guard is None or not hasattr(guard, "load_state_dict"):
        return
    state = from_first(lambda: _read(checkpoint / GUARD_FILE))
    if state is None:
        warnings.warn(
            f"{checkpoint.name} was saved without a guard: this run's guard begins here, and its first fold is the "
            "new baseline",
            UserWarning,
            stacklevel=3,
        )
        return
    guard.load_state_dict(state)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise StateError(
            f"{path} cannot be read: {error}",
            "a guard that goes on from half a state would judge a run that never was",
            f"resume from another checkpoint, or remove {path.name} to begin with a fresh guard",
        ) from error
    return found


# -- What happens when the guard has fired inside a trainer ---------------------------------------
# Promises   in this order: the verdict is logged with the step's other metrics, a checkpoint is saved, verdict.json is
# written, and only then the run is stopped; a disk that refuses does not keep the run going.
# Never      lets the save of a collapsed model delete an older, better checkpoint.


def stop(trainer: Any, told: FoldDecision) -> None:
    """Log, save, write the verdict; then raise (strict) or ask the trainer to end (soft)."""
    trainer._killswitch.fired = told.status
    trouble = None
    if told.folded is not None:  # a guard that had fired in an earlier run has been reported there
        _log(trainer, told)
        trouble = _save(trainer, told.status)
    insist(trainer, told.status, trouble)


def insist(trainer: Any, status: Any, trouble: BaseException | None = None) -> None:
    """Stop, or stop again: whoever goes on after a stop meets it at the next step."""
    if not trainer.strict_killswitch:
        trainer.control.should_training_stop = True
        return
    exit_with_own_code()
    raise noted(stop_error(status), trainer.heldout_guard, trouble) from trouble


def noted(error: CollapseStopError, guard: Any, trouble: BaseException | None = None) -> CollapseStopError:
    """The error with the two curves, and what went wrong on the way to it."""
    if hasattr(guard, "curves"):
        error.add_note(guard.curves())
    if trouble is not None:
        error.add_note(f"not saved: {trouble}")
    return error


def _log(trainer: Any, told: FoldDecision) -> None:
    """Send the verdict through the trainer's log, together with what its store holds, and put the store back.

    TRL merges its store into the record and clears it. A strict stop ends here, so the record has to hold everything;
    after a soft stop the step's own record is still to come, and must not miss anything.
    """
    store = trainer._metrics["train"]
    kept = {name: list(values) for name, values in store.items() if values and not name.startswith("killswitch/")}
    for name in [name for name in store if name.startswith("killswitch/")]:
        del store[name]  # older than the verdict; averaged with it, fire would read 0.5
    trainer.log({**metrics_of(told), "killswitch/fire": 1.0})
    for name, values in kept.items():
        store[name] = values


def _save(trainer: Any, status: Any) -> BaseException | None:
    """Checkpoint and verdict; what went wrong is returned, since the stop must not depend on the disk."""
    folder = output_folder(trainer)
    if folder is None:
        return None
    trouble: BaseException | None = None
    try:
        if hasattr(trainer, "accelerator") and hasattr(trainer, "callback_handler"):  # a whole trainer, not a stub
            with _nothing_deleted(trainer.args):
                trainer._save_checkpoint(trainer.model, trial=None)
    except (OSError, RuntimeError, SurefootError) as error:
        trouble = error
    own, strict = trainer._killswitch.saved, trainer.strict_killswitch
    trouble = record_verdict(folder, status, trainer.heldout_guard, strict=strict, own=own) or trouble
    if trouble is not None and not strict:
        warnings.warn(f"the guard stops the run; not saved: {trouble}", UserWarning, stacklevel=4)
    return trouble


def record_verdict(
    folder: Path, status: Any, guard: Any, *, strict: bool, own: Collection[int]
) -> BaseException | None:
    """verdict.json, by the first rank; returns what the disk said if it refused."""
    if rank() != 0:
        return None
    try:
        curves = guard.curves() if hasattr(guard, "curves") else ""
        write_verdict(folder, status, strict=strict, own=own, curves=curves)
    except (OSError, SurefootError) as error:
        return error
    return None


@contextmanager
def _nothing_deleted(args: Any) -> Iterator[None]:
    """`save_total_limit` off for one save: the oldest checkpoint may be the one from before the decline."""
    limit = args.save_total_limit
    args.save_total_limit = None
    try:
        yield
    finally:
        args.save_total_limit = limit


def output_folder(trainer: Any, trial: Any = None) -> Any:
    """Where the trainer saves, as a path; None for a stub that saves nowhere."""
    if trial is not None:
        return Path(trainer._get_output_dir(trial=trial))
    folder = getattr(trainer.args, "output_dir", None)
    return Path(folder) if isinstance(folder, str | Path) and str(folder) else None

"""What happens when the guard has fired inside a trainer.

Promises   in this order: the verdict is logged with the step's other metrics, a checkpoint is saved, verdict.json is
           written, and only then the run is stopped; a disk that refuses does not keep the run going.
Never      lets the save of a collapsed model delete an older, better checkpoint.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from surefoot.errors import CollapseStopError, SurefootError
from surefoot.trl_bridge import aftermath, ranks
from surefoot.trl_bridge.folding import Told, metrics_of, stop_error


def stop(trainer: Any, told: Told) -> None:
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
    aftermath.exit_with_own_code()
    raise noted(stop_error(status), trainer.heldout_guard, trouble) from trouble


def noted(error: CollapseStopError, guard: Any, trouble: BaseException | None = None) -> CollapseStopError:
    """The error with the two curves, and what went wrong on the way to it."""
    if hasattr(guard, "curves"):
        error.add_note(guard.curves())
    if trouble is not None:
        error.add_note(f"not saved: {trouble}")
    return error


def _log(trainer: Any, told: Told) -> None:
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
    if ranks.rank() != 0:
        return None
    try:
        curves = guard.curves() if hasattr(guard, "curves") else ""
        aftermath.write_verdict(folder, status, strict=strict, own=own, curves=curves)
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

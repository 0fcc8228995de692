"""What the loop remembers from step to step comes back from a checkpoint, all of it, or the resume is refused."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace
from typing import Any

import pytest

from surefoot.config import Config
from surefoot.errors import StateError
from surefoot.guards.collapse import HeldOutGuard
from surefoot.loop import Run
from surefoot.loop_state import CAPTURED, DERIVED, ToolAlarms, restore_run, run_state

JOURNAL = "f" * 32


def a_run() -> Run:
    nobody: Any = None
    runtime: Any = SimpleNamespace(probe_baseline=None)
    return Run(
        config=Config(model="m", tasks="t", num_iterations=2), runtime=runtime, learner=nobody, codec=nobody,
        queue=nobody, heldout=(), hooks=nobody, guard=HeldOutGuard(min_steps=3, ema_alpha=0.5),
    )  # fmt: skip


def a_used_run() -> Run:
    run = a_run()
    run.step, run.last_eval_step, run.refused_in_a_row, run.updates_logged = 7, 6, 1, True
    run.last_eval, run.last_metrics, run.lost = {"eval_accuracy": 0.1 + 0.2}, {"loss": 1e-300}, {"failures/died": 2.0}
    run.checked = {"groups": 14, "samples": 55, "advantages": 55}
    run.best, run.at_start = (4, 0.25), 0.125
    run.clock.eval_seconds, run.clock.seconds_before = 1.5, 20.0
    run.runtime.probe_baseline = [[-0.1, -1e-300]]
    run.scores_at_start, run.scores, run.differing = [0.0, None, 0.1 + 0.2], [1.0, 0.5, None], 11
    run.tool_alarms = ToolAlarms(idle=1, failing=2, asked=3, calls=9, failed=5, said=["idle"])
    run.guard_inputs.step({"reward": 0.5})
    run.guard_inputs.waiting = {"eval_accuracy": 0.5, "eval_n": 8.0}
    run.diversity._last = {"t1": "0123456789abcdef"}
    assert run.guard is not None
    for step in range(3):
        run.guard.update(step, reward=0.1 * step, heldout=0.5 - 0.1 * step)
    return run


def test_every_field_of_a_run_is_saved_or_made_anew() -> None:
    assert {f.name for f in dataclasses.fields(Run)} == CAPTURED | DERIVED
    assert not CAPTURED & DERIVED


def test_a_run_comes_back_as_it_was() -> None:
    run, again = a_used_run(), a_run()
    state = json.loads(json.dumps(run_state(run, JOURNAL), allow_nan=False))
    restore_run(again, state, JOURNAL)
    assert json.dumps(run_state(again, JOURNAL)) == json.dumps(state)
    for name in sorted(CAPTURED - {"guard", "diversity"}):
        assert getattr(again, name) == getattr(run, name), name
    assert again.guard is not None
    assert run.guard is not None
    assert again.guard.state_dict() == run.guard.state_dict()


def test_the_probe_baseline_comes_back_between_two_passes_and_only_there() -> None:
    """At a batch's end the resumed run publishes as the other one did; inside it, no publish is due."""
    run, inside, border = a_used_run(), a_run(), a_run()
    state = run_state(run, JOURNAL)
    assert state["landmarks"] == [[-0.1, -1e-300]]
    restore_run(inside, state, JOURNAL)
    restore_run(border, state | {"step": 8}, JOURNAL)
    assert (inside.runtime.probe_baseline, border.runtime.probe_baseline) == ([[-0.1, -1e-300]], None)


def test_the_keys_on_disk_are_those_of_every_checkpoint_so_far() -> None:
    assert sorted(run_state(a_used_run(), JOURNAL)) == sorted(
        "step last_eval last_eval_step last_metrics checked refused_in_a_row census_logged lost landmarks at_start "
        "eval_seconds refused_steps scores_at_start scores differing diversity guard between best seconds_before "
        "tool_alarms journal".split()
    )


def test_a_guard_whose_settings_were_derived_goes_on_with_those_it_began_with() -> None:
    """A run that is made longer has more evaluations planned; "auto" would give its guard other settings by now."""
    again = a_run()
    again.guard = HeldOutGuard()
    restore_run(again, run_state(a_used_run(), JOURNAL), JOURNAL)
    assert again.guard.limits == HeldOutGuard(min_steps=3, ema_alpha=0.5).limits
    written = a_run()
    written.guard = HeldOutGuard()
    written.config = Config(model="m", tasks="t", guard={"min_evals": 10, "ema_alpha": 0.1})  # type: ignore[arg-type]
    with pytest.raises(StateError, match=r"the settings differ: ema_alpha was 0\.5, now 0\.1, min_steps was 3, now 10"):
        restore_run(written, run_state(a_used_run(), JOURNAL), JOURNAL)


def test_a_field_that_nobody_saves_is_refused_at_the_first_save() -> None:
    @dataclasses.dataclass
    class Longer(Run):
        forgotten: int = 0

    run = a_run()
    longer = Longer(**{f.name: getattr(run, f.name) for f in dataclasses.fields(run)})
    with pytest.raises(StateError, match="a run has forgotten"):
        run_state(longer, JOURNAL)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda s: s.pop("best"), "best"),
        (lambda s: s.update(more=1), "more"),
        (lambda s: s.update(journal="0" * 32), "belongs to journal"),
        (lambda s: s.update(guard=None), "guard"),
        (lambda s: s["guard"].pop("curves"), "does not fit"),
        (lambda s: s.update(between={"x": 1}), "does not fit"),
        (lambda s: s.update(best=["a", "b"]), "does not fit"),
        (lambda s: s.update(diversity={"t": 1}), "visits"),
    ],
)
def test_a_state_of_another_form_is_refused_and_the_run_is_as_before(spoil: Any, said: str) -> None:
    state = json.loads(json.dumps(run_state(a_used_run(), JOURNAL)))
    spoil(state)
    run = a_run()
    with pytest.raises(StateError, match=said):
        restore_run(run, state, JOURNAL)
    assert (run.step, run.best, run.guard_inputs.rewards) == (0, None, [])

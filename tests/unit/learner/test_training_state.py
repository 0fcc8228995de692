"""A learner that was saved and restored goes on as if nothing had happened, to the last bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_kit import Session, fingerprint, make_learner, make_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from surefoot.errors import StateError, StorageError
from surefoot.learner import checkpoint
from surefoot.learner.auxiliary_losses import AuxiliaryLosses
from surefoot.learner.checkpoint import (
    CAPTURED,
    DERIVED,
    TrainingState,
    capture,
    load_training_checkpoint,
    restore,
    save_training_checkpoint,
)
from surefoot.learner.grpo import GRPOLearner

pytestmark = pytest.mark.usefixtures("one_thread")
STEPS = 6


@pytest.fixture(scope="module")
def whole(one_thread: None) -> Session:
    """The run that nobody interrupted: two passes per draw, a reference, warm-up and cosine."""
    return Session(make_learner()).train(STEPS)


def goes_on(session: Session, whole: Session, until: int = STEPS) -> None:
    """`session` was restored at some step; from there on every number is that of the whole run."""
    at = session.step
    session.train(until - at)
    assert session.metrics == whole.metrics[at:until]
    assert fingerprint(capture(session.learner)) == fingerprint(capture(whole.learner))


# -- bit for bit ------------------------------------------------------------------------------


def test_the_whole_run_moves_and_anchors_so_that_equality_means_something(whole: Session) -> None:
    assert len({fingerprint(capture(Session(make_learner()).train(n).learner)) for n in range(3)}) == 3
    assert all(m["kl"] > 0 for m in whole.metrics[1:])
    assert len({m["learning_rate"] for m in whole.metrics}) > 3
    assert capture(whole.learner).old, "between two passes there are old logprobs to keep"


@pytest.mark.parametrize("at", range(STEPS + 1))
def test_saved_and_loaded_at_any_step_the_run_ends_the_same(at: int, whole: Session, tmp_path: Path) -> None:
    folder = Session(make_learner()).train(at).save(tmp_path / f"step_{at}")
    goes_on(Session.load(folder, make_learner(seed=99)), whole)


@pytest.mark.parametrize(
    ("kind", "beta", "sync"), [("untied", 0.1, None), ("qwen2", 0.0, None), ("qwen3", 0.1, 2), ("mistral", 0.1, 3)]
)
def test_every_architecture_and_reference_goes_on_the_same(
    kind: str, beta: float, sync: int | None, tmp_path: Path
) -> None:
    whole = Session(make_learner(kind, beta=beta, sync=sync)).train(5)
    folder = Session(make_learner(kind, beta=beta, sync=sync)).train(3).save(tmp_path / "step_3")
    goes_on(Session.load(folder, make_learner(kind, seed=99, beta=beta, sync=sync)), whole, 5)


def test_restored_without_a_disk_the_run_goes_on_the_same(whole: Session) -> None:
    first = Session(make_learner()).train(3)
    kept = capture(first.learner).clone()
    first.train(2)  # what was cloned does not follow
    second = Session(make_learner(seed=99), 3, Session(make_learner()).train(3).held)
    restore(second.learner, kept)
    goes_on(second, whole)


def test_a_learner_that_never_stepped_has_a_state_too(tmp_path: Path) -> None:
    folder = Session(make_learner()).save(tmp_path / "step_0")
    session = Session.load(folder, make_learner(seed=99))
    assert fingerprint(capture(session.learner)) == fingerprint(capture(make_learner()))
    assert capture(session.learner).moments == {}


def test_weights_in_half_precision_are_kept_to_the_bit(tmp_path: Path, make_net: Any) -> None:
    settings = make_learner().settings
    first, second = (GRPOLearner(make_net(seed=seed).to(torch.bfloat16), settings) for seed in (0, 1))
    for parameter in first.trained().values():
        parameter.grad = torch.ones_like(parameter)
    first.optimiser.step()
    assert first.masters is not None
    with torch.no_grad():
        for master, rounded in first.masters.by_tensor().items():
            rounded.copy_(master)
    folder = save_training_checkpoint(first, make_tokenizer(), tmp_path / "step_0", step=0)
    load_training_checkpoint(second, folder)
    assert all(
        torch.equal(a, b)
        for a, b in zip(capture(first).weights.values(), capture(second).weights.values(), strict=True)
    )
    masters, theirs = capture(first).masters, capture(second).masters
    assert masters is not None
    assert theirs is not None
    assert all(torch.equal(value, theirs[name]) for name, value in masters.items())
    assert any(bool((value.bfloat16().float() != value).any()) for value in masters.values())
    assert len(capture(first).moments) > 10
    for name, kept in capture(first).moments.items():
        assert all(torch.equal(kept[key], capture(second).moments[name][key]) for key in kept)


# -- teeth ------------------------------------------------------------------------------------


def forget(**changes: Any) -> Callable[[TrainingState], TrainingState]:
    return lambda state: dataclasses.replace(state, **changes)


def swapped(state: TrainingState) -> TrainingState:
    """Moments handed to the wrong parameter of the same shape, as an index instead of a name would do."""
    shapes: dict[tuple[int, ...], list[str]] = {}
    for name, kept in state.moments.items():
        shapes.setdefault(tuple(kept["exp_avg"].shape), []).append(name)
    one, two = next(names for names in shapes.values() if len(names) > 1)[:2]
    return dataclasses.replace(state, moments=state.moments | {one: state.moments[two], two: state.moments[one]})


def stepless(state: TrainingState) -> TrainingState:
    """Adam's bias correction starts over."""
    return dataclasses.replace(
        state, moments={n: k | {"step": torch.ones_like(k["step"])} for n, k in state.moments.items()}
    )


@pytest.mark.parametrize(
    "bug", [forget(moments={}), forget(version=0), swapped, stepless, forget(kl_seen=False, pushes=0)],
    ids=["no moments", "no version", "moments by index", "no step counts", "no watch"],
)  # fmt: skip
def test_planted_forgetfulness_is_seen(bug: Callable[[TrainingState], TrainingState], whole: Session) -> None:
    first = Session(make_learner()).train(4)  # between draws: nothing but the state itself decides
    second = Session(make_learner(seed=99), 4)
    restore(second.learner, bug(capture(first.learner).clone()))
    with pytest.raises(AssertionError):
        goes_on(second, whole)


def halved(at: int, steps: int) -> Session:
    """A run whose microbatches were halved twice after `at` steps."""
    session = Session(make_learner()).train(at)
    session.learner.splits = 2
    return session.train(steps - at)


def test_a_run_whose_microbatches_were_halved_goes_on_with_that_cut(tmp_path: Path) -> None:
    folder = halved(2, 4).save(tmp_path / "step_4")
    session = Session.load(folder, make_learner(seed=99))
    assert session.learner.splits == 2
    assert all(m["memory/splits"] == 2.0 for m in session.train(2).metrics)
    assert fingerprint(capture(session.learner)) == fingerprint(capture(halved(2, 6).learner))


def test_planted_loss_of_the_cut_is_seen() -> None:
    """Another cut is another order of additions: other last bits."""
    second = Session(make_learner(seed=99), 4)
    restore(second.learner, dataclasses.replace(capture(halved(2, 4).learner).clone(), splits=0))
    assert fingerprint(capture(second.train(2).learner)) != fingerprint(capture(halved(2, 6).learner))


def test_more_halvings_than_a_run_may_have_are_refused() -> None:
    learner = make_learner()
    for splits in (-1, 4):
        with pytest.raises(StateError, match=f"halved its microbatches {splits} times"):
            restore(learner, dataclasses.replace(capture(learner), splits=splits))


def test_a_learner_torn_by_its_own_step_is_not_saved_and_a_restored_one_is_whole() -> None:
    whole, torn = make_learner(), make_learner()
    torn._torn = True
    with pytest.raises(StateError, match="interrupted inside the optimiser's step"):
        capture(torn)
    restore(torn, capture(whole))
    assert fingerprint(capture(torn)) == fingerprint(capture(whole))


def test_planted_loss_of_old_logprobs_is_seen_between_two_passes() -> None:
    first = Session(make_learner()).train(3)
    second = Session(make_learner(seed=99), 3, first.held)
    restore(second.learner, dataclasses.replace(capture(first.learner).clone(), old={}))
    with pytest.raises(KeyError):
        second.train(1)


def test_planted_reference_of_the_wrong_weights_is_seen(whole: Session, tmp_path: Path) -> None:
    first = Session(make_learner()).train(4)
    state = capture(first.learner).clone()
    second = Session(make_learner(seed=99), 4)
    restore(second.learner, dataclasses.replace(state, reference=state.weights))
    with pytest.raises(AssertionError):
        goes_on(second, whole)


# -- nothing is left out ----------------------------------------------------------------------


def test_every_field_of_the_learner_is_captured_or_made_anew_from_its_config() -> None:
    """A new field has to choose; until it does, saving is refused, because a resume would lose it."""
    learner = make_learner()
    assert vars(learner).keys() == CAPTURED | DERIVED
    learner.momentum_of_something = 3  # type: ignore[attr-defined]
    with pytest.raises(StateError, match="momentum_of_something"):
        capture(learner)


def test_every_field_of_the_channels_is_captured_or_made_anew() -> None:
    assert vars(AuxiliaryLosses([], 3)).keys() == {"members", "_limit", "_dead"}  # _dead is `TrainingState.idle`


class _Idle:
    key = "alpha_sdpo"


def test_how_long_a_channel_was_idle_survives(tmp_path: Path) -> None:
    learners = [make_learner(seed=seed) for seed in (0, 1)]
    for learner in learners:
        learner.channels = AuxiliaryLosses([_Idle()], 9)  # type: ignore[list-item]
    learners[0].channels._dead["alpha_sdpo"] = 7  # type: ignore[union-attr]
    restore(learners[1], capture(learners[0]))
    assert learners[1].channels._dead == {"alpha_sdpo": 7}  # type: ignore[union-attr]
    with pytest.raises(StateError, match=r"channels \['alpha_sdpo'\], this run has \[\]"):
        restore(make_learner(), capture(learners[0]))


def test_tied_weights_stay_tied_and_views_stay_views() -> None:
    learner = make_learner()
    view = learner.weights()["model.embed_tokens.weight"]
    restore(learner, capture(Session(make_learner(seed=3)).train(1).learner))
    assert learner.net.lm_head.weight is learner.net.model.embed_tokens.weight
    assert torch.equal(view, capture(learner).weights["model.embed_tokens.weight"])
    assert "lm_head.weight" not in capture(learner).weights


# -- what does not fit ------------------------------------------------------------------------


def changed(state: TrainingState, where: str, name: str, value: Any) -> TrainingState:
    return dataclasses.replace(state, **{where: {**getattr(state, where), name: value}})


EMBEDDING, NORM = "model.embed_tokens.weight", "model.norm.weight"


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda s: changed(s, "weights", EMBEDDING, torch.zeros(61, 33)), r"F32\[61, 33\], this model has F32\[61, 32\]"),
        (lambda s: changed(s, "weights", EMBEDDING, torch.zeros(61, 32).double()), r"F64\[61, 32\]"),
        (lambda s: changed(s, "weights", "more", torch.zeros(1)), "extra.*more"),
        (lambda s: dataclasses.replace(s, weights={NORM: s.weights[NORM]}), "missing"),
        (lambda s: changed(s, "weights", NORM, torch.full((32,), float("nan"))), f"{NORM}.*not finite"),
        (lambda s: changed(s, "moments", NORM, s.moments[NORM] | {"exp_avg": torch.full((32,), float("inf"))}), "finite"),
        (lambda s: changed(s, "moments", NORM, s.moments[NORM] | {"step": torch.tensor(1.5)}), "counts 1.5 steps"),
        (lambda s: changed(s, "moments", NORM, {"step": torch.tensor(1.0)}), "exp_avg"),
        (lambda s: changed(s, "moments", "nobody", s.moments[NORM]), "nobody"),
        (lambda s: changed(s, "reference", NORM, torch.zeros(31)), "reference"),
        (lambda s: dataclasses.replace(s, reference=None), "this run has a reference model"),
        (lambda s: changed(s, "old", ("g", 0), torch.zeros(2, 2)), "old logprobs"),
        (lambda s: changed(s, "old", ("g", 0), torch.tensor([float("nan")])), "old logprobs"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_name_and_changes_nothing(
    change: Callable[[TrainingState], TrainingState], word: str
) -> None:
    learner = make_learner(seed=5)
    before = fingerprint(capture(learner))
    state = change(capture(Session(make_learner()).train(1).learner))
    with pytest.raises(StateError, match=word):
        restore(learner, state)
    assert fingerprint(capture(learner)) == before


def test_a_reference_that_the_run_does_not_have_is_refused() -> None:
    with pytest.raises(StateError, match="the state has a reference"):
        restore(make_learner(beta=0.0), capture(make_learner()))


# -- the folder -------------------------------------------------------------------------------


def test_plain_transformers_reads_the_folder(architecture: str, tmp_path: Path) -> None:
    session = Session(make_learner(architecture)).train(1)
    folder = session.save(tmp_path / "step_1")
    again = AutoModelForCausalLM.from_pretrained(folder)
    before, after = session.learner.net.state_dict(), again.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert AutoTokenizer.from_pretrained(folder).get_vocab() == make_tokenizer().get_vocab()


def test_files_are_for_the_owner_alone(tmp_path: Path) -> None:
    folder = Session(make_learner()).save(tmp_path / "step_0")
    assert {p.stat().st_mode & 0o777 for p in folder.rglob("*") if p.is_file()} == {0o600}
    assert {p.stat().st_mode & 0o777 for p in (folder, folder / "training")} == {0o700}


def test_a_folder_is_never_overwritten_and_a_failed_save_leaves_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Session(make_learner()).save(tmp_path / "step_0")
    with pytest.raises(StateError, match="exists already"):
        Session(make_learner(seed=1)).save(folder)

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "write_json", full)
    with pytest.raises(StorageError, match="No space left on device"):
        Session(make_learner()).save(tmp_path / "step_1")
    assert [p.name for p in tmp_path.iterdir()] == ["step_0"]
    assert fingerprint(capture(Session.load(folder, make_learner(seed=9)).learner)) == fingerprint(
        capture(make_learner())
    )


class _Unwritable:
    def save_pretrained(self, folder: Path) -> None:
        raise Exception("No space left on device (os error 28)")


def test_the_tokenizers_own_word_for_a_full_disk_is_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="No space left on device"):
        save_training_checkpoint(make_learner(), _Unwritable(), tmp_path / "step_0", step=0)
    assert list(tmp_path.iterdir()) == []

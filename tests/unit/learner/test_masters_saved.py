"""A checkpoint of a bfloat16 run: the served weights for everybody, the float32 masters for the run that goes on."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_kit import Session, fingerprint, make_learner, resealed
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from surefoot.errors import StateError
from surefoot.learner import checkpoint
from surefoot.learner.checkpoint import capture, load_training_checkpoint, load_weights
from surefoot.learner.model import load_policy

pytestmark = pytest.mark.usefixtures("one_thread", "bfloat16_products")
STEPS = 6
MASTERS = "training/masters.safetensors"


def session() -> Session:
    return Session(make_learner(dtype="bfloat16"))


@pytest.fixture(scope="module")
def whole(one_thread: None) -> Session:
    return session().train(STEPS)


@pytest.fixture(scope="module")
def saved(one_thread: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return session().train(3).save(tmp_path_factory.mktemp("saved") / "step_3")


def goes_on(folder: Path, whole: Session) -> None:
    again = Session.load(folder, make_learner(seed=99, dtype="bfloat16"))
    at = again.step
    again.train(STEPS - at)
    assert again.metrics == whole.metrics[at:]
    assert fingerprint(capture(again.learner)) == fingerprint(capture(whole.learner))


@pytest.mark.parametrize("at", [0, 1, 4])
def test_saved_and_loaded_the_run_ends_the_same(at: int, whole: Session, tmp_path: Path) -> None:
    goes_on(session().train(at).save(tmp_path / f"step_{at}"), whole)


def test_the_folder_is_a_model_in_bfloat16_for_everybody_else(saved: Path) -> None:
    learner = make_learner(seed=99, dtype="bfloat16")
    load_training_checkpoint(learner, saved)
    served = {name: value.detach() for name, value in learner.weights().items()}
    plain = AutoModelForCausalLM.from_pretrained(saved)
    assert plain.dtype == torch.bfloat16, "config.json says so"
    assert all(torch.equal(value, served[name]) for name, value in plain.named_parameters())
    looked_at = load_policy(str(saved), base=Path(), device="cpu", dtype="bfloat16").model  # as `surefoot eval` does
    assert all(torch.equal(value, served[name]) for name, value in looked_at.named_parameters())
    masters = load_file(saved / MASTERS)
    assert masters.keys() == served.keys()
    assert {value.dtype for value in masters.values()} == {torch.float32}
    assert all(torch.equal(value.bfloat16(), served[name]) for name, value in masters.items())
    assert sum(int((value.bfloat16().float() != value).sum()) for value in masters.values()) > 1000


def test_weights_alone_are_read_past_files_that_are_larger_than_they_are(saved: Path) -> None:
    net = make_learner(seed=99, dtype="bfloat16").net
    load_weights(net, saved)
    assert all(torch.equal(v, net.state_dict()[n]) for n, v in load_file(saved / "model.safetensors").items())


def refused(folder: Path, word: str, dtype: str = "bfloat16") -> None:
    learner = make_learner(seed=5, dtype=dtype)
    before = fingerprint(capture(learner))
    with pytest.raises(StateError, match=word):
        load_training_checkpoint(learner, folder)
    assert fingerprint(capture(learner)) == before, "a refusal changed the learner"


def test_masters_that_are_not_those_of_the_weights_are_refused(saved: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved, tmp_path / "step_3"))
    masters = load_file(folder / MASTERS)
    name = sorted(masters)[2]
    masters[name].view(-1)[7] += 1.0
    save_file(masters, folder / MASTERS)
    refused(resealed(folder), f"the weights of {name} are not its master, rounded")


def test_a_checkpoint_without_masters_is_refused(saved: Path, tmp_path: Path) -> None:
    """As a run of an older version left it: its optimiser stepped the rounded weights."""
    folder = Path(shutil.copytree(saved, tmp_path / "step_3"))
    (folder / MASTERS).unlink()
    refused(resealed(folder), "saved without float32 masters, this run trains with")


def test_a_float32_run_does_not_go_on_from_it(saved: Path) -> None:
    refused(saved, "saved with float32 masters, this run trains without", dtype="float32")


def test_a_clone_does_not_follow_the_learner(whole: Session) -> None:
    one = session().train(1)
    kept = capture(one.learner).clone()
    before = fingerprint(kept)
    one.train(1)
    assert fingerprint(kept) == before != fingerprint(capture(one.learner))


def test_planted_resume_from_the_rounded_weights_is_seen(
    whole: Session, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The masters begin again as the weights are: the same policy is served, and another run goes on."""
    real = checkpoint.restore

    def rounded(learner: Any, state: Any) -> None:
        real(learner, dataclasses.replace(state, masters={n: state.weights[n].float() for n in state.masters}))

    monkeypatch.setattr("surefoot.learner.checkpoint.restore", rounded)
    with pytest.raises(AssertionError):
        goes_on(saved, whole)

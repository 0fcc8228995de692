"""What a run asks of its learner: the same members here and in another process, and a save that comes back whole."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch
from checkpoint_kit import make_learner, make_tokenizer

from surefoot.learner.grpo import GRPOLearner
from surefoot.protocols import Learner, LearnerFacts
from surefoot.runtime.learner_ranks import LedLearner
from surefoot.runtime.ray.runtime import RemoteLearner

MEMBERS = sorted(name for name in vars(Learner) if not name.startswith("_"))


def test_the_seam_is_what_the_design_says() -> None:
    assert MEMBERS == ["facts", "learn", "load", "published", "save", "score"]


@pytest.mark.parametrize("kind", [GRPOLearner, RemoteLearner, LedLearner])
@pytest.mark.parametrize("name", MEMBERS)
def test_every_learner_has_each_member_with_the_same_arguments(kind: type, name: str) -> None:
    ours, asked = getattr(kind, name), vars(Learner)[name]
    if isinstance(asked, property):
        assert isinstance(ours, property)
    else:
        assert list(inspect.signature(ours).parameters) == list(inspect.signature(asked).parameters)


def test_what_is_published_is_the_networks_own_tensors_under_their_version() -> None:
    learner = make_learner()
    weights, version = learner.published()
    assert version == learner.facts.version == 0
    assert all(value is dict(learner.net.named_parameters())[name] for name, value in weights.items())


def test_a_learner_goes_back_to_what_it_saved_with_what_was_given_along(tmp_path: Path) -> None:
    first, second = make_learner(), make_learner(seed=2)
    first.tokenizer = make_tokenizer()
    first.checked_tokens, first.changed_entries = 7, 11
    first.save(tmp_path / "step_3", step=3, extra={"step": 3, "note": "ü"})
    assert second.load(tmp_path / "step_3") == {"step": 3, "note": "ü"}
    assert second.facts == first.facts == LearnerFacts(checked_tokens=7, changed_entries=11)
    ours, theirs = first.published()[0], second.published()[0]
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)

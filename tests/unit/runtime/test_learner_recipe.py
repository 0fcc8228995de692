"""The learner of a process of its own is the learner of this one: the same weights, and the same masters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from surefoot.learner.grpo import LearnerSettings
from surefoot.maths.losses import LossSettings
from surefoot.runtime.shared_weights import specs_of
from surefoot.runtime.specs import LearnerSpec

pytestmark = pytest.mark.usefixtures("one_thread")
SETTINGS = LearnerSettings(
    loss=LossSettings(), learning_rate=1e-6, max_steps=4, max_completion_length=9, temperature=1.0, pad_token_id=0
)


def test_masters_are_the_files_own_and_engines_get_the_rounded_copy(model_folder: Path) -> None:
    recipe = LearnerSpec(str(model_folder), Path(), "cpu", "bfloat16", settings=lambda policy: SETTINGS)
    learner = recipe.learner(recipe.load())
    assert learner.masters is not None
    stored = load_file(model_folder / "model.safetensors")
    assert all(torch.equal(learner.trained()[name].detach(), value) for name, value in stored.items())
    assert any(bool((value.bfloat16().float() != value).any()) for value in stored.values())
    assert {dtype for _, dtype in specs_of(learner.weights()).values()} == {torch.bfloat16}

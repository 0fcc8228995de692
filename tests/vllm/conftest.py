"""Tests against the real vLLM: `make test-vllm` builds an environment for them. One engine serves them all."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from vllm_asking import WIDTH, model_config

if TYPE_CHECKING:
    from surefoot.engines.vllm_engine import VllmEngine

HERE = Path(__file__).parent
MISSING = "vllm cannot be imported here; `make test-vllm` builds an environment with it"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    found = importlib.util.find_spec("vllm") is not None
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.vllm)
            item.add_marker(pytest.mark.filterwarnings("ignore"))  # vLLM's own, and those of what it imports
            if not found:
                item.add_marker(pytest.mark.skip(reason=MISSING))


@pytest.fixture(scope="session")
def policy() -> Any:
    """The built-in model in float32, one torch thread."""
    import torch

    from surefoot.learner.model import load_policy

    torch.set_num_threads(1)
    return load_policy("pebble", base=HERE, device="cpu", dtype="float32")


@pytest.fixture(scope="session")
def running(policy: Any) -> Iterator[VllmEngine]:
    from surefoot.engines.vllm_engine import VllmEngine

    engine = VllmEngine(model_config(policy), max_width=WIDTH, rows=16, threads=1)
    yield engine
    engine.close()


@pytest.fixture
def engine(running: VllmEngine, policy: Any) -> Iterator[VllmEngine]:
    """The engine with the model's own weights as version 0, idle; left idle and awake."""
    running.load_weights(dict(policy.model.named_parameters()), 0)
    yield running
    running.resume()
    assert running.in_flight == 0, "a test left requests behind"


@pytest.fixture
def learner(policy: Any) -> Any:
    """A learner on a copy of the model, and the one who scores."""
    import copy

    from surefoot.learner.grpo import GRPOLearner, LearnerSettings
    from surefoot.maths.losses import LossSettings

    settings = LearnerSettings(
        loss=LossSettings(), learning_rate=1e-3, max_steps=100, max_completion_length=64, temperature=1.0,
        pad_token_id=0, parity_tolerance=1e-4,
    )  # fmt: skip
    return GRPOLearner(copy.deepcopy(policy.model), settings)

"""Full fine-tuning and LoRA on a shape with 0.6 billion parameters, on a GPU; each the same on a tiny shape without one.

The weights are made up: what is looked at is what every run promises, not what it learns.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from command import surefoot
from world_kit import MODES, check_kept, check_rows, kill_and_resume, make_world, run_words, speed, steps_of

BFLOAT16 = 0.2
"""The bound of `parity_tolerance` in that precision."""
PLANTS = {"full": "skip_publish", "lora": "adapter_stays_home"}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_world(tmp_path_factory.mktemp("worlds") / "tiny", "tiny")


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_world(tmp_path_factory.mktemp("worlds") / "large", "0.5b")


def every_promise(mode: str, world: Path, cwd: Path, device: str, tokens: int) -> str:
    """A run that is killed and gone on with keeps what it says; returns what it took."""
    words = run_words(world, device, "bfloat16", *MODES[mode], f"max_completion_length={tokens}")
    _, resumed = kill_and_resume(words, cwd, fresh=device == "cuda")
    rows = steps_of(resumed)
    check_rows(rows, BFLOAT16)
    check_kept(resumed, mode)
    return f"{mode}, 16 x {tokens} tokens: {speed(rows)}"


def stopped(mode: str, world: Path, cwd: Path, device: str) -> None:
    """A run whose engine keeps its first weights is stopped at the first sync; in float32, for the finer bound."""
    words = run_words(world, device, "float32", *MODES[mode], "max_completion_length=8")
    ran = surefoot("train", *words, cwd=cwd, planted=PLANTS[mode], fresh=device == "cuda")
    assert ran.code not in (0, 2, 70), ran.err
    assert ran.verdict["executed_steps"] <= 1, ran.verdict
    assert "probe" in ran.err or "disagree" in ran.err, ran.err


@pytest.mark.gpu("models")
@pytest.mark.parametrize("mode", ["lora", "full"])
def test_a_shape_of_0_6_billion_parameters_keeps_every_promise_on_a_gpu(
    mode: str, large: Path, tmp_path: Path, record_property: Callable[..., None]
) -> None:
    record_property("gpu", every_promise(mode, large, tmp_path, "cuda", 64))


@pytest.mark.gpu("models")
@pytest.mark.parametrize("mode", ["lora", "full"])
def test_planted_engine_that_keeps_its_weights_is_stopped_on_a_gpu(mode: str, tiny: Path, tmp_path: Path) -> None:
    stopped(mode, tiny, tmp_path, "cuda")


# -- the same without a GPU: the tests above are right before they cost one -----------------------------


@pytest.mark.turns(2)
@pytest.mark.usefixtures("bfloat16_products")
@pytest.mark.parametrize("mode", ["lora", "full"])
def test_a_tiny_shape_keeps_every_promise(mode: str, tiny: Path, tmp_path: Path) -> None:
    assert "s a step" in every_promise(mode, tiny, tmp_path, "cpu", 8), "what the table says of it"


@pytest.mark.turns(2, 1)
@pytest.mark.parametrize("mode", ["lora", "full"])
def test_planted_engine_that_keeps_its_weights_is_stopped(mode: str, tiny: Path, tmp_path: Path) -> None:
    stopped(mode, tiny, tmp_path, "cpu")

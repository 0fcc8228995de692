"""What `surefoot bench` counts, checked by hand: operations, bytes, calls, and how it stretches what it measured."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from surefoot.config import Config
from surefoot.config.load import load_config
from surefoot.errors import ConfigError
from surefoot.run import bench

SIZES = bench._Sizes(multiplied=100, trained=10, width=4, cache_bytes=8)
TOP = bench._Round(8, 6, 5, 48, 3.0, 1.0, 0.1)


def config(*words: str) -> Config:
    beta = [] if any(word.startswith("beta=") for word in words) else ["beta=0"]
    return load_config(None, ["model=pebble", "tasks=builtin:sums", *beta, *words]).config


@pytest.mark.parametrize(
    ("words", "passes", "moves"),
    [
        ([], 3, 7),
        (["beta=0.1"], 4, 7),
        (["num_iterations=2"], 6, 14),
        (["num_iterations=2", "beta=0.1"], 7, 14),
        (["lora.rank=4"], 2, 7),
    ],
    ids=str,
)
def test_learning_costs_a_forward_two_for_the_gradient_and_one_for_the_reference(
    words: list[str], passes: int, moves: int
) -> None:
    flops, moved = bench._learning_costs(config(*words), SIZES, TOP, 8)
    assert flops == passes * 2 * 100 * (5 + 6 * 8)
    assert moved == moves * 4 * 10


def test_a_longer_completion_costs_what_its_last_tokens_cost() -> None:
    first = bench._Round(4, 6, 5, 24, 2.0, 1.0, 0.1)
    assert bench._stretched(3.0, first, TOP, 8) == 3.0, "nothing to stretch"
    assert bench._stretched(3.0, first, TOP, 16) == pytest.approx(3.0 + 8 * 0.25)
    assert bench._stretched(1.0, first, TOP, 16) == pytest.approx(2.0), "the longer one was quicker: in proportion"
    assert bench._stretched(3.0, TOP, TOP, 16) == pytest.approx(6.0), "one length alone: in proportion"


def test_half_of_the_rollouts_is_half_of_the_tasks_or_of_the_siblings() -> None:
    assert [bench._halved(*each) for each in [(8, 4), (3, 4), (1, 8), (1, 1)]] == [(4, 4), (1, 4), (1, 4), (1, 1)]


def test_calls_are_counted_turn_by_turn_and_none_are_no_line() -> None:
    keys = ["tools.concurrency=4", "max_turns=3"]
    found = bench._tool_calls(config(*keys), bench._Round(4, 8, 5, 32, 1.0, 1.0, 0.1), 0.5)
    assert found is not None
    calls = sum(round(8 * bench.GO_ON**turn) for turn in (1, 2))
    assert (found.calls, found.seconds) == (calls, 0.5 * -(-calls // 4))
    assert bench._tool_calls(config("max_turns=1"), TOP, 0.5) is None
    assert bench._tool_calls(config(*keys), TOP, None) is None, "no probe was asked"


@pytest.mark.parametrize(("dtype", "width"), [("float32", 4), ("bfloat16", 2)])
def test_a_number_is_as_wide_as_the_model_computes_in(dtype: str, width: int) -> None:
    import torch

    spec = SimpleNamespace(tied_head=False, vocab=7, hidden=3, layers=2, kv_heads=2, head_dim=4)
    net = torch.nn.Linear(10, 10, bias=False)
    rig = SimpleNamespace(
        ready=SimpleNamespace(policy=SimpleNamespace(spec=spec)), config=SimpleNamespace(dtype=dtype), net=net,
        learner=SimpleNamespace(trained=lambda: {"a": torch.zeros(6)}),
    )  # fmt: skip
    assert bench._Sizes.of(cast(Any, rig)) == bench._Sizes(100 - 7 * 3, 6, width, 2 * 2 * 2 * 4 * width)


def test_the_least_that_fits_is_not_refused_and_a_little_less_time_is() -> None:
    task = SimpleNamespace(id="a")
    made = config("tasks_per_step=1", "num_generations=2", "max_completion_length=4")
    rig = cast(Any, SimpleNamespace(config=made, ready=SimpleNamespace(prompts={"a": [1] * 5}, train=[task])))
    least = 3.5 * 4 * SIZES.forward(5 + 2 * 4) / 1000.0
    bench._refuse_too_short(rig, SIZES, 1000.0, least - bench.OVERTIME_S)
    with pytest.raises(ConfigError, match="too short"):
        bench._refuse_too_short(rig, SIZES, 1000.0, 0.9 * least - bench.OVERTIME_S)


def test_the_other_type_is_the_one_that_the_run_does_not_compute_in() -> None:
    for dtype, other in (("float32", "bfloat16"), ("bfloat16", "float32")):
        made = config(f"dtype={dtype}", "threads=1")
        found = bench._rates(made, "cpu", 1e9, 0.01)
        assert found.other_dtype == other

"""The built-in run with tiny numbers, in this process, as often as a key needs it.

configure(beta=0.1)         a checked config, as from a file with that line
assembled(temperature=0.5)  the moving parts that such a config becomes
ran(save_steps=1)           a whole run; its folder
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from surefoot.config.load import LoadedConfig, config_from_values
from surefoot.guards.reward_values import RewardValue, parse_reward
from surefoot.rewards.pool import RewardJob

TINY: dict[str, Any] = dict(
    model="pebble", tasks="builtin:sums", num_tasks=200, tasks_per_step=2, num_generations=4, max_completion_length=4,
    eval_tasks=8, preflight_tasks=0, reward_workers=1, threads=1, max_steps=1, learning_rate=1e-3, device="cpu",
    probe_reward_tasks=0,
)  # fmt: skip


class PoolHere:
    """Calls reward functions in this process: forked workers are not what these tests are about."""

    def __init__(self, functions: Any) -> None:
        self.functions = functions

    def describe_failures(self) -> dict[str, tuple[int, str]]:
        return {}

    def score(self, jobs: Sequence[RewardJob]) -> list[dict[str, RewardValue]]:
        rows: list[dict[str, RewardValue]] = []
        for job in jobs:
            values = {
                name: function(prompts=job.prompts, completions=job.completions, **job.columns)
                for name, function in self.functions.items()
            }
            rows += [{name: parse_reward(column[i]) for name, column in values.items()} for i in range(job.size)]
        return rows

    def close(self) -> None: ...


@dataclass(frozen=True)
class Folder:
    """A finished run as its reader sees it."""

    root: Path
    exit_code: int

    @property
    def metrics(self) -> list[dict[str, float]]:
        return [json.loads(line) for line in (self.root / "metrics.jsonl").read_text().splitlines()]

    @property
    def evaluated(self) -> list[float]:
        return [row["step"] for row in self.metrics if "eval_n" in row]

    @property
    def logged(self) -> list[float]:
        return [row["step"] for row in self.metrics if "eval_n" not in row]

    @property
    def verdict(self) -> dict[str, Any]:
        return dict(json.loads((self.root / "verdict.json").read_text()))

    def names(self, folder: str) -> list[str]:
        return sorted(path.name for path in (self.root / folder).iterdir())

    def rollouts(self, step: int) -> list[dict[str, Any]]:
        """Without what a clock made."""
        rows = [json.loads(line) for line in (self.root / f"rollouts/step_{step}.jsonl").read_text().splitlines()]
        return [{name: value for name, value in row.items() if not name.endswith("seconds")} for row in rows]


@pytest.fixture(autouse=True)
def _torch_as_it_was(one_thread: None) -> Iterator[None]:
    """A run sets threads, kernels and one environment variable for its process; the next test is not part of it."""
    import torch

    strict, threads = torch.are_deterministic_algorithms_enabled(), torch.get_num_threads()
    workspace = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    yield
    torch.use_deterministic_algorithms(strict)
    torch.set_num_threads(threads)
    if workspace is None:
        os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


@pytest.fixture
def configure(tmp_path: Path) -> Callable[..., LoadedConfig]:
    """`configure(**keys)`; the key of a table is written `engine__rows`. Paths are relative to `tmp_path`."""

    def make(**keys: Any) -> LoadedConfig:
        dotted = {name.replace("__", "."): value for name, value in keys.items()}
        return config_from_values(TINY | dotted, source="a test", base=tmp_path)

    return make


@pytest.fixture
def assembled(configure: Callable[..., LoadedConfig]) -> Iterator[Callable[..., Any]]:
    """`assembled(**keys)`: `run.build.Parts`; unless told otherwise the weights are published, which computes."""
    made: list[Any] = []

    def make(*, published: bool = True, **keys: Any) -> Any:
        from surefoot.run.build import build
        from surefoot.run.inputs import read_inputs

        loaded = configure(**keys)
        inputs = read_inputs(loaded.config, loaded.base)
        parts = build(loaded.config, loaded.base, inputs, PoolHere(inputs.functions))  # type: ignore[arg-type]
        if published:
            parts.runtime.publish(parts.learner.weights(), 0)
        made.append(parts)
        return parts

    yield make
    for parts in made:
        parts.runtime.engine.close()  # its thread; the rest has none here


@pytest.fixture
def ran(
    configure: Callable[..., LoadedConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Folder]:
    """`ran(**keys)`: trains in `tmp_path`, reward workers and all; the folder that is left."""
    count = 0

    def run(**keys: Any) -> Folder:
        nonlocal count
        from surefoot.report.view import PlainView
        from surefoot.run.session import train

        count += 1
        monkeypatch.chdir(tmp_path)
        outcome = train(configure(**({"output_dir": f"run_{count}"} | keys)), view=PlainView(1))
        return Folder(outcome.run_dir, outcome.exit_code)

    return run


@pytest.fixture
def rewards(tmp_path: Path) -> Callable[[str], None]:
    """`rewards("def f(...): ...")` writes `r.py`, under a fresh module name, beside the config."""

    def write(text: str) -> None:
        (tmp_path / "r.py").write_text(text)

    return write

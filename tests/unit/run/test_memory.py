"""`surefoot memory` and `memory/peak`: through the real command, a real measurement and a real run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command import surefoot

from surefoot.config.load import load_config
from surefoot.errors import InvariantError
from surefoot.learner.footprint import ModelShape, Work
from surefoot.run import memory_child, memory_profile
from surefoot.run.memory_profile import memory_table
from surefoot.system.text import size

ROW = ["memory", "model=pebble", "tasks=builtin:sums", "device=cpu", "--batches", "8", "--accumulations", "1"]
SHAPE = ModelShape(1_095_680, 4, 128, 576, 4, 2, 32, 103)


def test_one_row_is_measured_in_a_process_of_its_own_and_told_as_json(tmp_path: Path) -> None:
    """The prediction within a factor of two and a half: of so small a model, allocators and libraries are a good part."""
    done = surefoot(*ROW, "--lengths", "200", "--json", cwd=tmp_path)
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert found["metadata"] | {"measured": 1, "rows": 1, "device": "cpu"} == found["metadata"]
    (row,) = found["results"]
    assert (row["batch"], row["accumulation"]) == (8, 1)
    assert row["peak"] == row["measured"] > 50e6
    assert 0.4 < row["predicted"] / row["measured"] < 2.0
    assert [each["gigabytes"] for each in found["recommendations"]] == [24, 80, 141]
    assert list(tmp_path.iterdir()) == [], "nothing is written"


def test_a_model_alone_is_enough(tmp_path: Path) -> None:
    words = ["--predict", "--lengths", "8", "--batches", "8", "--accumulations", "1", "--json"]
    done = surefoot("memory", "pebble", *words, cwd=tmp_path)
    assert done.code == 0, done.err
    assert json.loads(done.out)["results"] == json.loads(surefoot("memory", *words, cwd=tmp_path).out)["results"]
    assert surefoot("memory", "nowhere.toml", *words, cwd=tmp_path).code == 2


def test_when_memory_runs_out_in_every_row_the_command_fails_and_says_so(tmp_path: Path) -> None:
    env = {"SUREFOOT_FAILPOINTS": "memory.before_learn=raise:MemoryError"}
    done = surefoot(*ROW, "--lengths", "8", cwd=tmp_path, env=env)
    assert done.code == 1, done.out
    assert "failed" in done.out
    assert "MemoryError" in done.out


def test_a_measurement_that_the_kernel_ended_is_a_failed_row_with_the_signals_name(tmp_path: Path) -> None:
    env = {"SUREFOOT_FAILPOINTS": "memory.before_learn=kill"}
    done = surefoot(*ROW, "--lengths", "8", cwd=tmp_path, env=env)
    assert done.code == 1, done.out
    assert "failed" in done.out
    assert "ended by SIGKILL" in done.out


def test_a_row_that_succeeds_is_enough_and_one_that_was_only_predicted_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = load_config(None, []).config
    answers: list[dict[str, Any]] = [{"error": "exit 1: out of memory"}, {"peak": 5 << 20}]
    monkeypatch.setattr(memory_profile, "run_cell", lambda *a, **k: answers.pop(0))
    table = memory_table(config, SHAPE, 9, "cpu", lengths=[16], batches=[8], accumulations=[1, 2])
    assert [(row.failed, row.measured) for row in table.rows] == [(True, None), (False, 5 << 20)]
    assert table.exit_code == 0
    assert any("out of memory" in line for line in table.lines())
    large = ModelShape(135_000_000, 30, 576, 1536, 9, 3, 64, 49_152)
    guessed = memory_table(config, large, 9, "cpu", lengths=[16], batches=[8], accumulations=[1])
    assert (guessed.exit_code, guessed.wanted, answers) == (0, 0, []), "nobody was asked to measure it"
    assert "a CPU measures models of at most" in guessed.rows[0].why


def test_a_device_that_reads_nothing_after_giving_memory_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_child, "_in_use", lambda device: 0)
    with pytest.raises(InvariantError, match="reads 0 bytes in use"):
        memory_child.measure(SHAPE, Work(groups=1, siblings=2, prompt=4, completion=4, rows=2), None)


def test_what_is_measured_samples_and_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peak without sampling would be the peak of half of a step."""
    asked: list[int] = []

    def counting(*args: Any, **kwargs: Any) -> Any:
        engine = made(*args, **kwargs)
        real = engine.generate

        def generate(requests: Any) -> Any:
            asked.append(len(requests))
            return real(requests)

        engine.generate = generate
        return engine

    made = memory_child.embedded_engine
    monkeypatch.setattr(memory_child, "embedded_engine", counting)
    found = memory_child.measure(memory_child.TINY, Work(groups=1, siblings=2, prompt=4, completion=4, rows=2), None)
    assert asked == [2] * memory_child.STEPS
    assert {"made", "sampling", "stepping", "learning"} <= found["phases"].keys()


@pytest.mark.parametrize(
    ("words", "device", "copies"),
    [
        ([], "cpu", 1), ([], "cuda", 1), (["cuda_kernels=false"], "cuda", 0), ([], "mps", 0),
        (["engine.kind=transformers"], "cpu", 1), (["max_staleness=2", "importance_sampling_correction=true"], "cpu", 2),
        (["runtime.kind=ray", "runtime.engines=3"], "cpu", 5),
    ],
)  # fmt: skip
def test_copies_of_the_weights_are_those_of_the_engines_and_of_the_version_in_force(
    words: list[str], device: str, copies: int
) -> None:
    assert memory_profile.engine_copies(load_config(None, words).config, device) == copies


def test_what_is_sampled_here_has_rows_here_and_an_adapter_leaves_the_fused_path() -> None:
    def work(*words: str, device: str = "cpu", **more: Any) -> Work:
        return memory_profile.work_of_config(load_config(None, list(words)).config, 9, device, **more)

    assert work("tasks_per_step=8", "num_generations=4").rows == 32
    assert work("tasks_per_step=80", "num_generations=8").rows == memory_profile.MAX_ROWS
    assert work("engine.rows=5").rows == 5
    assert work("runtime.kind=ray").rows == 0, "those of a cluster's engines are elsewhere"
    adapter = memory_profile.AdapterSize(10, 20, 5)
    assert (work(device="cuda").fused, work().fused, work("cuda_kernels=false", device="cuda").fused) == (True, 0, 0)
    held = work(device="cuda", adapter=adapter)
    assert (held.fused, held.adapter, held.merged, held.packed) == (False, 10, 20, 5)
    assert (work().adapter, work().merged, work().packed) == (None, 0, 0)


def test_a_device_on_which_nothing_fits_is_told_so_with_the_least() -> None:
    shape = ModelShape(70_000_000_000, 80, 8192, 28_672, 64, 8, 128, 128_256)
    table = memory_table(load_config(None, ["dtype=bfloat16"]).config, shape, 64, "cpu", measures=False)
    assert not any(each.fits for each in table.advice)
    least = table.advice[0].predicted
    assert table.advice[0].line() == f"  24 GB  does not fit; the least is about {size(least)}"
    assert least > 70e9 * 2


@pytest.mark.parametrize("words", [["--lengths", "0"], ["--batches", "8,x"], ["--accumulations", "-1"]], ids=str)
def test_numbers_that_are_none_are_refused_by_name(words: list[str], tmp_path: Path) -> None:
    done = surefoot("memory", "model=pebble", "tasks=builtin:sums", *words, cwd=tmp_path)
    assert done.code == 2
    assert words[0] in done.err


def test_larger_devices_take_more_and_the_least_that_helps_is_recommended() -> None:
    """Of a shape of 1.7 billion parameters in bfloat16."""
    words = ["dtype=bfloat16", "tasks_per_step=16", "num_generations=8", "max_completion_length=1024"]
    shape = ModelShape(1_720_574_976, 28, 2048, 6144, 16, 8, 128, 151_936, qk_norm=True)
    table = memory_table(load_config(None, words).config, shape, 256, "cpu", measures=False)
    small, middle, large = table.advice
    assert not small.fits, "weights, masters and gradients alone are 17 GB, moments come on top"
    assert middle.fits
    assert large.fits
    assert large.batch >= middle.batch > 0
    assert large.predicted <= 141e9
    assert middle.predicted <= 80e9


@pytest.mark.config_key("gradient_checkpointing")
def test_every_row_of_metrics_has_the_peak_and_what_was_decided(tmp_path: Path) -> None:
    words = ["max_steps=2", "tasks_per_step=2", "num_generations=4", "eval_tasks=8", "preflight_tasks=0"]
    done = surefoot("train", *words, "gradient_checkpointing=true", "guard.mode=off", "device=cpu", cwd=tmp_path)
    rows = [row for row in done.metrics if "loss" in row]
    assert len(rows) == 2, done.err
    assert all(100e6 < row["memory/peak"] < 100e9 for row in rows), "resident bytes of a process with torch in it"
    assert rows[1]["memory/peak"] >= rows[0]["memory/peak"], "a process cannot forget its peak"
    assert [row["memory/recomputes"] for row in rows] == [1.0, 1.0]

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from surefoot.harness.suites.manifest import Recipe
from surefoot.harness.suites.plan import Code, Trial, command_of, config_hash, env_of, gpu_hours

CODE = Code("c" * 40, None)
HERE = Path("/snap")


def trial(**changes: Any) -> Trial:
    seed = changes.pop("seed", None)
    extra = changes.pop("extra_args", ())
    given: dict[str, Any] = dict(name="one", max_steps=10, steps_per_run=10, minutes=30.0, checks=("x",)) | changes
    return Trial("try", Recipe(**given), seed, Path("/repo"), Path("/out/one"), extra)


def words(t: Trial, number: int = 1) -> tuple[str, ...]:
    return command_of(t, number, CODE, HERE, "py")


def test_gpu_hours_count_nodes_gpus_runs_minutes_and_seeds() -> None:
    recipe = trial(nodes=4, gpus_per_node=8, max_steps=20, steps_per_run=10, minutes=30.0, seeds=(1, 2, 3)).recipe
    assert gpu_hours(recipe) == 4 * 8 * 2 * 0.5 * 3
    assert gpu_hours(trial(minutes=600.0).recipe) == 0


def test_our_own_trainer_gets_config_folder_steps_and_seed() -> None:
    plain = ("py", "-m", "surefoot", "train", "output_dir=/out/one/run", "max_steps=10")
    assert words(trial()) == plain
    assert words(trial(config="c/a.toml", seeds=(7,), seed=7)) == (
        *plain[:4], "/snap/c/a.toml", *plain[4:], "seed=7",
    )  # fmt: skip


def test_only_known_placeholders_are_filled_and_only_once() -> None:
    command = ("t", '{"a": {"b": 1}}', "{run}{seed}", "{nonsense}", "{commit}", "{max_steps}/{steps}")
    filled = words(trial(command=command, seed=3, seeds=(3,)))
    assert filled == ("t", '{"a": {"b": 1}}', "/out/one/run3", "{nonsense}", "c" * 40, "10/10")


def test_extra_words_come_last_and_are_not_touched() -> None:
    assert words(trial(command=("t",), extra_args=("a b", "{run}", "'\"$x")))[1:] == ("a b", "{run}", "'\"$x")


def test_the_first_run_has_no_resume_word_and_later_ones_do() -> None:
    chain = trial(command=("t", "{steps}", "--from={resume}"), max_steps=25, steps_per_run=10)
    assert [words(chain, n) for n in (1, 2, 3)] == [
        ("t", "10"), ("t", "20", "--from=/out/one/run"), ("t", "25", "--from=/out/one/run"),
    ]  # fmt: skip


def test_placeholders_work_in_variables() -> None:
    assert env_of(trial(env={"PYTHONPATH": "{snapshot}/src"}), 1, CODE, HERE, "py") == {"PYTHONPATH": "/snap/src"}


def test_release_words_are_there_only_for_a_release() -> None:
    recipe = trial(release_args=("tag={commit}",)).recipe
    assert "tag=" not in " ".join(words(trial(release_args=("tag={commit}",))))
    release = dataclasses.replace(trial(), recipe=dataclasses.replace(recipe, release=True))
    assert words(release)[-1] == "tag=" + "c" * 40


@pytest.mark.parametrize(
    "change",
    [
        {"max_steps": 11}, {"command": ("t",)}, {"env": {"A": "1"}}, {"seed": 1}, {"extra_args": ("lr=1",)},
        {"container": "i"}, {"steps_per_run": 5}, {"nodes": 2}, {"gpus_per_node": 1}, {"metrics": "x"},
    ],
    ids=str,
)  # fmt: skip
def test_whatever_shapes_the_training_shapes_the_hash(change: dict[str, Any]) -> None:
    assert config_hash(trial(**change)) != config_hash(trial())


def test_the_hash_sees_the_content_of_the_config(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("lr = 1")
    t = dataclasses.replace(trial(config="a.toml"), root=tmp_path)
    before = config_hash(t)
    (tmp_path / "a.toml").write_text("lr = 2")
    assert config_hash(t) != before


def test_checks_and_minutes_are_not_part_of_the_training() -> None:
    assert config_hash(trial(checks=("y",), minutes=1.0)) == config_hash(trial())

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from surefoot.errors import ConfigError, StateError
from surefoot.harness.suites.manifest import Recipe, Suite, find_suites, load_suite, read_suite

GOOD: dict[str, Any] = {"name": "one", "max_steps": 4, "minutes": 5, "checks": ['max(data["x"]) < 1']}


def read(recipe: dict[str, Any] | None = None, **top: Any) -> Suite:
    return read_suite({"recipe": [GOOD | (recipe or {})], **top}, Path("suites/try.toml"), Path())


def problems(recipe: dict[str, Any] | None = None, **top: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read(recipe, **top)
    return [line.strip(" -") for line in caught.value.what.splitlines()[1:]]


def test_defaults_are_one_cpu_machine_and_one_run() -> None:
    (recipe,) = read().recipes
    assert (recipe.nodes, recipe.gpus_per_node, recipe.num_runs, recipe.trials) == (1, 0, 1, (None,))


@pytest.mark.parametrize(
    ("steps", "per_run", "runs"), [(250, 250, 1), (251, 250, 2), (1, 250, 1), (500, 250, 2), (501, 250, 3)]
)
def test_the_number_of_runs_is_rounded_up(steps: int, per_run: int, runs: int) -> None:
    (recipe,) = read({"max_steps": steps, "steps_per_run": per_run, "auto_resume": True}).recipes
    assert recipe.num_runs == runs


@pytest.mark.parametrize("key", ["max_steps", "steps_per_run"])
def test_no_steps_are_refused(key: str) -> None:
    assert problems({key: 0}) == [f"recipe one: {key} is 0, allowed are 1 to 1000000000"]


def test_every_problem_is_reported_at_once_with_the_nearest_key() -> None:
    found = problems(
        {"nodez": 2, "minutes": float("nan"), "max_steps": True, "checks": [], "seeds": [1, 1], "env": {"A B": "x"}},
        gpu_hour=3,
    )
    assert any("unknown key nodez; did you mean nodes?" in line for line in found)
    assert any("unknown key gpu_hour; did you mean gpu_hours?" in line for line in found)
    for key in ("minutes", "max_steps", "checks", "seeds", "env"):
        assert any(f"recipe one: {key} is" in line for line in found), key
    assert len(found) == 7


@pytest.mark.parametrize("key", ["name", "max_steps", "minutes", "checks"])
def test_a_missing_key_is_named(key: str) -> None:
    table = {k: v for k, v in GOOD.items() if k != key}
    with pytest.raises(ConfigError, match=f"{key} is missing"):
        read_suite({"recipe": [table]}, Path("try.toml"), Path())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"nodes": 4, "segment_size": 3}, "segment_size 3 does not divide nodes 4"),
        ({"max_steps": 10, "steps_per_run": 5}, "the command has no {resume}"),
        ({"metrics": "/var/log"}, "must lie inside the run's folder"),
        ({"metrics": "../other"}, "must lie inside the run's folder"),
        ({"name": "a/b"}, "it becomes a folder"),
        ({"name": "a..b"}, "it becomes a folder"),
        ({"checks": ["a", "a"]}, "a check is there twice"),
        ({"command": "surefoot train"}, "a list of texts"),
        ({"command": ["a\0b"]}, "a list of texts"),
        ({"minutes": 0}, "must be above 0"),
        ({"first_step": 2}, "allowed are 0 to 1"),
    ],
)
def test_parts_that_do_not_fit_are_refused(change: dict[str, Any], words: str) -> None:
    assert any(words in line for line in problems(change)), problems(change)


def test_a_segment_that_divides_the_nodes_is_fine() -> None:
    assert read({"nodes": 4, "segment_size": 2}).recipes[0].segment_size == 2


def test_a_chain_is_allowed_with_a_resume_word_or_a_trainer_that_resumes_by_itself() -> None:
    chain = {"max_steps": 10, "steps_per_run": 5}
    assert read(chain | {"command": ["t", "--resume={resume}"]}).recipes[0].num_runs == 2
    assert read(chain | {"auto_resume": True}).recipes[0].num_runs == 2


def test_settings_of_the_suite_are_defaults_of_its_recipes() -> None:
    suite = read({"env": {"B": "2"}}, gpus_per_node=8, env={"A": "1", "B": "1"}, container="img", command=["t"])
    (recipe,) = suite.recipes
    assert (recipe.gpus_per_node, recipe.env, recipe.container, recipe.command) == (
        8,
        {"A": "1", "B": "2"},
        "img",
        ("t",),
    )


def test_two_recipes_of_one_name_are_refused() -> None:
    with pytest.raises(ConfigError, match="recipe one is there 2 times"):
        read_suite({"recipe": [GOOD, GOOD]}, Path("try.toml"), Path())


@pytest.mark.parametrize("content", [b"\xff\xfe", b"name = ", b"[[recipe]\n", b""])
def test_a_file_that_is_no_suite_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "try.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError):
        load_suite(path, tmp_path)


def test_a_missing_file_or_folder_is_missing_state(tmp_path: Path) -> None:
    with pytest.raises(StateError):
        load_suite(tmp_path / "none.toml", tmp_path)
    with pytest.raises(StateError):
        find_suites(tmp_path / "none")


def test_a_broken_deny_pattern_is_refused() -> None:
    assert any("is not a pattern" in line for line in problems(deny=["("]))


def test_the_documentation_lists_every_key(repo: Path) -> None:
    text = (repo / "docs/suites.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"^\| `(\w+)` \|", text, flags=re.MULTILINE))
    keys = {field.name for kind in (Recipe, Suite) for field in dataclasses.fields(kind)}
    keys = keys - {"release", "path", "root", "recipes"} | {"recipe"}
    assert documented == keys

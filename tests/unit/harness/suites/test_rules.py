"""Each rule is broken once, in a copy, and the rule that guards it turns red; nothing else does."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from surefoot.errors import ConfigError
from surefoot.harness.suites import rules
from surefoot.harness.suites.manifest import load_suite
from surefoot.harness.suites.rules import check_suite, refuse_broken

GOOD = """
gpus_per_node = 8
gpu_hours = 16
max_nodes = 2
config_folder = "configs"
[[recipe]]
name = "grpo-tiny-1n8g-ddp"
config = "configs/a.toml"
max_steps = 10
minutes = 120
checks = ['max(data["loss"]) < 1']
"""
OTHER = GOOD.replace("grpo-tiny", "grpo-other")


@pytest.fixture
def consistent(project: Any) -> Any:
    project.write("configs/a.toml", "x = 1\n")
    project.suite(GOOD)
    project.suite(OTHER, "other")
    project.commit()
    return project


def broken_rules(project: Any) -> dict[str, tuple[str, ...]]:
    suite = load_suite(project.root / "suites/try.toml", project.root)
    return {f.rule: f.problems for f in check_suite(suite, project.root / "suites") if f.status != "PASS"}


def replaced(*pairs: tuple[str, str]) -> Callable[[Any], None]:
    def change(project: Any) -> None:
        text = GOOD
        for old, new in pairs:
            assert old in text, old
            text = text.replace(old, new)
        project.suite(text)

    return change


BREAKS: dict[str, tuple[Callable[[Any], Any], str, str]] = {
    "unknown algorithm": (replaced(("grpo-tiny", "gpro-tiny")), "names parse", "algo"),
    "size in the name": (replaced(("tiny-1n8g", "tiny-2n8g")), "names parse", "the name says 2n8g"),
    "config is gone": (lambda p: (p.root / "configs/a.toml").rename(p.root / "b.toml"), "configs exist", "a.toml"),
    "config outside": (replaced(('"configs/a.toml"', '"../a.toml"')), "configs exist", "outside"),
    "other machines": (replaced(("gpus_per_node = 8", "gpus_per_node = 4"), ("max_steps", "gpus_per_node = 8\nmax_steps")), "hardware fits", "machines have 4"),
    "too many nodes": (replaced(("max_nodes = 2", "max_nodes = 1"), ("1n8g", "2n8g"), ("minutes = 120", "nodes = 2\nminutes = 60")), "hardware fits", "may use 1"),
    "budget": (replaced(("minutes = 120", "minutes = 121")), "GPU-hours are within the budget", "16.1333 GPU-hours"),
    "check does not parse": (replaced(("< 1'", "< '")), "checks parse", "check"),
    "in two suites": (lambda p: p.suite(GOOD, "third"), "no recipe is in two suites", "third"),
    "unreadable sibling": (lambda p: p.write("suites/third.toml", "x"), "no recipe is in two suites", "third.toml"),
    "config nobody lists": (lambda p: p.write("configs/b.yaml", "x: 1"), "every config belongs to a recipe", "b.yaml"),
}  # fmt: skip


def test_a_consistent_suite_breaks_no_rule(consistent: Any) -> None:
    assert broken_rules(consistent) == {}


@pytest.mark.parametrize("what", BREAKS)
def test_a_broken_rule_turns_red(consistent: Any, what: str) -> None:
    change, rule, words = BREAKS[what]
    change(consistent)
    found = broken_rules(consistent)
    assert any(words in problem for problem in found.get(rule, ())), found
    others = set(found) - {rule, "files are tracked by git", "every config belongs to a recipe"}
    assert others == set(), found


def test_files_that_git_does_not_know_are_named(consistent: Any) -> None:
    consistent.git("rm", "-q", "--cached", "configs/a.toml", "suites/try.toml")
    (problems,) = broken_rules(consistent).values()
    assert [Path(problem.split(" is not")[0]).name for problem in problems] == ["try.toml", "a.toml"]


def test_a_disabled_recipe_costs_nothing(consistent: Any) -> None:
    consistent.suite(GOOD.replace("minutes = 120", 'minutes = 9999\ndisabled = "no machines"'))
    assert broken_rules(consistent) == {}


def test_free_names_turn_the_name_rule_off(consistent: Any) -> None:
    consistent.suite("free_names = true\n" + GOOD.replace("grpo-tiny-1n8g-ddp", "smoke"))
    assert broken_rules(consistent) == {}


@pytest.mark.parametrize(("name", "recipes", "gpus"), [("nightly", 2, 0), ("gpu", 2, 1)])
def test_our_suites_are_consistent(project: Any, repo: Path, name: str, recipes: int, gpus: int) -> None:
    shutil.copytree(repo / "suites", project.root / "suites")
    project.commit()
    suite = load_suite(project.root / f"suites/{name}.toml", project.root)
    assert (len(suite.recipes), {recipe.gpus_per_node for recipe in suite.recipes}) == (recipes, {gpus})
    assert [f for f in check_suite(suite, project.root / "suites") if f.problems] == []


def test_running_refuses_every_broken_recipe_at_once(consistent: Any) -> None:
    suite = consistent.suite(GOOD.replace("tiny-1n8g", "tiny-2n8g").replace("configs/a", "configs/none"))
    with pytest.raises(ConfigError, match="2 problem"):
        refuse_broken(suite, suite.recipes)


def test_planted_rule_that_never_looks_is_caught(consistent: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "_over_budget", lambda suite: iter(()))
    with pytest.raises(AssertionError):
        test_a_broken_rule_turns_red(consistent, "budget")

"""What has to fit together in a suite beyond its types: each rule, what it found, PASS or FAIL.

Promises   every rule is tried; a rule that cannot be tried has failed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from surefoot.errors import ConfigError, SurefootError
from surefoot.harness import git
from surefoot.harness.suites.manifest import Recipe, Suite, find_suites, load_suite
from surefoot.harness.suites.names import ALGORITHMS, parse_name
from surefoot.harness.suites.plan import gpu_hours
from surefoot.records import Verdict


@dataclass(frozen=True, slots=True)
class Finding:
    """One rule and everything that breaks it."""

    rule: str
    problems: tuple[str, ...]

    @property
    def status(self) -> Verdict:
        """PASS when nothing was found."""
        return Verdict.FAIL if self.problems else Verdict.PASS


def check_suite(suite: Suite, folder: Path) -> list[Finding]:
    """Every rule, for the whole suite; `folder` holds the other suites."""
    others, broken = _others(suite, folder)
    return [
        *_recipe_findings(suite, suite.recipes),
        Finding("no recipe is in two suites", (*broken, *_duplicates(suite, others))),
        Finding("every config belongs to a recipe", tuple(_unlisted(suite, others))),
        Finding("GPU-hours are within the budget", tuple(_over_budget(suite))),
        Finding("files are tracked by git", tuple(untracked(suite, suite.recipes))),
    ]


def refuse_broken(suite: Suite, recipes: Sequence[Recipe]) -> None:
    """Before anything runs: the rules about the recipes themselves, all problems at once."""
    problems = [problem for finding in _recipe_findings(suite, recipes) for problem in finding.problems]
    if problems:
        lines = "".join(f"\n    - {problem}" for problem in problems)
        raise ConfigError(
            f"suite {suite.name} has {len(problems)} problem(s):{lines}",
            "a run that is not the one you meant costs hours",
            f"correct them; surefoot suite check {suite.name} shows every rule",
        )


def _recipe_findings(suite: Suite, recipes: Sequence[Recipe]) -> list[Finding]:
    def over(rule: Callable[[Suite, Recipe], Iterator[str]]) -> tuple[str, ...]:
        return tuple(f"{recipe.name}: {problem}" for recipe in recipes for problem in rule(suite, recipe))

    return [
        Finding("names parse", over(_bad_name)),
        Finding("configs exist", over(_bad_config)),
        Finding("hardware fits", over(_bad_hardware)),
        Finding("checks parse", over(_bad_checks)),
    ]


def _bad_name(suite: Suite, recipe: Recipe) -> Iterator[str]:
    if suite.free_names:
        return
    try:
        name = parse_name(recipe.name, ALGORITHMS | set(suite.algorithms))
    except ConfigError as error:
        yield error.what
        return
    if (name.nodes, name.gpus_per_node) != (recipe.nodes, recipe.gpus_per_node):
        yield (
            f"the name says {name.nodes}n{name.gpus_per_node}g, "
            f"the recipe {recipe.nodes} nodes with {recipe.gpus_per_node} GPUs"
        )


def _bad_config(suite: Suite, recipe: Recipe) -> Iterator[str]:
    if recipe.config is None:
        return
    path = (suite.root / recipe.config).resolve()
    if not path.is_relative_to(suite.root.resolve()):
        yield f"config {recipe.config} lies outside of the repository"
    elif not path.is_file():
        yield f"config {recipe.config} does not exist in {suite.root}"


def _bad_hardware(suite: Suite, recipe: Recipe) -> Iterator[str]:
    if recipe.gpus_per_node != suite.gpus_per_node:
        yield f"gpus_per_node is {recipe.gpus_per_node}, the suite's machines have {suite.gpus_per_node}"
    if recipe.nodes > suite.max_nodes:
        yield f"nodes is {recipe.nodes}, the suite may use {suite.max_nodes}"


def _bad_checks(suite: Suite, recipe: Recipe) -> Iterator[str]:
    from surefoot.harness.checks import parse_check

    for check in recipe.checks:
        try:
            parse_check(check)
        except ConfigError as error:
            yield f"check {check!r}: {error.what.splitlines()[0]}"


def _others(suite: Suite, folder: Path) -> tuple[list[Suite], list[str]]:
    """The other suites of the folder, and what is wrong with those that cannot be read."""
    found, broken = [], []
    for path in find_suites(folder):
        if path.resolve() == suite.path.resolve():
            continue
        try:
            found.append(load_suite(path, suite.root))
        except SurefootError as error:
            broken.append(f"{path.name} cannot be read, so nobody can tell: {error.what.splitlines()[0]}")
    return found, broken


def _duplicates(suite: Suite, others: Iterable[Suite]) -> Iterator[str]:
    mine = {recipe.name for recipe in suite.recipes}
    for other in others:
        for recipe in other.recipes:
            if recipe.name in mine:
                yield f"{recipe.name} is in {suite.name} and in {other.name}"


def _unlisted(suite: Suite, others: Iterable[Suite]) -> Iterator[str]:
    if suite.config_folder is None:
        return
    folder = suite.root / suite.config_folder
    if not folder.is_dir():
        yield f"config_folder {suite.config_folder} does not exist"
        return
    used = {(suite.root / recipe.config).resolve() for s in (suite, *others) for recipe in s.recipes if recipe.config}
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".toml", ".yaml", ".yml") and path.resolve() not in used:
            yield f"{path.relative_to(suite.root)} belongs to no recipe"


def _over_budget(suite: Suite) -> Iterator[str]:
    hours = sum(gpu_hours(recipe) for recipe in suite.recipes if recipe.disabled is None)
    if hours > suite.gpu_hours:
        yield f"{hours:g} GPU-hours, the budget is {suite.gpu_hours:g}"


def untracked(suite: Suite, recipes: Iterable[Recipe]) -> Iterator[str]:
    """The manifest and configs that git does not know: whoever checks the commit out would not have them."""
    top = git.root_of(suite.path.parent)
    if top is None:
        yield f"{suite.path} is not in a git work tree"
        return
    paths = [suite.path, *dict.fromkeys(suite.root / r.config for r in recipes if r.config)]
    for path in paths:
        done = git.run_git(
            path.parent if path.parent.is_dir() else top, "ls-files", "--error-unmatch", "--", str(path), check=False
        )
        if done.returncode:
            yield f"{path} is not tracked: git add it"

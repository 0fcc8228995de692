"""What has to fit together in a suite beyond its types: each rule, what it found, PASS or FAIL.

Promises   every rule is tried; a rule that cannot be tried has failed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from surefoot_harness.errors import ConfigError, SurefootError
from surefoot_harness.own_command import own_name
from surefoot_harness.suites.manifest import Recipe, Suite, find_suites, load_suite
from surefoot_harness.suites.plan import gpu_hours
from surefoot_harness.system import git
from surefoot_harness.verdict import Verdict

# -- Recipe names: `algo-model-NnMg-strategy[-modifiers][-long][.vN]`, parsed and put together again
# grpo-llama3.1-8b-instruct-4n8g-fsdp2tp1-long.v3
# algo | model            | size | strategy | long | version


ALGORITHMS = frozenset(
    "grpo dapo gspo gdpo ppo rloo reinforce dpo sft rm distillation vlm_grpo vlm_sft audio_grpo prorlv2".split()
)
"""Known first parts; a suite can add its own with `algorithms = [...]`."""

PATTERN = "algo-model-NnMg-strategy[-modifiers][-long][.vN]"
_SIZE = re.compile(r"([0-9]+)n([0-9]+)g")
_MODEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+]*")
_STRATEGY = re.compile(r"[a-z][a-z0-9_]*")
_MODIFIER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_+]*")
_VERSION = re.compile(r"(.*)\.v([0-9]+)", flags=re.DOTALL)


@dataclass(frozen=True, slots=True)
class RecipeName:
    """A recipe's name in parts.

    Example:
        >>> name = parse_name("grpo-llama3.1-8b-4n8g-fsdp2tp1-long.v3")
        >>> name.model, name.nodes, name.gpus_per_node, name.long, name.version
        ('llama3.1-8b', 4, 8, True, 3)
        >>> str(name)
        'grpo-llama3.1-8b-4n8g-fsdp2tp1-long.v3'
    """

    algo: str
    model: str
    nodes: int
    gpus_per_node: int
    strategy: str
    modifiers: tuple[str, ...] = ()
    long: bool = False
    version: int | None = None
    """Raised only when convergence is expected to change; None is the first one."""

    def __str__(self) -> str:
        parts = [self.algo, self.model, f"{self.nodes}n{self.gpus_per_node}g", self.strategy, *self.modifiers]
        version = "" if self.version is None else f".v{self.version}"
        return "-".join([*parts, *(["long"] if self.long else [])]) + version


def parse_name(text: str, algorithms: Collection[str] = ALGORITHMS) -> RecipeName:
    """The parts of a recipe's name; what does not fit is a `ConfigError` that names the part."""
    body, version = _split_version(text)
    parts = body.split("-")
    if "" in parts:
        raise _refused(text, "dashes", "two dashes in a row, or one at an end")
    sizes = [i for i, part in enumerate(parts) if _SIZE.fullmatch(part)]
    if len(sizes) != 1:
        raise _refused(text, "size", f"{len(sizes)} parts look like 1n8g, exactly one is needed")
    before, after = parts[: sizes[0]], parts[sizes[0] + 1 :]
    nodes, gpus = _size(text, parts[sizes[0]])
    algo, model = _front(text, before, algorithms)
    strategy, modifiers, long = _back(text, after)
    return RecipeName(algo, model, nodes, gpus, strategy, modifiers, long, version)


def _split_version(text: str) -> tuple[str, int | None]:
    match = _VERSION.fullmatch(text)
    if match is None:
        return text, None
    if match[2].startswith("0"):
        raise _refused(text, "version", f".v{match[2]} must count from 1, without leading zeros")
    return match[1], int(match[2])


def _size(text: str, part: str) -> tuple[int, int]:
    match = _SIZE.fullmatch(part)
    assert match is not None, "the caller found the part by this pattern"
    if any(number != str(int(number)) for number in match.groups()) or int(match[1]) < 1:
        raise _refused(text, "size", f"{part} needs at least one node, and no leading zeros")
    return int(match[1]), int(match[2])


def _front(text: str, parts: list[str], algorithms: Collection[str]) -> tuple[str, str]:
    if not parts or parts[0] not in algorithms:
        first = parts[0] if parts else ""
        raise _refused(text, "algo", f"{first!r} is not one of {', '.join(sorted(algorithms))}")
    if len(parts) < 2:
        raise _refused(text, "model", "there is none between algo and size")
    for part in parts[1:]:
        if not _MODEL.fullmatch(part):
            raise _refused(text, "model", f"{part!r} has characters other than letters, digits, dot, plus, underscore")
    return parts[0], "-".join(parts[1:])


def _back(text: str, parts: list[str]) -> tuple[str, tuple[str, ...], bool]:
    long = len(parts) > 1 and parts[-1] == "long"
    parts = parts[:-1] if long else parts
    if not parts:
        raise _refused(text, "strategy", "there is none after the size")
    if not _STRATEGY.fullmatch(parts[0]) or parts[0] == "long":
        raise _refused(text, "strategy", f"{parts[0]!r} should be like fsdp2tp1: lower case, a letter first")
    for part in parts[1:]:
        if part == "long":
            raise _refused(text, "long", "it stands last, once")
        if not _MODIFIER.fullmatch(part):
            raise _refused(text, "modifiers", f"{part!r} has characters other than letters, digits, plus, underscore")
    return parts[0], tuple(parts[1:]), long


def _refused(text: str, part: str, why: str) -> ConfigError:
    return ConfigError(
        f"recipe name {text!r}: {part}: {why}",
        "the name tells what runs where, and other tools read it",
        f"follow {PATTERN}, such as grpo-llama3.1-8b-instruct-4n8g-fsdp2tp1-long.v3",
    )


# -- What has to fit together in a suite beyond its types: each rule, what it found, PASS or FAIL -


@dataclass(frozen=True, slots=True)
class RuleFinding:
    """One rule and everything that breaks it."""

    rule: str
    problems: tuple[str, ...]

    @property
    def status(self) -> Verdict:
        """PASS when nothing was found."""
        return Verdict.FAIL if self.problems else Verdict.PASS


def check_suite(suite: Suite, folder: Path) -> list[RuleFinding]:
    """Every rule, for the whole suite; `folder` holds the other suites."""
    others, broken = _others(suite, folder)
    return [
        *_recipe_findings(suite, suite.recipes),
        RuleFinding("no recipe is in two suites", (*broken, *_duplicates(suite, others))),
        RuleFinding("every config belongs to a recipe", tuple(_unlisted(suite, others))),
        RuleFinding("GPU-hours are within the budget", tuple(_over_budget(suite))),
        RuleFinding("files are tracked by git", tuple(untracked(suite, suite.recipes))),
    ]


def refuse_broken(suite: Suite, recipes: Sequence[Recipe]) -> None:
    """Before anything runs: the rules about the recipes themselves, all problems at once."""
    problems = [problem for finding in _recipe_findings(suite, recipes) for problem in finding.problems]
    if problems:
        lines = "".join(f"\n    - {problem}" for problem in problems)
        raise ConfigError(
            f"suite {suite.name} has {len(problems)} problem(s):{lines}",
            "a run that is not the one you meant costs hours",
            f"correct them; {own_name()} suite check {suite.name} shows every rule",
        )


def _recipe_findings(suite: Suite, recipes: Sequence[Recipe]) -> list[RuleFinding]:
    def over(rule: Callable[[Suite, Recipe], Iterator[str]]) -> tuple[str, ...]:
        return tuple(f"{recipe.name}: {problem}" for recipe in recipes for problem in rule(suite, recipe))

    return [
        RuleFinding("names parse", over(_bad_name)),
        RuleFinding("configs exist", over(_bad_config)),
        RuleFinding("hardware fits", over(_bad_hardware)),
        RuleFinding("checks parse", over(_bad_checks)),
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
    from surefoot_harness.checks import parse_check

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

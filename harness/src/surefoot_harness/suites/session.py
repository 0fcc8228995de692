"""What the `suite` commands ask for: find a suite, choose recipes, estimate, run, write results.

Read next: `run.py` and `run.py`.
"""

from __future__ import annotations

import dataclasses
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from surefoot_harness.errors import ConfigError, StateError
from surefoot_harness.own_command import own_name
from surefoot_harness.suites import verdicts
from surefoot_harness.suites.executors import DockerExecutor, Executor, LocalExecutor, SlurmExecutor, tail
from surefoot_harness.suites.manifest import Overrides, Recipe, Suite, apply, find_suites, load_suite
from surefoot_harness.suites.plan import Trial, command_of, gpu_hours, identify, prepare_out, snapshot_folder, trials_of
from surefoot_harness.suites.rules import refuse_broken
from surefoot_harness.suites.run import (
    Say,
    TrialOutcome,
    cluster_trials,
    exit_code_of,
    run_trials,
    settings_from_env,
    watch_interval,
)
from surefoot_harness.system import git
from surefoot_harness.tables import table
from surefoot_harness.verdict import Verdict

EXECUTORS = ("local", "docker", "slurm")
BISECT_DIR, BISECT_OUT = "SUREFOOT_BISECT_DIR", "suites"
"""The variable by which `surefoot bisect` names the folder of a commit, and where in it the runs of a suite go."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SuiteRequest:
    """A suite, the recipes of it, and what the caller changed."""

    suite: Suite
    recipes: tuple[Recipe, ...]
    out: Path
    executor: str = "local"
    overrides: Overrides = field(default_factory=Overrides)
    extra_args: tuple[str, ...] = ()

    def trials(self, environ: Mapping[str, str]) -> list[Trial]:
        """Recipes times seeds, as the executor will see them."""
        recorded = self.overrides.recorded()
        if self.executor == "slurm":
            return cluster_trials(self.suite, self.recipes, self.out, environ, self.extra_args, recorded)
        image = environ.get("CONTAINER") or None if self.executor == "docker" else None
        recipes = [  # the verdict names the container that was used, not one that could have been
            dataclasses.replace(recipe, container=(recipe.container or image) if self.executor == "docker" else None)
            for recipe in self.recipes
        ]
        return trials_of(self.suite, recipes, self.out, self.extra_args, recorded)


def suites_folder(given: Path | None, cwd: Path) -> tuple[Path, Path]:
    """Where the manifests are, and the top of their repository."""
    if given is not None:
        folder = cwd / given
        return folder, (git.root_of(folder) if folder.is_dir() else None) or folder.parent
    top = git.root_of(cwd) or cwd
    return top / "suites", top


def find_suite(name: str, given: Path | None, cwd: Path) -> Suite:
    """The suite of that name, `suites/NAME.toml`; or the one in a manifest that is named by its path."""
    if name.endswith(".toml") or "/" in name:
        return _suite_at(name, given, cwd)
    folder, root = suites_folder(given, cwd)
    known = [path.stem for path in find_suites(folder)]
    if name not in known:
        raise ConfigError(
            f"there is no suite {name!r} in {folder}",
            f"there are: {', '.join(known) or 'none'}",
            f"see {own_name()} suite list",
        )
    return load_suite(folder / f"{name}.toml", root)


def _suite_at(name: str, given: Path | None, cwd: Path) -> Suite:
    if given is not None:
        raise ConfigError(
            f"{name} is a path, and --suites {given} names a folder", "one of them says where the suite is", "drop one"
        )
    path = cwd / name
    if not path.is_file() or path.suffix != ".toml":
        raise ConfigError(
            f"{name} is not a suite's file",
            "a suite is a TOML file",
            f"{own_name()} suite run suites/NAME.toml, or NAME",
        )
    return load_suite(path, git.root_of(path.parent) or path.parent)


def make_request(
    suite: Suite, names: Sequence[str], overrides: Overrides, extra_args: Sequence[str], executor: str,
    out: Path | None, environ: Mapping[str, str] | None = None,
) -> SuiteRequest:  # fmt: skip
    """Choose recipes and change them as asked; refuses what is broken before anything happens."""
    if executor not in EXECUTORS:
        raise ConfigError(
            f"there is no executor {executor!r}", f"there are {', '.join(EXECUTORS)}", "choose one of these"
        )
    chosen = [suite.recipe(name) for name in dict.fromkeys(names)] if names else list(suite.recipes)
    if not names:
        chosen = [recipe for recipe in chosen if recipe.disabled is None]
    if not chosen:
        raise ConfigError(
            f"every recipe of {suite.name} is disabled", "nothing would be judged", "name one with --recipe"
        )
    refuse_broken(suite, chosen)  # as written: an override may change sizes, the name stays
    changed = apply(overrides, chosen)
    refuse_broken_checks(suite, changed)
    folder = out if out is not None else out_folder(suite.root, environ or {})
    return SuiteRequest(
        suite=suite, recipes=tuple(changed), out=(Path.cwd() / folder).absolute(), executor=executor,
        overrides=overrides, extra_args=tuple(extra_args),
    )  # fmt: skip


def out_folder(root: Path, environ: Mapping[str, str]) -> Path:
    """Where runs go unless told otherwise; under `surefoot bisect` each commit has a folder of its own."""
    own = environ.get(BISECT_DIR)
    return Path(own) / BISECT_OUT if own else root / "runs" / "suites"


def refuse_broken_checks(suite: Suite, recipes: Sequence[Recipe]) -> None:
    """Checks that came in by --relax must make sense as well."""
    from surefoot_harness.checks import parse_check

    for recipe in recipes:
        for check in recipe.checks:
            parse_check(check)


def estimate(recipes: Sequence[Recipe]) -> str:
    """Hardware, steps, time and GPU-hours of recipes, with the total."""
    rows = [
        [
            recipe.name, f"{recipe.nodes} x {recipe.gpus_per_node}", str(recipe.max_steps), str(recipe.num_runs),
            str(len(recipe.trials)), f"{recipe.minutes:g}", f"{gpu_hours(recipe):g}",
        ]
        for recipe in recipes
    ]  # fmt: skip
    columns = ["Recipe", "Nodes x GPUs", "Steps", "Runs", "Seeds", "Minutes", "GPU-hours"]
    total = sum(gpu_hours(recipe) for recipe in recipes)
    return f"{table('Plan', columns, rows)}\n\ntotal  {total:g} GPU-hours"


def list_suites(folder: Path, root: Path) -> tuple[str, list[str]]:
    """Every recipe of every suite as a table, and what is wrong with suites that cannot be read."""
    rows, broken = [], []
    paths = find_suites(folder)
    if not paths:
        raise StateError(f"{folder} holds no suite", "suites are files NAME.toml there", "see docs/suites.md")
    for path in paths:
        try:
            suite = load_suite(path, root)
        except (ConfigError, StateError) as error:
            broken.append(f"{path.name}: {error}")
            continue
        for recipe in suite.recipes:
            rows.append([
                suite.name, recipe.name, f"{recipe.nodes} x {recipe.gpus_per_node}", str(recipe.max_steps),
                f"{gpu_hours(recipe):g}", str(len(recipe.checks)), recipe.disabled or "",
            ])  # fmt: skip
    columns = ["Suite", "Recipe", "Nodes x GPUs", "Steps", "GPU-hours", "Checks", "Disabled"]
    return table(f"Suites in {folder}", columns, rows), broken


def describe(request: SuiteRequest, environ: Mapping[str, str]) -> str:
    """The dry run: what would happen, in words. Creates nothing."""
    code = identify(request.suite.root)
    snapshot = snapshot_folder(request.out) / code.name
    python = {"local": LocalExecutor.python}.get(request.executor, "python")
    lines = [estimate(request.recipes), "", f"code      {code.name}"]
    for trial in request.trials(environ):
        lines += [f"trial     {trial.label}", f"  folder  {trial.folder}"]
        lines += [
            f"  run {n}   {' '.join(command_of(trial, n, code, snapshot, python))}"
            for n in range(1, trial.recipe.num_runs + 1)
        ]
        lines += [f"  check   {check}" for check in trial.recipe.checks]
    return "\n".join([*lines, "", "dry run: nothing was created"])


def run(
    request: SuiteRequest, environ: Mapping[str, str], say: Say, *, fresh: bool, results_folder: Path | None
) -> int:
    """Run and judge; the exit code."""
    trials = request.trials(environ)
    executor = _executor(request, environ)
    reds: list[str] = []
    if results_folder is not None:
        verdicts.refuse_stale(results_folder, [trial.label for trial in trials])
        prepare_out(results_folder)
    if request.executor == "local" and any(trial.recipe.nodes > 1 for trial in trials):
        say("note      the local executor uses this machine only, whatever nodes says")
    began = time.monotonic()

    def keep(outcome: TrialOutcome) -> None:
        nonlocal began
        if results_folder is not None:
            record = verdicts.write_part(results_folder, _part(outcome, time.monotonic() - began), request.suite.deny)
            if record["required"] and record["warnings"]:
                reds.append(f"{record['name']}: warning on the deny list: {record['warnings'][0]}")
        began = time.monotonic()

    outcomes = run_trials(trials, request.out, executor, say, fresh=fresh, on_outcome=keep)
    say("")
    say(_summary(outcomes))
    for red in reds:
        say(f"FAIL      {red}")
    return exit_code_of(outcomes, len(trials)) or int(bool(reds))


def _executor(request: SuiteRequest, environ: Mapping[str, str]) -> Executor:
    tool = {"docker": "docker", "slurm": "sbatch"}.get(request.executor)
    if tool is not None and shutil.which(tool) is None:
        raise ConfigError(
            f"{tool} is not installed", f"the {request.executor} executor needs it", "use --executor local"
        )
    if request.executor == "docker":
        bare = [recipe.name for recipe in request.recipes if not (recipe.container or environ.get("CONTAINER"))]
        if bare:
            raise ConfigError(
                f"no container for {', '.join(bare)}",
                "docker needs an image",
                "set CONTAINER, or container in the manifest",
            )
        return DockerExecutor(environ.get("CONTAINER") or None)
    if request.executor == "slurm":
        return SlurmExecutor(settings_from_env(environ), watch_interval(environ))
    return LocalExecutor()


def _part(outcome: TrialOutcome, seconds: float) -> verdicts.Part:
    trial, record = outcome.trial, outcome.record
    return verdicts.Part(
        name=trial.label, verdict=Verdict(record["status"]), return_code=outcome.exit_code, command=record["command"],
        duration=seconds, required=trial.recipe.required,
        stdout=tail(trial.log, verdicts.LONGEST),
        stderr="\n".join(record["reasons"]),
    )  # fmt: skip


def _summary(outcomes: Sequence[TrialOutcome]) -> str:
    rows = []
    for outcome in outcomes:
        steps = f"{outcome.record['steps_reached']} of {outcome.record['max_steps']}"
        note = "earlier verdict" if outcome.skipped else ""
        rows.append([outcome.record["status"], outcome.trial.label, steps, note, str(outcome.trial.verdict)])
    return table("Verdicts", ["Status", "Recipe", "Steps", "Note", "File"], rows)

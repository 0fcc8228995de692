"""The harness is a distribution of its own: alone, inside the trainer's wheel, or both, in environments of their own.

pip knows no conflict between two distributions that have the same files: the later one wins, and who removes one removes
them for both. So the files are the same, and everything else is refused by name.
"""

from __future__ import annotations

import json
import re
import tomllib
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest
from repo_tree import ROOT
from two_wheels import HARNESS, PYTEST, TRAINER, TYPER, Environment, build

from surefoot_harness.cli.overview import JUDGING

OLDER = "0.0.9"
ORDERS = {"trainer": [TRAINER], "harness": [HARNESS], "both": [TRAINER, HARNESS], "both, reversed": [HARNESS, TRAINER]}
HEAVY = {"torch", "transformers", "numpy", "yaml", "ray", "surefoot"}
pytest.importorskip("hatchling", reason="make setup installs it")


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("wheels")
    return {name: build(name, folder) for name in (TRAINER, HARNESS)} | {OLDER: build(HARNESS, folder, OLDER)}


def inside(wheel: Path) -> dict[str, bytes]:
    """The files of a wheel without those about it."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if ".dist-info/" not in name}


def about(wheel: Path, file: str) -> str:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(f".dist-info/{file}"))
        return archive.read(name).decode()


def requirements(wheel: Path) -> list[str]:
    """What is installed with it when no extra is asked for."""
    wanted = Parser().parsestr(about(wheel, "METADATA")).get_all("Requires-Dist") or []
    return [line for line in wanted if "extra ==" not in line]


def differing(one: dict[str, bytes], other: dict[str, bytes]) -> list[str]:
    """Files of a package that are missing or different on one side."""
    ours = {name for files in (one, other) for name in files if name.startswith("surefoot_harness/")}
    return sorted(name for name in ours if one.get(name) != other.get(name))


def test_the_harness_is_a_wheel_of_its_own_and_asks_for_little(wheels: dict[str, Path]) -> None:
    files = inside(wheels[HARNESS])
    assert {name.partition("/")[0] for name in files} == {"surefoot_harness"}
    assert {"surefoot_harness/py.typed", "surefoot_harness/affected/child/sitecustomize.py"} <= files.keys()
    names = [re.match(r"[\w-]+", line) for line in requirements(wheels[HARNESS])]
    assert sorted(name[0] for name in names if name) == ["psutil", "typer"]
    assert "surefoot-harness = surefoot_harness.cli:main" in about(wheels[HARNESS], "entry_points.txt")
    assert (ROOT / "harness/LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


def test_the_trainers_wheel_has_the_same_files_and_does_not_ask_for_the_other(wheels: dict[str, Path]) -> None:
    trainer, harness = inside(wheels[TRAINER]), inside(wheels[HARNESS])
    assert differing(trainer, harness) == []
    assert len([name for name in trainer if name.startswith("surefoot_harness/")]) > 50
    assert [line for line in requirements(wheels[TRAINER]) if "harness" in line] == []
    points = [
        about(wheels[name], "entry_points.txt").partition("[pytest11]")[2].split("[")[0] for name in ORDERS["both"]
    ]
    assert points[0].split() == points[1].split() == "surefoot.harness.plugin = surefoot_harness.pytest_entry".split()


def test_planted_difference_between_the_two_is_seen(wheels: dict[str, Path]) -> None:
    harness = inside(wheels[HARNESS])
    changed = {**harness, "surefoot_harness/errors.py": b"", "surefoot_harness/extra.py": b""}
    assert differing(changed, harness) == ["surefoot_harness/errors.py", "surefoot_harness/extra.py"]
    assert differing(inside(wheels[OLDER]), harness) == ["surefoot_harness/__init__.py"]


def test_both_say_one_version_and_are_built_by_one_backend() -> None:
    import surefoot
    import surefoot_harness

    assert surefoot.__version__ == surefoot_harness.__version__
    systems = [
        tomllib.loads((ROOT / name).read_text())["build-system"]
        for name in ("pyproject.toml", "harness/pyproject.toml")
    ]
    assert systems[0] == systems[1]


# -- in environments of their own ---------------------------------------------------------------------------

TRACKED = """
def test_loss(tracker, pytestconfig):
    tracker.track("loss", 0.25)
    named = [type(plugin).__name__ for plugin in pytestconfig.pluginmanager.get_plugins()]
    assert named.count("ResultsPlugin") == 1
"""


def metrics(folder: Path) -> Path:
    """What TRL leaves."""
    rows = [{"step": step, "loss": 1 / step, "reward": step / 10} for step in range(1, 6)]
    file = folder / "trainer_state.json"
    file.write_text(json.dumps({"global_step": 5, "log_history": rows}))
    return file


def judges(environment: Environment, command: str, folder: Path) -> None:
    source = str(metrics(folder))
    good = environment.call(command, "check", source, 'last(data["reward"]) > 0.4')
    assert (good.returncode, "PASS" in good.stdout) == (0, True), good.stdout + good.stderr
    bad = environment.call(command, "check", source, 'last(data["reward"]) > 0.6')
    assert (bad.returncode, "FAIL" in bad.stdout) == (1, True), bad.stdout + bad.stderr
    unreadable = environment.call(command, "check", str(folder / "nothing"), 'last(data["reward"]) > 0.6')
    assert unreadable.returncode == 3, unreadable.stderr


@pytest.mark.nightly
@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_whatever_is_installed_works_alone_and_together(order: str, wheels: dict[str, Path], tmp_path: Path) -> None:
    environment = Environment.make(tmp_path / "env")
    environment.install(*(wheels[name] for name in ORDERS[order]))
    environment.lend(*TYPER, *PYTEST)
    for name in ORDERS[order]:
        judges(environment, name, tmp_path)
        assert environment.call(name, "--version").stdout.startswith(f"{name} ")
    if TRAINER in ORDERS[order]:
        same = "import surefoot.errors as a, surefoot_harness.errors as b, surefoot.harness.checks as c, surefoot_harness.checks as d"
        done = environment.run("-c", f"{same}\nassert a is b and c.run_checks is d.run_checks")
        assert done.returncode == 0, done.stderr
    (tmp_path / "test_it.py").write_text(TRACKED)
    for words in (
        [],
        ["-p", "surefoot_harness.plugin"],
        *([["-p", "surefoot.harness.plugin"]] if TRAINER in ORDERS[order] else []),
    ):
        tested = environment.run("-m", "pytest", "-q", "-p", "no:cacheprovider", *words, "test_it.py", cwd=tmp_path)
        assert tested.returncode == 0, tested.stdout + tested.stderr
    assert json.loads((tmp_path / "unit_results.json").read_text())["metrics"]["test_it::test_loss"]["loss"] == 0.25


def test_the_harness_alone_judges_and_loads_nothing_of_the_trainers(wheels: dict[str, Path], tmp_path: Path) -> None:
    environment = Environment.make(tmp_path / "env")
    environment.unpack(wheels[HARNESS])
    environment.lend(*TYPER, *PYTEST)
    judges(environment, HARNESS, tmp_path)
    no_baseline = environment.call(HARNESS, "check", str(metrics(tmp_path)), 'within_baseline("reward")')
    assert (no_baseline.returncode, "(surefoot-harness baseline add RUN)" in no_baseline.stdout) == (1, True)
    (tmp_path / "test_it.py").write_text(TRACKED)
    loaded = environment.modules(
        "import surefoot_harness.cli, surefoot_harness.checks.command, surefoot_harness.suites.run, pytest\n"
        f"assert pytest.main(['-q', '-p', 'surefoot_harness.plugin', {str(tmp_path / 'test_it.py')!r}]) == 0"
    )
    assert "surefoot_harness.tracker.tracker" in loaded
    assert HEAVY & {name.partition(".")[0] for name in loaded} == set()


@pytest.mark.nightly
def test_the_harness_alone_has_every_command(wheels: dict[str, Path], tmp_path: Path) -> None:
    environment = Environment.make(tmp_path / "env")
    environment.install(wheels[HARNESS])
    environment.lend(*TYPER)
    shown = environment.call(HARNESS, "--help").stdout
    assert not re.search(r"^Train:", shown, flags=re.MULTILINE)
    for command in [command for lines in JUDGING.values() for command in lines]:
        assert f"\n  {command} " in shown
        answered = environment.call(HARNESS, command, "--help")
        assert (answered.returncode, "sage" in answered.stdout) == (0, True), answered.stderr
        advice = answered.stdout.replace("`surefoot ...` as CMD", "")
        assert not re.search(r"\bsurefoot \w", advice), "advice for who has the trainer"


# -- two versions -------------------------------------------------------------------------------------------


def mixed(order: list[str], wheels: dict[str, Path], folder: Path) -> Environment:
    environment = Environment.make(folder)
    environment.install(*(wheels[name] for name in order))
    environment.lend(*TYPER)
    return environment


def test_another_harness_is_refused_by_name(wheels: dict[str, Path], tmp_path: Path) -> None:
    environment = Environment.make(tmp_path / "env")
    environment.unpack(wheels[TRAINER])
    environment.unpack(wheels[OLDER])
    environment.lend(*TYPER)
    refused = environment.call(TRAINER, "train")
    assert (refused.returncode, refused.stdout) == (2, ""), refused.stderr
    assert "found surefoot_harness 0.0.9" in refused.stderr
    assert "Traceback" not in refused.stderr
    with (environment.site / "surefoot" / "pairing.py").open("a") as file:  # planted: nobody asks
        file.write("\n\ndef require() -> None: ...\n")
    assert environment.call(TRAINER, "--version").returncode == 0


@pytest.mark.nightly
def test_an_older_harness_over_the_trainer_is_refused_by_name(wheels: dict[str, Path], tmp_path: Path) -> None:
    environment = mixed([TRAINER, OLDER], wheels, tmp_path / "env")
    for refused in (environment.call(TRAINER, "--version"), environment.run("-m", "surefoot", "train")):
        assert (refused.returncode, refused.stdout) == (2, ""), refused.stderr
        assert "found surefoot_harness 0.0.9" in refused.stderr
        assert "fix: pip install" in refused.stderr
        assert "Traceback" not in refused.stderr
    done = environment.run("-c", "import surefoot.system.files")
    assert "PairingError" in done.stderr
    judges(environment, HARNESS, tmp_path)  # its own files, all of one version
    environment.pip(
        "install", "--quiet", "--no-index", "--no-deps", "--no-compile", "--force-reinstall", str(wheels[TRAINER])
    )  # the fix
    assert environment.call(TRAINER, "--version").returncode == 0


@pytest.mark.nightly
def test_an_older_harness_under_the_trainer_is_refused_by_name(wheels: dict[str, Path], tmp_path: Path) -> None:
    environment = mixed([OLDER, TRAINER], wheels, tmp_path / "env")
    judges(environment, TRAINER, tmp_path)
    refused = environment.call(HARNESS, "--version")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "surefoot-harness 0.0.9 is installed, and its files are those of" in refused.stderr
    environment.install(wheels[HARNESS])  # the fix
    assert environment.call(HARNESS, "--version").returncode == 0


@pytest.mark.nightly
def test_a_harness_that_another_distribution_took_along_is_missed_by_name(
    wheels: dict[str, Path], tmp_path: Path
) -> None:
    environment = mixed([TRAINER, HARNESS], wheels, tmp_path / "env")
    environment.pip("uninstall", "--quiet", "--yes", HARNESS)
    refused = environment.call(TRAINER, "check", str(metrics(tmp_path)), 'last(data["reward"]) > 0.4')
    assert (refused.returncode, refused.stdout) == (2, ""), refused.stderr
    assert "without its package surefoot_harness" in refused.stderr
    environment.pip(
        "install", "--quiet", "--no-index", "--no-deps", "--no-compile", "--force-reinstall", str(wheels[TRAINER])
    )  # the fix
    judges(environment, TRAINER, tmp_path)

"""The harness in a stranger's project: alone in an environment whose packages are not chosen by us."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from two_wheels import HARNESS, PYTEST, TYPER, Environment, build

pytest.importorskip("hatchling", reason="make setup installs it")

PROJECT = {
    "pyproject.toml": "[project]\nname = 'acme'\nversion = '3'\n\n[tool.pytest.ini_options]\naddopts = '-q'\n",
    "acme/__init__.py": "",
    "acme/reward.py": "def reward(answer, wanted):\n    return 1.0 if answer.strip() == wanted else 0.0\n",
    # A name that is computed may be any name, also that of a file which is new.
    "acme/report.py": "import json\n\n\ndef report(way='dumps'):\n    return getattr(json, way)([])\n",
    "tests/test_reward.py": (
        "from acme.reward import reward\n\n\ndef test_reward(tracker):\n"
        "    tracker.track('share', reward(' 4', '4'))\n    assert reward('5', '4') == 0\n"
    ),
    "tests/test_report.py": "from acme.report import report\n\n\ndef test_report():\n    assert report() == '[]'\n",
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(HARNESS, tmp_path_factory.mktemp("wheel"))


@pytest.fixture
def alone(wheel: Path, tmp_path: Path) -> Environment:
    environment = Environment.make(tmp_path / "env")
    environment.unpack(wheel)
    return environment


def affected(environment: Environment, project: Path, *words: str) -> str:
    """The line of a session that says what was chosen; the session has to end well."""
    done = environment.run("-m", "pytest", "-p", "no:cacheprovider", *words, "--affected", cwd=project)
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("affected: "))
    return line


def made_up(folder: Path) -> Path:
    project = folder / "acme"
    for name, text in PROJECT.items():
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(text)
    return project


def tracked(project: Path) -> dict[str, dict[str, float]]:
    return dict(json.loads((project / "unit_results.json").read_text(encoding="utf-8"))["metrics"])


def test_a_strangers_tests_are_chosen_by_what_changed_and_their_numbers_kept(
    alone: Environment, tmp_path: Path
) -> None:
    alone.lend(*TYPER, *PYTEST)
    project = made_up(tmp_path)
    assert affected(alone, project) == "affected: 2 of 2 tests affected (first run), 0 left out"
    assert tracked(project)["test_reward::test_reward"]["share"] == 1.0
    assert affected(alone, project) == "affected: 0 of 2 tests affected, 2 left out", (
        "our own files are nobody's change"
    )
    file = project / "acme/reward.py"
    file.write_text(file.read_text().replace("answer.strip()", "answer"))
    assert affected(alone, project) == "affected: 1 of 2 tests affected, 1 left out"
    assert tracked(project)["test_reward::test_reward"]["share"] == 0.0
    told = alone.call(HARNESS, "trend", "share", cwd=project)
    assert (told.returncode, "tests/test_reward.py::test_reward  share" in told.stdout) == (0, True), (
        told.stdout + told.stderr
    )


@pytest.mark.turns(5, together=True)
def test_planted_tracker_files_that_count_as_the_projects_choose_its_tests_again(
    alone: Environment, tmp_path: Path
) -> None:
    alone.lend(*TYPER, *PYTEST)
    file = alone.site / "surefoot_harness/affected/tree.py"
    text = file.read_text()
    assert text.count(" unit_results unit_results.json") == 1
    file.write_text(text.replace(" unit_results unit_results.json", ""))
    project = made_up(tmp_path)
    affected(alone, project)
    assert affected(alone, project) != "affected: 0 of 2 tests affected, 2 left out"


@pytest.mark.turns(2, k=1, together=True)
def test_event_files_under_verls_names_are_judged_where_trl_and_torch_are_installed(
    alone: Environment, tmp_path: Path
) -> None:
    pytest.importorskip("tensorboard", reason="the extra tensorboard is not installed")
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(tmp_path / "tensorboard_log/gsm8k"))
    for step in range(1, 6):
        for tag, value in (("critic/rewards/mean", step / 10), ("actor/pg_loss", 1 / step)):
            summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
            writer.add_event(Event(step=step, wall_time=float(step), summary=summary))
    writer.close()
    alone.lend_all()
    here = str(tmp_path / "tensorboard_log")
    good = alone.call(
        HARNESS, "check", here, 'last(data["critic/rewards/mean"]) > 0.45', 'last(data["actor/pg_loss"]) < 0.3'
    )
    assert (good.returncode, good.stdout.count("PASS")) == (0, 2), good.stdout + good.stderr
    bad = alone.call(HARNESS, "check", here, 'last(data["critic/rewards/mean"]) > 0.55')
    assert bad.returncode == 1, bad.stdout + bad.stderr
    assert alone.run("-c", "import surefoot").returncode != 0, "the trainer is not there"


# -- tests that others wrote, from their source archives -----------------------------------------------------------

STRANGERS = {
    "verifiers": (
        ("verifiers==0.4.0", "pytest", "pytest-asyncio"), "verifiers==0.4.0",
        ("tests/v1/test_graph.py", "tests/v1/test_scoring.py"), "tests/v1/test_graph.py",
        "test_reasoning_content_participates_in_graph_prefix_matching", "    assert",
    ),
    "trl": (
        ("torch==2.13.0", "transformers<5", "trl==0.23.1", "pytest", "parameterized"), "trl==0.23.1",
        ("tests/test_rewards.py",), "trl/rewards/format_rewards.py", "think_format_reward", "    return",
    ),
}  # fmt: skip
"""What is installed, whose source archive has the tests, which of them need neither network nor model, and a function to
change. In verifiers that is a test: importing its conftest.py runs much of the package, so a change there concerns all.
TRL's archives have no tests since 0.24, so it is the last one that has, with the pins of its time."""


def registry(*words: str, cwd: Path) -> None:
    """pip, as this machine is set up; where it reaches no registry, the test is skipped and says so."""
    done = subprocess.run([sys.executable, "-m", "pip", *words], cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"no registry with {words[-1]}: {done.stderr.strip().splitlines()[-1:]}")


@pytest.mark.nightly
@pytest.mark.parametrize("name", STRANGERS)
def test_the_tests_of_other_projects_run_under_the_plugin(name: str, wheel: Path, tmp_path: Path) -> None:
    installed, archive, tests, file, function, line = STRANGERS[name]
    registry("download", "--no-deps", "--no-build-isolation", "--no-binary", ":all:", archive, cwd=tmp_path)
    (found,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(found) as packed:
        packed.extractall(tmp_path / "unpacked", filter="data")
    (project,) = (tmp_path / "unpacked").iterdir()
    environment = Environment.make(tmp_path / "env")
    registry("--python", environment.python, "install", "--quiet", str(wheel), *installed, cwd=tmp_path)
    (project / "tests/__init__.py").touch()  # which the archive leaves out
    mine = project / tests[0].rpartition("/")[0] / "test_tracked.py"
    mine.write_text("def test_size(tracker):\n    tracker.track('size', 3)\n")
    chosen = (*tests, mine.relative_to(project).as_posix())
    first = affected(environment, project, *chosen)
    assert "(first run), 0 left out" in first
    assert tracked(project)["test_tracked::test_size"]["size"] == 3
    count = int(first.split()[1])
    assert count >= 7
    assert affected(environment, project, *chosen) == f"affected: 0 of {count} tests affected, {count} left out"
    source = project / file
    text = source.read_text()
    assert text.count(f"def {function}(") == 1
    head, mark, tail = text.partition(f"def {function}(")
    changed = tail.replace(line, f"    str()\n{line}", 1)
    source.write_text(head + mark + changed)
    after = affected(environment, project, *chosen)
    assert 0 < int(after.split()[1]) < count, after
    shutil.rmtree(project / ".surefoot")
    assert os.path.exists(project / "unit_results")

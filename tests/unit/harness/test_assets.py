"""Assets: whole or not there, built once, and a test without its asset says what to type."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from command import surefoot
from plugin_kit import Nested

from surefoot.errors import ConfigError, StateError
from surefoot.harness.asset_build import AssetBuildError, build
from surefoot.harness.assets import (
    COMPLETE,
    DAMAGED,
    MANIFEST,
    MISSING,
    STALE,
    Asset,
    examine,
    find_assets,
    read_assets,
)
from surefoot.harness.project import read_project

pytest_plugins = ["pytester", "plugin_kit"]

MAKE = """
import os, pathlib, signal, sys
out = pathlib.Path(sys.argv[1])
with open("built", "a") as log:
    log.write("x")
(out / "deep").mkdir()
(out / "config.json").write_text("{}")
if os.path.exists("kill"):
    os.kill(os.getppid(), signal.SIGKILL)
    sys.exit()
(out / "deep" / "weights ü.bin").write_bytes(b"0" * 1000)
"""
DECLARED = """
[tool.surefoot.assets.tiny]
command = ["python", "make.py", "{out}"]
inputs = ["make.py", "data/*.txt"]
description = "a tiny model"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A project that declares one asset."""
    (tmp_path / "make.py").write_text(MAKE)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.txt").write_text("one")
    (tmp_path / "pyproject.toml").write_text(DECLARED)
    return tmp_path


def tiny(folder: Path) -> Asset:
    project = read_project(folder / "pyproject.toml")
    assert project is not None
    return read_assets(project)["tiny"]


def builds(folder: Path) -> int:
    log = folder / "built"
    return len(log.read_text()) if log.exists() else 0


def test_building_is_done_once_and_again_only_after_a_change(folder: Path) -> None:
    asset = tiny(folder)
    assert examine(asset).status == MISSING
    assert build(asset).status == COMPLETE
    assert (build(asset).files, builds(folder)) == (2, 1)
    (folder / "data" / "a.txt").write_text("two")
    assert examine(asset).status == STALE
    assert (build(asset).status, builds(folder)) == (COMPLETE, 2)
    assert build(asset, force=True).status == COMPLETE
    assert builds(folder) == 3
    assert sorted(path.name for path in asset.folder.parent.iterdir()) == [".tiny.lock", "tiny"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda asset: (asset / "config.json").write_text("{ }"),
        lambda asset: (asset / "config.json").unlink(),
        lambda asset: (asset / "more.bin").write_text(""),
        lambda asset: (asset / MANIFEST).unlink(),
        lambda asset: (asset / MANIFEST).write_text("{"),
        lambda asset: (asset / MANIFEST).write_text("[]"),
    ],
    ids=["changed", "gone", "added", "no manifest", "torn manifest", "foreign manifest"],
)
def test_every_damage_is_found_and_repaired_by_building(folder: Path, damage: Callable[[Path], object]) -> None:
    asset = tiny(folder)
    build(asset)
    damage(asset.folder)
    assert examine(asset).status == DAMAGED
    assert build(asset).status == COMPLETE


def killed_build_is_not_complete(folder: Path) -> None:
    (folder / "kill").touch()
    done = surefoot("assets", "build", cwd=folder)
    assert done.code == -signal.SIGKILL
    assert surefoot("assets", "check", cwd=folder).code == 1, "half an asset looks whole"


def test_a_build_killed_midway_is_not_complete_and_the_next_one_is(folder: Path) -> None:
    killed_build_is_not_complete(folder)
    (folder / "kill").unlink()
    done = surefoot("assets", "build", cwd=folder)
    assert (done.code, done.out.split(":")[0]) == (0, "PASS  tiny")
    assert surefoot("assets", "check", cwd=folder).code == 0
    assert sorted(path.name for path in tiny(folder).folder.parent.iterdir()) == [".tiny.lock", "tiny"]


def test_planted_check_for_one_file_only_is_caught(folder: Path) -> None:
    """Teeth: build in place, and call it complete when config.json is there, as a known harness does."""
    asset = tiny(folder)
    asset.folder.mkdir(parents=True)
    (folder / "kill").touch()
    child = subprocess.Popen([sys.executable, "-c", f"import subprocess; subprocess.run([{sys.executable!r}, 'make.py', {str(asset.folder)!r}])"], cwd=folder)  # fmt: skip
    assert child.wait(timeout=60) == -signal.SIGKILL
    assert (asset.folder / "config.json").exists(), "the naive check passes"
    assert examine(asset).status == DAMAGED, "ours does not"


def test_a_build_that_is_stopped_ends_its_command_and_leaves_nothing(folder: Path) -> None:
    (folder / "make.py").write_text("import os, signal\nos.kill(os.getppid(), signal.SIGTERM)\nsignal.pause()\n")
    done = surefoot("assets", "build", cwd=folder)
    assert done.code == 75
    assert [path.name for path in tiny(folder).folder.parent.iterdir()] == [".tiny.lock"]


@pytest.mark.parametrize(
    ("script", "complaint"),
    [
        ("raise SystemExit(3)", "ended with 3"),
        ("print('the disk is on fire'); raise SystemExit(1)", "the disk is on fire"),
        ("pass", "wrote nothing"),
        ("import os, sys; os.symlink('/etc/hostname', sys.argv[1] + '/link')", "not a file of the asset"),
        ("import os, sys; os.symlink('nowhere', sys.argv[1] + '/link')", "not a file of the asset"),
        ("import sys; open('data/a.txt', 'w').write('new'); open(sys.argv[1] + '/a', 'w')", "inputs changed"),
    ],
    ids=["fails", "says why", "nothing", "link out", "dead link", "inputs change"],
)
def test_a_command_that_does_not_do_its_work_is_an_error(folder: Path, script: str, complaint: str) -> None:
    (folder / "make.py").write_text(script)
    with pytest.raises(StateError, match=complaint):
        build(tiny(folder))
    assert examine(tiny(folder)).status == MISSING


def test_a_failed_rebuild_keeps_the_old_asset(folder: Path) -> None:
    asset = tiny(folder)
    build(asset)
    (folder / "make.py").write_text("raise SystemExit(1)")
    with pytest.raises(AssetBuildError):
        build(asset)
    assert (asset.folder / "config.json").exists()
    assert examine(asset).status == STALE


def test_offline_refuses_what_needs_the_network_but_not_what_is_there(folder: Path) -> None:
    (folder / "pyproject.toml").write_text(DECLARED + "network = true\n")
    with pytest.raises(StateError, match="needs the network"):
        build(tiny(folder), offline=True)
    build(tiny(folder))
    assert build(tiny(folder), offline=True).status == COMPLETE


def test_offline_is_passed_on_to_the_command(folder: Path) -> None:
    (folder / "make.py").write_text("import os, sys; open(sys.argv[1] + '/a', 'w').write(os.environ['HF_HUB_OFFLINE'])")
    build(tiny(folder), offline=True)
    assert (tiny(folder).folder / "a").read_text() == "1"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[tool.surefoot.assets.x]\n", "one of them with"),
        ('[tool.surefoot.assets.x]\ncommand = "make {out}"', "list of words"),
        ('[tool.surefoot.assets.x]\ncommand = ["make"]', "one of them with"),
        ('[tool.surefoot.assets.x]\ncommand = ["m", "{out}"]\ninputs = ["../a"]', "in the project"),
        ('[tool.surefoot.assets.x]\ncommand = ["m", "{out}"]\ninput = ["a"]', "did you mean inputs"),
        ('[tool.surefoot.assets.x]\ncommand = ["m", "{out}"]\nnetwork = "yes"', "true or false"),
        ('[tool.surefoot.assets."../x"]\ncommand = ["m", "{out}"]', "a folder"),
    ],
)
def test_a_malformed_declaration_is_refused(tmp_path: Path, text: str, complaint: str) -> None:
    (tmp_path / "pyproject.toml").write_text(text)
    with pytest.raises(ConfigError, match=complaint):
        find_assets(tmp_path / "pyproject.toml", [])


def test_an_input_that_matches_nothing_is_refused(folder: Path) -> None:
    (folder / "data" / "a.txt").unlink()
    with pytest.raises(ConfigError, match=r"data/\*\.txt"):
        build(tiny(folder))


def test_the_commands_have_their_exit_codes(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    assert surefoot("assets", "list", cwd=folder).code == 0
    missing = surefoot("assets", "check", "--manifest", "pyproject.toml", cwd=folder)
    assert missing.code == 1
    assert "not built; run: surefoot assets build tiny" in missing.out
    assert surefoot("assets", "build", "huge", cwd=folder).code == 2
    assert surefoot("assets", "check", cwd=tmp_path_factory.mktemp("empty")).code == 3
    (folder / "make.py").write_text("raise SystemExit(7)")
    failed = surefoot("assets", "build", cwd=folder)
    assert failed.code == 1
    assert "ended with 7" in failed.err


TESTS = """
    import pytest

    @pytest.mark.needs_asset("tiny")
    def test_needy(asset_path):
        assert (asset_path("tiny") / "config.json").exists()

    def test_plain(): pass
"""


def test_a_test_without_its_asset_skips_with_the_command_and_in_strict_mode_fails(
    pytester: pytest.Pytester, nested: Nested
) -> None:
    pytester.makepyprojecttoml(DECLARED)
    (pytester.path / "make.py").write_text(MAKE)
    (pytester.path / "data").mkdir()
    (pytester.path / "data" / "a.txt").touch()
    pytester.makepyfile(TESTS)
    done = nested("-rs", "--strict-markers")
    done.assert_outcomes(passed=1, skipped=1)
    done.stdout.fnmatch_lines(["SKIPPED*no asset: tiny is missing (not built); run: surefoot assets build tiny"])
    assert nested("--strict-assets").ret == pytest.ExitCode.TESTS_FAILED
    assert nested("-k", "needy").ret == pytest.ExitCode.NO_TESTS_COLLECTED, "nothing ran, so nothing passed"
    build(tiny(pytester.path))
    nested("--strict-assets").assert_outcomes(passed=2)


def test_an_undeclared_asset_is_a_collection_error(pytester: pytest.Pytester, nested: Nested) -> None:
    pytester.makepyfile(TESTS)
    done = nested()
    assert done.ret == pytest.ExitCode.INTERRUPTED
    done.stdout.fnmatch_lines(["*test_needy: needs the asset tiny, which*does not declare*"])

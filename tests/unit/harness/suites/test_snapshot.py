from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from surefoot.errors import StateError
from surefoot.harness.suites import plan
from surefoot.harness.suites.plan import identify, snapshot_folder, take_snapshot


def take(project: Any) -> Path:
    return take_snapshot(project.root, identify(project.root), project.root.parent / "snaps")


def a_rerun_after_an_edit_gets_the_edited_code(project: Any) -> None:
    first = take(project)
    project.write("trainer.py", "print('edited once')\n")
    second = take(project)
    project.write("trainer.py", "print('edited twice')\n")
    third = take(project)
    assert len({first, second, third}) == 3
    assert (first / "trainer.py").read_text() != (second / "trainer.py").read_text() == "print('edited once')\n"
    assert (third / "trainer.py").read_text() == "print('edited twice')\n"


def test_a_rerun_after_an_edit_gets_the_edited_code(project: Any) -> None:
    a_rerun_after_an_edit_gets_the_edited_code(project)


def test_planted_reuse_by_commit_alone_is_caught(project: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the launcher that we learnt from does: any folder of that name is good enough."""
    monkeypatch.setattr(plan.Code, "name", property(lambda code: code.commit[:12]))
    monkeypatch.setattr(plan, "_is_intact", lambda target, digest: target.exists())
    with pytest.raises(AssertionError):
        a_rerun_after_an_edit_gets_the_edited_code(project)


def test_the_comparison_of_contents_alone_would_catch_it_too(project: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two edits that git cannot tell apart: the name is the same, the code is not."""
    monkeypatch.setattr(plan.Code, "name", property(lambda code: code.commit[:12]))
    a_rerun_after_an_edit_gets_the_edited_code(project)


def test_the_name_holds_commit_and_dirty_hash(project: Any) -> None:
    commit = project.git("rev-parse", "HEAD").strip()
    assert identify(project.root).name == commit[:12]
    project.write("new.txt", "x")
    code = identify(project.root)
    assert code.name == f"{commit[:12]}-{code.dirty}"
    project.write("new.txt", "y")
    assert identify(project.root).dirty != code.dirty


def test_the_same_code_is_copied_once(project: Any) -> None:
    assert take(project) == take(project)


def test_odd_names_links_modes_and_deletions_survive(project: Any) -> None:
    project.write('a folder/naïve "file"\n2.txt', "x")
    (project.root / "link").symlink_to("a folder")
    (project.root / "dangling").symlink_to("nowhere")
    project.write("run.sh", "#!/bin/sh\n").chmod(0o755)
    project.commit()
    (project.root / "trainer.py").unlink()
    project.write("not-added.txt", "new")
    project.write("__pycache__/ignored.pyc", "old")
    copy = take(project)
    assert (copy / 'a folder/naïve "file"\n2.txt').read_text() == "x"
    assert os.readlink(copy / "link") == "a folder"
    assert os.readlink(copy / "dangling") == "nowhere"
    assert os.access(copy / "run.sh", os.X_OK)
    assert not (copy / "trainer.py").exists()
    assert (copy / "not-added.txt").read_text() == "new"
    assert not (copy / "__pycache__").exists()
    assert not (copy / ".git").exists()


def test_a_half_copied_or_altered_snapshot_is_not_used_again(project: Any) -> None:
    first = take(project)
    (first / "trainer.py").write_text("something else")
    second = take(project)
    assert second != first
    (second.parent / f"{second.name}.json").unlink()  # as if the copy had been interrupted
    third = take(project)
    assert third not in (first, second)
    (third / "extra.py").write_text("import os")
    assert take(project) not in (first, second, third)


def test_what_python_leaves_behind_does_not_count_as_a_change(project: Any) -> None:
    first = take(project)
    (first / "__pycache__").mkdir()
    (first / "__pycache__/trainer.pyc").write_bytes(b"x")
    assert take(project) == first


def test_an_interrupted_copy_leaves_nothing_that_looks_complete(project: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(plan.shutil, "copy2", full_disk)
        with pytest.raises(OSError, match="No space"):
            take(project)
    folder = project.root.parent / "snaps"
    assert [path for path in folder.iterdir() if path.is_dir()] == []
    assert (take(project) / "trainer.py").is_file()


def test_submodules_are_copied_and_edits_inside_them_tell_snapshots_apart(project: Any, template: Path) -> None:
    project.git("submodule", "add", "-q", str(template), "vendor/sub")
    project.commit()
    clean = take(project)
    assert (clean / "vendor/sub/trainer.py").is_file()
    assert identify(project.root).dirty is None
    inner = project.root / "vendor/sub/trainer.py"
    inner.write_text("edit one")
    one = take(project)
    inner.write_text("edit two")
    two = take(project)
    assert len({clean, one, two}) == 3
    assert [(s / "vendor/sub/trainer.py").read_text() for s in (one, two)] == ["edit one", "edit two"]


def test_a_submodule_that_is_not_checked_out_is_refused(project: Any, template: Path) -> None:
    project.git("submodule", "add", "-q", str(template), "sub")
    project.commit()
    project.git("submodule", "deinit", "-q", "-f", "sub")
    with pytest.raises(StateError, match="not checked out"):
        identify(project.root)


def test_no_commit_or_no_git_is_refused(tmp_path: Path, project: Any) -> None:
    with pytest.raises(StateError, match="not a git work tree"):
        identify(tmp_path)
    project.git("checkout", "-q", "--orphan", "fresh")
    with pytest.raises(StateError, match="with a commit"):
        identify(project.root)


def test_the_folder_can_be_named_by_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    assert snapshot_folder(Path("/out")) == Path("/out/code_snapshots")
    monkeypatch.setenv("CODE_SNAPSHOT_DIRNAME", "elsewhere")
    assert snapshot_folder(Path("/out")) == Path("/out/elsewhere")

"""What the harness learns from git: real commits, real dirt, and git's own words when it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from surefoot.system.git import GitError, dirty_hash, git, head, is_dirty, root_of, run_git

WHO = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@example.org", "GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@example.org"}  # fmt: skip


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    folder = tmp_path / "a tree"
    folder.mkdir()
    git(folder, "init", "-q")
    (folder / "file.txt").write_text("one\n")
    (folder / ".gitignore").write_text("ignored\n")
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "first", env=WHO)
    return folder


def test_head_and_root_are_found_from_below(tree: Path) -> None:
    (tree / "ünder").mkdir()
    assert root_of(tree / "ünder") == tree
    assert head(tree / "ünder") == git(tree, "rev-parse", "HEAD")


def test_outside_a_tree_and_before_the_first_commit_there_is_none(tmp_path: Path) -> None:
    assert root_of(tmp_path) is None
    assert head(tmp_path) is None
    git(tmp_path, "init", "-q")
    assert root_of(tmp_path) == tmp_path
    assert head(tmp_path) is None


def test_a_refusal_carries_gits_own_words(tree: Path) -> None:
    with pytest.raises(GitError, match="unknown revision") as caught:
        git(tree, "log", "no-such-branch")
    assert caught.value.exit_code == 3
    assert run_git(tree, "log", "no-such-branch", check=False).returncode == 128


def test_a_missing_git_is_said(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(GitError, match="cannot be started"):
        git(tree, "status")


def test_a_word_is_never_read_by_a_shell(tree: Path) -> None:
    git(tree, "tag", "x;touch${IFS}made", check=False)
    git(tree, "log", "--grep=$(touch made)")
    assert not (tree / "made").exists()


def test_clean_dirty_and_untracked_are_told_apart(tree: Path) -> None:
    assert not is_dirty(tree)
    assert dirty_hash(tree) is None
    (tree / "ignored").write_text("x")
    assert dirty_hash(tree) is None
    (tree / "new file").write_text("x")
    assert is_dirty(tree)


def test_different_edits_give_different_hashes_and_equal_ones_equal(tree: Path) -> None:
    seen = set()
    for name, text in [("file.txt", "two\n"), ("file.txt", "three\n"), ("new file", "x"), ("new file", "y")]:
        (tree / name).write_text(text)
        first = dirty_hash(tree)
        assert first == dirty_hash(tree)
        assert first is not None
        assert len(first) == 12
        seen.add(first)
    assert len(seen) == 4


def test_a_staged_edit_counts_like_an_unstaged_one(tree: Path) -> None:
    (tree / "file.txt").write_text("two\n")
    before = dirty_hash(tree)
    git(tree, "add", "-A")
    assert dirty_hash(tree) == before


def test_the_hash_sees_untracked_files_from_a_folder_below(tree: Path) -> None:
    (tree / "below").mkdir()
    (tree / "new").write_text("x")
    assert dirty_hash(tree / "below") == dirty_hash(tree)


def test_names_that_are_not_text_and_links_are_hashed(tree: Path) -> None:
    (tree / "file.txt").write_bytes(b"\xff\xfe\x00binary")
    (tree / "link").symlink_to("nowhere")
    first = dirty_hash(tree)
    (tree / "link").unlink()
    (tree / "link").symlink_to("elsewhere")
    assert first != dirty_hash(tree)

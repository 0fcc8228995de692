"""A repository that names programs, in its config, its hooks and its attributes: none of them is run by asking git.

Each program writes its name into one file. The commands are the real ones, in the repository: a training run, a bisect,
a suite. The planted form asks git as it comes, and finds what each of them would have started.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from bisect_kit import FIXED, History, bisect, copied, git, history, numbered
from command import Ran, surefoot

from surefoot.system import git as git_calls
from surefoot.system.git import GitError, dirty_hash

TINY = [
    "num_tasks=200", "tasks_per_step=2", "num_generations=4", "max_completion_length=4", "eval_tasks=8",
    "preflight_tasks=0", "reward_workers=1", "max_steps=1", "guard.mode=off", "eval_on_start=false",
]  # fmt: skip
FILTERS = ["filter.evil.clean", "filter.evil.smudge", "filter.long.process"]
PROGRAMS = [
    "core.fsmonitor", "core.pager", "pager.status", "pager.log", "core.editor", "core.askPass", "core.sshCommand",
    "core.gitProxy", "core.alternateRefsCommand", "credential.helper", "diff.external", "diff.evil.textconv",
    "diff.evil.command", "merge.evil.driver", "gpg.program", "gc.recentObjectsHook", "remote.origin.uploadpack",
    "uploadpack.packObjectsHook", "submodule.sub.update", "hook.mine.command", "interactive.diffFilter", "alias.status",
]  # fmt: skip
HOOKS = "post-checkout post-index-change pre-auto-gc fsmonitor-watchman post-merge".split()
SUITE = """free_names = true
[[recipe]]
name = "tiny"
max_steps = 1
minutes = 5
command = ["sh", "trainer.sh", "{run}"]
checks = ['last(data["reward"]) > 0.5']
"""
TRAINER = 'echo "{\\"train/loss\\": {\\"1\\": 1}, \\"reward\\": {\\"1\\": 0.9}}" > $1/metrics.json\n'


class Canary:
    """Where the programs write their names."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "sang"
        folder.mkdir()

    def program(self, name: str, path: Path | None = None) -> str:
        path = path or self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\necho {name} >> {self.file}\ncase {name} in *filter*) exec cat;; esac\nexit 0\n")
        path.chmod(0o755)
        return str(path)

    def heard(self) -> set[str]:
        return set(self.file.read_text().split()) if self.file.exists() else set()


def hostile(folder: Path, canary: Canary, *, filters: bool = True) -> History:
    """Four commits, the third breaks `t.sh`, the last is signed; then the programs are put in."""
    made = history(folder)
    attributes = "*.a filter=evil diff=evil merge=evil\n*.b filter=long diff=evil\n"
    first = {".gitattributes": attributes, "x.a": "a\n", "x.b": "b\n", "n": "1\n", ".gitignore": "run/\nruns/\n"}
    made.commit({**first, "t.sh": "#!/bin/sh\ntest $(cat n) -lt 3\n", "trainer.sh": TRAINER, "suites/try.toml": SUITE})
    for number in (2, 3, 4):
        made.commit({"n": f"{number}\n", "x.a": f"{number}\n", "x.b": f"{number}\n"})
    _sign(made)
    for key in [*PROGRAMS, *(FILTERS if filters else [])]:
        program = canary.program(key)
        git(folder, "config", key, f"!{program}" if key == "submodule.sub.update" else program)
    for key, value in {
        "log.showSignature": "true", "hook.mine.event": "post-checkout", "protocol.ext.allow": "always",
        "remote.origin.url": f"ext::{canary.program('remote.ext')}", "gc.auto": "1", "filter.evil.required": "true",
    }.items():  # fmt: skip
        if filters or not key.startswith("filter"):
            git(folder, "config", key, value)
    for name in HOOKS:
        canary.program(f"hook/{name}", folder / ".git/hooks" / name)
    canary.file.unlink(missing_ok=True)  # what our own `git config` started is nobody's fault
    return made


def _sign(made: History) -> None:
    text = git(made.root, "cat-file", "commit", "HEAD") + "\n"
    head, _, message = text.partition("\n\n")
    signed = f"{head}\ngpgsig -----BEGIN PGP SIGNATURE-----\n \n none\n -----END PGP SIGNATURE-----\n\n{message}"
    words = ["git", "hash-object", "-t", "commit", "-w", "--stdin"]
    done = subprocess.run(words, cwd=made.root, input=signed, capture_output=True, text=True, check=True)
    git(made.root, "update-ref", "HEAD", done.stdout.strip())
    made.commits[-1] = done.stdout.strip()


def touched(made: History) -> None:
    """A file whose content is as committed and whose time is not: git has to read it, through its filter."""
    for name in ("x.a", "x.b"):
        os.utime(made.root / name, (1, 1))


def run_train(made: History, planted: str | None) -> Ran:
    touched(made)
    return surefoot("train", *TINY, cwd=made.root, planted=planted, env=FIXED)


def run_suite(made: History, planted: str | None) -> Ran:
    (made.root / "x.a").write_text("changed\n")
    return surefoot("suite", "run", "try", cwd=made.root, planted=planted, env=FIXED)


def run_bisect(made: History, planted: str | None) -> Ran:
    words = ["bisect", "--good", made.c(1), "--bad", made.c(4), "--", "./t.sh"]
    return surefoot(*words, cwd=made.root, planted=planted, env=FIXED)


@pytest.mark.parametrize("command", [run_train, run_suite], ids=["train", "suite"])
def test_a_command_in_a_hostile_repository_starts_none_of_its_programs(command, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    canary = Canary(tmp_path / "programs")
    ran = command(hostile(tmp_path / "r", canary), None)
    assert ran.code in (0, 1), ran.err  # one step has not learned anything, and the verdict says so
    assert (ran.run if command is run_train else ran.run.parent / "runs").is_dir()
    assert canary.heard() == set()


def test_a_run_says_neither_clean_nor_dirty_where_only_a_filter_of_the_repository_could_tell(tmp_path: Path) -> None:
    from surefoot.storage.run_folder import environment_record

    made = hostile(tmp_path / "r", Canary(tmp_path / "programs"))
    assert environment_record(cwd=made.root)["git"] == {"commit": made.c(4), "dirty": False}
    (made.root / "x.a").write_text("longer than before\n")
    assert environment_record(cwd=made.root)["git"] == {"commit": made.c(4), "dirty": None}


def test_a_bisect_refuses_the_filters_of_a_repository_and_starts_nothing(tmp_path: Path) -> None:
    canary = Canary(tmp_path / "programs")
    made = hostile(tmp_path / "r", canary)
    ran = run_bisect(made, None)
    assert ran.code == 2
    assert all(key in ran.err for key in FILTERS), ran.err
    assert canary.heard() == set()


def test_a_bisect_without_such_filters_finds_the_commit_and_starts_nothing(tmp_path: Path) -> None:
    canary = Canary(tmp_path / "programs")
    made = hostile(tmp_path / "r", canary, filters=False)
    ran = run_bisect(made, None)
    assert ran.code == 0, ran.err
    assert f"first bad commit: {made.c(3)}" in ran.out
    assert canary.heard() == set()


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (run_train, {"core.fsmonitor", "filter.evil.clean", "filter.long.process"}),
        (run_suite, {"core.fsmonitor", "filter.evil.clean", "diff.evil.textconv"}),
    ],
    ids=["train", "suite"],
)
def test_planted_trust_in_the_repository_starts_them(command, expected: set[str], tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    canary = Canary(tmp_path / "programs")
    command(hostile(tmp_path / "r", canary), "trusting_git")
    assert canary.heard() >= expected


TRUST = {
    "system/git.py": "SETTINGS = _NO_DRIVERS = ()\n_OFFLINE = {}\n_named = lambda entries: set()\n",
    "bisect/command.py": "_no_hook_on_references = lambda root: None\n",
}


def trusting(folder: Path, **files: str) -> Path:
    """A copy of the package with more lines at the end of some files: a bisect runs from a copy of itself."""
    copied(folder)
    for name, lines in files.items():
        with (folder / "surefoot_harness" / name).open("a") as file:
            file.write(lines)
    return folder


def test_planted_trust_lets_a_bisect_start_them(tmp_path: Path) -> None:
    canary = Canary(tmp_path / "programs")
    made = hostile(tmp_path / "r", canary)
    canary.program("hook/reference-transaction", made.root / ".git/hooks/reference-transaction")
    words = ["--good", made.c(1), "--bad", made.c(4), "--", "./t.sh"]
    bisect(made.root, *words, source=trusting(tmp_path / "p", **TRUST))
    assert canary.heard() >= {
        "core.fsmonitor", "hook/post-checkout", "hook/reference-transaction", "filter.evil.smudge",
        "filter.long.process", "gpg.program",
    }  # fmt: skip


def test_a_bisect_refuses_the_one_hook_that_git_runs_in_any_case(tmp_path: Path) -> None:
    canary, made = Canary(tmp_path / "programs"), numbered(tmp_path / "r", 4, "#!/bin/sh\ntest $(cat n) -lt 3\n")
    canary.program("hook", made.root / ".git/hooks/reference-transaction")
    ran = run_bisect(made, None)
    assert ran.code == 2
    assert "reference-transaction" in ran.err
    assert canary.heard() == set()


def test_what_the_users_own_config_names_is_run(tmp_path: Path) -> None:
    """A filter of the user's, which the repository's config repeats, is the user's choice."""
    made = history(tmp_path / "r")
    made.commit({".gitattributes": "*.a filter=mine\n", "x.a": "a\n", "n": "1\n"})
    clean, other = "sed s/secret/public/", "sed s/public/worse/"
    (tmp_path / "gitconfig").write_text(f'[filter "mine"]\n\tclean = {clean}\n\tsmudge = cat\n')
    git(made.root, "config", "filter.mine.clean", clean)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**FIXED, "GIT_CONFIG_GLOBAL": str(tmp_path / "gitconfig")}.items():
            patch.setenv(name, value)
        assert git_calls.own_programs(made.root) == git_calls.OwnPrograms()
        git(made.root, "config", "filter.mine.clean", other)
        assert git_calls.own_programs(made.root).filters == ("filter.mine.clean",)


def test_a_filter_whose_name_cannot_be_written_on_a_command_line_is_refused(tmp_path: Path) -> None:
    canary, made = Canary(tmp_path / "programs"), numbered(tmp_path / "r", 2)
    (made.root / ".git/info/attributes").write_text("n filter=a=b\n")
    git(made.root, "config", "filter.a=b.clean", canary.program("odd"))
    (made.root / "n").write_text("another\n")
    with pytest.raises(GitError, match="cannot be switched off"):
        dirty_hash(made.root)
    assert canary.heard() == set()


@pytest.mark.parametrize("trusting", [False, True], ids=["ours", "planted"])
def test_a_missing_object_is_not_fetched_by_looking_at_the_tree(
    trusting: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A partial clone fetches what it lacks, with the command that its config names."""
    canary, made = Canary(tmp_path / "programs"), numbered(tmp_path / "r", 2)
    blob = git(made.root, "rev-parse", "HEAD:n")
    for key, value in {
        "core.repositoryFormatVersion": "1", "extensions.partialClone": "origin", "remote.origin.promisor": "true",
        "remote.origin.url": str(tmp_path), "remote.origin.uploadpack": canary.program("remote.origin.uploadpack"),
    }.items():  # fmt: skip
        git(made.root, "config", key, value)
    _forget(made.root, blob)
    (made.root / "n").write_text("another\n")
    if trusting:
        monkeypatch.setattr(git_calls, "_OFFLINE", {})
    with pytest.raises(GitError):
        dirty_hash(made.root)
    assert canary.heard() == ({"remote.origin.uploadpack"} if trusting else set())


def _forget(root: Path, blob: str) -> None:
    """Unpack every object but one."""
    packs = list((root / ".git/objects/pack").glob("*.pack"))
    for pack in packs:
        data = pack.read_bytes()
        for part in pack.parent.glob(f"{pack.stem}.*"):
            part.unlink()
        subprocess.run(["git", "unpack-objects", "-q"], cwd=root, input=data, check=True)
    (root / ".git/objects" / blob[:2] / blob[2:]).unlink()


@pytest.mark.parametrize("trusts", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["ours", "planted"])
def test_a_submodule_that_names_a_fetch_command_is_not_fetched(trusts: bool, tmp_path: Path) -> None:
    canary, inner = Canary(tmp_path / "programs"), numbered(tmp_path / "inner", 2)
    made = numbered(tmp_path / "r", 3, "#!/bin/sh\ntest $(cat n) -lt 3\n")
    git(made.root, "submodule", "--quiet", "add", str(inner.root), "sub")
    for number in (4, 5):
        made.commit({"m": f"{number}\n"})
    git(made.root / "sub", "config", "remote.origin.uploadpack", canary.program("uploadpack"))
    source = trusting(tmp_path / "p", **TRUST) if trusts else None
    ran = bisect(made.root, "--good", made.c(2), "--bad", made.c(5), "--", "./t.sh", source=source)
    assert ran.code == 0, ran.err
    assert canary.heard() == ({"uploadpack"} if trusts else set())
    if not trusts:
        assert "remote.origin.uploadpack, which is not run" in ran.out + ran.err


@pytest.mark.parametrize(
    ("laid_by", "trusting"), [(False, False), (False, True), (True, False)], ids=["ours", "planted", "laid by"]
)
def test_the_filters_of_a_submodule_are_switched_off_with_the_rest(
    laid_by: bool, trusting: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`git status` asks each submodule for its own, and a checkout fills again what a later commit took away."""
    for name, value in FIXED.items():
        monkeypatch.setenv(name, value)
    canary, inner = Canary(tmp_path / "programs"), numbered(tmp_path / "inner", 2)
    made = numbered(tmp_path / "r", 2)
    git(made.root, "submodule", "--quiet", "add", str(inner.root), "sub")
    made.commit({"m": "1\n"})
    (made.root / ".git/modules/sub/info/attributes").write_text("n filter=evil\n")
    git(made.root / "sub", "config", "filter.evil.clean", canary.program("filter.evil.clean"))
    if laid_by:
        git(made.root, "rm", "--quiet", "sub")
        made.commit({"m": "2\n"})
        assert git_calls.own_programs(made.root).filters == ("filter.evil.clean",)
        return
    os.utime(made.root / "sub/n", (1, 1))
    if trusting:
        monkeypatch.setattr(git_calls, "_named", lambda entries: set())
    assert dirty_hash(made.root) is None
    assert canary.heard() == ({"filter.evil.clean"} if trusting else set())


@pytest.mark.parametrize("name", ["-f", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("--detach", "n"))])
def test_a_bisect_comes_home_to_a_branch_that_looks_like_something_else(name: str, tmp_path: Path) -> None:
    made = numbered(tmp_path / "r", 4, "#!/bin/sh\ntest $(cat n) -lt 3\n")
    git(made.root, "symbolic-ref", "HEAD", f"refs/heads/{name}")
    git(made.root, "update-ref", f"refs/heads/{name}", made.c(4))
    ran = surefoot("bisect", "--good", made.c(1), "--bad", made.c(4), "--", "./t.sh", cwd=made.root, env=FIXED)
    assert ran.code == 0, ran.err
    assert git(made.root, "symbolic-ref", "HEAD") == f"refs/heads/{name}"
    assert made.state()[1:] == (made.c(4), "", False)


def test_planted_way_home_by_the_short_name_is_caught(tmp_path: Path) -> None:
    made = numbered(tmp_path / "r", 4, "#!/bin/sh\ntest $(cat n) -lt 3\n")
    git(made.root, "symbolic-ref", "HEAD", "refs/heads/-f")
    git(made.root, "update-ref", "refs/heads/-f", made.c(4))
    way = 'Repository._way_home = lambda self: [("checkout", "--quiet", "--force", self.ref.removeprefix(_BRANCHES))]\n'
    source = trusting(tmp_path / "p", **{"bisect/repository.py": way})
    ran = bisect(made.root, "--good", made.c(1), "--bad", made.c(4), "--", "./t.sh", source=source)
    assert ran.code == 3
    assert "could not be checked out again" in ran.err

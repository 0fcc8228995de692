"""A crash point does nothing, until the environment names it; then it does exactly what was asked."""

from __future__ import annotations

import ast
import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import surefoot
import surefoot_harness
from surefoot.errors import ConfigError, InvariantError, NumericsError
from surefoot.storage.files import NAMES, VARIABLE, failpoint, read_environment, switched_on

PACKAGE = Path(surefoot.__file__).parent
PACKAGES = (PACKAGE, Path(surefoot_harness.__file__).parent)
POINT, OTHER = "journal.after_write", "durable.done"


@pytest.fixture(autouse=True)
def _off_afterwards() -> Iterator[None]:
    yield
    os.environ.pop(VARIABLE, None)
    read_environment()


def switch(text: str) -> dict[str, str]:
    os.environ[VARIABLE] = text
    return read_environment()


def calls(folder: Path) -> dict[str, list[str]]:
    """failpoint name -> files that call it; a name that is not a literal counts as "?"."""
    found: dict[str, list[str]] = {}
    texts = {path: path.read_text(encoding="utf-8") for path in folder.rglob("*.py")}
    for path, text in texts.items():
        for node in ast.walk(ast.parse(text)) if "failpoint" in text else ():
            called = isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", ""))
            if called == "failpoint":
                literal = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else "?"
                found.setdefault(str(literal), []).append(path.name)
    return found


def test_every_declared_point_is_in_the_code_and_every_point_in_the_code_is_declared() -> None:
    assert {name for package in PACKAGES for name in calls(package)} == set(NAMES)


def test_planted_undeclared_point_is_seen(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("from x import failpoint\nfailpoint('journal.typo')\nfailpoint(name)\n")
    assert set(calls(tmp_path)) - set(NAMES) == {"journal.typo", "?"}


def test_every_point_says_where_it_is() -> None:
    assert all(text.strip() and name.count(".") == 1 for name, text in NAMES.items())


def test_switched_off_nothing_happens() -> None:
    assert switched_on() == {}
    for name in NAMES:
        failpoint(name)


def test_an_undeclared_name_is_refused_even_when_everything_is_off() -> None:
    with pytest.raises(InvariantError, match=r"journal\.typo"):
        failpoint("journal.typo")


def test_a_typo_gets_a_suggestion() -> None:
    with pytest.raises(ConfigError) as caught:
        switch("journal.after_writ=kill")
    assert "did you mean journal.after_write" in caught.value.fix


@pytest.mark.parametrize(
    ("action", "kind"),
    [("raise:OSError", OSError), ("raise:KeyboardInterrupt", KeyboardInterrupt), ("raise:NumericsError", NumericsError),
     ("raise:subprocess.TimeoutExpired", TypeError), ("raise:os.error", OSError), ("raise:MemoryError", MemoryError)],
)  # fmt: skip
def test_raise_raises_what_was_named(action: str, kind: type[BaseException]) -> None:
    switch(f"{POINT}={action}")
    failpoint(OTHER)
    with pytest.raises(kind):
        failpoint(POINT)


def test_a_class_that_no_loaded_module_has_is_refused_at_the_hit() -> None:
    switch(f"{POINT}=raise:no_such_module.Error")
    with pytest.raises(ConfigError, match="no_such_module"):
        failpoint(POINT)


def test_errno_gives_the_disks_own_words() -> None:
    switch(f"{POINT}=errno:ENOSPC")
    with pytest.raises(OSError, match="No space left") as caught:
        failpoint(POINT)
    assert caught.value.errno == errno.ENOSPC


def test_sleep_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("surefoot.storage.files.time.sleep", slept.append)
    switch(f"{POINT}=sleep:2.5")
    failpoint(POINT)
    assert slept == [2.5]


def test_a_hit_number_means_that_hit_and_no_other() -> None:
    switch(f"{POINT}=raise:ValueError@3")
    failpoint(POINT)
    failpoint(POINT)
    with pytest.raises(ValueError, match=POINT):
        failpoint(POINT)
    failpoint(POINT)


def test_several_points_and_spaces_are_understood() -> None:
    assert switch(f" {POINT}=kill@2 ; {OTHER}=sleep:0,") == {OTHER: "sleep:0", POINT: "kill@2"}


@pytest.mark.parametrize(
    "text",
    ["journal.typo=kill", POINT, f"{POINT}=", f"{POINT}=explode", f"{POINT}=kill:9", f"{POINT}=sleep:nan", f"{POINT}=sleep:-1",
     f"{POINT}=sleep:inf", f"{POINT}=errno:ENOTHING", f"{POINT}=errno:errorcode", f"{POINT}=raise:print", f"{POINT}=raise:Nope",
     f"{POINT}=raise:__import__('os')", f"{POINT}=kill@0", f"{POINT}=kill@x", f"{POINT}=kill@-1", f"{POINT}=kill,{POINT}=kill",
     f"{POINT}=kill@1@2"],
)  # fmt: skip
def test_what_is_not_understood_is_refused_and_changes_nothing(text: str) -> None:
    switch(f"{OTHER}=sleep:0")
    with pytest.raises(ConfigError):
        switch(text)
    assert switched_on() == {OTHER: "sleep:0"}


def run(code: str, variable: str | None) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name != VARIABLE}
    environment = inherited | {"PYTHONPATH": str(PACKAGE.parent)} | ({VARIABLE: variable} if variable else {})
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)


def test_the_variable_is_read_at_import_and_kill_is_kill_9() -> None:
    code = f"from surefoot.storage.files import failpoint\nfailpoint({POINT!r})\nprint('one')\nfailpoint({POINT!r})\nprint('two')"
    killed = run("import functools; print = functools.partial(print, flush=True)\n" + code, f"{POINT}=kill@2")
    assert (killed.returncode, killed.stdout) == (-9, "one\n")
    assert run(code, None).stdout == "one\ntwo\n"
    assert "there is no failpoint" in run(code, "typo=kill").stderr

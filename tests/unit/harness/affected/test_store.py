"""The state file: what is damaged, foreign or newer is refused with a sentence, and everything runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from selection_kit import Project, ran

from surefoot.harness.affected.hooks import globs_for, read_extra
from surefoot.harness.affected.records import NAME, load
from surefoot.harness.affected.select import explain, find_test, nearest
from surefoot.harness.affected.session import TORN, _read_log
from surefoot.harness.affected.tree import Tree


@pytest.fixture
def project(tmp_path: Path) -> Project:
    made = Project(tmp_path, {"a.py": "def f():\n    return 1\n", "test_a.py": "import a\n"})
    made.session(one=ran("test_a.py", "a.py::f"))
    return made


def damage(text: str, how: str) -> str:
    value = json.loads(text)
    if how == "half":
        return text[: len(text) // 2]
    if how == "newer":
        return json.dumps({**value, "format": 99})
    if how == "foreign":
        return json.dumps({"tool": "something else"})
    if how == "dangling":
        value["tests"]["one"]["keys"] = [10**6]
    if how == "unknown field":
        value["tests"]["one"]["surprise"] = 1
    if how == "missing field":
        del value["tests"]["one"]["outcome"]
    if how == "list":
        return "[]"
    return "" if how == "empty" else json.dumps(value)


@pytest.mark.parametrize(
    "how", ["half", "newer", "foreign", "dangling", "unknown field", "missing field", "list", "empty"]
)
def test_a_file_that_cannot_be_trusted_is_an_empty_state_with_a_notice(project: Project, how: str) -> None:
    path = project.root / NAME
    path.write_text(damage(path.read_text(), how))
    state, notice = load(project.root)
    assert state.tests == {}
    assert notice is not None
    assert "everything runs" in notice


def test_no_file_is_a_first_run_without_a_notice(tmp_path: Path) -> None:
    assert load(tmp_path)[1] is None


def test_paths_in_the_file_are_relative(project: Project) -> None:
    assert str(project.root) not in (project.root / NAME).read_text()


def test_keys_that_nobody_refers_to_are_dropped(project: Project) -> None:
    for number in range(3):
        project.edit("a.py", f"return {1 + number}", f"return {2 + number}")
        project.session(one=ran("test_a.py", "a.py::f"))
    kept = [key for key in load(project.root)[0].keys if key.kind == "body"]
    assert len(kept) == 1


def test_a_log_that_ends_in_half_a_line_taints_its_tests(tmp_path: Path) -> None:
    log = tmp_path / "log-1"
    log.write_bytes(b'[3,"b","a.py","f"]\n[4,"b","a.py","g"]\n[4,"b","a.')
    facts = _read_log(log)
    assert {(3, ("x", TORN)), (4, ("x", TORN))} <= set(facts)


def test_virtual_environments_and_caches_are_not_the_project(tmp_path: Path) -> None:
    for name in (
        "a.py",
        "env/pyvenv.cfg",
        "env/lib/x.py",
        "__pycache__/a.cpython-311.pyc",
        ".git/x.py",
        "sub dir/ü.py",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    assert Tree(tmp_path).paths == ["a.py", "sub dir/ü.py"]


def test_declared_files_belong_to_matching_tests_and_nonsense_is_refused(tmp_path: Path) -> None:
    toml = tmp_path / "pyproject.toml"
    toml.write_text('[tool.surefoot.affected.extra]\n"tests/recipes/*" = ["configs/**/*.yaml"]\n')
    extra = read_extra(tmp_path)
    assert globs_for("tests/recipes/test_a.py::test_x", extra) == ["configs/**/*.yaml"]
    assert globs_for("tests/other/test_a.py::test_x", extra) == []
    for wrong in ("[tool.surefoot.affected]\nextras = {}\n", '[tool.surefoot.affected.extra]\n"a" = "b"\n', "[tool"):
        toml.write_text(wrong)
        with pytest.raises(ValueError, match=r"affected|TOML"):
            read_extra(tmp_path)


def test_why_names_the_block_and_counts_what_an_unaffected_test_depends_on(project: Project) -> None:
    assert "would not run" in explain(project.judge(), "one")[0]
    assert "1 function(s), 2 imported file(s)" in explain(project.judge(), "one")[1]
    project.edit("a.py", "return 1", "return 2")
    assert explain(project.judge(), "one") == ["one would run:", "  - a.py::f changed"]


def test_a_test_is_found_by_its_end_and_a_wrong_name_gets_the_nearest() -> None:
    tests = ["tests/test_a.py::test_x[1]", "tests/test_a.py::test_x[2]", "tests/test_b.py::test_y"]
    assert find_test("tests/test_a.py::test_x", tests) == tests[:2]
    assert find_test("test_y", tests) == tests[2:]
    assert find_test("test_z", tests) == []
    assert "tests/test_b.py::test_y" in nearest("tests/test_b.py::test_z", tests)

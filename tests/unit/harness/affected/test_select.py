"""Which tests are chosen after which edit. Every rule has an edit that only it can see."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from selection_kit import ENVIRONMENT, Project, ran

from surefoot.harness.affected.records import ObservedUse
from surefoot.harness.affected.remember import OutsideTests, StateBuilder
from surefoot.harness.affected.tree import Graph, Tree

FILES = {
    "test_x.py": "import a\n\ndef test_one():\n    a.one()\n\ndef test_two():\n    a.two()\n",
    "a.py": "from b import DEPTH\nLIMIT = 3\n\ndef one():\n    return DEPTH\n\ndef two():\n    return LIMIT\n",
    "b.py": "from c import BASE\nDEPTH = BASE + 1\n",
    "c.py": "from d import ROOT\nBASE = ROOT + 1\n",
    "d.py": "ROOT = int('1')\n",
    "data.yaml": "x: 1\n",
}
ONE, TWO = ran("test_x.py", "test_x.py::test_one", "a.py::one"), ran("test_x.py", "test_x.py::test_two", "a.py::two")


@pytest.fixture
def project(tmp_path: Path) -> Project:
    made = Project(tmp_path, FILES)
    made.session(one=ONE, two=TWO)
    assert made.chosen() == set()
    return made


@pytest.mark.parametrize(
    ("name", "before", "after", "chosen"),
    [
        ("a.py", "return DEPTH", "return DEPTH + 1", {"one"}),
        ("a.py", "return LIMIT", "return 7", {"two"}),
        ("a.py", "LIMIT = 3", "LIMIT = 4", {"two"}),
        ("a.py", "def one():", "def one(extra=1):", {"one"}),
        ("test_x.py", "    a.two()", "    a.two() or 1", {"two"}),
        ("b.py", "+ 1", "+ 2", {"one", "two"}),
        ("a.py", "LIMIT = 3", "LIMIT = 3  # three", set()),
        ("data.yaml", "1", "2", set()),
    ],
)
def test_an_edit_chooses_those_it_can_reach(
    project: Project, name: str, before: str, after: str, chosen: set[str]
) -> None:
    project.edit(name, before, after)
    assert project.chosen() == chosen


def test_an_edit_three_imports_away_is_seen(project: Project) -> None:
    project.edit("d.py", "'1'", "'2'")
    assert project.chosen() == {"one", "two"}


def test_planted_following_one_import_level_only_misses_it(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    def shallow(self: Graph, starts: list[str]) -> set[str]:
        return set(starts).union(*(self.edges(path) for path in starts))

    monkeypatch.setattr(Graph, "closure", shallow)
    project.session(one=ONE, two=TWO)
    project.edit("d.py", "'1'", "'2'")
    assert project.chosen() == set()


def test_the_content_of_a_data_file_counts_whatever_its_times_say(project: Project) -> None:
    project.session(one=ran("test_x.py", reads=("data.yaml",)))
    before = os.stat(project.root / "data.yaml")
    project.edit("data.yaml", "1", "2")
    os.utime(project.root / "data.yaml", ns=(before.st_atime_ns, before.st_mtime_ns - 10**12))  # an older checkout
    assert project.chosen() == {"one"}


def test_planted_comparing_times_misses_it(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tree, "_look", lambda self, path: "only its time would count")
    with pytest.raises(AssertionError):
        test_the_content_of_a_data_file_counts_whatever_its_times_say(project)


def test_a_failed_test_stays_chosen_until_it_passes(project: Project) -> None:
    project.session(one=ran("test_x.py", "test_x.py::test_one", outcome="failed"))
    assert project.chosen() == {"one"}
    project.session(one=ONE)
    assert project.chosen() == set()


def test_planted_storing_before_green_forgets_the_failure(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    real = StateBuilder._record

    def too_early(self: StateBuilder, one: object, edited: set[str]) -> object:
        record = real(self, one, edited)  # type: ignore[arg-type]
        record.outcome = "passed"
        return record

    monkeypatch.setattr(StateBuilder, "_record", too_early)
    with pytest.raises(AssertionError):
        test_a_failed_test_stays_chosen_until_it_passes(project)


def test_a_test_that_was_chosen_and_did_not_run_stays_chosen(project: Project) -> None:
    project.edit("a.py", "return LIMIT", "return 8")
    project.session(one=ONE)  # stopped after the first test
    project.edit("a.py", "return 8", "return LIMIT")
    assert project.chosen() == {"two"}


@pytest.mark.parametrize("name", ["b.py", "d.py", "a.py"])
def test_a_deleted_file_chooses_all_that_imported_it(project: Project, name: str) -> None:
    (project.root / name).unlink()
    assert project.chosen() == {"one", "two"}


def test_a_removed_function_that_a_file_still_imports_breaks_everybody(tmp_path: Path) -> None:
    project = Project(tmp_path, {"pkg/__init__.py": "from .m import f, g\n", "pkg/m.py": "def f():\n    return 1\n\ndef g():\n    return 2\n", "test_x.py": "import pkg\n"})  # fmt: skip
    project.session(one=ran("test_x.py", "pkg/m.py::g"))
    project.edit("pkg/m.py", "def f():\n    return 1\n", "")
    assert project.chosen() == {"one"}


def test_a_new_file_that_shadows_an_import_is_noticed(project: Project) -> None:
    project.write("src/c.py", "BASE = 9\n")
    assert project.chosen() == {"one", "two"}


def test_a_new_file_whose_name_is_looked_for_is_noticed(tmp_path: Path) -> None:
    project = Project(
        tmp_path, {"a.py": "def f(p):\n    return (p / 'extra.yaml').exists()\n", "test_x.py": "import a\n"}
    )
    project.session(one=ran("test_x.py", "a.py::f"), two=ran("test_x.py"))
    project.write("conf/extra.yaml", "")
    assert project.chosen() == {"one"}


def test_a_file_that_was_missing_and_appears_is_a_change(project: Project) -> None:
    project.session(one=ran("test_x.py", reads=("later.json",)))
    project.write("later.json", "{}")
    assert project.chosen() == {"one"}


def test_a_listed_folder_that_gets_a_file_is_a_change(project: Project) -> None:
    project.write("recipes/a.yaml", "")
    project.session(one=ran("test_x.py", reads=("recipes",)), two=TWO)
    project.write("recipes/b.yaml", "")
    assert project.chosen() == {"one"}


def test_a_declared_glob_counts_new_changed_and_deleted_files(project: Project) -> None:
    declared = ran("test_x.py")
    declared.globs = ["conf/**/*.yaml"]
    project.write("conf/a.yaml", "1")
    project.session(one=declared, two=TWO)
    project.write("conf/deep/b.yaml", "1")
    assert project.chosen() == {"one"}


def test_another_environment_chooses_everything_and_says_which(project: Project) -> None:
    other = {**ENVIRONMENT, "python": "3.99.0"}
    assert project.chosen(other) == {"one", "two"}
    assert "python changed from 3.11.0 to 3.99.0" in list(project.judge(other).reasons("one"))


def test_a_config_file_is_everybodys_dependency(project: Project) -> None:
    project.write("pytest.ini", "[pytest]\n")
    assert project.chosen() == {"one", "two"}


def test_a_test_with_a_blind_spot_always_runs_and_says_why(project: Project) -> None:
    project.session(one=ran("test_x.py", problems={"started Python with -I"}))
    assert list(project.judge().reasons("one")) == ["it always runs: started Python with -I"]


# -- what tests do for each other --------------------------------------------------------
CACHED = "import functools\n\n@functools.cache\ndef table():\n    return fill()\n\ndef fill():\n    return 1\n\ndef other():\n    return 2\n"


def cached_project(tmp_path: Path) -> Project:
    project = Project(tmp_path, {"m.py": CACHED, "test_x.py": "import m\n\ndef test_1():\n    m.table()\n\ndef test_2():\n    m.table()\n\ndef test_3():\n    m.other()\n"})  # fmt: skip
    project.session(
        one=ran("test_x.py", "test_x.py::test_1", "m.py::table", "m.py::fill"),
        two=ran("test_x.py", "test_x.py::test_2"),  # the cache was full: nothing of m ran
        three=ran("test_x.py", "test_x.py::test_3", "m.py::other"),
    )
    return project


def test_whoever_uses_a_cached_result_depends_on_what_filled_the_cache(tmp_path: Path) -> None:
    project = cached_project(tmp_path)
    project.edit("m.py", "return 1", "return 5")
    assert project.chosen() == {"one", "two"}


def test_planted_counting_only_what_a_test_ran_itself_misses_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StateBuilder, "_gifts", lambda self, bodies: {})
    with pytest.raises(AssertionError):
        test_whoever_uses_a_cached_result_depends_on_what_filled_the_cache(tmp_path)


def test_what_a_first_import_ran_belongs_to_all_importers(tmp_path: Path) -> None:
    project = Project(tmp_path, {"m.py": "def build():\n    return 1\n\nX = build()\n", "test_x.py": "def test_1():\n    import m\n\ndef test_2():\n    import m\n"})  # fmt: skip
    project.session(
        one=ran("test_x.py", "test_x.py::test_1", "m.py::", "m.py::build", loaded="m.py"),
        two=ran("test_x.py", "test_x.py::test_2"),
    )
    project.edit("m.py", "return 1", "return 5")
    assert project.chosen() == {"one", "two"}


def test_what_ran_and_was_read_during_collection_belongs_to_all_importers(tmp_path: Path) -> None:
    project = Project(tmp_path, {"m.py": "def build():\n    return 1\n\nX = build()\n", "n.py": "", "test_x.py": "import m\n", "test_y.py": "import n\n", "d.json": "1"})  # fmt: skip
    seen = ObservedUse(blocks={("m.py", ""), ("m.py", "build")}, reads={"d.json": {("m.py", "")}})
    project.session(OutsideTests(seen, started=2e10), x=ran("test_x.py"), y=ran("test_y.py"))
    project.edit("d.json", "1", "2")
    assert project.chosen() == {"x"}
    project.edit("d.json", "2", "1")
    project.edit("m.py", "return 1", "return 5")
    assert project.chosen() == {"x"}


def test_a_module_imported_by_a_computed_name_is_followed(tmp_path: Path) -> None:
    project = Project(
        tmp_path, {"plug.py": "X = int('1')\n", "load.py": "def f(n):\n    pass\n", "test_x.py": "import load\n"}
    )
    project.session(one=ran("test_x.py", "load.py::f", imports={("load.py", "plug")}))
    project.edit("plug.py", "'1'", "'2'")
    assert project.chosen() == {"one"}


def test_an_edit_while_the_tests_run_makes_them_run_again(tmp_path: Path) -> None:
    project = Project(tmp_path, FILES)
    judge = project.judge()
    project.edit("a.py", "return LIMIT", "return 8")
    memory = StateBuilder(judge.state, judge.view, ENVIRONMENT, OutsideTests(started=2e10))
    state = memory.learn({"one": ONE, "two": TWO}, judge, ())
    assert {test: record.always for test, record in state.tests.items()} == dict.fromkeys(
        ["one", "two"], "a.py was changed while the tests ran"
    )

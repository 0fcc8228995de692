"""Shards and the fast form: the union is the whole, and a listed test that does not exist is found."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plugin_kit import Nested

from surefoot.errors import ConfigError
from surefoot.harness import selection
from surefoot.harness.selection import is_listed, part_of, prove, shard, under, unknown_entries

pytest_plugins = ["pytester", "plugin_kit"]

IDS = [f"tests/test_{i % 7}.py::test_{i}[é-{i}]" for i in range(200)]


def each_test_is_in_exactly_one(ids: list[str], parts: int) -> None:
    homes = [[i for i in range(1, parts + 1) if shard(f"{i}/{parts}", {})(node_id)] for node_id in ids]
    assert all(len(found) == 1 for found in homes), "a test has no shard, or two"


@given(st.lists(st.text(max_size=12), unique=True, max_size=20), st.integers(1, 9))
def test_hashed_shards_cover_everything_once(ids: list[str], parts: int) -> None:
    each_test_is_in_exactly_one(ids, parts)


def test_the_part_of_a_test_never_changes() -> None:
    """Other machines and Pythons must agree, so these numbers are written down."""
    assert [part_of(f"tests/test_a.py::test_{i}", 4) for i in range(8)] == [1, 4, 2, 4, 2, 3, 3, 1]


def test_shards_are_about_equal() -> None:
    sizes = prove("4", IDS, {}).sizes.values()
    assert min(sizes) > 30


def test_planted_shard_that_forgets_a_remainder_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selection, "part_of", lambda node_id, parts: part_of(node_id, parts + 1))
    with pytest.raises(AssertionError, match="no shard"):
        each_test_is_in_exactly_one(IDS, 3)
    assert not prove("3", IDS, {}).holds


def test_orphans_and_doubles_of_named_shards_are_found() -> None:
    ids = ["tests/unit/test_a.py::f", "tests/runs/test_b.py::f", "tests/new/test_c.py::f"]
    proof = prove("named", ids, {"unit": ["tests/unit/"], "runs": ["./tests/runs"]})
    assert (proof.orphans, proof.doubles) == ((ids[2],), ())
    assert "1 in none" in str(proof)
    twice = prove("named", ids, {"a": ["tests"], "b": ["tests/new"]})
    assert (twice.orphans, twice.doubles) == ((), (ids[2],))
    assert prove("named", ids, {"a": ["tests/unit", "tests/new/test_c.py"], "b": ["tests/runs"]}).holds


def test_a_folder_is_not_its_namesake() -> None:
    assert under("tests/unit/test_a.py::f", "tests/unit")
    assert not under("tests/unit_more/test_a.py::f", "tests/unit")


def test_nothing_proves_nothing() -> None:
    assert not prove("2", [], {}).holds


@pytest.mark.parametrize(
    "word", ["0/3", "4/3", "1/0", "a/b", "1", "", "1/2/3", "-1/2", "1/99999999999", "unit", "1/２"]
)
def test_a_shard_that_does_not_exist_is_refused(word: str) -> None:
    with pytest.raises(ConfigError, match="no such shard"):
        shard(word, {})


@pytest.mark.parametrize("word", ["0", "-1", "x", "named", "", "10000", "²"])
def test_a_proof_of_nothing_is_refused(word: str) -> None:
    with pytest.raises(ConfigError):
        prove(word, IDS, {})


def test_an_entry_means_a_test_its_parameters_its_class_or_its_file() -> None:
    for entry in ("t.py::C::f[1]", "t.py::C::f", "t.py::C", "t.py"):
        assert is_listed("t.py::C::f[1]", entry)
    for entry in ("t.py::C::f[2]", "t.py::C::g", "t.py::c", "t.p", "t.py::C::f["):
        assert not is_listed("t.py::C::f[1]", entry)


def test_an_entry_is_unknown_only_where_that_can_be_known(tmp_path: Path) -> None:
    (tmp_path / "there.py").touch()
    (tmp_path / "other.py").touch()
    entries = ["there.py::f", "there.py::gone", "other.py::f", "removed.py::f"]
    assert unknown_entries(entries, ["there.py::f[1]"], tmp_path, lambda file: False) == [
        "there.py::gone",
        "removed.py::f",
    ]
    assert unknown_entries(entries, ["there.py::f[1]"], tmp_path, lambda file: True) == ["removed.py::f"]


# -- in a session -----------------------------------------------------------------------


def project(pytester: pytest.Pytester, text: str) -> None:
    pytester.makepyprojecttoml(text)
    for folder in ("unit", "runs"):
        (pytester.path / folder).mkdir()
        tests = "\n".join(f"def test_{folder}_{i}(): pass" for i in range(4))
        (pytester.path / folder / f"test_{folder}.py").write_text(tests)


def ran(done: pytest.RunResult) -> set[str]:
    return {line.split(" ")[0] for line in done.outlines if " PASSED" in line}


def test_the_shards_of_a_session_add_up_and_the_proof_runs_nothing(pytester: pytest.Pytester, nested: Nested) -> None:
    project(pytester, "[tool.surefoot.shards]\nunit = ['unit']\nruns = ['runs']")
    parts = [ran(nested("-v", "--shard", f"{i}/2")) for i in (1, 2)]
    assert len(parts[0] | parts[1]) == 8
    assert parts[0] & parts[1] == set()
    assert len(ran(nested("-v", "--shard", "runs"))) == 4
    proof = nested("-v", "--prove-shards", "named")
    assert (proof.ret, ran(proof)) == (0, set())
    assert not (pytester.path / "unit_results").exists()
    proof.stdout.fnmatch_lines(["surefoot: 2 shards, 4 + 4 = 8 of 8 tests: each test in exactly one"])


def test_an_orphan_breaks_the_proof(pytester: pytest.Pytester, nested: Nested) -> None:
    project(pytester, "[tool.surefoot.shards]\nunit = ['unit']\nruns = ['runs']")
    (pytester.path / "test_orphan.py").write_text("def test_lost(): pass")
    done = nested("--prove-shards", "named")
    assert done.ret == pytest.ExitCode.INTERRUPTED
    done.stdout.fnmatch_lines(["*test_orphan.py::test_lost: is in no shard, so it would never run*"])


@pytest.mark.parametrize("words", [["--shard", "3/2"], ["--shard", "lunch"], ["--fast"]], ids=" ".join)
def test_a_selection_that_makes_no_sense_is_a_usage_error(
    pytester: pytest.Pytester, nested: Nested, words: list[str]
) -> None:
    pytester.makepyfile("def test_one(): pass")
    assert nested(*words).ret == pytest.ExitCode.USAGE_ERROR


def test_fast_leaves_out_what_is_listed_and_says_so(pytester: pytest.Pytester, nested: Nested) -> None:
    project(pytester, "[tool.surefoot]\nslow_tests = ['unit/test_unit.py::test_unit_1', 'runs/test_runs.py']")
    done = nested("--fast")
    done.assert_outcomes(passed=3, deselected=5)
    done.stdout.fnmatch_lines(["surefoot: 5 deselected: listed in slow_tests (--fast)"])


def test_a_listed_test_that_does_not_exist_is_a_collection_error(pytester: pytest.Pytester, nested: Nested) -> None:
    project(pytester, "[tool.surefoot]\nslow_tests = ['unit/test_unit.py::test_renamed']")
    done = nested("--fast")
    assert done.ret == pytest.ExitCode.INTERRUPTED
    done.stdout.fnmatch_lines(["*slow_tests lists unit/test_unit.py::test_renamed, and there is no such test*"])
    nested("--fast", "unit/test_unit.py::test_unit_0").assert_outcomes(passed=1)

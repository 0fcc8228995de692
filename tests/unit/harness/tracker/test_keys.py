"""Names of tests: short where that is clear, longer where it is not, never two tests under one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surefoot.harness.tracker import results
from surefoot.harness.tracker.results import keys


def test_the_key_is_module_and_function_with_class_and_parameters() -> None:
    ids = ["tests/unit/test_policy.py::test_gen", "tests/unit/test_policy.py::TestA::test_b[x-1]"]
    assert keys(ids)[0] == dict(zip(ids, ["test_policy::test_gen", "test_policy::TestA::test_b[x-1]"], strict=True))


def test_two_files_of_one_name_both_carry_their_folder_and_it_is_said() -> None:
    found, notes = keys(["a/test_x.py::test_f", "b/test_x.py::test_f", "b/test_y.py::test_f"])
    assert sorted(found.values()) == ["a.test_x::test_f", "b.test_x::test_f", "test_y::test_f"]
    assert len(notes) == 1
    assert "a/test_x.py, b/test_x.py" in notes[0]


def test_names_that_clash_even_with_folders_stay_apart() -> None:
    ids = ["a/b.py::f", "a.b.py::f", "c/b.py::f"]
    assert sorted(keys(ids)[0].values()) == ["a.b::f", "a/b.py::f", "c.b::f"]


def never_two_under_one(ids: list[str]) -> None:
    found, _ = keys(ids)
    assert set(found) == set(ids)
    assert len(set(found.values())) == len(set(ids)), "two tests share a key: one overwrites the other"


PARTS = st.lists(st.sampled_from(["a", "b", "test_x", "a.b", ".."]), min_size=1, max_size=3).map("/".join)
IDS = st.tuples(
    PARTS, st.sampled_from([".py", ".txt", ""]), st.sampled_from(["", "::f", "::f[1]", "::C::f[1]", "::f[::]"])
)


@given(st.lists(IDS.map("".join), max_size=8))
def test_no_two_tests_ever_share_a_key(ids: list[str]) -> None:
    never_two_under_one(ids)


def test_planted_key_without_parameters_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = results._rest
    monkeypatch.setattr(results, "_rest", lambda node_id: whole(node_id).split("[")[0])
    with pytest.raises(AssertionError, match="overwrites"):
        never_two_under_one(["t.py::f[1]", "t.py::f[2]"])


def test_a_file_name_that_is_no_text_is_spelled_out() -> None:
    (key,) = keys(["test_\udcff.py::f"])[0].values()
    assert key == "test_\\udcff::f"

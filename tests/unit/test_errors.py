"""Errors say what, why and fix, carry their exit code, and survive the way back from a worker."""

from __future__ import annotations

import pickle

import pytest

from surefoot import errors
from surefoot.errors import SurefootError

TREE = {
    "SurefootError": 70, "ConfigError": 2, "ShapeError": 2, "StateError": 3, "InputError": 4, "TaskError": 4,
    "ModelError": 4, "RewardError": 4, "EngineError": 4, "ExtensionError": 4, "ToolError": 4, "ToolFailedError": 4, "SecurityError": 5, "InvariantError": 1, "PartialGroupError": 1,
    "NumericsError": 78, "StorageError": 74, "MemoryLimitError": 74, "StoppedError": 75, "StalledError": 76, "FleetError": 77, "LearnerLostError": 77,
    "LearnerStartError": 77,
    "CollapseStopError": 79,
}  # fmt: skip
CLASSES: dict[str, type[SurefootError]] = {
    name: value for name, value in vars(errors).items() if isinstance(value, type)
}


def test_every_error_has_the_exit_code_of_the_table() -> None:
    assert {name: cls.exit_code for name, cls in CLASSES.items()} == TREE


@pytest.mark.parametrize("name", TREE)
def test_the_docstring_draws_the_tree_as_it_is(name: str) -> None:
    assert any(
        line.split()[-1:] and name in line and str(TREE[name]) in line for line in (errors.__doc__ or "").splitlines()
    )


@pytest.mark.parametrize("name", TREE)
def test_an_error_survives_pickling_with_its_three_strings(name: str) -> None:
    error = CLASSES[name]("a", "b", "c")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert (again.what, again.why, again.fix, str(again)) == ("a", "b", "c", str(error))


def test_the_message_has_three_lines_in_order() -> None:
    assert str(SurefootError("broken", "because", "do this")) == "broken\n  why: because\n  fix: do this"


@pytest.mark.parametrize("name", ["ConfigError", "ShapeError", "InputError", "TaskError", "PartialGroupError"])
def test_a_refused_value_is_also_a_value_error(name: str) -> None:
    assert issubclass(CLASSES[name], ValueError)


def test_every_error_is_ours_and_none_is_caught_by_accident() -> None:
    assert all(issubclass(cls, SurefootError) for cls in CLASSES.values())
    assert not any(issubclass(cls, OSError | KeyError | RuntimeError) for cls in CLASSES.values())

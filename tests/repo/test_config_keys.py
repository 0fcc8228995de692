"""The config grows by decision only, and every key does something."""

from __future__ import annotations

from key_effects import all_keys, claims, decided_defaults, key_effects
from repo_tree import parse


def test_the_keys_are_those_we_decided_on() -> None:
    assert sorted(all_keys()) == sorted(decided_defaults()), "a new or removed key is a decision: config_keys.txt"


def test_two_keys_are_required_and_there_are_not_many_more_than_a_hundred() -> None:
    from surefoot.config import Config

    assert [name for name, field in Config.model_fields.items() if field.is_required()] == ["model", "tasks"]
    assert len(all_keys()) <= 147


def test_every_key_explains_itself() -> None:
    from surefoot.config import Config

    silent = [name for name, field in Config.model_fields.items() if not field.description and "." not in name]
    tables = {key.split(".")[0] for key in all_keys() if "." in key}
    assert [name for name in silent if name not in tables] == []


def test_every_key_has_a_test_that_it_changes_something() -> None:
    table = key_effects()
    assert [key for key in all_keys() if key not in table] == [], "mark a test with @pytest.mark.config_key(...)"


def test_no_test_claims_a_key_that_does_not_exist() -> None:
    known = set(all_keys())
    assert {key: nodes for key, nodes in key_effects().items() if key not in known} == {}


def test_claims_are_found_on_functions_classes_and_files() -> None:
    source = parse(
        "import pytest\n"
        "pytestmark = [pytest.mark.config_key('whole')]\n"
        "class TestA:\n"
        "    @pytest.mark.config_key('one', 'two')\n"
        "    def test_x(self): ...\n"
        "@pytest.mark.config_key('three')\n"
        "def helper(): ...\n",
        "t.py",
    )
    assert list(claims(source)) == [(key, "t.py::TestA::test_x") for key in ("whole", "one", "two")]

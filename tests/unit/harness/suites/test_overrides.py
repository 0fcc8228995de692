from __future__ import annotations

import pytest

from surefoot.errors import ConfigError
from surefoot.harness.suites.manifest import Overrides, Recipe, apply

CHECKS = ('max(data["loss"]) < 1', 'min(data["reward"]) > 0')
ONE = Recipe(name="one", max_steps=100, steps_per_run=100, minutes=5.0, checks=CHECKS)
TWO = Recipe(name="two", max_steps=100, steps_per_run=100, minutes=5.0, checks=CHECKS[:1])


def test_set_changes_keys_with_their_types() -> None:
    (recipe,) = apply(Overrides(set=("max_steps=3", "minutes = 0.5", "seeds=[1, 2]", "container=my/image:1")), [ONE])
    assert (recipe.max_steps, recipe.steps_per_run, recipe.num_runs) == (3, 3, 1)
    assert (recipe.minutes, recipe.seeds, recipe.container) == (0.5, (1, 2), "my/image:1")


@pytest.mark.parametrize(
    "item",
    [
        "max_steps",
        "max_steps=0",
        "max_steps=many",
        "name=x",
        "checks=[]",
        "=3",
        "minutes=nan",
        "nodes=1.5",
        "steps_per_run=50",
    ],
)
def test_a_set_that_makes_no_sense_is_refused(item: str) -> None:
    with pytest.raises(ConfigError):
        apply(Overrides(set=(item,)), [ONE])


def test_the_same_key_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match="twice"):
        apply(Overrides(set=("nodes=1", "nodes=2")), [ONE])


def test_relax_replaces_a_check_wherever_it_is_whatever_its_spaces() -> None:
    new = 'max(data["loss"]) < 2'
    one, two = apply(Overrides(relax=(f'max( data["loss"] )<1 => {new}',)), [ONE, TWO])
    assert one.checks == (new, CHECKS[1])
    assert two.checks == (new,)


@pytest.mark.parametrize("item", ["max(x) < 1", "=>x", 'max(data["loss"]) < 1=>', 'max(data["lost"]) < 1=>x > 1'])
def test_a_relax_that_changes_nothing_is_refused(item: str) -> None:
    with pytest.raises(ConfigError):
        apply(Overrides(relax=(item,)), [ONE])


def test_a_dropped_check_needs_a_reason_and_a_check_that_is_there() -> None:
    with pytest.raises(ConfigError, match="--reason"):
        apply(Overrides(drop=(CHECKS[0],), reason="  "), [ONE])
    with pytest.raises(ConfigError, match="no check is changed"):
        apply(Overrides(drop=("other",), reason="why"), [ONE])
    (recipe,) = apply(Overrides(drop=(CHECKS[0],), reason="why"), [ONE])
    assert recipe.checks == CHECKS[1:]


def test_the_last_check_cannot_be_dropped() -> None:
    with pytest.raises(ConfigError, match="no check of two is left"):
        apply(Overrides(drop=(CHECKS[0],), reason="why"), [ONE, TWO])


def test_everything_is_recorded_as_typed() -> None:
    changes = Overrides(set=("nodes=1",), relax=("a=>b",), drop=("c",), reason="spike, see log")
    assert changes.recorded() == ("set nodes=1", "relax a=>b", "drop-check c", "reason spike, see log")
    assert Overrides().recorded() == ()

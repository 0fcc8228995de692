"""The table of names that needs no torch says the same as the code behind it."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from surefoot import reference
from surefoot.config import Config, choices
from surefoot.config.load import config_from_values
from surefoot.errors import ConfigError
from surefoot.guards.collapse_rules import RULES
from surefoot.maths.advantages import ESTIMATORS
from surefoot.maths.losses import LOSSES, LossSettings, StepTotals, mean_over_rows

KEYS = {"importance_sampling_level": "level", "epsilon_high": "epsilon_high", "delta": "delta"}
"""Config key -> what `LossSettings` calls it; a loss knows nothing of the others."""


def test_config_maths_and_oracle_have_the_same_losses() -> None:
    assert list(choices.LOSSES) == list(LOSSES) == list(reference.LOSSES)


@pytest.mark.parametrize("name", LOSSES)
def test_what_the_config_says_of_a_loss_is_so(name: str) -> None:
    facts, kind, oracle = choices.LOSSES[name], LOSSES[name], reference.LOSSES[name]
    assert facts.row_ratio == kind.row_ratio == oracle.row_ratio
    assert facts.row_means == (kind.reduce is mean_over_rows)


@pytest.mark.parametrize("name", LOSSES)
def test_what_the_config_refuses_the_maths_refuses_too(name: str) -> None:
    values = {
        "importance_sampling_level": ("token", "sequence"),
        "epsilon_high": (None, 0.3, 5.0),
        "delta": (None, 9.0),
    }
    fine = {"epsilon_high": 5.0} if name == "cispo" else {}
    for key, tried in values.items():
        for value in tried:
            refused = [pair for pair in choices.LOSSES[name].refuses if pair.key == key and pair.when(value)]
            assert bool(refused) == maths_refuses(name, fine | {KEYS[key]: value}), (key, value)


def maths_refuses(name: str, keys: dict[str, Any]) -> bool:
    try:
        LossSettings(loss_type=name, **keys)
    except ConfigError:
        return True
    return False


def test_every_other_pair_names_a_key_and_refuses_one_of_its_values() -> None:
    pairs = [pair for facts in choices.LOSSES.values() for pair in facts.refuses if pair.key not in KEYS]
    assert [(pair.key, [name for name in ESTIMATORS if pair.when(name)]) for pair in pairs] == [
        ("scale_rewards", ["group"])
    ]


def test_estimators_and_rules_are_those_of_the_code() -> None:
    assert list(choices.ESTIMATORS) == list(ESTIMATORS)
    assert sorted(choices.RULES) == sorted(RULES)


def test_every_engine_is_made_by_a_function_that_is_there() -> None:
    for facts in (*choices.ENGINES.values(), choices.OWN_ENGINE):
        module, _, name = facts.makes.partition(":")
        assert callable(getattr(importlib.import_module(module), name)), facts.makes


def test_a_planted_name_without_code_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(choices.LOSSES, "ghost", choices.LossFacts())  # type: ignore[arg-type]
    with pytest.raises(AssertionError):
        test_config_maths_and_oracle_have_the_same_losses()


@pytest.mark.parametrize(
    ("text", "is_code"),
    [("my_loss.py:f", True), ("/a b/my.py:F_1", True), ("~/x.py:f", True), ("my_loss.py", False), ("my_loss.py:", False),
     ("dapo", False), ("my_loss.py:f g", False), ("my\nloss.py:f", False), ("a:b.py:f", False), ("my_loss.py:2", False)],
)  # fmt: skip
def test_what_names_code(text: str, is_code: bool) -> None:
    assert choices.is_own(text) == is_code


@pytest.mark.parametrize("key", ["loss_type", "scale_rewards", "engine.kind"])
def test_own_code_has_an_absolute_path_as_soon_as_it_is_read(tmp_path: Any, key: str) -> None:
    table, _, leaf = key.rpartition(".")
    values = {"model": "pebble", "tasks": "builtin:sums", **({table: {leaf: "x.py:f"}} if table else {leaf: "x.py:f"})}
    config: Any = config_from_values(values, source="here", base=tmp_path).config
    for part in key.split("."):
        config = getattr(config, part)
    assert config == f"{tmp_path}/x.py:f"


def test_totals_reach_a_reduction_of_somebody_else() -> None:
    import torch

    from surefoot.maths.losses import LossKind, policy_loss

    kind = LossKind(
        objective=lambda i: -i.ratio * i.advantages, reduce=lambda each, counts, totals: each.sum() / totals.rows
    )
    logp = torch.zeros(2, 3)
    terms = policy_loss(
        logp, logp, torch.ones(2), torch.ones(2, 3).bool(), settings=LossSettings(loss_type="mine", own=kind),
        totals=StepTotals(4, 99, 9),
    )  # fmt: skip
    assert float(terms.loss) == -1.5


def test_a_wrong_name_is_answered_with_all_of_them_and_the_form_of_your_own() -> None:
    with pytest.raises(ConfigError) as caught:
        config_from_values(
            {"model": "pebble", "tasks": "t", "loss_type": "dappo"}, source="here", base=__import__("pathlib").Path()
        )
    assert all(f'"{name}"' in caught.value.what for name in LOSSES)
    assert 'your own as "file.py:name"' in caught.value.what
    assert Config.model_fields["loss_type"].default in LOSSES


@pytest.mark.parametrize("kind", choices.ENVIRONMENTS)
def test_every_kind_of_environment_has_code_behind_it_and_says_how_it_is_written(kind: str) -> None:
    facts = choices.ENVIRONMENTS[kind]
    module, _, name = facts.makes.partition(":")
    assert callable(getattr(importlib.import_module(module), name))
    written = f"{kind}:{facts.argument}" if facts.argument else kind
    assert choices.named_environment(written) == (kind, facts.argument)
    assert choices.environment_problem(written) is None
    assert choices.environment_problem(kind if facts.argument else f"{kind}:more") is not None

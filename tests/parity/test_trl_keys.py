"""The table of TRL's names against the TRL that is installed: every field has a row, every default is as we say."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", reason="needs the trl extra")

from trl import GRPOConfig, GRPOTrainer

from surefoot.config import foreign
from surefoot.config.foreign import OtherDefault
from surefoot.config.keys import ALIASES, all_keys


def defaults() -> dict[str, Any]:
    """Field of GRPOConfig -> its default."""
    made = {}
    for each in dataclasses.fields(GRPOConfig):
        factory = each.default_factory
        made[each.name] = each.default if factory is dataclasses.MISSING else factory()
    return made


def without_a_row(names: Iterable[str], trainer: str) -> list[str]:
    return sorted(set(names) - foreign.names_of(trainer))


def wrong_defaults(table: Iterable[OtherDefault]) -> list[str]:
    """Differences that the table leaves out, differences that are none, and defaults that are not TRL's."""
    theirs, listed = defaults(), {each.key: each for each in table}
    found = [f"{each.field} is {theirs.get(each.field)!r}" for each in listed.values() if not as_listed(each, theirs)]
    for field, value in theirs.items():
        key = all_keys().get(ALIASES.get(field, field))
        if key is None or field == "vllm_importance_sampling_cap":  # the old name of clip_max
            continue
        row = listed.get(key.path)
        if (row is not None) != (shown(value) != shown(key.field.default)):
            found.append(f"{key.path}: TRL has {value!r}, we {key.field.default!r}, and the table {row}")
    return found + [f"{key}: no key of ours" for key in listed if key not in all_keys()]


def as_listed(row: OtherDefault, theirs: dict[str, Any]) -> bool:
    return row.field in theirs and shown(theirs[row.field]) == row.trl


def shown(value: Any) -> str:
    if value is None:
        return "left out"
    return str(value).lower() if isinstance(value, bool) else str(getattr(value, "value", value))


def test_every_field_of_grpo_config_and_every_argument_of_the_trainer_has_a_row() -> None:
    fields = {each.name for each in dataclasses.fields(GRPOConfig)}
    assert without_a_row(fields, "trl") == [], "a new field of TRL's: give it a row in foreign.toml"
    arguments = set(inspect.signature(GRPOTrainer.__init__).parameters) - {"self"}
    assert without_a_row(arguments, "trl_trainer") == []
    assert foreign.names_of("trl") - fields == set(), "no field of this TRL; move it to trl_scripts"


def test_planted_field_without_a_row_is_seen() -> None:
    assert without_a_row(["beta", "brand_new_field"], "trl") == ["brand_new_field"]


def test_defaults_that_differ_are_those_of_the_table() -> None:
    assert wrong_defaults(foreign.other_defaults()) == []


def test_what_trls_defaults_come_to(tmp_path: Path) -> None:
    made = GRPOConfig(output_dir=str(tmp_path), use_cpu=True)
    means = {each.key: each.means for each in foreign.other_defaults()}
    assert (made.bf16, means["dtype"]) == (True, "bfloat16")
    assert (made.generation_batch_size, means["tasks_per_step"]) == (8, "8 rollouts, one group")
    assert (made.num_train_epochs, means["max_steps"]) == (3, "3 epochs")


def test_planted_wrong_and_missing_defaults_are_seen() -> None:
    table = foreign.other_defaults()
    assert len(wrong_defaults(table[1:])) == 1, "one is left out"
    assert len(wrong_defaults([dataclasses.replace(table[0], trl="cosine"), *table[1:]])) == 1
    same = dataclasses.replace(table[0], key="epsilon", field="epsilon", trl="0.2")
    assert len(wrong_defaults([*table, same])) == 1, "that default is the same"

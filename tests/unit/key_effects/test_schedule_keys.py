"""What the keys of the schedule change: how often engines get new weights, and how far sampling runs ahead.

Every config here is loaded as a file would be, so that what refuses a cadence is what refuses a user.
"""

from __future__ import annotations

from typing import Any

import pytest

from surefoot.config import rules
from surefoot.errors import ConfigError
from surefoot.runtime.sampler import allowance

ASYNC = dict(importance_sampling_correction=True)


@pytest.mark.config_key("weight_sync_steps")
@pytest.mark.parametrize(("sync", "passes", "needed"), [(1, 1, 0), (3, 1, 2), (2, 2, 0), (6, 2, 4), (9, 3, 6)])
def test_a_cadence_needs_its_staleness_to_the_version(configure: Any, sync: int, passes: int, needed: int) -> None:
    keys = dict(weight_sync_steps=sync, num_iterations=passes, max_steps=18, **ASYNC)
    assert configure(max_staleness=needed, **keys).config.weight_sync_steps == sync
    if needed:
        with pytest.raises(
            ConfigError, match=rf"weight_sync_steps = {sync} (.|\n)*set max_staleness = {needed} or more"
        ):
            configure(max_staleness=needed - 1, **keys)


@pytest.mark.config_key("weight_sync_steps", "num_iterations")
def test_weights_are_synced_between_two_batches_only(configure: Any) -> None:
    assert configure(num_iterations=2, max_steps=2).config.weight_sync_steps == 1, "after every batch"
    with pytest.raises(ConfigError, match="weight_sync_steps = 3 is not a multiple of num_iterations = 2"):
        configure(num_iterations=2, weight_sync_steps=3, max_steps=2, max_staleness=9, **ASYNC)


@pytest.mark.parametrize("key", ["weight_sync_steps", "num_iterations", "tasks_per_step"])
def test_a_size_that_is_none_is_named_once(configure: Any, key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        configure(**{key: 0})
    assert str(caught.value).count(f"{key} = 0") == 1


def test_planted_rule_that_is_not_asked_lets_everything_pass(configure: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "schedule_of", lambda config: None)
    assert configure(weight_sync_steps=3, max_staleness=0, **ASYNC).config.max_staleness == 0


@pytest.mark.config_key("max_staleness", "tasks_per_step")
def test_staleness_is_how_many_batches_may_be_under_way(configure: Any) -> None:
    found = [allowance(configure(tasks_per_step=3, max_staleness=n, **ASYNC).config, 0) for n in range(3)]
    assert found == [3, 6, 9]

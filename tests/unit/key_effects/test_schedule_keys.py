"""What the keys of the schedule change: how often engines get new weights, and how far sampling runs ahead."""

from __future__ import annotations

from typing import Any

import pytest

from surefoot.errors import ConfigError
from surefoot.runtime.schedule import lead, schedule_of

ASYNC = dict(importance_sampling_correction=True)


@pytest.mark.config_key("weight_sync_steps")
def test_the_steps_between_two_syncs_are_the_cadence_and_need_their_staleness(configure: Any) -> None:
    assert schedule_of(configure().config).sync_every == 1
    seldom = schedule_of(configure(weight_sync_steps=3, max_staleness=2, **ASYNC).config)
    assert (seldom.sync_every, seldom.required_staleness) == (3, 2)
    with pytest.raises(ConfigError, match=r"weight_sync_steps = 3(.|\n)*set max_staleness = 2 or more"):
        schedule_of(configure(weight_sync_steps=3, max_staleness=1, **ASYNC).config)


@pytest.mark.config_key("weight_sync_steps", "num_iterations")
def test_weights_are_synced_between_two_batches_only(configure: Any) -> None:
    assert schedule_of(configure(num_iterations=2, max_steps=2).config).sync_every == 2
    with pytest.raises(ConfigError, match="weight_sync_steps = 3 is not a multiple of num_iterations = 2"):
        schedule_of(configure(num_iterations=2, weight_sync_steps=3, max_steps=2, max_staleness=9, **ASYNC).config)


@pytest.mark.config_key("max_staleness", "tasks_per_step")
def test_staleness_is_how_many_batches_may_be_under_way(configure: Any) -> None:
    found = [lead(configure(tasks_per_step=3, max_staleness=n, **ASYNC).config) for n in range(3)]
    assert found == [3, 6, 9]

"""A data set of a mixture is called constant after 64 completions of its own, and costs nothing where rewards differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from surefoot.data import tasks as mixture
from surefoot.data.tasks import MOST, Mixture, metric_words, mixture_of, refuse_unknown
from surefoot.errors import ConfigError, RewardError
from surefoot.records import Group, Rollout, Task, Turn
from surefoot.runtime.base import LEAST, check_datasets

Reward = Callable[[str, int], float | None]


class Baseline:
    """Plays groups of four whose rewards are a function of the data set and how many came before."""

    def __init__(self, reward: Reward, size: int = 4) -> None:
        self.reward, self.size, self.asked = reward, size, list[tuple[str, int]]()

    def play(self, tasks: Sequence[Task], turn: int) -> list[Group]:
        return [self._group(task, turn) for task in tasks]

    def _group(self, task: Task, turn: int) -> Group:
        assert (task.id, turn) not in self.asked, "the same task in the same turn gives the same completions again"
        self.asked.append((task.id, turn))
        before = sum(name.startswith(task.dataset) for name, _ in self.asked) - 1
        found = Turn((1,), (2,), (-0.1,), 0, text=task.dataset)
        rewards = [self.reward(task.dataset, self.size * before + i) for i in range(self.size)]
        rollouts = [
            Rollout(task.id, "g", i, (found,), reward, failure="f:nan" if reward is None else None)
            for i, reward in enumerate(rewards)
        ]
        return Group(task, "g", tuple(rollouts))


def tasks_of(**counts: int) -> dict[str, list[Task]]:
    return {name: [Task(f"{name}{i}", "?", dataset=name) for i in range(n)] for name, n in counts.items()}


def look(reward: Reward, datasets: dict[str, list[Task]], allowed: Sequence[str] = ()) -> Baseline:
    """The first two tasks of each, then what is asked for."""
    baseline = Baseline(reward)
    first = baseline.play([task for tasks in datasets.values() for task in tasks[:2]], 0)
    check_datasets(first, datasets, allowed, baseline.play)
    return baseline


def uneven(name: str, number: int) -> float:
    return float(number % 2) if name == "a" else 0.0


def test_only_the_data_set_that_looks_constant_is_asked_further_until_64_and_refused_by_name() -> None:
    baseline = Baseline(uneven)
    datasets = tasks_of(a=9, b=40)
    first = baseline.play([*datasets["a"][:2], *datasets["b"][:2]], 0)
    with pytest.raises(RewardError) as refused:
        check_datasets(first, datasets, (), baseline.play)
    assert "data set 'b': all 64 baseline completions on 16 tasks got reward 0" in refused.value.what
    assert 'preflight_allow = ["b"]' in refused.value.fix
    further = [name for name, turn in baseline.asked if turn]
    assert len(further) == (LEAST - 8) / 4
    assert all(name.startswith("b") for name in further)


def test_a_few_tasks_are_asked_again_in_other_turns_until_there_are_enough() -> None:
    baseline = Baseline(uneven)
    datasets = tasks_of(a=2, b=3)
    with pytest.raises(RewardError, match="all 64 baseline completions on 3 tasks"):
        check_datasets(baseline.play([*datasets["a"], *datasets["b"][:2]], 0), datasets, (), baseline.play)


def test_one_that_differs_late_is_admitted_and_no_more_is_asked() -> None:
    late = look(lambda name, number: float((name == "a" and number % 2) or number == 30), tasks_of(a=9, b=40))
    assert sum(name.startswith("b") for name, _ in late.asked) == 16, "one top-up, no second"


def test_allowed_ones_cost_nothing_and_a_mixture_of_constants_is_refused_with_all_names() -> None:
    assert {turn for _, turn in look(uneven, tasks_of(a=9, b=40), ["b"]).asked} == {0}
    with pytest.raises(RewardError, match=r"data set 'a'.*and so it is for 'b'"):
        look(lambda name, number: float(name == "a"), tasks_of(a=40, b=40))
    with pytest.raises(RewardError, match=r"data set 'b'.*got no verdict"):
        look(lambda name, number: uneven(name, number) if name == "a" else None, tasks_of(a=40, b=40))


def test_one_data_set_is_no_mixture() -> None:
    assert look(lambda name, number: 0.0, {}).asked == []
    assert mixture_of(tasks_of(a=9)["a"]) == Mixture()


def test_the_largest_are_looked_at_in_turn_and_their_number_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    many = tasks_of(**{f"d{i:02}": 30 - i for i in range(20)})
    found = mixture_of([task for tasks in many.values() for task in tasks])
    assert (list(found.tasks), found.total) == ([f"d{i:02}" for i in range(MOST)], 20)
    assert [task.dataset for task in found.first(8)] == list(found.tasks), "one of each at least"
    assert [task.dataset for task in found.first(18)] == [*found.tasks, "d00", "d01"]
    monkeypatch.setattr(mixture, "MOST", 99)
    assert len(mixture_of([task for tasks in many.values() for task in tasks]).tasks) == 20, "planted: no bound"


def test_words_in_metrics_are_single_and_different() -> None:
    from surefoot.tracking.metrics import lookup

    words = metric_words(["a/b", "a b", "a_b", "", "x" * 99, "{}"])
    assert len(set(words.values())) == 6
    assert all(lookup(f"datasets/{word}/reward") is not None for word in words.values())


def test_a_name_that_is_none_is_refused_with_those_near_it() -> None:
    refuse_unknown(["a"], iter(tasks_of(a=1)["a"]))
    with pytest.raises(ConfigError, match="'hart' that no training task belongs to") as refused:
        refuse_unknown(["hart"], tasks_of(hard=1)["hard"])
    assert "'hard'" in refused.value.fix

"""Gymnasium-style environments and reasoning-gym entries as tools."""

from __future__ import annotations

import json
from typing import Any

import gymnasium
import numpy as np
import pytest

from surefoot.data.sources import load_tasks
from surefoot.errors import ToolError, ToolFailedError
from surefoot.records import Task
from surefoot.tools.python.environments import GymToolkit, ReasoningGymToolkit
from surefoot.tools.python.instances import GymInstance, action_schema, observation_text

TASK = Task(id="t", prompt="?")


class Corridor:
    """Walk right to the end; a text action, and no package."""

    def __init__(self, length: int = 3) -> None:
        self.length, self.closed = length, False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        self.at, self.steps = 0, 0
        self.length = (options or {}).get("length", self.length)
        return f"seed {seed}, length {self.length}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if action == "fall":
            raise RuntimeError("there is a hole")
        self.steps += 1
        self.at += {"right": 1, "left": -1}.get(action, 0)
        reward = float("nan") if action == "nan" else 0.5 * (action == "right")
        return f"at {self.at}", reward, self.at == self.length, self.steps == 5, {}

    def close(self) -> None:
        self.closed = True


def walk(*actions: str, factory: Any = Corridor) -> tuple[list[tuple[str, str]], Any]:
    toolkit = GymToolkit(factory)
    box = toolkit.open(TASK, "train/0/0/0", seed=4)
    said = [box.call("step", {"action": action}, 5) for action in actions]
    try:
        return [(answer.text, answer.outcome) for answer in said], box.reward()
    finally:
        toolkit.close()


def test_siblings_begin_with_the_same_seed_and_other_groups_with_another() -> None:
    toolkit = GymToolkit(lambda: gymnasium.make("Blackjack-v1"))
    openings = [toolkit.open(TASK, f"train/0/0/{i}", seed=5).opening for i in range(6)]
    others = {toolkit.open(TASK, f"train/0/{seed}/0", seed=seed).opening for seed in range(20)}
    toolkit.close()
    assert len(set(openings)) == 1
    assert len(others) > 3


def test_planted_reset_without_the_seed_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    real = GymInstance.reset
    numbers = iter(range(10_000))
    monkeypatch.setattr(GymInstance, "reset", lambda self, row, extras, s: real(self, row, {"seed": next(numbers)}, s))
    with pytest.raises(AssertionError):
        test_siblings_begin_with_the_same_seed_and_other_groups_with_another()


def test_the_reward_is_the_sum_of_the_steps_and_nothing_is_played_after_the_end() -> None:
    said, reward = walk("right", "left", "right", "right", "right")
    assert said[-1] == ("at 3\n[the episode has ended: truncated]", "ok") or said[-1][0].startswith("at 3")
    assert reward == 2.0
    said, reward = walk("right", "right", "right", "right", "left")
    assert said[2] == ("at 3\n[the episode has ended: terminated]", "ok")
    assert said[3:] == [("not played: the episode has ended (terminated)", "refused")] * 2
    assert reward == 1.5
    assert walk()[1] == 0.0


def test_planted_world_that_goes_on_after_the_end_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    real = GymInstance._step

    def endless(self: GymInstance, action: Any) -> str:
        text = real(self, action)
        self._ended = ""
        return text

    monkeypatch.setattr(GymInstance, "_step", endless)
    with pytest.raises(AssertionError):
        test_the_reward_is_the_sum_of_the_steps_and_nothing_is_played_after_the_end()


def test_the_same_outcome_in_two_and_in_eight_steps_earns_the_same() -> None:
    class Goal(Corridor):
        def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
            text, _, ended, _, info = super().step(action)
            return text, float(ended), ended, False, info

    short = walk("right", "right", "right", factory=Goal)[1]
    long = walk("right", "left", "stay", "right", "stay", "right", "stay", "right", factory=Goal)[1]
    assert short == long == 1.0


def test_an_exception_of_a_step_is_an_answer_and_a_reward_that_is_none_a_failure() -> None:
    said, reward = walk("fall", "right")
    assert said == [("RuntimeError: there is a hole", "error"), ("at 1", "ok")]
    assert reward == 0.5
    with pytest.raises(ToolFailedError) as failed:
        walk("right", "nan")
    assert failed.value.reason == "reward_failed"


def test_actions_outside_their_space_are_refused_and_not_played() -> None:
    toolkit = GymToolkit(lambda: gymnasium.make("FrozenLake-v1", is_slippery=False))
    box = toolkit.open(TASK, "train/0/0/0", seed=0)
    for action in (4, -1, "right", 1.0, True, None, [1]):
        assert box.call("step", {"action": action}, 5).outcome == "refused"
    assert box.call("step", {"action": 2}, 5).text == "1", "still at the beginning"
    toolkit.close()


@pytest.mark.parametrize(
    ("space", "schema"),
    [
        (gymnasium.spaces.Discrete(3, start=-1), {"type": "integer", "minimum": -1, "maximum": 1}),
        (
            gymnasium.spaces.Box(-1, 1, (2,)),
            {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 2},
        ),
        (
            gymnasium.spaces.MultiBinary(2),
            {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2},
        ),
        (gymnasium.spaces.Text(5), {"type": "string"}),
        (None, {"type": "string"}),
    ],
    ids=repr,
)
def test_an_action_space_becomes_a_schema(space: Any, schema: dict[str, Any]) -> None:
    assert action_schema(space) == schema


def test_numbers_become_arrays_of_the_space_and_what_it_does_not_hold_is_refused() -> None:
    class Pad(Corridor):
        action_space = gymnasium.spaces.Box(-1.0, 1.0, (2,), dtype=np.float32)

        def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            assert isinstance(action, np.ndarray), "an array"
            assert action.dtype == np.float32, "of the space's type"
            return {"position": action, "n": np.int64(3)}, np.float32(0.5), False, False, {}  # type: ignore[return-value]

    toolkit = GymToolkit(Pad)
    box = toolkit.open(TASK, "train/0/0/0", seed=0)
    assert json.loads(box.call("step", {"action": [0.5, -1]}, 5).text) == {"position": [0.5, -1.0], "n": 3}
    assert "is not in Box" in box.call("step", {"action": [2, 0]}, 5).text
    assert box.call("step", {"action": [1]}, 5).outcome == "refused"
    assert box.reward() == 0.5
    toolkit.close()


def test_your_own_words_for_actions_observations_and_levels() -> None:
    toolkit = GymToolkit(
        Corridor, parse=lambda word: {"go": "right"}[word], show=lambda seen: f"<{seen}>", options_column="level",
        tool="walk", about="Walk.",
    )  # fmt: skip
    assert [(spec.name, spec.description) for spec in toolkit.specs] == [("walk", "Walk.")]
    box = toolkit.open(Task(id="t", prompt="?", columns={"level": {"length": 1}}), "train/0/0/0", seed=8)
    assert box.opening == "<seed 8, length 1>"
    assert box.call("walk", {"action": "stop"}, 5).outcome == "error"
    assert box.call("walk", {"action": "go"}, 5).text == "<at 1>\n[the episode has ended: terminated]"
    toolkit.close()


def test_the_older_form_of_gym_is_refused_by_name() -> None:
    class Old(Corridor):
        def reset(self, *, seed: int | None = None) -> Any:  # type: ignore[override]
            return "only what is seen"

    class OldStep(Corridor):
        def step(self, action: str) -> Any:
            return "seen", 0.0, True, {}

    with pytest.raises(ToolFailedError, match="something else than") as failed:
        walk(factory=Old)
    assert failed.value.reason == "reset_failed"
    assert "something else than" in walk("right", factory=OldStep)[0][0][0]


def test_environments_are_closed_at_the_end() -> None:
    made: list[Corridor] = []

    def factory() -> Corridor:
        made.append(Corridor())
        return made[-1]

    toolkit = GymToolkit(factory)
    toolkit.open(TASK, "train/0/0/0", seed=0)
    toolkit.open(TASK, "train/0/0/1", seed=0).close()
    toolkit.close()
    assert [env.closed for env in made] == [True, True]


def test_observations_of_any_kind_become_text() -> None:
    assert observation_text(np.array([[1, 2]])) == "[[1, 2]]"
    assert observation_text((np.float64(0.5), {"k": np.bool_(True)})) == '[0.5, {"k": true}]'
    assert observation_text("as it is") == "as it is"


# -- reasoning-gym ---------------------------------------------------------------------


def gym_task() -> Task:
    return load_tasks("reasoning_gym:leg_counting", base=None, num_tasks=3, seed=1).tasks[0]  # type: ignore[arg-type]


def test_a_dataset_scores_what_was_handed_in_and_only_once() -> None:
    toolkit, task = ReasoningGymToolkit(), gym_task()
    right, wrong, silent = (toolkit.open(task, f"train/0/0/{i}", seed=0) for i in range(3))
    assert right.opening is None, "the prompt is the question"
    assert right.call("submit_answer", {"answer": str(task.columns["answer"])}, 5).text == "taken"
    assert wrong.call("submit_answer", {"answer": "x"}, 5).text == "taken", "nobody says whether it is right"
    late = wrong.call("submit_answer", {"answer": str(task.columns["answer"])}, 5)
    assert late.outcome == "refused"
    assert (right.reward(), silent.reward()) == (1.0, 0.0)
    assert (wrong.reward() or 0.0) < 0.1
    toolkit.close()


def test_more_attempts_may_be_allowed_and_the_last_one_counts() -> None:
    toolkit, task = ReasoningGymToolkit(attempts=2), gym_task()
    box = toolkit.open(task, "train/0/0/0", seed=0)
    for answer in ("x", str(task.columns["answer"])):
        assert box.call("submit_answer", {"answer": answer}, 5).outcome == "ok"
    assert box.reward() == 1.0
    toolkit.close()


def test_a_task_that_names_only_the_dataset_gets_a_question_from_the_groups_seed() -> None:
    toolkit = ReasoningGymToolkit()
    task = Task(id="t", prompt="Solve. ", columns={"reasoning_gym": "leg_counting"})
    openings = [
        toolkit.open(task, f"train/0/0/{i}", seed=seed).opening for i, seed in enumerate((2**40 + 1, 2**40 + 1, 2))
    ]
    assert openings[0] == openings[1] != openings[2]
    with pytest.raises(ToolFailedError) as failed:
        toolkit.open(TASK, "train/0/0/9", seed=0)
    assert failed.value.reason == "reset_failed"
    toolkit.close()


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "reasoning_gym", None)
    with pytest.raises(ToolError, match=r"surefoot\[tasks\]"):
        ReasoningGymToolkit()

"""Environment classes in TRL's form, unchanged: one instance per rollout, reset, tools, get_reward, routing."""

from __future__ import annotations

import inspect
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.errors import ToolError, ToolFailedError
from surefoot.guards.reward_values import RewardValue
from surefoot.records import Task
from surefoot.tools.python import pool as world_pool
from surefoot.tools.python.environments import EnvironmentToolkit, environment_toolkit
from surefoot.tools.python.pool import EnvLimits, EnvToolbox
from surefoot.tools.session import tools_of


class GuessEnv:
    """A game in the pattern of TRL's documentation; not a line of it knows of us."""

    made = 0

    def __init__(self) -> None:
        type(self).made += 1
        self.number = GuessEnv.made
        self.reward = 0.0

    def reset(self, **kwargs: Any) -> str | None:
        self.secret = int(kwargs["secret"])
        self.reward = 0.0
        self.done = False
        self.guesses: list[int] = []
        return f"\nI think of a number up to {kwargs['limit']}."

    def guess(self, number: int) -> str:
        """
        Guess the number.

        Args:
            number: The number to guess.

        Returns:
            Whether the secret is larger, smaller, or found.
        """
        if self.done:
            raise ValueError("Game over.")
        self.guesses.append(number)
        if number == self.secret:
            self.done = True
            self.reward = 1.0 / len(self.guesses)
            return "found"
        return "larger" if number < self.secret else "smaller"

    def _helper(self) -> str:
        return "not a tool"

    def get_reward(self) -> float:
        return self.reward


class ShelfEnv:
    """Another one, with an async tool, an async reward, and no opening."""

    def reset(self, prompt: Any, shelf: str) -> None:
        self.books = [shelf]

    async def put(self, title: str) -> list[str]:
        """Put a book on the shelf.

        Args:
            title: The book.
        """
        self.books.append(title)
        return self.books

    async def get_reward(self) -> float:
        return float(len(self.books))


def task(name: str = "t", **columns: Any) -> Task:
    return Task(id=name, prompt=({"role": "user", "content": "Play."},), columns={"secret": 7, "limit": 9, **columns})


def play(box: EnvToolbox, *guesses: int) -> list[str]:
    return [box.call("guess", {"number": n}, 5).text for n in guesses]


def as_trl_does(
    factory: Any, row: dict[str, Any], calls: list[tuple[str, dict[str, Any]]]
) -> tuple[Any, list[str], Any]:
    """One rollout by TRL 1.16's own rules, written from its documentation: the oracle of this file."""
    environment = factory()
    opening = environment.reset(**row)
    tools = {
        name: getattr(environment, name)
        for name, _ in inspect.getmembers(type(environment), predicate=inspect.isfunction)
        if name not in ("reset", "get_reward") and not name.startswith("_")
    }
    answers = []
    for name, arguments in calls:
        try:
            answers.append(str(tools[name](**arguments)))
        except Exception as error:
            answers.append(str({"error": str(error)}))
    return opening, answers, environment.get_reward()


@pytest.mark.parametrize("guesses", [[7], [1, 7], [9, 8], [7, 7], []])
def test_a_class_from_trls_pattern_earns_the_same_under_both(guesses: list[int]) -> None:
    calls: list[tuple[str, dict[str, Any]]] = [("guess", {"number": n}) for n in guesses]
    row = {"prompt": [{"role": "user", "content": "Play."}], "secret": 7, "limit": 9}
    opening, answers, reward = as_trl_does(GuessEnv, row, calls)
    toolkit = EnvironmentToolkit(GuessEnv)
    box = toolkit.open(task(), "train/0/0/0", seed=0)
    ours = [box.call(name, arguments, 5) for name, arguments in calls]
    assert (box.opening, box.reward()) == (opening, reward)
    for our, their in zip(ours, answers, strict=True):
        assert our.text == their or (
            our.outcome == "error" and our.text == "ValueError: Game over." and "Game over." in their
        )
    box.close()
    toolkit.close()


def test_the_tools_are_the_public_methods_and_nothing_else() -> None:
    toolkit = EnvironmentToolkit(GuessEnv)
    (spec,) = toolkit.specs
    toolkit.close()
    assert (spec.name, spec.description) == ("guess", "Guess the number.")
    assert spec.parameters == {
        "type": "object", "required": ["number"],
        "properties": {"number": {"type": "integer", "description": "The number to guess."}},
    }  # fmt: skip


def test_reset_gets_the_whole_row_and_nothing_that_it_does_not_name() -> None:
    seen: list[dict[str, Any]] = []

    class Plain:
        def reset(self, **row: Any) -> None:
            seen.append(row)

    class Named:
        def reset(self, seed: int, id: str, **row: Any) -> None:
            seen.append({"seed": seed, "id": id})

    for factory in (Plain, Named):
        toolkit = EnvironmentToolkit(factory, functions=[GuessEnv().guess])
        toolkit.open(task("name", environment="kept"), "train/0/0/0", seed=42)
        toolkit.close()
    assert seen[0] == {
        "prompt": [{"role": "user", "content": "Play."}], "secret": 7, "limit": 9, "environment": "kept",
    }  # fmt: skip
    assert seen[1] == {"seed": 42, "id": "name"}


def test_instances_are_made_once_and_used_again_after_reset_and_never_by_two_at_once() -> None:
    GuessEnv.made = 0
    toolkit = EnvironmentToolkit(GuessEnv)
    for step in range(3):
        boxes = [toolkit.open(task(), f"train/{step}/0/{i}", seed=0) for i in range(4)]
        assert len({id(box._runner) for box in boxes}) == 4
        play(boxes[0], 7)
        assert [box.reward() for box in boxes] == [1.0, 0.0, 0.0, 0.0]
        for box in boxes:
            box.close()
            box.close()
    assert GuessEnv.made == 4
    toolkit.close()


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["put", "reward", "reopen"])), max_size=40))
def test_state_of_one_rollout_is_never_seen_in_another(moves: list[tuple[int, str]]) -> None:
    """Random rollouts, interleaved: each shelf holds its own canary and what its own rollout put there."""
    toolkit = EnvironmentToolkit(ShelfEnv)
    try:
        boxes: dict[int, EnvToolbox] = {}
        expected: dict[int, list[str]] = {}
        for number, (who, what) in enumerate(moves):
            if who not in boxes or what == "reopen":
                if who in boxes:
                    boxes.pop(who).close()
                canary = f"canary of {who} at {number}"
                boxes[who] = toolkit.open(
                    Task(id="t", prompt="?", columns={"shelf": canary}), f"train/0/{number}/{who}", 0
                )
                expected[who] = [canary]
            elif what == "put":
                expected[who].append(f"book {number}")
                answer = boxes[who].call("put", {"title": f"book {number}"}, 5)
                assert json.loads(answer.text) == expected[who]
            else:
                assert boxes[who].reward() == len(expected[who])
    finally:
        toolkit.close()


def test_many_rollouts_in_many_threads_keep_apart() -> None:
    toolkit = EnvironmentToolkit(ShelfEnv)

    def rollout(number: int) -> list[str]:
        box = toolkit.open(Task(id="t", prompt="?", columns={"shelf": f"canary {number}"}), f"train/0/0/{number}", 0)
        for i in range(5):
            text = box.call("put", {"title": f"{number}/{i}"}, 5).text
        box.close()
        return list(json.loads(text))

    with ThreadPoolExecutor(8) as pool:
        seen = list(pool.map(rollout, range(60)))
    toolkit.close()
    assert seen == [[f"canary {n}", *(f"{n}/{i}" for i in range(5))] for n in range(60)]


def test_planted_pool_that_hands_out_a_busy_instance_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def take(self: world_pool.EnvToolkit, kind: str) -> Any:
        return self._idle[kind][0]  # and leaves it there

    monkeypatch.setattr(world_pool.EnvToolkit, "_take", take)
    with pytest.raises(AssertionError):
        test_many_rollouts_in_many_threads_keep_apart()


def test_a_world_cannot_change_the_task_for_its_siblings() -> None:
    class Spoiler:
        def reset(self, shelf: list[str], **row: Any) -> str:
            shelf.append("mine")
            row["prompt"].clear()
            return str(len(shelf))

    toolkit = EnvironmentToolkit(Spoiler, functions=[GuessEnv().guess])
    shared = Task(id="t", prompt=({"role": "user", "content": "x"},), columns={"shelf": []})
    assert [toolkit.open(shared, f"train/0/0/{i}", 0).opening for i in range(3)] == ["1", "1", "1"]
    assert shared.columns == {"shelf": []}
    toolkit.close()


def test_planted_pool_that_hands_out_the_task_itself_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world_pool.copy, "deepcopy", lambda value: value)
    with pytest.raises(AssertionError):
        test_a_world_cannot_change_the_task_for_its_siblings()


def test_a_factory_that_returns_one_instance_twice_is_refused() -> None:
    single = ShelfEnv()
    toolkit = EnvironmentToolkit(lambda: single)
    columns = {"shelf": "s"}
    toolkit.open(Task(id="t", prompt="?", columns=columns), "train/0/0/0", 0)
    with pytest.raises(ToolFailedError, match="gave one ShelfEnv twice"):
        toolkit.open(Task(id="t", prompt="?", columns=columns), "train/0/0/1", 0)
    toolkit.close()


# -- several classes -----------------------------------------------------------------


def test_a_column_routes_each_task_and_is_not_handed_to_reset() -> None:
    toolkit = EnvironmentToolkit({"game": GuessEnv, "shelf": ShelfEnv})
    game = task(environment="game")
    shelf = Task(id="s", prompt="?", columns={"environment": "shelf", "shelf": "a"})
    assert sorted(spec.name for spec in toolkit.specs) == ["guess", "put"]
    assert list(tools_of(game, toolkit.routes) or ()) == ["guess"]
    assert list(tools_of(shelf, toolkit.routes) or ()) == ["put"]
    box, other = toolkit.open(game, "train/0/0/0", 0), toolkit.open(shelf, "train/0/1/0", 0)
    assert play(box, 7) == ["found"]
    assert json.loads(other.call("put", {"title": "b"}, 5).text) == ["a", "b"], "reset takes no column environment"
    assert other.call("guess", {"number": 7}, 5).outcome == "refused", "another environment's tool"
    with pytest.raises(ToolError, match=r"'chess'.*\n.*game, shelf"):
        toolkit.open(task(environment="chess"), "train/0/2/0", 0)
    for odd in (None, ["game"], 3):
        with pytest.raises(ToolError, match="column 'environment' is"):
            toolkit.open(task(environment=odd), "train/0/2/0", 0)
    toolkit.close()


def test_two_environments_with_different_tools_of_one_name_are_refused() -> None:
    class Other(ShelfEnv):
        def guess(self, word: str) -> str:
            """Guess.

            Args:
                word: a word.
            """
            return word

    with pytest.raises(ToolError, match="both have a tool 'guess'"):
        EnvironmentToolkit({"game": GuessEnv, "words": Other})
    same = EnvironmentToolkit({"game": GuessEnv, "again": GuessEnv})
    assert [spec.name for spec in same.specs] == ["guess"]
    same.close()


# -- what goes wrong ------------------------------------------------------------------


def test_a_class_without_reset_or_with_a_tool_that_cannot_be_described_is_refused_at_the_start() -> None:
    class NoReset:
        def act(self) -> str:
            """Act."""
            return ""

    class Undescribed(ShelfEnv):
        def secret(self, x: int) -> str:
            """Says nothing of x."""
            return ""

    def broken() -> Any:
        raise OSError("no display")

    for factory, words in ((NoReset, "no method reset"), (Undescribed, "'x'"), (broken, "no display")):
        with pytest.raises(ToolError, match=words) as refused:
            EnvironmentToolkit(factory)  # type: ignore[arg-type]
        assert not isinstance(refused.value, ToolFailedError)


def test_a_world_that_offers_other_tools_than_the_first_stops_the_run() -> None:
    kinds: list[Any] = [GuessEnv, ShelfEnv]
    toolkit = EnvironmentToolkit(lambda: kinds.pop(0)())
    toolkit.open(task(), "train/0/0/0", 0)
    with pytest.raises(ToolError, match="offers put, in other words") as stopped:
        toolkit.open(task(), "train/0/0/1", 0)
    assert not isinstance(stopped.value, ToolFailedError)
    toolkit.close()


def test_properties_are_not_evaluated_and_are_not_tools() -> None:
    class Loud(ShelfEnv):
        @property
        def screen(self) -> str:
            raise AssertionError("nobody asked")

    toolkit = EnvironmentToolkit(Loud)
    assert [spec.name for spec in toolkit.specs] == ["put"]
    toolkit.close()


class Moody:
    """Fails where its task says."""

    def reset(self, mood: str, **row: Any) -> Any:
        self.mood = mood
        if mood == "reset":
            raise KeyError("no such level")
        return 3 if mood == "opening" else None

    def act(self) -> str:
        """Act."""
        if self.mood == "exit":
            raise SystemExit("bye")
        return "done"

    def get_reward(self) -> Any:
        rewards: dict[str, Any] = {"nan": float("nan"), "text": "0.5", "none": None, "true": True, "inf": float("inf")}
        if self.mood == "reward":
            raise RuntimeError("no judge")
        return rewards.get(self.mood, 0.25)


def moody(mood: str) -> Task:
    return Task(id=mood, prompt="?", columns={"mood": mood})


@pytest.mark.parametrize("mood", ["reset", "opening"])
def test_a_reset_that_fails_loses_its_own_rollout_under_one_reason(mood: str) -> None:
    toolkit = EnvironmentToolkit(Moody)
    with pytest.raises(ToolFailedError) as failed:
        toolkit.open(moody(mood), "train/0/0/0", 0)
    assert failed.value.reason == "reset_failed"
    assert toolkit.open(moody("fine"), "train/0/0/1", 0).call("act", {}, 5).text == "done"
    toolkit.close()


@pytest.mark.parametrize(("mood", "reward"), [("fine", 0.25), ("none", None), ("true", 1.0)])
def test_a_reward_is_a_number_or_no_opinion(mood: str, reward: float | None) -> None:
    toolkit = EnvironmentToolkit(Moody)
    assert toolkit.open(moody(mood), "train/0/0/0", 0).reward() == reward
    toolkit.close()


@pytest.mark.parametrize("mood", ["nan", "inf", "text", "reward"])
def test_a_reward_that_is_none_is_a_failure_and_never_zero(mood: str) -> None:
    toolkit = EnvironmentToolkit(Moody)
    with pytest.raises(ToolFailedError) as failed:
        toolkit.open(moody(mood), "train/0/0/0", 0).reward()
    assert failed.value.reason == "reward_failed"
    toolkit.close()


def test_planted_judge_that_takes_anything_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world_pool, "parse_reward", lambda value: RewardValue(0.0, None))
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        test_a_reward_that_is_none_is_a_failure_and_never_zero("nan")


def test_an_instance_that_failed_is_never_used_again() -> None:
    made: list[Moody] = []

    def factory() -> Moody:
        made.append(Moody())
        return made[-1]

    toolkit = EnvironmentToolkit(factory)
    box = toolkit.open(moody("exit"), "train/0/0/0", 0)
    with pytest.raises(ToolFailedError) as failed:
        box.call("act", {}, 5)
    assert failed.value.reason == "tool_crashed"
    box.close()
    toolkit.open(moody("fine"), "train/0/0/1", 0)
    assert (len(made), made[1].mood) == (2, "fine")
    toolkit.close()


def test_planted_pool_that_reuses_what_failed_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def keep(self: world_pool.EnvToolkit, kind: str, runner: Any, *, usable: bool) -> None:
        runner._dead = False
        self._idle[kind].append(runner)

    monkeypatch.setattr(world_pool.EnvToolkit, "give_back", keep)
    with pytest.raises((AssertionError, IndexError)):
        test_an_instance_that_failed_is_never_used_again()


def test_a_toolbox_that_is_closed_in_the_middle_of_a_call_lets_its_world_go() -> None:
    entered, leave = threading.Event(), threading.Event()

    class Slow(ShelfEnv):
        def wait(self) -> str:
            """Wait."""
            entered.set()
            leave.wait()
            return "late"

    toolkit = EnvironmentToolkit(Slow, limits=EnvLimits())
    shelf = Task(id="s", prompt="?", columns={"shelf": "a"})
    box = toolkit.open(shelf, "train/0/0/0", 0)
    first = box._runner
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(box.call, "wait", {}, 30)
        entered.wait()
        leave_soon = threading.Timer(0.0, leave.set)
        box._runner = _Ending(first, leave_soon)  # type: ignore[assignment]
        box.close()
        waiting.exception()
    assert toolkit.open(shelf, "train/0/0/1", 0)._runner is not first
    with pytest.raises(ToolError, match="after it was closed"):
        box.call("put", {"title": "x"}, 5)
    toolkit.close()


class _Ending:
    """Lets the call go on only once the world was ended."""

    def __init__(self, runner: Any, then: threading.Timer) -> None:
        self._runner, self._then, self.alive, self.ask = runner, then, True, runner.ask

    def end(self) -> None:
        self._then.start()
        self._runner.end()


def test_a_name_in_a_file_may_stand_for_a_class_classes_a_toolkit_or_a_function_that_makes_one() -> None:
    ready = EnvironmentToolkit(GuessEnv)
    sources: list[Any] = [GuessEnv, {"game": GuessEnv}, ready, lambda: EnvironmentToolkit(GuessEnv), lambda: GuessEnv()]
    for source in sources:
        toolkit = environment_toolkit(source)
        assert [spec.name for spec in toolkit.specs] == ["guess"]
        toolkit.close()
    assert environment_toolkit(ready) is ready

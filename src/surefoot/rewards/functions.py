"""Reward functions: what one is handed beside the columns of its task, in TRL's names; and the one made of parts.

Owns       `completion_ids` and `trainer_state`: who gets them, and what the second one knows.
Promises   both are facts of the rollouts alone, so that a resumed or repeated run hands over the same; what TRL passes
           and we do not is refused by name before anything is sampled.
Never      imports transformers: a reward worker that has it by fork is larger and slower to start.

Read next: `workers.py`, which makes the call; `verifiers/multi.py`, which says whether a task is solved.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from surefoot.errors import RewardError
from surefoot.guards.reward_values import RewardFunction
from surefoot.system.user_code import did_you_mean

# -- One reward from several facts about a rollout with tools: solved, efficient, recovered, and so on --
# Owns       the parts, their weights and their sum in [0, 1].
# Promises   the same outcome earns the same, in two turns or in eight; every part is a fact about calls and outcomes,
#            so no wording, length or number of words changes it; how something was done counts as far as it was
#            solved, so with the default weights doing nothing earns 0 and a wrong answer 0.05, with any pointless
#            calls; a task that nobody could judge has no reward.
#
#     completion .40  the task is solved                     response .05  it ended with an answer
#     reasoning  .15  share of calls that could be made *    recovery .10  an error was followed by a call that worked *
#     efficiency .15  no more calls than the task needs *    state    .10  the world's own reward, or solved
#     progress   .05  share of the expected tools that worked        * times how far it is solved


WEIGHTS: Mapping[str, float] = {
    "completion": 0.4, "reasoning": 0.15, "efficiency": 0.15, "recovery": 0.1, "progress": 0.05, "state": 0.1,
    "response": 0.05,
}  # fmt: skip
ENVIRONMENT_REWARD = "environment_reward"
"""The argument by which reward functions are told what each rollout's own world says of it."""
Verify = Callable[..., Sequence[float | None]]
Talk = Sequence[Mapping[str, Any]]
"""A completion with tools: messages of the roles assistant and tool; a tool message has a name and an outcome."""


def components(
    talk: Talk, *, solved: float, expected: Sequence[str] = (), environment_reward: float | None = None
) -> dict[str, float]:
    """Every part of one rollout, each in [0, 1].

    Args:
        solved: the task metric.
        expected: tools that the task needs; empty when it does not say.
        world: what the rollout's own world says; None when it has no opinion.
    """
    calls = [(str(m.get("name") or ""), str(m.get("outcome", "ok"))) for m in talk if m.get("role") == "tool"]
    made = [outcome for _, outcome in calls if outcome != "refused"]
    worked = [name for name, outcome in calls if outcome == "ok"]
    need = len(expected) if expected else min(1, len(calls))
    right = _within(solved)
    return {
        "completion": right,
        "reasoning": right * (len(made) / len(calls) if calls else 1.0),
        "efficiency": right * (1.0 if len(calls) <= need else max(0.0, 1.0 - (len(calls) - need) / (need + 4))),
        "recovery": right * _recovered([outcome for _, outcome in calls]),
        "progress": sum(name in worked for name in expected) / len(expected) if expected else right,
        "state": _within(solved if environment_reward is None else environment_reward),
        "response": float(_answered(talk)),
    }


@dataclass(frozen=True)
class ComponentReward:
    """A reward function in TRL's form: the weighted sum of the parts. Made by `component_reward`."""

    verify: Verify
    weights: Mapping[str, float]
    __name__ = "components"

    def __call__(self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float | None]:
        """(G,) a number in [0, 1] each, or None where nobody could say whether the task is solved."""
        solved = self.verify(**_taken(self.verify, {"prompts": prompts, "completions": completions, **columns}))
        expected = [expected_tools(info) for info in columns.get("extra_info", [None] * len(completions))]
        environment_rewards = columns.get(ENVIRONMENT_REWARD, [None] * len(completions))
        return [
            None if right is None else self._total(_talk(said), right, tools, environment_reward)
            for said, right, tools, environment_reward in zip(
                completions, solved, expected, environment_rewards, strict=True
            )
        ]

    def _total(self, talk: Talk, solved: float, expected: Sequence[str], environment_reward: float | None) -> float:
        parts = components(talk, solved=solved, expected=expected, environment_reward=environment_reward)
        return _within(sum(weight * parts[name] for name, weight in self.weights.items()))


def component_reward(verify: Verify, weights: Mapping[str, float] = WEIGHTS) -> ComponentReward:
    """The weighted sum of the parts as a reward function, given who says whether a task is solved.

    Args:
        verify: a reward function that says so, such as `verifiers.verifier_reward` or `grading.exact_answer`.
        weights: of the parts that count; those that are left out count for nothing.
    """
    if set(weights) - set(WEIGHTS) or not weights or min(weights.values()) < 0 or sum(weights.values()) > 1 + 1e-9:
        raise RewardError(
            f"component weights are {dict(weights)}",
            f"they are for {', '.join(WEIGHTS)}, none negative, and add up to 1 at most",
            "correct them",
        )
    return ComponentReward(verify, dict(weights))


def weighs_environment_reward(functions: Mapping[str, Any], weights: Mapping[str, float]) -> bool:
    """Whether a function that counts has the world's own reward among its parts: it is then not added once more."""
    counting = [functions.get(name) for name, weight in weights.items() if weight]
    return any(isinstance(each, ComponentReward) and each.weights.get("state", 0.0) > 0 for each in counting)


def expected_tools(extra_info: Any) -> Sequence[str]:
    """Tools that a task needs, by its column `extra_info`; empty when it does not say."""
    named = extra_info.get("tools") if isinstance(extra_info, Mapping) else None
    return [name for name in named if isinstance(name, str)] if isinstance(named, list | tuple) else []


def _taken(function: Callable[..., Any], given: dict[str, Any]) -> dict[str, Any]:
    """Those of the arguments that the function takes: all, unless it names what it wants."""
    parameters = inspect.signature(function).parameters.values()
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        return given
    return {each.name: given[each.name] for each in parameters if each.name in given}


def _talk(completion: Any) -> Talk:
    return [{"role": "assistant", "content": completion}] if isinstance(completion, str) else completion


def _answered(talk: Talk) -> bool:
    """Whether the last word is the policy's, and not empty."""
    return bool(talk) and talk[-1].get("role") == "assistant" and bool(str(talk[-1].get("content") or "").strip())


def _recovered(outcomes: Sequence[str]) -> float:
    """1 when nothing went wrong, or something worked after the last thing that did."""
    wrong = [place for place, outcome in enumerate(outcomes) if outcome != "ok"]
    return float(not wrong or "ok" in outcomes[wrong[-1] + 1 :])


def _within(value: float) -> float:
    return min(1.0, max(0.0, float(value)))


# -- What a function is handed, and which functions a name stands for ------------------------------


COMPLETION_IDS, TRAINER_STATE = "completion_ids", "trainer_state"
RESERVED = ("prompts", "completions", COMPLETION_IDS, TRAINER_STATE)
"""Names of arguments that are not columns; a column of that name could not be handed over."""
_NOT_PASSED = {
    "log_extra": "put what you want to see into the reward's own print: RUN/logs/rewards.log keeps it",
    "log_metric": "make it a reward function of its own with weight 0 in reward_weights: its mean is logged",
    "environments": "let the environment's own get_reward judge; messages and outcomes of calls are in completions",
}
"""What TRL passes and we do not, and what to do instead."""


@dataclass(frozen=True)
class TrainerState:
    """How far the run is, as far as reward functions may know: two of the fields of transformers' `TrainerState`.

    Example:
        >>> TrainerState(global_step=3, max_steps=10).global_step
        3
    """

    global_step: int
    """Optimiser steps behind the weights that wrote these completions."""
    max_steps: int
    """Optimiser steps of the whole run; 0 where nothing is trained."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"trainer_state has no {name!r} here: a reward function is told global_step and max_steps")


def parameters_of(function: RewardFunction) -> Sequence[inspect.Parameter] | None:
    """Parameters of a function, in order; None for callables written in C that do not say."""
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return None


def asks_for(function: RewardFunction, name: str) -> bool:
    """Whether the function is handed `name`: it names it, or takes everything (`**columns`), as TRL passes it.

    Scorers of our own take everything and need neither, so they get what they name: tokens are not sent for nothing.

    Example:
        >>> [asks_for(f, TRAINER_STATE) for f in (lambda completions, trainer_state: [], lambda completions: [])]
        [True, False]
    """
    parameters = parameters_of(function)
    if parameters is None:
        return False
    if any(p.name == name for p in parameters):
        return True
    ours = (getattr(function, "__module__", None) or "").partition(".")[0] == "surefoot"
    return not ours and any(p.kind is p.VAR_KEYWORD for p in parameters)


def refuse_unusable(function: Any) -> None:
    """Raise if this is a model, or needs an argument of TRL's that nobody here passes."""
    if any(base.__name__ == "Module" and base.__module__.startswith("torch.nn") for base in type(function).__mro__):
        raise RewardError(
            f"reward_funcs holds a {type(function).__name__}, which is a model",
            "rewards are computed by functions, in processes of their own",
            "write a function that asks the model and returns one number per completion (docs/rewards.md)",
        )
    for parameter in parameters_of(function) or ():
        if parameter.name in _NOT_PASSED and parameter.default is parameter.empty and parameter.kind in _BY_NAME:
            raise RewardError(
                f"reward function {getattr(function, '__name__', function)!s} needs {parameter.name}",
                "TRL passes it and we do not (docs/rewards.md lists what is passed)",
                _NOT_PASSED[parameter.name],
            )


_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


# -- Which function scores: the user's own file, or a built-in scorer -----------------------------
# Owns       finding and loading reward functions.
# Promises   a file or function that is not there is refused at once, with the nearest names.
# Never      calls a reward function.


def exact_answer(
    prompts: Sequence[Any], completions: Sequence[Any], answer: Sequence[Any], **columns: Any
) -> list[Any]:
    """(G,) 1.0 where the completion, stripped, equals the answer; None where the task has no answer.

    Example:
        >>> exact_answer(["1+1="] * 2, [" 2\\n", "3"], ["2", "2"])
        [1.0, 0.0]
    """
    texts = [_text(completion) for completion in completions]
    return [_equals(text, gold) for text, gold in zip(texts, answer, strict=True)]


def reasoning_gym_score(
    prompts: Sequence[Any],
    completions: Sequence[Any],
    reasoning_gym: Sequence[str],
    entry: Sequence[Any],
    **columns: Any,
) -> list[Any]:
    """(G,) what the named reasoning-gym dataset itself says of each completion, stripped."""
    from reasoning_gym import get_score_answer_fn

    scorers = {name: get_score_answer_fn(name) for name in set(reasoning_gym)}
    rows = zip(completions, reasoning_gym, entry, strict=True)
    return [scorers[name](_text(completion), task) for completion, name, task in rows]


def builtin_scorer(kind: str) -> RewardFunction:
    """The scorer that a task set asks for ("exact", "reasoning_gym", "verifier"), ready to be forked into workers.

    reasoning-gym is imported here, in the driver: its two seconds would count against every worker's first call.
    """
    if kind == "exact":
        return exact_answer
    if kind == "verifier":
        from surefoot.rewards.verifiers.multi import verifier_scorer

        return verifier_scorer()
    if kind != "reasoning_gym":
        raise did_you_mean(f"there is no built-in scorer {kind!r}", "a task set names its scorer", kind, _BUILT_IN)
    try:
        importlib.import_module("reasoning_gym")
    except ImportError as error:
        raise RewardError(
            f"reasoning-gym cannot be imported: {error}",
            "its datasets score their own answers",
            'install it: pip install "surefoot[tasks]"',
        ) from error
    return reasoning_gym_score


_BUILT_IN = ("exact", "reasoning_gym", "verifier")
RewardMaker = Callable[[Callable[[], RewardFunction], Mapping[str, float]], RewardFunction]
"""`make(solved, weights)`: what says whether a task is solved, when asked for it, and the key component_weights."""


def _components(solved: Callable[[], RewardFunction], weights: Mapping[str, float]) -> RewardFunction:
    from surefoot.rewards.functions import WEIGHTS, component_reward

    return component_reward(solved(), weights or WEIGHTS)


BUILTIN_REWARDS: dict[str, RewardMaker] = {"builtin:components": _components}
"""Reward functions that have no file of the user's, by the name that `reward_funcs` takes."""


def is_builtin(spec: str) -> bool:
    """Whether an entry of `reward_funcs` names a reward function of ours; one that does not exist is refused."""
    if not spec.startswith("builtin:"):
        return False
    if spec not in BUILTIN_REWARDS:
        raise did_you_mean(f"there is no reward function {spec!r}", "reward_funcs names it", spec, BUILTIN_REWARDS)
    return True


def _text(completion: Any) -> str:
    """A completion as plain text: text itself, or what the policy said last; what a tool said is nobody's answer."""
    if isinstance(completion, str):
        return completion.strip()
    said = [message for message in completion if message.get("role", "assistant") == "assistant"]
    return str(said[-1].get("content") or "").strip() if said else ""


def _equals(text: str, gold: Any) -> float | None:
    return None if gold is None else float(text == str(gold).strip())

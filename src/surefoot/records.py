"""The nouns that travel: Task, Turn, Rollout, Group, TrainSample; and Verdict.

Owns       what is known about one attempt from birth to training: ids, tokens, who made
           each token, versions, rewards, reasons.
Promises   frozen, torch-free, picklable; a malformed record cannot be constructed.
Never      samples, scores, packs or logs.

Read next: `protocols.py`, the seams that these records cross.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from surefoot.errors import EngineError, ShapeError
from surefoot_harness.verdict import Verdict as Verdict

Message = Mapping[str, Any]
"""One chat message, `{"role": "user", "content": "17+25="}`."""

STOP, LENGTH, UNKNOWN = "stop", "length", "unknown"
"""Finish reasons: the model stopped, the limit cut it, the engine did not say."""

REPETITION, REPETITION_COST = "repetition", "repetition-cost"
"""A rollout went round in circles: how one with tools ended, or why one has no reward; and the part of its reward that
this took off, a name that no reward function can have."""


@dataclass(frozen=True, slots=True)
class Task:
    """One thing to solve.

    Example:
        >>> Task(id="sums/17+25", prompt="17+25=", columns={"answer": "42"}).columns["answer"]
        '42'
    """

    id: str
    prompt: str | tuple[Message, ...]
    """Text (one user message) or a list of messages."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Every other column of the row; handed to reward functions by name."""
    dataset: str = ""

    def __post_init__(self) -> None:
        if not self.id:
            raise ShapeError("a task has an empty id", "the ledger counts tasks by id", "give every row an id")

    def messages(self) -> list[Message]:
        """The prompt as chat messages."""
        if isinstance(self.prompt, str):
            return [{"role": "user", "content": self.prompt}]
        return list(self.prompt)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool call of a turn, and what the model was told.

    Example:
        >>> ToolCall("calculator__evaluate", '{"expression": "6*7"}', "42").outcome
        'ok'
    """

    name: str
    """As the model wrote it; empty when the call could not be read."""
    arguments: str
    """JSON text, or what stood in its place."""
    answer: str
    """The text that went into the context, before it became tokens."""
    outcome: str = "ok"
    """`ok`; `error` when the tool itself said so; `refused` when it was not asked: unreadable, unknown, over budget."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One completion and the tokens it answered.

    Example:
        >>> turn = Turn(prompt_ids=(1, 5, 6), completion_ids=(9, 2), logprobs=(-0.1, -0.2), version=3)
        >>> turn.mixed
        False
    """

    prompt_ids: tuple[int, ...]
    """(P,) every token the engine was given, in order."""
    completion_ids: tuple[int, ...]
    """(T,) the tokens the policy chose, stop token included."""
    logprobs: tuple[float, ...]
    """(T,) the sampler's own log-probabilities, at the sampling temperature."""
    version: int
    """Weights in force when generation began: the oldest used."""
    finish_reason: str = UNKNOWN
    text: str = ""
    version_end: int | None = None
    """Weights in force when generation ended; None means the same."""
    calls: tuple[ToolCall, ...] = ()
    """Tools that this completion called, in order; their answers stand before the next turn."""

    def __post_init__(self) -> None:
        if len(self.completion_ids) != len(self.logprobs):
            raise ShapeError(
                f"a turn has {len(self.completion_ids)} tokens but {len(self.logprobs)} logprobs",
                "each sampled token needs the probability it was sampled with",
                "return one logprob per token from the engine",
            )
        if not self.prompt_ids or not self.completion_ids:
            raise ShapeError(
                f"a turn has {len(self.prompt_ids)} prompt and {len(self.completion_ids)} completion tokens",
                "an empty side gives the learner nothing to align",
                "drop the rollout with a reason instead",
            )
        if self.version < 0:
            raise ShapeError(
                f"version is {self.version}", "versions count optimiser steps from 0", "stamp the engine's version"
            )

    @property
    def mixed(self) -> bool:
        """Whether the weights changed while this turn was generated."""
        return self.version_end is not None and self.version_end != self.version


@dataclass(frozen=True, slots=True)
class Rollout:
    """All turns of one attempt. `reward` is None until graded, and stays None when nobody could grade it.

    Example:
        >>> turn = Turn((1, 5), (9, 2), (-0.1, -0.2), version=3)
        >>> str(Rollout(task_id="sums/1+1", group="0", index=2, turns=(turn,)))
        'task=sums/1+1/group=0/rollout=2'
    """

    task_id: str
    group: str
    """Names one visit of a task, unique in the run: `step/position`."""
    index: int
    """Which sibling, from 0."""
    turns: tuple[Turn, ...]
    reward: float | None = None
    reward_parts: Mapping[str, float | None] = field(default_factory=dict)
    failure: str | None = None
    """Why there is no reward, as one word that can be counted."""
    ended: str = ""
    """With tools, why no further turn came: `answered`, `max_turns`, `max_calls`, `length`, `context`, `repetition`."""
    own_reward: float | None = None
    """What the rollout's own world says of it (`get_reward` of an environment class); None when it says nothing."""
    seconds: float | None = field(default=None, compare=False)
    """Wall time from its first request to its end, tools included; siblings that are sampled in one call share it."""
    grading_seconds: Mapping[str, float] = field(default_factory=dict, compare=False)
    """Wall time of the calls that judged it, by reward function; siblings that are judged in one call share it."""

    def __str__(self) -> str:
        return f"task={self.task_id}/group={self.group}/rollout={self.index}"

    def __post_init__(self) -> None:
        if type(self.turns) is not tuple or any(type(turn) is not Turn for turn in self.turns):
            kinds = sorted({type(turn).__name__ for turn in self.turns}) if type(self.turns) is tuple else []
            raise ShapeError(
                f"{self}: turns is a {type(self.turns).__name__}{' of ' + ', '.join(kinds) if kinds else ''}",
                "what is no turn has no tokens to train on, and fails where nobody knows where it came from",
                "pass a tuple of records.Turn",
            )
        if not self.turns and self.failure is None:
            raise ShapeError(f"{self} has no turns and no failure", "an attempt leaves tokens or a reason", "add one")
        if self.reward is not None and self.failure is not None:
            raise ShapeError(
                f"{self} has reward {self.reward} and failure {self.failure!r}", "a failure is not a score", "keep one"
            )
        if self.reward is not None and not math.isfinite(self.reward):
            raise ShapeError(
                f"{self} has reward {self.reward}", "one NaN poisons its whole group", "use None with a failure reason"
            )
        spent = [*([] if self.seconds is None else [self.seconds]), *self.grading_seconds.values()]
        if any(not (math.isfinite(each) and each >= 0) for each in spent):
            raise ShapeError(f"{self} took {spent} seconds", "time runs forward", "measure on one monotonic clock")

    @property
    def text(self) -> str:
        """What the policy wrote, turn after turn."""
        return "".join(turn.text for turn in self.turns)

    @property
    def version(self) -> int:
        """The oldest weights that contributed a token."""
        return min(turn.version for turn in self.turns)

    @property
    def sampled_tokens(self) -> int:
        """How many tokens the policy itself chose."""
        return sum(len(turn.completion_ids) for turn in self.turns)

    @property
    def completion_ids(self) -> tuple[int, ...]:
        """Everything behind the first prompt: what the policy chose and, between turns, what tools said."""
        if not self.turns:
            return ()
        first, last = self.turns[0], self.turns[-1]
        return (*last.prompt_ids[len(first.prompt_ids) :], *last.completion_ids)

    @property
    def finish_reason(self) -> str:
        """How the last turn ended."""
        return self.turns[-1].finish_reason if self.turns else UNKNOWN

    @property
    def rerendered_tokens(self) -> int:
        """Tokens of the history that a later turn saw differently from how they were sampled or shown; must be 0."""
        changed = 0
        for before, after in itertools.pairwise(self.turns):
            history = before.prompt_ids + before.completion_ids
            seen = after.prompt_ids[: len(history)]
            changed += len(history) - len(seen) + sum(a != b for a, b in zip(history, seen, strict=False))
        return changed

    def graded(
        self, reward: float | None, parts: Mapping[str, float | None], failure: str | None,
        seconds: Mapping[str, float] | None = None,
    ) -> Rollout:  # fmt: skip
        """The same attempt with its verdict.

        Args:
            seconds: what each reward function took for it.
        """
        return dataclasses.replace(
            self, reward=reward, reward_parts=dict(parts), failure=failure, grading_seconds=dict(seconds or {})
        )


@dataclass(frozen=True, slots=True)
class Group:
    """Sibling rollouts of one task, from one visit of that task.

    Example:
        >>> turn = Turn((1, 5), (9, 2), (-0.1, -0.2), version=3)
        >>> task = Task(id="sums/1+1", prompt="1+1=")
        >>> group = Group(task, "0", (Rollout("sums/1+1", "0", 0, (turn,), reward=1.0),))
        >>> group.rewards
        (1.0,)
    """

    task: Task
    id: str
    rollouts: tuple[Rollout, ...]

    def __post_init__(self) -> None:
        if not self.rollouts:
            raise ShapeError(f"group {self.id} of {self.task.id} is empty", "nothing to compare", "drop the task")
        strangers = [str(r) for r in self.rollouts if r.task_id != self.task.id or r.group != self.id]
        if strangers:
            raise ShapeError(
                f"group {self.id} of {self.task.id} holds strangers: {', '.join(strangers[:3])}",
                "an advantage compares siblings of one task; strangers make it noise",
                "build groups from the ids on the rollouts",
            )

    @property
    def rewards(self) -> tuple[float | None, ...]:
        """(G,) rewards in sibling order; None where nobody could grade."""
        return tuple(r.reward for r in self.rollouts)

    @classmethod
    def merge(cls, chunks: Sequence[Group]) -> Group:
        """Join chunks of one visit (adaptive sampling) into one group, in order. No run calls this."""
        if not chunks:
            raise ShapeError("merge got no chunks", "a group of nothing has no prompt", "merge at least one chunk")
        first = chunks[0]
        prompts = {r.turns[0].prompt_ids for c in chunks for r in c.rollouts if r.turns}
        tasks = {c.task.id for c in chunks}
        if len(prompts) > 1 or len(tasks) > 1:
            raise ShapeError(
                f"merge got {len(prompts)} different prompts of tasks {sorted(tasks)}",
                "completions of different prompts are not siblings",
                "merge only chunks that came from one request",
            )
        rollouts = [r for c in chunks for r in c.rollouts]
        renumbered = tuple(dataclasses.replace(r, group=first.id, index=i) for i, r in enumerate(rollouts))
        return cls(first.task, first.id, renumbered)


@dataclass(frozen=True, slots=True)
class TrainSample:
    """One flat, trainable token sequence.

    Example:
        >>> TrainSample(item_id="sums/1+1", trainer_version=3, group="0", prompt_ids=(1, 5),
        ...             completion_ids=(9, 2), sampled=(True, True), logprobs=(-0.1, -0.2),
        ...             reward=1.0, advantage=0.5).trained_tokens
        2
    """

    item_id: str
    """Which task this is, for the ledger."""
    trainer_version: int
    """Oldest weights that generated a token of it."""
    group: str
    """Siblings share it; advantages are taken inside it."""
    prompt_ids: tuple[int, ...]
    """(P,) context before the first sampled token."""
    completion_ids: tuple[int, ...]
    """(T,) everything after it: sampled tokens, and (multi-turn) what the tools answered."""
    sampled: tuple[bool, ...]
    """(T,) provenance: True where the policy itself chose the token."""
    logprobs: tuple[float, ...]
    """(T,) the sampler's logprobs; 0.0 where `sampled` is False."""
    reward: float
    advantage: float = 0.0
    index: int = 0
    """Sibling number inside the group."""
    finish_reason: str = UNKNOWN
    ref_logprobs: tuple[float, ...] | None = None
    """(T,) under the reference policy, when it was scored. No run fills this: the learner scores the reference."""
    dataset: str = ""

    def __post_init__(self) -> None:
        width = len(self.completion_ids)
        for name in ("sampled", "logprobs", "ref_logprobs"):
            value = getattr(self, name)
            if value is not None and len(value) != width:
                raise ShapeError(
                    f"sample {self.item_id}#{self.index}: {name} has {len(value)} entries for {width} tokens",
                    "a shifted or short list trains the wrong tokens",
                    "build samples with policy.samples.to_sample",
                )
        if not self.item_id or not self.prompt_ids or width == 0:
            raise ShapeError(
                f"sample {self.item_id!r} has {len(self.prompt_ids)} prompt and {width} completion tokens",
                "an anonymous or empty sample cannot be accounted for",
                "drop the rollout with a reason instead",
            )
        if self.trainer_version < 0:
            raise ShapeError(
                f"sample {self.item_id}: trainer_version is {self.trainer_version}", "versions start at 0", "stamp it"
            )
        if not (math.isfinite(self.reward) and math.isfinite(self.advantage)):
            raise ShapeError(
                f"sample {self.item_id}: reward {self.reward}, advantage {self.advantage}",
                "a non-finite weight reaches every parameter",
                "drop the sample with a reason instead",
            )

    @property
    def trained_tokens(self) -> int:
        """How many tokens carry loss."""
        return sum(self.sampled)


@dataclass(frozen=True, slots=True)
class EngineOutput:
    """One completion as serving engines return it: ids, text, one logprob map per position. No run builds one."""

    token_ids: Sequence[int]
    text: str
    logprob_maps: Sequence[Mapping[int, float]] | None
    """(T,) per position: token id -> log-probability, sampled token included."""
    finish_reason: str | None = None


def group_from_outputs(
    task: Task, group: str, prompt_ids: Sequence[int], outputs: Sequence[EngineOutput], version: int
) -> Group:
    """A group from one generation response; refuses an answer with holes instead of filling them.

    No run calls this: `runtime.rollout` and the engines build groups.

    The value recorded for a position is the one under the *sampled* token's id, never the
    first entry of the map (which is the most likely token, not the chosen one).
    """
    if not outputs:
        raise EngineError(
            f"task {task.id}: the engine returned no outputs", "nothing was sampled", "see the engine log"
        )
    rollouts = []
    for i, out in enumerate(outputs):
        turn = Turn(
            tuple(prompt_ids), tuple(out.token_ids), _sampled_logprobs(task.id, i, out), version,
            finish_reason=out.finish_reason or UNKNOWN, text=out.text,
        )  # fmt: skip
        rollouts.append(Rollout(task.id, group, i, (turn,)))
    return Group(task, group, tuple(rollouts))


def _sampled_logprobs(task_id: str, index: int, out: EngineOutput) -> tuple[float, ...]:
    where = f"task {task_id}, output {index}"
    maps = out.logprob_maps
    if maps is None or len(maps) != len(out.token_ids):
        got = "no" if maps is None else len(maps)
        raise EngineError(
            f"{where}: {got} logprobs for {len(out.token_ids)} tokens",
            "a filler value would pass for a probability",
            "ask the engine for logprobs of the sampled tokens",
        )
    for position, (token, table) in enumerate(zip(out.token_ids, maps, strict=True)):
        if token not in table:
            raise EngineError(
                f"{where}, position {position}: sampled token {token} is missing from its logprob map",
                "taking another entry would record the wrong token's probability",
                "request logprobs for the sampled token itself",
            )
    return tuple(table[token] for token, table in zip(out.token_ids, maps, strict=True))

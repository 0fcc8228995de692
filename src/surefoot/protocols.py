"""The seams: Engine, Environment, Toolkit, Learner, TaskQueue, Runtime, and what crosses them.

Nothing here imports torch: weights cross as an opaque mapping, so that the seams can be
read, mocked and type-checked on a machine without it.

Read next: `loop.py`, which sees only these.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Protocol

from surefoot.records import Group, Rollout, Task, TrainSample

if TYPE_CHECKING:
    from torch import Tensor

Weights = Mapping[str, "Tensor"]
"""Parameter name (as in the Hugging Face state dict) -> tensor."""


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """The numbers an engine needs to run a Llama-family decoder on weights it is handed.

    Example:
        A 4-layer, 128-wide model with 4 query and 2 KV heads of 32, RoPE base 10000.
    """

    model_type: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    norm_eps: float
    max_positions: int
    inv_freq: tuple[float, ...]
    """(head_dim / 2,) rotary frequencies as the training model itself uses them."""
    rope_scaling: float = 1.0
    """Factor on cos and sin (YaRN-like scalings); 1.0 otherwise."""
    qkv_bias: bool = False
    qk_norm: bool = False
    tied_head: bool = True
    beyond: tuple[str, ...] = ()
    """What the model computes that these numbers do not say; then only `vocab` and `max_positions` are sure."""


@dataclass(frozen=True, slots=True)
class Request:
    """One completion asked of an engine: token ids in, never text."""

    id: str
    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    temperature: float
    """0.0 means greedy, for evaluation only."""
    stop_ids: frozenset[int]
    seed: int
    """Names this rollout's private random stream."""
    urgent: bool = False
    """Decoded before other waiting requests: its caller blocks until it is answered."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One engine answer: token ids out, with the sampler's own logprobs."""

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """(T,) at the sampling temperature; at temperature 1 when greedy."""
    finish_reason: str
    version: int
    """Weights in force when the first token was drawn."""
    version_end: int


class Engine(Protocol):
    """Who speaks. Handed weights; never loads a model."""

    @property
    def version(self) -> int:
        """Version of the weights in force."""

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Answer every request, in order."""

    def load_weights(self, weights: Weights, version: int) -> None:
        """Serve these weights from the next token on; `version` counts only if this returns."""

    def close(self) -> None:
        """Free everything."""


@dataclass(frozen=True, slots=True)
class EngineInputs:
    """What a run tells whoever makes its engine; plain data, so that it can be sent to another process."""

    decoder: DecoderSpec
    model_config: Mapping[str, Any] = field(repr=False)
    """`config.json` of the model, as a dictionary."""
    rows: int
    """Completions that will be asked for at once."""
    max_width: int
    """Longest prompt and completion together, in tokens."""
    device: str
    dtype: str
    """What weights arrive in: "float32" or "bfloat16"."""
    seed: int
    threads: int
    url: str | None = None
    """engine.url."""
    gpu_memory_utilization: float = 0.4
    shares_weights: bool = False
    """Weights that were handed over change while they are served: they have to be copied."""
    answer_only: bool = False
    """Nothing will be trained: no weights need to be taken."""
    cuda_kernels: bool = True
    """Captured graphs and fused kernels where they are exact and there is a CUDA device."""
    kind: str = ""
    """engine.kind: for an engine of the user's own, where it is."""


InFlightPolicy = Literal["keep", "wait", "abort"]
"""What becomes of unfinished completions while weights change: go on with the new ones, finish first, begin again."""


class ServingEngine(Engine, Protocol):
    """An engine that many ask at once; completions come and go while it runs, weights change between two tokens."""

    def submit(self, requests: Sequence[Request]) -> Future[list[Completion]]:
        """Ask from any thread; the answers come in the requests' order."""

    def pause(self, in_flight: InFlightPolicy = "keep") -> None:
        """No token is drawn after this returns; new requests wait. `wait` returns when nothing is in flight.

        No run calls this: weights change between two tokens.
        """

    def resume(self) -> None:
        """Go on; what was aborted is asked again, unseen by whoever asked. No run calls this."""

    @property
    def in_flight(self) -> int:
        """Completions that were asked for and are not finished."""

    @property
    def pack_seconds(self) -> float:
        """What laying out the weights in force for decoding has cost so far; paid with the first token."""

    def prepare(self, weights: Weights, version: int) -> Mapping[str, int]:
        """Stage these weights beside those in force; checksum per tensor of what it holds, computed by itself."""

    def commit(self, version: int) -> Mapping[str, int]:
        """Serve what was staged from the next token on and drop every prefix cache.

        Returns:
            Checksums of what is now in force, where the engine can read its weights back; else an empty mapping.
        """


@dataclass(frozen=True, slots=True)
class Grade:
    """The result of grading one rollout. A reward of None means no verdict, and `failure` says why."""

    reward: float | None
    parts: Mapping[str, float | None]
    failure: str | None = None
    correct: float | None = None
    """The task metric in [0, 1], separate from the reward; None when the task has none."""
    seconds: Mapping[str, float] = field(default_factory=dict, compare=False)
    """Wall time of the grading calls, by function."""


Graded = Callable[[Sequence[int], Sequence[Grade]], None]
"""(positions among the rollouts, their grades): one group of siblings is graded."""


class Environment(Protocol):
    """Grades rollouts, and gives them tools where a task has some."""

    def grade(self, tasks: Sequence[Task], rollouts: Sequence[Rollout], each: Graded | None = None) -> list[Grade]:
        """One grade per rollout, in order; `tasks[i]` is the task of `rollouts[i]`.

        Args:
            each: told of every group of siblings as soon as all of them have their grades.
        """

    def explain_failures(self) -> str:
        """Why graders failed so far, as lines to append to an error; empty when none did."""

    def close(self) -> None:
        """End every worker."""


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """One tool as the model sees it."""

    name: str
    """Unique in the run; a server's tools are called `server__tool`."""
    description: str
    parameters: Mapping[str, Any]
    """JSON schema of the arguments: an object."""


@dataclass(frozen=True, slots=True)
class ToolAnswer:
    """The result of a tool call. A failure of its server is no result: that is a `ToolFailedError`."""

    text: str
    """For the model: cut to the limit, visibly; control characters shown, not sent."""
    outcome: str = "ok"
    """`ok`; `error` when the tool itself reports one; `refused` when it was not asked: unknown, or wrong arguments."""


class Toolbox(Protocol):
    """The tools of one rollout, with state that no other rollout shares."""

    opening: str | None
    """The initial observation, added to the task's last message before the first turn. The same for all siblings."""

    def call(self, name: str, arguments: Mapping[str, Any], deadline_s: float) -> ToolAnswer:
        """Call and wait, from any thread; a failure that is not the model's is a `ToolFailedError` with its reason.

        Args:
            deadline_s: seconds until the answer is worth nothing; overrun by at most one second.
        """

    def reward(self) -> float | None:
        """The environment's own reward of the attempt; None when it gives none. Called once, after the last turn."""

    def close(self) -> None:
        """Free everything; never raises for what the rollout did. May be called twice."""


class Toolkit(Protocol):
    """Opens toolboxes: on MCP servers, plain functions, environment classes, or a recording."""

    @property
    def specs(self) -> Sequence[ToolSpec]:
        """Every tool, fixed for the whole run."""

    @property
    def routes(self) -> Mapping[str, Sequence[str]]:
        """Environment -> its tools, where tasks choose between several; empty when all tasks have all tools."""

    def open(self, task: Task, rollout: str, seed: int) -> Toolbox:
        """Tools for one rollout; a `ToolFailedError` when there are none to be had now.

        Args:
            rollout: names the attempt, `group/index`, unique in the run: `train/7/3/0`.
            seed: the same for all siblings of a group.
        """

    def close(self) -> None:
        """End every server, process and thread."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one optimiser step did."""

    metrics: Mapping[str, float]
    version: int
    applied: bool
    """False when a non-finite number kept the step from the weights."""
    suspects: tuple[str, ...] = ()
    """Why a step was not applied, by source, such as `task=t/group=g/rollout=2: loss is nan`."""
    notes: tuple[tuple[str, str], ...] = ()
    """Warnings for a person: what happened in this step, and what to do about it."""
    trained_rows: Mapping[str, int] = field(default_factory=dict)
    """Data set -> samples of it that were scored and carried loss."""
    memory_peak: int = 0
    """Most bytes in use since the step before: on a GPU torch's allocator, elsewhere the process since its start."""


Scored = tuple[tuple[int, ...], tuple[int, ...]]
"""Prompt ids and completion ids: the log-probabilities of the latter are computed."""


@dataclass(frozen=True, slots=True)
class ParameterUpdates:
    """How many parameter tensors got a gradient and how many changed, measured around one optimiser step."""

    total: int
    with_gradient: int
    moved: int
    still: tuple[str, ...]
    """Trainable tensors that did not change."""

    def metrics(self) -> dict[str, float]:
        """For the log line of the first step."""
        return {
            "census/parameters": float(self.total),
            "census/with_gradient": float(self.with_gradient),
            "census/moved": float(self.moved),
        }


@dataclass(frozen=True, slots=True)
class LearnerFacts:
    """What a run reads of its learner between two steps."""

    version: int = 0
    """How many optimiser steps were applied."""
    parameter_updates: ParameterUpdates | None = None
    """Of the first step that changed something, or of the newest one until then; None before the first step."""
    checked_tokens: int = 0
    """Tokens whose masks were checked."""
    splits: int = 0
    """How often microbatches were halved because memory ran out."""
    changed_entries: int = 0
    """Parameter entries that optimiser steps changed, summed over the steps of the run."""


WeightSource = tuple[Weights, int]
"""All weights by Hugging Face name, and their version: the learner's own tensors, or a name for those elsewhere."""


class Learner(Protocol):
    """Trains the policy. What is trained, published, saved and reported are four questions."""

    @property
    def facts(self) -> LearnerFacts:
        """How far it got, as of the last call that has returned."""

    def learn(self, samples: Sequence[TrainSample], *, iteration: int = 0) -> StepReport:
        """One optimiser step on these samples; `iteration` counts passes over the same ones."""

    def published(self) -> WeightSource:
        """The current weights and their version, as `Runtime.publish` takes them; they change with the next step."""

    def score(self, texts: Sequence[Scored], *, temperature: float) -> list[tuple[float, ...]]:
        """Log-probabilities of given completions under the current weights, one tuple per text, in order."""

    def save(self, folder: Path, *, step: int, extra: Mapping[str, Any]) -> None:
        """Weights, tokenizer, training state and `extra` as one folder, durably; complete or absent.

        Args:
            folder: on a disk that the caller sees too; it must not exist.
            extra: what else the run needs to go on, as JSON.
        """

    def load(self, folder: Path) -> Mapping[str, Any]:
        """Go back to a folder that `save` wrote; returns its `extra`. What does not fit is refused, nothing changed."""


@dataclass(frozen=True, slots=True)
class EvalResult:
    """Held-out results over `n` answers that got a verdict."""

    n: int
    reward: float
    accuracy: float | None
    """Mean of the task metric; None when the tasks have none."""
    stderr: float | None
    """Standard error of `accuracy`."""
    mean_length: float
    clipped_ratio: float
    failures: int
    """Answers without a verdict; left out of every mean."""
    scores: Mapping[str, tuple[float | None, ...]] = field(default_factory=dict)
    """`accuracy` and `reward` of each task, the mean over its answers, in the order of the tasks; None where no
    answer of one got a verdict. Two evaluations of the same tasks are compared task by task, not mean by mean: that is
    more certain."""
    right: int | None = None
    """How many of the `n` answers were right; None when the task metric is not 0 or 1 for each of them."""
    pass_at: Mapping[int, float] = field(default_factory=dict)
    """k -> share of the tasks that k answers would solve; empty with one answer per task."""
    groups: tuple[Group, ...] = field(default=(), repr=False, compare=False)
    """Every answer, task by task."""
    correct: tuple[tuple[float | None, ...], ...] = field(default=(), repr=False, compare=False)
    """The task metric of each answer, in the same order."""

    def metrics(self, name: str | None = None) -> dict[str, float]:
        """As they are logged; what is undefined is left out.

        Args:
            name: of an evaluation set; None for the share of the tasks that is held out.

        Example:
            >>> found = EvalResult(2, 0.5, 0.5, 0.35, 3.0, 0.0, 0, pass_at={1: 0.5, 2: 1.0})
            >>> found.metrics()["eval_pass@2"], found.metrics("gsm8k")["eval/gsm8k/accuracy"]
            (1.0, 0.5)
        """
        values = {
            "n": float(self.n),
            "reward": self.reward,
            "accuracy": self.accuracy,
            "accuracy_stderr": self.stderr,
            "right": None if self.right is None else float(self.right),
            "completions/mean_length": self.mean_length,
            "completions/clipped_ratio": self.clipped_ratio,
            "failures": float(self.failures),
            **{f"pass@{k}": share for k, share in self.pass_at.items()},
        }
        prefix = eval_prefix(name)
        return {prefix + each: value for each, value in values.items() if value is not None}

    def named_scores(self, name: str | None = None) -> dict[str, tuple[float | None, ...]]:
        """`scores` under the names that the metrics have."""
        return {eval_prefix(name) + each: scores for each, scores in self.scores.items()}


def eval_prefix(name: str | None) -> str:
    """What metrics of an evaluation begin with: those of a set, or of the held-out share of the tasks."""
    return "eval_" if name is None else f"eval/{name}/"


FEW_ANSWERS = 30
"""Below so many answers a share is shown as a count: 0.5556 looks measured to four digits, 5 of 9 does not."""


def count_text(metrics: Mapping[str, float]) -> str | None:
    """The accuracy of an evaluation with few answers, `5 of 9`; None where a number is the right way to show it.

    Example:
        >>> count_text({"eval_accuracy": 0.25, "eval_right": 1.0, "eval_n": 4.0})
        '1 of 4'
        >>> count_text({"eval_accuracy": 0.25, "eval_n": 4.0})  # not 0 or 1 per answer: a mean, no share
    """
    right, answers = metrics.get("eval_right"), metrics.get("eval_n", 0.0)
    return f"{right:.0f} of {answers:.0f}" if right is not None and 0 < answers < FEW_ANSWERS else None


@dataclass(frozen=True, slots=True)
class StepBatch:
    """What one step learns from."""

    step: int
    """The first optimiser step on this batch."""
    tasks: tuple[Task, ...]
    groups: tuple[Group, ...] = ()
    """One per task, graded. Empty only inside the queue, while they are still collected: the loop never sees that."""
    played: Mapping[int, Group] = field(default_factory=dict)
    """Of a batch that is still collected: groups on the disk, by position in the step; they are not sampled again."""
    keeping_s: float = 0.0
    """How much of the wait for it went into ledger and journal."""


GroupFinished = Callable[[int, Group], None]
"""(position in the step, group): this group is graded. Any thread may call it; it returns at once."""


class TaskQueue(Protocol):
    """Hands out batches of graded groups, and records each visit's outcome (trained, or dropped with a reason).

    Per step: `next_batch` -> `record_rollouts` -> `close_batch`. Who samples when is the queue's affair: with
    `max_staleness = 0` when the batch is asked for, otherwise ahead of that.
    """

    def next_batch(self, step: int, n: int) -> StepBatch:
        """The batch that begins at this step, with its groups: what the journal holds, or `n` tasks and more where some
        teach nothing. Waits for them; a request to stop ends the wait, and what was graded is found by the resume."""

    def record_rollouts(self, batch: StepBatch) -> None:
        """Groups and their composition are on the disk when this returns: from here on the step can be repeated."""

    def close_batch(self, batch: StepBatch, step: int, drop_reasons: Sequence[str | None]) -> None:
        """The batch is finished after `step`; per task, None when it was trained on, else why it was dropped."""

    def metrics(self) -> dict[str, float]:
        """What there is to say of the batch that is worked on."""

    def advance(self, version: int) -> None:
        """Engines serve this version from now on."""

    def graders_failed(self) -> None:
        """The run ends because graders failed: groups without a verdict that wait are asked for again on a resume."""

    def close(self) -> None:
        """Ask for no further group; ledger and journal may be read by anybody after this. May be called twice."""


class Runtime(Protocol):
    """Runs engines, rollouts and graders, in this process or on Ray. Queues collect with it; the loop publishes."""

    probe_baseline: list[list[float]] | None
    """The learner's log-probabilities of the fixed probe tokens at the last publish; the next publish reports how far
    they moved. Set before the first publish of a resumed run, it is what the second one is measured from."""

    def collect(
        self, tasks: Sequence[Task], step: int, first: int = 0, *, played: Mapping[int, Group] = MappingProxyType({}),
        finished: GroupFinished | None = None,
    ) -> list[Group]:  # fmt: skip
        """One scored group per task; failures carry reasons.

        Args:
            first: position in the step of the first task.
            played: groups that exist already, by position: they are returned as they are.
            finished: called with every other group as soon as it is graded.
        """

    def publish(self, weights: Weights, version: int) -> Mapping[str, float]:
        """Move version `version` to every engine and prove arrival; returns metrics."""

    def evaluate(self, tasks: Sequence[Task], step: int, name: str | None = None) -> EvalResult:
        """Answer held-out tasks, or those of the evaluation set `name`, without touching any training random stream."""

    def preflight(
        self, tasks: Sequence[Task], *, audit: bool = False, look: Callable[[list[Group]], None] | None = None,
        datasets: Mapping[str, Sequence[Task]] = MappingProxyType({}), allow: Collection[str] = (),
    ) -> list[Group]:  # fmt: skip
        """Baseline completions, graded, before step 1: refuses a reward that cannot teach, of one data set too.

        Args:
            look: called with the baseline groups before anything is refused.
        """

    def close(self) -> None:
        """Stop engines and workers."""


class Codec(Protocol):
    """Messages to tokens once; tokens to text for people and graders. Never back again."""

    stop_ids: frozenset[int]
    pad_token_id: int
    vocab_size: int

    def encode_prompt(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[str] | None = None
    ) -> tuple[int, ...]:
        """Chat messages, with the assistant header, as token ids; `tools` names those that are shown, None all."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text without special tokens."""

    def encode_replies(self, answers: Sequence[str]) -> tuple[int, ...]:
        """Tool results as token ids, from behind the assistant's stop token to the header of its next turn."""

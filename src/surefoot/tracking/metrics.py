"""Every number of a run, once: its name and meaning, what a step's groups give, and `metrics.jsonl`, written.

Owns       the register: every metric's name, unit, how it is reduced, which way is healthy, and what it means; and the
           format of the log: one flat JSON object per line, `step` first, every other value a finite number.
Promises   a name that is not here is refused by the log, so that no dashboard waits for a misspelt one; a value that is
           None, NaN, infinite, a bool or text is refused, never turned into 0, and what is undefined is left out; each
           step is there once per kind (training, evaluation), in order; numbers keep every digit; a line is whole.
Never      rounds, or skips a line it cannot read. `surefoot_harness.metrics_file` reads it, and so does who judges a
           run from outside.

    {"step": 7, "loss": 0.0123, "reward": 0.5, ...}
    {"step": 25, "eval_accuracy": 0.61, "eval_n": 400, ...}

Names are TRL's where TRL has one; `{}` in a name stands for one word, such as a reward function's name.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Literal

from surefoot.errors import NumericsError, StateError, StorageError
from surefoot.records import LENGTH, REPETITION, REPETITION_COST, STOP, Group, Rollout
from surefoot.system.files import APPEND, plain_descriptor
from surefoot_harness.metrics_file import EVALUATION, LINE_BYTES, Row, kind_of, lines_of, parse_row, read_metrics

__all__ = [
    "EVALUATION",
    "LINE_BYTES",
    "METRICS",
    "Healthy",
    "Metric",
    "MetricsLog",
    "Reduction",
    "Row",
    "batch_metrics",
    "dataset_metrics",
    "group_metrics",
    "headlines",
    "kind_of",
    "lookup",
    "looping_share",
    "metrics_until",
    "read_metrics",
]


Reduction = Literal["mean", "sum", "max", "min", "last"]
Healthy = Literal["up", "down", "steady", "none"]


@dataclass(frozen=True, slots=True)
class Metric:
    """One kind of number.

    Example:
        >>> lookup("rewards/score/mean").unit
        'reward'
    """

    name: str
    unit: str
    reduction: Reduction
    """How values of microbatches, workers or several logged steps become one."""
    healthy: Healthy
    """Which way it moves in a run that learns; `steady` should stay where it is."""
    description: str


_TABLE = """
reward | reward | mean | up | mean reward over all graded rollouts of the step
reward_std | reward | mean | steady | mean over groups of the population standard deviation inside the group
rewards/{}/mean | reward | mean | up | mean of one reward function over the rollouts it judged
rewards/{}/std | reward | mean | steady | standard deviation of one reward function over the rollouts it judged
datasets/{}/reward | reward | mean | up | mean reward of one data set's rollouts, where a run has several
datasets/{}/frac_reward_zero_std | share | mean | down | share of its groups whose rewards are all equal
datasets/{}/mean_length | tokens | mean | steady | mean completion length of its rollouts
datasets/{}/clipped_ratio | share | mean | down | share of its completions cut by the length limit
datasets/{}/trained_rows | rows | sum | steady | samples of it that were scored and carried loss
frac_reward_zero_std | share | mean | down | share of groups whose rewards are all equal: no gradient comes from them
loss | loss | last | none | the step's loss, penalty and channels included; its level says little by itself
loss/{} | per token | mean | none | a sum that the loss type declares under that word, by tokens that were scored
policy_loss | loss | last | none | the loss without the KL penalty
sdpo/loss | nats/token | last | down | divergence from the policy that was shown a better sibling, before its weight
sdpo/live_fraction | share | mean | steady | share of samples that had such a teacher
sdpo/teacher_gain | nats/token | mean | up | how much likelier the teacher finds good attempts; below 0 it misleads
sdpo/too_long | rows | sum | down | samples whose teacher's prompt did not fit into the model's context
replay/loss | loss | last | down | mean preference loss of the step's recorded pairs, before its weight
replay/accuracy | share | mean | up | share of those pairs whose chosen answer gained on the rejected one
replay/margin | nats | mean | up | mean of that gain since the start
replay/pairs | pairs | sum | steady | recorded pairs in this step
replay/dropped/{} | pairs | last | down | pairs of the file that cannot be trained on, by reason
kl | nats/token | mean | steady | mean KL estimate against the reference, over trained tokens
entropy | nats/token | mean | steady | mean entropy over all sampled tokens; absent where not all of them were scored
scored_entropy | nats/token | mean | steady | mean entropy over scored tokens; scored_share says what share these are
scored_share | share | mean | steady | scored ones of the step's sampled tokens; rows that move nothing cost no forward
approx_entropy | nats/token | mean | steady | mean of -e^g x learner logprob, g = learner - sampler: estimates entropy
positive_nll | nats/token | mean | down | mean negative log-likelihood of tokens with a positive advantage
grad_norm | norm | last | steady | gradient norm before clipping
learning_rate | rate | last | none | learning rate of this step
probs_ratio | ratio | mean | steady | mean probability ratio new to old over scored tokens
abs_log_ratio | nats | mean | steady | mean absolute log ratio new to old over scored tokens
cispo_clip_ratio | share | mean | steady | share of the step's tokens whose cispo weight was capped
clip_ratio/low_mean | share | mean | steady | share of the step's tokens (or rows) clipped from below
clip_ratio/high_mean | share | mean | steady | share of the step's tokens (or rows) clipped from above
clip_ratio/region_mean | share | mean | steady | share of the step's tokens (or rows) clipped on either side
clip_ratio/delta_mean | share | mean | steady | share of the step's tokens (or rows) bounded by the dual clip
clip_ratio/low_min | share | min | steady | smallest share clipped from below over microbatches
clip_ratio/high_max | share | max | steady | largest share clipped from above over microbatches
correction/raw_mean | ratio | mean | steady | mean importance weight before bounds, each at most e^20; 1 is ideal
correction/log_mean | nats | mean | steady | mean logarithm of the importance weight before it is bounded
correction/overflow | weights | sum | down | importance weights above e^20, which raw_mean counts as e^20
correction/used_mean | ratio | mean | steady | mean importance weight as used
correction/bounded_share | share | mean | down | share of importance weights that were truncated or masked
correction/rejected_share | share | mean | down | weighed tokens that a mask mode rejected; they stay in the denominator
completions/mean_length | tokens | mean | steady | mean completion length
completions/min_length | tokens | min | steady | shortest completion
completions/max_length | tokens | max | steady | longest completion
completions/clipped_ratio | share | mean | down | share of completions cut by the length limit
completions/mean_terminated_length | tokens | mean | steady | mean length of completions that ended by themselves
completions/looping_share | share | mean | down | share of completions that repeat themselves; not with repetition = off
sequences/mean_length | tokens | mean | steady | mean length of the scored samples, prompt and tools' answers included
sequences/max_length | tokens | max | steady | the same for the longest: what a forward pass has to hold
sampling/sampling_logp_difference/mean | nats | mean | down | mean absolute difference of sampler and learner logprobs
sampling/sampling_logp_difference/max | nats | max | down | largest absolute difference of sampler and learner logprobs
sampling/importance_sampling_ratio/min | ratio | min | steady | smallest learner-to-sampler probability ratio
sampling/importance_sampling_ratio/mean | ratio | mean | steady | mean learner-to-sampler probability ratio
sampling/importance_sampling_ratio/max | ratio | max | steady | largest learner-to-sampler probability ratio
token_mult_prob_error | ratio | mean | down | mean of exp(|logprob difference|); 1 is perfect, above 1.05 is alarming
gen_kl_error | nats/token | mean | down | KL estimate from sampler to learner
policy_kl_error | nats/token | mean | down | KL estimate from learner to sampler
js_divergence_error | nats/token | mean | down | Jensen-Shannon divergence of sampler and learner
seq_mult_prob_error/{} | ratio | mean | down | exp(|logprob difference|) averaged per sequence; no run logs it
num_turns/mean | turns | mean | steady | completions per rollout with tools
num_turns/max | turns | max | steady | the same for the longest rollout
tools/call_frequency | calls | mean | steady | tool calls per rollout
tools/called_share | share | mean | steady | share of rollouts that called a tool at all
tools/failure_frequency | share | mean | down | share of calls that were refused or that the tool answered with an error
tools/calls/{} | calls | mean | steady | calls of one tool per rollout
tools/ended/{} | share | mean | steady | share of rollouts with tools that ended for this reason
tools/reply_tokens | tokens | mean | steady | tokens per rollout from tools, headers included; never trained on
tools/rerendered_tokens | tokens | sum | down | tokens of a history that a later turn saw differently; always 0
trained_tokens | tokens | sum | steady | tokens that were scored and carried loss
trained_rows | rows | sum | steady | samples that were scored and carried loss
num_tokens | tokens | sum | none | tokens sampled for this step
tokens_per_second | tokens/s | mean | up | sampled tokens over the whole step's time
step_time | s | sum | down | wall time of the step
timing/reward/{}/mean | s | mean | down | judging one group by one reward function, the way to its process included
timing/reward/{}/max | s | max | down | the same for the group that took longest
timing/{} | s | sum | down | wall time of one part of the step
version | steps | last | up | version of the weights after this step
curriculum/share/{} | share | mean | none | share of one level among the step's tasks
curriculum/success_rate | share | mean | steady | success rate so far of the step's tasks that were played before
curriculum/new_frequency | share | mean | none | share of the step's tasks that were never played before
async/staleness_mean | versions | mean | down | age of the samples when trained, mean over groups by oldest token
async/staleness_max | versions | max | down | the same for the oldest group; never above max_staleness
async/queue | groups | last | none | finished groups that wait for a batch
async/in_flight | groups | last | none | groups that are being played
async/wasted | groups | sum | down | groups that became too old before they were trained on; their tasks are asked again
async/given_up | groups | sum | down | groups that failed or took longer than rollout_timeout_s
async/wait_s | seconds | mean | down | how long the learner waited for this batch
async/idle_share | share | mean | down | that wait as a share of the time since the batch before
off_policy/mean | versions | mean | down | versions between sampling and training, mean over turns
off_policy/max | versions | max | down | the same for the oldest turn
off_policy/mixed_share | share | mean | down | share of turns whose weights changed between their first and last token
sync/probe_gap | nats | max | down | largest difference of an engine's log-probability of a probe from the learner's
sync/probe_move | nats | last | none | how far this update moved the learner's log-probabilities of fixed tokens
sync/replicas | engines | last | steady | engines that gave proof of this version
sync/bytes | bytes | last | steady | bytes of weights that were published
memory/peak | bytes | max | down | most in use: what torch allocated on a GPU since the last step, else resident size
memory/recomputes | share | last | none | 1 where gradient_checkpointing computes layers again in the backward pass
memory/splits | halvings | last | down | how often microbatches were halved in this run because memory ran out
steps_refused | steps | sum | down | 1 when a non-finite number kept this step from the weights
groups/{} | groups | sum | none | groups by what became of them
dropped/{} | groups | sum | down | groups or tasks left out, by reason
failures/{} | rollouts | sum | down | rollouts without a verdict, by reason
updates/changed_share | share | last | none | parameter entries that the step changed, of those that are trained
updates/published_share | share | last | none | the same for the copy that engines get, in the run's dtype
census/parameters | tensors | last | none | parameter tensors of the policy
census/with_gradient | tensors | last | up | parameter tensors that got a gradient in step 1
census/moved | tensors | last | up | parameter tensors that changed in step 1
eval_accuracy | share | mean | up | held-out tasks solved, by the task metric, not by the reward
eval_accuracy_stderr | share | last | down | standard error of eval_accuracy
eval_right | answers | sum | up | held-out answers that are right, where the task metric is 0 or 1 for each of them
eval_reward | reward | mean | up | mean reward on held-out tasks
eval_n | answers | sum | steady | held-out answers that got a verdict
eval_failures | answers | sum | down | held-out answers that nobody could grade
eval_completions/mean_length | tokens | mean | steady | mean completion length on held-out tasks
eval_completions/clipped_ratio | share | mean | down | share of held-out completions cut by the length limit
eval_pass@{} | share | mean | up | held-out tasks that k answers would solve; k follows the @
eval/{}/accuracy | share | mean | up | tasks of one evaluation set solved, by its metric
eval/{}/accuracy_stderr | share | last | down | standard error of that accuracy
eval/{}/right | answers | sum | up | answers of one evaluation set that are right, where its metric is 0 or 1 for each
eval/{}/reward | reward | mean | up | mean reward on one evaluation set
eval/{}/n | answers | sum | steady | answers of one evaluation set that got a verdict
eval/{}/failures | answers | sum | down | answers of one evaluation set that nobody could grade
eval/{}/pass@{} | share | mean | up | tasks of one evaluation set that k answers would solve; k follows the @
eval/{}/completions/mean_length | tokens | mean | steady | mean completion length on one evaluation set
eval/{}/completions/clipped_ratio | share | mean | down | share of its completions cut by the length limit
killswitch/fire | flag | max | down | 1 from the evaluation on at which the guard fired
killswitch/heldout | share | mean | up | the held-out number that the guard folded
killswitch/heldout_ema | share | last | up | the guard's moving average of held-out quality
killswitch/reward_ema | reward | last | up | the guard's moving average of the training reward
killswitch/proxy_real_gap | reward | last | steady | reward gain minus held-out gain since the guard's first evaluation
killswitch/kl_ema | nats/token | last | steady | the guard's moving average of the KL to the initial policy
killswitch/streak | evaluations | last | down | evaluations in a row in which held-out fell while the reward rose
killswitch/eval_share | share | last | down | share of the run's wall time spent on held-out tasks so far
"""


def _row(line: str) -> Metric:
    # At most four splits from the left: a description may hold a bar of its own, as in exp(|x|).
    name, unit, reduction, healthy, description = (part.strip() for part in line.split(" | ", 4))
    return Metric(name, unit, reduction, healthy, description)  # type: ignore[arg-type]


METRICS: dict[str, Metric] = {metric.name: metric for metric in map(_row, _TABLE.strip().splitlines())}


def lookup(name: str) -> Metric | None:
    """The metric of this name, patterns included; None when nobody registered it."""
    return METRICS.get(name) or next((metric for pattern, metric in _patterns() if pattern.fullmatch(name)), None)


def headlines(names: Iterable[str]) -> list[str]:
    """The one number of each evaluation set that comes first: its accuracy, or its reward where it has no metric.

    Example:
        >>> headlines(["eval/a/reward", "eval/a/accuracy", "eval/b/reward", "eval_accuracy"])
        ['eval/a/accuracy', 'eval/b/reward']
    """
    found = dict.fromkeys(names)
    sets = dict.fromkeys(name.split("/")[1] for name in found if name.startswith("eval/") and name.count("/") > 1)
    wanted = ([f"eval/{each}/accuracy", f"eval/{each}/reward"] for each in sets)
    return [name for pair in wanted for name in [each for each in pair if each in found][:1]]


@cache
def _patterns() -> list[tuple[re.Pattern[str], Metric]]:
    word = r"[^/\s{}]+"
    return [
        (re.compile(re.escape(name).replace(re.escape("{}"), word)), metric)
        for name, metric in METRICS.items()
        if "{}" in name
    ]


# -- What one step's groups look like in numbers: rewards, lengths, failures -----------------------


def batch_metrics(groups: Sequence[Group], words: Mapping[str, str], *, loops: bool) -> dict[str, float]:
    """Everything that is logged of one step's groups, as a whole and by data set.

    Args:
        words: data set -> its word in metrics; empty when all tasks belong to one.
        loops: whether this run looks for rollouts that repeat themselves.
    """
    return group_metrics(groups) | dataset_metrics(groups, words) | (looping_share(groups) if loops else {})


def group_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Metrics of everything that was collected, before anything is filtered."""
    rollouts = [r for g in groups for r in g.rollouts if r.turns]
    metrics = _lengths(rollouts)
    metrics |= _rewards(groups)
    failures = Counter(r.failure for g in groups for r in g.rollouts if r.failure is not None)
    metrics |= {f"failures/{reason}": float(count) for reason, count in failures.items()}
    metrics |= _tools(rollouts) | _grading(groups)
    metrics["num_tokens"] = float(sum(r.sampled_tokens for r in rollouts))
    metrics["groups/mixed_version"] = float(sum(any(t.mixed for t in r.turns) for r in rollouts))
    return metrics


def looping_share(groups: Sequence[Group]) -> dict[str, float]:
    """Share of the rollouts that go round in circles; for runs that look for it."""
    rollouts = [r for g in groups for r in g.rollouts if r.turns]
    marked = [r.failure == REPETITION or REPETITION_COST in r.reward_parts for r in rollouts]
    return {"completions/looping_share": _mean(marked)} if marked else {}


def dataset_metrics(groups: Sequence[Group], words: Mapping[str, str]) -> dict[str, float]:
    """The same for each data set of a mixture that has groups in this step.

    Args:
        words: data set -> its word in metrics; others are left out.
    """
    metrics: dict[str, float] = {}
    for name, word in words.items():
        own = [group for group in groups if group.task.dataset == name]
        found = _rewards(own) | _lengths([r for g in own for r in g.rollouts if r.turns])
        metrics |= {f"datasets/{word}/{short}": found[full] for full, short in _BY_DATASET.items() if full in found}
    return metrics


_BY_DATASET = {
    "reward": "reward", "frac_reward_zero_std": "frac_reward_zero_std", "completions/mean_length": "mean_length",
    "completions/clipped_ratio": "clipped_ratio",
}  # fmt: skip


def _grading(groups: Sequence[Group]) -> dict[str, float]:
    """How long judging one group took, function by function; siblings share their calls."""
    spent: dict[str, list[float]] = {}
    for group in groups:
        for name in sorted({name for r in group.rollouts for name in r.grading_seconds}):
            spent.setdefault(name, []).append(max(r.grading_seconds.get(name, 0.0) for r in group.rollouts))
    metrics = {f"timing/reward/{name}/mean": _mean(seconds) for name, seconds in spent.items()}
    return metrics | {f"timing/reward/{name}/max": max(seconds) for name, seconds in spent.items()}


def _rewards(groups: Sequence[Group]) -> dict[str, float]:
    scored = [[r for r in g.rewards if r is not None] for g in groups]
    scored = [rewards for rewards in scored if rewards]
    if not scored:
        return {}
    every = [r for rewards in scored for r in rewards]
    best, worst = max(every), min(every)
    constant = [rewards[0] for rewards in scored if len(set(rewards)) == 1]
    metrics = {
        "reward": _mean(every),
        "reward_std": _mean([_std(rewards) for rewards in scored]),
        "frac_reward_zero_std": len(constant) / len(scored),
        "groups/scored": float(len(scored)),
    }
    if best != worst:  # with one value for everybody, nobody can say whether it means right or wrong
        metrics["groups/all_correct"] = float(sum(c == best for c in constant))
        metrics["groups/all_wrong"] = float(sum(c == worst for c in constant))
    for name in sorted({n for g in groups for r in g.rollouts for n in r.reward_parts}):
        parts = [r.reward_parts.get(name) for g in groups for r in g.rollouts]
        values = [p for p in parts if p is not None]
        if values:
            metrics |= {f"rewards/{name}/mean": _mean(values), f"rewards/{name}/std": _std(values)}
    return metrics


def _tools(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Of rollouts that had tools; nothing when none had any."""
    with_tools = [r for r in rollouts if r.ended]
    if not with_tools:
        return {}
    calls = [call for r in with_tools for turn in r.turns for call in turn.calls]
    metrics = {
        "num_turns/mean": _mean([len(r.turns) for r in with_tools]),
        "num_turns/max": float(max(len(r.turns) for r in with_tools)),
        "tools/call_frequency": len(calls) / len(with_tools),
        "tools/called_share": _mean([any(turn.calls for turn in r.turns) for r in with_tools]),
        "tools/rerendered_tokens": float(sum(r.rerendered_tokens for r in with_tools)),
        "tools/reply_tokens": _mean([_reply_tokens(r) for r in with_tools]),
    }
    if calls:
        metrics["tools/failure_frequency"] = _mean([call.outcome != "ok" for call in calls])
    for why, count in Counter(r.ended for r in with_tools).items():
        metrics[f"tools/ended/{why}"] = count / len(with_tools)
    for name, count in Counter(call.name or "unreadable" for call in calls if call.outcome != "refused").items():
        metrics[f"tools/calls/{name}"] = count / len(with_tools)
    return metrics


def _reply_tokens(rollout: Rollout) -> int:
    """Tokens that the policy read from tools, headers included."""
    own = len(rollout.turns[0].prompt_ids) + sum(len(turn.completion_ids) for turn in rollout.turns[:-1])
    return len(rollout.turns[-1].prompt_ids) - own


def _lengths(rollouts: Sequence[Rollout]) -> dict[str, float]:
    if not rollouts:
        return {}
    lengths = [r.sampled_tokens for r in rollouts]
    ended = [r.sampled_tokens for r in rollouts if r.finish_reason == STOP]
    metrics = {
        "completions/mean_length": _mean(lengths),
        "completions/min_length": float(min(lengths)),
        "completions/max_length": float(max(lengths)),
        "completions/clipped_ratio": sum(r.finish_reason == LENGTH for r in rollouts) / len(rollouts),
    }
    if ended:
        metrics["completions/mean_terminated_length"] = _mean(ended)
    return metrics


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _std(values: Sequence[float]) -> float:
    """Population standard deviation; exactly 0 for equal values, whatever they are."""
    if len(set(values)) == 1:
        return 0.0
    centre = _mean(values)
    return math.sqrt(math.fsum((v - centre) ** 2 for v in values) / len(values))


# -- `metrics.jsonl`, written ----------------------------------------------------------------------


class MetricsLog:
    """Appends to one `metrics.jsonl`; an existing file is read first and continued."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._last: dict[str, int] = {}
        for row in read_metrics(path) if path.exists() else []:
            self._last[kind_of(row)] = int(row["step"])
        try:
            self._file = plain_descriptor(path, APPEND)
        except OSError as error:
            raise self._refused(error) from error
        self._size = os.fstat(self._file).st_size

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one line; on return it has left this process."""
        kind = kind_of(metrics)
        self._check_step(step, kind)
        row = {"step": step} | {name: _checked(step, name, value) for name, value in metrics.items()}
        self._append(json.dumps(row, allow_nan=False).encode("ascii") + b"\n")
        self._last[kind] = step

    def close(self) -> None:
        """Make the file durable and let go of it; a second call does nothing."""
        if self._file >= 0:
            os.fsync(self._file)
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_step(self, step: object, kind: str) -> None:
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise StateError(f"step is {step!r}", "steps count from 0", "log with the optimiser step")
        if kind in self._last and step <= self._last[kind]:
            raise StateError(
                f"step {step} ({kind}) comes after step {self._last[kind]} in {self.path.name}",
                "a step that is there twice would be judged twice",
                "log each step once, in order",
            )

    def _append(self, line: bytes) -> None:
        try:
            written = os.write(self._file, line)
            if written < len(line):  # the disk took a part: take it back, no reader shall see half a line
                os.ftruncate(self._file, self._size)
                raise OSError(28, "No space left on device")
        except OSError as error:
            raise self._refused(error) from error
        self._size += len(line)

    def _refused(self, error: OSError) -> StorageError:
        return StorageError(
            f"{self.path} could not be written: {error.strerror}",
            "a run without its numbers cannot be judged",
            "free some space or check the rights of the folder",
        )


def _checked(step: int, name: str, value: object) -> float:
    if name == "step" or lookup(name) is None:
        raise StateError(
            f"step {step}: metric {name!r} is not registered",
            "a number under a name that nobody declared is a number that nobody checks",
            "add it to tracking/metrics.py with unit, reduction and meaning",
        )
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise NumericsError(
            f"step {step}: {name} = {value!r} is not a finite number",
            "a placeholder would be read as a measurement",
            "leave the name out when it is undefined; convert arrays with float()",
        )
    return value


def metrics_until(path: Path, *, train: int, evaluation: int) -> tuple[bytes | None, int]:
    """The lines of a `metrics.jsonl` up to a step, as they are, and how many bytes of a torn last line were left out.

    For a resume: what comes later is written once more. None when there is no file.

    Args:
        train: the last step whose training line is kept.
        evaluation: the last step whose evaluation is kept; -1 when none is.
    """
    if not path.exists() and not path.is_symlink():
        return None, 0
    last = {"train": train, "eval": evaluation}
    kept: list[bytes] = []
    for number, line in enumerate(lines_of(path, "a resume keeps the numbers so far"), 1):
        if not line.endswith(b"\n"):
            return b"".join(kept), len(line)
        row = parse_row(path, number, line)
        kept += [line] if row["step"] <= last[kind_of(row)] else []
    return b"".join(kept), 0

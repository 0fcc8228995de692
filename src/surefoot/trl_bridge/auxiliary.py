"""The two optional loss channels of the guarded trainer: what they compute, and whether they are alive.

Owns       the self-distillation forward passes, and the watch over a channel that contributes nothing.
Promises   student and teacher score the same completion tokens by their index; the teacher gets no gradient; rows
           without a hint are selected away; a cut of the step into microbatches does not change the gradient.
Never      decides which rank runs a forward pass by local data: all ranks run it, or none.

Read next: `maths/distillation.py`, the loss.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from surefoot.errors import InputError, NumericsError, ShapeError
from surefoot.maths.distillation import distillation_loss, refuse_misaligned
from surefoot.maths.logprobs import compute_logprobs
from surefoot.maths.losses import LossTerms
from surefoot.maths.preference import PreferencePair, completion_logp, preference_loss, sift_pairs
from surefoot.trl_bridge import guard
from surefoot.trl_bridge.errors import ChannelDeadError, refused
from surefoot.trl_bridge.evaluation import eval_mode, undisturbed

DEAD_STEPS = 10
"""Optimiser steps in a row without any contribution after which an enabled channel is an error."""
NOTHING = 1e-9
"""A mean loss at or below this is rounding."""


def checked_weight(name: str, value: Any) -> float:
    """A finite weight of at least 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise refused(
            f"{name} is {value!r}, not a finite number of at least 0",
            "a negative weight would teach the opposite of what the channel is for",
            f"leave {name} out, or use for example {name}=0.1",
        )
    return float(value)


def require_finite(name: str, loss: Tensor, step: int) -> float:
    """The component's mean over all ranks; not finite on one of them is an error on all of them."""
    mean = guard.summed([float(loss.detach())])[0] / guard.world_size()
    if not math.isfinite(mean):
        raise NumericsError(
            f"step {step}: the {name} loss is {mean}",
            "added to the policy loss it would destroy every weight",
            f"look at the {name} rows of this step; set its weight to 0 to train without it",
        )
    return mean


@dataclass
class IdleChannelCounter:
    """Counts the steps in which a channel gave nothing.

    Example:
        >>> watch = Watch("sdpo", limit=2)
        >>> watch.note(0, alive=False); watch.note(1, alive=True); watch.note(2, alive=False)
        >>> watch.dead_steps
        1
    """

    name: str
    limit: int = DEAD_STEPS
    dead_steps: int = 0
    step: int | None = None
    alive: bool = False

    def note(self, step: int, *, alive: bool) -> None:
        """Take in one microbatch; a step is alive when one of its microbatches is."""
        if step != self.step:
            self.step, self.alive = step, False
            self.dead_steps += 1
        if alive:
            self.alive, self.dead_steps = True, 0
        if self.dead_steps > self.limit:
            raise ChannelDeadError(
                f"step {step}: the {self.name} channel has contributed nothing for {self.limit} steps",
                "a term that is switched on and always 0 looks like a result and is none",
                f"check the source of the {self.name} channel; set its weight to 0 to train without it",
            )


@dataclass(frozen=True)
class Distillation:
    """How student and teacher are compared."""

    mixing: float = 1.0
    top_k: int | None = None
    temperature: float = 1.0


def distil(model: Any, inputs: Mapping[str, Any], how: Distillation) -> tuple[Tensor, dict[str, Tensor]]:
    """Sum of the divergences over the live tokens of these rows, and the additive statistics.

    Args:
        inputs: TRL's batch with `teacher_prompt_ids`, `teacher_prompt_mask` (B, P') and `teacher_live` (B,).
    """
    completion, seen = inputs["completion_ids"], inputs["completion_mask"]
    trained = seen * inputs["tool_mask"] if "tool_mask" in inputs else seen
    _require_rows(completion, inputs["teacher_prompt_ids"], inputs["teacher_live"])
    student_ids = torch.cat([inputs["prompt_ids"], completion], dim=1)
    teacher_ids = torch.cat([inputs["teacher_prompt_ids"], completion], dim=1)
    width = completion.shape[1]
    refuse_misaligned(student_ids[:, -width:], teacher_ids[:, -width:], trained.bool())
    with torch.no_grad(), eval_mode(model):
        teacher = completion_scores(model, teacher_ids, torch.cat([inputs["teacher_prompt_mask"], seen], 1), width)
    student = completion_scores(model, student_ids, torch.cat([inputs["prompt_mask"], seen], dim=1), width)
    terms = distillation_loss(
        student, teacher, trained.bool(), tokens_in_step=1, mixing=how.mixing, top_k=how.top_k,
        has_feedback=inputs["teacher_live"].bool(), temperature=how.temperature,
    )  # fmt: skip
    return terms.loss, terms.sums


def completion_scores(model: Any, ids: Tensor, mask: Tensor, width: int) -> Tensor:
    """(B, T, V) the logits that predict each of the last `width` tokens."""
    kept: Tensor = model(input_ids=ids, attention_mask=mask, logits_to_keep=width + 1, use_cache=False).logits
    return kept[:, -(width + 1) : -1]  # the logits at place t predict the token at t + 1


def _require_rows(completion: Tensor, teacher: Tensor, live: Tensor) -> None:
    if not completion.shape[0] == teacher.shape[0] == live.shape[0]:
        raise ShapeError(
            f"{completion.shape[0]} completions, {teacher.shape[0]} teacher prompts, {live.shape[0]} marks",
            "row i of one has to be row i of the other",
            "hand in one teacher prompt per completion, dead ones included",
        )


# -- Hints for the self-distillation channel: what the teacher is told and the student is not -----
# Owns       the text of a hint, where it goes in a prompt, and the hinted prompts as padded tokens.
# Promises   one hint or None per rollout, in their order; None and empty text mean that there is no teacher for that
# row.
# Never      touches a completion: student and teacher score the very same tokens.


@dataclass(frozen=True)
class HintRow:
    """One rollout, as a hint function sees it.

    Example:
        >>> HintRow({"prompt": "2 + 2 =", "answer": "4"}, completion=" 5", advantage=-0.7).example["answer"]
        '4'
    """

    example: Mapping[str, Any]
    """The line of the dataset, every column."""
    completion: str
    advantage: float


HintFn = Callable[[Sequence[HintRow]], Sequence[str | None]]


def hint_function(source: Any, columns: Sequence[str] | None = None) -> HintFn:
    """A function from what the user gave: the name of one of `columns` (where they are known), or a function."""
    if isinstance(source, str) and columns is not None and source not in columns:
        raise refused(
            f"sdpo_hints is {source!r}, and the training data has no such column",
            "no row would ever have a teacher",
            f"use one of {', '.join(columns)}",
        )
    if isinstance(source, str) and source:
        return lambda rows: [row.example.get(source) for row in rows]
    if callable(source):
        return source  # type: ignore[no-any-return]
    raise refused(
        f"alpha_sdpo is above 0 and sdpo_hints is {source!r}",
        "the teacher is the model itself with a hint in its context; without a source of hints the term would be 0",
        "pass the name of a dataset column, a function of the rows, or surefoot.trl_bridge.sibling_hints",
    )


def sibling_hints(rows: Sequence[HintRow]) -> list[str | None]:
    """Show each rollout that did no better than its group the best attempt of that group, where that was better.

    Siblings are looked for among the rollouts of this process.

    Example:
        >>> rows = [HintRow({"prompt": "2 + 2 ="}, " 5", -1.0), HintRow({"prompt": "2 + 2 ="}, " 4", 1.0)]
        >>> sibling_hints(rows)
        ['A correct attempt: 4', None]
    """
    best: dict[str, HintRow] = {}
    for row in rows:
        key = _prompt_key(row)
        if row.advantage > 0 and (key not in best or row.advantage > best[key].advantage):
            best[key] = row
    return [
        f"A correct attempt: {best[_prompt_key(row)].completion.strip()}"
        if row.advantage <= 0 and _prompt_key(row) in best
        else None
        for row in rows
    ]


def _prompt_key(row: HintRow) -> str:
    return json.dumps(row.example.get("prompt"), sort_keys=True, default=str)


def ask(hints: HintFn, rows: Sequence[HintRow]) -> list[str | None]:
    """One hint per row, checked; empty text becomes None."""
    given: list[Any] = list(hints(rows))
    wrong = next((hint for hint in given if hint is not None and not isinstance(hint, str)), None)
    if len(given) != len(rows) or wrong is not None:
        what = f"gave {len(given)} hints for {len(rows)} rollouts" if wrong is None else f"gave {wrong!r} as a hint"
        raise InputError(
            f"sdpo_hints {what}",
            "a hint that stands in another row teaches the answer to another question",
            "return one text or None per row, in the order of the rows",
        )
    return [hint if hint and hint.strip() else None for hint in given]


def hinted(prompt: Any, hint: str | None) -> Any:
    """The prompt with the hint after it; in a conversation, at the end of the last message.

    Example:
        >>> hinted("2 + 2 =", "Count the fingers."), hinted([{"role": "user", "content": "2 + 2?"}], "Four.")
        ('2 + 2 =\\n\\nCount the fingers.', [{'role': 'user', 'content': '2 + 2?\\n\\nFour.'}])
    """
    if hint is None:
        return prompt
    if isinstance(prompt, str):
        return f"{prompt}\n\n{hint}"
    last = dict(prompt[-1])
    if not isinstance(last.get("content"), str):
        raise InputError(
            "a prompt ends in a message that is not plain text",
            "the hint is added to that text",
            "train with alpha_sdpo=0, or with text prompts",
        )
    return [*prompt[:-1], last | {"content": f"{last['content']}\n\n{hint}"}]


def padded_left(rows: Sequence[Sequence[int]], pad: int, device: Any = None) -> tuple[Tensor, Tensor]:
    """(B, P) token ids and (B, P) mask of rows of unequal length, so that all of them end in the last column."""
    width = max((len(row) for row in rows), default=0)
    ids = [[pad] * (width - len(row)) + list(row) for row in rows]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    return torch.tensor(ids, dtype=torch.long, device=device), torch.tensor(mask, dtype=torch.long, device=device)


# -- The trace-replay channel: preferences between recorded answers, replayed beside the training -
# Owns       which pairs come next, and their log-probabilities under the model.
# Promises   pairs that cannot teach are dropped under a reason before training begins; ranks replay different pairs; a
# resumed run goes on with the pairs that would have come.
# Never      makes a reference up: a pair without one is dropped.


class ReplayPairs:
    """A stock of pairs, dealt out in turn.

    Args:
        pairs: with references; see `score_pairs`.
        per_batch: pairs per microbatch and process.
        beta: how far the policy may move from the reference; small is far.
        max_tokens: longest prompt with answer.
    """

    def __init__(
        self, pairs: Iterable[PreferencePair] | None, *, per_batch: int = 2, beta: float = 0.1, max_tokens: int = 4096
    ) -> None:
        if pairs is None:
            raise refused("beta_replay is above 0 and replay_pairs is None", "the channel has nothing to replay")
        if per_batch < 1 or not 0 < beta < float("inf"):
            raise refused(f"replay_per_batch = {per_batch}, replay_beta = {beta}", "both have to be above 0")
        self.pairs, self.dropped = sift_pairs(pairs, max_tokens=max_tokens)
        if not self.pairs:
            raise refused(
                f"no pair is left to replay (dropped: {self.dropped or 'none were given'})",
                "beta_replay is above 0, and the term would be 0 at every step",
                "give each pair a source, two different answers and references; score_pairs adds the last",
            )
        self.per_batch, self.beta = per_batch, beta

    def deal(self, turn: int) -> list[PreferencePair]:
        """The pairs of one microbatch; `turn` counts microbatches over the whole run and all processes."""
        first = turn * self.per_batch
        return [self.pairs[(first + i) % len(self.pairs)] for i in range(self.per_batch)]

    def loss(self, model: Any, pairs: Sequence[PreferencePair], device: Any = None) -> LossTerms:
        """Mean preference loss of these pairs."""
        chosen, rejected = pair_logps(model, pairs, device).unbind(1)
        told = [(pair.ref_chosen_logp, pair.ref_rejected_logp) for pair in pairs]
        reference = torch.tensor(told, dtype=chosen.dtype, device=chosen.device)
        return preference_loss(
            chosen, rejected, reference[:, 0], reference[:, 1], beta=self.beta, pairs_in_step=len(pairs)
        )


def pair_logps(model: Any, pairs: Sequence[PreferencePair], device: Any = None) -> Tensor:
    """(P, 2) log-probability of each chosen and each rejected answer, at temperature 1."""
    answers = [side for pair in pairs for side in (pair.chosen_ids, pair.rejected_ids)]
    width = max(len(answer) for answer in answers)
    prompt, prompt_mask = padded_left([pair.prompt_ids for pair in pairs for _ in range(2)], 0, device)
    completion = torch.tensor([[*answer, *[0] * (width - len(answer))] for answer in answers], device=device)
    said = torch.tensor([[i < len(answer) for i in range(width)] for answer in answers], device=device)
    ids, mask = torch.cat([prompt, completion], dim=1), torch.cat([prompt_mask, said.long()], dim=1)
    logits = completion_scores(model, ids, mask, width)
    logp = compute_logprobs(logits, completion, align=False)
    return completion_logp(logp, said).reshape(len(pairs), 2)


def score_pairs(model: Any, pairs: Iterable[PreferencePair], *, batch: int = 8) -> list[PreferencePair]:
    """The pairs with references from `model` as it is now: call it before training."""
    everything, scored = list(pairs), []
    device = next(model.parameters()).device
    with undisturbed(model):
        for start in range(0, len(everything), batch):
            part = everything[start : start + batch]
            for pair, (chosen, rejected) in zip(part, pair_logps(model, part, device).tolist(), strict=True):
                scored.append(dataclasses.replace(pair, ref_chosen_logp=chosen, ref_rejected_logp=rejected))
    return scored


# -- Wires the two loss channels into a TRL trainer: hinted prompts at generation time, losses at training time
# Owns       the channels' settings and sources, their watches, and which denominator each loss gets.
# Promises   a channel that is switched on has a source, or nothing is constructed; it is watched at every step.
# Never      runs a forward pass for a channel whose weight is 0: it does not exist then.


PICTURES = ("pixel_values", "images", "num_images")


class SdpoChannel:
    """Self-distillation: the model with a hint in its context teaches the model without."""

    def __init__(self, hints: HintFn, *, mixing: float = 1.0, top_k: int | None = None, dead_steps: int) -> None:
        if not 0 <= mixing <= 1 or (top_k is not None and top_k < 1):
            raise refused(f"sdpo_mixing = {mixing}, sdpo_top_k = {top_k}", "0 to 1, and at least 1 or None")
        self.hints, self.mixing, self.top_k = hints, mixing, top_k
        self.watch = IdleChannelCounter("sdpo", dead_steps)

    def add_teachers(self, trainer: Any, examples: Sequence[dict[str, Any]], batch: dict[str, Any]) -> dict[str, Any]:
        """TRL's batch of rollouts with a hinted prompt for each row that has a hint."""
        if any(name in batch for name in PICTURES):
            raise InputError("the batch holds pictures", "hints are text, in text prompts", "train with alpha_sdpo=0")
        rows = _rows(trainer, examples, batch)
        given = ask(self.hints, rows)
        prompts = [hinted(row.example["prompt"], hint) for row, hint in zip(rows, given, strict=True)]
        ids, _, _ = trainer._tokenize_prompts(prompts)
        device = batch["prompt_ids"].device
        teacher, mask = padded_left(ids, trainer._tokenizer.pad_token_id, device)
        live = torch.tensor([hint is not None for hint in given], device=device)
        trained = batch["completion_mask"] * batch["tool_mask"] if "tool_mask" in batch else batch["completion_mask"]
        (tokens,) = guard.summed([float(trained[live].sum())])
        found = {"teacher_prompt_ids": teacher, "teacher_prompt_mask": mask, "teacher_live": live}
        return batch | found | {"sdpo_tokens": torch.tensor(tokens, device=device)}

    def loss(self, trainer: Any, model: Any, inputs: dict[str, Any]) -> tuple[Tensor, float]:
        """These rows' share in the step's loss, and the share of them with a live teacher."""
        step = trainer.state.global_step
        if "sdpo_tokens" not in inputs or float(inputs["sdpo_tokens"]) == 0.0:  # the same on every rank
            self.watch.note(step, alive=False)
            return inputs["completion_ids"].new_zeros((), dtype=torch.float32), 0.0
        how = Distillation(self.mixing, self.top_k, float(getattr(trainer, "temperature", 1.0)))
        total, sums = distil(model, inputs, how)
        tokens, live, rows, divergence = guard.summed(
            [float(sums[f"distill_{name}"]) for name in ("tokens", "rows_live", "rows", "divergence")]
        )
        self.watch.note(step, alive=tokens > 0 and divergence / tokens > NOTHING)
        return total / _window(trainer, float(inputs["sdpo_tokens"])), live / max(rows, 1.0)


def _window(trainer: Any, tokens: float) -> float:
    """The step's live tokens per process: `tokens` spans a generation batch, which may feed more or fewer steps."""
    share = trainer.current_gradient_accumulation_steps / trainer.args.steps_per_generation
    return float(tokens / guard.world_size() * share)


def _rows(trainer: Any, examples: Sequence[dict[str, Any]], batch: dict[str, Any]) -> list[HintRow]:
    kept = [ids[mask.bool()] for ids, mask in zip(batch["completion_ids"], batch["completion_mask"], strict=True)]
    texts = trainer._tokenizer.batch_decode(kept, skip_special_tokens=True)
    advantages = batch["advantages"]
    advantages = advantages if advantages.dim() == 1 else advantages[:, 0]
    return [
        HintRow(example, text, advantage)
        for example, text, advantage in zip(examples, texts, advantages.tolist(), strict=True)
    ]


class ReplayChannel:
    """Deals pairs to microbatches and ranks, and watches the loss."""

    def __init__(self, stock: ReplayPairs, *, dead_steps: int) -> None:
        self.stock = stock
        self.watch = IdleChannelCounter("replay", dead_steps)
        self._step, self._part = -1, 0

    def loss(self, trainer: Any, model: Any, inputs: dict[str, Any]) -> tuple[Tensor, float]:
        """This microbatch's share in the step's loss, and the share of its pairs that the policy already gets right."""
        step, parts = trainer.state.global_step, trainer.current_gradient_accumulation_steps
        self._part = self._part + 1 if step == self._step else 0
        self._step = step
        turn = (step * parts + self._part) * guard.world_size() + guard.rank()
        terms = self.stock.loss(model, self.stock.deal(turn), inputs["completion_ids"].device)
        pairs, wins, total = guard.summed(
            [float(terms.sums[f"preference_{name}"]) for name in ("pairs", "wins", "total")]
        )
        self.watch.note(step, alive=pairs > 0 and total / pairs > 0.0)
        return terms.loss / parts, wins / max(pairs, 1.0)

"""Two losses beside the policy's: learn from a sibling that did better, and from recorded preferences.

Owns       who teaches whom, which recorded pairs come next, the gradient of both channels, and the watch over one that
           is switched on and does nothing.
Promises   student and teacher score the same completion tokens, by their index; the teacher gets no gradient; a sample
           without a better sibling is left out, never filled with zeros; no cut changes the gradient, between ranks
           neither: rank 0 says who teaches whom, each rank takes its share, and a loss is refused by all or by none.
Never      exists for a weight of 0: no forward pass, no random number, not one bit of difference.

    group --teachers--> sample, hinted prompt --> hidden states, twice --distillation_loss--> * alpha_sdpo
    stock --deal------> pairs                 --> log-probabilities    --preference_loss----> * beta_replay

Read next: `maths/distillation.py` and `maths/preference.py`, the formulas; `grpo.py`, who adds these to its own.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from surefoot.errors import ConfigError, InvariantError, NumericsError, TaskError
from surefoot.guards import invariants
from surefoot.learner.forward import completion_hidden, inside, score_batch
from surefoot.learner.samples import by_group, split_microbatches
from surefoot.learner.sharding import OneRank
from surefoot.maths import stats
from surefoot.maths.distillation import distillation_loss, refuse_misaligned
from surefoot.maths.logprobs import score_tokens_chunked
from surefoot.maths.losses import LossTerms
from surefoot.maths.packing import Batch, make_batch
from surefoot.maths.preference import PreferencePair, completion_logp, preference_loss, sift_pairs
from surefoot.protocols import Codec
from surefoot.records import LENGTH, Message, TrainSample
from surefoot.system.signals import tick

PAIRS_PER_STEP = 4
REPLAY_BETA = 0.1
"""How far the preferences may pull the policy from where it started; small is far."""
CHUNK_TOKENS = 256
"""Tokens whose two distributions over the vocabulary are alive at one time."""
NOTHING = 1e-9
"""A mean divergence at or below this is rounding: the teacher says what the student says."""
WORKED_EXAMPLE = "{question}\n\nA correct attempt:\n{attempt}\n\nNow solve it yourself."
"""What the teacher reads where the student reads the question alone."""

HintedPrompt = Callable[[TrainSample], tuple[int, ...] | None]
"""An attempt -> the prompt of a teacher that has seen it, as token ids; None when the attempt shows nothing."""


@dataclass(frozen=True)
class AuxiliaryLossSettings:
    """The channels' numbers; see the config keys of the same names."""

    alpha_sdpo: float = 0.0
    beta_replay: float = 0.0
    sdpo_mixing: float = 1.0
    dead_channel_steps: int = 20
    temperature: float = 1.0
    pad_token_id: int = 0
    max_tokens: int = 4096
    """The model's context: the longest prompt with completion."""
    microbatch_size: int = 0
    mask_truncated: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for key in ("alpha_sdpo", "beta_replay"):
            value = getattr(self, key)
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(
                    f"{key} = {value}", "a negative weight teaches the opposite", f"leave {key} out, or use 0 or more"
                )
        if not 0 <= self.sdpo_mixing <= 1 or self.dead_channel_steps < 1:
            raise ConfigError(
                f"sdpo_mixing = {self.sdpo_mixing}, dead_channel_steps = {self.dead_channel_steps}",
                "such a channel is not the one that was asked for",
                "mixing lies between 0 and 1, and steps count from 1",
            )


ALONE = OneRank()


class AuxiliaryLosses:
    """The channels that are on, each under its watch."""

    def __init__(self, members: Sequence[SelfDistillation | ReplayLoss], dead_steps: int) -> None:
        self.members = list(members)
        self._limit = dead_steps
        self._dead = dict.fromkeys((member.key for member in members), 0)

    @property
    def facts(self) -> dict[str, float]:
        """Metrics that hold for the whole run."""
        return {name: value for member in self.members for name, value in member.facts.items()}

    def backward(
        self, net: Any, samples: Sequence[TrainSample], version: int, splits: int = 0, ranks: OneRank = ALONE
    ) -> list[stats.Sums]:
        """Add every channel's gradient to the parameters'; its statistics, where `loss` is its weighed share.

        Args:
            splits: microbatches are halved this many times, because memory ran out.
            ranks: who else has a part of `net`; gradients are this rank's share, statistics those of all.
        """
        parts = []
        for member in self.members:
            sums = member.backward(net, samples, version, splits, ranks)
            self._watch(member, member.alive(sums), version)
            parts.append(sums)
        return parts

    def _watch(self, member: SelfDistillation | ReplayLoss, alive: bool, version: int) -> None:
        self._dead[member.key] = dead = 0 if alive else self._dead[member.key] + 1
        if dead >= self._limit:
            raise InvariantError(
                f"{member.key} = {member.weight}, and at version {version} the channel has given nothing for {dead} "
                f"steps in a row: {member.nothing}",
                "a term that is switched on and always absent looks like a result and is none",
                f"{member.remedy}; set {member.key} = 0 to train without it, or raise dead_channel_steps",
            )


def make_auxiliary_losses(
    settings: AuxiliaryLossSettings, *, net: Any, hinted: HintedPrompt | None = None,
    pairs: Iterable[PreferencePair] | None = None,
) -> AuxiliaryLosses | None:  # fmt: skip
    """What the weights ask for; None when both are 0.

    Args:
        net: with the initial weights: the reference of the recorded pairs is scored with it, now.
    """
    members: list[SelfDistillation | ReplayLoss] = []
    sources = {"alpha_sdpo": ("hinted prompts", hinted), "beta_replay": ("replay_pairs", pairs)}
    for key, (source, given) in sources.items():
        if getattr(settings, key) > 0 and given is None:
            raise ConfigError(
                f"{key} = {getattr(settings, key)} without {source}", "the term would be absent at every step",
                f"give {source}, or set {key} = 0",
            )  # fmt: skip
    if settings.alpha_sdpo > 0 and hinted is not None:
        members.append(SelfDistillation(settings, hinted))
    if settings.beta_replay > 0 and pairs is not None:
        members.append(ReplayLoss(settings, net, pairs))
    return AuxiliaryLosses(members, settings.dead_channel_steps) if members else None


# -- a sibling that did better ----------------------------------------------------------------


class Teachers(NamedTuple):
    """The teacher's prompt for each sample that has one, and how many did not fit into the context."""

    prompts: dict[tuple[str, int], tuple[int, ...]]
    too_long: int


class SelfDistillation:
    """The policy that was shown a better sibling's attempt teaches the policy that was not."""

    key = "alpha_sdpo"
    nothing = "no sample had a sibling above its group's mean that did better or as well, or none that fits"
    remedy = "use tasks that are solved now and then, or more generations per task"
    facts: Mapping[str, float] = {}

    def __init__(self, settings: AuxiliaryLossSettings, hinted: HintedPrompt) -> None:
        self.settings, self.hinted, self.weight = settings, hinted, settings.alpha_sdpo

    def backward(
        self, net: Any, samples: Sequence[TrainSample], version: int, splits: int = 0, ranks: OneRank = ALONE
    ) -> stats.Sums:
        """Gradients of the step's live samples; sums that say how many of all samples those are."""
        settings = self.settings
        trained = [
            s for s in samples if s.trained_tokens and not (settings.mask_truncated and s.finish_reason == LENGTH)
        ]
        teachers = self._told(trained, ranks)
        live = [s for s in trained if (s.group, s.index) in teachers.prompts]
        tokens = sum(s.trained_tokens for s in live)
        counts = {
            "distill_rows": len(trained),
            "distill_rows_live": len(live),
            "distill_too_long": teachers.too_long,
        }
        parts: list[stats.Sums] = []
        for piece, counted in ranks.pieces(
            live, lambda rows: split_microbatches(rows, settings.microbatch_size, splits)
        ):
            terms = self._distil(net, piece, teachers, tokens)
            parts.append(_learn(self.key, self.weight, terms, piece, version, ranks, counted))
        all_rows = {name: torch.tensor(count) for name, count in counts.items()}
        return stats.merge([all_rows, ranks.merged(stats.merge(parts))])

    def alive(self, sums: stats.Sums) -> bool:
        """Whether a teacher said anything that its student does not say already."""
        return "distill_divergence" in sums and float(sums["distill_divergence"] / sums["distill_tokens"]) > NOTHING

    def _told(self, samples: Sequence[TrainSample], ranks: OneRank) -> Teachers:
        """What rank 0 finds, which has the tasks as they were asked; on every rank."""
        own = self.teachers(samples) if ranks.index == 0 else Teachers({}, 0)
        prompts, too_long = ranks.exchange([[[*key, prompt] for key, prompt in own.prompts.items()], own.too_long])[0]
        return Teachers({(group, index): tuple(prompt) for group, index, prompt in prompts}, too_long)

    def teachers(self, samples: Sequence[TrainSample]) -> Teachers:
        """Each sample's best sibling, above the group's mean and no worse than itself, as a hinted prompt."""
        prompts: dict[tuple[str, int], tuple[int, ...]] = {}
        too_long = 0
        for group in by_group(samples):
            ranked = sorted((s for s in group if s.advantage > 0), key=lambda s: (-s.reward, s.index))
            shown = {best.index: self.hinted(best) for best in ranked[:2]}  # only the best itself may need the second
            for sample in group:
                best = next((s for s in ranked if s is not sample and s.reward >= sample.reward), None)
                prompt = None if best is None else shown[best.index]
                if prompt is not None and len(prompt) + len(sample.completion_ids) <= self.settings.max_tokens:
                    prompts[sample.group, sample.index] = prompt
                else:
                    too_long += prompt is not None
        return Teachers(prompts, too_long)

    def _distil(self, net: Any, piece: Sequence[TrainSample], teachers: Teachers, tokens: int) -> LossTerms:
        pad = self.settings.pad_token_id
        plain = _pack(net, piece, pad)
        hinted = _pack(net, [replace(s, prompt_ids=teachers.prompts[s.group, s.index]) for s in piece], pad)
        refuse_misaligned(plain.completion_ids, hinted.completion_ids, plain.mask)
        good = torch.tensor([s.advantage > 0 for s in piece], device=plain.mask.device)
        return inside(net, self._compare, plain, hinted, good, tokens)

    def _compare(self, net: Any, plain: Batch, hinted: Batch, good: Tensor, tokens: int) -> LossTerms:
        """Student and teacher on the same completion tokens, with all weights there."""
        settings = self.settings
        teacher = _teacher_states(net, hinted)[plain.mask]
        student = completion_hidden(net, plain)[plain.mask]  # (N, H): padding never reaches the head
        parts = [
            checkpoint(_share, net, s, t, tokens, settings, use_reentrant=False, preserve_rng_state=False)
            for s, t in zip(student.split(CHUNK_TOKENS), teacher.split(CHUNK_TOKENS), strict=True)
        ]
        kept = ("distill_loss", "distill_divergence", "distill_tokens")  # rows are counted by the step, not by chunks
        sums = stats.merge([{name: part.sums[name] for name in kept} for part in parts])
        where = (plain.mask & good[:, None])[plain.mask]
        sums |= _gain(net, student[where], teacher[where], plain.completion_ids[plain.mask][where], settings)
        return LossTerms(torch.stack([part.loss for part in parts]).sum(), sums)


def _teacher_states(net: Any, hinted: Batch) -> Tensor:
    with torch.no_grad():
        return completion_hidden(net, hinted)


@torch.no_grad()
def _gain(
    net: Any, student: Tensor, teacher: Tensor, ids: Tensor, settings: AuxiliaryLossSettings
) -> dict[str, Tensor]:
    """By how much the teacher finds what was said in good attempts likelier: below 0 it knows less than its student."""
    head = net.get_output_embeddings()
    told, own = (
        score_tokens_chunked(states, head.weight, ids, bias=head.bias, temperature=settings.temperature).logprobs
        for states in (teacher, student)
    )
    return {"distill_gain": (told - own).sum(), "distill_gain_tokens": torch.tensor(len(ids))}


def _share(net: Any, student: Tensor, teacher: Tensor, tokens: int, settings: AuxiliaryLossSettings) -> LossTerms:
    """The loss of a few tokens, from the states (n, H) that predict them on either side."""
    head = net.get_output_embeddings()
    with torch.no_grad():
        told = head(teacher)
    every = torch.ones(1, len(student), dtype=torch.bool, device=student.device)
    return distillation_loss(
        head(student)[None], told[None], every, tokens_in_step=tokens, mixing=settings.sdpo_mixing,
        temperature=settings.temperature,
    )  # fmt: skip


class WorkedExamples:
    """Hinted prompts: the task as it was asked, with a sibling's attempt in the last thing the user says."""

    def __init__(self, codec: Codec, messages: Mapping[str, Sequence[Message]]) -> None:
        self.codec, self.messages = codec, messages

    def __call__(self, attempt: TrainSample) -> tuple[int, ...] | None:
        """Token ids; None when the attempt has no text that can be shown."""
        text = self.codec.decode(attempt.completion_ids).strip()
        if not text:
            return None
        asked = list(self.messages[attempt.item_id])
        last = max((i for i, m in enumerate(asked) if m.get("role") == "user"), default=len(asked) - 1)
        question = asked[last].get("content")
        if not isinstance(question, str):
            raise TaskError(
                f"task {attempt.item_id} ends in a message without text",
                "alpha_sdpo shows an attempt behind the question",
                "ask in text, or set alpha_sdpo = 0",
            )
        asked[last] = {**asked[last], "content": WORKED_EXAMPLE.format(question=question, attempt=text)}
        try:
            return self.codec.encode_prompt(asked)
        except TaskError:
            return None  # the question passed at the start: it is the attempt that spells one of the model's tokens


# -- recorded preferences ---------------------------------------------------------------------


class ReplayLoss:
    """A stock of pairs with their references, a few of them at every step."""

    key = "beta_replay"
    nothing = "no pair has a loss above 0"
    remedy = "the pairs are learnt, or their references are not of this model: use other replay_pairs"

    def __init__(self, settings: AuxiliaryLossSettings, net: Any, pairs: Iterable[PreferencePair]) -> None:
        self.settings, self.weight = settings, settings.beta_replay
        self.pairs, self.dropped = sift_pairs(self._scored(net, list(pairs)), max_tokens=settings.max_tokens)
        if not self.pairs:
            raise ConfigError(
                f"no pair of replay_pairs is left to replay (dropped: {self.dropped or 'none were given'})",
                f"beta_replay = {self.weight}, and the term would be absent at every step",
                "give pairs with two different answers that fit the model's context, or set beta_replay = 0",
            )
        self.facts = {f"replay/dropped/{reason}": float(count) for reason, count in self.dropped.items()}

    def deal(self, version: int) -> list[PreferencePair]:
        """The pairs of one step: a function of seed and version alone, so that a repeated run draws the same."""
        stream = random.Random(f"{self.settings.seed}/replay/{version}")
        return stream.sample(self.pairs, min(PAIRS_PER_STEP, len(self.pairs)))

    def backward(
        self, net: Any, samples: Sequence[TrainSample], version: int, splits: int = 0, ranks: OneRank = ALONE
    ) -> stats.Sums:
        """Gradients of this step's pairs; what was sampled in the step plays no part."""
        pairs = self.deal(version)
        parts: list[stats.Sums] = []
        cut = partial(split_microbatches, size=0, splits=splits, together=2)  # a pair is never split
        for piece, counted in ranks.pieces(_as_rows(pairs), cut, together=2):
            told = [pairs[int(row.group)] for row in piece[::2]]
            chosen, rejected = self._logps(net, piece).unbind(1)
            references = [(pair.ref_chosen_logp, pair.ref_rejected_logp) for pair in told]
            reference = torch.tensor(references, dtype=chosen.dtype, device=chosen.device)
            terms = preference_loss(chosen, rejected, *reference.unbind(1), beta=REPLAY_BETA, pairs_in_step=len(pairs))
            parts.append(_learn(self.key, self.weight, terms, piece, version, ranks, counted))
        return ranks.merged(stats.merge(parts))

    def alive(self, sums: stats.Sums) -> bool:
        """Whether some pair still has something to teach."""
        return float(sums["preference_total"]) > 0

    def _logps(self, net: Any, rows: Sequence[TrainSample]) -> Tensor:
        """(P, 2) log-probability of each chosen and each rejected answer, at temperature 1."""
        batch = _pack(net, rows, self.settings.pad_token_id)
        logp = score_batch(net, batch, temperature=1.0, with_entropy=False).logprobs
        return completion_logp(logp, batch.mask).view(-1, 2)

    def _scored(self, net: Any, pairs: list[PreferencePair]) -> list[PreferencePair]:
        """The pairs with references from `net` as it is now; one that cannot be scored has none and is sifted out."""
        fits = [i for i, p in enumerate(pairs) if p.prompt_ids and p.chosen_ids and p.rejected_ids]
        fits = [i for i in fits if pairs[i].longest <= self.settings.max_tokens]
        logps: list[list[float]] = []
        with torch.no_grad():
            for piece in split_microbatches(_as_rows([pairs[i] for i in fits]), 0):
                logps += self._logps(net, piece).tolist()
        for i, (chosen, rejected) in zip(fits, logps, strict=True):
            pairs[i] = replace(pairs[i], ref_chosen_logp=chosen, ref_rejected_logp=rejected)
        return pairs


def _as_rows(pairs: Sequence[PreferencePair]) -> list[TrainSample]:
    """Two rows per pair, chosen first, in one group: they share their prompt's forward pass."""
    return [
        TrainSample(
            item_id=pair.source or "pair", trainer_version=0, group=str(place), prompt_ids=pair.prompt_ids,
            completion_ids=answer, sampled=(True,) * len(answer), logprobs=(0.0,) * len(answer), reward=0.0, index=side,
        )
        for place, pair in enumerate(pairs)
        for side, answer in enumerate((pair.chosen_ids, pair.rejected_ids))
    ]  # fmt: skip


# -- both -------------------------------------------------------------------------------------


def _pack(net: Any, rows: Sequence[TrainSample], pad_token_id: int) -> Batch:
    batch = make_batch(rows, pad_token_id=pad_token_id)[0]
    invariants.check_batch(batch, rows)  # prompt, then completion: an index means the same token on both sides
    return batch.to(next(net.parameters()).device)


def _learn(
    key: str, weight: float, terms: LossTerms, rows: Sequence[TrainSample], version: int, ranks: OneRank, counted: bool
) -> stats.Sums:
    """One piece's gradients; its sums, where `loss` is its weighed share. One that does not count has neither."""
    _require_finite(key, terms.loss, rows, version, ranks)
    loss = weight * terms.loss if counted else 0.0 * terms.loss
    loss.backward()
    tick("learning from the losses beside the policy's")
    if not counted:
        return {}
    return {name: value.detach().cpu() for name, value in terms.sums.items()} | {"loss": loss.detach()}


def _require_finite(key: str, loss: Tensor, rows: Sequence[TrainSample], version: int, ranks: OneRank) -> None:
    """Raise on every rank for what one of them has found: the others would wait for its gradients."""
    value = float(loss.detach())
    names = ", ".join(sorted({row.item_id for row in rows})[:3])
    told = ranks.exchange("" if math.isfinite(value) else f"{value} (on {names})")
    if found := [fault for fault in told if fault]:
        raise NumericsError(
            f"version {version}: the loss of {key} is {found[0]}",
            "added to the policy's it would destroy every weight; nothing of this step was applied",
            f"look at these rows; set {key} = 0 to train without them",
        )

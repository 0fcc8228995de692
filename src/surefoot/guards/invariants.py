"""What must always hold, checked on every group, sample and batch of every step.

Each function raises `InvariantError` (or `NumericsError`) naming ids and counts, and returns how
many things it looked at, so that "every invariant held" in a verdict is a number and not a mood.
The checks re-derive what they compare with: provenance is counted from the rollouts' own turns,
never read back from the mask under suspicion.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from surefoot.errors import InvariantError, NumericsError, StateError
from surefoot.records import STOP, Group, Rollout, TrainSample
from surefoot.system.files import sha256_of

if TYPE_CHECKING:
    from surefoot.maths.packing import Batch


SUM_TOLERANCE = 1e-6
"""How far from 0 the advantages of one group may add up, per sibling."""
LOGPROB_SLACK = 1e-6
"""How far above 0 rounding may lift the log-probability of a token that was certain."""


def check_groups(groups: Sequence[Group], *, vocab_size: int, stop_ids: frozenset[int]) -> int:
    """Every group: one prompt, siblings numbered once, tokens in range, log-probabilities that are ones."""
    ids = [group.id for group in groups]
    if len(set(ids)) != len(ids):
        raise _broken(
            f"group ids repeat: {sorted({i for i in ids if ids.count(i) > 1})[:3]}", "two visits would be one group"
        )
    for group in groups:
        played = [r for r in group.rollouts if r.turns]
        if len({r.turns[0].prompt_ids for r in played}) > 1:
            raise _broken(f"group {group.id} of {group.task.id} has siblings with different prompts", "not siblings")
        if len({r.index for r in group.rollouts}) != len(group.rollouts):
            raise _broken(f"group {group.id} of {group.task.id} numbers a sibling twice", "one would be counted double")
        if any(not 0 <= t < vocab_size for r in played[:1] for t in r.turns[0].prompt_ids):
            raise _broken(f"the prompt of {group.task.id} holds a token outside 0..{vocab_size - 1}", "no such row")
        for rollout in played:
            _check_rollout(rollout, vocab_size, stop_ids)
    return len(groups)


def are_logprobs(values: Sequence[float]) -> bool:
    """Whether every value can be a log-probability: finite, and at most 0 up to rounding."""
    return all(math.isfinite(p) and p <= LOGPROB_SLACK for p in values)


def _check_rollout(rollout: Rollout, vocab_size: int, stop_ids: frozenset[int]) -> None:
    for turn in rollout.turns:
        if any(not 0 <= t < vocab_size for t in turn.completion_ids):
            raise _broken(f"{rollout} holds a token outside 0..{vocab_size - 1}", "no such row in the model")
        if not are_logprobs(turn.logprobs):
            raise _broken(f"{rollout} holds a logprob that is not one", "a log-probability is finite and at most 0")
        if turn.finish_reason == STOP and turn.completion_ids[-1] not in stop_ids:
            raise _broken(
                f"{rollout} says stop but ends on {turn.completion_ids[-1]}", "the stop token must be trained"
            )
        if any(t in stop_ids for t in turn.completion_ids[:-1]):
            raise _broken(f"{rollout} goes on after its stop token", "the tail was padding or noise, not a choice")
    for before, after in itertools.pairwise(rollout.turns):
        history = before.prompt_ids + before.completion_ids
        if after.prompt_ids[: len(history)] != history:
            raise _broken(
                f"{rollout} rewrote its history between turns ({rollout.rerendered_tokens} tokens)",
                "trained tokens would not be those sampled",
            )
        if any(not 0 <= t < vocab_size for t in after.prompt_ids[len(history) :]):
            raise _broken(f"{rollout}: a tool's answer holds a token outside 0..{vocab_size - 1}", "no such row")


def check_samples(samples: Sequence[TrainSample], groups: Sequence[Group]) -> int:
    """Trained tokens are exactly the sampled tokens: same rollouts, same ids, same order, same logprobs."""
    rollouts = {(r.group, r.index): r for g in groups for r in g.rollouts}
    seen = [(s.group, s.index) for s in samples]
    if len(set(seen)) != len(seen) or len(seen) != len(rollouts):
        raise _broken(
            f"{len(rollouts)} rollouts became {len(seen)} samples, {len(set(seen))} of them different",
            "one that is lost or counted twice moves its siblings' baseline",
        )
    for sample in samples:
        rollout = rollouts.get((sample.group, sample.index))
        name = f"sample {sample.item_id}/group={sample.group}/rollout={sample.index}"
        if rollout is None or rollout.task_id != sample.item_id:
            raise _broken(f"{name} belongs to no rollout of this step", "it would train on tokens of unknown origin")
        if sample.prompt_ids != rollout.turns[0].prompt_ids:
            raise _broken(f"{name} has another prompt than its rollout", "it would answer another question")
        sampled = [t for turn in rollout.turns for t in turn.completion_ids]
        trained = [t for t, own in zip(sample.completion_ids, sample.sampled, strict=True) if own]
        if trained != sampled:
            raise _broken(
                f"{name} would train {len(trained)} tokens, the policy sampled {len(sampled)}; they differ",
                "tokens that the policy did not choose would be reinforced, or chosen ones forgotten",
            )
        logprobs = [p for turn in rollout.turns for p in turn.logprobs]
        if [p for p, own in zip(sample.logprobs, sample.sampled, strict=True) if own] != logprobs:
            raise _broken(f"{name} carries other logprobs than it was sampled with", "the ratio would be wrong")
        if sample.reward != rollout.reward or sample.trainer_version != rollout.version:
            raise _broken(f"{name} carries another reward or version than its rollout", "rows were mixed up")
    return len(samples)


def check_advantages(samples: Sequence[TrainSample], *, centred: bool = True) -> int:
    """Per group: advantages add up to 0, equal rewards get exactly 0, better never gets less."""
    groups: dict[str, list[TrainSample]] = defaultdict(list)
    for sample in samples:
        groups[sample.group].append(sample)
    for name, members in groups.items():
        if len({m.item_id for m in members}) > 1:
            raise _broken(f"group {name} mixes tasks {sorted({m.item_id for m in members})[:3]}", "not siblings")
        rewards, advantages = [m.reward for m in members], [m.advantage for m in members]
        if len(set(rewards)) == 1 and any(a != 0 for a in advantages):
            raise _broken(f"group {name} has equal rewards but advantages {advantages[:3]}", "noise would be trained")
        if len(set(zip(rewards, advantages, strict=True))) > len(set(rewards)):
            raise _broken(f"group {name} tells siblings with equal rewards apart", "only the reward may decide")
        if len(set(rewards)) > 1 and not any(advantages):
            raise _broken(f"group {name} has different rewards but no advantage", "its signal was lost")
        scale = max(map(abs, advantages)) or 1.0
        if centred and abs(sum(advantages)) > SUM_TOLERANCE * scale * len(members):
            raise _broken(f"advantages of group {name} add up to {sum(advantages):.3g}", "a group compares siblings")
        ranked = sorted(zip(rewards, advantages, strict=True))
        if any(lo[1] > hi[1] + SUM_TOLERANCE * scale for lo, hi in itertools.pairwise(ranked)):
            raise _broken(f"group {name} gives a lower reward the higher advantage", "the sign is turned round")
    return len(groups)


def check_batch(batch: Batch, samples: Sequence[TrainSample]) -> int:
    """Row by row: the mask selects exactly the sampled tokens, all of them, at the places where they stand.

    Returns:
        How many trained tokens were compared.
    """
    if batch.mask.shape[0] != len(samples):
        raise _broken(
            f"the batch has {batch.mask.shape[0]} rows for {len(samples)} samples", "rows were lost or doubled"
        )
    checked = 0
    tensors = (batch.mask, batch.completion_ids, batch.input_ids, batch.prompt_lens)
    rows = zip(samples, *(tensor.tolist() for tensor in tensors), strict=True)
    for sample, mask, completion, inputs, prompt_len in rows:
        name = f"batch row of {sample.item_id}/rollout={sample.index}"
        kept = len(sample.completion_ids)
        if kept > len(mask) or prompt_len + kept > len(inputs):
            raise _broken(
                f"{name} has room for {min(len(mask), len(inputs) - prompt_len)} of {kept} completion tokens",
                "what is cut off is never trained, the stop token first, and the reward was for all of it",
            )
        expected = [*sample.sampled, *[False] * (len(mask) - kept)]
        if [bool(m) for m in mask] != expected:
            raise _broken(
                f"{name} trains {sum(map(bool, mask))} tokens, the policy sampled {sum(sample.sampled)}, or others",
                "trained tokens must be the sampled tokens, by who made them",
            )
        if tuple(completion[:kept]) != sample.completion_ids or prompt_len != len(sample.prompt_ids):
            raise _broken(f"{name} holds other tokens than its sample", "rows were mixed up")
        if tuple(inputs[: prompt_len + kept]) != sample.prompt_ids + sample.completion_ids:
            raise _broken(f"{name} is not prompt followed by completion", "logprobs would be read at the wrong places")
        checked += sum(expected)
    _check_row_values(batch, samples)
    return checked


def _check_row_values(batch: Batch, samples: Sequence[TrainSample]) -> None:
    """Advantages and sampler logprobs stand in the rows of their own samples, up to float32."""
    for sample, advantage, logprobs in zip(samples, batch.advantages.tolist(), batch.logprobs.tolist(), strict=True):
        told = zip(sample.logprobs, logprobs, strict=False)
        if not math.isclose(advantage, sample.advantage, rel_tol=1e-6, abs_tol=1e-9) or any(
            not math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-9) for a, b in told
        ):
            raise _broken(f"batch row of {sample.item_id} carries another row's advantage or logprobs", "rows mixed up")


def check_fresh(samples: Sequence[TrainSample], version: int, max_staleness: int = 0) -> int:
    """Samples come from the weights that are about to be trained, or from at most `max_staleness` versions before."""
    stale = [s for s in samples if not 0 <= version - s.trainer_version <= max_staleness]
    if stale:
        raise _broken(
            f"{len(stale)} of {len(samples)} samples come from version {stale[0].trainer_version}, "
            f"the learner is at {version} and max_staleness is {max_staleness} (first: {stale[0].item_id})",
            "the sampler did not get the new weights, or the samples waited too long",
        )
    return len(samples)


def check_parity(gap: float, limit: float, items: Sequence[str], version: int) -> None:
    """Sampler and learner agree on every sampled token."""
    if not gap <= limit:  # also true for NaN
        raise NumericsError(
            f"sampler and learner disagree by {gap:.3g} on a sampled token at version {version} (limit {limit:.3g}; "
            f"tasks {', '.join(items[:3])}{' ...' if len(items) > 3 else ''})",
            "the same tokens, weights and temperature must have the same probability; a gap means shifted positions, "
            "another temperature, or weights that never arrived",
            "run with dtype = float32 to compare; raise parity_tolerance only if you know where the gap comes from",
        )


def check_fused(gap: float, limit: float) -> None:
    """The fused forward pass and the network's own modules agree; what is not finite is the step's own business."""
    if math.isfinite(gap) and gap > limit:
        raise NumericsError(
            f"the fused kernels and the network's own modules disagree by {gap:.3g} on a token of the first microbatch "
            f"(limit {limit:.3g})",
            "another function of the weights would be trained than the one that is saved",
            "set cuda_kernels = false, and report the model's config.json",
        )


def check_steps(step: int, version: int, refused: int) -> None:
    """Every step of the run made a version or was refused: rates and seeds go by versions, data and logs by steps."""
    if version + refused != step:
        raise InvariantError(
            f"after step {step} the learner has version {version}, and {refused} steps were refused",
            "a step was applied twice, or not at all; the schedule and the log belong to different runs",
            "resume from the last checkpoint; report the run folder if your own code did not cause it",
        )


def _broken(what: str, why: str) -> InvariantError:
    return InvariantError(
        what, why, "nothing was trained on it; report the run folder if your own code did not cause it"
    )


# -- Are siblings independent draws? A sampler with a fixed seed says the same thing again and again
# Owns       the memory of which set of completions each task got last.
# Promises   no false alarm on a policy that has become sure of itself: how often a completion may
# repeat is judged by the probability the sampler itself claims for it.
# Never      looks at text.
#
# With G siblings, the chance that some completion of probability p appears m times or more is at
# most C(G, m) * p^(m-1). A repeat that is less likely than `ALARM` did not happen by chance.


ALARM = 1e-12
"""Smallest probability that is still put down to chance; about one false alarm in a billion steps."""
DIGEST = 16
"""Hexadecimal digits that are kept of a visit: 64 bits, so that a checkpoint stays small with many tasks."""


class DiversityGuard:
    """Refuses sampling that repeats itself more than its own probabilities allow."""

    def __init__(self) -> None:
        self._last: dict[str, str] = {}

    def check(self, groups: Sequence[Group]) -> int:
        """Look at siblings inside each group, and at the same task's previous visit."""
        for group in groups:
            played = [r for r in group.rollouts if r.turns]
            self._check_siblings(group, played)
            self._check_visits(group, played)
        return len(groups)

    def state_dict(self) -> dict[str, str]:
        """What a resumed run has to remember: by task, a digest of its last visit."""
        return dict(self._last)

    def load_state_dict(self, state: Mapping[str, str]) -> None:
        """Go on where `state_dict` was taken."""
        if not all(isinstance(word, str) for pair in state.items() for word in pair):
            raise StateError(
                "the saved visits are not texts", "a repeated visit would not be recognised", "use the saved state"
            )
        self._last = dict(state)

    def _check_siblings(self, group: Group, played: list[Rollout]) -> None:
        copies = Counter(_tokens(r) for r in played)
        surprise = {_tokens(r): _logprob(r) for r in played}
        for tokens, count in copies.items():
            log_chance = math.log(math.comb(len(played), count)) + (count - 1) * surprise[tokens]
            if count > 1 and log_chance < math.log(ALARM):
                raise _repeated(group, f"{count} of {len(played)} siblings are identical", log_chance)

    def _check_visits(self, group: Group, played: list[Rollout]) -> None:
        digest = sha256_of(repr([_tokens(r) for r in played]))[:DIGEST]
        log_chance = sum(map(_logprob, played))
        if played and self._last.get(group.task.id) == digest and log_chance < math.log(ALARM):
            raise _repeated(group, "the whole set equals the one of its last visit", log_chance)
        self._last[group.task.id] = digest


def _tokens(rollout: Rollout) -> tuple[int, ...]:
    return tuple(t for turn in rollout.turns for t in turn.completion_ids)


def _logprob(rollout: Rollout) -> float:
    return sum(p for turn in rollout.turns for p in turn.logprobs)


def _repeated(group: Group, what: str, log_chance: float) -> InvariantError:
    return InvariantError(
        f"group {group.id} of {group.task.id}: {what}; the sampler itself gives that a chance of "
        f"1e{log_chance / math.log(10):.0f}",
        "siblings are not independent draws (a fixed seed per request?), so advantages compare copies",
        "give every rollout its own seed",
    )

"""The trace-replay channel: preferences between recorded answers, replayed beside the training.

Owns       which pairs come next, and their log-probabilities under the model.
Promises   pairs that cannot teach are dropped under a reason before training begins; ranks replay different pairs; a
           resumed run goes on with the pairs that would have come.
Never      makes a reference up: a pair without one is dropped.

Read next: `maths/preference.py`, the pair and its loss.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from surefoot.maths.logprobs import compute_logprobs
from surefoot.maths.losses import LossTerms
from surefoot.maths.preference import PreferencePair, completion_logp, preference_loss, sift_pairs
from surefoot.trl_bridge.channels import completion_scores
from surefoot.trl_bridge.evaluation import undisturbed
from surefoot.trl_bridge.hints import padded_left
from surefoot.trl_bridge.problems import refused


class Replay:
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

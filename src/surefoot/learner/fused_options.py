"""Which options of a learner the fused forward pass is known to be right under, by name.

Owns       the list: fields of `LearnerSettings` and `LossSettings`, and the entries that each registry behind them may
           have.
Promises   an option that is not on it is named, and the network's own modules compute; so a new field or a new entry
           is slow until somebody puts it here, with the test that compares both paths under it.
Never      looks at the network: `fused_forward.why_not_fused` does.

Most of them act on log-probabilities, behind the forward pass, and are listed because a step was compared under each
(`tests/unit/learner/test_fused_forward.py`). Advantages are numbers on the samples before they come here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

LEARNER = frozenset(
    "loss learning_rate max_steps max_completion_length temperature pad_token_id lr_scheduler_type warmup_steps "
    "optim weight_decay betas adam_epsilon max_grad_norm microbatch_size mask_truncated cuda_kernels "
    "gradient_checkpointing reference_sync_steps parity_tolerance max_staleness".split()
)
LOSS = frozenset(
    "loss_type own level epsilon epsilon_high delta beta kl_estimator kl_input_clamp kl_output_clamp "
    "kl_bias_correction correction correction_clip correction_floor force_on_policy_ratio positive_nll".split()
)
ENTRIES: Mapping[str, frozenset[Any]] = {
    "loss_type": frozenset({"grpo", "bnpo", "dr_grpo", "dapo", "cispo", "gspo"}),
    "level": frozenset({None, "token", "sequence"}),
    "kl_estimator": frozenset({"k1", "k2", "k3"}),
    "correction": frozenset({None, "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"}),
}
"""Field of the loss -> its values that are known. A loss of the user's own is handed finished log-probabilities."""
OPTIMISERS = frozenset({"adamw", "adamw_8bit", "sgd"})


def unlisted(settings: Any) -> list[str]:
    """Names of what the fused forward pass was never compared under; empty when it may be taken.

    Args:
        settings: a `LearnerSettings`.
    """
    optim = [] if settings.optim in OPTIMISERS else [f"optim {settings.optim}"]
    return [*_fields(settings, LEARNER), *optim, *_fields(settings.loss, LOSS), *_values(settings.loss)]


def _fields(settings: Any, known: frozenset[str]) -> Iterator[str]:
    for field in dataclasses.fields(settings):
        if field.name not in known:
            yield f"{type(settings).__name__}.{field.name}"


def _values(loss: Any) -> Iterator[str]:
    for name, known in ENTRIES.items():
        own = name == "loss_type" and loss.own is not None
        if not own and getattr(loss, name, None) not in known:
            yield f"{name} {getattr(loss, name)}"

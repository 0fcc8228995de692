"""The learner's numbers, in one record."""

from __future__ import annotations

from dataclasses import dataclass

from surefoot.maths.losses import LossSettings


@dataclass(frozen=True)
class LearnerSettings:
    """The learner's numbers; see the config keys of the same names."""

    loss: LossSettings
    learning_rate: float
    max_steps: int
    max_completion_length: int
    temperature: float
    pad_token_id: int
    lr_scheduler_type: str = "constant"
    warmup_steps: int = 0
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    adam_epsilon: float = 1e-8
    max_grad_norm: float = 1.0
    microbatch_size: int = 0
    mask_truncated: bool = False
    reference_sync_steps: int | None = None
    parity_tolerance: float = 1e-4
    max_staleness: int = 0

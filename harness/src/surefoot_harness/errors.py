"""What went wrong, why it matters, how to fix it: the error tree, with exit codes.

SurefootError                 70  a bug of ours, when nothing below fits
├── ConfigError                2  a key, value or pair of values is refused
│   └── ShapeError             2  tensors or lists do not fit together (also a ValueError)
├── StateError                 3  a run folder is missing, foreign or already used
├── InputError                 4  tasks, model, rewards or tokenizer are refused
│   ├── TaskError              4  a task line or a whole task set
│   ├── ModelError             4  weights, tokenizer or template
│   ├── RewardError            4  a reward function
│   ├── EngineError            4  an engine answered with something that is not an answer
│   ├── ExtensionError         4  a loss, an estimator, an engine or a guard rule of the user's own is refused
│   └── ToolError              4  a tool, its server, or what they offer is refused
│       └── ToolFailedError    4  a tool's server or world failed under one rollout, which then has no verdict
├── SecurityError              5  going on would open something to others, or run what nobody contained
├── InvariantError             1  a promise about groups, masks or tokens does not hold
│   └── PartialGroupError      1  a group lost siblings and the policy says to refuse
├── NumericsError             78  not finite, or sampler and learner disagree
├── StorageError              74  the disk said no
├── MemoryLimitError          74  memory ran out, and smaller microbatches did not help
├── StoppedError              75  stopped on request; what was done is saved
├── StalledError              76  nothing moved for too long; the stacks are in a file
├── FleetError                77  engines, workers or the learner are gone and cannot be replaced
│   └── LearnerLostError       77  the learner's process is gone; a session goes on from the journal by itself
│       └── LearnerStartError  77  it did not come up; where no step was trained there is nothing to go on from
└── CollapseStopError         79  the guard stopped a run that was hurting the model
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing import Protocol

    class StopStatus(Protocol):
        """The last word of a guard that stopped a run; the trainer's `GuardStatus` is one."""

        @property
        def fire(self) -> bool:
            """Whether it fired."""

        @property
        def reason(self) -> str:
            """Why, in one sentence."""

        @property
        def step(self) -> int:
            """When."""

        @property
        def proxy_real_gap(self) -> float:
            """Reward gain minus held-out gain, both smoothed."""

        @property
        def kl_ema(self) -> float | None:
            """The smoothed distance from the reference; None where it is not measured."""


class SurefootError(Exception):
    """Base of every error we raise on purpose.

    The three strings are positional so that `args` mirrors the signature and the
    error survives pickling on its way back from a worker process.

    Example:
        >>> print(SurefootError("group 7 has 5 of 8 rollouts", "siblings are compared", "see partial_groups"))
        group 7 has 5 of 8 rollouts
          why: siblings are compared
          fix: see partial_groups
    """

    exit_code = 70

    def __init__(self, what: str, why: str, fix: str) -> None:
        super().__init__(what, why, fix)
        self.what, self.why, self.fix = what, why, fix

    def __str__(self) -> str:
        return f"{self.what}\n  why: {self.why}\n  fix: {self.fix}"


class ConfigError(SurefootError, ValueError):
    """A config file, key, value or combination is refused before anything starts."""

    exit_code = 2


class ShapeError(ConfigError):
    """Tensors or lists do not fit together; broadcasting would have hidden it."""


class StateError(SurefootError):
    """Stored state is missing, corrupt, or belongs to another run."""

    exit_code = 3


class InputError(SurefootError, ValueError):
    """What the user brought (tasks, model, rewards) cannot be trained on."""

    exit_code = 4


class TaskError(InputError):
    """A task line, or a whole task set, is refused."""


class ModelError(InputError):
    """Model weights, tokenizer or chat template are refused."""


class RewardError(InputError):
    """A reward function is missing, malformed, or failed more often than allowed."""


class EngineError(InputError):
    """An engine returned something that is not a usable completion."""


class ExtensionError(InputError):
    """Code of the user's own does not load, has the wrong form, or breaks what holds for ours; with file and line."""


class ToolError(InputError):
    """A tool server, a tool list or a tool's schema is refused."""


class ToolFailedError(ToolError):
    """A tool's server or world failed under one rollout: no verdict for it, under `reason`, and never a reward of 0.

    What the tool itself says ("file not found") is an answer and no failure.
    """

    def __init__(self, what: str, why: str, fix: str, reason: str = "tool_failed") -> None:
        super().__init__(what, why, fix)
        self.args = (what, why, fix, reason)
        self.reason = reason
        """One word that can be counted, such as `tool_crashed`, `tool_timeout` or `tool_flooded`."""


class SecurityError(SurefootError):
    """Refused because it would be unsafe: an open port without a token, or foreign code without a sandbox."""

    exit_code = 5


class InvariantError(SurefootError):
    """Something that must always hold does not; training on would be silent damage."""

    exit_code = 1


class PartialGroupError(InvariantError, ValueError):
    """A group lost siblings and `partial_groups` says to refuse."""


class NumericsError(SurefootError):
    """A number that must be finite is not, or two sides that must agree do not."""

    exit_code = 78


class StorageError(SurefootError):
    """The disk refused a write."""

    exit_code = 74


class MemoryLimitError(SurefootError):
    """The machine has not enough memory; like a full disk, it takes more room and a resume."""

    exit_code = 74


class StoppedError(SurefootError):
    """Stopped on request; everything finished so far is saved."""

    exit_code = 75


class StalledError(SurefootError):
    """Nothing moved for too long: a wait that does not end."""

    exit_code = 76


class FleetError(SurefootError):
    """Engines, rollout workers or the learner are gone, and replacing them did not help."""

    exit_code = 77


class LearnerLostError(FleetError):
    """The learner's process is gone, and with it every weight since the last checkpoint; the journal has the rest."""


class LearnerStartError(LearnerLostError):
    """The learner's process did not come up: it ended, or took longer than `runtime.start_timeout_s`."""


class CollapseStopError(SurefootError):
    """A guard stopped the run: held-out quality fell, or another of its rules was broken.

    `status` is the guard's last word (`fire`, `reason`, `step`, `proxy_real_gap`, `kl_ema` ...); it travels with the
    error through pickling.
    """

    exit_code = 79

    def __init__(self, what: str, why: str, fix: str, status: StopStatus | None = None) -> None:
        super().__init__(what, why, fix)
        self.status = status

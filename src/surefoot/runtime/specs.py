"""What a process of the fleet needs to build its own part: plain data, made by `run`, sent along.

Owns       the form of these, and the building, which imports torch only where it happens.
Promises   a recipe can be pickled; reward functions from the user's own file are found again by file and name, and
           everything else (closures, lambdas) travels by value.

Read next: `runtime/ray/actors.py`, which builds from them.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from surefoot.errors import RewardError
from surefoot.protocols import Codec, DecoderSpec, Environment, ServingEngine, Toolkit
from surefoot.system.environment import missed, missing_words, narrow
from surefoot.system.files import APPEND, plain_descriptor

if TYPE_CHECKING:
    from surefoot.guards.reward_values import RewardFunction
    from surefoot.learner.grpo import GRPOLearner, LearnerSettings
    from surefoot.learner.lora import LoraSettings
    from surefoot.learner.model import Policy
    from surefoot.learner.sharding import OneRank
    from surefoot.rewards.grading import GradingRules, Judges
    from surefoot.rewards.pool import RewardPool
    from surefoot.tools.session import ToolEnvironment
    from surefoot.tools.toolkits import ToolkitSpec


RAY_OWN = ("RAY_AUTH_TOKEN",)
"""Secrets that a process of a cluster needs to talk to the others; reward and tool processes do not get them."""
_REWARD_FILE = "surefoot_reward_"


@dataclass(frozen=True)
class ProcessSpec:
    """How every process of the fleet begins."""

    logs: Path
    threads: int
    """Torch threads: part of the result, so the same in every process, whatever Ray sets."""
    deterministic: bool
    """Only kernels whose results repeat bit by bit."""
    passed: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Variables that the config names, with the driver's values: a cluster elsewhere has others, or none."""

    withheld: tuple[str, ...] = ()
    """Names of the driver's variables that nobody passed on: whoever asks for one is told."""

    def also(self, names: Iterable[str]) -> ProcessSpec:
        """With these variables too, where the driver has them."""
        return replace(self, passed={**self.passed, **{name: os.environ[name] for name in names if name in os.environ}})

    def log(self, name: str) -> Path:
        """`logs/engine-0.log` of `engine 0`."""
        return self.logs / f"{name.replace(' ', '-')}.log"

    def enter(self, name: str) -> None:
        """Narrow the environment, send what is printed to the log, and crashes with it; first thing in the process."""
        os.environ.update(self.passed)
        narrow([*self.passed, *RAY_OWN], self.withheld)
        self.logs.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = plain_descriptor(self.log(name), APPEND)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.close(descriptor)
        sys.stdout = os.fdopen(1, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)
        faulthandler.enable(file=2)
        print(f"{name} begins as process {os.getpid()}")

    def set_torch(self) -> None:
        """Threads and kernels, before anything is computed."""
        import torch

        torch.set_num_threads(self.threads)
        torch.use_deterministic_algorithms(self.deterministic)


class EngineSpec(Protocol):
    """Builds an engine that has no weights yet."""

    @property
    def shares_tensors(self) -> bool:
        """In the learner's own process it serves the very tensors that it is handed: nothing is copied."""

    @property
    def variables(self) -> tuple[str, ...]:
        """Names of variables that the process which builds it has to have."""

    def build(self) -> ServingEngine:
        """In the process where it will run."""


class ServedHere:
    """An engine of ours in the process that builds it, on the tensors that it is handed or on a copy."""

    copy_weights: bool

    @property
    def shares_tensors(self) -> bool:
        """Unless it has to copy them."""
        return not self.copy_weights

    @property
    def variables(self) -> tuple[str, ...]:
        """None: it asks nobody."""
        return ()


@dataclass(frozen=True)
class EmbeddedEngineSpec(ServedHere):
    """Our own engine, served to many callers by one thread."""

    spec: DecoderSpec
    rows: int
    max_width: int
    device: str
    dtype: str
    cuda_kernels: bool = True
    """On a GPU, decode in captured graphs."""
    copy_weights: bool = False
    """Serve a copy: needed where the owner of the weights goes on changing them while they are served."""

    def build(self) -> ServingEngine:
        """In the process where it will run."""
        import torch

        from surefoot.engines.graphs import embedded_engine
        from surefoot.engines.serving import EngineLoop

        dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[self.dtype]
        engine = embedded_engine(
            self.spec, rows=self.rows, max_width=self.max_width, device=_resolved(self.device), dtype=dtype,
            graphs=self.cuda_kernels,
        )  # fmt: skip
        return EngineLoop(engine, copy_weights=self.copy_weights)


def _resolved(device: str) -> str:
    """The device to use. Plain `cpu` is known without loading what knows the rest, which takes seconds."""
    if device == "cpu":
        return device
    from surefoot.learner.model import resolve_device

    return resolve_device(device)


@dataclass(frozen=True)
class FromFile:
    """A reward function of the user's own file, to be found there again."""

    path: str
    name: str


class RolloutEnvironment(NamedTuple):
    """Who grades, and with what rollouts may work."""

    graders: Environment
    tools: ToolEnvironment | None
    """The same object, where rollouts have tools; what their worlds say is then part of the grade."""


@dataclass(frozen=True)
class WorkerSpec:
    """What a rollout worker asks with and grades with."""

    functions: Mapping[str, Any]
    """Name -> function, or `FromFile`; see `portable`."""
    weights: Mapping[str, float]
    metric: str | None
    reward_workers: int
    reward_timeout_s: float
    reward_memory_mb: int
    codec: Codec
    seed: int
    token_count: int
    tools: ToolkitSpec | None = None
    """What rollouts may call; every worker has servers of its own."""
    unsafe: bool = False
    """Model-written code may run without a sandbox here."""
    sets: Mapping[str, Judges] = field(default_factory=dict)
    """Who judges each evaluation set."""
    forked: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Columns that have no form as data, by task; Ray brings them here, and a fork to the reward workers."""
    rules: GradingRules | None = None
    """What becomes of loops, and how long the run is."""
    pass_env: tuple[str, ...] = ()
    """Variables that reward functions may see beside the usual ones; the process has them."""

    @property
    def variables(self) -> tuple[str, ...]:
        """Names of variables with the tokens of tool servers: the process sends them, its children never see them."""
        servers = () if self.tools is None else self.tools.servers
        return tuple(server.token_env for server in servers if server.token_env is not None)

    def pool(self, log: Path) -> RewardPool:
        """Forked at once, before torch is imported."""
        from surefoot.rewards.pool import RewardPool
        from surefoot.rewards.verifiers.code import permit_unsafe

        if self.unsafe:
            permit_unsafe()
        functions = _all_loaded(self.functions)
        pool = RewardPool(
            functions, workers=self.reward_workers, timeout_s=self.reward_timeout_s, memory_mb=self.reward_memory_mb,
            log_path=log, forked=self.forked, pass_env=self.pass_env, warn=_say,
        )  # fmt: skip
        return pool.start()

    def environment(self, pool: RewardPool, toolkit: Toolkit | None) -> RolloutEnvironment:
        """Graders on that pool, and the tools of this kit; the same in every process.

        Args:
            toolkit: made of `tools` where rollouts run; where they are only graded again, one that knows their names.
        """
        from surefoot.rewards.functions import weighs_environment_reward
        from surefoot.rewards.grading import SingleTurnEnvironment
        from surefoot.tools.session import ToolEnvironment

        if self.tools is None or toolkit is None:
            graders = SingleTurnEnvironment(pool, self.weights, self.metric, sets=self.sets, rules=self.rules)
            return RolloutEnvironment(graders, None)
        alone = self.tools.environment is None
        graders = SingleTurnEnvironment(pool, self.weights, self.metric, alone=alone, sets=self.sets, rules=self.rules)
        adds_own = not weighs_environment_reward(self.functions, self.weights)
        found = ToolEnvironment(
            graders, toolkit, self.tools.limits, adds_own=adds_own, call_format=self.tools.call_format
        )
        return RolloutEnvironment(found, found)

    def shared_by(self, workers: int) -> WorkerSpec:
        """`reward_workers` processes in all, at least one for each worker."""
        return replace(self, reward_workers=max(1, -(-self.reward_workers // workers)))


def portable(functions: Mapping[str, RewardFunction]) -> dict[str, Any]:
    """Reward functions in a form that another process can use; those of reward files by file and name."""
    return {name: _found_again(function) for name, function in functions.items()}


def _all_loaded(functions: Mapping[str, Any]) -> dict[str, Any]:
    """The functions; a file that cannot be imported here for want of a variable says which."""
    missed()
    try:
        return {name: _loaded(function) for name, function in functions.items()}
    except RewardError as error:
        if not (names := missed()):
            raise
        what, fix = missing_words(names)
        raise RewardError(error.what, f"{error.why}; {what}", fix) from error


def _say(what: str, fix: str) -> None:
    """Into the log of this process: the terminal is elsewhere."""
    print(f"warning: {what}\n  remedy: {fix}")


def _loaded(function: Any) -> Any:
    """The function itself, in the process that calls it."""
    from surefoot.rewards.functions import ComponentReward
    from surefoot.system.user_code import load_function

    if isinstance(function, ComponentReward):
        return replace(function, verify=_loaded(function.verify))
    return load_function(f"{function.path}:{function.name}", Path("/")) if isinstance(function, FromFile) else function


def _found_again(function: Any) -> Any:
    from surefoot.rewards.functions import ComponentReward

    if isinstance(function, ComponentReward):
        return replace(function, verify=_found_again(function.verify))
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    if module is None or not module.__name__.startswith(_REWARD_FILE) or module.__file__ is None:
        return function
    names = [name for name, value in vars(module).items() if value is function]
    return FromFile(module.__file__, names[0]) if names else function


@dataclass(frozen=True)
class LearnerRanks:
    """How many processes share a learner, and how long they wait for each other."""

    size: int
    deadline_s: float
    """For one collective."""
    start_timeout_s: float
    gpus: float = 0.0
    """That each of them reserves."""


@dataclass(frozen=True)
class LearnerSpec:
    """The policy, and how it learns."""

    model: str
    base: Path
    device: str
    dtype: str
    settings: Callable[[Policy], LearnerSettings]
    """Called in the learner's process: some settings need the tokenizer."""
    channels: Callable[[Policy], Any] | None = None
    """Makes the losses beside the policy's; None when there are none."""
    lora: LoraSettings | None = None
    """The adapter that is trained; None where every weight is."""
    ranks: LearnerRanks | None = None
    """The processes that share it; None where it is one."""
    gpu: int | None = None
    """Which of the GPUs that the process sees is its own, where several ranks see the same ones."""

    def load(self) -> Policy:
        """The model as it begins, in the process where it will run."""
        from surefoot.learner.model import load_policy

        if self.gpu is not None and _resolved(self.device) == "cuda":
            import torch

            torch.cuda.set_device(self.gpu)
        return load_policy(self.model, base=self.base, device=self.device, dtype=self.dtype, lora=self.lora)

    def learner(self, policy: Policy, ranks: OneRank | None = None) -> GRPOLearner:
        """What trains a model that `load` returned; one rank of it, where there are several."""
        from surefoot.learner.grpo import GRPOLearner
        from surefoot.learner.lora import with_adapter

        channels = None if self.channels is None else self.channels(policy)
        policy, adapter = with_adapter(policy, self.lora)
        return GRPOLearner(
            policy.model, self.settings(policy), channels, policy.masters, policy.tokenizer, adapter, ranks
        )


# -- What crosses between driver, learner and engines: facts about the policy, and weights by name or by value


@dataclass(frozen=True)
class PolicyFacts:
    """What the driver has to know of a model that lives elsewhere."""

    name: str
    tokenizer: Any
    stop_ids: frozenset[int]
    spec: DecoderSpec
    model_config: Mapping[str, Any]
    """`config.json` of the model, as a dictionary."""


def open_weights(parcel: Any) -> Mapping[str, Any]:
    """Weights by name, out of either form: views into shared memory, or the tensors themselves."""
    if isinstance(parcel, Mapping):
        return parcel
    from surefoot.runtime.shared_weights import attach

    return attach(parcel)

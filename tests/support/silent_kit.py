"""Small real parts for the silent-failure tests: a two-layer policy, its engine, its learner, its records.

Everything is the product's own code on a model of a few thousand weights, so that a planted bug meets
the same checks as in a run. The weights are spread widely: with flat distributions many bugs look right.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from surefoot import loop
from surefoot.config import Config
from surefoot.engines.embedded import EmbeddedEngine
from surefoot.learner.grpo import GRPOLearner, LearnerSettings
from surefoot.learner.model import decoder_spec
from surefoot.maths.losses import LossSettings
from surefoot.protocols import Engine, Grade
from surefoot.records import Group, Rollout, Task, TrainSample, Turn
from surefoot.runtime.local import LocalRuntime
from surefoot.runtime.requests import Sampling
from surefoot.runtime.rollout import RolloutCollector

VOCAB, STOP_ID, PAD_ID = 32, 2, 0
LONGEST = 8
PROMPTS = {"long": (1, 5, 6, 7, 8, 9, 10, 11, 12), "short": (1, 20, 21), "other": (1, 15, 16, 17, 18)}
TASKS = tuple(Task(id=name, prompt=name) for name in PROMPTS)


class TinyCodec:
    """Token ids as words; enough for graders and people."""

    stop_ids = frozenset({STOP_ID})
    pad_token_id = PAD_ID
    vocab_size = VOCAB

    def encode_prompt(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        return PROMPTS[messages[-1]["content"]]

    def decode(self, token_ids: Sequence[int]) -> str:
        return " ".join(map(str, token_ids))


class TinyEnvironment:
    """Grades with one function of a rollout; by default half of all rollouts are right, for no good reason."""

    def __init__(self, reward: Callable[[Rollout], float | None] | None = None) -> None:
        self.reward = reward or (lambda rollout: float(sum(rollout.turns[0].completion_ids) % 2))

    def explain_failures(self) -> str:
        return ""

    def grade(self, tasks: Sequence[Task], rollouts: Sequence[Rollout]) -> list[Grade]:
        del tasks
        rewards = [self.reward(rollout) for rollout in rollouts]
        return [Grade(r, {"tiny": r}, None if r is not None else "abstained", r) for r in rewards]

    def close(self) -> None:
        """Nothing to end."""


def tiny_net(seed: int = 0, *, spread: float = 0.25, **changes: Any) -> Any:
    """A two-layer Llama in eval mode."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        numbers: dict[str, Any] = {
            "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64,
            "tie_word_embeddings": True, "initializer_range": spread, "bos_token_id": None, "eos_token_id": STOP_ID,
            "pad_token_id": PAD_ID, "attn_implementation": "sdpa",
        }  # fmt: skip
        return LlamaForCausalLM(LlamaConfig(**(numbers | changes))).eval()


def weights_of(net: Any) -> dict[str, Tensor]:
    """Parameters by name, copied: a stand-in for weights that crossed to another process."""
    return {name: value.detach().clone() for name, value in net.named_parameters()}


def make_engine(net: Any, version: int = 0) -> EmbeddedEngine:
    engine = EmbeddedEngine(decoder_spec(net), rows=16, max_width=48)
    engine.load_weights(weights_of(net), version)
    return engine


def make_runtime(
    engine: Engine, *, seed: int = 0, temperature: float = 1.0, size: int = 4, environment: Any = None,
    max_failures: float = 0.0, token_count: int = VOCAB,
) -> LocalRuntime:  # fmt: skip
    collector = RolloutCollector(
        engine, environment or TinyEnvironment(), TinyCodec(), PROMPTS, seed=seed, token_count=token_count
    )
    sampling = Sampling(size, temperature, LONGEST, 48)
    return LocalRuntime(engine, collector, train=sampling, evaluation=sampling, max_failures=max_failures)


def make_learner(net: Any, *, loss: Mapping[str, Any] | None = None, **changes: Any) -> GRPOLearner:
    numbers: dict[str, Any] = {
        "learning_rate": 1e-2, "max_steps": 10, "max_completion_length": LONGEST, "temperature": 1.0,
        "pad_token_id": PAD_ID, "max_grad_norm": 0.0,
    }  # fmt: skip
    return GRPOLearner(net, LearnerSettings(loss=LossSettings(**(loss or {})), **(numbers | changes)))


def prepare(groups: Sequence[Group], **keys: Any) -> list[TrainSample]:
    """What `loop.train` does between collecting and learning: every check on groups, samples and advantages."""
    config = Config(model="pebble", tasks="builtin:sums", **keys)
    nobody: Any = None
    return loop.prepare(
        loop.Run(
            config=config, runtime=nobody, learner=nobody, codec=TinyCodec(), queue=nobody, heldout=(),
            hooks=nobody,
        ),
        groups,
    )  # fmt: skip


def sampled(net: Any, *, step: int = 1, version: int = 0, **changes: Any) -> list[TrainSample]:
    """Samples that the policy itself produced, ready to learn from."""
    return prepare(make_runtime(make_engine(net, version), **changes).collect(TASKS, step))


def make_sample(completion: Sequence[int] = (7, 8, STOP_ID), **changes: Any) -> TrainSample:
    fields: dict[str, Any] = {
        "item_id": "long", "trainer_version": 0, "group": "g", "prompt_ids": PROMPTS["long"],
        "completion_ids": tuple(completion), "sampled": (True,) * len(completion),
        "logprobs": (-1.0,) * len(completion), "reward": 1.0, "finish_reason": "stop",
    }  # fmt: skip
    return TrainSample(**(fields | changes))


def make_group(rewards: Sequence[float | None], *, task: Task = TASKS[0], name: str = "train/1/0") -> Group:
    """Siblings that each said something else, with these rewards."""
    rollouts = []
    for i, reward in enumerate(rewards):
        turn = Turn(PROMPTS[task.id], (3 + i, 20 - i, STOP_ID), (-1.0, -2.0, -0.5), version=0, finish_reason="stop")
        failure = None if reward is not None else "raised"
        rollouts.append(Rollout(task.id, name, i, (turn,), reward=reward, failure=failure))
    return Group(task, name, tuple(rollouts))


def gradient(learner: GRPOLearner) -> Tensor:
    """(N,) the gradient that the last step used, over all parameters."""
    return torch.cat([p.grad.flatten() for p in learner.net.parameters() if p.grad is not None])


def flat(net: Any) -> Tensor:
    """(N,) all weights, copied."""
    return torch.cat([p.detach().flatten() for p in net.parameters()]).clone()

"""One environment class, not a line of it ours: the installed TRL plays it, we play it, and nobody sees a difference.

TRL's own `GRPOTrainer` runs with its real tool loop; only the sampling is scripted, so that both sides make the same
calls. The class is in the pattern of TRL's documentation.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", reason="needs the trl extra")

import trl
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from surefoot.records import Task
from surefoot.tools.parsing import parse_calls
from surefoot.tools.python.environments import EnvironmentToolkit

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.slow]  # their warnings are theirs
ROWS = [{"secret": 7, "limit": 9}, {"secret": 3, "limit": 5}]
GUESSES = {0: [7], 1: [1, 9, 7], 2: [3], 3: [5, 4]}
"""Sibling -> what it guesses, one per turn."""


class GuessEnv:
    diary: list[tuple[Any, ...]] = []

    def __init__(self) -> None:
        self.reward = 0.0

    def reset(self, **kwargs: Any) -> str | None:
        self.secret, self.turns, self.reward = kwargs["secret"], 0, 0.0
        GuessEnv.diary.append(("reset", id(self), sorted(kwargs), kwargs["prompt"][-1]["content"], self.secret))
        return f" The number is at most {kwargs['limit']}."

    def guess(self, number: int) -> str:
        """
        Guess the number.

        Args:
            number: The number to guess.

        Returns:
            Whether the secret is larger, smaller, or found.
        """
        self.turns += 1
        if number > 8:
            raise ValueError("Too large.")
        if number == self.secret:
            self.reward = 1.0 / self.turns
        answer = "found" if number == self.secret else "larger" if number < self.secret else "smaller"
        GuessEnv.diary.append(("guess", id(self), number, answer))
        return answer

    def get_reward(self) -> float:
        GuessEnv.diary.append(("reward", id(self), self.reward))
        return self.reward


def call_text(number: int) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'guess', 'arguments': {'number': number}})}\n</tool_call>"


def tokenizer() -> Any:
    """One token per byte, and Qwen's marks."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    made.add_tokens(["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"])
    made.chat_template = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text()
    return made


def model(vocabulary: int) -> Any:
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=vocabulary, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=1, head_dim=8, max_position_embeddings=8192, tie_word_embeddings=True,
        )
    )  # fmt: skip


class Script:
    """Stands for the sampling: sibling i guesses `GUESSES[i]`, one number per turn, and is then done."""

    def __init__(self, made: Any) -> None:
        self.tokenizer, self.turn, self.active = made, 0, list[int]()
        self.heard: list[list[str]] = []
        """Per rollout, what the tools told the model."""

    def __call__(self, prompt_ids: Any, *rest: Any, **words: Any) -> Any:
        texts = [text.partition("<|im_start|>user")[2] for text in self.tokenizer.batch_decode(prompt_ids)]
        if "<tool_response>" not in texts[0]:
            self.turn, self.active = 0, list(range(len(texts)))
        replies = []
        for sibling, text in zip(self.active, texts, strict=True):
            todo = GUESSES[sibling][self.turn :]
            replies.append((call_text(todo[0]) if todo else "done") + "<|im_end|>")
            if not todo:
                self.heard.append(re.findall(r"<tool_response>\n(.*?)\n</tool_response>", text))
        self.active = [sibling for sibling in self.active if len(GUESSES[sibling]) > self.turn]
        self.turn += 1
        return [self.tokenizer(reply, add_special_tokens=False).input_ids for reply in replies], None


def under_trl(folder: Path) -> tuple[list[list[str]], list[float]]:
    """What the model heard, and the mean reward of each step."""
    made = tokenizer()
    args = GRPOConfig(
        output_dir=str(folder), report_to=[], per_device_train_batch_size=4, num_generations=4, max_steps=2,
        max_completion_length=600, use_cpu=True, bf16=False, logging_steps=1, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": "Play."}], **row} for row in ROWS])
    trainer = GRPOTrainer(
        model=model(len(made)), args=args, processing_class=made, train_dataset=rows, environment_factory=GuessEnv
    )
    trainer._generate_single_turn = Script(made)
    trainer.train()
    return trainer._generate_single_turn.heard, [log["reward"] for log in trainer.state.log_history if "reward" in log]


def under_us(secrets: list[int]) -> tuple[list[list[str]], list[float]]:
    """The same tasks in the same order, a group of four each; calls are read from the same text."""
    toolkit = EnvironmentToolkit(GuessEnv)
    heard, rewards = [], []
    for step, secret in enumerate(secrets):
        row = next(row for row in ROWS if row["secret"] == secret)
        task = Task(id=str(secret), prompt=({"role": "user", "content": "Play."},), columns=row)
        boxes = [toolkit.open(task, f"train/{step}/0/{i}", seed=step) for i in range(4)]
        assert {box.opening for box in boxes} == {f" The number is at most {row['limit']}."}
        for sibling, box in enumerate(boxes):
            calls = [parse_calls(call_text(number)).calls[0] for number in GUESSES[sibling]]
            heard.append([box.call(call.name, call.arguments, 10).text for call in calls])
        given = [box.reward() for box in boxes]
        rewards.append(sum(value for value in given if value is not None) / len(given))
        for box in boxes:
            box.close()
    toolkit.close()
    return heard, rewards


def episodes(diary: list[tuple[Any, ...]]) -> tuple[list[Any], int]:
    """What each instance lived through from reset to reward, in any order; and how many instances there were."""
    open_ones: dict[int, list[Any]] = {}
    done = []
    for what, instance, *facts in diary:
        if what == "reset":
            open_ones[instance] = []
        open_ones[instance].append((what, *facts))
        if what == "reward":
            done.append(open_ones[instance])
    return sorted(done, key=repr), len({instance for _, instance, *_ in diary})


def test_trl_and_we_play_a_class_from_its_documentation_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    monkeypatch.setattr(GuessEnv, "diary", theirs := [])
    their_heard, their_rewards = under_trl(tmp_path)
    secrets = [facts[-1] for what, _, *facts in theirs if what == "reset"][::4]
    monkeypatch.setattr(GuessEnv, "diary", ours := [])
    our_heard, our_rewards = under_us(secrets)
    assert len(their_heard) == 8, "two groups of four"
    assert sorted(map(as_trl_says, our_heard)) == sorted(their_heard)
    assert our_rewards == pytest.approx(their_rewards)
    assert their_rewards[0] > 0, "somebody found the number"
    assert episodes(ours) == episodes(theirs)
    assert episodes(ours)[1] == 4, "one instance per sibling, used again in the next step"


def as_trl_says(answers: list[str]) -> list[str]:
    """The one difference: we name the type of an exception, TRL wraps its message."""
    return [re.sub(r"^ValueError: (.*)$", r"{'error': '\1'}", answer) for answer in answers]

"""Tiny models, tokenizers and records for the moving parts.

Everything random is drawn wide: with the usual small initial weights every next token is about equally
likely, and a test that compares distributions would pass whatever the code computes. Norm weights and
biases, which start at 1 and 0, are drawn too; otherwise nobody would notice that they are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from one_thread import one_torch_thread

from surefoot.records import STOP, Group, Rollout, Task, TrainSample, Turn

VOCAB = 61
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
KINDS = ("llama", "untied", "llama3", "yarn", "wide_heads", "qwen2", "qwen3", "mistral")
"""What `make_net` makes: one per way in which a decoder of the family can differ."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that asks for `architecture` runs once per architecture."""
    if "architecture" in metafunc.fixturenames:
        metafunc.parametrize("architecture", KINDS)


@pytest.fixture(scope="session")
def one_thread() -> Iterator[None]:
    """From the first test that asks for it to the end: the nets that tests share are made on one thread too."""
    with one_torch_thread():
        yield


@pytest.fixture(scope="session")
def make_net(one_thread: None) -> Callable[..., Any]:
    """`make_net("qwen3", seed=1)`: a tiny random model of that kind, float32, eval mode."""
    return _make_net


@pytest.fixture(scope="module")
def net(make_net: Callable[..., Any]) -> Any:
    """One that a file's tests share and leave as it is."""
    return make_net()


def _make_net(kind: str = "llama", *, seed: int = 0, **changes: Any) -> Any:
    import torch
    import transformers as hf

    config_class, model_class, extra = _architecture(kind, hf)
    settings = dict(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=1024, tie_word_embeddings=True, attention_dropout=0.0,
        eos_token_id=2, pad_token_id=0, bos_token_id=None, use_cache=True, initializer_range=0.2,
    )  # fmt: skip
    config = config_class(**(settings | extra | changes))
    config._attn_implementation = "sdpa"
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = model_class(config).float().eval()
        for parameter in net.parameters():
            if parameter.dim() == 1:
                parameter.data.add_(torch.randn_like(parameter) * 0.3)
    net.generation_config.eos_token_id = 2
    net.generation_config.pad_token_id = 0
    return net


def _architecture(kind: str, hf: Any) -> tuple[Any, Any, dict[str, Any]]:
    llama = (hf.LlamaConfig, hf.LlamaForCausalLM)
    table: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "llama": (*llama, {}),
        "untied": (*llama, {"tie_word_embeddings": False}),
        "llama3": (*llama, {"rope_parameters": LLAMA3_ROPE}),
        "yarn": (*llama, {"rope_parameters": YARN_ROPE}),
        "wide_heads": (*llama, {"head_dim": 24, "num_key_value_heads": 1}),
        "qwen2": (hf.Qwen2Config, hf.Qwen2ForCausalLM, {}),
        "qwen3": (hf.Qwen3Config, hf.Qwen3ForCausalLM, {"head_dim": 16}),
        "mistral": (hf.MistralConfig, hf.MistralForCausalLM, {"sliding_window": None, "num_key_value_heads": 4}),
    }
    return table[kind]


@pytest.fixture(scope="session")
def make_engine(make_net: Callable[..., Any]) -> Callable[..., Any]:
    """`make_engine(net, version=3, rows=16, max_width=96)`: an embedded engine that serves the net."""

    def make(net: Any, *, version: int = 0, rows: int = 16, max_width: int = 96) -> Any:
        from surefoot.engines.embedded import EmbeddedEngine
        from surefoot.learner.model import decoder_spec

        engine = EmbeddedEngine(decoder_spec(net), rows=rows, max_width=max_width)
        engine.load_weights(dict(net.named_parameters()), version)
        return engine

    return make


@pytest.fixture(scope="session")
def full_logits(make_net: Callable[..., Any]) -> Callable[..., Any]:
    """`full_logits(net, ids)`: (L, V) of one sequence by one plain transformers forward, no cache."""

    def forward(net: Any, ids: Sequence[int]) -> Any:
        import torch

        with torch.no_grad():
            return net(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0]

    return forward


# -- tokenizers and model folders ---------------------------------------------------

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SPECIAL = ("<pad>", "<unk>", "<end>", "<system>", "<user>", "<assistant>")
"""Ids 0 to 5; then the characters."""


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[..., Any]:
    """`make_tokenizer(template=None)`: one token per character, special ids 0 to 5, `<pad>` = 0 and `<end>` = 2."""
    return _make_tokenizer


def _make_tokenizer(*, template: str | None = TEMPLATE, pad: str | None = "<pad>", end: str | None = "<end>") -> Any:
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = "abcdefghijklmnopqrstuvwxyz0123456789+-= ?.!\n"
    vocabulary = {token: i for i, token in enumerate((*SPECIAL, *characters))}
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    core.decoder = tokenizers.decoders.Fuse()
    core.add_special_tokens(list(SPECIAL))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", pad_token=pad, eos_token=end)
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture
def model_folder(tmp_path: Path, make_net: Callable[..., Any]) -> Path:
    """A complete tiny model on disk, safe to damage."""
    folder = tmp_path / "model"
    make_net("llama").save_pretrained(folder)
    _make_tokenizer().save_pretrained(folder)
    return folder


# -- records ------------------------------------------------------------------------


@pytest.fixture(scope="session")
def make_group() -> Callable[..., Group]:
    """`make_group("t", [1.0, 0.0], completions=[(7, 2), (8, 2)])`: one scored group; None is "no verdict"."""
    return _make_group


def _make_group(
    task: str, rewards: Sequence[float | None], *, id: str | None = None, prompt: tuple[int, ...] = (4, 10, 11, 5),
    completions: Sequence[tuple[int, ...]] | None = None, finish: str = STOP, version: int = 0, logprob: float = -1.0,
) -> Group:  # fmt: skip
    name = id or f"train/1/{task}"
    said = completions or [(10 + i, 20 + i, 2) for i in range(len(rewards))]
    rollouts = tuple(
        Rollout(
            task, name, i, (Turn(prompt, said[i], (logprob,) * len(said[i]), version, finish_reason=finish, text="x"),),
            reward=reward, failure="timeout" if reward is None else None,
        )
        for i, reward in enumerate(rewards)
    )  # fmt: skip
    return Group(Task(id=task, prompt="?"), name, rollouts)


@pytest.fixture(scope="session")
def sampled_groups(make_engine: Callable[..., Any]) -> Callable[..., list[TrainSample]]:
    """Samples that a net's own engine drew, weighed: what a learner is fed.

    `sampled_groups(net, rewards=[[1, 0], [1, 1]])` draws one group per list, prompts of different lengths.
    """

    def sample(
        net: Any, rewards: Sequence[Sequence[float]], *, version: int = 0, temperature: float = 1.0, seed: int = 0,
        max_new: int = 9, scale: str = "group", same_length: bool = False,
    ) -> list[TrainSample]:  # fmt: skip
        from surefoot.learner.samples import to_samples
        from surefoot.protocols import Request

        engine = make_engine(net, version=version)
        groups = []
        for g, marks in enumerate(rewards):
            prompt = tuple(3 + (7 * g + 5 * i) % 50 for i in range(6 if same_length else 4 + 5 * g))
            requests = [
                Request(f"{g}/{i}", prompt, max_new, temperature, frozenset({2}), 1000 * seed + 100 * g + i)
                for i in range(len(marks))
            ]
            answers = engine.generate(requests)
            name = f"train/{version}/{g}"
            rollouts = tuple(
                Rollout(
                    f"t{g}", name, i, (Turn(prompt, a.token_ids, a.logprobs, a.version, finish_reason=a.finish_reason),),
                    reward=float(mark),
                )
                for i, (a, mark) in enumerate(zip(answers, marks, strict=True))
            )  # fmt: skip
            groups.append(Group(Task(id=f"t{g}", prompt="?"), name, rollouts))
        return to_samples(groups, scale=scale)

    return sample

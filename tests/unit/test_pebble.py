"""The built-in policy: loadable by plain transformers, as its manifest says, right for its purpose."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import torch
from pebble_kit import ASSETS, maker, read_once, render
from transformers import GenerationConfig

from surefoot.data.heldout import is_heldout
from surefoot.data.sources import sum_task, sums_tasks
from surefoot.records import Task

FOLDER = ASSETS / "pebble"
MANIFEST = json.loads((FOLDER / "manifest.json").read_text())
CHAT = [
    {"role": "system", "content": "Add."},
    {"role": "user", "content": "47+85="},
    {"role": "assistant", "content": "132"},
    {"role": "tool", "content": "right"},
    {"role": "assistant", "content": "done"},
]


tokenizer, model = read_once(FOLDER)


@pytest.fixture(scope="module")
def script() -> Any:
    return maker("pebble")


def heldout(n: int) -> list[Task]:
    return [task for task in sums_tasks(10_000, seed=0) if is_heldout(task.id, 0.1)][:n]


# -- the folder -----------------------------------------------------------------


def test_the_architecture_is_the_one_engines_expect(model: Any) -> None:
    config = model.config
    assert config.model_type == "llama"
    assert (config.num_hidden_layers, config.hidden_size, config.head_dim) == (4, 128, 32)
    assert (config.num_attention_heads, config.num_key_value_heads) == (4, 2)
    assert config.tie_word_embeddings
    count = sum(p.numel() for p in model.parameters())
    assert count == MANIFEST["parameters"]
    assert 1_000_000 <= count <= 2_000_000


# -- the tokenizer --------------------------------------------------------------


def test_generation_defaults_change_no_probability() -> None:
    generation = GenerationConfig.from_pretrained(FOLDER)
    assert (generation.do_sample, generation.temperature, generation.top_k, generation.top_p) == (True, 1.0, 0, 1.0)


@pytest.mark.parametrize("text", ["é", "1é2", "\t", "日本", "🙂"])
def test_an_unknown_character_becomes_unk_and_never_vanishes(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text)
    assert ids.count(tokenizer.unk_token_id) == sum(not (" " <= c <= "~") for c in text)


def test_encoding_adds_no_token_of_its_own(tokenizer: Any) -> None:
    assert tokenizer("12")["input_ids"] == tokenizer("1")["input_ids"] + tokenizer("2")["input_ids"]


# -- the chat template ----------------------------------------------------------


def test_the_template_writes_header_content_end(tokenizer: Any) -> None:
    text = tokenizer.apply_chat_template(CHAT[:2], tokenize=False, add_generation_prompt=True)
    assert text == "<|system|>Add.<|end|><|user|>47+85=<|end|><|assistant|>"


def test_each_turn_extends_the_tokens_before_it(tokenizer: Any) -> None:
    for k in range(1, len(CHAT)):
        shorter, longer = render(tokenizer, CHAT[:k]), render(tokenizer, CHAT[: k + 1])
        assert longer[: len(shorter)] == shorter


def test_the_generation_prompt_is_the_header_of_the_answer(tokenizer: Any) -> None:
    prompt, answered = render(tokenizer, CHAT[:2], prompt=True), render(tokenizer, CHAT[:3])
    assert answered[: len(prompt)] == prompt
    assert answered[-1] == tokenizer.eos_token_id
    assert answered[len(prompt) : -1] == tokenizer("132")["input_ids"]


def test_an_unknown_role_is_refused_not_rendered(tokenizer: Any) -> None:
    with pytest.raises(Exception, match="pebble knows the roles system, user, assistant and tool, not 'critic'"):
        render(tokenizer, [{"role": "critic", "content": "bad"}])


def test_a_message_without_text_is_refused_not_rendered_as_none(tokenizer: Any) -> None:
    with pytest.raises(Exception, match="pebble reads text only"):
        tokenizer.apply_chat_template([{"role": "assistant", "content": None}], tokenize=False)


# -- the warm start -------------------------------------------------------------


def test_the_warm_start_leaves_something_to_learn_and_something_to_learn_from(
    script: Any, model: Any, tokenizer: Any
) -> None:
    """Exact probabilities on held-out tasks: seldom chosen, mostly not preferred, yet within reach of 16 tries."""
    figures = script.measure(model, tokenizer, heldout(400))
    assert 0.15 <= figures["sampled_accuracy"] <= 0.30
    assert figures["greedy_accuracy"] <= 0.5
    assert figures["pass_at_16"] >= 0.9


def test_measured_probabilities_are_those_of_plain_sampling(script: Any, model: Any, tokenizer: Any) -> None:
    """The figure above is computed; here the same model samples, through `generate`, as a stranger would."""
    tasks = [task for task in heldout(400) if len(str(task.prompt)) == 6][:100]
    prompts = torch.tensor([render(tokenizer, [dict(m) for m in task.messages()], prompt=True) for task in tasks])
    torch.manual_seed(0)
    out = model.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=6, num_return_sequences=8)
    answers = tokenizer.batch_decode(out[:, prompts.shape[1] :], skip_special_tokens=True)
    right = [answer == tasks[row // 8].columns["answer"] for row, answer in enumerate(answers)]
    assert sum(right) / len(right) == pytest.approx(
        script.measure(model, tokenizer, tasks)["sampled_accuracy"], abs=0.06
    )


def test_the_faulty_teacher_is_wrong_in_a_systematic_way(script: Any) -> None:
    rng = random.Random(0)
    carry, plain = sum_task(47, 85), sum_task(12, 34)
    told = [script.faulty_answer(carry, rng) for _ in range(2000)]
    assert told.count("132") / 2000 == pytest.approx(script.RIGHT, abs=0.04)
    assert told.count("122") > told.count("132")
    told = [script.faulty_answer(plain, rng) for _ in range(2000)]
    assert told.count("56") > told.count("46") > 200


def test_the_manifest_tells_how_it_was_made(script: Any) -> None:
    made = MANIFEST["made"]
    assert made["learn"] == {"steps": script.LEARN_STEPS, "learning_rate": script.LEARN_RATE}
    assert made["blur"]["steps"] == script.BLUR_STEPS
    assert (made["blur"]["right"], made["blur"]["systematic"]) == (script.RIGHT, script.SYSTEMATIC)
    assert MANIFEST["measured"]["after_learning"]["greedy_accuracy"] >= 0.9


def test_the_tokenizer_in_the_folder_is_the_one_the_script_makes(script: Any, tokenizer: Any) -> None:
    made = script.make_tokenizer()
    assert made.get_vocab() == tokenizer.get_vocab()
    assert made.chat_template.strip() == tokenizer.chat_template.strip()

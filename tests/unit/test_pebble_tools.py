"""The built-in policy that knows tools: loadable, as its manifest says, able to call and not yet wise."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from pebble_kit import ASSETS, maker, read_once, render

from surefoot.data.heldout import is_heldout
from surefoot.data.sources import CALCULATOR, KINDS, errands_tasks, multiplication_task, reversal_task
from surefoot.errors import ModelError
from surefoot.learner import model as load
from surefoot.learner.chat import ChatCodec
from surefoot.learner.model import load_policy
from surefoot.records import Task
from surefoot.tools.parsing import parse_calls

FOLDER = ASSETS / "pebble_tools"
MANIFEST = json.loads((FOLDER / "manifest.json").read_text())
CALL = '<tool_call>{"name": "calculator__evaluate", "arguments": {"expression": "347*86"}}</tool_call>'
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Answer."},
    {"role": "user", "content": "347*86="},
    {"role": "assistant", "content": CALL},
    {"role": "tool", "content": "29842"},
    {"role": "assistant", "content": "29842"},
]


tokenizer, model = read_once(FOLDER)


@pytest.fixture(scope="module")
def script() -> Any:
    return maker("pebble_tools")


@pytest.fixture(scope="module")
def heldout() -> list[Task]:
    return [task for task in errands_tasks(2000, seed=0) if is_heldout(task.id, 0.1)][:160]


# -- the folder -----------------------------------------------------------------


def test_it_loads_by_its_name() -> None:
    policy = load_policy("pebble_tools", base=Path(), device="cpu", dtype="float32")
    assert policy.name == "pebble_tools"
    assert policy.stop_ids == {policy.tokenizer.eos_token_id}
    assert sum(p.numel() for p in policy.model.parameters()) == MANIFEST["parameters"]


def test_a_damaged_file_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in FOLDER.iterdir():
        if path.is_file():
            (tmp_path / path.name).write_bytes(path.read_bytes())
    weights = tmp_path / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    monkeypatch.setattr(load, "PEBBLE_TOOLS", tmp_path)
    with pytest.raises(ModelError, match=r"model\.safetensors of the built-in model"):
        load_policy("pebble_tools", base=Path(), device="cpu", dtype="float32")


# -- the tokenizer --------------------------------------------------------------


def test_a_call_costs_four_tokens_and_the_expression(tokenizer: Any) -> None:
    ids = tokenizer(CALL)["input_ids"]
    assert len(ids) == 4 + len("347*86")
    assert not set(ids) & set(tokenizer.all_special_ids), "a special token would vanish when tokens become text"
    assert tokenizer.decode(ids, skip_special_tokens=True) == CALL


def test_the_call_is_read_by_the_parser_of_the_loop(script: Any) -> None:
    assert script.call_text("347*86") == CALL
    (call,) = parse_calls(CALL).calls
    assert (call.name, call.arguments) == (CALCULATOR, {"expression": "347*86"})


# -- the chat template ----------------------------------------------------------


def test_the_template_writes_header_content_end(tokenizer: Any) -> None:
    text = tokenizer.apply_chat_template(CHAT[1:4], tokenize=False, add_generation_prompt=True)
    assert text == f"<|user|>347*86=<|end|><|assistant|>{CALL}<|end|><|tool|>29842<|end|><|assistant|>"


def test_each_turn_extends_the_tokens_before_it(tokenizer: Any) -> None:
    for k in range(1, len(CHAT)):
        shorter, longer = render(tokenizer, CHAT[:k]), render(tokenizer, CHAT[: k + 1])
        assert longer[: len(shorter)] == shorter


@pytest.mark.parametrize("arguments", [{"expression": "347*86"}, '{"expression": "347*86"}'], ids=["object", "text"])
@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize("content", ["", None])
def test_structured_calls_are_rendered_as_the_text_the_model_writes(
    tokenizer: Any, arguments: object, wrapped: bool, content: str | None
) -> None:
    call: dict[str, Any] = {"name": CALCULATOR, "arguments": arguments}
    message = {
        "role": "assistant",
        "content": content,
        "tool_calls": [{"type": "function", "function": call} if wrapped else call],
    }
    assert render(tokenizer, [*CHAT[:2], message]) == render(tokenizer, CHAT[:3])


def test_tools_that_are_given_change_nothing(tokenizer: Any) -> None:
    tools = [{"type": "function", "function": {"name": CALCULATOR, "description": "d", "parameters": {}}}]
    bare = tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert tokenizer.apply_chat_template(CHAT, tools=tools, tokenize=False) == bare


def test_an_unknown_role_is_refused_not_rendered(tokenizer: Any) -> None:
    with pytest.raises(Exception, match="pebble_tools knows the roles system, user, assistant and tool, not 'critic'"):
        render(tokenizer, [{"role": "critic", "content": "bad"}])


@pytest.mark.parametrize("calls", [None, []])
def test_a_message_without_text_is_refused_not_rendered_as_none(tokenizer: Any, calls: object) -> None:
    with pytest.raises(Exception, match="pebble_tools reads text only"):
        tokenizer.apply_chat_template([{"role": "assistant", "content": None, "tool_calls": calls}], tokenize=False)


def test_the_loop_can_append_answers_without_writing_history_again(tokenizer: Any, model: Any) -> None:
    codec = ChatCodec(tokenizer, frozenset({tokenizer.eos_token_id}), model.config.vocab_size, max_reply_tokens=64)
    said = tuple(tokenizer(CALL + "<|end|>")["input_ids"])
    whole = (*codec.encode_prompt(CHAT[1:2]), *said, *codec.encode_replies(["29842"]))
    assert list(whole) == render(tokenizer, CHAT[1:4], prompt=True)


# -- the warm start -------------------------------------------------------------


EPISODE = [(str(m["role"]), str(m["content"])) for m in CHAT[1:]]


def trained_text(script: Any, tokenizer: Any, **keys: bool) -> str:
    """What carries loss in an episode with a call, when a shorter one stands beside it."""
    labels = script.encode(tokenizer, [EPISODE, EPISODE[:2]], **keys)[1][0]
    return str(tokenizer.decode(labels[labels != script.IGNORED]))


def test_what_is_trained_is_what_the_assistant_writes_and_nothing_else(script: Any, tokenizer: Any) -> None:
    assert script.encode(tokenizer, [EPISODE])[0][0].tolist() == render(tokenizer, CHAT[1:])
    assert trained_text(script, tokenizer) == f"{CALL}<|end|>29842<|end|>"
    assert trained_text(script, tokenizer, last_only=True) == "29842<|end|>"


def test_planted_bug_loss_on_the_tools_words_is_seen(
    script: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Teeth: take the tool's answer for something the assistant wrote."""
    real = script._tokens

    def careless(tokenizer: Any, episode: list[tuple[str, str]], last_only: bool) -> Any:
        return real(tokenizer, [("assistant" if role == "tool" else role, text) for role, text in episode], last_only)

    monkeypatch.setattr(script, "_tokens", careless)
    assert trained_text(script, tokenizer) != f"{CALL}<|end|>29842<|end|>"


def test_the_start_calls_seldom_and_as_often_for_both_kinds(
    script: Any, model: Any, tokenizer: Any, heldout: list[Task]
) -> None:
    """Exact probabilities on held-out tasks, so that what a run learns is its own work."""
    found = script.measure_kinds(model, tokenizer, heldout)
    for kind in KINDS:
        assert 0.10 <= found[kind]["call_rate"] <= 0.22, kind
        assert found[kind]["well_formed_calls"] >= 0.9, kind
    assert found["times"]["right_without_call"] <= 0.05
    assert found["times"]["right_after_call"] >= 0.9
    assert 0.2 <= found["turn"]["right_without_call"] <= 0.42
    assert found["turn"]["right_after_call"] <= 0.42
    assert sum(found[kind]["success"] for kind in KINDS) / 2 <= 0.33


def test_measured_call_rates_are_those_of_plain_sampling(script: Any, model: Any, tokenizer: Any) -> None:
    """The figures above are computed; here the same model samples, through `generate`, as a stranger would."""
    tasks = [reversal_task(f"{number:04d}") for number in range(17, 10_000, 199)]
    prompts = torch.tensor([render(tokenizer, [dict(m) for m in task.messages()], prompt=True) for task in tasks])
    torch.manual_seed(0)
    out = model.generate(prompts, attention_mask=torch.ones_like(prompts), max_new_tokens=6, num_return_sequences=16)
    said = tokenizer.batch_decode(out[:, prompts.shape[1] :], skip_special_tokens=True)
    called = sum(text.startswith("<tool_call>") for text in said) / len(said)
    right = sum(text == tasks[row // 16].columns["answer"] for row, text in enumerate(said)) / len(said)
    found = script.measure(model, tokenizer, tasks)
    assert called == pytest.approx(found["call_rate"], abs=0.05)
    assert right == pytest.approx(found["right_without_call"] * (1 - found["call_rate"]), abs=0.06)


def test_the_faulty_teacher_calls_by_chance_and_errs_in_a_systematic_way(script: Any) -> None:
    rng = random.Random(0)
    for task, right in ((multiplication_task(347, 86), "29842"), (reversal_task("4821"), "1284")):
        told = [script.faulty(task, rng) for _ in range(2000)]
        direct = [episode[1][1] for episode in told if len(episode) == 2]
        assert 1 - len(direct) / 2000 == pytest.approx(script.CALLS, abs=0.04)
        share = direct.count(right) / len(direct)
        assert share == pytest.approx(0.0 if task.columns["kind"] == "times" else script.RIGHT, abs=0.04)
    assert direct.count("1824") > direct.count("1284"), "only the ends exchanged is its favourite"


def test_the_tool_answers_a_product_and_complains_of_the_rest(script: Any) -> None:
    assert script.calculator("347*86") == "29842"
    assert "cannot read" in script.calculator("turn 4821")


def test_the_manifest_tells_how_it_was_made(script: Any) -> None:
    made, measured = MANIFEST["made"], MANIFEST["measured"]
    assert (made["learn"]["steps"], made["learn"]["learning_rate"]) == (script.LEARN_STEPS, script.LEARN_RATE)
    assert (made["blur"]["steps"], made["blur"]["calls"]) == (script.BLUR_STEPS, script.CALLS)
    assert (made["blur"]["right"], made["blur"]["systematic"]) == (script.RIGHT, script.SYSTEMATIC)
    assert measured["after_learning"]["turn"]["right_without_call"] >= 0.95
    assert measured["after_learning"]["times"]["right_after_call"] >= 0.95


def test_the_tokenizer_in_the_folder_is_the_one_the_script_makes(script: Any, tokenizer: Any) -> None:
    made = script.make_tokenizer()
    assert made.get_vocab() == tokenizer.get_vocab()
    assert made.chat_template.strip() == tokenizer.chat_template.strip()

"""What vLLM is told, where its tensors lie, and who keeps count: all that can be tried without vLLM."""

from __future__ import annotations

import dataclasses
import json
import math
import threading
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from surefoot.engines.vllm_engine import (
    VllmCore,
    VllmEngine,
    VllmSettings,
    check_request,
    check_settings,
    described_model,
    engine_fields,
    sampling_fields,
)
from surefoot.engines.vllm_requests import MAX_TRIES, VllmOutput, VllmRequests
from surefoot.engines.vllm_worker import build_layout, check_weights, read_back
from surefoot.errors import ConfigError, EngineError, NumericsError
from surefoot.protocols import Request
from surefoot.records import LENGTH, STOP

CONFIG: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 50, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "rope_parameters": {"rope_theta": 10000.0},
}  # fmt: skip
WEIGHTS = {"w": torch.ones(2)}


def settings(**changes: Any) -> VllmSettings:
    return dataclasses.replace(VllmSettings(config=CONFIG, max_width=64, rows=8), **changes)


def ask(name: str = "a", **changes: Any) -> Request:
    request = Request(name, (5, 6, 7), max_new_tokens=3, temperature=1.0, stop_ids=frozenset({2}), seed=1)
    return dataclasses.replace(request, **changes)


# -- what is told -----------------------------------------------------------------------------


def test_a_config_with_sampling_hints_tells_vllm_the_models_numbers_only() -> None:
    hostile = CONFIG | {
        "temperature": 0.1,
        "top_k": 1,
        "repetition_penalty": 2.0,
        "eos_token_id": 7,
        "auto_map": {"x": "y"},
    }
    assert described_model(settings(config=hostile)) == described_model(settings())
    told = json.loads(described_model(settings()))
    assert told["architectures"] == ["LlamaForCausalLM"]
    assert CONFIG.items() <= told.items()


def test_vllm_starts_without_weights_tokenizer_or_defaults_of_a_folder() -> None:
    fields = engine_fields(settings(), "folder")
    assert fields["load_format"] == "dummy"
    assert fields["generation_config"] == "vllm"
    assert (fields["skip_tokenizer_init"], fields["trust_remote_code"]) == (True, False)
    assert (fields["enable_prefix_caching"], fields["async_scheduling"]) == (True, False)
    assert fields["logprobs_mode"] == "processed_logprobs"
    assert (fields["max_model_len"], fields["max_num_seqs"]) == (64, 8)


def test_a_gpu_is_shared_by_its_fraction_and_a_cpu_by_bytes() -> None:
    cpu, gpu = (engine_fields(settings(device=d, gpu_memory_utilization=0.3), "f") for d in ("cpu", "cuda"))
    assert gpu["kv_cache_memory_bytes"] is None
    assert (gpu["gpu_memory_utilization"], gpu["enforce_eager"]) == (0.3, False)
    assert (cpu["kv_cache_memory_bytes"], cpu["enforce_eager"]) == (16 << 20, True)
    wide = settings(rows=256, config=CONFIG | {"num_hidden_layers": 64, "head_dim": 128})
    # 2 (keys, values) x 64 layers x 2 heads x 128 wide x 4 bytes x 64 tokens x 256 rows, and as much again
    assert wide.cache_bytes == 2 * (2 * 64 * 2 * 128 * 4 * 64 * 256)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"device": "mps"}, "float32 on mps"),
        ({"dtype": "float16"}, "float16 on cpu"),
        ({"max_width": 129}, "context is 128"),
        ({"rows": 0}, "0 rows"),
        ({"config": CONFIG | {"model_type": "mamba"}}, "'mamba' has no known place"),
    ],
)
def test_settings_that_vllm_cannot_keep_are_refused_before_it_starts(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_settings(settings(**changes))


def test_the_requests_own_numbers_are_in_the_fields_and_the_rest_is_neutral() -> None:
    fields = sampling_fields(ask(temperature=0.7, stop_ids=frozenset({9, 2}), seed=11))
    assert (fields["temperature"], fields["seed"], fields["max_tokens"]) == (0.7, 11, 3)
    assert (fields["stop_token_ids"], fields["ignore_eos"], fields["stop"]) == ([2, 9], True, None)
    assert (fields["top_p"], fields["top_k"], fields["min_p"]) == (1.0, 0, 0.0)
    assert (fields["presence_penalty"], fields["frequency_penalty"], fields["repetition_penalty"]) == (0.0, 0.0, 1.0)
    assert (fields["logprobs"], fields["detokenize"]) == (0, False)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"temperature": 0.009}, "temperature"),
        ({"temperature": 2.01}, "temperature"),
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**63}, "seed"),
        ({"prompt_ids": ()}, "room for"),
        ({"max_new_tokens": 0}, "room for"),
        ({"max_new_tokens": 62}, "room for"),
        ({"prompt_ids": (50,)}, "outside"),
        ({"stop_ids": frozenset({-1})}, "outside"),
    ],
)
def test_a_request_that_vllm_would_answer_differently_is_refused(changes: dict[str, Any], said: str) -> None:
    check_request(ask(), vocab=50, max_width=64)
    check_request(ask(max_new_tokens=61), vocab=50, max_width=64)
    check_request(ask(temperature=0.0), vocab=50, max_width=64)
    with pytest.raises(EngineError, match=said):
        check_request(ask(**changes), vocab=50, max_width=64)


def test_without_vllm_the_engine_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "vllm", None)
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_CONFIGURE_LOGGING", "VLLM_NO_USAGE_STATS", "DO_NOT_TRACK"):
        monkeypatch.setenv(name, "")
    with pytest.raises(ConfigError, match="vLLM cannot be imported"):
        VllmCore(settings())


# -- where tensors lie ------------------------------------------------------------------------


class Fused(torch.nn.Module):
    """A little model that fuses and pads as vLLM does."""

    packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = torch.nn.Embedding(64, 4)
        self.embed_tokens.org_vocab_size = 50
        self.attn = torch.nn.Module()
        self.attn.qkv_proj = torch.nn.Linear(4, 8)
        self.attn.qkv_proj.output_sizes = [4, 2, 2]
        self.norm = torch.nn.LayerNorm(4, bias=False)


SHAPES = {
    "embed_tokens.weight": (50, 4), "attn.q_proj.weight": (4, 4), "attn.k_proj.weight": (2, 4),
    "attn.v_proj.weight": (2, 4), "attn.q_proj.bias": (4,), "attn.k_proj.bias": (2,), "attn.v_proj.bias": (2,),
    "norm.weight": (4,),
}  # fmt: skip


def test_every_hugging_face_tensor_has_its_rows_in_the_fused_model() -> None:
    model = Fused()
    layout = build_layout(model)
    assert {name: place.shape for name, place in layout.items()} == SHAPES
    found = read_back(model, layout)
    fused = model.attn.qkv_proj
    assert torch.equal(found["attn.k_proj.weight"], fused.weight[4:6])
    assert torch.equal(found["attn.v_proj.bias"], fused.bias[6:8])
    assert torch.equal(found["embed_tokens.weight"], model.embed_tokens.weight[:50])
    assert found["norm.weight"].data_ptr() == model.norm.weight.data_ptr(), "a view, not a copy"


def test_what_is_missing_unknown_misshapen_or_of_another_dtype_is_named() -> None:
    layout = build_layout(Fused())
    good = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    check_weights(layout, good, torch.float32)
    bad = {
        "norm.weight is missing": {n: v for n, v in good.items() if n != "norm.weight"},
        "lm_foot.weight has no place": good | {"lm_foot.weight": torch.zeros(1)},
        r"attn.q_proj.bias is torch.float32 \(2,\)": good | {"attn.q_proj.bias": torch.zeros(2)},
        "norm.weight is torch.bfloat16": good | {"norm.weight": torch.zeros(4, dtype=torch.bfloat16)},
    }
    for said, weights in bad.items():
        with pytest.raises(EngineError, match=said):
            check_weights(layout, weights, torch.float32)
    with pytest.raises(EngineError, match="adapters are not served"):
        check_weights(layout, good | {"attn.q_proj.lora_A.weight": torch.zeros(1)}, torch.float32)


# -- who keeps count --------------------------------------------------------------------------


class Script:
    """A core that draws what it is told: one list of `(tokens, finished)` per time that a request is added."""

    def __init__(self, *plays: Sequence[tuple[tuple[int, ...], str | None]]) -> None:
        self.plays = list(plays)
        self.running: dict[str, list[tuple[tuple[int, ...], str | None]]] = {}
        self.aborted: list[str] = []
        self.loaded: Any = None
        self.closed = 0
        self.logprob = -0.5
        self.fault: Exception | None = None

    def add(self, key: str, request: Request) -> None:
        self.running[key] = list(self.plays.pop(0) if self.plays else [((9,), None), ((2,), "stop")])

    def abort(self, keys: Sequence[str]) -> None:
        self.aborted += keys
        for key in keys:
            self.running.pop(key, None)

    def step(self) -> list[VllmOutput]:
        if self.fault is not None:
            raise self.fault
        drawn = []
        for key, play in list(self.running.items()):
            tokens, finished = play.pop(0)
            drawn.append(VllmOutput(key, tokens, (self.logprob,) * len(tokens), finished))
            if finished is not None:
                del self.running[key]
        return drawn

    def check(self, weights: Mapping[str, Any]) -> None: ...

    def load(self, weights: Mapping[str, Any]) -> None:
        self.loaded = dict(weights)

    def read_back(self) -> dict[str, torch.Tensor]:
        return dict(self.loaded)

    def log_tail(self, lines: int = 50) -> str:
        return "its log"

    def close(self) -> None:
        self.closed += 1


def rows(core: Script, version: int | None = 1) -> VllmRequests:
    made = VllmRequests(core, lambda request: check_request(request, vocab=50, max_width=64))
    if version is not None:
        made.load_weights(WEIGHTS, version)
    return made


def finish(engine: VllmRequests, steps: int = 20) -> dict[int, Any]:
    done: dict[int, Any] = {}
    for _ in range(steps):
        done |= engine.advance()
    return done


def test_a_completion_is_stamped_with_its_first_and_last_weights() -> None:
    engine = rows(Script([((9,), None), ((8,), None), ((2,), "stop")]))
    (ticket,) = engine.enter([ask()])
    engine.advance()
    engine.load_weights(WEIGHTS, 2)
    engine.advance()
    engine.load_weights(WEIGHTS, 5)
    answer = engine.advance()[ticket]
    assert (answer.token_ids, answer.version, answer.version_end) == ((9, 8, 2), 1, 5)
    assert (answer.finish_reason, answer.logprobs) == (STOP, (-0.5, -0.5, -0.5))


def test_an_end_token_at_the_last_place_is_an_end() -> None:
    engine = rows(Script([((9, 9), None), ((2,), "length")], [((9, 9), None), ((9,), "length")]))
    first, second = engine.enter([ask("a"), ask("b")])
    done = finish(engine, 2)
    assert (done[first].finish_reason, done[second].finish_reason) == (STOP, LENGTH)


def test_an_empty_answer_is_asked_for_again_a_fixed_number_of_times() -> None:
    core = Script([((), "abort")], [((9,), None), ((9,), "abort")], [((8,), None), ((2,), "stop")])
    engine = rows(core)
    (ticket,) = engine.enter([ask()])
    answer = finish(engine, 6)[ticket]
    assert answer.token_ids == (8, 2), "nothing of what was drawn before"
    broken = rows(Script(*[[((), "abort")]] * MAX_TRIES))
    broken.enter([ask()])
    with pytest.raises(EngineError, match=f"ended it {MAX_TRIES} times.*0 tokens and 'abort'"):
        finish(broken)


@pytest.mark.parametrize(
    ("play", "said"),
    [
        ([((2, 9), "length")], "went on after the end"),
        ([((9, 9, 9, 9), "length")], "went on after the end"),
    ],
)
def test_tokens_after_the_end_are_refused(play: Any, said: str) -> None:
    engine = rows(Script(play))
    engine.enter([ask()])
    with pytest.raises(EngineError, match=said):
        engine.advance()


def test_a_logprob_that_is_missing_or_not_finite_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    core = Script()
    engine = rows(core)
    engine.enter([ask()])
    core.logprob = math.nan
    with pytest.raises(NumericsError, match="not finite at version 1"):
        engine.advance()
    engine.leave()
    monkeypatch.setattr(core, "step", lambda: [VllmOutput(key, (9,), (), None) for key in core.running])
    engine.enter([ask()])
    with pytest.raises(EngineError, match="1 tokens came with 0 logprobs"):
        engine.advance()


def test_nothing_is_asked_before_weights_were_handed_over() -> None:
    core = Script()
    engine = rows(core, version=None)
    with pytest.raises(EngineError, match="no weights yet"):
        engine.enter([ask()])
    assert core.running == {}


def test_one_refused_request_keeps_its_siblings_out() -> None:
    core = Script()
    engine = rows(core)
    with pytest.raises(EngineError, match="temperature"):
        engine.enter([ask("good"), ask("bad", temperature=3.0)])
    assert not engine.busy
    assert core.running == {}


def test_who_leaves_is_aborted_and_heard_of_no_more() -> None:
    core = Script()
    engine = rows(core)
    tickets = engine.enter([ask(f"r{i}") for i in range(3)])
    engine.leave([tickets[1]])
    assert len(core.aborted) == 1
    assert finish(engine, 2).keys() == {tickets[0], tickets[2]}


def test_weights_that_read_back_differently_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Teeth: without the comparison the version would be 2."""
    core = Script()
    engine = rows(core)
    monkeypatch.setattr(core, "read_back", lambda: {"w": torch.ones(2) + 1e-7})
    with pytest.raises(EngineError, match="1 of 1 tensors of version 2 are not in vLLM's memory, first w"):
        engine.load_weights(WEIGHTS, 2)
    with pytest.raises(EngineError, match="no weights yet"):
        engine.enter([ask()])


def test_a_core_that_raises_is_dead_for_everybody_and_closed_once() -> None:
    core = Script()
    engine = rows(core)
    engine.enter([ask()])
    core.fault = RuntimeError("CUDA error: an illegal memory access")
    with pytest.raises(EngineError, match="vLLM died: RuntimeError: CUDA error") as caught:
        engine.advance()
    assert "its log" in caught.value.why
    core.fault = None
    for attempt in (lambda: engine.enter([ask()]), engine.advance, lambda: engine.load_weights(WEIGHTS, 3)):
        with pytest.raises(EngineError, match="vLLM died"):
            attempt()
    engine.leave()
    engine.close()
    assert core.closed == 1


# -- the engine as a whole, on a core that is a script ------------------------------------------


@pytest.fixture
def made() -> Any:
    engines: list[VllmEngine] = []

    def make(core: Script) -> VllmEngine:
        engines.append(VllmEngine(CONFIG, max_width=64, rows=4, make_core=lambda _: core))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def test_weights_are_prepared_then_committed_and_nothing_changes_in_between(made: Any) -> None:
    core = Script()
    engine = made(core)
    engine.load_weights(WEIGHTS, 1)
    sums = engine.prepare({"w": torch.zeros(2)}, 2)
    assert sums.keys() == {"w"}
    assert torch.equal(core.loaded["w"], torch.ones(2))
    assert engine.generate([ask()])[0].version == 1
    assert engine.commit(2) == sums == engine.between_tokens(lambda inner: inner.read_back())
    assert engine.generate([ask()])[0].version == 2
    with pytest.raises(EngineError, match="prepared was nothing"):
        engine.commit(2)


def test_the_dead_engines_last_words_reach_whoever_waits(made: Any) -> None:
    core = Script()
    engine = made(core)
    engine.load_weights(WEIGHTS, 1)
    engine.pause()
    future = engine.submit([ask(f"r{i}") for i in range(5)])
    core.fault = OSError("gone")
    engine.resume()
    with pytest.raises(EngineError, match="vLLM died: OSError: gone"):
        future.result(20)
    with pytest.raises(EngineError, match="vLLM died"):
        engine.generate([ask()])


def test_after_close_there_is_no_thread(made: Any) -> None:
    engine = made(Script())
    engine.load_weights(WEIGHTS, 1)
    engine.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "surefoot-vllm"]
    with pytest.raises(EngineError):
        engine.generate([ask()])


def test_sleeping_forgets_the_weights_and_refuses_while_somebody_is_answered(made: Any) -> None:
    core = Script()
    core.sleep = core.wake = lambda: None  # type: ignore[attr-defined]
    engine = made(core)
    engine.load_weights(WEIGHTS, 1)
    engine.sleep()
    engine.wake()
    with pytest.raises(EngineError, match="no weights yet"):
        engine.generate([ask()])
    engine.load_weights(WEIGHTS, 2)
    future = engine.submit([ask()])
    engine.pause("wait")
    engine.resume()
    assert future.result(20)[0].version == 2


def test_sleep_is_refused_where_vllm_cannot() -> None:
    core = object.__new__(VllmCore)
    core.settings = settings(sleep_mode=True)
    core._engine = SimpleNamespace(sleep=lambda level: pytest.fail("asked to sleep on a CPU"))
    with pytest.raises(EngineError, match="cannot sleep here"):
        core.sleep()

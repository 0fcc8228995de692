"""vLLM's own server: evaluated with as it is, trained with when it was started for that."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from vllm_asking import END, ask, crowd, gaps, tokens

from surefoot.engines.openai import HttpClient, HttpLimits
from surefoot.errors import ConfigError, EngineError

if TYPE_CHECKING:
    from surefoot.engines.openai import OpenAIEngine

HOSTILE = {"temperature": 0.1, "top_k": 1, "repetition_penalty": 2.0, "top_p": 0.1, "min_p": 0.5, "eos_token_id": 5}


@pytest.fixture(scope="module")
def address(repo: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """A real server on loopback, on a model folder with a hostile generation_config.json, which vLLM obeys."""
    root = tmp_path_factory.mktemp("server")
    model, weights = root / "model", root / "weights"
    shutil.copytree(repo / "src/surefoot/assets/pebble", model)
    weights.mkdir(mode=0o700)
    (model / "generation_config.json").write_text(json.dumps(HOSTILE))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", "pebble",
        "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager", "--max-model-len", "160",
        "--max-num-seqs", "16", "--kv-cache-memory-bytes", str(32 << 20), "--block-size", "32",
        "--enable-prefix-caching", "--logprobs-mode", "processed_logprobs", "--worker-extension-cls",
        "surefoot.engines.vllm_worker.WeightsFromFile",
    ]  # fmt: skip
    own = {
        "PYTHONPATH": str(repo / "src"), "SUREFOOT_WEIGHTS_DIR": str(weights), "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",  # compiling one line of vLLM's sampler takes a minute
    }  # fmt: skip
    environment = {k: v for k, v in os.environ.items() if not k.startswith("VLLM_")} | own
    with (root / "log").open("wb") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log, cwd=root, start_new_session=True)
    url = f"http://127.0.0.1:{port}/v1"
    try:
        waiting = HttpClient(url, HttpLimits(deadline_s=600, tries=10_000, pause_s=0.25))
        assert waiting.get("/v1/models"), (root / "log").read_text()[-3000:]
        yield url, weights
    finally:
        os.killpg(server.pid, 15)
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, 9)
            server.wait()


@pytest.fixture
def remote(address: tuple[str, Path], learner: Any) -> Iterator[OpenAIEngine]:
    """An engine on that server, with the model's own weights as version 0."""
    from surefoot.engines.openai import OpenAIEngine

    url, weights = address
    engine = OpenAIEngine(url, weights_folder=weights)
    engine.require_training()
    engine.load_weights(learner.weights(), 0)
    yield engine
    assert engine.in_flight == 0
    engine.close()
    assert list(weights.iterdir()) == [], "weights are taken away when they were read"


@pytest.mark.parametrize("temperature", [0.7, 1.0, 0.0], ids=str)
def test_a_hostile_generation_config_has_no_say(remote: OpenAIEngine, learner: Any, temperature: float) -> None:
    """Logprobs are those of the temperature that was asked for, over the whole vocabulary."""
    requests = crowd(6, temperature=temperature, stop_ids=END)
    answers = remote.generate(requests)
    assert max(gaps(learner, requests, answers, temperature or 1.0)) < 1e-4
    if temperature:
        assert len({a.token_ids for a in remote.generate([ask("x", seed=s) for s in range(6)])}) > 1, "top_k was 1"


def test_a_server_for_evaluation_needs_nothing_but_token_ids(address: tuple[str, Path]) -> None:
    from surefoot.engines.openai import OpenAIEngine

    engine = OpenAIEngine(address[0], "pebble", version=7)
    answers = engine.generate(crowd(3, stop_ids=END))
    assert {(a.version, a.version_end) for a in answers} == {(7, 7)}
    assert all(len(a.token_ids) == len(a.logprobs) > 0 for a in answers)
    with pytest.raises(EngineError, match="not checked for training"):
        engine.load_weights({}, 8)
    engine.close()
    with pytest.raises(ConfigError, match=r"serves pebble, not 'gravel'"):
        OpenAIEngine(address[0], "gravel")


def test_weights_arrive_tied_head_and_cached_prefixes_included(remote: OpenAIEngine, learner: Any) -> None:
    requests = crowd(8, length=70)  # two whole blocks of each are cached
    before = remote.generate(requests)
    assert max(gaps(learner, requests, before, 1.0)) < 1e-4
    with torch.no_grad():
        for value in learner.net.parameters():
            value.mul_(1.1)
    assert max(gaps(learner, requests, remote.generate(requests), 1.0)) > 0.01, "the old weights are not these"
    remote.load_weights(learner.weights(), 1)
    after = remote.generate(requests)
    assert max(gaps(learner, requests, after, 1.0)) < 1e-4
    assert tokens(after) != tokens(before)
    assert {(a.version, a.version_end) for a in after} == {(1, 1)}


def test_what_a_sync_aborts_is_asked_again_unseen(remote: OpenAIEngine, learner: Any) -> None:
    future = remote.submit(crowd(48, max_new_tokens=120))
    remote.pause("abort")
    remote.load_weights(learner.weights(), 1)
    remote.resume()
    answers = future.result(120)
    assert [len(a.token_ids) for a in answers] == [120] * 48, "whole, whoever was interrupted"
    ends = [a.version_end for a in answers]
    assert set(ends) <= {0, 1}
    assert 1 in ends, "a quick one may have been done before the sync; not all of them were"


def test_a_tensor_that_is_left_out_is_refused_by_the_server(remote: OpenAIEngine, learner: Any) -> None:
    weights = dict(learner.weights())
    del weights["model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(EngineError, match="refused with 500") as caught:
        remote.load_weights(weights, 1)
    assert "tensors, the first sync held" in caught.value.why
    assert remote.version == 0
    assert len(remote.generate(crowd(1))) == 1


def test_files_elsewhere_are_not_read(remote: OpenAIEngine, tmp_path: Path, address: tuple[str, Path]) -> None:
    from safetensors.torch import save_file

    save_file({"x": torch.zeros(1)}, tmp_path / "x.safetensors")
    (address[1] / "link.safetensors").symlink_to(tmp_path / "x.safetensors")
    try:
        for file in (str(tmp_path / "x.safetensors"), "../x.safetensors", "link.safetensors", "x.txt", ""):
            body = {"method": "surefoot_prepare", "args": [file, "1"]}
            with pytest.raises(EngineError) as caught:
                remote.client.post("/collective_rpc", body, tries=1)
            assert "is no safetensors file" in caught.value.why
    finally:
        (address[1] / "link.safetensors").unlink()

"""Keys of `[engine]` that choose who samples: config in, engine (or what builds it) out."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from surefoot.engines.embedded import EmbeddedEngine
from surefoot.engines.vllm_engine import VllmSettings, engine_fields
from surefoot.errors import ConfigError
from surefoot.learner.model import Policy, load_policy
from surefoot.run.build import engine_spec
from surefoot.run.model import learner_settings


@pytest.fixture(scope="module")
def policy() -> Policy:
    return load_policy("pebble", base=Path(), device="cpu", dtype="float32")


@pytest.fixture
def server() -> Iterator[tuple[str, list[str]]]:
    """A server that lists one model and can do nothing else; its address, and what was asked of it."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            asked.append(self.path)
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            known = self.path == "/v1/models"
            data = json.dumps({"data": [{"id": "pebble"}]} if known else {"error": "no"}).encode()
            self.send_response(200 if known else 404)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = answer

        def log_message(self, *_: Any) -> None: ...

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    yield f"http://127.0.0.1:{http.server_port}/v1", asked
    http.shutdown()
    http.server_close()


@pytest.mark.config_key("cuda_kernels")
@pytest.mark.parametrize("key", [True, False])
def test_the_key_reaches_engine_and_learner(
    key: bool, configure: Any, policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configure(cuda_kernels=key).config
    asked: list[bool] = []
    monkeypatch.setattr("surefoot.engines.graphs.embedded_engine", lambda *_, graphs, **__: asked.append(graphs))
    monkeypatch.setattr("surefoot.engines.serving.EngineLoop", lambda engine, **_: engine)
    engine_spec(config, policy, 64).build()
    assert asked == [key]
    assert learner_settings(config, 0).cuda_kernels == key


@pytest.mark.config_key("engine.kind")
def test_the_kind_decides_which_engine_is_built(configure: Any, policy: Policy) -> None:
    plain: Any = engine_spec(configure().config, policy, 64).build()
    assert isinstance(plain.engine, EmbeddedEngine)
    plain.close()
    recipe = engine_spec(configure(engine__kind="vllm", engine__rows=5).config, policy, 64)
    assert type(recipe).__name__ == "VllmEngineSpec"
    assert (recipe.rows, recipe.max_width, recipe.dtype, recipe.device) == (5, 64, "float32", "cpu")  # type: ignore[attr-defined]
    assert recipe.model_config["num_hidden_layers"] == 4  # type: ignore[attr-defined]


@pytest.mark.config_key("engine.gpu_memory_utilization")
@pytest.mark.parametrize("share", [0.25, 0.9])
def test_the_share_of_a_gpu_reaches_vllm(configure: Any, policy: Policy, share: float) -> None:
    config = configure(engine__kind="vllm", engine__gpu_memory_utilization=share).config
    recipe: Any = engine_spec(config, policy, 64)
    settings = VllmSettings(
        recipe.model_config, max_width=recipe.max_width, rows=recipe.rows, device="cuda",
        gpu_memory_utilization=recipe.gpu_memory_utilization,
    )  # fmt: skip
    assert engine_fields(settings, "folder")["gpu_memory_utilization"] == share


@pytest.mark.config_key("engine.url")
def test_the_address_is_asked_and_refused_by_name_when_it_cannot_be_trained_with(
    configure: Any, policy: Policy, server: tuple[str, list[str]]
) -> None:
    url, asked = server
    with pytest.raises(ConfigError, match="can be asked, but not trained with") as caught:
        engine_spec(configure(engine__kind="openai", engine__url=url).config, policy, 64).build()
    assert url in caught.value.what
    assert "it is not vLLM" in caught.value.what
    assert "/v1/models" in asked


@pytest.mark.config_key("engine.url", "engine.kind")
def test_an_address_without_openai_or_openai_without_an_address_is_refused(configure: Any) -> None:
    for keys in ({"engine__kind": "openai"}, {"engine__url": "http://127.0.0.1:1/v1"}):
        with pytest.raises(ConfigError, match="an address goes with openai"):
            configure(**keys)

"""A server that is slow, rude, wrong or a liar, on loopback: what is believed of it, and what is said."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from surefoot.engines.openai import KEY_VARIABLE, MAX_TRIES, HttpClient, HttpLimits, OpenAIEngine, body_of
from surefoot.engines.vllm_worker import WeightsFromFile, weights_path
from surefoot.errors import ConfigError, EngineError
from surefoot.maths.checksums import checksums
from surefoot.protocols import Request
from surefoot.records import LENGTH, STOP

Reply = tuple[int, Any, dict[str, str]]
WEIGHTS = {"w": torch.arange(6.0).reshape(2, 3), "b": torch.ones(3)}


class Server:
    """Answers by path with whatever `replies` holds: a value, a list used up in order, or a function of the body."""

    def __init__(self) -> None:
        self.replies: dict[str, Any] = {
            "/v1/models": {"data": [{"id": "pebble"}]},
            "/version": {"version": "0.32.0"},
            "/server_info": {"vllm_config": {"model_config": {"logprobs_mode": "processed_logprobs"}}},
            "/v1/completions": good,
            "/pause": {"status": "paused"},
            "/resume": {"status": "resumed"},
            "/reset_prefix_cache": {"success": True},
        }
        self.seen: list[tuple[str, Any, dict[str, str]]] = []
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length)) if length else None
                owner.seen.append((self.path, body, dict(self.headers)))
                status, value, headers = owner.reply(self.path.split("?")[0], body)
                data = value if isinstance(value, bytes) else json.dumps(value).encode()
                self.send_response(status)
                for name, text in ({"Content-Length": str(len(data))} | headers).items():
                    self.send_header(name, text)
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = answer

            def log_message(self, *_: Any) -> None: ...

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def reply(self, path: str, body: Any) -> Reply:
        found = self.replies.get(path)
        if isinstance(found, list):
            found = found.pop(0) if len(found) > 1 else found[0]
        if callable(found):
            found = found(body)
        if found is None:
            return 404, {"detail": "Not Found"}, {}
        return found if isinstance(found, tuple) else (200, found, {})

    def bodies(self, path: str) -> list[Any]:
        return [body for where, body, _ in self.seen if where.split("?")[0] == path]


def choice(body: Any, **changes: Any) -> dict[str, Any]:
    """A good answer to this body, or one that is not."""
    n = body["max_tokens"]
    one = {
        "token_ids": [7] * n, "logprobs": {"token_logprobs": [-0.25] * n}, "finish_reason": "length",
        "prompt_token_ids": body["prompt"],
    }  # fmt: skip
    return {"choices": [one | changes]}


def good(body: Any) -> dict[str, Any]:
    return choice(body)


def ask(name: str = "a", **changes: Any) -> Request:
    fields: dict[str, Any] = dict(max_new_tokens=3, temperature=0.7, stop_ids=frozenset({2}), seed=5)
    return Request(name, (4, 5, 6), **(fields | changes))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    made = Server()
    yield made
    made.http.shutdown()
    made.http.server_close()


@pytest.fixture
def pauses() -> list[float]:
    """What a client would have slept."""
    return []


@pytest.fixture
def client(server: Server, pauses: list[float]) -> Callable[..., HttpClient]:
    return lambda **limits: HttpClient(server.url, HttpLimits(**limits), sleep=pauses.append)


@pytest.fixture
def engine(server: Server, client: Callable[..., HttpClient], tmp_path: Path) -> Iterator[OpenAIEngine]:
    made = OpenAIEngine(server.url, version=4, client=client(), concurrency=4, weights_folder=tmp_path)
    yield made
    made.close()


# -- one call ---------------------------------------------------------------------------------


def test_busy_and_broken_answers_are_asked_for_again_with_growing_pauses(
    server: Server, client: Callable[..., HttpClient], pauses: list[float]
) -> None:
    server.replies["/x"] = [(429, {}, {"Retry-After": "7"}), (500, {}, {}), (503, {}, {}), (200, {"ok": 1}, {})]
    assert client().get("/x") == {"ok": 1}
    assert pauses == [7.0, 1.0, 2.0]


def test_the_number_of_attempts_is_limited_and_the_servers_words_are_told(
    server: Server, client: Callable[..., HttpClient], pauses: list[float]
) -> None:
    server.replies["/x"] = (503, {"error": {"message": "the engine is dead"}}, {})
    with pytest.raises(EngineError, match="refused with 503") as caught:
        client(tries=3).get("/x")
    assert "the engine is dead" in caught.value.why
    assert len(server.seen) == 3
    assert len(pauses) == 2


def test_a_refusal_that_asking_again_cannot_mend_is_raised_at_once(
    server: Server, client: Callable[..., HttpClient], pauses: list[float]
) -> None:
    server.replies["/x"] = (400, {"error": "prompt is too long"}, {})
    with pytest.raises(EngineError, match="refused with 400"):
        client().get("/x")
    assert (len(server.seen), pauses) == (1, [])


def test_pauses_never_go_beyond_the_deadline(server: Server, client: Callable[..., HttpClient]) -> None:
    server.replies["/x"] = (429, {}, {"Retry-After": "3600"})
    with pytest.raises(EngineError, match="refused with 429"):
        client(deadline_s=20).get("/x")
    assert len(server.seen) == 1


def test_a_server_that_is_not_there_is_named(pauses: list[float]) -> None:
    gone = Server()
    gone.http.shutdown()
    gone.http.server_close()
    with pytest.raises(EngineError, match=r"failed 2 times, last: ConnectionRefusedError") as caught:
        HttpClient(gone.url, HttpLimits(tries=2), sleep=pauses.append).get("/v1/models")
    assert gone.url in caught.value.what


def test_an_answer_that_stops_half_way_is_asked_for_again(
    server: Server, client: Callable[..., HttpClient], pauses: list[float]
) -> None:
    server.replies["/x"] = [(200, b'{"a', {"Content-Length": "100"}), (200, {"ok": 1}, {})]
    assert client().get("/x") == {"ok": 1}
    assert len(pauses) == 1


def test_a_dripping_answer_ends_with_the_deadline(server: Server, client: Callable[..., HttpClient]) -> None:
    """Time is counted, not slept: the clock leaps when the second part is read."""
    now = itertools.chain([0.0] * 6, itertools.repeat(99.0))
    server.replies["/x"] = (200, b"[" + b" " * 200_000 + b"]", {})
    slow = HttpClient(server.url, HttpLimits(deadline_s=10, tries=3), sleep=pytest.fail, clock=lambda: next(now))
    with pytest.raises(EngineError, match="failed 1 times, last: TimeoutError"):
        slow.get("/x")


def test_answers_that_are_too_long_or_no_json_are_refused(server: Server, client: Callable[..., HttpClient]) -> None:
    server.replies["/long"] = (200, b"x" * 5000, {})
    with pytest.raises(EngineError, match="more than 4096 bytes"):
        client(max_bytes=4096).get("/long")
    server.replies["/page"] = (200, b"<html>\x1b[31mhello", {})
    with pytest.raises(EngineError, match="answered with no JSON") as caught:
        client().get("/page")
    assert "\x1b" not in str(caught.value)
    server.replies["/deep"] = (200, b"[" * 100_000, {})
    with pytest.raises(EngineError, match="answered with no JSON"):
        client().get("/deep")


def test_a_redirect_is_never_followed(server: Server, client: Callable[..., HttpClient]) -> None:
    server.replies["/x"] = (307, {}, {"Location": "http://elsewhere.example/v1"})
    with pytest.raises(EngineError, match="was sent on to") as caught:
        client().get("/x")
    assert "elsewhere.example" in caught.value.what
    assert len(server.seen) == 1


def test_the_key_comes_from_the_environment_goes_to_the_server_and_is_shown_to_nobody(
    server: Server, client: Callable[..., HttpClient], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, "very-secret-key-42")
    server.replies["/x"] = (401, {"error": "bad key very-secret-key-42"}, {})
    with pytest.raises(EngineError, match="refused with 401") as caught:
        client().get("/x")
    assert server.seen[0][2]["Authorization"] == "Bearer very-secret-key-42"
    assert "very-secret-key-42" not in str(caught.value)
    assert KEY_VARIABLE in caught.value.fix


@pytest.mark.parametrize(
    ("url", "key", "said"),
    [
        ("http://10.0.0.7:8000/v1", "very-secret-key-42", "neither https nor this machine"),
        ("http://127.0.0.1:8000/v1", "two\nlines", "a character that no key has"),
        ("http://me:pass@127.0.0.1:8000/v1", "", "user name or password"),
        ("ftp://127.0.0.1/v1", "", "no plain http or https"),
        ("127.0.0.1:8000", "", "no plain http or https"),
        ("http://127.0.0.1:eight/v1", "", "it is no address"),
        ("http://127.0.0.1:8000/v1?x=1", "", "no plain http or https"),
    ],
)
def test_an_address_or_key_that_could_leak_or_mislead_is_refused(
    url: str, key: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, key)
    with pytest.raises(ConfigError) as caught:
        HttpClient(url)
    assert said in str(caught.value)


# -- answers ----------------------------------------------------------------------------------


def test_answers_come_in_the_order_asked_with_everything_they_need(server: Server, engine: OpenAIEngine) -> None:
    server.replies["/v1/completions"] = lambda body: choice(
        body, token_ids=[body["seed"], 2], logprobs={"token_logprobs": [-0.5, -0.25]}, finish_reason="stop"
    )
    answers = engine.generate([ask(f"r{i}", seed=10 + i) for i in range(9)])
    assert [a.request_id for a in answers] == [f"r{i}" for i in range(9)]
    assert [a.token_ids for a in answers] == [(10 + i, 2) for i in range(9)]
    assert {(a.finish_reason, a.logprobs, a.version, a.version_end) for a in answers} == {(STOP, (-0.5, -0.25), 4, 4)}
    assert engine.generate([]) == []


def test_every_field_that_a_server_has_a_default_for_is_sent(server: Server, engine: OpenAIEngine) -> None:
    assert engine.generate([ask()])[0].finish_reason == LENGTH
    (sent,) = server.bodies("/v1/completions")
    assert sent == body_of(ask(), "pebble")
    assert (sent["prompt"], sent["temperature"], sent["seed"]) == ([4, 5, 6], 0.7, 5)
    assert (sent["top_p"], sent["top_k"], sent["min_p"], sent["repetition_penalty"]) == (1.0, 0, 0.0, 1.0)
    assert (sent["stop_token_ids"], sent["ignore_eos"], sent["add_special_tokens"]) == ([2], True, False)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"token_ids": None}, "no token ids"),
        ({"token_ids": []}, "no token ids"),
        ({"token_ids": ["7", "7", "7"]}, "no token ids"),
        ({"token_ids": [True, True, True]}, "no token ids"),
        ({"logprobs": None}, "no finite logprob"),
        ({"logprobs": {"token_logprobs": [-0.1]}}, "no finite logprob"),
        ({"logprobs": {"token_logprobs": [None, -0.1, -0.1]}}, "no finite logprob"),
        ({"logprobs": {"token_logprobs": [float("nan")] * 3}}, "no finite logprob"),
        ({"prompt_token_ids": [1, 4, 5, 6]}, "another prompt"),
        ({"token_ids": [7] * 4, "logprobs": {"token_logprobs": [0.0] * 4}}, "4 of 3 tokens"),
        ({"token_ids": [2, 7, 7]}, "some after the end"),
        ({"token_ids": [7], "logprobs": {"token_logprobs": [0.0]}}, "without an end token"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_an_answer_that_lost_something_is_an_error(
    server: Server, engine: OpenAIEngine, changes: dict[str, Any], said: str
) -> None:
    server.replies["/v1/completions"] = lambda body: choice(body, **changes)
    with pytest.raises(EngineError, match=said):
        engine.generate([ask()])
    assert engine.in_flight == 0


def test_answers_that_the_server_gave_up_on_are_asked_for_again(server: Server, engine: OpenAIEngine) -> None:
    server.replies["/v1/completions"] = [lambda body: choice(body, finish_reason="abort")] * 2 + [good]
    assert engine.generate([ask()])[0].token_ids == (7, 7, 7)
    server.replies["/v1/completions"] = lambda body: choice(body, finish_reason="abort")
    with pytest.raises(EngineError, match=f"ended it {MAX_TRIES} times with 'abort'"):
        engine.generate([ask()])
    assert len(server.bodies("/v1/completions")) == 3 + MAX_TRIES


def test_a_cancelled_future_is_answered_by_nobody(server: Server, engine: OpenAIEngine) -> None:
    held = threading.Event()
    server.replies["/v1/completions"] = lambda body: good(body) if held.wait(20) else None
    future = engine.submit([ask(f"r{i}") for i in range(20)])
    assert future.cancel()
    held.set()
    assert len(engine.generate([ask()])) == 1
    assert len(server.bodies("/v1/completions")) <= 5, "four were under way, one was asked after"


def test_the_model_is_the_one_that_was_named_or_the_only_one(server: Server, client: Callable[..., HttpClient]) -> None:
    server.replies["/v1/models"] = {"data": [{"id": "a"}, {"id": "b"}]}
    for wanted in (None, "c"):
        with pytest.raises(ConfigError, match="serves a, b, not"):
            OpenAIEngine(server.url, wanted, client=client())
    engine = OpenAIEngine(server.url, "b", client=client())
    engine.generate([ask()])
    engine.close()
    assert server.bodies("/v1/completions")[0]["model"] == "b"
    server.replies["/v1/models"] = {"models": []}
    with pytest.raises(EngineError, match="does not list its models"):
        OpenAIEngine(server.url, client=client())


# -- training ---------------------------------------------------------------------------------


class Worker(WeightsFromFile):
    """The other side of a sync, without vLLM: what would be loaded is kept."""

    def __init__(self) -> None:
        self.loaded: dict[str, Any] = {}

    def rpc(self, body: Any) -> Any:
        try:
            return {"results": [getattr(self, body["method"])(*body["args"])]}
        except (AttributeError, EngineError, ConfigError) as error:
            return 500, {"error": {"message": str(error)}}, {}

    def surefoot_commit(self, version: str) -> dict[str, str]:
        assert self.surefoot_staged is not None
        assert self.surefoot_staged[0] == version
        self.loaded = self.surefoot_staged[1]
        return {name: str(value) for name, value in checksums(self.loaded).items()}


@pytest.fixture
def worker(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Worker:
    monkeypatch.setenv("SUREFOOT_WEIGHTS_DIR", str(tmp_path))
    made = Worker()
    server.replies["/collective_rpc"] = made.rpc
    return made


def test_weights_are_read_by_the_server_put_in_force_and_caches_dropped(
    server: Server, engine: OpenAIEngine, worker: Worker, tmp_path: Path
) -> None:
    engine.require_training()
    server.seen.clear()
    assert engine.prepare(WEIGHTS, 5) == checksums(WEIGHTS)
    assert engine.version == 4
    assert engine.commit(5) == checksums(WEIGHTS)
    assert engine.version == 5
    assert all(torch.equal(worker.loaded[name], value) for name, value in WEIGHTS.items())
    order = [path for path, _, _ in server.seen]
    assert order == [
        "/collective_rpc", "/pause?mode=keep", "/collective_rpc", "/reset_prefix_cache?reset_running_requests=true",
        "/resume",
    ]  # fmt: skip
    assert list(tmp_path.iterdir()) == [], "the file is gone"


@pytest.mark.parametrize(
    ("path", "reply", "missing"),
    [
        ("/version", None, "it is not vLLM"),
        ("/v1/completions", lambda body: choice(body, token_ids=None), "it returns no token ids"),
        ("/server_info", None, "not those of the sampling temperature"),
        ("/server_info", {"vllm_config": {"model_config": {"logprobs_mode": "raw_logprobs"}}}, "sampling temperature"),
        ("/collective_rpc", None, "it takes no weights"),
        ("/collective_rpc", (500, {"error": "Method 'surefoot_ready' is not implemented."}, {}), "it takes no weights"),
    ],
)
def test_a_server_that_cannot_be_trained_with_is_refused_by_name(
    server: Server, engine: OpenAIEngine, worker: Worker, path: str, reply: Any, missing: str
) -> None:
    engine.require_training()  # as long as nothing is missing
    server.replies[path] = reply
    with pytest.raises(ConfigError, match="can be asked, but not trained with") as caught:
        engine.require_training()
    assert missing in caught.value.what
    assert caught.value.what.count(";") == 0, "and nothing else is missing"


def test_weights_are_refused_before_the_server_was_checked(engine: OpenAIEngine) -> None:
    for attempt in (lambda: engine.load_weights(WEIGHTS, 5), engine.pause, engine.resume):
        with pytest.raises(EngineError, match="not checked for training"):
            attempt()


def test_a_server_that_read_something_else_does_not_get_the_version(
    server: Server, engine: OpenAIEngine, worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.require_training()
    real = worker.rpc

    def lie(body: Any) -> Any:
        answer = real(body)
        if body["method"] == "surefoot_prepare":
            answer["results"][0]["b"] = "1"
        return answer

    server.replies["/collective_rpc"] = lie
    with pytest.raises(EngineError, match="read other weights than were written, first b"):
        engine.load_weights(WEIGHTS, 5)
    assert engine.version == 4
    server.replies["/collective_rpc"] = lambda body: {"results": []}
    with pytest.raises(EngineError, match="answered surefoot_prepare with"):
        engine.load_weights(WEIGHTS, 5)


def test_a_server_that_keeps_its_prefix_cache_does_not_get_the_version_and_goes_on(
    server: Server, engine: OpenAIEngine, worker: Worker
) -> None:
    engine.require_training()
    server.replies["/reset_prefix_cache"] = {"success": False}
    with pytest.raises(EngineError, match="kept its prefix cache"):
        engine.load_weights(WEIGHTS, 5)
    assert engine.version == 4
    assert server.seen[-1][0] == "/resume", "it is not left paused"


def test_what_a_sync_aborts_does_not_count_as_a_failure(server: Server, engine: OpenAIEngine, worker: Worker) -> None:
    """More aborts than an answer may fail: each of them under a pause of ours."""
    engine.require_training()
    asked, go_on = threading.Semaphore(0), threading.Semaphore(0)

    def held(body: Any) -> Any:
        asked.release()
        go_on.acquire(timeout=20)
        return choice(body, finish_reason="abort")

    server.replies["/v1/completions"] = held
    future = engine.submit([ask()])
    for sync in range(MAX_TRIES + 2):
        assert asked.acquire(timeout=20)
        engine.pause("abort")
        go_on.release()
        engine.load_weights(WEIGHTS, 10 + sync)
        if sync == MAX_TRIES + 1:
            server.replies["/v1/completions"] = good
        engine.resume()
    answer = future.result(20)[0]
    assert (answer.version, answer.version_end) == (10 + MAX_TRIES + 1,) * 2


def test_only_safetensors_files_of_the_named_folder_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "a.safetensors").write_bytes(b"")
    (tmp_path / "b.safetensors").write_bytes(b"")
    (folder / "link.safetensors").symlink_to(tmp_path / "b.safetensors")
    (folder / "a.txt").write_bytes(b"")
    monkeypatch.setenv("SUREFOOT_WEIGHTS_DIR", str(folder))
    assert weights_path("a.safetensors") == folder / "a.safetensors"
    for name in (
        "../b.safetensors",
        str(tmp_path / "b.safetensors"),
        "link.safetensors",
        "a.txt",
        "",
        "none.safetensors",
    ):
        with pytest.raises(EngineError, match="is no safetensors file"):
            weights_path(name)
    monkeypatch.delenv("SUREFOOT_WEIGHTS_DIR")
    with pytest.raises(ConfigError, match="SUREFOOT_WEIGHTS_DIR is not set"):
        weights_path("a.safetensors")

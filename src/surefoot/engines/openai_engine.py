"""An OpenAI-compatible server as the engine: for evaluation and judges, and for training where it can.

Owns       calls to one server, many at a time.
Promises   token ids in, token ids out, every sampling field set; an answer that lost a token, a logprob or the prompt
           is an error; a server that cannot be trained with is refused at the start, with the names of what is missing.
Never      tokenises, follows a redirect, or says its key.

Read next: `http_client.py`, one call; `server_weights.py`, how weights get there.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from surefoot import pulse
from surefoot.engines.http_client import HttpClient, Limits, StatusError
from surefoot.engines.openai_answers import Capabilities, NoAnswerError, body_of, dig, read_answer
from surefoot.engines.server_weights import ServerWeights
from surefoot.errors import ConfigError, EngineError
from surefoot.protocols import Completion, InFlight, Request, Weights
from surefoot.records import LENGTH, STOP

MAX_TRIES = 3
"""How often one request is asked before an answer that is none becomes an error."""


class OpenAIEngine:
    """`protocols.ServingEngine` on a server.

    Args:
        url: such as "http://127.0.0.1:8000/v1".
        model: the name it serves the model under; may be left out when there is only one.
        version: what its weights are called until others are loaded.
        concurrency: calls at a time; more wait.
        weights_folder: see `ServerWeights`.
    """

    def __init__(
        self, url: str, model: str | None = None, *, version: int = 0, concurrency: int = 32,
        limits: Limits | None = None, weights_folder: Path | None = None, client: HttpClient | None = None,
    ) -> None:  # fmt: skip
        self.client = client or HttpClient(url, limits)
        self.root = self.client.prefix.removesuffix("/v1")
        self.model = self._model(model)
        self._version, self._weights_folder = version, weights_folder
        self._weights: ServerWeights | None = None
        self._pool = ThreadPoolExecutor(concurrency, thread_name_prefix="surefoot-openai")
        self._changed = threading.Condition()
        self._asked = self._syncs = 0
        self._paused = self._closed = False

    def _model(self, wanted: str | None) -> str:
        names = self._names()
        if wanted is None and len(names) == 1:
            return names[0]
        if wanted not in names:
            raise ConfigError(
                f"{self.client.url} serves {', '.join(names) or 'no model'}, not {wanted!r}",
                "another model would answer",
                "name one of them",
            )
        return wanted

    def _names(self) -> tuple[str, ...]:
        answer = self.client.get(f"{self.root}/v1/models")
        listed = answer.get("data") if isinstance(answer, Mapping) else None
        if not isinstance(listed, list):
            raise EngineError(
                f"{self.client.url} does not list its models: {str(answer)[:200]}",
                "it is no OpenAI-compatible server",
                "check engine.url; it usually ends in /v1",
            )
        return tuple(str(entry["id"]) for entry in listed if isinstance(entry, Mapping) and "id" in entry)

    # -- what it can do -------------------------------------------------------------------

    def capabilities(self) -> Capabilities:
        """Ask the server, once for each thing; a refusal means that it cannot."""
        info = self._try("GET", f"{self.root}/version")
        config = self._try("GET", f"{self.root}/server_info?config_format=json")
        mode = dig(config, "vllm_config", "model_config", "logprobs_mode")
        ready = self._try("POST", f"{self.root}/collective_rpc", {"method": "surefoot_ready", "args": []})
        return Capabilities(
            models=self._names(),
            vllm=str(info["version"]) if isinstance(info, Mapping) and "version" in info else None,
            token_ids=self._returns_token_ids(),
            logprobs_at_temperature=mode == "processed_logprobs",
            takes_weights=bool(dig(ready, "results")),
        )

    def require_training(self) -> Capabilities:
        """Refuse a server that one cannot train with, by name of everything that it lacks."""
        found = self.capabilities()
        if missing := found.missing_for_training():
            raise ConfigError(
                f"{self.client.url} can be asked, but not trained with: {'; '.join(missing)}",
                "training takes the tokens that were sampled, their probabilities, and a way to change the weights",
                'start a vLLM server as docs/engines.md says, or set engine.kind = "vllm"',
            )
        self._weights = ServerWeights(self.client, self._weights_folder)
        return found

    def _try(self, method: str, path: str, body: object = None) -> Any:
        try:
            return self.client.get(path) if method == "GET" else self.client.post(path, body, tries=1)
        except StatusError as error:
            if error.status in (401, 403):
                raise
            return None

    def _returns_token_ids(self) -> bool:
        try:
            self._complete(Request("probe", (1,), 1, 1.0, frozenset(), 0))
        except EngineError:
            return False
        return True

    # -- answers --------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """What the server's weights are called."""
        return self._version

    @property
    def in_flight(self) -> int:
        """Completions that were asked for and are not finished."""
        return self._asked

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Answer every request, in order."""
        return self.submit(requests).result()

    def submit(self, requests: Sequence[Request]) -> Future[list[Completion]]:
        """Ask; answers come in the requests' order, or the first failure instead. Cancelling takes back what waits."""
        call = _Call(len(requests))
        with self._changed:
            if self._closed:
                raise EngineError(
                    f"{self.client.url} was closed", "nobody asks there any more", "create another engine"
                )
            self._asked += len(requests)
        for place, request in enumerate(requests):
            self._pool.submit(self._answer_into, call, place, request)
        return call.future

    def _answer_into(self, call: _Call, place: int, request: Request) -> None:
        try:
            if not call.future.done():  # cancelled, or failed already
                call.take(place, self._answer(request))
        except Exception as error:  # noqa: BLE001  the asker's to handle, in whatever thread it waits
            call.fail(error)
        finally:
            with self._changed:
                self._asked -= 1
                self._changed.notify_all()

    def _answer(self, request: Request) -> Completion:
        """Ask until the server gives an answer; what a sync aborted does not count."""
        tries = 0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: not self._paused or self._closed)
                syncs = self._syncs
            try:
                return self._complete(request)
            except NoAnswerError as error:
                with self._changed:
                    tries += self._syncs == syncs and not self._paused
                if tries >= MAX_TRIES or self._closed:
                    raise EngineError(
                        f"request {request.id}: {self.client.url} ended it {tries} times with {error}",
                        "nobody asked it to",
                        "see the server's log",
                    ) from error

    def _complete(self, request: Request) -> Completion:
        began = self._version
        answer = self.client.post(f"{self.root}/v1/completions", body_of(request, self.model))
        pulse.beat("generating")
        tokens, logprobs = read_answer(request, answer, self.client.url)
        stopped = tokens[-1] in request.stop_ids
        return Completion(request.id, tokens, logprobs, STOP if stopped else LENGTH, began, self._version)

    # -- weights --------------------------------------------------------------------------

    def pause(self, in_flight: InFlight = "keep") -> None:
        """No token is drawn after this returns; new requests wait here."""
        self._way()
        with self._changed:
            self._paused = True
        self.client.post(f"{self.root}/pause?mode={in_flight}", {})

    def resume(self) -> None:
        """Go on; what was aborted is asked again, unseen by whoever asked."""
        self._way()
        self.client.post(f"{self.root}/resume", {})
        with self._changed:
            self._paused = False
            self._syncs += 1
            self._changed.notify_all()

    def prepare(self, weights: Weights, version: int) -> dict[str, int]:
        """Let the server read these weights; what it serves does not change. Checksum per tensor, its own."""
        return self._way().prepare(weights, version)

    def commit(self, version: int) -> dict[str, int]:
        """Serve what was prepared from the next token on; checksums of it, where the server can read all of it back."""
        found = self._way().commit(version, pause=not self._paused)
        self._version = version
        return found

    def load_weights(self, weights: Weights, version: int) -> None:
        """Serve these weights from the next token on; refused where `require_training` was not asked first."""
        self.prepare(weights, version)
        self.commit(version)

    def _way(self) -> ServerWeights:
        if self._weights is None:
            raise EngineError(
                f"{self.client.url} was not checked for training",
                "most servers take no weights, and would answer on with their own",
                "call require_training first",
            )
        return self._weights

    def close(self) -> None:
        """Ask nothing more, and wait for what is under way."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._pool.shutdown(wait=True, cancel_futures=True)
        if self._weights is not None:
            self._weights.discard()


class _Call:
    """One `submit`: its answers as they come in."""

    def __init__(self, size: int) -> None:
        self.future: Future[list[Completion]] = Future()
        self._answers: dict[int, Completion] = {}
        self._size = size
        if not size:
            self.future.set_result([])

    def take(self, place: int, completion: Completion) -> None:
        self._answers[place] = completion
        if len(self._answers) == self._size:
            with contextlib.suppress(InvalidStateError):  # cancelled meanwhile
                self.future.set_result([self._answers[i] for i in range(self._size)])

    def fail(self, error: Exception) -> None:
        with contextlib.suppress(InvalidStateError):  # another one failed first, or it was cancelled
            self.future.set_exception(error)

"""What is said to an OpenAI-compatible server, and what is believed of its answers.

Promises   every field that a server might have a default for is set; an answer that lost a token, a logprob, its end
           or the prompt is no answer.

Read next: `openai.py`, who asks.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
from collections.abc import KeysView, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from surefoot.engines.http_client import HttpClient, HttpLimits, StatusError
from surefoot.engines.serving import AskedElsewhere
from surefoot.engines.vllm_worker import FOLDER_VARIABLE
from surefoot.errors import ConfigError, EngineError
from surefoot.maths.checksums import checksums
from surefoot.protocols import Completion, InFlightPolicy, Request, Weights
from surefoot.records import LENGTH, STOP
from surefoot.system import heartbeat


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a server said it can do."""

    models: tuple[str, ...]
    vllm: str | None
    """Its version when it is vLLM."""
    token_ids: bool
    """Token ids come back, with logprobs, and the prompt was taken as it is."""
    logprobs_at_temperature: bool
    takes_weights: bool

    def missing_for_training(self) -> list[str]:
        """What training needs and this server lacks."""
        lacks = {
            "it is not vLLM (no /version)": self.vllm is None,
            "it returns no token ids (return_token_ids)": not self.token_ids,
            "its logprobs are not those of the sampling temperature (--logprobs-mode processed_logprobs, seen through "
            "/server_info with VLLM_SERVER_DEV_MODE=1)": not self.logprobs_at_temperature,
            "it takes no weights (VLLM_SERVER_DEV_MODE=1 and --worker-extension-cls "
            "surefoot.engines.vllm_worker.WeightsFromFile)": not self.takes_weights,
        }
        return [words for words, is_missing in lacks.items() if is_missing]


class NoAnswerError(EngineError):
    """The server ended a completion early, without a word of ours."""


def body_of(request: Request, model: str) -> dict[str, Any]:
    """One completion, every field that a server might have a default for set."""
    return {
        "model": model, "prompt": list(request.prompt_ids), "max_tokens": request.max_new_tokens, "n": 1,
        "temperature": request.temperature, "seed": request.seed, "logprobs": 0, "stream": False, "echo": False,
        "top_p": 1.0, "top_k": 0, "min_p": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
        "repetition_penalty": 1.0, "stop": [], "stop_token_ids": sorted(request.stop_ids), "ignore_eos": True,
        "min_tokens": 0, "add_special_tokens": False, "skip_special_tokens": False, "return_token_ids": True,
    }  # fmt: skip


def read_answer(request: Request, answer: Any, url: str) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Tokens and logprobs of one answer, or what is wrong with it."""
    choice = dig(answer, "choices", 0)
    tokens, logprobs = dig(choice, "token_ids"), dig(choice, "logprobs", "token_logprobs")
    if dig(choice, "finish_reason") not in ("stop", "length"):
        raise NoAnswerError(repr(dig(choice, "finish_reason")), "it is no end of an answer", "ask again")
    wrong = None
    if not _are(tokens, int) or not tokens:
        wrong = "no token ids"
    elif not _are(logprobs, int | float) or len(logprobs) != len(tokens) or not all(map(math.isfinite, logprobs)):
        wrong = "no finite logprob for every token"
    elif dig(choice, "prompt_token_ids") not in (None, list(request.prompt_ids)):
        wrong = "another prompt than was asked"
    elif len(tokens) > request.max_new_tokens or any(token in request.stop_ids for token in tokens[:-1]):
        wrong = f"{len(tokens)} of {request.max_new_tokens} tokens, or some after the end"
    elif len(tokens) < request.max_new_tokens and tokens[-1] not in request.stop_ids:
        wrong = f"{len(tokens)} of {request.max_new_tokens} tokens without an end token"
    if wrong is not None:
        raise EngineError(
            f"request {request.id}: {url} answered with {wrong}",
            "what cannot be told apart from another answer cannot be graded or trained on",
            "use a server that takes and returns token ids, such as vLLM's",
        )
    return tuple(tokens), tuple(map(float, logprobs))


def _are(values: Any, kind: Any) -> bool:
    return isinstance(values, list) and all(isinstance(v, kind) and not isinstance(v, bool) for v in values)


def dig(value: Any, *path: str | int) -> Any:
    """What lies at this path of a JSON value; None when there is no such thing."""
    for step in path:
        try:
            value = value[step]
        except (KeyError, IndexError, TypeError):
            return None
    return value


# -- New weights for a vLLM server on this machine, through a file in a folder that both can see --
# prepare   write the file; the server reads it whole; both sums are compared
# commit    pause, put in force, drop cached prefixes, go on
#
# Promises   what the server says it read is compared with what was handed over, tensor by tensor; the file is gone
# afterwards; a server that was paused is never left so.


class ServerWeights:
    """The way weights take to one server.

    Args:
        folder: where files are left for the server; `SUREFOOT_WEIGHTS_DIR` on both sides when left out.
    """

    def __init__(self, client: HttpClient, folder: Path | None = None) -> None:
        named = os.environ.get(FOLDER_VARIABLE)
        if folder is None and not named:
            raise ConfigError(
                f"training with {client.url} needs a folder that the server reads weights from",
                "vLLM's own ways to take weights need a GPU on both sides",
                f"set {FOLDER_VARIABLE} to the same private folder here and where the server runs",
            )
        self.client, self.folder = client, folder or Path(str(named))
        self._file: Path | None = None
        self._names: KeysView[str] = {}.keys()

    def prepare(self, weights: Weights, version: int) -> dict[str, int]:
        """Let the server read these weights; its own checksums of them."""
        self.discard()
        self._file = self.folder / f"surefoot-{os.getpid()}-{version}.safetensors"
        save_file({name: value.detach().contiguous().cpu() for name, value in weights.items()}, self._file)
        os.chmod(self._file, 0o600)
        handed = checksums(weights)
        self._names = handed.keys()
        for i, worker in enumerate(self._ask("surefoot_prepare", self._file.name, str(version))):
            wrong = sorted(name for name in handed.keys() | worker.keys() if handed.get(name) != worker.get(name))
            if wrong:
                raise EngineError(
                    f"worker {i} of {self.client.url} read other weights than were written, first {wrong[0]}",
                    "it would answer with them",
                    "check that both sides see the same folder",
                )
        return handed

    def commit(self, version: int, *, pause: bool) -> dict[str, int]:
        """Put what was read in force; checksums of all of it if the server can read all of it back, else nothing.

        Args:
            pause: stop the server meanwhile; False when it is stopped already.
        """
        if pause:
            self._post("/pause?mode=keep")
        try:
            workers = self._ask("surefoot_commit", str(version))
            answer = self._post("/reset_prefix_cache?reset_running_requests=true")
            if not (isinstance(answer, dict) and answer.get("success") is True):
                raise EngineError(
                    f"{self.client.url} kept its prefix cache: {answer}",
                    "answers would go on from keys and values of the old weights",
                    "restart the server",
                )
        finally:
            self.discard()
            if pause:
                self._post("/resume")
        readable = workers[0] if len(workers) == 1 else {}
        return readable if self._names <= readable.keys() else {}

    def discard(self) -> None:
        """Take the file away."""
        if self._file is not None:
            self._file.unlink(missing_ok=True)
            self._file = None

    def _post(self, path: str, body: object = None) -> Any:
        """Once: a second attempt at something that may have happened could hide that it happened twice."""
        return self.client.post(f"{self.client.prefix.removesuffix('/v1')}{path}", body or {}, tries=1)

    def _ask(self, method: str, *arguments: str) -> list[dict[str, int]]:
        answer = self._post("/collective_rpc", {"method": method, "args": list(arguments)})
        results: Any = answer.get("results") if isinstance(answer, dict) else None
        if not isinstance(results, list) or not results or not all(isinstance(r, dict) for r in results):
            raise EngineError(
                f"{self.client.url} answered {method} with {str(answer)[:200]}",
                "every worker of the server has to say what it has",
                "start it with --worker-extension-cls surefoot.engines.vllm_worker.WeightsFromFile",
            )
        return [{name: int(value) for name, value in result.items()} for result in results]


# -- An OpenAI-compatible server as the engine: for evaluation and judges, and for training where it can
# Owns       calls to one server, many at a time.
# Promises   token ids in, token ids out, every sampling field set; an answer that lost a token, a logprob or the prompt
# is an error; a server that cannot be trained with is refused at the start, with the names of what is missing.
# Never      tokenises, follows a redirect, or says its key.


MAX_TRIES = 3
"""How often one request is asked before an answer that is none becomes an error."""


class OpenAIEngine(AskedElsewhere):
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
        limits: HttpLimits | None = None, weights_folder: Path | None = None, client: HttpClient | None = None,
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
    def pack_seconds(self) -> float:
        """The server's own affair."""
        return 0.0

    def submit(self, requests: Sequence[Request]) -> Future[list[Completion]]:
        """Ask; answers come in the requests' order, or the first failure instead. Cancelling takes back what waits."""
        call = _PendingCall(len(requests))
        with self._changed:
            if self._closed:
                raise EngineError(
                    f"{self.client.url} was closed", "nobody asks there any more", "create another engine"
                )
            self._asked += len(requests)
        for place, request in enumerate(requests):
            self._pool.submit(self._answer_into, call, place, request)
        return call.future

    def _answer_into(self, call: _PendingCall, place: int, request: Request) -> None:
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
        heartbeat.tick("generating")
        tokens, logprobs = read_answer(request, answer, self.client.url)
        stopped = tokens[-1] in request.stop_ids
        return Completion(request.id, tokens, logprobs, STOP if stopped else LENGTH, began, self._version)

    # -- weights --------------------------------------------------------------------------

    def pause(self, in_flight: InFlightPolicy = "keep") -> None:
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


class _PendingCall:
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

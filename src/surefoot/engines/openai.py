"""An OpenAI-compatible server as the engine: asked within a deadline, and believed only where nothing is missing.

Promises   every field that a server might have a default for is set; an answer that lost a token, a logprob, its end
           or the prompt is no answer.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import os
import threading
import time
from collections.abc import Callable, KeysView, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from safetensors.torch import save_file

from surefoot.engines.serving import AskedElsewhere
from surefoot.engines.vllm_worker import FOLDER_VARIABLE
from surefoot.errors import ConfigError, EngineError
from surefoot.maths.checksums import checksums
from surefoot.protocols import Completion, InFlightPolicy, Request, Weights
from surefoot.records import LENGTH, STOP
from surefoot.system.connections import DeadlineConnection, holds_credentials, keeps_a_key
from surefoot.system.signals import tick
from surefoot.system.text import printable

# -- JSON over HTTP to one server, within a deadline -----------------------------------------------
# Promises   a call ends by its deadline, whatever the server drips; 429, 5xx and broken connections are tried again
#            with growing pauses; an answer that is too long, no JSON, or a redirect is an error in the server's own
#            words; the key is sent to this server only, and shown to nobody.
# Never      follows a redirect, uses a proxy, or keeps state between calls.


KEY_VARIABLE = "SUREFOOT_ENGINE_API_KEY"
RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504})
_CHUNK = 1 << 16


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """What one call may cost."""

    deadline_s: float = 600.0
    """From the first attempt to the last byte of the last one."""
    tries: int = 6
    pause_s: float = 0.5
    """Before the second attempt; doubled each time, at most 30 s, and at least what the server asks for."""
    max_bytes: int = 64 << 20


class StatusError(EngineError):
    """The server answered, and it was a refusal."""

    def __init__(self, what: str, why: str, fix: str, status: int = 0, retry_after: float = 0.0) -> None:
        super().__init__(what, why, fix)
        self.status, self.retry_after = status, retry_after


class HttpClient:
    """Calls to one server.

    Args:
        url: such as "http://127.0.0.1:8000/v1"; paths given to `get` and `post` are relative to its root.
        sleep, clock: for tests.
    """

    def __init__(
        self, url: str, limits: HttpLimits | None = None, *,
        sleep: Callable[[float], None] = time.sleep, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.limits = limits or HttpLimits()
        self._sleep, self._clock = sleep, clock
        self._https, self._host, self._port, self.prefix = _parts(url)
        self.url = url
        key = os.environ.get(KEY_VARIABLE, "")
        if key and not keeps_a_key(url):
            raise ConfigError(
                f"{KEY_VARIABLE} is set, and {url} is neither https nor this machine",
                "anybody on the way could read the key",
                "use https, or unset the variable if the server wants no key",
            )
        if any(ord(c) < 33 or ord(c) > 126 for c in key):
            raise ConfigError(f"{KEY_VARIABLE} holds a character that no key has", "a header ends there", "set it anew")
        self._headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"

    def get(self, path: str) -> Any:
        """The JSON behind this path."""
        return self._call("GET", path, None)

    def post(self, path: str, body: object, *, tries: int | None = None) -> Any:
        """The JSON that answers this one; None for an empty answer."""
        return self._call("POST", path, json.dumps(body, allow_nan=False).encode(), tries)

    def _call(self, method: str, path: str, body: bytes | None, tries: int | None = None) -> Any:
        limits = self.limits
        ends = self._clock() + limits.deadline_s
        attempts = tries or limits.tries
        for attempt in range(1, attempts + 1):
            try:
                return self._attempt(method, path, body, ends)
            except StatusError as error:
                wait = self._pause(attempt, error.retry_after)
                if error.status not in RETRIED or attempt == attempts or self._clock() + wait >= ends:
                    raise
            except (OSError, http.client.HTTPException) as error:
                wait = self._pause(attempt, 0.0)
                if attempt == attempts or self._clock() + wait >= ends:
                    raise self._lost(method, path, attempt, error) from error
            self._sleep(wait)
        raise AssertionError("the last attempt returns or raises")

    def _pause(self, attempt: int, asked: float) -> float:
        return min(30.0, max(self.limits.pause_s * 2.0 ** (attempt - 1), asked))

    def _attempt(self, method: str, path: str, body: bytes | None, ends: float) -> Any:
        connection = DeadlineConnection(self._host, self._port, ends, https=self._https, clock=self._clock)
        with contextlib.closing(connection):
            connection.request(method, path, body, self._headers)
            with contextlib.closing(connection.getresponse()) as response:
                text = self._read(response, path)
        if response.status != 200:
            raise self._refused(method, path, response, text)
        if not text:
            return None
        try:
            return json.loads(text)
        except (ValueError, RecursionError) as error:
            raise EngineError(
                f"{method} {self.url} {path} answered with no JSON: {_words(text)}",
                "whatever is listening there is no OpenAI-compatible server",
                "check engine.url",
            ) from error

    def _read(self, response: http.client.HTTPResponse, path: str) -> bytes:
        """The whole body; its deadline is the connection's."""
        parts, size = [], 0
        while part := response.read1(_CHUNK):
            parts.append(part)
            size += len(part)
            if size > self.limits.max_bytes:
                raise EngineError(
                    f"{self.url} {path} answered with more than {self.limits.max_bytes} bytes",
                    "no completion is that long",
                    "check engine.url",
                )
        if response.length:  # the server said how much would come, and hung up before
            raise http.client.IncompleteRead(b"".join(parts), response.length)
        return b"".join(parts)

    def _refused(self, method: str, path: str, response: http.client.HTTPResponse, text: bytes) -> StatusError:
        status = response.status
        if 300 <= status < 400:
            return StatusError(
                f"{method} {self.url} {path} was sent on to {_words(response.headers.get('Location', '').encode())}",
                "prompts and the key go to the server that was named, and nowhere else",
                "put the final address into engine.url",
                status,
            )
        hint = f"check {KEY_VARIABLE}" if status in (401, 403) else "see the server's log"
        after = _seconds(response.headers.get("Retry-After"))
        return StatusError(f"{method} {self.url} {path} was refused with {status}", _words(text), hint, status, after)

    def _lost(self, method: str, path: str, attempts: int, error: Exception) -> EngineError:
        return EngineError(
            f"{method} {self.url} {path} failed {attempts} times, last: {type(error).__name__}: {error}",
            "there is no server, or it does not answer in time",
            "start it, check engine.url",
        )


def _parts(url: str) -> tuple[bool, str, int | None, str]:
    """Whether https, host, port and path of an address; what else it may hold is refused."""
    try:
        split = urlsplit(url)
        port = split.port
    except ValueError as error:
        raise ConfigError(
            f"engine.url = {url!r}: {error}", "it is no address", 'like "http://127.0.0.1:8000/v1"'
        ) from error
    if holds_credentials(url):
        raise ConfigError(
            "engine.url holds a user name or password", "addresses are logged", f"put the key into {KEY_VARIABLE}"
        )
    if split.scheme not in ("http", "https") or not split.hostname or split.query or split.fragment:
        raise ConfigError(
            f"engine.url = {url!r}", "it is no plain http or https address", 'like "http://127.0.0.1:8000/v1"'
        )
    return split.scheme == "https", split.hostname, port, split.path.rstrip("/")


def _seconds(text: str | None) -> float:
    try:
        return max(0.0, float(text or 0))
    except ValueError:
        return 0.0  # a date; our own pauses are long enough


def _words(text: bytes) -> str:
    """The server's own words, short, without secrets and control characters."""
    words = " ".join(printable(text[:2000].decode("utf-8", "replace")).split())[:400]
    return f"the server says: {words}" if words else "the server says nothing"


# -- What is said to the server, and what is believed of its answers -------------------------------


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
        tick("generating")
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

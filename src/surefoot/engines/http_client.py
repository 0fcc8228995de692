"""JSON over HTTP to one server, within a deadline: asked again when that can help, refused when it cannot.

Promises   a call ends by its deadline, whatever the server drips; 429, 5xx and broken connections are tried again with
           growing pauses; an answer that is too long, no JSON, or a redirect is an error in the server's own words;
           the key is sent to this server only, and shown to nobody.
Never      follows a redirect, uses a proxy, or keeps state between calls.

Read next: `openai.py`, who asks.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from surefoot.errors import ConfigError, EngineError
from surefoot.system.connections import DeadlineConnection, holds_credentials, keeps_a_key
from surefoot.system.text import printable

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

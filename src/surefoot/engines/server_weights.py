"""New weights for a vLLM server on this machine, through a file in a folder that both can see.

    prepare   write the file; the server reads it whole; both sums are compared
    commit    pause, put in force, drop cached prefixes, go on

Promises   what the server says it read is compared with what was handed over, tensor by tensor; the file is gone
           afterwards; a server that was paused is never left so.

Read next: `vllm_worker.py`, the other side.
"""

from __future__ import annotations

import os
from collections.abc import KeysView
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from surefoot.engines.http_client import HttpClient
from surefoot.engines.vllm_worker import FOLDER_VARIABLE
from surefoot.errors import ConfigError, EngineError
from surefoot.maths.checksums import checksums
from surefoot.protocols import Weights


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

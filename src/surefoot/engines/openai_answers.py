"""What is said to an OpenAI-compatible server, and what is believed of its answers.

Promises   every field that a server might have a default for is set; an answer that lost a token, a logprob, its end
           or the prompt is no answer.

Read next: `openai_engine.py`, who asks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from surefoot.errors import EngineError
from surefoot.protocols import Request


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

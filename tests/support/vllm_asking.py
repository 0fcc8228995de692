"""Requests and comparisons that the vLLM tests share."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from surefoot.protocols import Completion, Request

NEVER: frozenset[int] = frozenset()
END = frozenset({2})
WIDTH = 160
"""Tokens of the longest prompt and completion together."""


def model_config(policy: Any) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(policy.model.config.to_json_string(use_diff=False))
    return config


def ask(name: str = "a", *, length: int = 20, **changes: Any) -> Request:
    """One request; the prompt depends on the name's last number, so that prompts differ."""
    start = sum(map(ord, name))
    prompt = tuple(4 + (start * 7 + 13 * k + k * k) % 96 for k in range(length))
    request = Request(name, prompt, max_new_tokens=24, temperature=1.0, stop_ids=NEVER, seed=start)
    return dataclasses.replace(request, **changes)


def crowd(n: int, **changes: Any) -> list[Request]:
    return [ask(f"c{i}", **changes) for i in range(n)]


def gaps(scorer: Any, requests: Sequence[Request], answers: Sequence[Completion], temperature: float) -> list[float]:
    """Distance between the sampler's logprobs and the learner's, token by token."""
    texts = [(r.prompt_ids, a.token_ids) for r, a in zip(requests, answers, strict=True)]
    scored = scorer.score(texts, temperature=temperature)
    return [
        abs(x - y)
        for answer, row in zip(answers, scored, strict=True)
        for x, y in zip(answer.logprobs, row, strict=True)
    ]


def tokens(answers: Sequence[Completion]) -> list[tuple[int, ...]]:
    return [answer.token_ids for answer in answers]

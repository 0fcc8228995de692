"""What an engine said, checked and put on record: completions become turns.

Promises   one completion per request, in order and within its limit, or an `EngineError`; a logprob that is none costs
           its own rollout and nobody else's.
"""

from __future__ import annotations

from collections.abc import Sequence

from surefoot.errors import EngineError
from surefoot.guards.invariants import are_logprobs
from surefoot.protocols import Codec, Completion, Request
from surefoot.records import Turn

UNDECODABLE = "undecodable_token"
"""Failure reason: the policy chose an embedding row that no token has."""
NONFINITE_LOGPROB = "nonfinite_logprob"
"""Failure reason: the sampler gave a token a log-probability that is none, such as NaN or a number above 0."""


def check_answers(requests: Sequence[Request], completions: Sequence[Completion]) -> None:
    """Refuse answers that are too few, in another order, empty or too long."""
    asked, answered = [r.id for r in requests], [c.request_id for c in completions]
    if asked != answered:
        raise EngineError(
            f"asked {len(asked)} completions, got {len(answered)}, or in another order",
            "an answer given to the wrong question is graded without complaint",
            "return one completion per request, in order",
        )
    for request, completion in zip(requests, completions, strict=True):
        if not 1 <= len(completion.token_ids) <= request.max_new_tokens:
            raise EngineError(
                f"request {request.id}: {len(completion.token_ids)} tokens, limit {request.max_new_tokens}",
                "an empty or overlong answer breaks the batch arithmetic",
                "respect max_new_tokens in the engine",
            )


class Listener:
    """Turns completions into turns.

    Args:
        token_count: ids from here on exist in the model but not in the tokenizer.
    """

    def __init__(self, codec: Codec, token_count: int) -> None:
        self.codec, self.token_count = codec, token_count

    def hear(self, request: Request, completion: Completion) -> tuple[Turn | None, str | None]:
        """The turn, and why its rollout has failed if it has."""
        lengths_agree = len(completion.logprobs) == len(completion.token_ids)  # if not, `Turn` says so
        if lengths_agree and not are_logprobs(completion.logprobs):
            # Without its turn: what holds a NaN could be neither journaled nor compared, and nobody may train on it.
            return None, NONFINITE_LOGPROB
        turn = Turn(
            request.prompt_ids, completion.token_ids, completion.logprobs, completion.version,
            finish_reason=completion.finish_reason, text=self.codec.decode(completion.token_ids),
            version_end=completion.version_end,
        )  # fmt: skip
        return turn, UNDECODABLE if max(completion.token_ids) >= self.token_count else None

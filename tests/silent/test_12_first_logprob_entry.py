"""Silent failure 12: the first entry of an engine's logprob map is recorded, which is the likeliest token, not the chosen one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from silent_kit import make_learner, sampled, tiny_net

from surefoot.engines import embedded, vllm_engine
from surefoot.engines.decoder import Drawn
from surefoot.engines.vllm_requests import VllmOutput as Piece
from surefoot.errors import NumericsError
from surefoot.protocols import Completion, Request
from surefoot.runtime.rollout import TurnBuilder

RANKED = [{5: -0.1, 9: -2.5, 4: -3.0}, {9: -0.3, 2: -1.4}]
"""Both sampled tokens, 9 and 2, are second choices."""


def said(maps: list[dict[int, float]] | None, tokens: tuple[int, ...] = (9, 2)) -> Any:
    """One step's output of vLLM for one request, in vLLM's own form."""
    rows = None if maps is None else [{t: SimpleNamespace(logprob=p) for t, p in row.items()} for row in maps]
    piece = SimpleNamespace(token_ids=list(tokens), logprobs=rows, finish_reason="stop")
    return SimpleNamespace(request_id="a", outputs=[piece], finished=True)


def check(pick: Callable[[Any], Piece]) -> None:
    assert pick(said(RANKED)).logprobs == (-2.5, -1.4)


def first_entry(output: Any) -> Piece:
    """The planted bug, where vLLM's answers are read."""
    piece = output.outputs[0]
    found = tuple(float(next(iter(row.values())).logprob) for row in piece.logprobs)
    return Piece(output.request_id, tuple(piece.token_ids), found, "stop")


def test_the_value_under_the_sampled_token_is_recorded() -> None:
    check(vllm_engine._drawn)


def test_asking_for_more_alternatives_changes_nothing() -> None:
    assert vllm_engine._drawn(said([{9: -2.5}, {2: -1.4}])) == vllm_engine._drawn(said(RANKED))


@pytest.mark.parametrize("maps", [[{5: -0.1}, {2: -1.4}], [{9: -2.5}], None])
def test_a_hole_is_left_a_hole(maps: list[dict[int, float]] | None) -> None:
    """Fewer logprobs than tokens: `vllm_rows` refuses that, see tests/unit/engines/test_vllm_settings.py."""
    piece = vllm_engine._drawn(said(maps))
    assert len(piece.logprobs) < len(piece.token_ids)


def test_planted_first_entry_is_seen() -> None:
    with pytest.raises(AssertionError):
        check(first_entry)


def likeliest(draw: Any) -> Any:
    """The planted bug in an engine of a run: the token is drawn, and the likeliest token's logprob is put beside it."""

    def drawing(logits: Any, temperature: Any, uniforms: Any) -> Drawn:
        drawn: Drawn = draw(logits, temperature, uniforms)
        rows = logits if logits.dim() == 2 else logits.expand(len(drawn.tokens), -1)
        return Drawn(drawn.tokens, torch.log_softmax(rows.float(), -1).amax(-1))

    return drawing


def learn() -> float:
    net = tiny_net()
    report = make_learner(net).learn(sampled(net))
    return report.metrics["sampling/sampling_logp_difference/max"]


def test_what_the_sampler_says_of_a_token_is_what_the_learner_says() -> None:
    assert learn() < 1e-4


def test_planted_logprob_of_the_likeliest_token_stops_step_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "draw", likeliest(embedded.draw))
    monkeypatch.setattr(embedded, "draw_siblings", likeliest(embedded.draw_siblings))
    with pytest.raises(NumericsError, match="disagree"):
        learn()


def test_planted_record_with_the_logprobs_of_other_tokens_stops_step_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where an engine's answer is put on record (`runtime.rollout`): the best first, as a ranked map would give them."""
    honest = TurnBuilder.completion_to_turn

    def ranked(self: TurnBuilder, request: Request, completion: Completion) -> Any:
        best_first = tuple(sorted(completion.logprobs, reverse=True))
        return honest(self, request, replace(completion, logprobs=best_first))

    monkeypatch.setattr(TurnBuilder, "completion_to_turn", ranked)
    with pytest.raises(NumericsError, match="disagree"):
        learn()

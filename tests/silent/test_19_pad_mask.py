"""Silent failure 19: the mask is "not the pad id", so that a stop token equal to it is never trained."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from silent_kit import PROMPTS, STOP_ID, make_learner, make_sample, tiny_net

from surefoot.errors import InvariantError
from surefoot.guards.invariants import check_batch
from surefoot.learner import grpo
from surefoot.maths.packing import make_batch

CASES: dict[str, tuple[int, list[tuple[int, ...]]]] = {
    "pad equals the stop token": (STOP_ID, [(7, 8, STOP_ID), (9, STOP_ID)]),
    "pad id 0": (0, [(7, 8, STOP_ID), (9, STOP_ID)]),
    "pad id in the middle": (5, [(7, 5, 5, STOP_ID), (5, STOP_ID)]),
    "pad id 0 in the middle": (0, [(0, 7, 0, STOP_ID), (9, 0, 0, STOP_ID)]),
}


def by_pad_id(samples: Any, *, pad_token_id: int, **keys: Any) -> Any:
    """The planted bug."""
    batch, stats = make_batch(samples, pad_token_id=pad_token_id, **keys)
    return replace(batch, mask=batch.completion_ids != pad_token_id), stats


def rows(completions: list[tuple[int, ...]]) -> list[Any]:
    return [make_sample(ids, index=i, advantage=1.0 - 2 * i) for i, ids in enumerate(completions)]


@pytest.mark.parametrize("case", CASES)
def test_every_sampled_token_is_trained_and_no_padding(case: str) -> None:
    pad, completions = CASES[case]
    batch, _ = make_batch(rows(completions), pad_token_id=pad)
    assert batch.mask.sum(1).tolist() == [len(ids) for ids in completions]
    assert check_batch(batch, rows(completions)) == sum(map(len, completions))


def test_the_last_trained_token_of_a_finished_answer_is_its_stop_token() -> None:
    pad, completions = CASES["pad equals the stop token"]
    batch, _ = make_batch(rows(completions), pad_token_id=pad)
    assert [ids[mask][-1].item() for ids, mask in zip(batch.completion_ids, batch.mask, strict=True)] == [STOP_ID] * 2


def test_what_a_tool_said_between_two_turns_is_not_trained() -> None:
    sample = make_sample((7, 30, 31, 8, STOP_ID), sampled=(True, False, False, True, True), prompt_ids=PROMPTS["long"])
    batch, _ = make_batch([sample], pad_token_id=0)
    assert batch.mask.tolist() == [[True, False, False, True, True]]


@pytest.mark.parametrize("case", [case for case in CASES if case != "pad id 0"])
def test_planted_mask_by_pad_id_is_refused_by_the_learner(monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    pad, completions = CASES[case]
    monkeypatch.setattr(grpo, "make_batch", by_pad_id)
    with pytest.raises(InvariantError, match="trains"):
        make_learner(tiny_net(), pad_token_id=pad).learn(rows(completions))


def test_planted_truthiness_turns_pad_id_0_into_the_stop_token_and_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pad, completions = CASES["pad id 0"]
    monkeypatch.setattr(
        grpo,
        "make_batch",
        lambda samples, *, pad_token_id: by_pad_id(samples, pad_token_id=pad_token_id or STOP_ID),
    )
    with pytest.raises(InvariantError, match="trains"):
        make_learner(tiny_net(), pad_token_id=pad).learn(rows(completions))

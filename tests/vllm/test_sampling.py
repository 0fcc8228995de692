"""What vLLM is asked, and what it says: every field set, every token accounted for."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from vllm_asking import END, NEVER, ask, crowd, gaps, tokens

from surefoot.engines.vllm_engine import sampling_fields
from surefoot.errors import EngineError
from surefoot.records import LENGTH, STOP

TOLERANCE = 1e-4
"""The default of `parity_tolerance` in float32; measured: 3e-5 at most over 8,000 tokens."""


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3, 0.0], ids=str)
def test_logprobs_are_those_of_the_sampling_temperature(engine: Any, learner: Any, temperature: float) -> None:
    """Greedy ones are those of temperature 1."""
    requests = crowd(16, temperature=temperature)
    answers = engine.generate(requests)
    found = gaps(learner, requests, answers, temperature or 1.0)
    assert len(found) == 16 * 24
    assert max(found) < TOLERANCE


def test_logprobs_of_another_temperature_would_be_noticed(engine: Any, learner: Any) -> None:
    """Teeth: had vLLM been asked for raw logprobs, they would be those of temperature 1."""
    requests = crowd(4, temperature=0.7)
    assert max(gaps(learner, requests, engine.generate(requests), 1.0)) > 100 * TOLERANCE


def test_greedy_and_random_neighbours_keep_their_own_temperatures(engine: Any, learner: Any) -> None:
    mixed = [ask(f"c{i}", temperature=(0.0, 0.7, 1.3)[i % 3]) for i in range(12)]
    answers = engine.generate(mixed)
    for request, answer in zip(mixed, answers, strict=True):
        assert max(gaps(learner, [request], [answer], request.temperature or 1.0)) < TOLERANCE


def test_the_end_token_is_part_of_the_answer_with_its_logprob(engine: Any) -> None:
    answers = engine.generate(crowd(16, stop_ids=END, max_new_tokens=100))
    ended = [a for a in answers if a.finish_reason == STOP]
    assert ended, "none of these ended"
    for answer in ended:
        assert answer.token_ids[-1] == 2
        assert len(answer.logprobs) == len(answer.token_ids)
        assert 2 not in answer.token_ids[:-1]


def test_only_the_requests_own_end_tokens_end_it(engine: Any) -> None:
    """The model's config names token 2 as its end; a request that does not is not ended by it."""
    request = next(
        r for r in crowd(16, max_new_tokens=100) if 2 in engine.generate([r])[0].token_ids[:-1]
    )  # fmt: skip
    on = engine.generate([request])[0]
    assert (on.finish_reason, len(on.token_ids)) == (LENGTH, 100)
    other = dataclasses.replace(request, stop_ids=frozenset({on.token_ids[3]}))
    cut = engine.generate([other])[0]
    assert cut.finish_reason == STOP
    assert cut.token_ids == on.token_ids[: on.token_ids.index(on.token_ids[3]) + 1]


def test_a_request_may_fill_the_width_exactly_and_no_more(engine: Any) -> None:
    width = engine.settings.max_width
    full = ask("full", length=width - 24)
    answer = engine.generate([full])[0]
    assert (len(answer.token_ids), answer.finish_reason) == (24, LENGTH)
    with pytest.raises(EngineError, match=f"room for {width}"):
        engine.generate([dataclasses.replace(full, max_new_tokens=25)])


def test_what_vllm_would_change_without_a_word_is_refused(engine: Any) -> None:
    for change in ({"temperature": 0.005}, {"temperature": 2.5}, {"seed": -1}, {"seed": 2**63}):
        with pytest.raises(EngineError, match=r"temperature|seed"):
            engine.generate([ask(**change)])
    for change in ({"prompt_ids": ()}, {"prompt_ids": (103,)}, {"prompt_ids": (-1,)}, {"max_new_tokens": 0}):
        with pytest.raises(EngineError, match=r"room for|token ids outside"):
            engine.generate([ask(**change)])


def test_the_seed_decides_and_neighbours_do_not(engine: Any) -> None:
    mine = [ask("mine", seed=seed) for seed in range(6)]
    alone = [tokens(engine.generate([request]))[0] for request in mine]
    assert len(set(alone)) == 6, "six seeds, six answers; equal ones would show nothing"
    assert tokens(engine.generate([*crowd(20), *mine, *crowd(5)]))[20:26] == alone


def test_every_public_sampling_field_of_vllm_is_set() -> None:
    from vllm.sampling_params import SamplingParams

    public = {name for name in SamplingParams.__struct_fields__ if not name.startswith("_")}
    assert public - sampling_fields(ask()).keys() == {"output_kind", "output_text_buffer_length"}


def test_nothing_of_a_model_folder_but_its_numbers_reaches_vllm(engine: Any) -> None:
    """No weights, no tokenizer, no generation_config.json: what is not there has no say."""
    folder = engine._inner.core._folder
    assert [path.name for path in folder.iterdir()] == ["config.json"]
    told = engine._inner.core._engine.vllm_config
    assert told.model_config.generation_config == "vllm"
    assert told.load_config.load_format == "dummy"
    assert told.cache_config.enable_prefix_caching
    assert not told.scheduler_config.async_scheduling


def test_more_requests_than_rows_are_all_answered_in_order(engine: Any) -> None:
    requests = [ask(f"m{i}", max_new_tokens=1 + i % 7, stop_ids=NEVER) for i in range(50)]
    answers = engine.generate(requests)
    assert [a.request_id for a in answers] == [r.id for r in requests]
    assert [len(a.token_ids) for a in answers] == [1 + i % 7 for i in range(50)]

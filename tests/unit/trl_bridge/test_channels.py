"""The two loss channels on a tiny model, against the slow way of computing them: one row at a time, no padding."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from surefoot.errors import InputError, ShapeError
from surefoot.maths.preference import PreferencePair
from surefoot.trl_bridge import ChannelDeadError, HintRow, score_pairs, sibling_hints
from surefoot.trl_bridge.auxiliary import (
    Distillation,
    IdleChannelCounter,
    ReplayChannel,
    ReplayPairs,
    SdpoChannel,
    ask,
    distil,
    hint_function,
    hinted,
    padded_left,
    pair_logps,
)

ROWS = [  # prompt, hinted prompt, completion: unequal lengths on purpose, so that padding shows
    ((5, 6), (5, 6, 9, 9), (11, 12, 2)),
    ((7,), (7,), (13,)),
    ((5, 8, 4), (5, 8, 4, 10), (14, 15, 16, 17, 2)),
]
LIVE = [True, False, True]


def batch() -> dict[str, Tensor]:
    prompt, prompt_mask = padded_left([row[0] for row in ROWS], 0)
    teacher, teacher_mask = padded_left([row[1] for row in ROWS], 0)
    width = max(len(row[2]) for row in ROWS)
    completion = torch.tensor([[*row[2], *[0] * (width - len(row[2]))] for row in ROWS])
    seen = torch.tensor([[int(i < len(row[2])) for i in range(width)] for row in ROWS])
    return {
        "prompt_ids": prompt, "prompt_mask": prompt_mask, "completion_ids": completion, "completion_mask": seen,
        "teacher_prompt_ids": teacher, "teacher_prompt_mask": teacher_mask, "teacher_live": torch.tensor(LIVE),
    }  # fmt: skip


def slow_reverse_kl(net: Any) -> float:
    """Sum over live rows and tokens of KL(student || teacher), one forward per row, no padding anywhere."""
    total = 0.0
    for (prompt, told, completion), live in zip(ROWS, LIVE, strict=True):
        if not live:
            continue
        student, teacher = (
            net(torch.tensor([[*start, *completion]])).logits[0, len(start) - 1 : -1].double().log_softmax(-1)
            for start in (prompt, told)
        )
        total += (student.exp() * (student - teacher)).sum().item()
    return total


def test_the_loss_equals_the_slow_way_and_padding_does_not_show(make_net: Callable[..., Any]) -> None:
    net = make_net("llama")
    loss, sums = distil(net, batch(), Distillation())
    assert loss.item() == pytest.approx(slow_reverse_kl(net), rel=1e-4)
    assert loss.item() > 0.01
    assert (int(sums["distill_tokens"]), int(sums["distill_rows_live"]), int(sums["distill_rows"])) == (8, 2, 3)


def test_only_the_student_is_trained_and_the_teacher_runs_in_eval_mode(make_net: Callable[..., Any]) -> None:
    net = make_net("llama").train()
    seen: list[tuple[bool, bool]] = []
    net.register_forward_pre_hook(lambda module, args: seen.append((module.training, torch.is_grad_enabled())))
    loss, _ = distil(net, batch(), Distillation())
    loss.backward()
    assert seen == [(False, False), (True, True)], "teacher first, then student"
    assert net.training


def test_an_empty_hint_costs_nothing(make_net: Callable[..., Any]) -> None:
    same = batch()
    same["teacher_prompt_ids"], same["teacher_prompt_mask"] = same["prompt_ids"], same["prompt_mask"]
    loss, _ = distil(make_net("llama"), same, Distillation())
    assert abs(loss.item()) < 1e-6


def test_a_teacher_that_is_one_token_off_costs_more(make_net: Callable[..., Any]) -> None:
    """Negative test of the alignment: the same hint, the teacher's logits read one place too late."""
    import surefoot.trl_bridge.auxiliary as module

    net, same = make_net("llama"), batch()
    same["teacher_prompt_ids"], same["teacher_prompt_mask"] = same["prompt_ids"], same["prompt_mask"]
    right = module.completion_scores
    calls: list[int] = []

    def shifted(model: Any, ids: Tensor, mask: Tensor, width: int) -> Tensor:
        calls.append(1)
        logits = right(model, ids, mask, width)
        return logits.roll(1, dims=1) if len(calls) == 1 else logits

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "completion_scores", shifted)
        loss, _ = distil(net, same, Distillation())
    assert loss.item() > 0.1


def test_tool_output_is_not_distilled(make_net: Callable[..., Any]) -> None:
    with_tool = batch()
    with_tool["tool_mask"] = torch.ones_like(with_tool["completion_mask"])
    with_tool["tool_mask"][2, 1:3] = 0
    _, sums = distil(make_net("llama"), with_tool, Distillation())
    assert int(sums["distill_tokens"]) == 6


def test_a_teacher_prompt_too_few_is_refused(make_net: Callable[..., Any]) -> None:
    short = batch()
    short["teacher_prompt_ids"] = short["teacher_prompt_ids"][:2]
    with pytest.raises(ShapeError, match="3 completions, 2 teacher prompts"):
        distil(make_net("llama"), short, Distillation())


# -- the channel inside a trainer -----------------------------------------------------


def host(tokenizer: Any = None) -> Any:
    """What a channel needs of a trainer."""
    return SimpleNamespace(
        state=SimpleNamespace(global_step=0), args=SimpleNamespace(steps_per_generation=1),
        current_gradient_accumulation_steps=1, temperature=1.0, _tokenizer=tokenizer,
        _tokenize_prompts=lambda prompts: (tokenizer(text=prompts)["input_ids"], None, {}),
    )  # fmt: skip


def test_hinted_prompts_stand_in_the_rows_of_their_completions(make_tokenizer: Callable[..., Any]) -> None:
    tokenizer = make_tokenizer()
    trainer, given = host(tokenizer), batch() | {"advantages": torch.tensor([-1.0, 0.0, 1.0])}
    seen: list[HintRow] = []

    def hints(rows: Any) -> list[str | None]:
        seen.extend(rows)
        return ["one", None, "  "]

    examples = [{"prompt": "ab"}, {"prompt": "c"}, {"prompt": "def"}]
    channel = SdpoChannel(hints, dead_steps=3)
    found = channel.add_teachers(trainer, examples, given)
    assert found["teacher_live"].tolist() == [True, False, False], "white space is no hint"
    width = found["teacher_prompt_ids"].shape[1]
    wanted = tokenizer("ab\n\none")["input_ids"]
    assert found["teacher_prompt_ids"][0].tolist() == wanted
    assert width == len(wanted)
    assert found["teacher_prompt_mask"][1].tolist() == [0] * (width - 1) + [1]
    assert float(found["sdpo_tokens"]) == 3.0
    assert [row.advantage for row in seen] == [-1.0, 0.0, 1.0]
    with pytest.raises(InputError, match="pictures"):
        channel.add_teachers(trainer, examples, given | {"pixel_values": torch.ones(3)})


def test_a_step_without_teachers_runs_no_forward_pass_and_k_of_them_are_an_error() -> None:
    channel, trainer = SdpoChannel(lambda rows: [], dead_steps=3), host()

    def model(**_: Any) -> None:
        raise AssertionError("no forward pass without a live teacher")

    empty = batch() | {"sdpo_tokens": torch.tensor(0.0)}
    for step in range(3):
        trainer.state.global_step = step
        for _ in range(2):
            assert channel.loss(trainer, model, empty) == (torch.tensor(0.0), 0.0)
    trainer.state.global_step = 3
    with pytest.raises(ChannelDeadError, match="step 3: the sdpo channel has contributed nothing for 3 steps"):
        channel.loss(trainer, model, empty)


def test_hints_that_change_nothing_are_dead_too(make_net: Callable[..., Any]) -> None:
    net, trainer, channel = make_net("llama"), host(), SdpoChannel(lambda rows: [], dead_steps=1)
    same = batch() | {"sdpo_tokens": torch.tensor(8.0)}
    same["teacher_prompt_ids"], same["teacher_prompt_mask"] = same["prompt_ids"], same["prompt_mask"]
    channel.loss(trainer, net, same)
    trainer.state.global_step = 1
    with pytest.raises(ChannelDeadError):
        channel.loss(trainer, net, same)


def test_the_share_of_live_teachers_is_told(make_net: Callable[..., Any]) -> None:
    net, trainer, channel = make_net("llama"), host(), SdpoChannel(lambda rows: [], dead_steps=1)
    for step in range(4):
        trainer.state.global_step = step
        loss, live = channel.loss(trainer, net, batch() | {"sdpo_tokens": torch.tensor(8.0)})
    assert live == pytest.approx(2 / 3)
    assert loss.item() == pytest.approx(slow_reverse_kl(net) / 8, rel=1e-4)


def test_one_living_microbatch_keeps_a_step_alive() -> None:
    watch = IdleChannelCounter("x", limit=1)
    for step in range(5):
        watch.note(step, alive=False)
        watch.note(step, alive=True)
        watch.note(step, alive=False)
    assert watch.dead_steps == 0


# -- hints ----------------------------------------------------------------------------


def test_siblings_of_another_prompt_are_no_teachers() -> None:
    rows = [
        HintRow({"prompt": [{"role": "user", "content": "a"}]}, "bad", -1.0),
        HintRow({"prompt": [{"role": "user", "content": "a"}]}, "good", 0.5),
        HintRow({"prompt": [{"role": "user", "content": "a"}]}, "better", 0.9),
        HintRow({"prompt": [{"role": "user", "content": "b"}]}, "bad", -1.0),
    ]
    assert sibling_hints(rows) == ["A correct attempt: better", None, None, None]


@pytest.mark.parametrize("given", [["x"], ["x", "y", "z"], [1, None], [["x"], None]], ids=repr)
def test_hints_that_do_not_fit_the_rows_are_refused(given: list[Any]) -> None:
    rows = [HintRow({"prompt": "a"}, "x", 0.0)] * 2
    with pytest.raises(InputError, match="sdpo_hints gave"):
        ask(lambda _: given, rows)


def test_a_hint_goes_to_the_end_of_the_last_message_and_the_prompt_is_not_changed() -> None:
    prompt = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    assert hinted(prompt, "h") == [prompt[0], {"role": "user", "content": "q\n\nh"}]
    assert prompt[1]["content"] == "q"
    assert hinted(prompt, None) is prompt
    with pytest.raises(InputError, match="not plain text"):
        hinted([{"role": "user", "content": [{"type": "image"}]}], "h")


def test_a_column_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="no such column"):
        hint_function("hind", ["prompt", "hint"])
    assert hint_function("hint", ["prompt", "hint"])([HintRow({"hint": "h"}, "", 0.0)]) == ["h"]


# -- replay ---------------------------------------------------------------------------

PAIRS = [
    PreferencePair((5, 6, 7), (11, 12, 2), (13, 2), source="trace 1"),
    PreferencePair((8,), (14, 2), (15, 16, 17, 2), source="trace 2"),
    PreferencePair((8, 9), (18, 2), (19, 2), source="trace 3"),
]


def test_pair_scores_equal_the_slow_way(make_net: Callable[..., Any]) -> None:
    net = make_net("llama")
    found = pair_logps(net, PAIRS)
    for pair, row in zip(PAIRS, found.tolist(), strict=True):
        for answer, score in zip((pair.chosen_ids, pair.rejected_ids), row, strict=True):
            logits = net(torch.tensor([[*pair.prompt_ids, *answer]])).logits[0, len(pair.prompt_ids) - 1 : -1]
            slow = logits.double().log_softmax(-1).gather(1, torch.tensor(answer).unsqueeze(1)).sum()
            assert score == pytest.approx(slow.item(), abs=1e-4)


def test_replay_begins_at_log_two_and_a_step_down_its_gradient_prefers_the_chosen(make_net: Callable[..., Any]) -> None:
    net = make_net("llama", seed=3)
    stock = ReplayPairs(score_pairs(net, PAIRS), per_batch=3, beta=1.0)
    terms = stock.loss(net, stock.deal(0))
    assert terms.loss.item() == pytest.approx(math.log(2), abs=1e-4)
    terms.loss.backward()
    for sign, better in ((-1, True), (+2, False)):
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.add_(parameter.grad, alpha=sign * 1e-3)
        margins = pair_logps(net, stock.pairs).diff(dim=1).neg().sum()
        before = sum((p.ref_chosen_logp or 0) - (p.ref_rejected_logp or 0) for p in stock.pairs)
        assert (margins.item() > before) is better, "and a step up prefers the rejected"


def test_pairs_are_dealt_in_turn_and_microbatches_go_on(make_net: Callable[..., Any]) -> None:
    net, trainer = make_net("llama"), host()
    trainer.current_gradient_accumulation_steps = 2
    stock = ReplayPairs(score_pairs(net, PAIRS), per_batch=1)
    dealt: list[str] = []
    deal = stock.deal
    stock.deal = lambda turn: [dealt.append(p.source) or p for p in deal(turn)]  # type: ignore[method-assign]
    channel = ReplayChannel(stock, dead_steps=1)
    for step in range(3):
        trainer.state.global_step = step
        for _ in range(2):
            channel.loss(trainer, net, batch())
    assert dealt == ["trace 1", "trace 2", "trace 3"] * 2


def test_scoring_leaves_the_model_as_it_was(make_net: Callable[..., Any]) -> None:
    net = make_net("llama").train()
    assert all(p.ref_chosen_logp is not None for p in score_pairs(net, PAIRS, batch=2))
    assert net.training
    net.eval()


def test_pairs_that_cannot_teach_are_counted_by_reason(make_net: Callable[..., Any]) -> None:
    good = score_pairs(make_net("llama"), PAIRS)
    stock = ReplayPairs([*good, good[0], PAIRS[1]], per_batch=1)
    assert len(stock.pairs) == 3
    assert sum(stock.dropped.values()) == 2

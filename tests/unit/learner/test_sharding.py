"""One learner over several ranks computes what one rank does: gradients, updates, statistics, whatever their number."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from learner_kit import SampleGroups
from rank_jobs import write_samples
from rank_kit import run_jobs
from safetensors.torch import load_file

from surefoot.learner.sharding import deal

CLOSE = 1e-6
"""Of each tensor's norm, in float32."""


@pytest.fixture
def prepare(
    tmp_path: Path, make_net: Callable[..., Any], sampled_groups: SampleGroups
) -> Callable[..., Path]:  # fmt: skip
    """A folder with a model, samples of very unequal lengths, and settings."""

    def make(kind: str = "llama", rewards: Any = ((1, 0, 0), (0, 1), (1, 1), (1, 0, 0, 1)), **settings: Any) -> Path:
        net = make_net(kind)
        net.save_pretrained(tmp_path / "model")
        write_samples(tmp_path, sampled_groups(net, rewards=rewards, max_new=14))
        settings = {"learning_rate": 1e-3, "max_grad_norm": 0.05, "microbatch_size": 2, "adam_epsilon": 1e-5} | settings
        (tmp_path / "settings.json").write_text(json.dumps(settings))
        return tmp_path

    return make


def apart(folder: Path, first: str, second: str) -> float:
    """How far the tensors of two files differ: the largest share of a tensor's norm."""
    one, other = (load_file(folder / f"{name}.safetensors") for name in (first, second))
    assert one.keys() == other.keys(), "the same tensors"
    assert all(one[name].shape == other[name].shape for name in one), "whole ones"
    return max(float((one[name] - other[name]).norm() / one[name].norm().clamp(min=1e-12)) for name in one)


ROUNDED = 1e-3
"""Of what engines get in bfloat16: a master whose last bit is another one may be rounded to the other side."""


def check_same(folder: Path, *tags: str, close: float = CLOSE, published: float | None = None) -> None:
    """Gradients, weights, scores, old log-probabilities, metrics and facts of all these.

    Args:
        published: the bound for what engines get, and for what is scored with it, where that is a wider one.
    """
    loose = {} if published is None else dict.fromkeys(("weights", "scores"), published)
    for tag in tags[1:]:
        for what in ("gradients", "trained", "weights", "scores", "old"):
            assert apart(folder, f"{what}-{tags[0]}", f"{what}-{tag}") <= loose.get(what, close), f"{what} of {tag}"
        one, other = (json.loads((folder / f"reports-{name}.json").read_text()) for name in (tags[0], tag))
        assert one[1] == other[1], "facts: versions, updates, checked tokens, changed entries"
        for first, second in zip(one[0], other[0], strict=True):
            assert first["rows"] == second["rows"]
            rounded = [told["updates"].pop("published") for told in (first, second)]
            assert first["updates"] == second["updates"], "entries, and of those changed, due and taken"
            assert rounded[1] == pytest.approx(rounded[0], rel=ROUNDED)
            assert first["metrics"].keys() == second["metrics"].keys()
            for name, value in first["metrics"].items():
                if name.startswith("timing/") or (name == "replay/accuracy" and first is one[0][0]):
                    continue  # before the first step each answer is as likely as its reference: a tie of last bits
                assert second["metrics"][name] == pytest.approx(value, rel=2e-5, abs=1e-5), name


LORA: dict[str, Any] = {"rank": 3, "alpha": 6.0, "target_modules": ["all-linear"]}
ADAPTER: dict[str, Any] = {"lora": LORA, "parity_tolerance": 10.0}
"""Beside an adapter that has moved: the samples are of the base."""
LOW: dict[str, Any] = {"dtype": "bfloat16", "parity_tolerance": 1.0, "microbatch_size": 1}
"""A row at a time, so that the ranks compute the very products that one computes."""
CHANNELS: dict[str, Any] = {"channels": {"alpha_sdpo": 0.5, "beta_replay": 0.3, "microbatch_size": 2}}
SGD: dict[str, Any] = {"optim": "sgd", "learning_rate": 0.1}
MODES: dict[str, dict[str, Any]] = {
    "adapter": ADAPTER, "bfloat16": LOW | {"loss": {"beta": 0.1}}, "adapter_bfloat16": ADAPTER | LOW,
    "channels": CHANNELS, "sgd": SGD,
}  # fmt: skip


def test_two_ranks_step_as_one_does(prepare: Callable[..., Path]) -> None:
    folder = prepare()
    run_jobs(folder, "step@1", "step@2")
    check_same(folder, "1", "2")
    clipped = json.loads((folder / "reports-2.json").read_text())[0][0]["metrics"]
    assert clipped["grad_norm"] > 0.05, "otherwise nothing is said of clipping"


@pytest.mark.turns(3)
@pytest.mark.parametrize("mode", MODES)
def test_two_ranks_step_as_one_does_in_every_mode(prepare: Callable[..., Path], mode: str, request: Any) -> None:
    settings = MODES[mode]
    if "dtype" in settings:
        request.getfixturevalue("bfloat16_products")
    folder = prepare("untied", **settings)
    run_jobs(folder, "step@1", "step@2")
    check_same(folder, "1", "2", published=ROUNDED if settings.get("dtype") else None)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("qwen3", {}),
        ("untied", ADAPTER | {"loss": {"beta": 0.1}, "weight_decay": 0.1}),
        ("qwen3", ADAPTER | {"lora": LORA | {"rank": 1, "target_modules": ["q_proj", "up_proj"]}}),
        ("llama", CHANNELS | {"gradient_checkpointing": True}),
        ("llama", CHANNELS | ADAPTER | {"channels": {"alpha_sdpo": 1.0, "mask_truncated": True}}),
        ("llama", SGD),
        ("untied", ADAPTER | {"lora": LORA | {"modules_to_save": ["norm", "lm_head"]}, "loss": {"beta": 0.1}}),
        ("untied", {"loss": {"beta": 0.1}, "reference_sync_steps": 1}),
        ("qwen2", {"microbatch_size": 0, "max_grad_norm": 0.0, "weight_decay": 0.1}),
        ("llama", {"mask_truncated": True, "loss": {"loss_type": "grpo"}}),
    ],
    ids=[
        "qwen3",
        "adapter_reference",
        "adapter_rank_1",
        "channels",
        "channels_adapter",
        "sgd",
        "adapter_whole_modules",
        "reference",
        "qwen2",
        "grpo",
    ],
)
def test_one_two_three_and_four_ranks_are_one_learner(
    prepare: Callable[..., Path], kind: str, settings: dict[str, Any]
) -> None:
    folder = prepare(kind, **settings)
    run_jobs(folder, "step@1", "step@2", "step@3", "step@4")
    # The gradient of qwen2's key biases is a small difference of large sums: on 4 ranks 1.0008e-6 of its norm away.
    check_same(folder, "1", "2", "3", "4", close=2 * CLOSE if kind == "qwen2" else CLOSE)


@pytest.mark.nightly
@pytest.mark.parametrize("rewards", [[[1, 0]], [[1, 1], [0, 0]]], ids=["fewer_samples_than_ranks", "nothing_moves"])
def test_ranks_without_samples_of_their_own_keep_step(prepare: Callable[..., Path], rewards: Any) -> None:
    folder = prepare(rewards=rewards)
    run_jobs(folder, "step@1", "step@4") if rewards == [[1, 0]] else run_jobs(folder, "still@1", "still@4")
    assert apart(folder, "weights-1", "weights-4") <= CLOSE


PLANTED = ["local_denominators", "own_norm", "dropped_unseen", "averaged", "counted_twice", "root_left_whole"]


@pytest.mark.nightly
@pytest.mark.parametrize("bug", PLANTED)
def test_planted_bugs_are_seen(prepare: Callable[..., Path], bug: str) -> None:
    folder = prepare()
    run_jobs(folder, "step@1", f"step+{bug}@2")
    with pytest.raises(AssertionError):
        check_same(folder, "1", f"2-{bug}")


@pytest.mark.nightly
@pytest.mark.parametrize("bug", ["averaged", "own_norm", "merged_alone", "dropped_unseen"])
def test_planted_bugs_of_an_adapter_are_seen(prepare: Callable[..., Path], bug: str) -> None:
    folder = prepare("untied", **ADAPTER)
    run_jobs(folder, "step@1", f"step+{bug}@2")
    with pytest.raises(AssertionError):
        check_same(folder, "1", f"2-{bug}")


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("settings", "bug"), [(CHANNELS, "averaged"), (CHANNELS, "counted_twice"), (SGD, "own_usual"), (SGD, "averaged")]
)
def test_planted_bugs_of_other_losses_and_optimisers_are_seen(
    prepare: Callable[..., Path], settings: dict[str, Any], bug: str
) -> None:
    folder = prepare("untied", **settings)
    run_jobs(folder, "step@1", f"step+{bug}@2")
    with pytest.raises(AssertionError):
        check_same(folder, "1", f"2-{bug}")


@pytest.mark.nightly
def test_a_loss_that_is_no_number_on_one_rank_is_refused_on_all(prepare: Callable[..., Path]) -> None:
    folder = prepare("untied", **CHANNELS)
    run_jobs(folder, "broken@2")
    assert len(list(folder.glob("refused-2-*"))) == 2


@pytest.mark.nightly
@pytest.mark.usefixtures("bfloat16_products")
@pytest.mark.parametrize("bug", ["averaged", "rounded_masters", "coarse_sums"])
def test_planted_bugs_of_masters_are_seen(prepare: Callable[..., Path], bug: str) -> None:
    folder = prepare("untied", **LOW)
    run_jobs(folder, "step@1", f"step+{bug}@2")
    with pytest.raises(AssertionError):
        check_same(folder, "1", f"2-{bug}", published=ROUNDED)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("bug", "told"),
    [
        ("other_order", "of the frozen base, put together from 2 ranks, is not what was cut"),
        ("another_base", "rank 1 of the learner has read another base than rank 0"),
    ],
)
def test_a_base_that_is_not_one_is_refused(prepare: Callable[..., Path], bug: str, told: str) -> None:
    with pytest.raises(AssertionError, match=told):
        run_jobs(prepare("untied", **ADAPTER), f"step+{bug}@2")


@pytest.mark.nightly
def test_a_base_that_moved_on_another_rank_is_refused_on_all(prepare: Callable[..., Path]) -> None:
    folder = prepare("untied", **ADAPTER)
    run_jobs(folder, "moved@2")
    assert len(list(folder.glob("refused-2-*"))) == 2


@pytest.mark.nightly
def test_a_rank_that_drops_samples_is_refused_before_the_step(prepare: Callable[..., Path]) -> None:
    with pytest.raises(AssertionError, match="samples were to be scored, each by one rank; rank 0: 5, rank 1: 2"):
        run_jobs(prepare(), "step+dropped@2")


def check_resumed(folder: Path, *, close: float = CLOSE) -> None:
    """What `save` and `resume` left on 1, 2 and 3 ranks ends at the same place."""
    assert apart(folder, "ended-1", "ended-2") <= close
    assert apart(folder, "ended-2", "saved-2-on-2") == 0.0, "bit for bit on as many ranks"
    assert apart(folder, "ended-1", "saved-1-on-1") == 0.0
    for saved, on in (("1", "2"), ("1", "3"), ("2", "1"), ("2", "3")):
        assert apart(folder, "ended-1", f"saved-{saved}-on-{on}") <= close, f"saved on {saved}, resumed on {on}"
    assert apart(folder, "ended-2", "saved-2-on-2-first_rows") > close, "planted: the wrong rows of what was saved"
    read = {rank: json.loads((folder / f"entries-3-{rank}.json").read_text())[0] for rank in range(3)}
    whole = json.loads((folder / "entries-1-0.json").read_text())[0]
    assert max(read.values()) < 0.5 * whole, "each reads its own rows"
    assert sum(read.values()) >= whole


@pytest.mark.nightly
def test_a_run_saved_on_two_ranks_goes_on_on_one_two_and_three(prepare: Callable[..., Path]) -> None:
    folder = prepare("untied", loss={"beta": 0.1})
    run_jobs(folder, "save@1", "save@2", "resume@1", "resume@2", "resume@3", "resume+first_rows@2")
    check_resumed(folder)
    one, two = (folder / f"saved-{size}" / "step_2" for size in (1, 2))
    assert {p.relative_to(one) for p in one.rglob("*")} == {p.relative_to(two) for p in two.rglob("*")}
    assert (one / "config.json").read_bytes() == (two / "config.json").read_bytes()
    for name in ("model", "training/optimiser", "training/reference", "training/old"):
        assert apart(folder, f"saved-1/step_2/{name}", f"saved-2/step_2/{name}") <= 10 * CLOSE, name
    plain = type(make_net_of(two)).__name__
    assert plain == "LlamaForCausalLM"


@pytest.mark.nightly
@pytest.mark.usefixtures("bfloat16_products")
def test_masters_saved_on_two_ranks_go_on_on_one_two_and_three(prepare: Callable[..., Path]) -> None:
    folder = prepare("untied", **LOW | {"loss": {"beta": 0.1}, "reference_sync_steps": 1})
    run_jobs(folder, "save@1", "save@2", "resume@1", "resume@2", "resume@3", "resume+first_rows@2")
    check_resumed(folder, close=ROUNDED)
    one, two = (folder / f"saved-{size}" / "step_2" for size in (1, 2))
    assert (one / "config.json").read_bytes() == (two / "config.json").read_bytes()
    for name in ("training/masters", "training/optimiser", "training/old"):
        assert apart(folder, f"saved-1/step_2/{name}", f"saved-2/step_2/{name}") <= 10 * CLOSE, name
    weights, masters = (load_file(two / f"{name}.safetensors") for name in ("model", "training/masters"))
    assert all(torch.equal(weights[name], masters[name].bfloat16()) for name in masters), "rounded, and no other dtype"
    assert {value.dtype for value in load_file(two / "training/reference.safetensors").values()} == {torch.bfloat16}


@pytest.mark.nightly
def test_an_adapter_saved_on_two_ranks_goes_on_on_one_two_and_three(prepare: Callable[..., Path]) -> None:
    folder = prepare("untied", **ADAPTER | {"loss": {"beta": 0.1}})
    run_jobs(folder, "save@1", "save@2", "resume@1", "resume@2", "resume@3", "resume+first_rows@2")
    check_resumed(folder, close=10 * CLOSE)  # second halves that are near 0 are divided by moments that are
    one, two = (folder / f"saved-{size}" / "step_2" for size in (1, 2))
    assert (one / "adapter_config.json").read_bytes() == (two / "adapter_config.json").read_bytes()
    for name in ("adapter_model", "training/optimiser", "training/old"):
        assert apart(folder, f"saved-1/step_2/{name}", f"saved-2/step_2/{name}") <= 10 * CLOSE, name
    run_jobs(folder, "save+not_gathered@2")
    assert apart(folder, "saved-1/step_2/adapter_model", "saved-2-not_gathered/step_2/adapter_model") > CLOSE, "planted"
    from peft import PeftModel

    merged = PeftModel.from_pretrained(make_net_of(folder / "model"), two).merge_and_unload().state_dict()
    published = load_file(folder / "published-2.safetensors")
    assert all(torch.allclose(merged[name], published[name], atol=1e-6) for name in published), "as PEFT merges it"


@pytest.mark.nightly
def test_publishing_gathers_one_tensor_at_a_time_into_the_engines_memory(prepare: Callable[..., Path]) -> None:
    folder = prepare("untied")
    run_jobs(folder, "publish@2", "publish+all_at_once@2")
    most = {path.stem: json.loads(path.read_text()) for path in folder.glob("most-*.json")}
    assert most["most-2-0"][0] == most["most-2-1"][0] == 1
    assert most["most-2-1"][1] == 0, "rank 1 keeps nothing"
    assert most["most-2-all_at_once-0"][0] > 10, "planted"


def make_net_of(folder: Path) -> Any:
    """What plain transformers makes of a checkpoint."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder)


def test_shares_are_consecutive_whole_and_even(sampled_groups: SampleGroups, net: Any) -> None:
    samples = sampled_groups(net, rewards=[[1, 0, 0], [0, 1], [1, 0, 0, 1]], max_new=14)
    for ranks in (1, 2, 3, 4, 20):
        shares = deal(samples, ranks)
        assert [s for share in shares for s in share] == samples
        costs = [sum(len(s.prompt_ids) + len(s.completion_ids) for s in share) for share in shares]
        most = max(len(s.prompt_ids) + len(s.completion_ids) for s in samples)
        assert max(costs) <= sum(costs) / ranks + most

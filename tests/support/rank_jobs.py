"""What ranks do in the tests of `learner.sharding`: each job is done by every rank, and rank 0 writes what came of it."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_kit import make_tokenizer
from learner_kit import make
from transformers import AutoModelForCausalLM

from surefoot.errors import InvariantError, NumericsError
from surefoot.learner import auxiliary_losses, checkpoint, grpo, lora, sharding, tensor_file
from surefoot.learner.auxiliary_losses import AuxiliaryLossSettings, make_auxiliary_losses
from surefoot.learner.lora import LoraSettings
from surefoot.learner.sharding import OneRank, RankGroup, deal
from surefoot.learner.tensor_file import whole, write_tensors
from surefoot.maths.losses import LossSettings
from surefoot.maths.preference import PreferencePair
from surefoot.records import TrainSample


def write_samples(folder: Path, samples: list[TrainSample]) -> None:
    """For `read_samples`."""
    (folder / "samples.json").write_text(json.dumps([asdict(s) for s in samples]))


def read_samples(folder: Path) -> list[TrainSample]:
    """What the test drew."""
    rows = json.loads((folder / "samples.json").read_text())
    return [TrainSample(**{k: tuple(v) if isinstance(v, list) else v for k, v in row.items()}) for row in rows]


def learner_of(folder: Path, ranks: OneRank | None, **changes: Any) -> Any:
    """The learner of the folder's model, on these ranks."""
    net = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32, attn_implementation="sdpa").eval()
    for parameter in net.parameters():
        parameter.requires_grad_(True)
    facts = json.loads((folder / "settings.json").read_text()) if (folder / "settings.json").exists() else {}
    loss, named = LossSettings(**facts.pop("loss", {})), facts.pop("lora", None)
    numbers = None
    if named is not None:
        numbers = LoraSettings(**{name: tuple(v) if isinstance(v, list) else v for name, v in named.items()})
    dtype = getattr(torch, facts.pop("dtype", "float32"))
    channels = _channels(facts.pop("channels"), ranks) if "channels" in facts else None
    learner = make(net, loss, ranks=ranks, lora=numbers, dtype=dtype, channels=channels, **(facts | changes))
    if numbers is not None:
        _move_adapter(learner)
    return learner


PAIRS = [
    PreferencePair((4, 10, 11), chosen_ids=(20, 21, 2), rejected_ids=(30, 2), source="a"),
    PreferencePair((4, 12), chosen_ids=(22, 2), rejected_ids=(31, 32, 33, 34, 2), source="b"),
    PreferencePair((5, 13), chosen_ids=(22, 23, 24, 25, 26, 27, 2), rejected_ids=(31, 2), source="c"),
]


def _channels(numbers: dict[str, Any], ranks: OneRank | None) -> Callable[[Any], Any]:
    """The losses beside the policy's; rank 0 alone can say what a teacher reads, as in a run."""

    def shown(attempt: TrainSample) -> tuple[int, ...]:
        assert ranks is None or ranks.index == 0, "the others have no tasks"
        return (7, *attempt.completion_ids, 9, *attempt.prompt_ids)

    settings = AuxiliaryLossSettings(**numbers)
    return lambda net: make_auxiliary_losses(settings, net=net, hinted=shown, pairs=PAIRS)


def _move_adapter(learner: Any) -> None:
    """As if it had been trained before: while its second halves are 0, the first ones have no gradient."""
    draw = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, value in sorted(learner.adapter.tensors().items()):
            if "lora_B" in name:
                moved = 0.02 * torch.randn(value.shape, generator=draw)
                learner.ranks.put(value, moved[learner.ranks.rows(len(moved))])
    learner.adapter.restored()


def do(job: str, folder: Path, ranks: OneRank | None) -> None:
    """A job by name, with a bug planted in this process where the name says so."""
    name, _, bug = job.partition("+")
    if bug:
        BUGS[bug]()
    JOBS[name](folder, ranks, f"{1 if ranks is None else ranks.size}{bug and f'-{bug}'}")


def step(folder: Path, ranks: OneRank | None, tag: str) -> None:
    """Two passes; the first's gradient, clipped, what is trained and published, and statistics, scores and facts."""
    learner, samples = learner_of(folder, ranks), read_samples(folder)
    gradients: dict[str, Any] = {}
    updates: list[dict[str, int]] = []
    real = learner._step

    def before(rate: float, trained: Any) -> Any:
        if not gradients:
            wholes = learner.wholes()
            for name, p in trained.items():
                gradients[name] = whole(learner.ranks.as_whole(p.grad, wholes[name])).clone()
        found = real(rate, trained)
        updates.append(asdict(found[0]))
        return found

    learner._step = before
    texts = [(s.prompt_ids, s.completion_ids) for s in samples[:3]]
    reports, scores = [], {}
    for iteration in range(2):
        report = learner.learn(samples, iteration=iteration)
        reports.append({"metrics": dict(report.metrics), "rows": dict(report.trained_rows), "applied": report.applied})
        reports[-1]["updates"] = updates[iteration]
        found = learner.score(texts, temperature=1.0)
        scores[f"{iteration}"] = torch.tensor([value for row in found for value in row])
    weights = {name: value.detach().clone() for name, value in learner.weights().items()}
    old = {f"{group}/{i}": row for (group, i), row in learner._old.items()}
    trained = {name: whole(value.detach()) for name, value in learner.wholes().items()}
    if learner.ranks.index == 0:
        named = {"gradients": gradients, "weights": weights, "old": old, "scores": scores, "trained": trained}
        for what, tensors in named.items():
            write_tensors(folder / f"{what}-{tag}.safetensors", tensors)
        (folder / f"reports-{tag}.json").write_text(json.dumps([reports, asdict(learner.facts)], default=list))


def save(folder: Path, ranks: OneRank | None, tag: str) -> None:
    """Two passes, a checkpoint, and a third pass."""
    learner, samples = learner_of(folder, ranks), read_samples(folder)
    learner.tokenizer = make_tokenizer()
    for iteration in range(2):
        learner.learn(samples, iteration=iteration)
    learner.save(folder / f"saved-{tag}" / "step_2", step=2, extra={"note": "x"})
    weights = learner.published()[0]
    if learner.ranks.index == 0:
        write_tensors(folder / f"published-{tag}.safetensors", weights)
    _third_pass(learner, samples, folder / f"ended-{tag}.safetensors")


def _third_pass(learner: Any, samples: list[TrainSample], path: Path) -> None:
    learner.learn(samples, iteration=2)
    weights = {name: value.detach().clone() for name, value in learner.weights().items()}
    trained = {f"trained/{name}": whole(value.detach()) for name, value in learner.wholes().items()}
    if learner.ranks.index == 0:
        write_tensors(path, weights | trained)


def resume(folder: Path, ranks: OneRank | None, tag: str) -> None:
    """Each checkpoint that `save` left, and the third pass from it; first a step elsewhere, which has to be undone."""
    samples = read_samples(folder)
    entries: list[int] = []
    real = checkpoint.read_tensors

    def counted(path: Path, expected: Any, rows: Any = None) -> Any:
        found = real(path, expected, rows)
        if path.name == "optimiser.safetensors":
            entries.append(sum(value.numel() for value in found.values()))
        return found

    checkpoint.read_tensors = counted
    for saved in [folder / f"saved-{size}" for size in (1, 2)]:
        learner = learner_of(folder, ranks)
        learner.learn(samples)
        assert learner.load(saved / "step_2") == {"note": "x"}
        _third_pass(learner, samples, folder / f"{saved.name}-on-{tag}.safetensors")
    (folder / f"entries-{tag}-{learner.ranks.index}.json").write_text(json.dumps(entries))


def moved(folder: Path, ranks: OneRank | None, tag: str) -> None:
    """One entry of the last rank's part of the frozen base is changed: every rank refuses to go on, by its name."""
    learner, samples = learner_of(folder, ranks), read_samples(folder)
    learner.learn(samples)
    if learner.ranks.index == learner.ranks.size - 1:
        learner.adapter._frozen["model.layers.1.mlp.down_proj.base_layer.weight"][-1, -1] += 1.0
    learner.tokenizer = make_tokenizer()
    with pytest.raises(InvariantError, match=r"1 tensors of the frozen base have changed, first model\.layers\.1"):
        learner.save(folder / f"saved-{tag}" / "step_1", step=1, extra={})
    (folder / f"refused-{tag}-{learner.ranks.index}").touch()


def broken(folder: Path, ranks: OneRank | None, tag: str) -> None:
    """A loss beside the policy's is no number on the last rank: every rank refuses it, and nothing is applied."""
    learner = learner_of(folder, ranks)
    if learner.ranks.index == learner.ranks.size - 1:
        real = auxiliary_losses.preference_loss

        def lost(*args: Any, **words: Any) -> Any:
            terms = real(*args, **words)
            return terms._replace(loss=terms.loss * float("nan"))

        auxiliary_losses.preference_loss = lost
    with pytest.raises(NumericsError, match=r"version 0: the loss of beta_replay is nan"):
        learner.learn(read_samples(folder))
    assert learner.version == 0
    (folder / f"refused-{tag}-{learner.ranks.index}").touch()


def still(folder: Path, ranks: OneRank | None, tag: str) -> None:
    """A step on samples of which none moves anything: a step without signal is a step, and compares with the sampler."""
    learner = learner_of(folder, ranks)
    report = learner.learn(read_samples(folder))
    assert report.applied
    assert report.metrics["sampling/sampling_logp_difference/max"] < 1e-4
    weights = {name: value.detach().clone() for name, value in learner.weights().items()}
    if learner.ranks.index == 0:
        write_tensors(folder / f"weights-{tag}.safetensors", weights)


def publish(folder: Path, ranks: OneRank | None, tag: str) -> None:
    """Two versions: how many gathered tensors live at once, and that the second is where the first was."""
    learner, samples = learner_of(folder, ranks), read_samples(folder)
    places = {name: value.data_ptr() for name, value in learner.published()[0].items()}
    learner.learn(samples)
    living: set[int] = set()
    most = 0
    real = sharding.whole

    def counted(tensor: Any) -> Any:
        nonlocal most
        found = real(tensor)
        key = id(found)
        living.add(key)
        weakref.finalize(found, living.discard, key)
        most = max(most, len(living))
        return found

    sharding.whole = counted
    weights, version = learner.published()
    assert version == 1
    assert {name: value.data_ptr() for name, value in weights.items()} == places, "the engine's own memory"
    again = learner.published()[0]
    assert all(again[name] is value for name, value in weights.items()), "a version is gathered once"
    (folder / f"most-{tag}-{learner.ranks.index}.json").write_text(json.dumps([most, len(weights)]))


JOBS: dict[str, Callable[[Path, OneRank | None, str], None]] = {
    "step": step, "save": save, "resume": resume, "still": still,
    "publish": publish, "moved": moved, "broken": broken,
}  # fmt: skip


# -- planted bugs ---------------------------------------------------------------------------------


def _local_denominators() -> None:
    """Every rank divides by the counts of its own samples."""
    real = grpo.GRPOLearner._totals

    def totals(self: Any, samples: Any) -> Any:
        return real(self, deal(samples, self.ranks.size)[self.ranks.index])

    grpo.GRPOLearner._totals = totals  # type: ignore[method-assign]


def _own_norm() -> None:
    """Every rank clips by the norm of its own shards."""
    RankGroup.norm = OneRank.norm  # type: ignore[method-assign]


def _dropped_samples() -> None:
    """The last rank scores nothing of its first microbatch."""
    real = RankGroup.pieces

    def pieces(self: Any, samples: Any, cut: Any, *args: Any, **words: Any) -> Any:
        found = real(self, samples, cut, *args, **words)
        return found if self.index < self.size - 1 else [(samples[:1], False), *found[1:]]

    RankGroup.pieces = pieces  # type: ignore[method-assign]


def _dropped_unseen() -> None:
    """And nobody looks."""
    _dropped_samples()
    grpo.check_dealt = lambda scored, samples: None


def _averaged() -> None:
    """Gradients are averaged over ranks, as data parallel training does by default."""
    real = RankGroup.shard

    def shard(self: Any, net: Any, *args: Any) -> None:
        real(self, net, *args)
        for module in net.modules():
            if hasattr(module, "set_gradient_divide_factor"):
                module.set_gradient_divide_factor(float(self.size))

    RankGroup.shard = shard  # type: ignore[method-assign]


def _counted_twice() -> None:
    """The microbatch that fills a gap counts."""
    real = RankGroup.pieces
    RankGroup.pieces = lambda *args, **words: [(piece, True) for piece, _ in real(*args, **words)]  # type: ignore[method-assign]
    grpo.check_dealt = lambda scored, samples: None


def _root_left_whole() -> None:
    """After a forward pass without a backward one, what is outside of the layers stays as it was gathered."""
    real = RankGroup.shard

    def shard(self: Any, net: Any, *args: Any) -> None:
        real(self, net, *args)
        net.set_reshard_after_forward(False, recurse=False)

    RankGroup.shard = shard  # type: ignore[method-assign]


def _all_at_once() -> None:
    """Everything is gathered, then copied."""
    real = sharding.gather_into

    def gather_into(copies: Any, parts: Any, **words: Any) -> None:
        real(copies, {name: sharding.whole(part.detach()) for name, part in parts.items()}, **words)

    grpo.gather_into = gather_into


def _own_moments() -> None:
    """Resumed, every rank takes the first rows of the optimiser's memory."""
    real = RankGroup.rows
    RankGroup.rows = lambda self, length: slice(0, len(range(length)[real(self, length)]))  # type: ignore[method-assign]


def _not_gathered() -> None:
    """A checkpoint has rank 0's rows, and zeros where those of the others belong."""
    real = tensor_file.whole

    def whole_of(tensor: Any) -> Any:
        found = real(tensor)
        if found is not tensor and found.dim():
            found[-(-len(found) // tensor.device_mesh.size()) :] = 0
        return found

    tensor_file.whole = whole_of


def _merged_alone() -> None:
    """Rank 0 merges its rows, and the others' rows of the base arrive without their adapter."""
    real = RankGroup.as_whole

    def as_whole(self: Any, part: Any, like: Any) -> Any:
        return real(self, part if self.index == 0 or like.requires_grad else like.to_local(), like)

    RankGroup.as_whole = as_whole  # type: ignore[method-assign]


def _other_order() -> None:
    """Rows are put together in another order than they were cut in."""
    real = lora.whole
    lora.whole = lambda tensor: real(tensor).flip(0)  # type: ignore[attr-defined]


def _another_base() -> None:
    """Rank 1 has read another file."""
    real = RankGroup.shard

    def shard(self: Any, net: Any, *args: Any) -> None:
        real(self, net, *args)
        self.exchange = lambda told: RankGroup.exchange(self, f"{told}{self.index}")

    RankGroup.shard = shard  # type: ignore[method-assign]


def _rounded_masters() -> None:
    """What is cut, and stepped, are the rounded weights in wider numbers, not the file's own."""
    real = grpo.put_masters
    grpo.put_masters = lambda net, given: real(net)


def _coarse_sums() -> None:
    """Gradients are added over ranks in the precision that computes."""
    from torch.distributed import fsdp

    real = fsdp.MixedPrecisionPolicy
    fsdp.MixedPrecisionPolicy = lambda **words: real(**words | {"reduce_dtype": words["param_dtype"]})  # type: ignore[assignment,misc]


def _own_usual() -> None:
    """What a usual gradient is, every rank says of its own rows."""
    RankGroup.sum_each = OneRank.sum_each  # type: ignore[method-assign]


BUGS: dict[str, Callable[[], None]] = {
    "own_usual": _own_usual,
    "rounded_masters": _rounded_masters, "coarse_sums": _coarse_sums,
    "not_gathered": _not_gathered, "merged_alone": _merged_alone, "other_order": _other_order,
    "another_base": _another_base,
    "local_denominators": _local_denominators, "own_norm": _own_norm, "dropped": _dropped_samples,
    "dropped_unseen": _dropped_unseen, "averaged": _averaged, "counted_twice": _counted_twice,
    "root_left_whole": _root_left_whole, "first_rows": _own_moments,
    "all_at_once": _all_at_once,
}  # fmt: skip

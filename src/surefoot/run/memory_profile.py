"""Memory of a config: what a dry run predicts, and `surefoot memory`, by sequence length, batch and accumulation.

Promises   each measured row had a process of its own, so that no row inherits the peak of another; a row that was only
           predicted says so, and why; when rows were to be measured and none was, the exit code is 1.
Never      loads a model: weights are made up, sizes are real.

Read next: `learner/footprint.py`, the arithmetic; `memory_child.py`, one measurement.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from surefoot.config import Config
from surefoot.config.choices import engine_facts
from surefoot.errors import ModelError
from surefoot.learner.footprint import FLOAT32, ROOM, Footprint, ModelShape, Work, decided, predict
from surefoot.system.process import Child
from surefoot.system.text import counted, size

if TYPE_CHECKING:
    from surefoot.config.load import LoadedConfig

MAX_ROWS = 256
"""What `run.build.MAX_AUTO_ROWS` says; a test compares them."""
SIZES_GB = (24, 80, 141)
"""Of the devices that a recommendation is about."""
CONTEXT_BYTES = 600 * 2**20
"""What CUDA and its libraries take for themselves."""
SMALL = 20_000_000
"""Parameters up to which a CPU measures; a larger model takes minutes for each row there."""
CELL_S = 300.0
"""Longest measurement."""


class AdapterSize(NamedTuple):
    """Entries of an adapter that are trained, and of the base that have a merged copy or are held in four bits."""

    trained: int
    merged: int
    packed: int = 0


# -- From a config to what memory depends on ------------------------------------------------------


def engine_copies(config: Config, device: str) -> int:
    """How many copies of the weights there are because of engines: laid out for decoding, or handed over."""
    engine = engine_facts(config.engine.kind)
    in_place = engine.reads_learner and (device == "mps" or (device == "cuda" and not config.cuda_kernels))
    own = 0 if engine.elsewhere or in_place else 1
    if config.runtime.kind == "ray":
        return own * config.runtime.engines + 2  # two versions in shared memory
    return own + (1 if config.max_staleness > 0 else 0)  # the version in force, while the learner goes on


def work_of_config(
    config: Config, prompt: int, device: str, adapter: AdapterSize | None = None, free: float | None = None
) -> Work:
    """What one run of this config does.

    Args:
        prompt: tokens of its longest prompt.
        adapter: what is trained in place of the weights.
        free: bytes that the device has.
    """
    turns = config.max_turns if config.tools.on else 1
    own = config.engine.kind in ("auto", "embedded", "transformers") and config.runtime.kind == "local"
    return Work(
        device=device, width=2 if config.dtype == "bfloat16" else FLOAT32, groups=config.tasks_per_step,
        siblings=config.num_generations, prompt=prompt, completion=config.max_completion_length * turns,
        microbatch_size=config.microbatch_size, optim=config.optim, reference=config.beta > 0,
        adapter=None if adapter is None else adapter.trained, merged=0 if adapter is None else adapter.merged,
        packed=0 if adapter is None else adapter.packed,
        fused=device == "cuda" and config.cuda_kernels and adapter is None, engine_copies=engine_copies(config, device),
        rows=(config.engine.rows or min(config.rollouts_per_step, MAX_ROWS)) if own else 0, free=free,
    )  # fmt: skip


def foresee(shape: ModelShape, work: Work, wanted: bool | str) -> Footprint:
    """The footprint, with `gradient_checkpointing` decided as the learner will decide it."""
    return predict(shape, replace(work, recomputes=decided(shape, work, wanted)))


def unused_here(device: str) -> float | None:
    """Bytes that this machine's device has free; None where nobody says."""
    import torch

    from surefoot.learner.memory import unused_bytes

    return unused_bytes(torch.device(device))


def plan_lines(found: Footprint, work: Work, config: Config) -> list[str]:
    """The memory of a run in words, part by part."""
    of = "" if work.free is None else f" of {size(work.free)} free"
    lines = [
        f"memory    about {size(found.peak)}{of} at the peak, while {found.moment}, and about 0.5 GB for Python and "
        f"torch ({config.dtype}):"
    ]
    lines += [f"            {name:<22} {size(value)}" for name, value in found.lasting.items()]
    lines += ["          and at times, not all at once:"]
    lines += [f"            {name:<22} {size(value)}" for name, value in found.passing.items()]
    piece = found.microbatch
    lines.append(
        f"          the largest microbatch has {counted(piece.rows, 'rollout')} and {piece.tokens:,} tokens; "
        f"{'layers are computed again' if found.recomputes else 'activations are kept'} "
        f"(gradient_checkpointing = {_toml(config.gradient_checkpointing)})"
    )
    if work.free is not None and found.peak > work.free:
        lines.append("          that is more than is free: take a smaller microbatch_size, lora or a smaller model")
    return lines


def _toml(value: bool | str) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value).lower()


# -- Shapes without a folder ----------------------------------------------------------------------


def count_parameters(shape: ModelShape) -> int:
    """Of a decoder of this shape, without biases."""
    h, d = shape.hidden, shape.head_dim
    layer = 2 * h * d * (shape.heads + shape.kv_heads) + 3 * h * shape.intermediate + 2 * h
    layer += 2 * d if shape.qk_norm else 0
    return shape.vocab * h * (1 if shape.tied else 2) + shape.layers * layer + h


def count_adapter(shape: ModelShape, rank: int) -> dict[str, int]:
    """Entries of an adapter on every linear layer, and of what it is merged into; as `Work` calls them."""
    h, i, q, kv = shape.hidden, shape.intermediate, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    layers = [(h, q), (h, kv), (h, kv), (q, h), (h, i), (h, i), (i, h)]
    return {
        "adapter": shape.layers * rank * sum(a + b for a, b in layers),
        "merged": shape.layers * sum(a * b for a, b in layers),
    }


def run_cell(shape: ModelShape, work: Work, rank: int | None, *, timeout_s: float) -> dict[str, Any]:
    """What `memory_child` found in a process of its own, or `{"error": why}`."""
    asked = json.dumps({"shape": asdict(shape), "work": asdict(work), "rank": rank})
    argv = [sys.executable, "-m", "surefoot.run.memory_child"]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(each for each in sys.path if each)}  # what we import, it does
    with Child.start(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, keep_stderr=4000, env=env) as child:
        child.stdin.write(asked.encode())
        child.stdin.close()
        code = child.wait(timeout_s)
        said = child.printed().decode(errors="replace").strip()
        if code is None:
            return {"error": f"not done after {timeout_s:.0f} s"}
        if code:
            how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"exit {code}"
            return {"error": f"{how}: {said}" if said else how}
        found: dict[str, Any] = json.loads(child.stdout.read().decode().splitlines()[-1])
    return found


# -- `surefoot memory`: rows by length, batch and accumulation ------------------------------------


@dataclass(frozen=True)
class Row:
    """One combination."""

    length: int
    """Prompt and completion, in tokens."""
    batch: int
    """Rollouts of one microbatch."""
    accumulation: int
    """Microbatches of one step."""
    predicted: float
    moment: str
    per_sample: float
    """What one more rollout in the microbatch adds."""
    recomputes: bool
    measured: float | None = None
    why: str = ""
    """Why it was not measured."""
    failed: bool = False

    @property
    def peak(self) -> float:
        """Measured where it was."""
        return self.predicted if self.measured is None else self.measured


@dataclass(frozen=True)
class Advice:
    """What goes on a device of this size."""

    gigabytes: int
    fits: bool
    settings: str
    batch: int
    predicted: float

    def line(self) -> str:
        """For a person."""
        if not self.fits:
            return f"{self.gigabytes:>4} GB  does not fit; the least is about {size(self.predicted)}"
        return f"{self.gigabytes:>4} GB  {self.settings}, microbatch_size = {self.batch}: about {size(self.predicted)}"


@dataclass(frozen=True)
class MemoryTable:
    """The rows, and what they come to."""

    model: str
    device: str
    parameters: int
    rows: tuple[Row, ...]
    advice: tuple[Advice, ...]
    wanted: int
    """Rows that were to be measured."""

    @property
    def exit_code(self) -> int:
        """1 when every measurement failed."""
        return 1 if self.wanted and all(row.measured is None for row in self.rows) else 0

    def record(self) -> dict[str, Any]:
        """For a program."""
        rows = [asdict(row) | {"peak": row.peak} for row in self.rows]
        return {
            "metadata": {"model": self.model, "device": self.device, "parameters": self.parameters,
                         "measured": sum(row.measured is not None for row in self.rows), "rows": len(rows)},
            "results": rows, "recommendations": [asdict(each) for each in self.advice],
        }  # fmt: skip

    def lines(self) -> list[str]:
        """For a person."""
        head = f"{'tokens':>7} {'batch':>6} {'accum.':>6} {'predicted':>10} {'measured':>10} {'a sample':>10}"
        lines = [f"{self.model}: {self.parameters:,} parameters on {self.device}", head]
        for row in self.rows:
            found = size(row.measured) if row.measured is not None else ("failed" if row.failed else "-")
            lines.append(
                f"{row.length:>7} {row.batch:>6} {row.accumulation:>6} {size(row.predicted):>10} {found:>10} "
                f"{size(row.per_sample):>10}" + ("  layers computed again" if row.recomputes else "")
            )
        lines += [f"  {why}" for why in dict.fromkeys(row.why for row in self.rows if row.why)]
        lines += [each.line() for each in self.advice]
        return [*lines, "Devices by size: predicted, for one CUDA device that holds engine and learner."]


def memory_table(
    config: Config, shape: ModelShape, prompt: int, device: str, *, adapter: AdapterSize | None = None,
    lengths: Sequence[int] = (), batches: Sequence[int] = (), accumulations: Sequence[int] = (), measures: bool = True,
    tell: Callable[[str], None] = lambda line: None,
) -> MemoryTable:  # fmt: skip
    """Every combination, predicted; measured where a device is there, or the model is small."""
    base = work_of_config(config, prompt, device, adapter, unused_here(device))
    usual = base.completion
    lengths = lengths or sorted({max(1, usual // 2), usual, 2 * usual})
    batches, accumulations = batches or (base.siblings, 4 * base.siblings), accumulations or (1, 4)
    works = [each for n in lengths for b in batches for a in accumulations for each in _combined(base, n, b, a)]
    refused = _why_not_measured(shape, device) if measures else "not measured: --predict"
    rows = []
    for work in works:
        found = foresee(shape, work, config.gradient_checkpointing)
        row = _row(found, work)
        if refused:
            rows.append(replace(row, why=refused))
            continue
        tell(f"measuring {row.length} tokens x {row.batch} x {row.accumulation} ...")
        asked = replace(work, recomputes=found.recomputes, free=None)
        seen = run_cell(shape, asked, config.lora.rank, timeout_s=CELL_S)
        told = str(seen.get("error", ""))
        rows.append(replace(row, measured=seen.get("peak"), why=told[-300:], failed="error" in seen))
    wanted = 0 if refused else len(rows)
    advice = tuple(_advice(config, shape, prompt, adapter, gigabytes) for gigabytes in SIZES_GB)
    return MemoryTable(config.model, device, shape.parameters, tuple(rows), advice, wanted)


def table_of_config(
    loaded: LoadedConfig, *, lengths: Sequence[int] = (), batches: Sequence[int] = (),
    accumulations: Sequence[int] = (), measures: bool = True, tell: Callable[[str], None] = lambda line: None,
) -> MemoryTable:  # fmt: skip
    """The table of a config: its model's sizes from its folder, its prompts as a run would write them."""
    from surefoot.learner.model import load_tokenizer, resolve_device
    from surefoot.run.dry_run import longest_prompt, model_facts
    from surefoot.run.model import adapter_plan, require_packages

    config = loaded.config
    facts = model_facts(config.model, loaded.base)
    if facts is None:
        raise ModelError(
            f"{config.model} is not a folder on this machine", "its sizes are not known, and nothing is downloaded",
            "download it, and set model to its folder",
        )  # fmt: skip
    device = resolve_device(config.device)
    require_packages(config)
    prompt = config.max_prompt_length or longest_prompt(loaded, load_tokenizer(config.model, base=loaded.base))
    plan = adapter_plan(config, loaded.base)
    adapter = None if plan is None else AdapterSize(plan.parameters, plan.merged, plan.packed)
    return memory_table(
        config, facts.shape, prompt, device, adapter=adapter, lengths=lengths, batches=batches,
        accumulations=accumulations,
        measures=measures, tell=tell,
    )  # fmt: skip


def _combined(base: Work, length: int, batch: int, accumulation: int) -> Iterator[Work]:
    """A step of `batch` times `accumulation` rollouts; none where they make no whole groups."""
    siblings = min(base.siblings, batch)
    if batch * accumulation % siblings == 0:
        rows = min(batch * accumulation, MAX_ROWS) if base.rows else 0
        groups = batch * accumulation // siblings
        yield replace(
            base, completion=length, microbatch_size=batch, groups=groups, siblings=siblings, rows=rows
        )  # fmt: skip


def _row(found: Footprint, work: Work) -> Row:
    piece = found.microbatch
    share = found.passing.get("activations", 0.0) / max(1, piece.rows)
    return Row(
        work.prompt + work.completion, piece.rows, piece.count, found.peak, found.moment, share, found.recomputes
    )  # fmt: skip


def _why_not_measured(shape: ModelShape, device: str) -> str:
    if device == "cuda" or (device == "cpu" and shape.parameters <= SMALL):
        return ""
    if device == "cpu":
        return f"not measured: a CPU measures models of at most {SMALL:,} parameters"
    return f"not measured: nobody reads the peak of a {device} device"


def _advice(config: Config, shape: ModelShape, prompt: int, adapter: AdapterSize | None, gigabytes: int) -> Advice:
    """The first of these settings that fits, the fastest first, with the largest microbatch of whole groups."""
    room = gigabytes * 1e9 - CONTEXT_BYTES
    base = work_of_config(config, prompt, "cuda", adapter, room)
    tried = [
        (replace(base, recomputes=recomputes, optim=optim), words)
        for recomputes, optim, words in (
            (False, config.optim, "as it is"), (True, config.optim, "gradient_checkpointing = true"),
            (True, "adamw_8bit", 'gradient_checkpointing = true, optim = "adamw_8bit"'),
        )
    ]  # fmt: skip
    least = float("inf")
    for work, words in tried:
        for groups in range(work.groups, 0, -1):
            batch = groups * work.siblings
            found = predict(shape, replace(work, microbatch_size=batch))
            least = min(least, found.peak)
            if found.peak <= ROOM * room:
                return Advice(gigabytes, True, words, batch, found.peak)
    return Advice(gigabytes, False, "", 0, least)

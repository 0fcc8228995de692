"""How many engines per learner GPU, how many tasks per step, how stale: sizing from a simulation.

    python benchmarks/sizing.py [--quick] [--text FILE]

The product's own router and schedule on a simulated clock, with durations from arithmetic (`sizing_model.py`). So the
figures are as good as `Machine` there; put in what you measured. What the simulation adds to the arithmetic is what
waits for what: a group for its slowest sibling, the learner for its batch, sampling for room, the learner for a sync.

No clock is read and all draws are seeded: a busy machine changes nothing.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from method import Journal
from report import common_arguments
from routing import simulated
from sizing_model import MODELS, STEPS, WARM, Figures, Machine, Model, Plan, Simulation, Work, plan


def row(machine: Machine, what: Plan, journal: Journal) -> list[str]:
    """One simulated run, in words."""

    async def story() -> Figures:
        return await Simulation(machine, what).run()

    found: Figures = simulated(story)
    if max(found.ages) > what.work.staleness:
        raise RuntimeError(f"{what}: a group of age {max(found.ages)} was trained on")
    numbers = {
        "step_s": found.seconds / (STEPS - WARM),
        "engines_busy": found.row_seconds / found.seconds / (what.engines * what.work.rows),
        "learner_busy": found.learning / found.seconds, "sync_share": found.syncing / found.seconds,
        "staleness": sum(found.ages) / len(found.ages), "tokens_per_s_gpu": found.tokens / found.seconds / what.gpus,
    }  # fmt: skip
    journal.write("sizing", {"plan": what, **numbers})
    per = what.model.engine_gpus(machine)
    return [
        what.model.name, f"{what.gpus:,}", f"{what.engines} x {per}", str(what.learner),
        f"{what.engines * per / what.learner:.1f}", f"{what.tasks:,}", str(what.work.staleness),
        f"{numbers['step_s']:.0f} s", f"{numbers['engines_busy']:.0%}", f"{numbers['learner_busy']:.0%}",
        f"{numbers['sync_share']:.1%}", f"{numbers['staleness']:.2f}", f"{numbers['tokens_per_s_gpu']:,.0f}",
    ]  # fmt: skip


HEAD = [
    "model", "GPUs", "engines x GPUs", "learner GPUs", "engine : learner GPUs", "tasks_per_step", "max_staleness",
    "step", "engines busy", "learner busy", "sync", "staleness", "tokens/s/GPU",
]  # fmt: skip


def assumptions(machine: Machine, work: Work) -> str:
    lines = [
        f"GPU: reads {machine.bandwidth / 1e12:.1f} TB/s, computes {machine.flops / 1e12:.0f} TFLOP/s in bf16 (an H200 "
        f"as we measured it), {machine.memory / 2**30:.0f} GiB. Assumed, not measured: engines reach "
        f"{machine.decode_share:.0%} of that when decoding, the learner {machine.train_share:.0%}.",
        f"Work: prompts of {work.prompt} tokens; completions log-normal, median {work.tokens:,}, cut at "
        f"{work.longest:,}; {work.group} rollouts per task; an engine decodes {work.rows} rollouts side by side. No "
        "tools, no slow graders: what waits for tools needs more engines.",
        "A decode step reads the weights and the caches of all rows once; reading the prompt is left out. Learning is "
        "8 x parameters operations per token: forward, backward and one scoring pass.",
        f"A sync moves two bytes per parameter at {machine.network / 1e9:.0f} GB/s into every engine, shared by its "
        f"GPUs, all engines at once, and is proved in {machine.proof:g} s. Engines go on sampling meanwhile; the "
        "learner waits.",
        "An engine has as many GPUs as keep its weights below 60 % of their memory; the learner at least as many as "
        "hold 16 bytes per parameter in 60 % of theirs. GPUs are shared out so that the slower side is as fast as it "
        "can be.",
        "A group is in flight until its slowest sibling has ended, so an engine is full only with "
        f"{work.groups_per_engine()} groups of {work.group} on its {work.rows} rows; and about as many groups have "
        "ended and wait for their turn. Where tasks_per_step is not the question, it is what this takes: 2 x engines x "
        f"{work.groups_per_engine()} / max_staleness.",
        "Sampling asks for as many groups as max_staleness allows, so groups are about as old as they may be: choose "
        "the smallest max_staleness that keeps the engines busy.",
        "Nothing fails, every GPU is equally fast, and the learner loses nothing by having many: that the figures per "
        "GPU stay the same up to 1,000 is half assumed (the learner) and half found (routing, staleness, waiting). "
        "num_iterations = 1, weight_sync_steps = 1.",
    ]
    head = "Assumptions, in plain words (put your own figures into `Machine` and `Work` of benchmarks/sizing_model.py):"
    return "\n".join([head, *(textwrap.fill(f"- {line}", 118, subsequent_indent="  ") for line in lines)])


def table(rows: Sequence[Sequence[str]]) -> str:
    lines = [HEAD, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEAD))]
    text = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    return "\n".join([text[0], "  ".join("-" * width for width in widths), *text[1:]])


def markdown(rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(line) + " |" for line in (HEAD, ["---"] * len(HEAD), *rows)]
    return "\n".join(lines)


def questions(machine: Machine, *, quick: bool) -> Iterator[tuple[str, list[Plan]]]:
    """What a reader wants to know, and the runs that answer it."""
    model, work = MODELS[1], Work()

    def planned(what: Model, how: Work, gpus: int, tasks: int | None = None) -> list[Plan]:
        found = plan(machine, what, how, gpus, tasks=tasks)
        return [] if found is None else [found]

    sizes = (8, 32) if quick else (8, 16, 32, 64, 128, 256, 512, 1000)
    yield "8B from one machine to a thousand GPUs", [p for n in sizes for p in planned(model, work, n)]
    yield "Other models on 64 GPUs", [p for m in (MODELS[:1] if quick else MODELS) for p in planned(m, work, 64)]
    grid = [(32, 1), (32, 4)] if quick else [(tasks, s) for tasks in (128, 512, 2048) for s in (0, 1, 2, 4, 8)]
    yield (
        "8B on 64 GPUs, by tasks_per_step and max_staleness: what a small step and fresh samples cost",
        [p for tasks, s in grid for p in planned(model, replace(work, staleness=s), 64, tasks)],
    )
    lengths = () if quick else (500, 2000, 8000)
    yield (
        f"8B on 64 GPUs, by median length of the completions: {', '.join(f'{n:,}' for n in lengths)} tokens",
        [p for n in lengths for p in planned(model, replace(work, tokens=n, longest=4 * n), 64)],
    )


def main() -> int:
    parser = common_arguments(__doc__, pairs=0)
    parser.add_argument("--quick", action="store_true", help="does it run? few and small cells")
    parser.add_argument("--text", type=Path, help="also write the tables and their assumptions to this file")
    arguments = parser.parse_args()
    machine = Machine()
    settings: dict[str, Any] = {"machine": machine, "work": Work(), "steps": STEPS, "warm": WARM}
    journal = Journal("sizing", settings)
    parts, pages = [], [assumptions(machine, Work())]
    for title, plans in questions(machine, quick=arguments.quick):
        rows = [row(machine, what, journal) for what in plans]
        parts.append(f"{title}\n\n{table(rows)}")
        pages.append(f"{title}\n\n{table(rows)}\n\nThe same as Markdown:\n\n{markdown(rows)}")
        print(parts[-1] + "\n", flush=True)
    print(assumptions(machine, Work()))
    if arguments.text:
        arguments.text.write_text("\n\n".join(pages) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

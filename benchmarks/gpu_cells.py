"""What `gpu_step.py` measures, one function for each cell; each runs in a process of its own and says what it saw.

Owns       the work of a cell, and its samples: a line each, as soon as it is there.
Promises   sides of one cell work in turns (A B B A ...); a peer that cannot be imported is a line that says so; with
           `tiny` every function takes the same way with the smallest sizes, on a CPU too.
Never      judges: `gpu_step.py` makes rows of the samples.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from sides import Side

HERE = Path(__file__).parent
LEARNING_RATE, RANK = 1e-6, 16
PLAIN_CHUNK = 4096
"""Tokens whose logits the plain step computes at once."""
TRL_WORDS: dict[str, list[str]] = {"TRL": [], "TRL, bf16 weights": ["--bf16-weights"]}
TRL = tuple(TRL_WORDS)
WARM_STEPS = 1
"""Of a whole step: the first one compiles and captures."""


class Bench:
    """One cell's process: its settings, and where its samples go."""

    def __init__(self, args: argparse.Namespace, results: Path) -> None:
        self.cell: str = args.cell
        self.device: str = args.device
        self.tiny: bool = args.tiny
        self.threads: int = args.threads
        self.samples: int = 1 if args.tiny else args.samples
        self.warm_ups = 1 if args.tiny else 2
        self.results, self.logs, self.worlds = results, args.logs, args.worlds

    def say(self, kind: str, **values: Any) -> None:
        """One line; it has left this process on return."""
        with self.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"kind": kind, "cell": self.cell, **values}, default=str) + "\n")

    def sample(self, side: str, value: float, unit: str, **facts: Any) -> None:
        """One measurement."""
        self.say("sample", side=side, value=value, unit=unit, facts=facts)

    def sizes(self, usual: Mapping[str, int], **tiny: int) -> dict[str, int]:
        """The sizes of a cell, or its smallest."""
        return {**usual, **tiny} if self.tiny else dict(usual)

    def in_turns(self, sides: Mapping[str, Callable[[], Any]], *, rounds: int) -> Iterator[tuple[str, Any]]:
        """Each side once per round, the order turned round every time; a side that fails is left out, and named."""
        able = dict(sides)
        for turn in range(rounds):
            for name in list(able) if turn % 2 == 0 else list(able)[::-1]:
                work, found = able.pop(name), []
                with self.guarded(name):
                    found.append(work())
                    able[name] = work
                if found:
                    yield name, found[0]

    @contextlib.contextmanager
    def guarded(self, side: str) -> Iterator[None]:
        """One side's failure is a line, and no reason to lose the samples of the others."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - said aloud, in the file and in the table
            self.say("side_failed", side=side, detail=f"{type(error).__name__}: {error}"[:2000])


def synchronize(device: str) -> None:
    """Wait for the GPU, where there is one."""
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


def begin(device: str) -> float:
    """Now, with nothing under way; peaks begin anew, what is cached stays: a step of a run finds it too."""
    import torch

    synchronize(device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    return time.perf_counter()


def reset_peak(device: str) -> int:
    """Let the peak begin now; bytes that are taken at this moment."""
    import torch

    if device != "cuda":
        return 0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return int(torch.cuda.memory_allocated())


def peak_gib(device: str) -> float:
    """Highest memory of tensors since `reset_peak`, in GiB."""
    import torch

    return torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0


def made_world(bench: Bench, shape: str) -> Path:
    """A folder with a made-up model of this shape, its tokenizer and its tasks; cells share it."""
    from keeping import write_world

    shape = "tiny" if bench.tiny else shape
    world = Path(bench.worlds) / shape
    if not (world / "tasks.json").is_file():  # written last
        write_world(world, shape=shape, tasks=64)
        lines = (world / "tasks.jsonl").read_text(encoding="utf-8").splitlines()
        (world / "tasks.json").write_text(json.dumps([json.loads(line)["prompt"] for line in lines]))
    return world


def missing(*packages: str) -> list[str]:
    """Those that are not installed here."""
    return [name for name in packages if importlib.util.find_spec(name) is None]


# -- the whole step --------------------------------------------------------------------------------------


def step(
    bench: Bench, shape: str, tasks: int, tokens: int, *, samples: int, micro: int = 0, trl: Sequence[str] = TRL
) -> None:
    """The whole step against TRL's, each loop in its own process; without TRL, against our plain code.

    Args:
        micro: rows of one of TRL's microbatches; 0 takes the whole step at once.
        trl: of its settings, those that are tried; the faster one counts.
    """
    scripts, rows = {"ours": ["side_ours.py"]}, str(min(micro, 8) if bench.tiny else micro)
    if can_compare(bench):
        scripts |= {name: ["side_trl.py", "--micro", rows, *TRL_WORDS[name]] for name in trl}
    else:
        scripts["cuda_kernels = false"] = ["side_ours.py", "--plain"]
    in_processes(bench, shape, tasks, tokens, scripts, samples)


def mode(bench: Bench, lora: bool, checkpointing: bool) -> None:
    """One mode of training: tokens per second and peak of a whole step, the same settings on both sides."""
    from surefoot.config import Config

    words = [*(["--lora", str(RANK)] if lora else []), *(["--checkpointing"] if checkpointing else [])]
    scripts = {"ours": ["side_ours.py", *words]}
    if checkpointing and "gradient_checkpointing" not in Config.model_fields:
        bench.say("note", detail="ours has no gradient_checkpointing: TRL's figures stand alone")
        del scripts["ours"]
    if can_compare(bench):
        scripts["TRL"] = ["side_trl.py", *words, *(["--bf16-weights"] if lora else [])]
    in_processes(bench, "0.5b", 8, 64, scripts, 3)


def can_compare(bench: Bench) -> bool:
    """Whether TRL can run here; a line says why not."""
    absent = missing("trl", "datasets", "accelerate")
    if absent:
        bench.say("note", detail=f"TRL is not compared: {', '.join(absent)} not installed here")
    return not absent


def in_processes(
    bench: Bench, shape: str, tasks: int, tokens: int, scripts: Mapping[str, Sequence[str]], samples: int
) -> None:
    """Sides that start together, then step in turns; the first steps are warm-up."""
    size, world = bench.sizes({"tasks": tasks, "tokens": tokens}, tasks=1, tokens=4), made_world(bench, shape)
    common = [f"{size['tasks']}x{size['tokens']}", "--model", str(world / "model")]
    common += ["--tasks", str(world / "tasks.json"), "--threads", str(bench.threads), "--device", bench.device]
    with contextlib.ExitStack() as open_sides:

        def start(name: str) -> Side:
            script, *words = scripts[name]
            log = bench.logs / f"{bench.cell}_{list(scripts).index(name)}.log"
            return open_sides.enter_context(Side(name, [str(HERE / script), *common, *words], log))

        started: dict[str, Side] = {}
        with ThreadPoolExecutor() as pool:
            coming = {name: pool.submit(start, name) for name in scripts}
        for name, one in coming.items():
            with bench.guarded(name):
                started[name] = one.result()
                bench.say("setting", side=name, ready_s=started[name].ready_s, setting=started[name].setting)
        turns = {name: side.step for name, side in started.items()}
        for kind, rounds in (("warm_up", WARM_STEPS), ("sample", min(bench.samples, samples))):
            for name, said in bench.in_turns(turns, rounds=rounds):
                bench.say(kind, side=name, value=said.pop("seconds"), unit="s", facts=said)


# -- learning alone --------------------------------------------------------------------------------------


def make_samples(learner: Any, *, groups: int, siblings: int, prompt: int, tokens: int, alone: bool = False) -> Any:
    """Samples of this shape; `as_sampled` gives them their logprobs.

    Args:
        alone: no two prompts are equal, so that none can be shared.
    """
    from surefoot.records import TrainSample

    words = learner.net.config.vocab_size - 3

    def ids(seed: int, count: int) -> tuple[int, ...]:
        return tuple(3 + (7919 * seed + 977 * k * k + 31 * k) % words for k in range(count))

    found = []
    for group in range(groups):
        for index in range(siblings):
            number = group * siblings + index
            found.append(
                TrainSample(
                    item_id=f"t{group}", trainer_version=0, group=str(group), index=index,
                    prompt_ids=ids(number if alone else group, prompt), completion_ids=ids(1000 + number, tokens),
                    sampled=(True,) * tokens, logprobs=(0.0,) * tokens, reward=float(index % 2),
                    advantage=1.0 if index % 2 else -1.0, finish_reason="length",
                )
            )  # fmt: skip
    return found


def as_sampled(learner: Any, samples: Any) -> list[Any]:
    """The same, as if the learner's own weights had sampled them just now."""
    found = []
    for start in range(0, len(samples), 8):  # the network's own modules hold whole logits: a few rows at a time
        rows = samples[start : start + 8]
        scored = learner.score([(s.prompt_ids, s.completion_ids) for s in rows], temperature=1.0)
        for row, logprobs in zip(rows, scored, strict=True):
            found.append(dataclasses.replace(row, logprobs=logprobs, trainer_version=learner.version))
    return found


def make_learner(bench: Bench, world: Path, tokens: int, **keys: Any) -> Any:
    """The learner that a run would make of this model."""
    from end_to_end import Cell
    from side_ours import make_config

    from surefoot.learner.grpo import GRPOLearner
    from surefoot.learner.model import load_policy
    from surefoot.run.model import learner_settings

    model = str(world / "model")
    config = make_config(Cell(1, tokens), model, bench.threads, bench.device, **keys)
    policy = load_policy(model, base=world, device=bench.device, dtype=config.dtype)
    return GRPOLearner(policy.model, learner_settings(config, 0), None, policy.masters, policy.tokenizer)


def profile(bench: Bench) -> None:
    """Where a step of the learner spends its time: kernels and calls, as the profiler saw them."""
    import torch

    size = bench.sizes({"groups": 16, "siblings": 8, "prompt": 48, "tokens": 128}, groups=1, prompt=5, tokens=4)
    learner = make_learner(bench, made_world(bench, "135m"), size["tokens"])
    samples = make_samples(learner, **size)
    for _ in range(bench.warm_ups + 1):
        our_learning(bench, learner, samples)()
    fresh = as_sampled(learner, samples)
    synchronize(bench.device)
    with torch.profiler.profile() as seen:
        learner.learn(fresh)
        synchronize(bench.device)
    kinds = ["self_cuda_time_total", "self_cpu_time_total"] if bench.device == "cuda" else ["self_cpu_time_total"]
    tables = [seen.key_averages().table(sort_by=kind, row_limit=45, max_name_column_width=60) for kind in kinds]
    bench.results.with_name(f"{bench.results.stem}_profile.txt").write_text("\n".join(tables), encoding="utf-8")


def our_learning(bench: Bench, learner: Any, samples: Any) -> Callable[[], float]:
    """One optimiser step over these samples; its seconds."""

    def go() -> float:
        fresh = as_sampled(learner, samples)
        started = begin(bench.device)
        report = learner.learn(fresh)
        synchronize(bench.device)
        assert report.applied, f"the step was refused: {report.suspects}"
        return time.perf_counter() - started

    return go


def plain_learning(bench: Bench, world: Path, samples: Any) -> Callable[[], float]:
    """A step as one writes it by hand: whole batch, float32 masters, autocast, logits in checkpointed chunks."""
    import torch
    from torch.nn import functional as F  # noqa: N812 - the community's name
    from torch.utils.checkpoint import checkpoint
    from transformers import AutoModelForCausalLM

    net = AutoModelForCausalLM.from_pretrained(world / "model", dtype=torch.float32, attn_implementation="sdpa")
    net.to(bench.device)
    optimiser = torch.optim.AdamW(net.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)
    prompt, width = len(samples[0].prompt_ids), len(samples[0].completion_ids)
    ids = torch.tensor([[*s.prompt_ids, *s.completion_ids] for s in samples], device=bench.device)
    advantages = torch.tensor([s.advantage for s in samples], device=bench.device).repeat_interleave(width)

    def logprobs(hidden: Any, targets: Any) -> Any:
        logits = F.linear(hidden, net.lm_head.weight).float()
        return -F.cross_entropy(logits, targets, reduction="none")

    def go() -> float:
        started = begin(bench.device)
        with torch.autocast(bench.device, dtype=torch.bfloat16):
            states = net.model(input_ids=ids, use_cache=False).last_hidden_state[:, prompt - 1 : -1]
            states, targets = states.flatten(0, 1), ids[:, prompt:].flatten()
            parts = [
                checkpoint(logprobs, h, t, use_reentrant=False)
                for h, t in zip(states.split(PLAIN_CHUNK), targets.split(PLAIN_CHUNK), strict=True)
            ]
        found = torch.cat(parts)
        loss = -((found - found.detach()).exp() * advantages).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        synchronize(bench.device)
        return time.perf_counter() - started

    return go


def learn(bench: Bench, shape: str, groups: int, tokens: int) -> None:
    """Learning alone; a peak belongs to the side that ran last, with what it keeps between steps, less the other's."""
    size = bench.sizes({"groups": groups, "siblings": 8, "prompt": 48, "tokens": tokens}, groups=1, prompt=5, tokens=4)
    world, kept, before = made_world(bench, shape), {}, reset_peak(bench.device)
    learner = make_learner(bench, world, size["tokens"])
    samples = make_samples(learner, **size)
    sides = {"ours": our_learning(bench, learner, samples)}
    for _ in range(bench.warm_ups):
        bench.say("warm_up", side="ours", value=sides["ours"](), unit="s", facts={"fused": learner.fused})
    kept["ours"], before = reset_peak(bench.device) - before, reset_peak(bench.device)
    with bench.guarded("plain step"):
        plain = plain_learning(bench, world, samples)
        for _ in range(bench.warm_ups):
            bench.say("warm_up", side="plain step", value=plain(), unit="s", facts={})
        kept["plain step"], sides["plain step"] = reset_peak(bench.device) - before, plain
    turns = {name: peaked(bench, work, kept, name) for name, work in sides.items()}
    for name, (seconds, gib) in bench.in_turns(turns, rounds=bench.samples):
        bench.sample(name, seconds, "s", peak_gib=gib)


def peaked(
    bench: Bench, work: Callable[[], float], kept: Mapping[str, int], name: str
) -> Callable[[], tuple[float, float]]:
    """The work's seconds, and its peak in GiB without what other sides keep."""

    def go() -> tuple[float, float]:
        others = sum(size for side, size in kept.items() if side != name)
        seconds = work()
        return seconds, peak_gib(bench.device) - others / 2**30

    return go


def prefix(bench: Bench) -> None:
    """A step whose 8 siblings share a prompt of 1,024 tokens, against one in which no prompt is shared."""
    size = bench.sizes({"groups": 8, "siblings": 8, "prompt": 1024, "tokens": 128}, groups=1, prompt=9, tokens=3)
    learner = make_learner(bench, made_world(bench, "135m"), size["tokens"])
    sides = {
        name: our_learning(bench, learner, make_samples(learner, **size, alone=alone))
        for name, alone in (("ours", False), ("no prompt shared", True))
    }
    for name, work in sides.items():
        for _ in range(bench.warm_ups):
            bench.say("warm_up", side=name, value=work(), unit="s", facts={"fused": learner.fused})
    p, r, g = size["prompt"], size["tokens"], size["siblings"]
    for name, seconds in bench.in_turns(sides, rounds=bench.samples):
        bench.sample(name, seconds, "s", limit=g * (p + r) / (p + g * r))


# -- the loss alone --------------------------------------------------------------------------------------


def loss(bench: Bench) -> None:
    """Logprobs and their gradients over a large vocabulary: ours, whole logits, and Liger's where it is installed."""
    import torch
    from torch.nn import functional as F  # noqa: N812 - the community's name

    size = bench.sizes({"rows": 8 * 2048, "hidden": 1024, "words": 151_936}, rows=16, hidden=8, words=64)
    dtype = torch.bfloat16 if bench.device == "cuda" else torch.float32
    dice = torch.Generator(device=bench.device).manual_seed(0)

    def random(*shape: int) -> Any:
        made = torch.randn(*shape, device=bench.device, generator=dice)
        return (0.05 * made).to(dtype).requires_grad_()

    hidden, weight = random(size["rows"], size["hidden"]), random(size["words"], size["hidden"])
    ids = torch.randint(0, size["words"], (size["rows"],), device=bench.device, generator=dice)

    def ours() -> Any:
        if bench.device == "cuda":
            from surefoot.maths.fused_training import score_tokens_fused

            return -score_tokens_fused(hidden, weight, ids, temperature=1.0).logprobs.mean()
        from surefoot.maths.logprobs import score_tokens_chunked

        return -score_tokens_chunked(hidden, weight, ids, temperature=1.0).logprobs.mean()

    def plain() -> Any:
        return F.cross_entropy(F.linear(hidden, weight).float(), ids)

    def liger() -> Any:
        transformers = importlib.import_module("liger_kernel.transformers")
        return transformers.LigerFusedLinearCrossEntropyLoss()(weight, hidden, ids)

    sides = {"ours": ours, "plain": plain}
    if missing("liger_kernel"):
        bench.say("note", detail="Liger is not compared: liger_kernel not installed here")
    else:
        sides["Liger"] = liger

    def measured(make: Callable[[], Any]) -> Callable[[], tuple[float, int, float, float]]:
        def go() -> tuple[float, int, float, float]:
            hidden.grad = weight.grad = None
            before = reset_peak(bench.device)
            synchronize(bench.device)
            started = time.perf_counter()
            value = make()
            value.backward()
            synchronize(bench.device)
            seconds = time.perf_counter() - started
            extra = int(peak_gib(bench.device) * 2**30) - before - hidden.nbytes - weight.nbytes  # their gradients
            return seconds, extra, float(value), float(hidden.grad.float().norm())

        return go

    turns = {name: measured(make) for name, make in sides.items()}
    for name, (seconds, _, value, norm) in bench.in_turns(turns, rounds=bench.warm_ups):
        bench.say("warm_up", side=name, value=seconds, unit="s", facts={"loss": value, "grad_norm": norm})
    for name, (seconds, extra, value, norm) in bench.in_turns(turns, rounds=bench.samples):
        bench.sample(name, seconds, "s", extra_bytes=extra, loss=value, grad_norm=norm)


# -- decoding --------------------------------------------------------------------------------------------


def decode(bench: Bench) -> None:
    """Tokens per second at three numbers of rows, logprobs and prefill included, beside `generate`."""
    import torch
    from decode import SHAPE

    from surefoot.learner.model import made_up_net

    tokens = 4 if bench.tiny else 128
    net, spec = made_up_net(SHAPE, 1 if bench.tiny else 30, bench.device, "bfloat16")
    weights = {name: value.detach() for name, value in net.named_parameters()}
    for rows in (8, 16) if bench.tiny else (64, 128, 1024):
        prompts = [tuple(3 + (977 * (i // 8) + 31 * k) % 49_000 for k in range(48)) for i in range(rows)]
        ours = our_engine(bench, spec, weights, prompts, tokens)
        ids = torch.tensor(prompts, device=bench.device)

        def peer(ids: Any = ids) -> int:
            with torch.inference_mode():
                out = net.generate(
                    ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens,
                    do_sample=True, top_k=0, pad_token_id=0, use_cache=True,
                )  # fmt: skip
            return int(out.shape[1] - 48) * len(ids)

        for name, seconds in bench.in_turns({"ours": clocked(bench, ours)}, rounds=bench.warm_ups):
            bench.say("warm_up", side=name, value=seconds[0], unit="s", facts={"rows": rows})
        for name, (seconds, made) in bench.in_turns({"ours": clocked(bench, ours)}, rounds=bench.samples):
            bench.sample(name, made / seconds, "tokens/s", rows=rows)
        for name, (seconds, made) in bench.in_turns({"generate": clocked(bench, peer)}, rounds=2):
            bench.sample(name, made / seconds, "tokens/s", rows=rows)


def our_engine(bench: Bench, spec: Any, weights: Any, prompts: Sequence[Any], tokens: int) -> Callable[[], int]:
    """So many tokens for each prompt; how many they were."""
    import torch

    from surefoot.engines.graphs import GraphedEngine
    from surefoot.protocols import Request

    engine = GraphedEngine(spec, rows=len(prompts), max_width=48 + tokens, device=bench.device, dtype=torch.bfloat16)
    engine.load_weights(weights, 0)
    asked = [Request(str(i), prompt, tokens, 1.0, frozenset(), i) for i, prompt in enumerate(prompts)]
    return lambda: sum(len(done.logprobs) for done in engine.generate(asked))


def clocked(bench: Bench, work: Callable[[], int]) -> Callable[[], tuple[float, int]]:
    """Seconds, and what the work returned."""

    def go() -> tuple[float, int]:
        synchronize(bench.device)
        started = time.perf_counter()
        made = work()
        synchronize(bench.device)
        return time.perf_counter() - started, made

    return go


# -- whole runs through the command ----------------------------------------------------------------------


def command(words: Sequence[str], folder: Path) -> list[dict[str, float]]:
    """One run through `surefoot train`; its lines of metrics."""
    from keeping import train

    return train(words, folder)[0]


def ahead(bench: Bench) -> None:
    """The built-in run with and without sampling ahead: every step after a tenth of them is a sample."""
    steps = 4 if bench.tiny else 40
    common = [f"device={bench.device}", f"threads={bench.threads}", f"max_steps={steps}", "eval_on_start=false"]
    common += ["eval_steps=0", "importance_sampling_correction=true", "preflight_tasks=0"]
    common += ["num_generations=2", "tasks_per_step=2"] if bench.tiny else []

    def run(*more: str) -> Callable[[], list[float]]:
        def go() -> list[float]:
            with tempfile.TemporaryDirectory() as folder:
                rows = command([*common, *more], Path(folder) / "run")
            return [row["step_time"] for row in rows if row["step"] > max(1, steps // 10)]

        return go

    sides = {"ours": run("max_staleness=1"), "max_staleness = 0": run()}
    for name, found in bench.in_turns(sides, rounds=1):
        for seconds in found:
            bench.sample(name, seconds, "s")


def builtin(bench: Bench, device: str, side: str) -> None:
    """The built-in run of 200 steps; beside "ours" it is held to two cores."""
    from learning import train

    if side != "ours":
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    words = [f"device={device}", f"threads={bench.threads if device == 'cpu' else 2}"]
    words += ["max_steps=2", "eval_on_start=false", "eval_steps=0", "preflight_tasks=0"] if bench.tiny else []
    if bench.tiny:
        with tempfile.TemporaryDirectory() as folder:
            rows = command(words, Path(folder) / "run")
        bench.sample(side, sum(row["step_time"] for row in rows), "s", steps=len(rows))
        return
    with tempfile.TemporaryDirectory() as folder:
        done = train(0, Path(folder) / "run", words)
    timings = {name for row in done.rows for name in row if name.startswith("timing/")}
    parts = {name: sum(row.get(name, 0.0) for row in done.rows) for name in sorted(timings)}
    bench.sample(side, done.seconds, "s", accuracy=done.final, status=done.status, steps=done.steps, parts=parts)


CELLS: dict[str, Callable[[Bench], None]] = {
    "step": lambda bench: step(bench, "135m", 16, 128, samples=4),
    "learn": lambda bench: learn(bench, "135m", 16, 128),
    "step05": lambda bench: step(bench, "0.5b", 8, 256, samples=3, micro=32),
    "loss": loss,
    "prefix": prefix,
    "learn05": lambda bench: learn(bench, "0.5b", 8, 256),
    "decode": decode,
    "ahead": ahead,
    "builtin": lambda bench: builtin(bench, bench.device, "ours"),
    "builtin_cpu": lambda bench: builtin(bench, "cpu", "two CPU cores"),
    "profile": profile,
    "full": lambda bench: mode(bench, lora=False, checkpointing=False),
    "lora": lambda bench: mode(bench, lora=True, checkpointing=False),
    "full_checkpointed": lambda bench: mode(bench, lora=False, checkpointing=True),
    "lora_checkpointed": lambda bench: mode(bench, lora=True, checkpointing=True),
    "step05long": lambda bench: step(bench, "0.5b", 32, 512, samples=2, micro=32, trl=TRL[1:]),
}
"""In the order in which they run: what matters most, first."""


def run_cell(args: argparse.Namespace) -> None:
    """In the cell's own process: the work, and a last line that says that nothing is missing."""
    import torch

    torch.set_num_threads(args.threads)
    bench = Bench(args, args.results)
    if args.device == "cuda":
        bench.say("device", name=torch.cuda.get_device_name(), torch=torch.__version__)
    CELLS[args.cell](bench)
    bench.say("done")
    sys.stdout.flush()

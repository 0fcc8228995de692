"""Everything that can be known about a run before it costs anything: resolve, check, estimate, stop.

Promises   tasks, rewards, the device, the tokenizer with its chat template and, when asked, tool servers are really
           opened, so what would be refused in a minute is refused now with the same error; nothing is written; weights
           are not loaded (a parameter count comes from the files' headers or from config.json); the last lines say what
           was checked and what was not.
Never      says a number without saying what it assumes; what is not known is called unknown, not 0.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surefoot.config import Config
from surefoot.config.choices import engine_facts
from surefoot.config.load import LoadedConfig
from surefoot.config.schedule import Answered, answered_tasks, most_tasks
from surefoot.data.heldout import Twins
from surefoot.data.sources import load_tasks
from surefoot.data.tasks import TaskSet
from surefoot.errors import ModelError, RewardError
from surefoot.guards.arming import guard_lines, judge_arming, refuse_unarmed
from surefoot.learner.footprint import ModelShape
from surefoot.records import Task
from surefoot.report.plan import batch_arithmetic
from surefoot.rewards.functions import is_builtin
from surefoot.rewards.grading import EvalSet, Judges
from surefoot.run.guarding import calibration, calibration_lines, make_guard
from surefoot.run.inputs import (
    OwnSet,
    heldout_all,
    metric_spec,
    read_sets,
    refuse_uncontained_code,
    runs_code,
    set_lines,
    split_tasks,
    toolkit_spec,
    watched_metric,
    weaker_words,
)
from surefoot.run.memory_profile import AdapterSize, foresee, plan_lines, unused_here, work_of_config
from surefoot.run.task_plan import level_plan
from surefoot.run.tasks import check_pairs, open_large, streamed_border
from surefoot.run.tools import ToolPreview, in_users_words, preview_tools
from surefoot.storage.run_folder import RunFolder
from surefoot.system.text import counted, shown_path
from surefoot.system.user_code import load_function
from surefoot.tools.toolkits import ToolkitSpec
from surefoot.tracking.sinks import check_sinks

if TYPE_CHECKING:
    from surefoot.learner.chat import ChatCodec
    from surefoot.learner.model import ModelTokenizer


# -- Everything that can be known about a run before it costs anything: resolve, check, estimate, stop


SHIPPED = {name: Path(__file__).parent.parent / "assets" / name for name in ("pebble", "pebble_tools")}
GGUF = "the GGUF file's header"
MEASURED_PROMPTS = 32
"""Prompts that are made into tokens: the longest, and as many of the others."""
MEASURED = ("cpu", "cuda")
"""Devices on which the pace can be measured."""
COMPARED = ("cpu", "cuda")
"""Those on which estimates were compared with runs (benchmarks/forecast.py)."""


@dataclass(frozen=True, slots=True)
class ModelFacts(ModelShape):
    """What a model folder says about itself without being loaded."""

    context: int
    counted_from: str

    @property
    def shape(self) -> ModelShape:
        """The sizes alone."""
        return ModelShape(**{field.name: getattr(self, field.name) for field in dataclasses.fields(ModelShape)})


@dataclass
class Checked:
    """What was looked at, in words, and what was not."""

    done: list[str]
    left: list[str]

    def lines(self) -> list[str]:
        """The end of the plan."""
        left = [f"         not checked: {', '.join(self.left)}"] if self.left else []
        return [f"dry run: checked {', '.join(self.done)}; nothing was written", *left]


def dry_run(
    loaded: LoadedConfig, *, start_tools: bool = False, tell: Callable[[str], None] = lambda line: None
) -> list[str]:
    """Check the whole plan and describe it, line by line.

    Args:
        start_tools: start tool servers, list their tools and ask their probes; they are ended again.
        tell: is given a line before whatever takes long.
    """
    config = loaded.config
    root = RunFolder.planned(
        None if config.output_dir is None else loaded.path(config.output_dir), config.run_name, Path.cwd()
    )
    check_sinks(config.report_to)
    sets = read_sets(config, loaded.base)
    tasks, train_tasks, heldout_tasks, twins = _check_tasks(config, loaded.base, sets)
    rewards = _check_rewards(config, tasks, loaded.base)
    facts = model_facts(config.model, loaded.base)
    checked = Checked(["the config", "tasks", "rewards"], ["the weights"])
    lines = [*loaded.notes]
    lines += batch_arithmetic(
        config,
        train_tasks=train_tasks,
        heldout_tasks=heldout_tasks,
        parameters=facts.parameters if facts else None,
        sets=set_lines(sets),
        set_tasks=sum(len(own.asked) for own in sets),
    )
    asked = Answered(min(heldout_tasks, most_tasks(config)), sum(len(own.asked) for own in sets))
    lines += _guard_lines(loaded, tasks, asked.watched, sets)
    lines += [] if twins is None else [twins.line()]
    recipe = toolkit_spec(config, loaded.base)
    if recipe is not None and start_tools:
        tell("starting tool servers ...")
    tools = None if recipe is None else preview_tools(recipe, start=start_tools)
    lines += [] if recipe is None or tools is None else _tool_lines(config, recipe, tools)
    lines += _sandbox_lines(config, [tasks, *(own.task_set for own in sets)])
    lines += [f"rewards   {rewards}", f"folder    {shown_path(root)} (not created)"]
    lines += _with_model(loaded, facts, tasks.tasks, asked, recipe, tools, checked, tell)
    return [*lines, "", *checked.lines()]


def _sandbox_lines(config: Config, read: Sequence[TaskSet]) -> list[str]:
    """Whether code can be contained here, where tasks or rewards need it; refused as the run would be."""
    if refuse_uncontained_code(config, runs_code=any(map(runs_code, read))):
        return ["sandbox   NONE: model-written code would run with your rights (tools.allow_unsafe)"]
    words = weaker_words()
    return [f"sandbox   weaker on this host: {words}"] if words else []


def _with_model(
    loaded: LoadedConfig, facts: ModelFacts | None, tasks: Sequence[Task], asked: Answered, recipe: ToolkitSpec | None,
    tools: ToolPreview | None, checked: Checked, tell: Callable[[str], None],
) -> list[str]:  # fmt: skip
    """Device, template and prompts, then memory and time: what needs torch comes after everything that does not."""
    from surefoot.learner.model import architecture_plan, load_tokenizer, resolve_device
    from surefoot.learner.precision import require_precision
    from surefoot.run.model import adapter_plan, call_format_of, codec_of_words, require_packages

    config = loaded.config
    device = resolve_device(config.device)
    require_precision(device, config.dtype)
    require_packages(config)
    checked.done += [f"the device ({device})", *(tools.checked if tools else ())]
    checked.left += tools.unchecked if tools else ()
    if facts is None:
        checked.left.append("the chat template")
        return [
            f"device    {device}", "",
            f"estimate  unknown: {config.model} is not a folder on this machine, and a dry run does not download",
        ]  # fmt: skip
    beyond = architecture_plan(
        config.model, base=loaded.base, engine=config.engine.kind, ranks=config.runtime.learner_ranks
    )
    words = load_tokenizer(config.model, base=loaded.base)
    with in_users_words():
        codec = codec_of_words(config, loaded.base, words, recipe, tools.shown if tools else ())
    written = f", calls as {call_format_of(codec, recipe)}" if recipe else ""
    lengths = _prompt_lengths(codec, tasks)
    checked.done.append(f"the chat template and {counted(len(lengths), 'prompt')}")
    own = f"{config.chat_template}" if config.chat_template else "the model's own"
    lines = [f"device    {device}", f"template  {own if codec.has_template else 'none'}{written}"]
    lines += [*(f"model     {line}" for line in beyond), ""]
    plan = adapter_plan(config, loaded.base)
    if plan is not None:
        checked.done.append("the adapter's modules")
        lines.append(f"trains    {plan.line()}")
    adapter = None if plan is None else AdapterSize(plan.parameters, plan.merged, plan.packed)
    lines += _memory_lines(config, facts, max(lengths), device, adapter)
    if beyond:
        return [*lines, "time      unknown: no estimate for this architecture was ever made; `max_steps=5` measures it"]
    if device in MEASURED:
        tell(f"measuring the speed of this {_kind(device)} for a model of this shape ...")
    return lines + _time_lines(config, facts, sorted(lengths)[len(lengths) // 2], asked, device, recipe, tools)


def longest_prompt(loaded: LoadedConfig, words: ModelTokenizer) -> int:
    """Tokens of the longest prompt, among those that are made into tokens."""
    from surefoot.run.model import codec_of_words

    config = loaded.config
    tasks = load_tasks(config.tasks, base=loaded.base, num_tasks=config.num_tasks, seed=config.seed)
    return max(_prompt_lengths(codec_of_words(config, loaded.base, words), tasks.tasks))


def _prompt_lengths(codec: ChatCodec, tasks: Sequence[Task]) -> list[int]:
    """Tokens of the longest prompts, and of some others."""
    by_size = sorted(tasks, key=lambda task: sum(len(str(m.get("content", ""))) for m in task.messages()), reverse=True)
    preview = {task.id: task for task in (*by_size[:MEASURED_PROMPTS], *tasks[:MEASURED_PROMPTS])}
    return [len(codec.encode_prompt(task.messages())) for task in preview.values()]


def _check_tasks(config: Config, base: Path, sets: Sequence[OwnSet]) -> tuple[TaskSet, int, int, Twins | None]:
    """The tasks, how many are trained on and held out, and what crosses; a streamed file is indexed for nobody."""
    never_trained = heldout_all((), sets)
    if config.stream_tasks:
        with tempfile.TemporaryDirectory(prefix="surefoot-dry-") as folder:
            large = open_large(config, base, Path(folder), never_trained)
            _check_levels(config, large.train)
            streamed_border(large.border, large.train, never_trained)
            return large.preview, len(large.train), large.held_out, large.twins
    tasks = load_tasks(config.tasks, base=base, num_tasks=config.num_tasks, seed=config.seed)
    train, _, border, twins = split_tasks(config, tasks, sets)
    check_pairs(config, base, border)
    _check_levels(config, train)
    held_out = 0 if border is None else len(border.heldout) - len(never_trained)
    return tasks, len(train), held_out, twins


def _check_levels(config: Config, train: Sequence[Task]) -> None:
    if config.curriculum.kind == "levels":
        level_plan(config, train)


def _guard_lines(loaded: LoadedConfig, tasks: TaskSet, held_out: int, sets: Sequence[OwnSet]) -> list[str]:
    """The guard's part of the plan; a guard that has to be armed and is not is refused as it would be by the run."""
    config = loaded.config
    judged = [
        EvalSet(own.name, own.asked, Judges({}, metric_spec(own.keys.metric, own.task_set) or None), "") for own in sets
    ]
    metric = watched_metric(config, metric_spec(config.eval_metric, tasks) or None, judged)
    heldout = answered_tasks(metric, held_out, {own.name: len(own.asked) for own in sets})
    tighter = calibration(config, loaded.base, heldout=heldout, metric=metric)
    guard = make_guard(config, heldout, metric, tighter)
    limits = None if guard is None else guard.limits
    if config.guard.require:
        refuse_unarmed(config, judge_arming(config, heldout=heldout, metric=metric, limits=limits))
    lines = guard_lines(config, heldout=heldout, metric=metric, limits=limits)
    return [*lines, *calibration_lines(config, tighter)]


def _tool_lines(config: Config, recipe: ToolkitSpec, tools: ToolPreview) -> list[str]:
    """What rollouts may call, and whether anybody has looked."""
    named = [*(f"{server.name} ({server.isolation})" for server in recipe.servers), *map(str, recipe.functions)]
    named += [str(recipe.environment)] if recipe.environment is not None else []
    limits = f"{counted(config.max_turns, 'turn')} and {counted(config.tools.max_calls, 'call')} at most"
    limits += f", {config.tools.mode}"
    told = "" if tools.complete else " (not started: --start-tools starts them and checks their tools)"
    lines = [f"tools     {', '.join(named)}; {limits}{told}"]
    lines += [f"          {server.name}: {server.containment}" for server in recipe.startable]
    if tools.complete:
        lines.append(f"          {', '.join(spec.name for spec in tools.specs)}")
    if tools.call_s is not None:
        lines.append(f"          a call takes {1000 * tools.call_s:.1f} ms")
    return lines


def _check_rewards(config: Config, tasks: TaskSet, base: Path) -> str:
    _load([keys.metric for keys in config.eval_sets.values() if ".py:" in keys.metric], base)
    if not config.reward_funcs:
        if tasks.scorer is None and config.tools.environment is not None:
            return f"what {config.tools.environment} says of itself"
        if tasks.scorer is None:
            raise RewardError(
                f"no reward: reward_funcs is empty and {config.tasks} has no scorer of its own",
                "without a reward there is nothing to learn from",
                'set reward_funcs = ["my_rewards.py:score"]',
            )
        return f"the tasks' own scorer ({tasks.scorer})"
    _load([spec for spec in config.reward_funcs if not is_builtin(spec)], base)
    return ", ".join(config.reward_funcs)


def _load(specs: Sequence[str], base: Path) -> None:
    keep, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # loading a reward file must not leave a cache
    try:
        for spec in specs:
            load_function(spec, base)
    finally:
        sys.dont_write_bytecode = keep


def model_facts(model: str, base: Path) -> ModelFacts | None:
    """Numbers of a model folder; None for a hub name, whose files are not here."""
    if model == "smollm2":
        return _gguf_facts()
    folder = SHIPPED.get(model) or (base / Path(model).expanduser())
    if not folder.is_dir():
        if model.startswith((".", "/", "~")) or model.count("/") > 1:
            raise ModelError(
                f"model folder {folder} does not exist", "nothing to train", "check the path (relative to the config)"
            )
        return None
    raw = _read_model_config(folder)
    try:
        return _facts(raw, folder)
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(
            f"{folder / 'config.json'} does not describe a decoder: {error}",
            "layers, widths and heads are needed to train it",
            "point model at the folder of a causal language model",
        ) from error


def _gguf_facts() -> ModelFacts:
    """The same for the model that comes as one GGUF file."""
    from surefoot.learner.model import smollm2_file
    from surefoot.learner.model_files import read_gguf_header

    told, parameters = read_gguf_header(smollm2_file())
    kind = str(told["general.architecture"])
    hidden, heads = int(told[f"{kind}.embedding_length"]), int(told[f"{kind}.attention.head_count"])
    return ModelFacts(
        parameters, int(told[f"{kind}.block_count"]), hidden, int(told[f"{kind}.feed_forward_length"]), heads,
        int(told.get(f"{kind}.attention.head_count_kv", heads)), hidden // heads,
        int(told.get(f"{kind}.vocab_size", told["tokenizer.ggml.tokens"])), int(told[f"{kind}.context_length"]), GGUF,
    )  # fmt: skip


def _read_model_config(folder: Path) -> dict[str, Any]:
    from surefoot.learner.model_files import check_model_folder, read_object

    check_model_folder(folder)
    return read_object(folder / "config.json")


_OTHER_NAMES = (
    ("hidden_size", "n_embd"), ("hidden_size", "d_model"), ("num_hidden_layers", "n_layer"),
    ("num_hidden_layers", "num_layers"), ("num_attention_heads", "n_head"), ("num_attention_heads", "num_heads"),
    ("intermediate_size", "n_inner"), ("intermediate_size", "ffn_dim"), ("max_position_embeddings", "n_positions"),
    ("max_position_embeddings", "seq_length"),
)  # fmt: skip
"""What older architectures call the numbers of a decoder."""


def _facts(raw: dict[str, Any], folder: Path) -> ModelFacts:
    raw = raw | {name: raw[other] for name, other in _OTHER_NAMES if name not in raw and other in raw}
    hidden, heads = int(raw["hidden_size"]), int(raw.get("num_attention_heads", 1))
    numbers = {
        "layers": int(raw["num_hidden_layers"]),
        "hidden": hidden,
        "intermediate": int(raw.get("intermediate_size") or 4 * hidden),
        "heads": heads,
        "kv_heads": int(raw.get("num_key_value_heads") or heads),
        "head_dim": int(raw.get("head_dim") or hidden // heads),
        "vocab": int(raw["vocab_size"]),
        "context": int(raw.get("max_position_embeddings") or 0),
    }
    if any(numbers[name] < 1 for name in ("layers", "hidden", "heads", "vocab")):
        raise ValueError(f"sizes must be positive, got {numbers}")
    counted = _count_in_headers(folder)
    tied = bool(raw.get("tie_word_embeddings", False))
    total = counted if counted is not None else _count_by_formula(numbers, tied=tied)
    return ModelFacts(
        parameters=total, counted_from="weight files" if counted else "config.json", tied=tied,
        qk_norm=str(raw.get("model_type")) == "qwen3", **numbers,
    )  # fmt: skip


def _count_in_headers(folder: Path) -> int | None:
    """Parameters named in the headers of the safetensors files: 8 bytes of length, then JSON with shapes."""
    total = 0
    files = sorted(folder.glob("*.safetensors"))
    for path in files:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > min(100_000_000, path.stat().st_size):
                raise ModelError(f"{path} is not a safetensors file", "its header is longer than itself", "restore it")
            header = json.loads(file.read(length))
        total += sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
    return total if files else None


def _count_by_formula(n: dict[str, int], *, tied: bool) -> int:
    """Llama-like: embeddings, per layer attention, gated MLP and two norms, a last norm, and the head unless tied."""
    attention = n["hidden"] * n["head_dim"] * (2 * n["heads"] + 2 * n["kv_heads"])
    layer = attention + 3 * n["hidden"] * n["intermediate"] + 2 * n["hidden"]
    return n["vocab"] * n["hidden"] * (1 if tied else 2) + n["layers"] * layer + n["hidden"]


def _memory_lines(
    config: Config, facts: ModelFacts, longest: int, device: str, adapter: AdapterSize | None = None
) -> list[str]:
    prompt = config.max_prompt_length or longest
    work = work_of_config(config, prompt, device, adapter, unused_here(device))
    lines = plan_lines(foresee(facts, work, config.gradient_checkpointing), work, config)
    total = prompt + config.max_completion_length
    lines.append(f"          assuming prompts of {prompt} tokens; parameters counted from {facts.counted_from}")
    if facts.context and total > facts.context:
        lines.append(
            f"          prompt and completion may need {total} tokens, the model's context has {facts.context}"
        )
    return lines


def _time_lines(
    config: Config, facts: ModelFacts, prompt: int, asked: Answered, device: str, recipe: ToolkitSpec | None,
    tools: ToolPreview | None,
) -> list[str]:  # fmt: skip
    """What the run will take, at the pace that this machine has now."""
    if device not in MEASURED:
        return [f"time      unknown: no {device} device was ever measured; `max_steps=5` measures yours"]
    from surefoot.run import estimate
    from surefoot.run.estimate import interpreter_seconds, measure

    used = None if recipe is None else estimate.ToolTimes(
        any(server.isolation == "isolated" for server in recipe.servers), tools.call_s if tools else None,
        tools.start_s if tools else None,
    )  # fmt: skip
    found = estimate.forecast(
        config, measure(config, facts, prompt, device), parameters=facts.parameters, prompt_tokens=prompt, asked=asked,
        interpreter_s=interpreter_seconds(), tools=used, gguf=facts.counted_from == GGUF,
    )  # fmt: skip
    where = f"this {_kind(device)} with {counted(config.threads, 'thread')}"
    notes = [] if device in COMPARED else [f"no estimate for a {device} device was ever compared with a run"]
    return estimate.forecast_lines(found, where, [*notes, *_time_notes(config, recipe, tools)])


def _kind(device: str) -> str:
    return "GPU" if device == "cuda" else "CPU"


def _time_notes(config: Config, recipe: ToolkitSpec | None, tools: ToolPreview | None) -> list[str]:
    notes = []
    if tools is not None:
        notes.append("half of the rollouts are assumed to go on after each turn")
        if tools.call_s is None:
            probes = recipe is not None and any(server.probe for server in recipe.servers)
            if not probes:
                why = "no server has a `probe` that could be asked"
            else:
                why = "no probe was asked" if tools.complete else "--start-tools asks their probes"
            notes.append(f"how long tools take was not measured: {why}")
    if not engine_facts(config.engine.kind).is_measured:
        notes.append(f"{config.engine.kind} was not measured: it is taken to be as fast as the embedded engine")
    if config.runtime.kind != "local" or config.max_staleness:
        notes.append("one process that samples and learns in turn was measured: what overlaps comes off")
    return notes

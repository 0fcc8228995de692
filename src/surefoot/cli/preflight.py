"""`surefoot probe-reward`: can the reward of a config be trusted?"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from surefoot.cli.exits import guarded

if TYPE_CHECKING:
    from surefoot.config.load import LoadedConfig
    from surefoot.learner.chat import ChatCodec
    from surefoot.protocols import ToolAnswer, Toolkit, ToolSpec
    from surefoot.rewards.pool import RewardPool
    from surefoot.rewards.probe import KindReport, Pay, ProbeReport
    from surefoot.run.inputs import Inputs
    from surefoot.tools.toolkits import ToolkitSpec


SHOWN = 6
"""Findings printed per kind; --json has all."""


def add_probe_reward(app: typer.Typer) -> None:
    """Register the command."""
    app.command("probe-reward", context_settings={"ignore_unknown_options": True, "allow_extra_args": True})(
        probe_reward
    )


def probe_reward(
    words: Annotated[
        Optional[list[str]],  # noqa: UP045 - typer resolves this spelling in every version we allow
        typer.Argument(metavar="CONFIG | KEY=VALUE", help="A config, then overrides of its keys.", show_default=False),
    ] = None,
    tasks: Annotated[int, typer.Option("--tasks", min=1, help="Tasks of each kind that are probed.")] = 8,
    adversarial: Annotated[int, typer.Option("--adversarial", min=1, help="Wrong answers to each of them.")] = 20,
    full: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option("--full", help="The full reward; the best of the gold answers when left out.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Ask the reward of CONFIG about answers whose worth is known: right, empty and cleverly wrong ones, twice.

    Exits 0 when it tells them apart, 1 when it does not or when there is no gold answer to ask about, 4 when it cannot
    be run at all. No model is needed, and no tool server: where there are tools, answers come as messages.
    """
    sys.exit(guarded(partial(_probe, words or [], tasks, adversarial, full, as_json)))


def _probe(words: Sequence[str], tasks: int, adversarial: int, full: float | None, as_json: bool) -> int:
    from surefoot.cli.commands import _load
    from surefoot.records import Verdict
    from surefoot.rewards.verifiers.multi import verifier_reward, verifier_scorer
    from surefoot.run.inputs import read_inputs
    from surefoot.run.preflight import probe_pool

    loaded = _load(words)
    inputs = read_inputs(loaded.config, loaded.base)
    _refuse_environment_reward(inputs)
    if verifier_reward in inputs.functions.values():
        verifier_scorer(inputs.task_set.tasks)  # refuses by name what no verifier can judge
    with probe_pool(loaded.config, inputs, loaded.config.reward_workers) as pool:
        report = _ask(inputs, pool, tasks, adversarial, full)
        _refuse_if_silent(report, inputs, pool)
    if as_json:
        print(json.dumps(_as_json(report), indent=2))
    else:
        _print_probe(_lines(report))
    return 0 if report.verdict is Verdict.PASS else 1


def _ask(inputs: Inputs, pool: RewardPool, tasks: int, adversarial: int, full: float | None) -> ProbeReport:
    from surefoot.rewards.probe import probe_reward
    from surefoot.run.preflight import Asker, full_mark, kind_of

    return probe_reward(
        Asker(inputs, pool), inputs.task_set.tasks, k=adversarial, per_kind=tasks, full=full,
        kind_of=partial(kind_of, inputs), busy=None if inputs.tools is None else Asker(inputs, pool, calls=True),
        full_mark=full_mark(inputs),
    )  # fmt: skip


def _refuse_environment_reward(inputs: Inputs) -> None:
    """Where no function judges, there is nobody to ask."""
    from surefoot.errors import RewardError

    if not inputs.weights:
        raise RewardError(
            "no reward function judges this run: the rollouts' own world does",
            "what it says depends on what was done in it, and nothing is played here",
            "look at `surefoot report RUN` after a few steps, or add reward_funcs",
        )


def _refuse_if_silent(report: ProbeReport, inputs: Inputs, pool: RewardPool) -> None:
    """A reward that scored nothing at all was not probed: it is broken."""
    from surefoot.errors import RewardError

    asked = [kind for kind in report.kinds if kind.tasks]
    if asked and all(kind.full is None and kind.highest is None for kind in asked):
        stories = "".join(f"\n    {count} x {reason}: {story.strip().splitlines()[-1]}"
                          for reason, (count, story) in pool.describe_failures().items())  # fmt: skip
        raise RewardError(
            f"the reward {'+'.join(inputs.weights)} gave no score to any answer{stories}",
            "a reward that cannot be run cannot be probed, or trained with",
            "call it by hand on one gold answer",
        )


def _lines(report: ProbeReport) -> Iterator[str]:
    rows: list[tuple[str, ...]] = [("kind", "tasks", "gold", "empty", "adversarial", "repeated", "verdict")]
    rows += [_row(kind) for kind in report.kinds]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    for kind in report.kinds:
        yield from _story(kind)
    yield f"{report.verdict}"


def _row(kind: KindReport) -> tuple[str, ...]:
    """Gold and repeated: how many were as they should be; empty and adversarial: how many were rewarded."""
    right = {check: f"{kind.asked[check] - kind.wrong(check)}/{kind.asked[check]} ok" for check in ("gold", "repeated")}
    paid = {check: f"{kind.wrong(check)}/{kind.asked[check]} paid" for check in ("empty", "adversarial")}
    return (
        kind.kind,
        str(kind.tasks),
        right["gold"],
        paid["empty"],
        paid["adversarial"],
        right["repeated"],
        kind.verdict,
    )


def _story(kind: KindReport) -> Iterator[str]:
    if kind.without_gold:
        places = "answer, ground_truth, reward_spec.ground_truth"
        yield f"  {kind.kind}: {kind.without_gold} task(s) have no gold answer (looked for in {places})"
    if kind.full is not None and kind.highest is not None:
        yield f"  {kind.kind}: full reward {kind.full:g}; the best wrong answer earned {kind.highest:g}"
    yield from (f"  {kind.kind}: {line}" for line in (() if kind.pay is None else kind.pay.lines()))
    seen: dict[tuple[str, str], int] = {}
    for finding in kind.findings:
        key = (finding.check, finding.trap)
        seen[key] = seen.get(key, 0) + 1
        if seen[key] == 1 and len(seen) <= SHOWN:
            what = f"{finding.check}: {finding.trap}, {finding.answer!r} to {finding.task_id}"
            yield f"  {kind.kind}: {what}, {finding.says}"
    if len(seen) > SHOWN:
        yield f"  {kind.kind}: and {len(seen) - SHOWN} more; --json shows all"


def _as_json(report: ProbeReport) -> dict[str, Any]:
    kinds = [
        {
            "kind": kind.kind, "verdict": str(kind.verdict), "tasks": kind.tasks, "without_gold": kind.without_gold,
            "full": kind.full, "highest_adversarial": kind.highest, "asked": kind.asked,
            "wrong": {check: kind.wrong(check) for check in (*kind.asked, "pay", "missing")},
            "pay": None if kind.pay is None else _pay_as_json(kind.pay),
            "findings": [finding._asdict() for finding in kind.findings],
        }
        for kind in report.kinds
    ]  # fmt: skip
    return {"verdict": str(report.verdict), "kinds": kinds}


def _pay_as_json(pay: Pay) -> dict[str, Any]:
    """What right, wrong and empty answers earn on average, and whether a run with this reward would be refused."""
    columns = ("right", "wrong", "nonsense", "guesses", "empty", "busy")
    return {
        "form": pay.way.form, "calls": pay.way.calls, "compares": pay.compares, "unsteady": pay.unsteady,
        "refused": [refusal.check for refusal in pay.refusals()], **{name: pay.mean(name) for name in columns},
    }  # fmt: skip


def _print_probe(lines: Iterator[str]) -> None:
    from surefoot.system.text import printable

    for line in lines:
        print(printable(line))


# -- `surefoot tools`: start a run's tools, list them, call one, and see what the model would read


QUESTION = "(the task stands here)"
NO_MODEL = "any ChatML model with chat_template = builtin:chatml_tools; add model=NAME for another"


def add_tools(app: typer.Typer) -> None:
    """Register the command."""
    app.command("tools", context_settings={"ignore_unknown_options": True, "allow_extra_args": True})(tools)


def tools(
    words: Annotated[
        Optional[list[str]],  # noqa: UP045 - typer resolves this spelling in every version we allow
        typer.Argument(
            metavar="MCP.JSON | CONFIG",
            help="A file of servers, or a config; then overrides, such as model=smollm2.",
            show_default=False,
        ),
    ] = None,
    call: Annotated[
        Optional[tuple[str, str]],  # noqa: UP045
        typer.Option("--call", metavar="TOOL JSON", help="Call this tool with these arguments.", show_default=False),
    ] = None,
) -> None:
    """Start the tool servers of MCP.JSON or CONFIG, list their tools, call one, show what the model would read.

    Every server shakes hands, lists its tools and answers its probe. Exits 0 when all of that went well, 1 when the
    call was answered with an error, 2 for arguments that are no JSON object, 4 for a server, a tool or a template that
    a run would refuse.
    """
    sys.exit(guarded(partial(_tools, words or [], call)))


def _tools(words: Sequence[str], call: tuple[str, str] | None) -> int:
    from surefoot.errors import ConfigError
    from surefoot.run.inputs import toolkit_spec
    from surefoot.run.tools import open_toolkit, preview_tools

    loaded = _loaded(words)
    arguments = None if call is None else _arguments(call[1])
    recipe = toolkit_spec(loaded.config, loaded.base)
    if recipe is None:
        raise ConfigError(
            f"{loaded.source} has no tools", "there is nothing to start",
            "set tools.servers, tools.functions or tools.environment, or name a file of servers",
        )  # fmt: skip
    preview_tools(recipe, start=False)  # a program that is not there is told in a word, not after a wait
    began = time.perf_counter()
    with open_toolkit(recipe) as toolkit:
        _print_tools(_list(recipe, toolkit, time.perf_counter() - began))
        answer = None
        if call is not None and arguments is not None:
            answer, took = _call(recipe, toolkit, call[0], arguments)
            _print_tools(iter([f"call      {call[0]} {call[1]}: {answer.outcome} after {1000 * took:.0f} ms"]))
        codec = _codec(loaded, recipe, tuple(toolkit.specs))
        _print_tools(_prompt(loaded, recipe, codec))
        _print_tools(_egress(toolkit))
    if call is None or answer is None:
        return 0
    _print_tools(_answered(loaded, codec, call[0], answer))
    return 0 if answer.outcome == "ok" else 1


def _egress(toolkit: Toolkit) -> Iterator[str]:
    asked = getattr(toolkit, "asked", {})
    for name, attempts in getattr(toolkit, "denied", {}).items():
        named = f" (asked for {', '.join(asked[name][:5])})" if name in asked else ""
        yield f"egress    {name} tried to reach the network {attempts} times, and was refused{named}"


def _loaded(words: Sequence[str]) -> LoadedConfig:
    """A config, or the built-in one with the servers of a file."""
    from surefoot.cli.commands import _load
    from surefoot.config.load import load_config
    from surefoot.errors import ConfigError

    if not words or "=" in words[0] or words[0].startswith("-"):
        raise ConfigError(
            "surefoot tools needs a file of servers, or a config", "there is nothing to start",
            "surefoot tools mcp.json, or surefoot tools run.toml",
        )  # fmt: skip
    if not words[0].endswith(".json"):
        return _load(words)
    named = [] if any(word.startswith("model=") for word in words) else ["chat_template=builtin:chatml_tools"]
    return load_config(None, [f"tools.servers={words[0]}", *named, *words[1:]])


def _arguments(text: str) -> dict[str, Any]:
    from surefoot.errors import ConfigError
    from surefoot.system.json import loads

    try:
        value = loads(text)
    except ValueError as error:
        value, problem = None, str(error)
    else:
        problem = f"it is a {type(value).__name__}"
    if not isinstance(value, dict):
        raise ConfigError(
            f"--call got {text[:80]!r}, which is no JSON object: {problem}", "a tool gets its arguments by name",
            """write it in quotes, such as --call time__now '{"zone": "UTC"}'""",
        )  # fmt: skip
    return value


def _call(recipe: ToolkitSpec, toolkit: Toolkit, name: str, arguments: Mapping[str, Any]) -> tuple[ToolAnswer, float]:
    """As a rollout would call it; a name that no tool has is refused with those that there are."""
    import difflib

    from surefoot.errors import ToolError
    from surefoot.records import Task

    names = [spec.name for spec in toolkit.specs]
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
        raise ToolError(
            f"there is no tool {name!r}", "what is not offered cannot be called",
            f"did you mean {near[0]}?" if near else f"there is {', '.join(names[:20])}",
        )  # fmt: skip
    box = toolkit.open(Task(id="tools", prompt=QUESTION), "tools/0/0", 0)
    try:
        began = time.perf_counter()
        answer = box.call(name, arguments, recipe.limits.call_timeout_s)
        return answer, time.perf_counter() - began
    finally:
        box.close()


def _list(recipe: ToolkitSpec, toolkit: Toolkit, took: float) -> Iterator[str]:
    pins = getattr(toolkit, "pins", {})
    for server in recipe.servers:
        asked = f"answered its probe {server.probe[0]}" if server.probe else "has no probe: no tool was called"
        yield f"server    {server.name}: {server.place} ({server.isolation}); {asked}"
        yield f"          {server.containment}"
        if server.name in pins:
            yield f"          sha256 {pins[server.name]}"
    yield f"          started in {took:.1f}s"
    for spec in toolkit.specs:
        yield f"tool      {spec.name}"
        yield from _indented(spec.description)
        yield from _indented(json.dumps(dict(spec.parameters), indent=2, ensure_ascii=False))


def _codec(loaded: LoadedConfig, recipe: ToolkitSpec, specs: tuple[ToolSpec, ...]) -> ChatCodec:
    """The template with these tools, as a run would have it, or a refusal in the run's own words."""
    from surefoot.learner.model import chatml_tokenizer, load_tokenizer
    from surefoot.run.model import call_format_of, codec_of_words

    words = load_tokenizer(loaded.config.model, base=loaded.base) if _has_model(loaded) else chatml_tokenizer()
    codec = codec_of_words(loaded.config, loaded.base, words, recipe, specs)
    call_format_of(codec, recipe)
    return codec


def _has_model(loaded: LoadedConfig) -> bool:
    return "model" in loaded.explicit


def _prompt(loaded: LoadedConfig, recipe: ToolkitSpec, codec: ChatCodec) -> Iterator[str]:
    asked = [{"role": "user", "content": QUESTION}]
    if not _has_model(loaded):
        yield f"prompt    as {NO_MODEL}"
        yield from _indented(codec.render(asked))
        return
    ids = codec.encode_prompt(asked)
    shown = "the tools are in it" if recipe.in_prompt else "tools.in_prompt = false: the tools are not in it"
    yield f"prompt    as {loaded.config.model} reads it, {len(ids)} tokens; {shown}"
    yield from _indented(codec.text_of(ids))


def _answered(loaded: LoadedConfig, codec: ChatCodec, name: str, answer: ToolAnswer) -> Iterator[str]:
    if _has_model(loaded):
        ids = codec.encode_replies([answer.text])
        most = loaded.config.tools.max_result_tokens
        yield f"answer    as {loaded.config.model} reads it, {len(ids)} tokens; cut at {most} where it is longer"
        yield from _indented(codec.text_of(ids))
        return
    said = {"role": "assistant", "content": "(the call stands here)"}
    talk = [{"role": "user", "content": QUESTION}, said, {"role": "tool", "content": answer.text, "name": name}]
    yield "answer    what comes behind the call; a model cuts it at tools.max_result_tokens"
    yield from _indented(codec.render(talk).partition(said["content"])[2])


def _indented(text: str) -> Iterator[str]:
    return (f"          | {line}" for line in text.splitlines())


def _print_tools(lines: Iterator[str]) -> None:
    from surefoot.system.text import printable

    for line in lines:
        print(printable(line), flush=True)

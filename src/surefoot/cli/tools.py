"""`surefoot tools`: start a run's tools, list them, call one, and see what the model would read."""

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
    from surefoot.config_load import LoadedConfig
    from surefoot.envs.toolkits import ToolRecipe
    from surefoot.policy.chat import ChatCodec
    from surefoot.protocols import ToolAnswer, Toolkit, ToolSpec

QUESTION = "(the task stands here)"
NO_MODEL = "any ChatML model with chat_template = builtin:chatml_tools; add model=NAME for another"


def add_to(app: typer.Typer) -> None:
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
    from surefoot.assemble.tool_look import look_at, opened
    from surefoot.assemble.tooling import tool_recipe
    from surefoot.errors import ConfigError

    loaded = _loaded(words)
    arguments = None if call is None else _arguments(call[1])
    recipe = tool_recipe(loaded.config, loaded.base)
    if recipe is None:
        raise ConfigError(
            f"{loaded.source} has no tools", "there is nothing to start",
            "set tools.servers, tools.functions or tools.environment, or name a file of servers",
        )  # fmt: skip
    look_at(recipe, start=False)  # a program that is not there is told in a word, not after a wait
    began = time.perf_counter()
    with opened(recipe) as toolkit:
        _print(_list(recipe, toolkit, time.perf_counter() - began))
        answer = None
        if call is not None and arguments is not None:
            answer, took = _call(recipe, toolkit, call[0], arguments)
            _print(iter([f"call      {call[0]} {call[1]}: {answer.outcome} after {1000 * took:.0f} ms"]))
        codec = _codec(loaded, recipe, tuple(toolkit.specs))
        _print(_prompt(loaded, recipe, codec))
        _print(_egress(toolkit))
    if call is None or answer is None:
        return 0
    _print(_answered(loaded, codec, call[0], answer))
    return 0 if answer.outcome == "ok" else 1


def _egress(toolkit: Toolkit) -> Iterator[str]:
    for name, attempts in getattr(toolkit, "denied", {}).items():
        yield f"egress    {name} tried to reach the network {attempts} times, and was refused"


def _loaded(words: Sequence[str]) -> LoadedConfig:
    """A config, or the built-in one with the servers of a file."""
    from surefoot.cli.commands import _load
    from surefoot.config_load import load_config
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
    from surefoot.envs.strict_json import loads
    from surefoot.errors import ConfigError

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


def _call(recipe: ToolRecipe, toolkit: Toolkit, name: str, arguments: Mapping[str, Any]) -> tuple[ToolAnswer, float]:
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


def _list(recipe: ToolRecipe, toolkit: Toolkit, took: float) -> Iterator[str]:
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


def _codec(loaded: LoadedConfig, recipe: ToolRecipe, specs: tuple[ToolSpec, ...]) -> ChatCodec:
    """The template with these tools, as a run would have it, or a refusal in the run's own words."""
    from surefoot.assemble.learning import call_format_of, codec_of_words
    from surefoot.policy.load import chatml_words, load_words

    words = load_words(loaded.config.model, base=loaded.base) if _has_model(loaded) else chatml_words()
    codec = codec_of_words(loaded.config, loaded.base, words, recipe, specs)
    call_format_of(codec, recipe)
    return codec


def _has_model(loaded: LoadedConfig) -> bool:
    return "model" in loaded.explicit


def _prompt(loaded: LoadedConfig, recipe: ToolRecipe, codec: ChatCodec) -> Iterator[str]:
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


def _print(lines: Iterator[str]) -> None:
    from surefoot.tracking.text import printable

    for line in lines:
        print(printable(line), flush=True)

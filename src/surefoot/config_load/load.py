"""One call: file, or built-in config, plus overrides, becomes a checked `LoadedConfig`.

Owns       which source wins, what paths are relative to, and whether the built-in target is judged.
Promises   every problem of file and command line in one error, each with its place.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from surefoot.config import Config
from surefoot.config_load import foreign
from surefoot.config_load.check import COMMAND_LINE, Draft, flatten
from surefoot.config_load.files import Parsed, parse_toml, read_config_file
from surefoot.config_load.keys import SETS
from surefoot.config_load.overrides import parse_overrides
from surefoot.config_rules import BUILTIN as BUILTIN_NAME

BUILTIN = "the built-in config"
BUILTIN_FILE = Path(__file__).parent.parent / "assets" / "builtin.toml"
BUILTIN_MODELS = ("pebble", "pebble_tools", "smollm2")
"""Names that never mean a folder, even where one of that name lies around."""
_FILES = ("chat_template", "tools.servers", "tools.environment", "tools.cassette", "guard.calibrate_from")


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A checked config, and what is worth knowing about where it came from."""

    config: Config
    base: Path
    """Paths in `config` are relative to this folder: the file's own, or the current one."""
    notes: tuple[str, ...] = ()
    """Lines to show at the start: aliases read, a target that is not judged."""
    source: str = BUILTIN
    explicit: frozenset[str] = frozenset()
    """Dotted keys that the user wrote, in the file or on the command line."""
    shown_target: tuple[str, float] | None = None
    """The built-in target when it is shown but not judged."""

    def path(self, text: str) -> Path:
        """A path of this config, absolute."""
        return Path(_absolute_text(text, self.base))

    def with_config(self, config: Config) -> LoadedConfig:
        """The same origin with another config."""
        return replace(self, config=config)

    def with_note(self, line: str) -> LoadedConfig:
        """The same with one more line to show at the start."""
        return replace(self, notes=(*self.notes, line))

    @property
    def resolved(self) -> Config:
        """The same config with absolute paths: what a run folder keeps, so that it can be read from anywhere."""
        return _absolute(self.config, self.base)


def load_config(path: Path | None, overrides: Sequence[str] = (), *, data: bytes | None = None) -> LoadedConfig:
    """Read `path` (None: the built-in config), apply `overrides`, check everything.

    Overrides are `a.b=value`, `--a.b value` or `--a-b=value`. Paths in the file are relative to the file;
    paths on the command line are relative to the current folder.

    Args:
        data: the file's bytes, where somebody has read it already.
    """
    draft = Draft(path.name if path else BUILTIN)
    parsed = read_config_file(path, data) if path else _builtin()
    _take_file(draft, parsed, (path or BUILTIN_FILE).name)
    written = set(draft.values) if path else set()
    written |= _take_overrides(draft, overrides, rebase=path is not None)
    notes, target = draft.notes, None
    if path is None and "max_steps" in written and not written & {"target_metric", "target_value"}:
        target = (draft.values.pop("target_metric"), draft.values.pop("target_value"))
        notes.append(shown_target_line(target))
    config = draft.build()
    notes += _defaults(draft, written)
    base = path.parent.absolute() if path else Path.cwd()
    return LoadedConfig(config, base, tuple(notes), draft.source, frozenset(written), target)


def shown_target_line(target: tuple[str, float]) -> str:
    """What plan and verdict say of the built-in target when it is not judged."""
    return f"{target[0]} {target[1]} is the target of the built-in length: with max_steps set it is shown, not judged"


def config_from_values(values: Mapping[str, Any], *, source: str, base: Path) -> LoadedConfig:
    """A checked config from Python values, tables as dicts; the same rules and words as for a file."""
    draft = Draft(source)
    for key, value in flatten(values):
        draft.add(key, value, "", {})
    config = draft.build()
    notes = (*draft.notes, *_defaults(draft, set(draft.values)))
    return LoadedConfig(config, base, notes, source, frozenset(draft.values))


def _defaults(draft: Draft, written: set[str]) -> list[str]:
    """Which defaults hold and are not TRL's, for a user who writes TRL's words; what the built-in config sets is none."""
    return foreign.default_lines(draft.values) if draft.from_trl or foreign.is_from_trl(written) else []


def _builtin() -> Parsed:
    return parse_toml(BUILTIN_FILE.read_text(encoding="utf-8"), BUILTIN_FILE.name)


def _take_file(draft: Draft, parsed: Parsed, name: str) -> None:
    taken: dict[str, str] = {}
    for key, value in flatten(parsed.table):
        line = parsed.lines.get(key) or parsed.lines.get(key.rpartition(".")[0])
        place = f"{name}:{line}" if line else name
        if added := draft.add(key, value, place, taken):
            taken[added] = place


def _take_overrides(draft: Draft, words: Sequence[str], *, rebase: bool) -> set[str]:
    found, problems = parse_overrides(words)
    for problem in problems:
        draft.problem(COMMAND_LINE, problem)
    taken: dict[str, str] = {}
    for key, value in found:
        if added := draft.add(key, _from_here(key, value) if rebase else value, COMMAND_LINE, taken):
            taken[added] = COMMAND_LINE
    return set(taken)


def _from_here(key: str, value: Any) -> Any:
    """A path typed on the command line means the current folder, wherever the config file lies."""
    here = Path.cwd()
    if key in ("reward_funcs", "tools.functions") and isinstance(value, list):
        return [_function_from(item, here) if isinstance(item, str) else item for item in value]
    if key in ("output_dir", "replay_pairs", *_FILES) and isinstance(value, str):
        return value if key == "chat_template" and value.startswith(BUILTIN_NAME) else _absolute_text(value, here)
    if key in ("tasks", "model") and isinstance(value, str) and _is_path(value, here):
        return _absolute_text(value, here)
    if key.startswith(SETS):
        return _set_from(key.removeprefix(SETS).lstrip("."), value, here)
    return value


def _set_from(path: str, value: Any, base: Path) -> Any:
    """Paths in `eval_sets`, in one set of it, or in one field of a set; what is not a path stays as it is."""
    name, _, field = path.partition(".")
    if isinstance(value, dict):
        return {key: _set_from(f"{name}.{key}" if name else key, each, base) for key, each in value.items()}
    if not isinstance(value, str) or field not in ("", "tasks", "metric"):
        return value
    is_file = ".py:" in value if field == "metric" else _is_path(value, base)
    return _absolute_text(value, base) if is_file else value


def _absolute(config: Config, base: Path) -> Config:
    changed: dict[str, Any] = {
        name: _absolute_text(value, base)
        for name in ("model", "tasks")
        if _is_path(value := getattr(config, name), base)
    }
    if ".py:" in config.eval_metric:
        changed["eval_metric"] = _absolute_text(config.eval_metric, base)
    changed[SETS] = {
        name: keys.model_copy(update=_set_from(name, {"tasks": keys.tasks, "metric": keys.metric}, base))
        for name, keys in config.eval_sets.items()
    }
    changed["reward_funcs"] = tuple(_function_from(item, base) for item in config.reward_funcs)
    for name in ("output_dir", "replay_pairs", "chat_template"):
        given = getattr(config, name)
        if given is not None and not (name == "chat_template" and given.startswith(BUILTIN_NAME)):
            changed[name] = _absolute_text(given, base)
    tools: dict[str, Any] = {"functions": tuple(_absolute_text(item, base) for item in config.tools.functions)}
    for name in ("servers", "environment", "cassette"):
        if (given := getattr(config.tools, name)) is not None:
            tools[name] = _absolute_text(given, base)
    changed["tools"] = config.tools.model_copy(update=tools)
    if config.guard.calibrate_from is not None:
        healthy = _absolute_text(config.guard.calibrate_from, base)
        changed["guard"] = config.guard.model_copy(update={"calibrate_from": healthy})
    return config.model_copy(update=changed)


def _function_from(text: str, base: Path) -> str:
    """`file.py:function` below `base`; a function of ours has no file."""
    return text if text.startswith("builtin:") else _absolute_text(text, base)


def _is_path(value: str, base: Path) -> bool:
    return value not in BUILTIN_MODELS and os.path.exists(_absolute_text(value, base))


def _absolute_text(text: str, base: Path) -> str:
    """`text` below `base`, or below a user's folder; one of a user who is not there stays as it is, to be refused."""
    home = os.path.expanduser(text)
    return text if home.startswith("~") else str((base / home).absolute())

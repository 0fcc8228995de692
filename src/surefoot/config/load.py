"""One call: file, or built-in config, plus overrides, becomes a checked `LoadedConfig`.

Owns       which source wins, what paths are relative to, and whether the built-in target is judged.
Promises   every problem of file and command line in one error, each with its place.
"""

from __future__ import annotations

import os
import re
import typing
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from surefoot.config import Config, EvalSetConfig, foreign
from surefoot.config.choices import is_own, named_environment
from surefoot.config.files import WHY, ParsedFile, parse_overrides, parse_toml, read_config_file
from surefoot.config.keys import ALIASES, SETS, all_keys, allowed, hint, nearest, tables
from surefoot.config.rules import BUILTIN as BUILTIN_NAME
from surefoot.config.rules import BUILTIN_MODELS
from surefoot.errors import ConfigError

# -- Values become a `Config`, or every problem at once -------------------------------------------
# Owns       unknown keys, aliases, types in plain words, ranges and pairs, with the place each value came from.
# Promises   one pass reports everything; a problem that is only a consequence of another is not reported.


COMMAND_LINE = "command line"
"""The place of what stood there."""
RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
"""A run name becomes part of a folder's name."""
_YAML_PLACE = re.compile(r"\.ya?ml(:\d+)?$")
_LONGEST_NAME, _LONGEST_PATH = 255, 4000
"""Bytes; what the usual file systems take, with room for what a run puts below its folder."""


@dataclass(slots=True)
class Draft:
    """Values on their way to a `Config`: dotted key -> value, and where each came from."""

    source: str
    values: dict[str, Any] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    doubted: set[str] = field(default_factory=set)
    """Keys whose value is not what was meant; rules about them would only confuse."""
    suspects: set[str] = field(default_factory=set)
    """Keys that a misspelt one probably meant; doubted unless they were also written rightly."""
    from_trl: bool = False
    """Whether a name or a value was written as only TRL has it."""

    def add(self, path: str, value: Any, place: str, earlier: Mapping[str, str]) -> str | None:
        """Take one value from `place`; returns the key it belongs to, None when it was refused.

        `earlier` holds the keys already taken from the same source, with their places.
        """
        if path.startswith(SETS + "."):
            return self._add_to_set(path, value, place, earlier)
        name = ALIASES.get(path, path)
        if path in tables():
            row = foreign.answer(path, value)
            more = f"; {row.hint(typed=place == COMMAND_LINE)}" if row else ""
            self.problem(place, f"{path} = {_shown(value)}: must be a table, written as [{path}]{more}")
            return None
        if name not in all_keys():
            row = foreign.answer(path, value)
            self.from_trl |= row is not None and bool({"trl", "trl_trainer"} & row.owners(path))
            if row is not None and row.verdict == "so":
                self.notes.append(f"{path} = {_shown(value)} is so anyway: {row.say}")
                return None
            told = row.hint(typed=place == COMMAND_LINE) if row else hint(path)
            self.problem(place, f"unknown key {path}; {told}")
            self.suspects.update(nearest(path) if row is None else row.keys)
            return None
        if name in earlier:
            self.problem(place, f"{path} is given twice, also at {earlier[name]}; keep one")
            return None
        if name != path:
            self.notes.append(f"{path} is read as {name}")
            self.from_trl |= path in foreign.names_of("trl")
        read = foreign.read_form(name, value)
        if read is not value:
            self.notes.append(f"{name} = {_shown(value)} is read as {_shown(read)}")
            self.from_trl = True
        self.values[name], self.places[name] = read, place
        return name

    def _add_to_set(self, path: str, value: Any, place: str, earlier: Mapping[str, str]) -> str | None:
        """`eval_sets.NAME` or one field of it, beside what an earlier source said of the others."""
        name, _, key = path.removeprefix(SETS + ".").partition(".")
        if key and key not in EvalSetConfig.model_fields:
            self.problem(place, f"unknown key {path}; a set takes {', '.join(EvalSetConfig.model_fields)}")
            return None
        if path in earlier:
            self.problem(place, f"{path} is given twice, also at {earlier[path]}; keep one")
            return None
        given = self.values.get(SETS, {})
        if not isinstance(given, dict):
            return None  # what stands there is refused as a whole
        known = given.get(name, {})
        known = {"tasks": known} if isinstance(known, str) else known
        if not key and isinstance(value, str) and any(each.startswith(f"{path}.") for each in earlier):
            key = "tasks"  # the same source said more of this set before
        whole = {**known, key: value} if key and isinstance(known, dict) else value
        self.values[SETS], self.places[path] = {**given, name: whole}, place
        self.places.setdefault(SETS, place)
        return path

    def problem(self, place: str, text: str) -> None:
        """Note one problem; the place leads where it is known."""
        self.problems.append(f"{place}: {text}" if place else text)

    def build(self) -> Config:
        """The config, or a `ConfigError` that lists everything."""
        config = self._typed()
        self.doubted |= self.suspects - set(self.values)
        if config is not None:
            found = [*config.problems(), *_name_problems(config), *_path_problems(config), *_guard_problems(config)]
            for line in found:
                named = set(re.findall(r"[a-z][a-z0-9_.]*[a-z0-9]", line))
                if not named & self.doubted:
                    self.problem(self._place_of(line), line)
        if self.problems or config is None:
            raise self._error()
        return config

    def _typed(self) -> Config | None:
        """Validate; keys of the wrong type are reported, then replaced so that the rest can be judged too."""
        try:
            return Config.model_validate(nest(self.values))
        except ValidationError as error:
            bad = {_dotted(item["loc"]): item for item in error.errors(include_url=False)}
            of_sets = [item["loc"] for item in error.errors(include_url=False) if item["loc"][0] == SETS]
        for path, item in bad.items():
            self.doubted.add(path)
            if path == SETS and isinstance(self.values[SETS], dict):
                for location in of_sets:
                    self.problem(self.places.get(SETS, ""), _set_problem(location, self.values[SETS]))
            elif item["type"] == "missing":
                self.problem("", f"{path} is missing: {all_keys()[path].doc}")
            else:
                place = self.places.get(path, "")
                if said := _range_problem(path, self.values[path], item.get("ctx", {})):
                    self.problem(place, said)
                    continue
                self.problem(place, _type_problem(path, self.values[path], yaml=bool(_YAML_PLACE.search(place))))
        stand_in = dict.fromkeys(("model", "tasks"), "missing")
        kept = {path: value for path, value in self.values.items() if path not in bad}
        try:
            return Config.model_validate(nest(stand_in | kept))
        except ValidationError:
            return None  # the problems found so far are reported; none is invented

    def _place_of(self, line: str) -> str:
        """Where the first key that a rule names was written."""
        for word in re.findall(r"[a-z][a-z0-9_.]*[a-z0-9]", line):
            if word in self.places:
                return self.places[word]
        return ""

    def _error(self) -> ConfigError:
        lines = "".join(f"\n    - {problem}" for problem in self.problems)
        return ConfigError(
            f"{self.source} has {len(self.problems)} problem(s):{lines}",
            WHY,
            "correct the lines above; `surefoot config` prints every key with its default, `surefoot config WORD` those "
            "about something" + self._defaults(),
        )

    def _defaults(self) -> str:
        """What whoever moves from TRL is told while they correct names; else nothing."""
        lines = foreign.default_lines(self.values) if self.from_trl else []
        return "".join(f"\n  {line}" for line in lines)


def flatten(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values; a table that should not be one is flattened too, so that its keys get hints."""
    for name, value in table.items():
        path = f"{prefix}{name}"
        if isinstance(value, dict) and value and path not in all_keys():
            yield from flatten(value, path + ".")
        elif not (path in tables() and value == {}):
            yield path, value


def nest(values: Mapping[str, Any]) -> dict[str, Any]:
    """Dotted keys back into tables; lists as the tuples that a frozen config holds."""
    tree: dict[str, Any] = {}
    for path, value in values.items():
        table, _, leaf = path.rpartition(".")
        home = tree.setdefault(table, {}) if table else tree
        home[leaf] = tuple(value) if isinstance(value, list) else value
    return tree


def _dotted(location: tuple[int | str, ...]) -> str:
    """The key an error belongs to; list positions and union branches are cut off."""
    first = str(location[0])
    return f"{first}.{location[1]}" if first in tables() and len(location) > 1 else first


def _set_problem(location: tuple[int | str, ...], sets: Mapping[str, Any]) -> str:
    """What is wrong with one entry of `eval_sets`, by name."""
    name, key = str(location[1]), str(location[2]) if len(location) > 2 else ""
    form = f'write {name} = "FILE" or {name} = {{ tasks = "FILE", metric = "exact" }}'
    if not key:
        return f"{SETS}.{name} = {_shown(sets[name])}: must be text or a table; {form}"
    field = EvalSetConfig.model_fields.get(key)
    if field is None:
        return f"unknown key {SETS}.{name}.{key}; a set takes {', '.join(EvalSetConfig.model_fields)}"
    if key not in sets[name]:
        return f"{SETS}.{name} has no {key}; {form}"
    return f"{SETS}.{name}.{key} = {_shown(sets[name][key])}: must be {allowed(field.annotation)}"


_RANGES = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}


def _range_problem(path: str, value: Any, limits: Mapping[str, Any]) -> str:
    """What is wrong with a value outside the range that stands beside its key; empty for another fault."""
    words = [f"{word} {limits[name]:g}" for name, word in _RANGES.items() if name in limits]
    return f"{path} = {_shown(value)}: must be {' and '.join(words)}" if words else ""


def _type_problem(path: str, value: Any, *, yaml: bool) -> str:
    key = all_keys()[path]
    line = f"{path} = {_shown(value)}: must be {allowed(key.annotation)}"
    if known := foreign.value_hint(path, value):
        return f"{line}; {known}"
    if isinstance(value, bool) and not key.takes(bool) and yaml:
        line += "; YAML reads no, off, yes and on as true or false: put the word in quotes"
    elif isinstance(value, str) and key.takes(bool):
        line += ", without quotes"
    elif isinstance(value, str) and typing.get_origin(key.annotation) is tuple:
        line += f', such as ["{value}"]'
    return line


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    text = f'"{value}"' if isinstance(value, str) else "nothing" if value is None else str(value)
    text = "".join(c if unicodedata.category(c) not in ("Cc", "Cs") else repr(c)[1:-1] for c in text)
    return text if len(text) <= 80 else text[:77] + "..."


def _name_problems(config: Config) -> Iterator[str]:
    name = config.run_name
    if not RUN_NAME.fullmatch(name) or ".." in name:
        better = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:64] or "run"
        yield (
            f"run_name = {_shown(name)}: names a folder, so letters, digits, dot, dash and underscore, at most 64; "
            f'write "{better}"'
        )


def _path_problems(config: Config) -> Iterator[str]:
    """Texts that no file or folder can be called; found here, they cannot surprise whoever opens them."""
    named = {
        name: getattr(config, name)
        for name in ("model", "tasks", "output_dir", "replay_pairs", "eval_metric", "chat_template")
    }
    named |= {f"tools.{name}": getattr(config.tools, name) for name in ("servers", "environment", "cassette")}
    for name, keys in config.eval_sets.items():
        named |= {f"eval_sets.{name}.tasks": keys.tasks, f"eval_sets.{name}.metric": keys.metric}
    named["guard.calibrate_from"] = config.guard.calibrate_from
    named |= {"loss_type": config.loss_type, "scale_rewards": config.scale_rewards, "engine.kind": config.engine.kind}
    lists = [("reward_funcs", config.reward_funcs), ("tools.functions", config.tools.functions)]
    lists.append(("guard.rules", config.guard.rules or ()))
    for name, text in [*named.items(), *((name, text) for name, texts in lists for text in texts)]:
        if text and (why := _not_a_path(text)):
            yield f"{name} = {_shown(text)}: {why}"
    for name in ("system_prompt", "target_metric"):
        if any(unicodedata.category(char) == "Cs" for char in getattr(config, name) or ""):
            yield f"{name} = {_shown(getattr(config, name))}: holds half a surrogate pair, which is not text"


def _not_a_path(text: str) -> str | None:
    if any(unicodedata.category(char) in ("Cc", "Cs") for char in text):
        return "holds a control character or half a surrogate pair; such names mislead whoever reads them"
    if max(len(part.encode()) for part in text.split("/")) > _LONGEST_NAME or len(text.encode()) > _LONGEST_PATH:
        return f"is too long: a name has at most {_LONGEST_NAME} bytes, a path {_LONGEST_PATH}"
    if text.startswith("~") and os.path.expanduser(text) == text:
        return "there is no such user; write the folder in full"
    return None


def _guard_problems(config: Config) -> Iterator[str]:
    """Settings of `[guard]` that would make a guard which looks like one and stops nothing."""
    guard = config.guard
    if guard.ema_alpha != "auto" and guard.ema_alpha > 1:
        yield f"guard.ema_alpha = {guard.ema_alpha}: must be at most 1"
    if guard.max_length_ratio <= 1:
        yield f"guard.max_length_ratio = {guard.max_length_ratio}: must be above 1"
    if guard.require:
        yield from _require_problems(config)
    if guard.calibrate_from is not None and guard.mode == "off":
        yield f"guard.calibrate_from = {guard.calibrate_from!r} with guard.mode = off: there is no guard to calibrate"
    if guard.calibrate_from is not None and guard.kl_hard_stop is None and guard.max_proxy_real_gap is None:
        yield (
            f"guard.calibrate_from = {guard.calibrate_from!r} without guard.kl_hard_stop and guard.max_proxy_real_gap: "
            "calibration only tightens limits that are set; set one of them"
        )
    if guard.metric == "eval_accuracy" and config.eval_metric == "none":
        yield 'guard.metric = eval_accuracy with eval_metric = none: it is never measured; use guard.metric = "auto"'
    if guard.kl_hard_stop is not None and config.beta == 0:
        yield (
            f"guard.kl_hard_stop = {guard.kl_hard_stop} with beta = 0: no KL is measured without a reference; "
            "set beta above 0 (1e-6 measures and hardly weighs), or leave the limit out"
        )
    if guard.kl_hard_stop is not None and config.reference_sync_steps != "never":
        yield (
            f"guard.kl_hard_stop = {guard.kl_hard_stop} with reference_sync_steps = {config.reference_sync_steps}: the "
            "KL to a reference that follows is not the KL to the initial policy; leave one of them out"
        )
    if guard.rules is not None:
        yield from _rule_problems(guard.rules, {"kl": guard.kl_hard_stop, "gap": guard.max_proxy_real_gap})


def _require_problems(config: Config) -> Iterator[str]:
    if config.guard.mode == "off":
        yield "guard.require = true with guard.mode = off: no guard is never armed; remove one of them"
    if config.heldout_fraction == 0:
        yield "guard.require = true with heldout_fraction = 0: a guard without held-out tasks sees nothing"
    if not config.eval_on_start:
        yield (
            "guard.require = true with eval_on_start = false: whether it is armed depends on the first held-out value, "
            "which has to be known before training"
        )


def _rule_problems(rules: tuple[str, ...], limits: Mapping[str, float | None]) -> Iterator[str]:
    keys = {"kl": "guard.kl_hard_stop", "gap": "guard.max_proxy_real_gap"}
    if rules and all(is_own(name) for name in rules):
        yield (
            f"guard.rules = {list(rules)}: only rules of your own, and nobody has measured how often those are wrong; "
            'add one of ours, such as "decline"'
        )
    if not rules:
        yield 'guard.rules = []: no rule is on; write guard.mode = "off" to train without a guard'
    if len(set(rules)) != len(rules):
        yield f"guard.rules = {list(rules)}: names one twice"
    if "kl" in rules and limits["kl"] is None:
        yield "guard.rules names kl without a limit; set guard.kl_hard_stop"
    for name, limit in limits.items():
        if limit is not None and name not in rules:
            yield f"{keys[name]} = {limit} with guard.rules that do not name {name}: add it, or leave the limit out"


# -- One call: file, or built-in config, plus overrides, becomes a checked `LoadedConfig` ---------


BUILTIN = "the built-in config"
BUILTIN_FILE = Path(__file__).parent.parent / "assets" / "builtin.toml"
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
    config = with_own_code(config, base)
    return LoadedConfig(config, base, tuple(notes), draft.source, frozenset(written), target)


def with_own_code(config: Config, base: Path) -> Config:
    """The same config with code of the user's own by absolute path: every process of the run finds it by that name."""

    def found(value: Any) -> Any:
        return _absolute_text(value, base) if is_own(value) else value

    changed: dict[str, Any] = {name: found(getattr(config, name)) for name in ("loss_type", "scale_rewards")}
    changed["engine"] = config.engine.model_copy(update={"kind": found(config.engine.kind)})
    if config.guard.rules is not None:
        rules = tuple(found(name) for name in config.guard.rules)
        changed["guard"] = config.guard.model_copy(update={"rules": rules})
    return config.model_copy(update=changed)


def shown_target_line(target: tuple[str, float]) -> str:
    """What plan and verdict say of the built-in target when it is not judged."""
    return f"{target[0]} {target[1]} is the target of the built-in length: with max_steps set it is shown, not judged"


def config_from_values(values: Mapping[str, Any], *, source: str, base: Path) -> LoadedConfig:
    """A checked config from Python values, tables as dicts; the same rules and words as for a file."""
    draft = Draft(source)
    for key, value in flatten(values):
        draft.add(key, value, "", {})
    config = with_own_code(draft.build(), base)
    notes = (*draft.notes, *_defaults(draft, set(draft.values)))
    return LoadedConfig(config, base, notes, source, frozenset(draft.values))


def _defaults(draft: Draft, written: set[str]) -> list[str]:
    """Which defaults hold and are not TRL's, for a user who writes TRL's words; what the built-in config sets is none."""
    return foreign.default_lines(draft.values) if draft.from_trl or foreign.is_from_trl(written) else []


def _builtin() -> ParsedFile:
    return parse_toml(BUILTIN_FILE.read_text(encoding="utf-8"), BUILTIN_FILE.name)


def _take_file(draft: Draft, parsed: ParsedFile, name: str) -> None:
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
    if is_own(value) and key in ("loss_type", "scale_rewards", "engine.kind"):
        return _absolute_text(value, here)
    if key == "guard.rules" and isinstance(value, list):
        return [_absolute_text(item, here) if is_own(item) else item for item in value]
    if key in ("reward_funcs", "tools.functions") and isinstance(value, list):
        return [_function_from(item, here) if isinstance(item, str) else item for item in value]
    if key in ("output_dir", "replay_pairs", *_FILES) and isinstance(value, str):
        if key == "tools.environment" and named_environment(value):
            return value
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
        if (given := getattr(config.tools, name)) is not None and not (
            name == "environment" and named_environment(given)
        ):
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

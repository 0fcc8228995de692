"""Recipe names: `algo-model-NnMg-strategy[-modifiers][-long][.vN]`, parsed and put together again.

grpo-llama3.1-8b-instruct-4n8g-fsdp2tp1-long.v3
algo | model            | size | strategy | long | version
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from surefoot.errors import ConfigError

ALGORITHMS = frozenset(
    "grpo dapo gspo gdpo ppo rloo reinforce dpo sft rm distillation vlm_grpo vlm_sft audio_grpo prorlv2".split()
)
"""Known first parts; a suite can add its own with `algorithms = [...]`."""

PATTERN = "algo-model-NnMg-strategy[-modifiers][-long][.vN]"
_SIZE = re.compile(r"([0-9]+)n([0-9]+)g")
_MODEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+]*")
_STRATEGY = re.compile(r"[a-z][a-z0-9_]*")
_MODIFIER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_+]*")
_VERSION = re.compile(r"(.*)\.v([0-9]+)", flags=re.DOTALL)


@dataclass(frozen=True, slots=True)
class RecipeName:
    """A recipe's name in parts.

    Example:
        >>> name = parse_name("grpo-llama3.1-8b-4n8g-fsdp2tp1-long.v3")
        >>> name.model, name.nodes, name.gpus_per_node, name.long, name.version
        ('llama3.1-8b', 4, 8, True, 3)
        >>> str(name)
        'grpo-llama3.1-8b-4n8g-fsdp2tp1-long.v3'
    """

    algo: str
    model: str
    nodes: int
    gpus_per_node: int
    strategy: str
    modifiers: tuple[str, ...] = ()
    long: bool = False
    version: int | None = None
    """Raised only when convergence is expected to change; None is the first one."""

    def __str__(self) -> str:
        parts = [self.algo, self.model, f"{self.nodes}n{self.gpus_per_node}g", self.strategy, *self.modifiers]
        version = "" if self.version is None else f".v{self.version}"
        return "-".join([*parts, *(["long"] if self.long else [])]) + version


def parse_name(text: str, algorithms: Collection[str] = ALGORITHMS) -> RecipeName:
    """The parts of a recipe's name; what does not fit is a `ConfigError` that names the part."""
    body, version = _split_version(text)
    parts = body.split("-")
    if "" in parts:
        raise _refused(text, "dashes", "two dashes in a row, or one at an end")
    sizes = [i for i, part in enumerate(parts) if _SIZE.fullmatch(part)]
    if len(sizes) != 1:
        raise _refused(text, "size", f"{len(sizes)} parts look like 1n8g, exactly one is needed")
    before, after = parts[: sizes[0]], parts[sizes[0] + 1 :]
    nodes, gpus = _size(text, parts[sizes[0]])
    algo, model = _front(text, before, algorithms)
    strategy, modifiers, long = _back(text, after)
    return RecipeName(algo, model, nodes, gpus, strategy, modifiers, long, version)


def _split_version(text: str) -> tuple[str, int | None]:
    match = _VERSION.fullmatch(text)
    if match is None:
        return text, None
    if match[2].startswith("0"):
        raise _refused(text, "version", f".v{match[2]} must count from 1, without leading zeros")
    return match[1], int(match[2])


def _size(text: str, part: str) -> tuple[int, int]:
    match = _SIZE.fullmatch(part)
    assert match is not None, "the caller found the part by this pattern"
    if any(number != str(int(number)) for number in match.groups()) or int(match[1]) < 1:
        raise _refused(text, "size", f"{part} needs at least one node, and no leading zeros")
    return int(match[1]), int(match[2])


def _front(text: str, parts: list[str], algorithms: Collection[str]) -> tuple[str, str]:
    if not parts or parts[0] not in algorithms:
        first = parts[0] if parts else ""
        raise _refused(text, "algo", f"{first!r} is not one of {', '.join(sorted(algorithms))}")
    if len(parts) < 2:
        raise _refused(text, "model", "there is none between algo and size")
    for part in parts[1:]:
        if not _MODEL.fullmatch(part):
            raise _refused(text, "model", f"{part!r} has characters other than letters, digits, dot, plus, underscore")
    return parts[0], "-".join(parts[1:])


def _back(text: str, parts: list[str]) -> tuple[str, tuple[str, ...], bool]:
    long = len(parts) > 1 and parts[-1] == "long"
    parts = parts[:-1] if long else parts
    if not parts:
        raise _refused(text, "strategy", "there is none after the size")
    if not _STRATEGY.fullmatch(parts[0]) or parts[0] == "long":
        raise _refused(text, "strategy", f"{parts[0]!r} should be like fsdp2tp1: lower case, a letter first")
    for part in parts[1:]:
        if part == "long":
            raise _refused(text, "long", "it stands last, once")
        if not _MODIFIER.fullmatch(part):
            raise _refused(text, "modifiers", f"{part!r} has characters other than letters, digits, plus, underscore")
    return parts[0], tuple(parts[1:]), long


def _refused(text: str, part: str, why: str) -> ConfigError:
    return ConfigError(
        f"recipe name {text!r}: {part}: {why}",
        "the name tells what runs where, and other tools read it",
        f"follow {PATTERN}, such as grpo-llama3.1-8b-instruct-4n8g-fsdp2tp1-long.v3",
    )

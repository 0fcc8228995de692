from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from surefoot.errors import ConfigError
from surefoot.harness.suites.rules import RecipeName, parse_name

GOOD = [
    "grpo-llama3.1-8b-instruct-4n8g-fsdp2tp1-long.v3",
    "grpo-llama3.2-1b-instruct-1n8g-fsdp2tp1.v3",
    "dpo-mistral-nemo-instruct-2407-1n8g-fsdp2tp8-actckpt-long",
    "sft-nemotron-super-49b-8n8g-fsdp2tp4cp8-tulu-v3",
    "vlm_grpo-qwen2.5-vl-3b-instruct-clevr-1n2g-dtensor2tp1.v1",
    "distillation-qwen3-32b-to-1.7b-base-1n8g-fsdp2tp1.v12",
    "grpo-nanov3-30BA3B-2n8g-megatron-8K",
    "grpo-pebble-1n0g-local",
]
BROKEN = [
    ("", "dashes"),
    ("grpo", "size"),
    ("grpo-llama-fsdp2", "size"),
    ("grpo-llama-1n8g-2n8g-fsdp2", "size"),
    ("grpo-llama-0n8g-fsdp2", "size"),
    ("grpo-llama-01n8g-fsdp2", "size"),
    ("grpo-llama-1n08g-fsdp2", "size"),
    ("grpo-llama-1N8G-fsdp2", "size"),
    ("grpo-llama-1n8-fsdp2", "size"),
    ("gpro-llama-1n8g-fsdp2", "algo"),
    ("GRPO-llama-1n8g-fsdp2", "algo"),
    ("1n8g-fsdp2", "algo"),
    ("grpo-1n8g-fsdp2", "model"),
    ("grpo-lla ma-1n8g-fsdp2", "model"),
    ("grpo-../x-1n8g-fsdp2", "model"),
    ("grpo-llama-1n8g", "strategy"),
    ("grpo-llama-1n8g-long", "strategy"),
    ("grpo-llama-1n8g-2tp", "strategy"),
    ("grpo-llama-1n8g-FSDP2", "strategy"),
    ("grpo-llama-1n8g-fsdp2-long-quick", "long"),
    ("grpo-llama-1n8g-fsdp2-long-long", "long"),
    ("grpo-llama-1n8g-fsdp2-a.b", "modifiers"),
    ("grpo-llama-1n8g-fsdp2.v0", "version"),
    ("grpo-llama-1n8g-fsdp2.v02", "version"),
    ("grpo-llama-1n8g-fsdp2.w2", "strategy"),
    ("grpo--llama-1n8g-fsdp2", "dashes"),
    ("grpo-llama-1n8g-fsdp2-", "dashes"),
]


@pytest.mark.parametrize("text", GOOD)
def test_a_name_comes_back_from_its_parts(text: str) -> None:
    assert str(parse_name(text)) == text


def test_every_part_lands_in_its_place() -> None:
    assert parse_name("grpo-llama3.1-8b-4n8g-fsdp2tp1-fp8-seq_pack-long.v3") == RecipeName(
        "grpo", "llama3.1-8b", 4, 8, "fsdp2tp1", ("fp8", "seq_pack"), True, 3
    )


def test_the_names_of_our_own_suite_parse(repo: Path) -> None:
    for path in (repo / "suites").glob("*.toml"):
        for recipe in tomllib.loads(path.read_text())["recipe"]:
            assert str(parse_name(recipe["name"])) == recipe["name"]


@pytest.mark.parametrize(("text", "part"), BROKEN)
def test_a_broken_name_is_refused_by_the_part_that_is_broken(text: str, part: str) -> None:
    with pytest.raises(ConfigError, match="recipe name") as caught:
        parse_name(text)
    assert f": {part}: " in caught.value.what


def test_a_suite_can_add_algorithms() -> None:
    assert parse_name("mine-llama-1n8g-ddp", {"mine"}).algo == "mine"

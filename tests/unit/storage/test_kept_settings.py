"""What a run folder says about its machine and its settings holds no secret, and changes nothing else."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from surefoot.config import Config, EngineConfig, EvalSetConfig, RuntimeConfig, ToolsConfig
from surefoot.config.keys import dump_toml
from surefoot.config.load import config_from_values
from surefoot.errors import StateError
from surefoot.storage import run_folder
from surefoot.storage.run_folder import RunFolder, config_text, environment_record, refuse_hidden
from surefoot.system.text import redact


def test_credentials_in_a_config_are_hidden_and_every_other_key_is_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_TOKEN", "canary-of-the-config")
    values = {
        "model": "https://me:pass1234@example.org/m", "tasks": "builtin:sums", "system_prompt": "say canary-of-the-config",
        "reward_funcs": ["a.py:f", "canary-of-the-config/b.py:g"], "run_name": "plain",
    }  # fmt: skip
    config = config_from_values(values, source="a test", base=tmp_path).config
    text = config_text(config)
    kept = tomllib.loads(text)
    assert (kept["model"], kept["system_prompt"]) == ("https://***@example.org/m", "say ***")
    assert kept["reward_funcs"] == ["a.py:f", "***/b.py:g"]
    assert "canary" not in text
    assert config.model == values["model"], "the run itself uses what it was given"
    whole = tomllib.loads(dump_toml(config))
    assert {name for name in whole if kept[name] != whole[name]} == {"model", "system_prompt", "reward_funcs"}


def test_a_config_of_which_a_part_was_hidden_is_not_taken_for_the_whole(tmp_path: Path) -> None:
    values = {"model": "pebble", "tasks": "builtin:sums", "system_prompt": "ask https://me:pass1234@example.org"}
    text = config_text(config_from_values(values, source="a test", base=tmp_path).config)
    with pytest.raises(StateError, match="system_prompt had some"):
        refuse_hidden(text)


def test_a_config_without_secrets_is_kept_to_the_letter(tmp_path: Path) -> None:
    values = {"model": "pebble", "tasks": "builtin:sums", "system_prompt": "*** three stars are no secret ***"}
    config = config_from_values(values, source="a test", base=tmp_path).config
    assert config_text(config) == dump_toml(config)
    refuse_hidden(config_text(config))


def test_the_record_of_the_machine_holds_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "canary-of-the-machine")
    monkeypatch.setattr("platform.platform", lambda: "Linux-canary-of-the-machine")
    record = environment_record()
    assert record["platform"] == "Linux-***"
    assert "canary" not in json.dumps(record)


def nested(tmp_path: Path) -> Config:
    """Credentials in tables, in a list in a table, and in a table of tables."""
    config = config_from_values({"model": "pebble", "tasks": "builtin:sums"}, source="a test", base=tmp_path).config
    tools = ToolsConfig(servers="https://me:NestedPw4@h/x.json", functions=("a.py:f", "https://me:NestedPw5@h/t.py:f"))
    return config.model_copy(
        update={
            "engine": EngineConfig(kind="openai", url="https://me:NestedPw2@gate/v1"), "tools": tools,
            "runtime": RuntimeConfig(kind="ray", address="ray://me:NestedPw3@10.0.0.1:10001"),
            "eval_sets": {"own": EvalSetConfig(tasks="https://me:NestedPw6@h/rows.jsonl")},
        }
    )  # fmt: skip


def test_credentials_in_a_table_of_the_config_are_hidden_too(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", "run", tmp_path)
    folder.write_config(nested(tmp_path))
    text = folder.config.read_text()
    assert "NestedPw" not in text
    kept = tomllib.loads(text)
    assert kept["engine"]["url"] == "https://***@gate/v1"
    assert kept["tools"]["functions"] == ["a.py:f", "https://***@h/t.py:f"]
    assert kept["eval_sets"]["own"]["tasks"] == "https://***@h/rows.jsonl"
    with pytest.raises(StateError) as refused:
        refuse_hidden(text)
    for key in ("engine.url", "runtime.address", "tools.servers", "tools.functions", "eval_sets.own.tasks"):
        assert key in refused.value.what


def test_planted_a_look_at_the_top_only_keeps_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        run_folder, "_kept", lambda value, key: (value, []) if not isinstance(value, str) else (redact(value), [])
    )
    assert config_text(nested(tmp_path)).count("NestedPw") == 5

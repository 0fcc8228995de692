"""Every shipped config is valid; each kind of defect is refused with the file and the key."""

from __future__ import annotations

from pathlib import Path

import pytest
from repo_tree import PACKAGE, ROOT, relative

from surefoot.config.load import load_config
from surefoot.errors import ConfigError

SHIPPED = sorted([*(ROOT / "configs").glob("*.*"), *(PACKAGE / "assets").glob("*.toml")])


@pytest.mark.parametrize("path", SHIPPED, ids=relative)
def test_a_shipped_config_is_valid(path: Path) -> None:
    assert path.suffix in (".toml", ".yaml", ".yml"), "only run configs live here"
    config = load_config(path).config
    assert list(config.problems()) == []
    assert config.rollouts_per_step > 0


def test_the_built_in_config_is_among_the_shipped_ones() -> None:
    assert load_config(None).config == load_config(PACKAGE / "assets" / "builtin.toml").config


@pytest.mark.parametrize(
    ("file", "text", "named"),
    [
        ("two.yaml", "model: pebble\ntasks: builtin:sums\n---\nmax_steps: 5\n", ["two.yaml", "document"]),
        ("twice.yaml", "model: pebble\ntasks: builtin:sums\nbeta: 0.1\nbeta: 0.2\n", ["twice.yaml:4", "beta"]),
        ("twice.toml", 'model = "pebble"\ntasks = "builtin:sums"\nbeta = 0.1\nbeta = 0.2\n', ["twice.toml:4", "beta"]),
        (
            "unknown.toml",
            'model = "pebble"\ntasks = "builtin:sums"\nmax_stepps = 5\n',
            ["unknown.toml:3", "max_stepps"],
        ),
        ("unknown.yaml", "model: pebble\ntasks: builtin:sums\nmax_stepps: 5\n", ["unknown.yaml:3", "max_stepps"]),
        ("type.toml", 'model = "pebble"\ntasks = "builtin:sums"\nmax_steps = "many"\n', ["type.toml:3", "max_steps"]),
        ("type.yaml", "model: pebble\ntasks: builtin:sums\nseed: [1]\n", ["type.yaml:3", "seed"]),
        ("range.toml", 'model = "pebble"\ntasks = "builtin:sums"\nbeta = -0.5\n', ["range.toml", "beta"]),
        ("bare.toml", 'model = "pebble"\n', ["bare.toml", "tasks"]),
        ("empty.yaml", "", ["empty.yaml"]),
    ],
    ids=lambda value: value if isinstance(value, str) and "." in value and "\n" not in value else None,
)
def test_a_defect_is_refused_with_its_file_and_key(tmp_path: Path, file: str, text: str, named: list[str]) -> None:
    path = tmp_path / file
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert [word for word in named if word not in str(caught.value)] == [], str(caught.value)
    assert caught.value.exit_code == 2

"""One wrong character in any config key, wherever it is written: refused with exit 2, and the right key suggested."""

from __future__ import annotations

import random
import re
import string
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import figures
import pytest
from command import surefoot

from surefoot.config import keys
from surefoot.config.keys import ALIASES, all_keys
from surefoot.config.load import load_config
from surefoot.errors import ConfigError

HEAD = {"model": "pebble", "tasks": "builtin:sums"}
SEED = 20
PROMISED_SHARE = 0.95


# -- one wrong character ------------------------------------------------------------------------------
def lost(key: str, rng: random.Random) -> str:
    i = rng.randrange(len(key))
    return key[:i] + key[i + 1 :]


def doubled(key: str, rng: random.Random) -> str:
    i = rng.randrange(len(key))
    return key[: i + 1] + key[i:]


def swapped(key: str, rng: random.Random) -> str:
    i = rng.choice([i for i in range(len(key) - 1) if key[i] != key[i + 1]])
    return key[:i] + key[i + 1] + key[i] + key[i + 2 :]


def wrong(key: str, rng: random.Random) -> str:
    i = rng.randrange(len(key))
    return key[:i] + rng.choice([c for c in string.ascii_lowercase + "_" if c != key[i]]) + key[i + 1 :]


EDITS = (lost, doubled, swapped, wrong)


# -- three places to write it ---------------------------------------------------------------------------
def in_toml(key: str, folder: Path) -> tuple[Path | None, list[str]]:
    path = folder / "run.toml"
    head = "".join(f'{name} = "{value}"\n' for name, value in HEAD.items() if name != key)
    path.write_text(head + f"{key} = 1\n")
    return path, []


def in_yaml(key: str, folder: Path) -> tuple[Path | None, list[str]]:
    path = folder / "run.yaml"
    table, dot, leaf = key.partition(".")
    line = f"{table}: {{{leaf}: 1}}\n" if dot else f"{key}: 1\n"
    path.write_text("".join(f"{name}: {value}\n" for name, value in HEAD.items()) + line)
    return path, []


def typed(key: str, folder: Path) -> tuple[Path | None, list[str]]:
    return None, [f"{key}=1"]


Place = Callable[[str, Path], tuple[Path | None, list[str]]]
PLACES: tuple[Place, ...] = (in_toml, in_yaml, typed)


@dataclass(frozen=True)
class Typo:
    """A misspelt key, and the key that was meant."""

    key: str
    text: str
    edit: str


def typos(rng: random.Random) -> list[Typo]:
    """One edit of each kind for every key."""
    made = {(key, edit(key, rng), edit.__name__) for key in all_keys() for edit in EDITS}
    known = {*all_keys(), *ALIASES}
    return [Typo(*each) for each in sorted(made) if each[1] not in known]


def refusal(typo: Typo, place: Place, folder: Path) -> str | None:
    """What the refusal says; None when the misspelt key was accepted."""
    path, words = place(typo.text, folder)
    try:
        load_config(path, words)
    except ConfigError as error:
        assert error.exit_code == 2
        return str(error)
    return None


def suggests(said: str, key: str) -> bool:
    """Whether the line about the unknown key names this one."""
    lines = [line for line in said.splitlines() if "unknown key" in line]
    return any(re.search(rf"(?<![\w.]){re.escape(key)}(?![\w.])", line.partition("; ")[2]) for line in lines)


def survey(folder: Path, *places: Place) -> tuple[int, list[str], list[str]]:
    """How many typos were tried; those that were accepted; those whose refusal does not name the right key."""
    rng, cases, accepted, unhelpful = random.Random(SEED), 0, list[str](), list[str]()
    for place in places:
        for typo in typos(rng):
            cases += 1
            said = refusal(typo, place, folder)
            name = f"{typo.key} as {typo.text} ({typo.edit}, {place.__name__})"
            if said is None:
                accepted.append(name)
            elif not suggests(said, typo.key):
                unhelpful.append(name)
    return cases, accepted, unhelpful


def test_every_one_character_typo_is_refused_and_nearly_all_get_the_right_key(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    cases, accepted, unhelpful = survey(tmp_path, *PLACES)
    share = 1 - len(unhelpful) / cases
    detail = f"all {len(all_keys())} keys, in TOML, YAML and typed; right key suggested for {100 * share:.1f} %"
    what, seeds = "one-character typo of a key: refused", range(SEED, SEED + 1)
    figures.note(record_property, "P18", what, cases, detail, bad=len(accepted), seeds=seeds)
    assert cases > 0.95 * len(PLACES) * len(EDITS) * len(all_keys()), "few typos of one key are another key"
    assert accepted == [], f"seed {SEED}"
    assert share >= PROMISED_SHARE, f"seed {SEED}: {unhelpful}"


def test_planted_bug_without_suggestions_the_survey_is_red(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(keys, "nearest", lambda _: ())
    cases, accepted, unhelpful = survey(tmp_path, typed)
    assert not accepted
    assert len(unhelpful) > 0.5 * cases


# -- through the real command ---------------------------------------------------------------------------
REFUSED_S = 2.0
COMMANDS = {
    "a lost letter in TOML": (in_toml, "max_step", "max_steps"),
    "a doubled letter in YAML": (in_yaml, "temmperature", "temperature"),
    "swapped letters, typed": (typed, "learning_rtae", "learning_rate"),
    "a wrong letter in a table": (in_toml, "guard.min_evala", "guard.min_evals"),
    "a wrong letter in a new key": (typed, "reward_memory_mv", "reward_memory_mb"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_command_refuses_a_typo_with_2_and_starts_nothing(
    name: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    place, text, meant = COMMANDS[name]
    path, words = place(text, tmp_path)
    started = time.monotonic()
    ran = surefoot("train", *([path.name] if path else []), *words, cwd=tmp_path, fresh=True)
    took, what = time.monotonic() - started, "typo of a key: refused by the command, from its start to its end"
    figures.note(record_property, "P18", what, 1, seconds=[took], limit_s=REFUSED_S)
    assert ran.code == 2, ran.err
    assert suggests(ran.err, meant), ran.err
    assert not ran.run.exists()


# -- contradictions ----------------------------------------------------------------------------------------
CONTRADICTIONS = [
    (["num_generations=1", "scale_rewards=group"], ["num_generations = 1"]),
    (["tasks_per_step=3", "num_generations=2", "microbatch_size=4"], ["microbatch_size = 4", "3 x 2 = 6"]),
    (["max_steps=10", "num_iterations=3"], ["max_steps = 10", "num_iterations = 3"]),
    (["max_steps=9", "num_iterations=3", "eval_steps=4"], ["eval_steps = 4", "num_iterations = 3"]),
    (["beta_replay=0.5"], ["beta_replay = 0.5", "replay_pairs = None"]),
    (["replay_pairs=pairs.jsonl"], ["beta_replay = 0.0", "pairs.jsonl"]),
    (["epsilon=0.2", "epsilon_high=0.4", "delta=1.3"], ["delta = 1.3", "1 + 0.4"]),
    (["epsilon=0.3", "delta=1.3"], ["delta = 1.3", "1 + 0.3"]),
    (["beta=0.1", "reference_sync_steps=1"], ["beta = 0.1", "reference_sync_steps = 1"]),
    (["beta=0", "reference_sync_steps=5"], ["reference_sync_steps = 5", "beta = 0"]),
    (["loss_type=cispo", "epsilon_high=5.0", "importance_sampling_level=sequence"], ["loss_type = cispo", "importance_sampling_level = sequence"]),
    (["loss_type=gspo", "importance_sampling_level=token"], ["loss_type = gspo", "importance_sampling_level = token"]),
    (["loss_type=gspo", "importance_sampling_correction=true"], ["loss_type = gspo", "importance_sampling_mode = token_truncate"]),
    (["loss_type=cispo"], ["loss_type = cispo", "epsilon_high = None"]),
    (["loss_type=cispo", "epsilon_high=0.3"], ["loss_type = cispo", "epsilon_high = 0.3"]),
    (["loss_type=cispo", "epsilon_high=5.0", "delta=9.0"], ["loss_type = cispo", "delta = 9.0"]),
    (["loss_type=dr_grpo", "scale_rewards=group"], ["loss_type = dr_grpo", "scale_rewards = group"]),
    (
        ["importance_sampling_level=sequence", "importance_sampling_correction=true", "importance_sampling_mode=token_mask"],
        ["importance_sampling_level = sequence", "importance_sampling_mode = token_mask"],
    ),
    (["reward_weights=[1.0, 2.0]"], ["reward_weights has 2 entries", "1 reward function"]),
    (["target_metric=none", "target_value=0.5"], ["target_metric = None", "target_value = 0.5"]),
    (["heldout_fraction=0", "eval_steps=10"], ["heldout_fraction = 0", "eval_steps = 10"]),
    (["heldout_fraction=0", "target_metric=eval_accuracy", "target_value=0.5"], ["heldout_fraction = 0", "target_metric = 'eval_accuracy'"]),
    (["eval_metric=none", "guard.metric=eval_accuracy"], ["guard.metric = eval_accuracy", "eval_metric = none"]),
    (["guard.kl_hard_stop=0.5", "beta=0"], ["guard.kl_hard_stop = 0.5", "beta = 0"]),
    (["guard.kl_hard_stop=0.5", "beta=0.1", "reference_sync_steps=7"], ["guard.kl_hard_stop = 0.5", "reference_sync_steps = 7"]),
    (['guard.rules=["decline"]', "guard.max_proxy_real_gap=0.3"], ["guard.max_proxy_real_gap = 0.3", "guard.rules"]),
    (['guard.rules=["kl"]'], ["guard.rules names kl", "guard.kl_hard_stop"]),
    (["seed=1", "seed=2"], ["seed is given twice"]),
]  # fmt: skip
"""Settings that cannot both be meant, and what the refusal has to quote."""


@pytest.mark.parametrize(("words", "quoted"), CONTRADICTIONS, ids=lambda value: " ".join(value)[:60])
def test_contradictory_settings_are_refused_with_both_values(words: list[str], quoted: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, words)
    assert caught.value.exit_code == 2
    lines = [line for line in str(caught.value).splitlines() if all(text in line for text in quoted)]
    assert lines, str(caught.value)

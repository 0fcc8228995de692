"""Names of other trainers: each gets an answer, every hint can be followed, and none is a wrong turn."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from surefoot.config import foreign
from surefoot.config.foreign import ForeignName, by_name, find, rows
from surefoot.config.keys import ALIASES, all_keys, hint
from surefoot.config.load import config_from_values, load_config
from surefoot.errors import ConfigError

HEAD = 'model = "pebble"\ntasks = "builtin:sums"\n'
NOT_KEYS = frozenset(
    "low_var_kl correction_floor kl_bias_correction kl_input_clamp kl_output_clamp positive_nll force_on_policy_ratio "
    "entropy_collapse dr_grpo step_N eval_sets.exam reasoning_gym".split()
)
"""Words like keys that sentences use and that are none: fields of LossSettings, a guard rule, a loss, a folder."""
LIKE_A_KEY = re.compile(
    r"(?<![\w/.])(?:[a-z]+(?:_[a-zN0-9]+)+|(?:engine|runtime|tools|guard|curriculum|eval_sets)\.[a-z_]+)\b"
)
EXAMPLE = re.compile(r"(?:such as|^write|; write) (.*?)(?:; |$)", flags=re.MULTILINE)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plain") / "run.toml"
    path.write_text(HEAD, encoding="utf-8")
    return path


def answer(config: Path, name: str, value: str = "1") -> str:
    """What one call with this key is told; empty when it loads."""
    try:
        load_config(config, [f"{name}={value}"])
    except ConfigError as error:
        assert error.exit_code == 2
        return str(error)
    return ""


def dead_ends(config: Path, each: Iterable[ForeignName]) -> list[str]:
    """Hints that are refused when they are followed, and sentences that name keys which do not exist."""
    found = []
    for row in each:
        known = {*all_keys(), *ALIASES, *by_name(), *NOT_KEYS}
        found += [f"{row.say!r} names {word}" for word in LIKE_A_KEY.findall(row.say) if word not in known]
        if row.verdict == "mapped" and not row.run:
            example = EXAMPLE.search(row.hint(typed=True))
            words = shlex.split(example[1]) if example else []
            try:
                loaded = load_config(config, words)
            except ConfigError as error:
                found.append(f"{words}: {error}")
                continue
            if not words or not set(row.keys) <= loaded.explicit:
                found.append(f"{row.names}: nothing to follow")
    return found


# -- one call for every name -----------------------------------------------------


def test_every_name_is_accepted_or_told_what_its_row_says_and_none_is_a_wrong_turn(plain: Path) -> None:
    """One call each, through the function that `surefoot train` calls; no row is shadowed by another rule."""
    assert len(by_name()) >= 300
    wrong = []
    for name, row in by_name().items():
        if row.verdict == "accepted":
            if ALIASES.get(name, name) not in all_keys():
                wrong.append(f"{name} is no key and no alias")
            continue
        said = answer(plain, name, "{}")
        if row.hint(typed=True) not in said or "did you mean" in said or "similar name" in said:
            wrong.append(f"{name}: {said}")
    assert wrong == []


def test_what_is_accepted_loads_under_its_name(plain: Path) -> None:
    for name in (name for name, row in by_name().items() if row.verdict == "accepted"):
        default = all_keys()[ALIASES.get(name, name)].field.default
        texts = {
            "model": "pebble",
            "reward_funcs": '["a.py:f"]',
            "epsilon_high": "0.3",
            "delta": "2",
            "output_dir": "x",
        }
        value = texts.get(name) or ("1" if default is None else str(default).lower())
        value = {"()": "[]", "reward_weights": "[1.0]"}.get(value, value)
        value = "[1.0]" if name == "reward_weights" else value
        assert answer(plain, name, value) == "", name


@pytest.mark.parametrize(
    ("name", "turn"),
    [
        ("adv_estimator", "kl_estimator"),
        ("importance_sampling_clip_min", "did you mean"),
        ("vllm_importance_sampling_clip_min", "did you mean"),
        ("eval_dataset", "did you mean"),
        ("lr_scheduler_kwargs", "did you mean"),
        ("peft_config", "similar name"),
        ("ref_model", "similar name"),
        ("test_dataset", "similar name"),
        ("gpus", "similar name"),
        ("accelerate", "similar name"),
        ("bnb_4bit", "similar name"),
        ("use_unsloth", "similar name"),
    ],
)
def test_a_wrong_turn_of_old_is_none(plain: Path, name: str, turn: str) -> None:
    said = answer(plain, name, "x")
    assert f"unknown key {name}; " in said
    assert turn not in said


def test_every_hint_can_be_followed_and_names_only_what_exists(plain: Path) -> None:
    assert dead_ends(plain, rows()) == []


# -- what the value says ---------------------------------------------------------

CASES = [
    (name, value, row.at(name, value))
    for row in rows()
    for case in row.cases
    for name in {each for names in row.names.values() for each in names}
    for value in case.values
    if case.covers(name)
]


def typed(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def wrong_turns(config: Path, cases: Iterable[tuple[str, object, ForeignName]]) -> list[str]:
    """Values that should be accepted and are not, or whose hint is refused when it is followed."""
    found = []
    for name, value, row in cases:
        said = answer(config, name, typed(value))
        if row.verdict == "so":
            found += [f"{name}={value}: {said}"] if said else []
        elif row.hint(typed=True) not in said:
            found.append(f"{name}={value} is told {said}")
    return found


def test_a_value_that_means_off_or_asks_for_what_is_so_gets_its_own_answer(plain: Path) -> None:
    assert len(CASES) >= 150
    assert wrong_turns(plain, CASES) == []
    assert dead_ends(plain, {id(row): row for _, _, row in CASES}.values()) == []


def test_planted_answers_that_ignore_the_value_are_caught(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ForeignName, "at", lambda self, path, value: self)
    some = CASES[::12]
    assert len(wrong_turns(plain, some)) > len(some) // 2


@pytest.mark.parametrize(
    ("word", "instead"),
    [
        ("use_vllm=false", 'engine.kind="auto"'),
        ("bf16=false", 'dtype="float32"'),
        ("bf16=False", 'dtype="float32"'),
        ("bf16=true", 'dtype="bfloat16"'),
        ("torch_dtype=float32", 'dtype="float32"'),
        ("log_completions=false", "save_rollouts=false"),
        ("eval_strategy=no", "eval_steps=0"),
        ("save_strategy=no", "save_steps=0 save_minutes=0"),
        ("algorithm.norm_adv_by_std_in_grpo=true", 'scale_rewards="group"'),
        ("algorithm.norm_adv_by_std_in_grpo=false", 'scale_rewards="none"'),
        ("no_advantage_std_norm=true", 'scale_rewards="none"'),
        ("trainer.val_before_train=false", "eval_on_start=false"),
        ("load_best_model_at_end=false", "save_best=false"),
        ("sync_ref_model=false", 'reference_sync_steps="never"'),
        ("use_kl_loss=false", "beta=0.0"),
        ("lr=1e-5", "learning_rate=1e-5"),
        ("optim.lr=0.003", "learning_rate=0.003"),
        ("lr=-1", "learning_rate=1e-6"),
        ("n=16", "num_generations=16"),
        ("n=1", "num_generations=8"),
        ("max_new_tokens=1024", "max_completion_length=1024"),
        ("num_train_epochs=3", "max_steps=100"),
        ("num_steps=3", "max_steps=3"),
        ("kl_coef=0.001", "beta=0.001"),
        ("test_freq=5", "eval_steps=5"),
        ("test_freq=-1", "eval_steps=0"),
        ("kl_loss_type=mse", 'kl_estimator="k2"'),
        ("model_name_or_path=Qwen/Qwen3-0.6B", 'model="Qwen/Qwen3-0.6B"'),
    ],
)
def test_a_hint_does_what_the_value_asks_and_carries_the_users_own_number(plain: Path, word: str, instead: str) -> None:
    name, _, value = word.partition("=")
    said = answer(plain, name, value)
    example = EXAMPLE.search(said.partition(f"unknown key {name}; ")[2])
    assert example, said
    assert shlex.split(example[1]) == instead.split(), said


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("gradient_checkpointing_kwargs.use_reentrant", False, "never by the reentrant way"),
        ("push_to_hub", False, "nothing is uploaded"),
        ("peft_config", None, "every weight is trained"),
        ("use_peft", False, "every weight is trained"),
        ("top_p", 1.0, "nothing bends the distribution"),
        ("optim_args", None, "the optimiser is that of optim"),
        ("num_gpus", 1, "one process trains on one device"),
    ],
)
def test_what_is_so_anyway_is_accepted_with_one_sentence(tmp_path: Path, key: str, value: object, why: str) -> None:
    base = {"model": "pebble", "tasks": "builtin:sums"}
    notes = config_from_values({**base, key: value}, source="test", base=tmp_path).notes
    assert sum(note.startswith(f"{key} = ") and " is so anyway: " in note and why in note for note in notes) == 1
    file = tmp_path / "run.yaml"
    text = {None: "null"}.get(value, typed(value))  # type: ignore[call-overload]
    file.write_text(f"model: pebble\ntasks: builtin:sums\n{key}: {text}\n")
    for loaded in (load_config(file), load_config(None, [f"{key}={text}"])):
        assert any(why in note for note in loaded.notes)
        assert key not in loaded.explicit
    for asked in ("x", "7"):
        assert f"unknown key {key}; " in answer(file, key, asked)


def test_planted_hints_that_lead_nowhere_are_caught(plain: Path) -> None:
    good = next(row for row in rows() if row.write == ("beta=0.04",))
    planted = [
        replace(good, write=("betta=0.04",)),
        replace(good, write=("beta=-1",)),
        replace(good, say="see kl_weight_of_loss"),
    ]
    assert [len(dead_ends(plain, [row])) for row in (good, *planted)] == [0, 1, 1, 1]


def test_commands_that_hints_name_exist() -> None:
    import typer.main

    from surefoot.cli import app

    commands = typer.main.get_group(app).commands  # type: ignore[attr-defined]
    texts = [f"{row.run} {row.say}" for row in rows()]
    called = [words for text in texts for words in re.findall(r"surefoot ([a-z-]+)((?: --[a-z-]+)?)", text)]
    assert len(called) >= 4
    for command, option in called:
        options = {opt for parameter in commands[command].params for opt in parameter.opts}
        assert not option or option.strip() in options, (command, option)


def test_each_name_stands_in_one_row_and_each_row_says_something() -> None:
    counted = Counter(name for row in rows() for name in {name for names in row.names.values() for name in names})
    assert [name for name, count in counted.items() if count > 1] == []
    for row in rows():
        assert row.names
        assert bool(row.write or row.run) == (row.verdict == "mapped"), row
        assert bool(row.say) or row.verdict != "refused", row
        assert not (row.write and row.run), row


# -- names by their end ----------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "key"),
    [
        ("actor_rollout_ref.rollout.n", "num_generations"),
        ("rollout.n", "num_generations"),
        ("ppo_epochs", "num_iterations"),
        ("rollout.val_kwargs.temperature", "eval_temperature"),
        ("val_kwargs.n", "num_generations_eval"),
        ("optim.lr", "learning_rate"),
        ("my.config.max_new_tokens", "max_completion_length"),
    ],
)
def test_a_nested_name_is_found_by_its_end(path: str, key: str) -> None:
    row = find(path)
    assert row is not None
    assert row.keys == (key,)


@pytest.mark.parametrize("path", ["rank", "path", "enabled", "engine.rwos", "tools.server", "guard.min_eval", "zz.qq"])
def test_a_word_that_may_mean_anything_and_a_slip_below_our_own_table_are_not_foreign(path: str) -> None:
    assert find(path) is None
    assert "such as" not in hint(path)


def test_a_typed_hint_is_quoted_for_the_shell_and_one_for_a_file_reads_like_a_file(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(HEAD + "reward_fn = 1\nper_device_train_batch_size = 8\n")
    with pytest.raises(ConfigError) as caught:
        load_config(file, ["reward_function=x"])
    said = str(caught.value)
    assert 'run.toml:3: unknown key reward_fn; use reward_funcs, such as reward_funcs = ["rewards.py:score"];' in said
    assert "such as tasks_per_step = 4, microbatch_size = 8; tasks_per_step counts" in said
    assert "reward_function; use reward_funcs, such as 'reward_funcs=[\"rewards.py:score\"]';" in said


# -- values in TRL's form ---------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "key", "value"),
    [
        ("report_to=none", "report_to", ()),
        ('report_to=["none"]', "report_to", ()),
        ("report_to=wandb", "report_to", ("wandb",)),
        ("scale_rewards=true", "scale_rewards", "group"),
        ("scale_rewards=false", "scale_rewards", "none"),
        ("vllm_importance_sampling_cap=2.0", "importance_sampling_clip_max", 2.0),
    ],
)
def test_values_in_trls_form_are_read_and_said_so(plain: Path, word: str, key: str, value: object) -> None:
    loaded = load_config(plain, [word])
    assert getattr(loaded.config, key) == value
    assert any(" is read as " in note for note in loaded.notes)
    file = plain.parent / "trl.toml"
    text = (
        word
        if "[" in word or "=true" in word or "=false" in word or "2.0" in word
        else '{}="{}"'.format(*word.split("="))
    )
    file.write_text(HEAD + text + "\n")
    assert getattr(load_config(file).config, key) == value


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ('report_to=["trackio"]', "no such sink: numbers go to tensorboard and wandb"),
        ("report_to=all", "no such sink"),
        ("loss_type=sapo", "TRL has this loss, surefoot does not"),
        ("lr_scheduler_type=constant_with_warmup", '"constant" with warmup_steps'),
        ("dtype=bf16", 'write "bfloat16"'),
        ("save_steps=0.1", "write whole steps"),
        ("tools=[1]", "use tools.functions, such as 'tools.functions=[\"tools.py:double\"]'"),
    ],
)
def test_a_value_of_theirs_is_refused_with_its_reason(plain: Path, word: str, said: str) -> None:
    key, _, value = word.partition("=")
    assert said in answer(plain, key, value)


def test_yaml_is_blamed_only_where_there_is_yaml(plain: Path) -> None:
    assert "YAML" not in answer(plain, "run_name", "true") + answer(plain, "seed", "true")
    file = plain.parent / "run.yaml"
    file.write_text("model: pebble\ntasks: builtin:sums\nloss_type: on\n")
    with pytest.raises(ConfigError, match="YAML reads no, off, yes and on"):
        load_config(file)


def test_every_value_in_the_table_is_really_refused_and_told_why(plain: Path) -> None:
    for entry in foreign._table()["value"]:
        for value in entry["values"]:
            assert entry["say"] in answer(plain, entry["key"], value), (entry["key"], value)


# -- TRL's defaults --------------------------------------------------------------


def told(path: Path | None, *words: str) -> str:
    return "\n".join(load_config(path, words).notes)


def test_defaults_are_told_to_a_config_in_trls_words_and_to_no_other(plain: Path) -> None:
    names = ["learning_rate=1e-6", "num_generations=4", "max_completion_length=64", "beta=0.04", "temperature=0.9"]
    block = " ".join(told(plain, *names, "logging_steps=1").split())
    assert 'lr_scheduler_type = "constant" (TRL: linear)' in block
    assert "importance_sampling_correction = false (TRL: true with vLLM)" in block
    assert "max_completion_length" not in block, "it was written"
    assert "TRL" not in told(plain, *names), "five names are anybody's"
    assert "TRL" not in told(plain, *names, "logging_steps=1", "heldout_fraction=0.2"), "that key is ours alone"
    assert "TRL" not in told(None), "the built-in run"
    assert "(TRL: linear)" in told(plain, "report_to=none"), "one value in TRL's form is enough"
    assert "(TRL: linear)" in told(plain, "vllm_importance_sampling_cap=2.0"), "and one name"
    assert "(TRL: linear)" not in told(plain, "report_to=none", "lr_scheduler_type=constant")


def test_what_the_built_in_config_sets_is_not_told_as_a_default() -> None:
    """Each line told holds for the run: the built-in length, batch and schedule are not the defaults of their keys."""
    from surefoot.config.keys import toml_value

    for word in ("report_to=none", "scale_rewards=true", "vllm_importance_sampling_cap=2"):
        loaded = load_config(None, [word])
        block = " ".join("\n".join(loaded.notes).split())
        told_of = dict(re.findall(r"(\w+) = (\S+) \(TRL:", block))
        assert told_of == {key: toml_value(getattr(loaded.config, key)) for key in told_of}
        assert {"dtype", "seed"} <= told_of.keys()
        assert not {"lr_scheduler_type", "tasks_per_step", "max_completion_length", "max_steps"} & told_of.keys()


def test_defaults_are_told_with_the_names_that_are_refused(plain: Path) -> None:
    assert "(TRL: linear)" in answer(plain, "num_train_epochs")
    assert "(TRL: linear)" not in answer(plain, "actor_rollout_ref.rollout.n")


def test_values_from_python_are_told_too() -> None:
    keys = {"model": "pebble", "tasks": "builtin:sums"}
    loaded = config_from_values({**keys, "report_to": "none"}, source="test", base=Path())
    assert any("(TRL: linear)" in note for note in loaded.notes)
    assert config_from_values(keys, source="test", base=Path()).notes == ()


def test_the_block_stands_in_the_dry_run(plain: Path) -> None:
    from surefoot.run.dry_run import dry_run

    lines = dry_run(load_config(plain, ["report_to=none"]))
    assert lines[0].endswith("is read as []")
    assert lines[1].startswith("defaults  where this config says nothing, ours are not TRL's: lr_scheduler_type")


# -- searching -------------------------------------------------------------------


def test_headings_are_those_of_the_source(tmp_path: Path) -> None:
    from surefoot import config
    from surefoot.config.keys import GROUPS

    source = Path(config.__file__).read_text(encoding="utf-8")
    written = re.findall(r"^    # -- ([^-]+?) -+\n    (\w+):", source, flags=re.MULTILINE)
    assert {key: heading for heading, key in written} == GROUPS


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        (["epsilon-high"], {"epsilon_high", "delta"}),
        (["penalty", "reference"], {"beta", "reference_sync_steps"}),
        (["group_size"], {"num_generations"}),
    ],
    ids=["its name, or it is mentioned", "every word is in its help", "what others call it"],
)
def test_a_search_finds_a_key_by_its_name_by_its_help_and_by_what_others_call_it(
    words: list[str], keys: set[str]
) -> None:
    assert {line.partition(" = ")[0] for line in foreign.search(words) if " = " in line} == keys


@pytest.mark.parametrize(("word", "value"), [("true", True), (" False ", False)])
def test_a_word_for_true_or_false_is_answered_as_the_value_itself(word: str, value: bool) -> None:
    told = [
        row.hint(typed=True) for each in (word, value, not value) if (row := foreign.answer("dataset_streaming", each))
    ]
    assert told[0] == told[1] != told[2]

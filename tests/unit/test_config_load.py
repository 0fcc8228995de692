"""Files and words become a config, or every problem at once with its place."""

from __future__ import annotations

import random
import string
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefoot.config.files import parse_overrides
from surefoot.config.keys import all_keys, describe_keys, dump_toml, hint, nearest
from surefoot.config.load import config_from_values, load_config
from surefoot.errors import ConfigError
from surefoot.storage.run_folder import config_text

HEAD = 'model = "pebble"\ntasks = "builtin:sums"\n'


def write(folder: Path, text: str, name: str = "run.toml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def refusal(path: Path | None, *words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, words)
    assert caught.value.exit_code == 2
    return str(caught.value)


@pytest.mark.parametrize(
    ("typed", "meant"), [("esed", "seed"), ("sede", "seed"), ("sed", "seed"), ("seeed", "seed"), ("saed", "seed")]
)
def test_one_slip_of_any_kind_at_any_place_is_understood(typed: str, meant: str) -> None:
    assert nearest(typed) == (meant,)


# -- files ----------------------------------------------------------------------


def test_toml_and_yaml_give_the_same_config(tmp_path: Path) -> None:
    toml = write(tmp_path, HEAD + 'learning_rate = 1e-5\nreward_funcs = ["a.py:f"]\n[engine]\nrows = 32\n')
    yaml = write(
        tmp_path,
        "model: pebble\ntasks: builtin:sums\nlearning_rate: 1e-5\nreward_funcs: [a.py:f]\nengine: {rows: 32}\n",
        "run.yaml",
    )
    one, two = load_config(toml), load_config(yaml)
    assert one.config == two.config
    assert one.config.learning_rate == 1e-5, "YAML reads 1e-5 as text; it must become the number"
    assert one.config.engine.rows == 32
    assert one.explicit == {"model", "tasks", "learning_rate", "reward_funcs", "engine.rows"}
    assert one.base == tmp_path
    assert one.source == "run.toml"


def test_all_problems_come_at_once_each_with_its_line(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        'model = "pebble"\nnum_generations = 1\ntemperature = "hot"\nmax_stepps = 5\n[engine]\nrwos = 3\n',
    )
    text = refusal(path, "beta=-1", "seed")
    assert text.startswith("run.toml has 7 problem(s):\n    - ")
    for line in (
        "run.toml:2: num_generations = 1: a group of one",
        'run.toml:3: temperature = "hot": must be a finite number',
        "run.toml:4: unknown key max_stepps; did you mean max_steps?",
        "run.toml:6: unknown key engine.rwos; did you mean engine.rows?",
        "tasks is missing: ",
        "command line: beta = -1.0: must not be negative",
        "command line: 'seed': neither KEY=VALUE nor --KEY VALUE",
    ):
        assert f"    - {line}" in text, text
    assert "why: " in text
    assert "`surefoot config` prints every key" in text


def test_a_rule_about_a_key_that_is_wrong_anyway_is_not_reported(tmp_path: Path) -> None:
    """tasks_per_stp = 3 was meant; judging microbatch_size against the default of tasks_per_step would confuse."""
    text = refusal(write(tmp_path, HEAD + "tasks_per_stp = 3\nnum_generations = 2\nmicrobatch_size = 6\n"))
    assert "1 problem(s)" in text
    fixed = write(tmp_path, HEAD + "tasks_per_step = 3\nnum_generations = 2\nmicrobatch_size = 6\n")
    assert load_config(fixed).config.rollouts_per_step == 6


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.yaml", "model: x\ntasks: y\nbeta: 0.1\nbeta: 0.2\n", ["a.yaml:4", "beta occurs twice, first in line 3"]),
        ("a.yaml", "model: x\ntasks: y\nengine:\n  rows: 1\n  rows: 2\n", ["a.yaml:5", "engine.rows occurs twice"]),
        ("a.toml", HEAD + "beta = 1\nbeta = 2\n", ["a.toml:4"]),
        ("a.yaml", "model: x\n---\nmodel: y\n", ["more than one YAML document"]),
        ("a.yaml", "model: !!python/object/apply:os.system [true]\n", ["a.yaml:1", "not valid YAML"]),
        ("a.yaml", "model: x\ntasks: y\nrun_name: no\n", ["a.yaml:3", "run_name = false: must be text", "quotes"]),
        ("a.yaml", "model: x\ntasks: y\non: 3\n", ["a.yaml:3", "key on is not text"]),
        ("a.yaml", "model: x\ntasks: y\nmax_steps: 1:30\n", ["a.yaml:3", "base 60"]),
        ("a.yaml", "model: x\ntasks: y\nseed: 010\n", ["a.yaml:3", "octal"]),
        ("a.yaml", "model: x\ntasks: y\nseed: true\n", ["a.yaml:3", "seed = true: must be a whole number"]),
        ("a.yaml", 'model: x\ntasks: y\neval_on_start: "no"\n', ["eval_on_start", "true or false, without quotes"]),
        ("a.yaml", "model: x\ntasks: y\nrun_name: 2024-01-01\n", ["run_name = 2024-01-01: must be text"]),
        ("a.yaml", "- 1\n", ["not a table"]),
        ("a.yaml", "", ["not a table"]),
        ("a.toml", "model = \n", ["a.toml:1", "not valid TOML"]),
        ("a.toml", 'model = "builtin:pebble"\ntasks = "t"\n', ["has a name alone: pebble, pebble_tools, smollm2"]),
        ("a.toml", HEAD + "learning_rate = nan\n", ["a.toml:3", "learning_rate = nan: must be a finite number"]),
        ("a.toml", HEAD + "learning_rate = 'inf'\n", ["learning_rate", "finite"]),
        ("a.toml", HEAD + "max_steps = 5.5\n", ["max_steps = 5.5: must be a whole number"]),
        ("a.toml", HEAD + "seed = " + "9" * 5000 + "\n", ["a.toml"]),
        ("a.toml", HEAD + "engine = 3\n", ["a.toml:3: engine = 3: must be a table"]),
        ("a.toml", HEAD + "max_steps = {a = 1}\n", ["a.toml:3", "max_steps"]),
        ("a.toml", HEAD + "[rollout]\ngroup_sise = 3\n", ["a.toml:4: unknown key rollout.group_sise", "num_generations"]),
        ("a.toml", HEAD + "[rollout]\n", ["unknown key rollout"]),
        ("a.toml", HEAD + "group_size = 4\nnum_generations = 4\n", ["given twice", "a.toml:3"]),
        ("a.toml", HEAD + 'run_name = "../../etc"\n', ["run_name", 'write "etc"']),
        ("a.toml", HEAD + "x = " + "[" * 1500 + "]" * 1500, ["a.toml"]),
        ("a.yaml", "x: " + "[" * 1500 + "]" * 1500, ["a.yaml"]),
        ("a.json", "{}", [".toml", ".yaml"]),
    ],
)  # fmt: skip
def test_a_defect_is_refused_and_named(tmp_path: Path, name: str, text: str, words: list[str]) -> None:
    said = refusal(write(tmp_path, text, name))
    assert [word for word in words if word not in said] == [], said


def test_a_bomb_of_aliases_is_refused_before_it_unfolds(tmp_path: Path) -> None:
    lines = ["a0: &a0 [x, x]"] + [f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 60)]
    assert "aliases" in refusal(write(tmp_path, "\n".join(lines), "bomb.yaml"))


def test_a_few_aliases_are_fine(tmp_path: Path) -> None:
    path = write(tmp_path, "model: pebble\ntasks: builtin:sums\nepsilon: &e 0.1\nepsilon_high: *e\n", "a.yaml")
    assert load_config(path).config.epsilon_high == 0.1


def test_a_missing_file_names_its_neighbour(tmp_path: Path) -> None:
    write(tmp_path, HEAD, "training.toml")
    assert "training.toml" in refusal(tmp_path / "trainning.toml")
    assert "does not exist" in refusal(tmp_path / "nowhere" / "a.toml")


def test_text_that_is_not_utf8_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_bytes(b'model = "x"\ntasks = "\xff"\n')
    assert "a.toml:2: not UTF-8" in refusal(path)


def test_keys_inside_a_long_text_are_not_taken_for_lines_of_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, HEAD + 'system_prompt = """\nbeta = 3\n"""\nbeta = -1\n')
    assert "run.toml:6: beta = -1" in refusal(path)


# -- names ----------------------------------------------------------------------


def typos(key: str, rng: random.Random, count: int) -> set[str]:
    """One-character mistakes: a letter lost, added, changed, or swapped with its neighbour."""
    made: set[str] = set()
    while len(made) < count:
        i, c = rng.randrange(len(key)), rng.choice(string.ascii_lowercase + "_")
        forms = [key[:i] + key[i + 1 :], key[:i] + c + key[i:], key[:i] + c + key[i + 1 :]]
        if i + 1 < len(key):
            forms.append(key[:i] + key[i + 1] + key[i] + key[i + 2 :])
        made.add(rng.choice(forms))
    return made - {key}


def test_at_least_95_percent_of_typos_get_the_right_hint() -> None:
    rng = random.Random(7)
    cases = [(typo, key) for key in all_keys() for typo in sorted(typos(key, rng, 8))]
    wrong = [(typo, key) for typo, key in cases if key not in nearest(typo)[:1] or key not in hint(typo)]
    assert len(cases) > 400
    assert len(wrong) <= 0.05 * len(cases), wrong
    assert not {typo for typo, _ in cases} & set(all_keys()), "a typo of one key must not be another key"


def test_a_name_like_nothing_gets_no_false_hint() -> None:
    assert nearest("zzzzzzzz") == ()
    assert "did you mean" not in hint("zzzzzzzz")


@pytest.mark.parametrize(
    ("key", "instead"),
    [
        ("top_p", "temperature"),
        ("top_k", "temperature"),
        ("per_device_train_batch_size", "tasks_per_step"),
        ("gradient_accumulation_steps", "microbatch_size"),
        ("use_vllm", "engine.kind"),
        ("max_new_tokens", "max_completion_length"),
        ("lr", "learning_rate"),
        ("kl_coef", "beta"),
        ("clip_ratio_high", "epsilon_high = 0.28; with loss_type = cispo it is the cap itself"),
        ("eps_clip_high", "add 1"),
        ("sync_ref_model", "reference_sync_steps = 512; it copies the policy whole"),
    ],
)
def test_a_key_of_another_trainer_is_answered_with_ours(tmp_path: Path, key: str, instead: str) -> None:
    assert f"unknown key {key}; " in (said := refusal(write(tmp_path, HEAD + f"{key} = 0.5\n")))
    assert instead in said


def test_group_size_is_read_as_num_generations_and_said_so(tmp_path: Path) -> None:
    loaded = load_config(write(tmp_path, HEAD + "group_size = 4\n"))
    assert loaded.config.num_generations == 4
    assert "group_size is read as num_generations" in loaded.notes
    assert "num_generations" in loaded.explicit


# -- overrides ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["max_steps=5"], [("max_steps", 5)]),
        (["--max-steps", "5"], [("max_steps", 5)]),
        (["--max-steps=5"], [("max_steps", 5)]),
        (["--engine.rows", "32"], [("engine.rows", 32)]),
        (["--seed", "-5"], [("seed", -5)]),
        (["learning_rate=3e-4"], [("learning_rate", 3e-4)]),
        (["loss_type=grpo"], [("loss_type", "grpo")]),
        (["run_name=5"], [("run_name", "5")]),
        (['run_name="a b"'], [("run_name", "a b")]),
        (["system_prompt=a=b"], [("system_prompt", "a=b")]),
        (["epsilon_high=none"], [("epsilon_high", None)]),
        (["--mask-truncated-completions", "seed=1"], [("mask_truncated_completions", True), ("seed", 1)]),
        (["--mask-truncated-completions", "false"], [("mask_truncated_completions", False)]),
        (['reward_funcs=["a.py:f", "b.py:g"]'], [("reward_funcs", ["a.py:f", "b.py:g"])]),
        (["system_prompt=1\nseed = 2"], [("system_prompt", "1\nseed = 2")]),
        (["seed=1\nmodel = 2"], [("seed", "1\nmodel = 2")]),
    ],
)
def test_the_grammar_of_overrides(words: list[str], found: list[tuple[str, object]]) -> None:
    assert parse_overrides(words) == (found, [])


@pytest.mark.parametrize("word", ["seed", "--seed", "-x", "=3", "--", "--=3", "\udcff=1"])
def test_a_word_that_is_no_override_is_a_problem(word: str) -> None:
    found, problems = parse_overrides([word])
    assert (found, len(problems)) == ([], 1)


def test_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, HEAD + "max_steps = 7\nseed = 3\n")
    config = load_config(path, ["--max-steps", "9"]).config
    assert (config.max_steps, config.seed) == (9, 3)


def test_the_same_key_twice_on_the_command_line_is_refused() -> None:
    assert "seed is given twice" in refusal(None, "seed=1", "seed=2")


def test_paths_in_a_file_are_relative_to_it_and_typed_ones_to_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "here.jsonl").touch()
    (tmp_path / "pebble").mkdir()  # a folder that happens to be called like the built-in model
    path = write(tmp_path / "configs", 'model = "pebble"\ntasks = "there.jsonl"\noutput_dir = "out"\n')
    (tmp_path / "configs" / "there.jsonl").touch()
    monkeypatch.chdir(tmp_path)
    plain = load_config(path)
    assert plain.path(plain.config.tasks) == tmp_path / "configs" / "there.jsonl"
    assert plain.resolved.tasks == str(tmp_path / "configs" / "there.jsonl")
    assert plain.resolved.output_dir == str(tmp_path / "configs" / "out")
    typed = load_config(path, ["tasks=here.jsonl", "output_dir=out", 'reward_funcs=["r.py:f"]'])
    assert typed.config.tasks == str(tmp_path / "here.jsonl")
    assert typed.config.output_dir == str(tmp_path / "out")
    assert typed.config.reward_funcs == (str(tmp_path / "r.py:f"),)
    assert load_config(path, ["model=pebble"]).config.model == "pebble"
    assert plain.resolved.model == "pebble"


# -- the built-in config --------------------------------------------------------


def test_the_built_in_target_is_judged_at_the_built_in_length_only() -> None:
    whole = load_config(None)
    assert (whole.config.target_metric, whole.config.target_value) == ("eval_accuracy", 0.85)
    assert (whole.shown_target, whole.explicit) == (None, frozenset())
    short = load_config(None, ["max_steps=5"])
    assert (short.config.target_metric, short.config.target_value) == (None, None)
    assert short.shown_target == ("eval_accuracy", 0.85)
    assert any("not judged" in note for note in short.notes)


def test_a_target_given_with_the_length_is_judged() -> None:
    loaded = load_config(None, ["max_steps=5", "target_value=0.3"])
    assert (loaded.config.target_metric, loaded.config.target_value) == ("eval_accuracy", 0.3)
    assert loaded.shown_target is None


def test_another_key_leaves_the_target_alone() -> None:
    assert load_config(None, ["seed=5"]).config.target_value == 0.85


@pytest.mark.parametrize(
    ("text", "says"),
    [("model: x\n---\nmodel: y\n", "a.yaml: more than one YAML document"), ("- 1\n", "a.yaml is not a table of keys")],
)
def test_what_yaml_reads_and_we_refuse_is_not_called_bad_yaml(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert caught.value.what == says


# -- text again -----------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    model=st.text(st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="~"), min_size=1, max_size=20),
    system=st.text(st.characters(exclude_categories=["Cs"]), max_size=40),
    rate=st.floats(min_value=0, max_value=1e300, allow_nan=False),
    weights=st.none() | st.tuples(st.floats(-1e9, 1e9)),
    rows=st.integers(0, 10**12),
    high=st.none() | st.floats(0, 1e3),
    switch=st.booleans(),
)
def test_a_dumped_config_reads_back_equal(
    tmp_path_factory: pytest.TempPathFactory,
    model: str,
    system: str,
    rate: float,
    weights: tuple[float] | None,
    rows: int,
    high: float | None,
    switch: bool,
) -> None:
    values = {"model": model, "tasks": "t", "system_prompt": system, "learning_rate": rate, "reward_weights": weights}
    values |= {"engine": {"rows": rows}, "epsilon_high": high, "mask_truncated_completions": switch}
    config = config_from_values(values, source="test", base=Path()).config
    path = tmp_path_factory.mktemp("dump") / "a.toml"
    for docs in (False, True):
        path.write_text(dump_toml(config, docs=docs), encoding="utf-8")
        assert load_config(path).config == config


def test_every_key_is_dumped_and_described() -> None:
    config = load_config(None).config
    dumped, described = dump_toml(config), "\n".join(describe_keys())
    for path, key in all_keys().items():
        leaf = path.rsplit(".", 1)[-1]
        assert f"\n{leaf} = " in "\n" + dumped or f"# {leaf} is left out" in dumped
        assert f"{path} = " in described
        assert key.doc, f"{path} has no docstring"
    tables = [config.lora, config.engine, config.runtime, config.tools, config.curriculum, config.guard]
    fields = sum(len(type(one).model_fields) for one in (config, *tables))
    assert len(all_keys()) == fields - len(tables)


def test_own_code_typed_on_the_command_line_lies_in_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "own.py").write_text("def mine(*words, **keys):\n    return None\n")
    monkeypatch.chdir(tmp_path / "here")
    words = ["loss_type=own.py:mine", "guard.rules=['decline', 'own.py:mine']", "reward_funcs=['own.py:mine']"]
    config = load_config(write(tmp_path, HEAD), words).config
    typed = str(tmp_path / "here" / "own.py") + ":mine"
    assert (config.loss_type, config.guard.rules, config.reward_funcs) == (typed, ("decline", typed), (typed,))


# -- evaluation sets ------------------------------------------------------------


def test_a_set_is_named_in_a_file_and_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    for name in ("exam.jsonl", "here/exam.jsonl"):
        (tmp_path / name).write_text("{}\n")
    monkeypatch.chdir(tmp_path / "here")
    path = write(tmp_path, HEAD + 'eval_sets = { a = "exam.jsonl", b = { tasks = "exam.jsonl", num_tasks = 5 } }\n')
    words = ["eval_sets.a.metric=judge.py:right", "--eval-sets.math-500", "exam.jsonl", "eval_sets.b.num_tasks=7"]
    loaded = load_config(path, words)
    sets = loaded.resolved.eval_sets
    assert [(name, keys.tasks, keys.num_tasks) for name, keys in sets.items()] == [
        ("a", str(tmp_path / "exam.jsonl"), None), ("b", str(tmp_path / "exam.jsonl"), 7),
        ("math-500", str(tmp_path / "here/exam.jsonl"), None),
    ]  # fmt: skip
    assert sets["a"].metric == str(tmp_path / "here/judge.py:right"), "typed here, so it means this folder"
    again = write(tmp_path, dump_toml(loaded.resolved), "again.toml")
    assert load_config(again).config == loaded.resolved, "a run folder's config reads in again"


def test_more_said_of_one_set_adds_up_in_any_order() -> None:
    one = load_config(None, ["eval_sets.a.num_tasks=3", "eval_sets.a=x.jsonl"]).config.eval_sets
    two = load_config(None, ["eval_sets.a=x.jsonl", "eval_sets.a.num_tasks=3"]).config.eval_sets
    assert one == two
    assert (one["a"].tasks, one["a"].num_tasks) == ("x.jsonl", 3)
    assert "eval_sets.a is given twice" in refusal(None, "eval_sets.a=x", "eval_sets.a=y")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["eval_sets=3"], "must be a table of sets, NAME ="),
        (["eval_sets.a/b=x.jsonl"], "a set called 'a/b'"),
        (["eval_sets.heldout=x.jsonl"], "a set called 'heldout'"),
        (["eval_sets={a=3, b={x=1}}"], 'eval_sets.a = 3: must be text or a table; write a = "FILE"'),
        (["eval_sets={a=3, b={x=1}}"], "eval_sets.b has no tasks"),
        (["eval_sets={a=3, b={x=1}}"], "unknown key eval_sets.b.x; a set takes tasks, metric, num_tasks, seed, reward"),
        (["eval_sets.a={tasks='x', num_tasks='many'}"], 'eval_sets.a.num_tasks = "many": must be a whole number'),
        (["eval_sets.a={tasks='x', num_tasks=0}"], "eval_sets.a.num_tasks = 0: must be at least 1"),
        (["eval_sets.a={tasks='x', reward=false, metric='none'}"], "nobody would judge its answers"),
        (["target_metric=eval/a/accuracy", "target_value=0.5"], "eval_sets has no a; it is empty"),
    ],
)
def test_what_is_wrong_with_a_set_is_named(words: list[str], said: str) -> None:
    assert said in refusal(None, *words)


@pytest.mark.config_key("threads")
def test_threads_follow_the_machine_and_the_run_keeps_the_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that goes on elsewhere computes with as many as it began with; the built-in one has two everywhere."""
    monkeypatch.setattr("surefoot.config.usable_cores", lambda: 7)
    (tmp_path / "a.toml").write_text('model = "pebble"\ntasks = "builtin:sums"\n')
    begun = load_config(tmp_path / "a.toml")
    assert begun.config.threads == 7
    (tmp_path / "kept.toml").write_text(config_text(begun.resolved))
    monkeypatch.setattr("surefoot.config.usable_cores", lambda: 3)
    assert load_config(tmp_path / "kept.toml").config.threads == 7
    assert load_config(tmp_path / "a.toml", ["threads=5"]).config.threads == 5
    assert load_config(None).config.threads == 2
    with pytest.raises(ConfigError, match="threads"):
        load_config(None, ["threads=-1"])

"""A config in TRL's words, through the real command: what is refused, what is told, and that it trains."""

from __future__ import annotations

from pathlib import Path

from command import surefoot

WORDS = """
model = "pebble"
tasks = "builtin:sums"
num_tasks = 100
tasks_per_step = 2
max_steps = 1
num_generations = 2
max_completion_length = 6
report_to = "none"
scale_rewards = true
push_to_hub = false
"""


def test_a_config_in_trls_words_trains_and_is_told_which_defaults_differ(tmp_path: Path) -> None:
    (tmp_path / "trl.toml").write_text(WORDS)
    quick = ["eval_tasks=4", "preflight_tasks=0", "guard.mode=off"]
    for more in (["--dry-run"], []):
        ran = surefoot("train", "trl.toml", *quick, *more, cwd=tmp_path)
        assert 'report_to = "none" is read as []' in ran.out, ran.err
        assert "push_to_hub = false is so anyway: nothing is uploaded" in ran.out
        assert "defaults  where this config says nothing, ours are not TRL's:" in ran.out
        assert ran.out.count('lr_scheduler_type = "constant" (TRL: linear)') == 1
        assert "max_completion_length =" not in ran.out, "it was written"
    assert ran.metrics[-1]["step"] == 1


def test_names_that_are_refused_come_with_what_to_write_and_with_the_defaults(tmp_path: Path) -> None:
    (tmp_path / "trl.toml").write_text(WORDS + "per_device_train_batch_size = 8\ngradient_checkpointing = true\n")
    ran = surefoot("train", "trl.toml", "peft_config=x", "use_vllm=false", "lr=1e-5", cwd=tmp_path)
    assert ran.code == 2
    assert "unknown key per_device_train_batch_size; use tasks_per_step and microbatch_size, such as" in ran.err
    assert "unknown key gradient_checkpointing" not in ran.err, "a key of ours"
    assert "unknown key peft_config; an object for surefoot.train in Python" in ran.err
    assert (
        "unknown key use_vllm; write 'engine.kind=\"auto\"'; ours, or transformers where ours does not compute the model; the default"
        in ran.err
    )
    assert "unknown key lr; write learning_rate=1e-5" in ran.err
    assert "(TRL: linear)" in ran.err


def test_config_searches_words_and_still_reads_files_and_overrides(tmp_path: Path) -> None:
    (tmp_path / "trl.toml").write_text(WORDS)
    found = surefoot("config", "gradient", "checkpointing", cwd=tmp_path)
    assert found.code == 0
    assert "gradient_checkpointing" in found.out
    assert 'gradient_checkpointing = "auto"' in found.out
    by_help = surefoot("config", "warm-up", cwd=tmp_path).out + surefoot("config", "KL", cwd=tmp_path).out
    assert "kl_estimator = " in by_help
    assert "beta = 0.0" in by_help, "found by its help text"
    assert "== the loss ==" in by_help
    nothing = surefoot("config", "zzzz", cwd=tmp_path)
    assert (nothing.code, nothing.out) == (2, "")
    assert "nothing about zzzz" in nothing.err
    assert "max_completion_length = 6\n" in surefoot("config", "trl.toml", cwd=tmp_path).out
    assert "max_completion_length = 7\n" in surefoot("config", "max_completion_length=7", cwd=tmp_path).out
    mixed = surefoot("config", "beta", "seed=3", cwd=tmp_path)
    assert mixed.code == 2
    assert "one call either searches keys or shows a config" in mixed.err
    missing = surefoot("config", "no_such.toml", cwd=tmp_path)
    assert missing.code == 2
    assert "does not exist" in missing.err
    assert surefoot("config", cwd=tmp_path).out.count("\n== ") >= 12

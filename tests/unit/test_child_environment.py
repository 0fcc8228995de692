"""The list of variables that children have: what training needs is on it, and no secret comes through a pattern."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from surefoot.errors import ConfigError
from surefoot.system import environment
from surefoot.system.environment import check_named, inherited, misnamed
from surefoot.tracking.sinks import _needed

NEEDED = """PATH HOME LANG LC_ALL TMPDIR PYTHONPATH PYTHONHASHSEED OMP_NUM_THREADS MKL_NUM_THREADS CUDA_VISIBLE_DEVICES
CUDA_HOME NVIDIA_VISIBLE_DEVICES NCCL_DEBUG RAY_DEDUP_LOGS HF_HOME HF_HUB_OFFLINE TRANSFORMERS_OFFLINE TORCH_HOME
TORCHINDUCTOR_CACHE_DIR PYTORCH_CUDA_ALLOC_CONF VLLM_CACHE_ROOT SUREFOOT_FAILPOINTS SUREFOOT_WEIGHTS_DIR LD_LIBRARY_PATH
SSL_CERT_FILE TOKENIZERS_PARALLELISM""".split()
WITHHELD = """HF_TOKEN HUGGING_FACE_HUB_TOKEN RAY_AUTH_TOKEN SUREFOOT_ENGINE_API_KEY VLLM_API_KEY CUDA_LICENSE_KEY SLURM_JWT
HF_WEBHOOK_URL WANDB_API_KEY AWS_PROFILE SSH_AUTH_SOCK EDITOR MY_SETTING PATHS HOMEDRIVE http_proxy""".split()


def test_what_training_needs_is_passed_on_and_nothing_else() -> None:
    everything = dict.fromkeys(NEEDED + WITHHELD, "plain")
    assert sorted(inherited((), everything)) == sorted(NEEDED)
    assert sorted(inherited(["HF_TOKEN", "EDITOR", "ABSENT"], everything)) == sorted([*NEEDED, "HF_TOKEN", "EDITOR"])


@pytest.mark.parametrize(
    "value", ["https://me:pw@example.org/simple", "hf_" + "a" * 20, "Bearer abcdef012345", "password: hunter2hunter2"]
)
def test_a_secret_as_the_value_of_a_plain_name_comes_through_no_pattern(value: str) -> None:
    assert inherited((), {"HF_ENDPOINT": value, "PYTHONSTARTUP": value}) == {}
    assert inherited(["HF_ENDPOINT"], {"HF_ENDPOINT": value}) == {"HF_ENDPOINT": value}
    assert inherited((), {"PATH": "/opt/sk-build-20240101-release/bin"}), "the way to programs is never lost to a guess"


def test_the_way_to_a_file_that_holds_a_key_is_no_secret(tmp_path: Path) -> None:
    there, absent = tmp_path / "key.pem", tmp_path / "absent"
    there.touch()
    assert inherited((), {"RAY_TLS_SERVER_KEY": str(there)}) == {"RAY_TLS_SERVER_KEY": str(there)}
    assert inherited((), {"RAY_TLS_SERVER_KEY": str(absent)}) == {}


def test_planted_pattern_that_looks_at_no_name_lets_a_secret_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "is_secret_name", lambda name: False)
    assert inherited((), {"HF_TOKEN": "plain"}) == {"HF_TOKEN": "plain"}


@pytest.mark.parametrize("name", ["", "A B", "HF_*", "A-B", "1A", "A=b", "A\nB", "Ä"])
def test_what_is_no_name_is_refused(name: str) -> None:
    assert len(misnamed([name, "GOOD_ONE"])) == 1
    with pytest.raises(ConfigError, match="no name of a variable"):
        check_named([name])


def test_a_value_in_the_place_of_a_name_is_not_shown() -> None:
    with pytest.raises(ConfigError) as refused:
        check_named(["JUDGE_KEY=canary-value"])
    assert "JUDGE_KEY" in str(refused.value)
    assert "canary" not in str(refused.value)


def test_a_variable_that_is_not_set_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with pytest.raises(ConfigError, match="pass_env names JUDGE_KEY, which is not set"):
        check_named(["PATH", "JUDGE_KEY"])


def test_a_sink_has_its_own_key_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE", "HTTPS_PROXY", "HF_TOKEN"):
        monkeypatch.setenv(name, "canary-value")
    assert {"WANDB_API_KEY", "WANDB_MODE", "HTTPS_PROXY"} <= set(inherited(_needed("wandb")))
    assert "HF_TOKEN" not in inherited(_needed("wandb"))
    assert not {"WANDB_API_KEY", "HF_TOKEN"} & set(inherited(_needed("tensorboard")))
    assert os.environ["HF_TOKEN"] == "canary-value"

"""Silent failure 40: the saved model is not the trained one: initial weights, lost precision, a missing tensor."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from silent_kit import PROMPTS, make_learner, sampled, tiny_net
from transformers import AutoModelForCausalLM, AutoTokenizer

from surefoot.errors import StorageError
from surefoot.learner.checkpoint import save_training_checkpoint
from surefoot.learner.model import PEBBLE

PROBE = torch.tensor([[*PROMPTS["long"], 7, 8, 9]])


@pytest.fixture
def trained() -> tuple[Any, Any]:
    """(a net after one step, the same net before it)."""
    net = tiny_net()
    before = copy.deepcopy(net)
    make_learner(net).learn(sampled(net))
    return net, before


def check(saved: Any, live: Any, folder: Path) -> None:
    """Plain transformers, from the folder alone, computes what the live model computes."""
    save_training_checkpoint(make_learner(saved), AutoTokenizer.from_pretrained(PEBBLE), folder, step=1)
    again = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        assert torch.equal(again(PROBE).logits, live(PROBE).logits)


def test_a_reloaded_checkpoint_gives_the_same_logits_bit_for_bit(trained: tuple[Any, Any], tmp_path: Path) -> None:
    check(trained[0], trained[0], tmp_path / "step_1")
    assert AutoTokenizer.from_pretrained(tmp_path / "step_1").encode("47+85=") == AutoTokenizer.from_pretrained(
        PEBBLE
    ).encode("47+85=")


def test_training_moved_the_probe_so_that_an_old_model_would_show(trained: tuple[Any, Any]) -> None:
    with torch.no_grad():
        assert (trained[0](PROBE).logits - trained[1](PROBE).logits).abs().max() > 1e-3


def test_the_folder_is_complete_or_absent(
    trained: tuple[Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(PEBBLE)
    monkeypatch.setattr(tokenizer, "save_pretrained", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(StorageError, match="disk full"):
        save_training_checkpoint(make_learner(trained[0]), tokenizer, tmp_path / "step_1", step=1)
    assert not (tmp_path / "step_1").exists()


def test_planted_initial_weights_are_seen(trained: tuple[Any, Any], tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        check(trained[1], trained[0], tmp_path / "step_1")


def test_planted_lost_precision_is_seen(trained: tuple[Any, Any], tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        check(copy.deepcopy(trained[0]).to(torch.bfloat16), trained[0], tmp_path / "step_1")


def test_planted_other_rope_base_in_the_saved_config_is_seen(trained: tuple[Any, Any], tmp_path: Path) -> None:
    net = copy.deepcopy(trained[0])
    assert net.config.rope_parameters["rope_theta"] == 10000.0, json.dumps(net.config.rope_parameters)
    net.config.rope_parameters["rope_theta"] = 500.0
    with pytest.raises(AssertionError):
        check(net, trained[0], tmp_path / "step_1")

"""Two processes, one verdict: every rank stops at the same step, and nobody raises alone.

Stubs show every way to stop; one run with the installed TRL shows the real thing.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

STUB = '''
import json, os, sys
sys.modules["trl"] = None  # the trainer without its parent: no minute of imports
import datetime, warnings
from types import SimpleNamespace
import torch.distributed as dist
from surefoot.guards import HeldOutGuard
from surefoot.trl_bridge import guard
from surefoot.trl_bridge.trainer import GuardedGRPOTrainer
warnings.simplefilter("ignore")

cases, folder = json.loads(sys.argv[1]), sys.argv[2]
rank = int(os.environ["RANK"])
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=20))
GuardedGRPOTrainer.__bases__[0]._compute_loss = lambda self, model, inputs: 1.0


def plant():
    """The first rank decides and tells nobody."""
    import surefoot.trl_bridge.trainer as module
    from surefoot.trl_bridge.guard import FoldDecision, fold
    guard.from_first = lambda make: make()
    module.fold = lambda *given: fold(*given) if rank == 0 else FoldDecision(blind="never told")


def make_trainer(case, evaluate):
    trainer = GuardedGRPOTrainer.__new__(GuardedGRPOTrainer)
    patience = 3 if rank == 0 or case != "settings differ" else 100
    trainer.heldout_guard = HeldOutGuard(min_steps=3, decline_patience=patience, ema_alpha=0.5)
    trainer.heldout_eval_fn, trainer.strict_killswitch = evaluate, case != "soft"
    trainer.state = SimpleNamespace(global_step=0)
    trainer.args = SimpleNamespace(logging_steps=1, output_dir=os.path.join(folder, case))
    trainer.control, trainer.log = SimpleNamespace(should_training_stop=False), lambda logs: None
    trainer._metrics = {"train": {"reward": []}}
    return trainer


def play(case):
    evaluations = []

    def evaluate():
        evaluations.append(step)
        if case == "evaluation fails" and step == 2:
            raise OSError("the grader is gone")
        return float("nan") if case == "not a number" and step == 2 else 0.28 - 0.05 * step

    trainer, done, error = make_trainer(case, evaluate), 0, ""
    for step in range(8):
        trainer.state.global_step = step
        off = 0.1 if rank and case == "numbers differ" else 0.0  # the first rank's number counts
        trainer._metrics["train"]["reward"].append(0.30 + 0.03 * step + off)
        try:
            trainer._compute_loss(None, {})
            dist.barrier()  # the gradients' all-reduce: here a rank that was left alone would wait
        except Exception as problem:
            error = f"{type(problem).__name__}: {problem}".splitlines()[0]
            break
        if trainer.control.should_training_stop:
            break
        done += 1
    status = trainer.heldout_guard.last_status
    return {"steps": done, "error": error, "evaluations": len(evaluations), "reward": status and status.reward,
            "folds": status and status.folds}


if "planted" in cases:
    plant()
print("REPORT " + json.dumps({case: play(case) for case in cases}), flush=True)
os._exit(0)  # a planted bug may have left the other rank waiting
'''

REAL = """
import json, os, sys
import torch
torch.set_num_threads(1)
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig
from surefoot.errors import CollapseStopError
from surefoot.guards import HeldOutGuard
from surefoot.trl_bridge import GuardedGRPOTrainer

rank, calls = int(os.environ["RANK"]), []
words = {"<pad>": 0, "<eos>": 1} | {f"w{i}": i for i in range(2, 16)}
core = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
core.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>")
model = LlamaForCausalLM(LlamaConfig(
    vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
    max_position_embeddings=32, pad_token_id=0, eos_token_id=1, bos_token_id=1))
rewards = []

def rising(completions, **_):
    rewards.append(1)
    return [0.30 + 0.03 * len(rewards)] * len(completions)

def heldout():
    calls.append(1)
    return 0.28 - 0.05 * len(calls)

trainer = GuardedGRPOTrainer(
    model=model, reward_funcs=rising, processing_class=tokenizer,
    train_dataset=Dataset.from_list([{"prompt": f"w{2 + i}", "hint": "w9 w9"} for i in range(8)]),
    args=GRPOConfig(
        output_dir=sys.argv[2], per_device_train_batch_size=2, num_generations=2, gradient_accumulation_steps=2,
        max_completion_length=4, max_steps=8, logging_steps=1, report_to="none", use_cpu=True, bf16=False,
        gradient_checkpointing=False, save_strategy="no", disable_tqdm=True),
    heldout_guard=HeldOutGuard(min_steps=3, decline_patience=3, ema_alpha=0.5), heldout_eval_fn=heldout,
    alpha_sdpo=0.5, sdpo_hints="hint",
)
error = ""
try:
    trainer.train()
except CollapseStopError as problem:
    error = f"CollapseStopError: {problem}".splitlines()[0]
weights = float(sum(p.double().sum() for p in trainer.model.parameters()))
live = [r["sdpo/live_fraction"] for r in trainer.state.log_history if "sdpo/live_fraction" in r]
print("REPORT " + json.dumps({"rank": rank, "steps": trainer.state.global_step, "error": error,
      "evaluations": len(calls), "weights": weights, "live": live[-1]}), flush=True)
torch.distributed.destroy_process_group()
"""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def two_ranks(script: str, case: str, folder: Path, repo: Path, limit: float) -> list[dict[str, Any]]:
    """Run the script on two ranks; their reports, or an empty one for a rank that gave none within `limit` seconds."""
    file = folder / "worker.py"
    file.write_text(script, encoding="utf-8")
    shared = os.environ | {
        "PYTHONPATH": str(repo / "src"), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": "lo", "LOCAL_WORLD_SIZE": "2",
    }  # fmt: skip
    workers = []
    for rank in range(2):
        with (folder / f"rank{rank}.txt").open("w") as output:
            command = [sys.executable, str(file), case, str(folder / "out")]
            env = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            workers.append(subprocess.Popen(command, env=env, stdout=output, stderr=subprocess.STDOUT))
    for worker in workers:
        try:
            worker.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            worker.kill()
            worker.wait()
    return [report(folder / f"rank{rank}.txt") for rank in range(2)]


def report(file: Path) -> dict[str, Any]:
    lines = [line for line in file.read_text().splitlines() if line.startswith("REPORT ")]
    return json.loads(lines[-1].removeprefix("REPORT ")) if lines else {"error": file.read_text()[-2000:]}


def stopped_together(reports: list[dict[str, Any]], error: str, steps: int) -> None:
    assert [r.get("steps") for r in reports] == [steps, steps], reports
    assert reports[0]["error"] == reports[1]["error"]
    assert error in reports[0]["error"]
    assert reports[1]["evaluations"] == 0, "the evaluation runs on the first rank"


CASES = {
    "strict": ("CollapseStopError: step 3", 3),
    "soft": ("", 3),
    "numbers differ": ("CollapseStopError: step 3", 3),
    "settings differ": ("CollapseStopError: step 3", 3),
    "evaluation fails": ("HeldOutEvalError: step 2: the held-out evaluation raised OSError", 2),
    "not a number": ("HeldOutEvalError: step 2: heldout_eval_fn returned nan", 2),
}


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory, repo: Path) -> tuple[Path, list[dict[str, Any]]]:
    """All cases, one after the other, in one pair of processes."""
    folder = tmp_path_factory.mktemp("ranks")
    return folder / "out", two_ranks(STUB, json.dumps(list(CASES)), folder, repo, limit=120)


@pytest.mark.parametrize("case", CASES)
def test_all_ranks_stop_at_the_same_step(played: tuple[Path, list[dict[str, Any]]], case: str) -> None:
    folder, reports = played
    first, second = (report[case] for report in reports)
    stopped_together([first, second], *CASES[case])
    assert first["reward"] == second["reward"], "all ranks folded the same numbers"
    assert first["folds"] == second["folds"]
    verdict_wanted = "Collapse" in CASES[case][0] or case == "soft"
    assert (folder / case / "verdict.json").exists() == verdict_wanted


def test_planted_raise_on_one_rank_only_leaves_the_other_waiting(tmp_path: Path, repo: Path) -> None:
    reports = [r["planted"] for r in two_ranks(STUB, '["planted"]', tmp_path, repo, limit=60)]
    with pytest.raises(AssertionError):
        stopped_together(reports, *CASES["strict"])
    assert "CollapseStopError" in reports[0]["error"]
    assert "CollapseStopError" not in reports[1]["error"], "it found out by its collective breaking down"


@pytest.mark.nightly  # TRL's imports, twice; every day tests/parity/test_trl_guard.py has the real one, and stubs the ranks
def test_the_installed_trl_stops_on_both_ranks_with_equal_weights(tmp_path: Path, repo: Path) -> None:
    pytest.importorskip("trl", reason="needs the trl extra")
    reports = two_ranks(REAL, "real", tmp_path, repo, limit=300)
    stopped_together(reports, "CollapseStopError: step 3", 3)
    assert reports[0]["weights"] == reports[1]["weights"]
    assert reports[0]["live"] == reports[1]["live"] == 1.0
    assert (tmp_path / "out" / "checkpoint-3" / "model.safetensors").exists()
    assert json.loads((tmp_path / "out" / "verdict.json").read_text())["checkpoint"] == "checkpoint-3"

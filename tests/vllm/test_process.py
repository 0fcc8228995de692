"""One process with vLLM in it: a second one is refused, death is told, and nothing is left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import json, sys, tempfile, threading
from pathlib import Path
import torch
from surefoot.engines.vllm_engine import VllmEngine
from surefoot.errors import EngineError
from surefoot.learner.model import load_policy
from surefoot.protocols import Request

torch.set_num_threads(1)
torch.use_deterministic_algorithms(True)  # as a run does
policy = load_policy("pebble", base=Path("."), device="cpu", dtype="float32")
config = json.loads(policy.model.config.to_json_string(use_diff=False))
hostile = config | {"temperature": 0.1, "top_k": 1, "repetition_penalty": 2.0, "eos_token_id": 5}
torch.manual_seed(11)
dice = torch.get_rng_state()
engine = VllmEngine(hostile, max_width=64, rows=4, threads=1)
told = {"setter": torch.set_num_threads is torch._C.set_num_threads, "threads": torch.get_num_threads()}
try:
    VllmEngine(config, max_width=64, rows=4)
except EngineError as error:
    told["second"] = error.what
request = Request("a", (5, 6, 7), 8, 1.0, frozenset(), 3)
try:
    engine.generate([request])
except EngineError as error:
    told["early"] = error.what
engine.load_weights(dict(policy.model.named_parameters()), 1)
told["answers"] = [list(engine.generate([request])[0].token_ids) for _ in range(2)]
told["dice"] = bool(torch.equal(dice, torch.get_rng_state()))

def broken():
    raise RuntimeError("the core is gone")

engine._inner.core._engine.step = broken
folder = engine._inner.core._folder
for attempt in ("death", "after"):
    try:
        engine.generate([request])
    except EngineError as error:
        told[attempt] = str(error)
engine.close()
told["threads_left"] = [t.name for t in threading.enumerate() if t.name.startswith("surefoot")]
told["folder_left"] = folder.exists()
again = VllmEngine(config, max_width=64, rows=4, threads=1)
again.load_weights(dict(policy.model.named_parameters()), 1)
told["again"] = list(again.generate([request])[0].token_ids)
again.close()
print("TOLD" + json.dumps(told))
"""


def test_a_process_with_vllm_in_it(repo: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT], cwd=tmp_path, capture_output=True, text=True, timeout=600,
        env=os.environ | {"PYTHONPATH": str(repo / "src"), "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    import json

    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.split("TOLD")[1])
    assert told["setter"], "torch.set_num_threads is torch's again"
    assert told["threads"] == 1
    assert "already" in told["second"]
    assert "no weights yet" in told["early"]
    assert told["answers"][0] == told["answers"][1]
    assert told["dice"], "torch's own dice are where they were"
    assert "vLLM died: RuntimeError: the core is gone" in told["death"]
    assert "vllm." in told["death"], "with the last lines of its log"
    assert "vLLM died" in told["after"], "a dead engine stays dead"
    assert (told["threads_left"], told["folder_left"]) == ([], False)
    assert told["again"] == told["answers"][0], "hostile sampling hints in a config changed nothing"

"""Memory by sequence length, batch and accumulation: predicted for every row, measured where that can be done here.

Owns       `surefoot memory`: its rows, its recommendation, its table.
Promises   each measured row had a process of its own, so that no row inherits the peak of another; a row that was only
           predicted says so; when rows were to be measured and none succeeded, the exit code is 1.
Never      loads a model: weights are made up, sizes are real.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from typing import Any

from surefoot.learner.footprint import ModelShape, Work
from surefoot.system.process import Child


def count_parameters(shape: ModelShape) -> int:
    """Of a decoder of this shape, without biases."""
    h, d = shape.hidden, shape.head_dim
    layer = 2 * h * d * (shape.heads + shape.kv_heads) + 3 * h * shape.intermediate + 2 * h
    layer += 2 * d if shape.qk_norm else 0
    return shape.vocab * h * (1 if shape.tied else 2) + shape.layers * layer + h


def count_adapter(shape: ModelShape, rank: int) -> dict[str, int]:
    """Entries of an adapter on every linear layer, and of what it is merged into; as `Work` calls them."""
    h, i, q, kv = shape.hidden, shape.intermediate, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    layers = [(h, q), (h, kv), (h, kv), (q, h), (h, i), (h, i), (i, h)]
    return {
        "adapter": shape.layers * rank * sum(a + b for a, b in layers),
        "merged": shape.layers * sum(a * b for a, b in layers),
    }


def run_cell(shape: ModelShape, work: Work, rank: int | None, *, timeout_s: float) -> dict[str, Any]:
    """What `memory_child` found in a process of its own, or `{"error": why}`."""
    asked = json.dumps({"shape": asdict(shape), "work": asdict(work), "rank": rank})
    argv = [sys.executable, "-m", "surefoot.run.memory_child"]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(each for each in sys.path if each)}  # what we import, it does
    with Child.start(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, keep_stderr=4000, env=env) as child:
        child.stdin.write(asked.encode())
        child.stdin.close()
        code = child.wait(timeout_s)
        said = child.printed().decode(errors="replace").strip()
        if code is None:
            return {"error": f"not done after {timeout_s:.0f} s"}
        if code:
            return {"error": f"exit {code}: {said}"}
        found: dict[str, Any] = json.loads(child.stdout.read().decode().splitlines()[-1])
    return found

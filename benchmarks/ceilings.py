"""What this machine can do at best, measured in the same run as the results: memory reading and matrix products.

A limit is arithmetic on these two: a decode step cannot take less than reading every weight once, nor less than its
floating-point operations; training costs three times the forward operations, and the optimiser moves seven arrays.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from load import Load, LoadProbe

READ_BYTES = 512 * 2**20
GEMM_SIZE = 2048


@dataclass(frozen=True)
class Ceilings:
    """Best of several tries on this machine, now."""

    read_bytes_s: float
    flops_s: float
    load: Load

    def __str__(self) -> str:
        busy = f", others used {self.load.share:.0%}: too low" if self.load.dirty else ""
        return f"memory read {self.read_bytes_s / 1e9:.1f} GB/s, fp32 GEMM {self.flops_s / 1e9:.0f} GFLOP/s{busy}"

    def decode_step(self, parameters: int, rows: int) -> float:
        """Seconds one token for each of `rows` must take in float32."""
        return max(4 * parameters / self.read_bytes_s, 2 * parameters * rows / self.flops_s)

    def forward(self, parameters: int, tokens: int) -> float:
        """Seconds of a forward pass over many tokens."""
        return 2 * parameters * tokens / self.flops_s

    def train_step(self, parameters: int, tokens: int) -> float:
        """Seconds of forward, backward and AdamW: it reads p, g, m, v and writes p, m, v."""
        return 3 * self.forward(parameters, tokens) + 7 * 4 * parameters / self.read_bytes_s


def measure_ceilings(threads: int) -> Ceilings:
    """Read 512 MiB and multiply 2048 x 2048 matrices, each the best of eight."""
    import torch

    torch.set_num_threads(threads)
    data = torch.ones(READ_BYTES // 4)
    a, b = torch.randn(GEMM_SIZE, GEMM_SIZE), torch.randn(GEMM_SIZE, GEMM_SIZE)
    probe = LoadProbe()
    mark = probe.mark()
    read, gemm = _best(data.sum), _best(lambda: a @ b)
    return Ceilings(READ_BYTES / read, 2 * GEMM_SIZE**3 / gemm, probe.since(mark))


def _best(function: Callable[[], object], tries: int = 8) -> float:
    seconds = []
    for _ in range(tries):
        started = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - started)
    return min(seconds)

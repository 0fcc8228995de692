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
    weight_bytes: int = 4
    """Of one number, where the model computes."""

    def __str__(self) -> str:
        busy = f", others used {self.load.share:.0%}: too low" if self.load.dirty else ""
        kind = {4: "fp32", 2: "bf16"}[self.weight_bytes]
        return f"memory {self.read_bytes_s / 1e9:.1f} GB/s, {kind} GEMM {self.flops_s / 1e9:.0f} GFLOP/s{busy}"

    def decode_step(self, parameters: int, rows: int) -> float:
        """Seconds one token for each of `rows` must take; keys and values are not counted."""
        return max(self.weight_bytes * parameters / self.read_bytes_s, 2 * parameters * rows / self.flops_s)

    def forward(self, parameters: int, tokens: int) -> float:
        """Seconds of a forward pass over many tokens."""
        return 2 * parameters * tokens / self.flops_s

    def train_step(self, parameters: int, tokens: int) -> float:
        """Seconds of forward, backward and AdamW in float32: it reads p, g, m, v and writes p, m, v."""
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


def measure_gpu_ceilings() -> Ceilings:
    """Copy 4 GiB (bytes read and written) and multiply 8192 x 8192 bf16 matrices of random numbers."""
    import torch

    data, a = torch.empty(2 << 30, dtype=torch.uint8, device="cuda"), torch.randn(8192, 8192, device="cuda").bfloat16()
    target, b = torch.empty_like(data), torch.randn(8192, 8192, device="cuda").bfloat16()
    probe = LoadProbe()
    mark = probe.mark()

    def finished(work: Callable[[], object]) -> Callable[[], object]:
        return lambda: (work(), torch.cuda.synchronize())

    copied, gemm = _best(finished(lambda: target.copy_(data))), _best(finished(lambda: a @ b))
    return Ceilings(2 * data.numel() / copied, 2 * 8192**3 / gemm, probe.since(mark), weight_bytes=2)


def _best(function: Callable[[], object], tries: int = 8) -> float:
    seconds = []
    for _ in range(tries):
        started = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - started)
    return min(seconds)

"""Matrix products with a fixed number of rows, laid out for decoding.

A decode step multiplies a few rows with every weight of the model. The library's general
path is two to three times slower than memory bandwidth allows at such shapes, so on the CPU
the weights are packed once per weight version and reused for every token.

Packing is an internal layout: the numbers are those of `x @ weight.T + bias`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this build packs weights for a fixed row count."""
    packs = torch.backends.mkl.is_available() and hasattr(torch.ops.mkl, "_mkl_linear")
    return device.type == "cpu" and dtype == torch.float32 and packs


def row_step(device: torch.device, dtype: torch.dtype) -> int:
    """Row counts must be multiples of this for a row's result not to depend on the other rows, bit for bit."""
    return 8 if can_pack(device, dtype) else 16


class FixedRowsLinear:
    """`x @ weight.T + bias` for inputs of exactly (rows, K).

    Args:
        weight: (N, K). Read at construction; later in-place changes are not seen.
        bias: (N,) or None.
        rows: the row count of every input.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, rows: int) -> None:
        self.weight, self.bias, self.rows = weight, bias, rows
        self.packed = self.transposed = None
        if can_pack(weight.device, weight.dtype):
            self.packed = torch.ops.mkl._mkl_reorder_linear_weight(weight, rows)
        elif weight.device.type == "cpu":
            self.transposed = weight.t().contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        """(rows, K) -> (rows, N)."""
        if self.packed is not None:
            return torch.ops.mkl._mkl_linear(x, self.packed, self.weight, self.bias, self.rows)  # type: ignore[no-any-return]
        if self.transposed is not None:
            out = x @ self.transposed
            return out if self.bias is None else out + self.bias
        return torch.nn.functional.linear(x, self.weight, self.bias)


class StackedLinear:
    """One product for several weights that read the same input, laid out when somebody first needs it.

    Taking new weights is then a change of pointers, and whoever is replaced before it speaks never pays for packing.

    Args:
        weights: (N_i, K) each; the outputs stand side by side in this order.
        biases: (N_i,) each, or None.
        rows: the row count of every input.
    """

    def __init__(self, weights: Sequence[Tensor], biases: Sequence[Tensor] | None, rows: int) -> None:
        self.weights, self.biases, self.rows = weights, biases, rows
        self.packed: FixedRowsLinear | None = None

    def pack(self) -> None:
        """Read the weights as they are now; later in-place changes are not seen."""
        bias = None if self.biases is None else torch.cat(list(self.biases))
        weight = self.weights[0] if len(self.weights) == 1 else torch.cat(list(self.weights))
        self.packed = FixedRowsLinear(weight, bias, self.rows)

    def __call__(self, x: Tensor) -> Tensor:
        """(rows, K) -> (rows, N_1 + N_2 + ...)."""
        if self.packed is None:
            self.pack()
        assert self.packed is not None, "pack has just made it"
        return self.packed(x)

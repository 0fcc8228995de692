"""Whether weights are still what they were when they were handed over.

A change in place after the hand-over makes one version two models. Torch's own counter does not see fused optimisers,
so the first entries of every tensor are remembered and compared.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Handed:
    """Tensors, by name, and the first entries of each as they were when `remember` was last called."""

    def __init__(self, names: list[str], tensors: list[Tensor]) -> None:
        self.names, self.tensors = names, tensors
        self.views = [_first_entries(tensor.detach()) for tensor in tensors]
        self.places = [tensor.data_ptr() for tensor in tensors]
        self.remember()

    def are(self, tensors: list[Tensor]) -> bool:
        """Whether these are the same tensors, in the same memory."""
        same = all(one is two for one, two in zip(tensors, self.tensors, strict=True))
        return same and [tensor.data_ptr() for tensor in tensors] == self.places

    def remember(self) -> None:
        """From now on they have to stay as they are."""
        self.before = self._bits()

    def changed(self) -> str | None:
        """Name of a tensor that is not what it was."""
        now = self._bits()
        if torch.equal(now, self.before):
            return None
        lengths = [len(view) for view in self.views]
        pairs = zip(self.names, now.split(lengths), self.before.split(lengths), strict=True)
        return next(name for name, one, two in pairs if not torch.equal(one, two))

    def _bits(self) -> Tensor:
        values = torch.cat(self.views)  # as bits, so that NaN equals NaN
        return values.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[values.element_size()])


def _first_entries(tensor: Tensor) -> Tensor:
    """(up to 4,) a view, whatever the tensor's strides are."""
    for _ in range(tensor.dim() - 1):
        tensor = tensor[0]
    return tensor[:4]

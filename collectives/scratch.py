"""Memory that operations borrow: taken when one is made, given back when its result is there."""

from __future__ import annotations

import torch
from torch import Tensor


class ScratchPool:
    """Byte buffers by size, rounded up to powers of two so that nearby sizes share them.

    Fresh memory costs a page fault for every 4 KiB at its first touch: more than the copy that goes into it.
    """

    def __init__(self) -> None:
        self._free: dict[tuple[int, torch.device], list[Tensor]] = {}

    def take(self, numel: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """(flat tensor of `numel` elements, the buffer behind it, for `give_back`)."""
        size = max(64, 1 << (numel * dtype.itemsize - 1).bit_length()) if numel else 64
        free = self._free.get((size, device))
        buffer = free.pop() if free else torch.empty(size, dtype=torch.uint8, device=device)
        return buffer[: numel * dtype.itemsize].view(dtype), buffer

    def give_back(self, buffer: Tensor) -> None:
        """The buffer may be taken again."""
        self._free.setdefault((buffer.numel(), buffer.device), []).append(buffer)

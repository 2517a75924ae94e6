"""The control plane: a few numbers from every rank to every rank, once a step, one step late.

The exchange of step k is started at its end and read at the end of step k+1, so that it costs no
waiting. All ranks read the same numbers at the same place in the loop: whatever they decide from
them (to stop, above all) they decide alike.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from collectives.direct import DirectAllGather
from collectives.group import World

FIELDS = (
    "step_time_s",
    "loss_share",
    "gradient_norm",
    "is_bad",
    "stop_signal",
    "bytes_sent",
    "bytes_between",  # sent to other nodes; NaN is not known
    "bytes_least",
    "bytes_control",
    "peak_memory_bytes",
)
FLOAT64_BYTES = 8


class Gathered:
    """One step's numbers of all ranks: `gathered["bytes_sent"]` lists them by rank."""

    def __init__(self, step: int, values: np.ndarray) -> None:
        self.step = step
        self._columns: dict[str, list[float]] = dict(zip(FIELDS, values.T.tolist(), strict=True))

    def __getitem__(self, field: str) -> list[float]:
        return self._columns[field]


def as_count(value: float) -> int | None:
    """Bytes from a float64 that carried them; None for NaN."""
    return None if math.isnan(value) else int(value)


class Control:
    """Exchange of `FIELDS` over the control group, float64, alternating between two buffers."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.sent_bytes = (world.size - 1) * len(FIELDS) * FLOAT64_BYTES
        self._buffers = [torch.zeros(world.size, len(FIELDS), dtype=torch.float64) for _ in range(2)]
        self._transfers = [DirectAllGather(world.control, list(buffer)) for buffer in self._buffers]
        self._own = [buffer[world.rank].numpy() for buffer in self._buffers]
        self._arrays = [buffer.numpy() for buffer in self._buffers]
        self._in_flight: int | None = None  # the step whose exchange is under way

    def exchange(self, step: int, values: Sequence[float]) -> Gathered | None:
        """Start this step's exchange and complete the one before; None on the first step."""
        slot = step % 2
        before = self.complete()
        self._own[slot][:] = values
        self._transfers[slot].start()
        self._in_flight = step
        return before

    def land(self) -> None:
        """Wait for the exchange under way, and keep its numbers for `complete`."""
        if self._in_flight is not None:
            self._transfers[self._in_flight % 2].wait()  # a second wait finds nothing to wait for

    def complete(self) -> Gathered | None:
        """Complete the exchange under way, if there is one."""
        if self._in_flight is None:
            return None
        self.land()
        step, self._in_flight = self._in_flight, None
        return Gathered(step, self._arrays[step % 2])


def sum_over_ranks(world: World, values: Sequence[float]) -> list[float]:
    """Each value summed over all ranks; every rank gets the sums."""
    total = torch.tensor(values, dtype=torch.float64)
    world.sum_on_control(total)
    sums: list[float] = total.tolist()
    return sums


def gather_json(world: World, value: Any) -> list[Any]:
    """A JSON-able value of every rank, on every rank. For the end of a run, not for its steps."""
    if world.size == 1:
        return [value]
    text = torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8)
    lengths = _gather(world, torch.tensor([text.numel()], dtype=torch.int64))
    longest = max(int(length) for length in lengths)
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: text.numel()] = text
    texts = _gather(world, padded)
    return [json.loads(bytes(t[: int(n)].tolist())) for t, n in zip(texts, lengths, strict=True)]


def gather_numbers(world: World, value: int) -> list[int]:
    """One integer of every rank, on every rank."""
    if world.size == 1:
        return [value]
    return [int(t) for t in _gather(world, torch.tensor([value], dtype=torch.int64))]


def _gather(world: World, tensor: Tensor) -> list[Tensor]:
    parts = [torch.empty_like(tensor) for _ in range(world.size)]
    dist.all_gather(parts, tensor, group=world.control.process_group)
    return parts

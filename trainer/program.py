"""What one rank runs for one batch size: ready calls, and the buffers that a batch goes to."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from collectives.transfer import Transfer
from models.block import Context
from strategies.schedule import Schedule

Call = Callable[[], object]

ROWS_AT_ONCE = 8


@dataclass(frozen=True)
class Filled:
    """A buffer that `rows` of the rank's slice go to; `transposed` stores [outputs, rows]."""

    rows: slice
    buffer: Tensor
    transposed: bool = False

    def fill(self, source: Tensor) -> None:
        """Copy from [rows, ...]."""
        rows = source[self.rows]
        if not self.transposed:
            self.buffer.copy_(rows.reshape(self.buffer.shape))
            return
        # A few rows at a time: a whole transpose reads against the cache, or makes torch allocate a block.
        for piece, columns in zip(rows.split(ROWS_AT_ONCE), self.buffer.split(ROWS_AT_ONCE, 1), strict=True):
            columns.copy_(piece.t())


@dataclass
class Program:
    """What one rank runs for one batch size.

    `marks` are the clock's readings of the last run: before every call, and after the last. `transfers` are
    in the order in which they start; `framing_bytes` is what gloo sends beside their payload.
    """

    schedule: Schedule
    calls: list[Call] = field(default_factory=list)
    inputs: list[Filled] = field(default_factory=list)
    targets: list[Filled] = field(default_factory=list)
    contexts: list[Context] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)
    bytes_least: int = 0
    framing_bytes: int = 0
    clock: Callable[[], Any] = time.perf_counter
    marks: list[Any] = field(default_factory=list)

    def load(self, inputs: Tensor | None, targets: Tensor | None) -> None:
        """Copy this rank's rows, [rows, ...], into the buffers that the operations read."""
        for source, places in ((inputs, self.inputs), (targets, self.targets)):
            if source is not None:
                for place in places:
                    place.fill(source)

    def run(self, step: int) -> None:
        """One step, or one evaluation batch."""
        for context in self.contexts:
            context.step = step
        clock, marks = self.clock, self.marks
        marks.clear()
        mark = marks.append
        for call in self.calls:
            mark(clock())
            call()
        mark(clock())

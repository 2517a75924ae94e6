"""The stamps of every step, from all ranks to rank 0, a batch of steps at a time.

When a batch goes follows from numbers that all ranks have from the control exchange: after `MOST_STEPS` steps
or `BATCH_S` seconds of the slowest rank. Nobody waits for it: rank 0 reads it when the next one goes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from collectives.direct import Recv, Send
from collectives.group import World
from collectives.transfer import Transfer
from trainer.clocks import AGAIN_S, Clocks
from trainer.control import as_count
from trainer.executor import Rank
from trainer.program import Program
from trainer.timeline import Timeline

MOST_STEPS = 32
BATCH_S = 0.25
FLOAT64_BYTES = 8
WIRE = 2  # what an observed step's record ends with: `Wire` since the last reading

Wire = tuple[float, float]  # bytes that left, and those of them to other nodes; NaN is not known


@dataclass(frozen=True)
class Recorded:
    """One step: the record of every rank (`trainer.timeline`), and its kernel's count since the last reading.

    `wire_bytes`, and the part of them that went to other nodes, are None in a step without a reading, and for
    a rank whose kernel does not say.
    """

    rows: int
    observed: bool
    records: list[np.ndarray]
    wire_bytes: list[int | None]
    wire_between: list[int | None] = field(default_factory=list)


class Recorder:
    """One rank's side of it; `timeline_of(rows)` is asked for on rank 0 only."""

    def __init__(
        self,
        world: World,
        rank: Rank,
        observe_every: int,
        last_step: int,
        timeline_of: Callable[[int], Timeline],
    ) -> None:
        self.world, self.rank = world, rank
        self.observe_every, self.last_step = observe_every, last_step
        self.timeline_of = timeline_of
        self.clocks = Clocks(world)
        self.sent_bytes = 0
        self._steps: list[tuple[int, bool]] = []  # (rows, observed) since the last batch
        self._own: list[float] = []  # their records
        self._since_s = self._aligned_s = 0.0
        self._under_way: list[tuple[int, bool]] = []
        self._transfers: list[tuple[Transfer, Tensor]] = []
        self._wire = self.wire()
        self._framing_bytes = self._count = 0
        self.totals: dict[str, int | None] = {  # at the last reading
            "steps": 0,
            "bytes_sent": 0,
            "bytes_sent_between_nodes": 0,
            "bytes_framing": 0,
            "bytes_wire": 0,
            "bytes_wire_between_nodes": 0,
        }

    def observes(self, step: int) -> bool:
        """Whether completions are stamped, and the kernel asked, in this step."""
        if self.observe_every == 0:
            return False
        return (step + 1) % self.observe_every == 0 or step == self.last_step

    def begin(self, step: int) -> None:
        # nccl's work is complete for the host once it is queued.
        self.rank.observer.active = self.observes(step) and self.world.backend == "gloo"

    def record(
        self, step: int, rows: int, head: tuple[float, float, float], program: Program, end_s: float
    ) -> None:
        """A step is over; `head` is its begin, and the moments before and after its batch was taken."""
        observed = self.observes(step)
        self._framing_bytes += program.framing_bytes
        self._count += 1
        marks = self.rank.stopwatch.seconds(program.marks)
        own = self._own
        own += head
        own += marks
        own.append(end_s)
        if observed:
            own += [transfer.completed_s for transfer in program.transfers]
            own += self._read_totals()
        self._steps.append((rows, observed))

    def _read_totals(self) -> tuple[float, float]:
        """Bytes on the wire since the last reading, and those to other nodes; NaN where that is not known."""
        before, self._wire = self._wire, self.wire()
        total, between = (now - then for now, then in zip(self._wire, before, strict=True))
        if math.isnan(total):
            return total, between
        ledger, old = self.rank.ledger, self.totals
        self.totals = {
            "steps": self._count,
            "bytes_sent": ledger.total_bytes,
            "bytes_sent_between_nodes": as_count(ledger.between_bytes),
            "bytes_framing": self._framing_bytes,
            "bytes_wire": _sum(old["bytes_wire"], total),
            "bytes_wire_between_nodes": _sum(old["bytes_wire_between_nodes"], between),
        }
        return total, between

    def skip_wire(self, before: Wire) -> None:
        """Leave out of the next reading what was sent since `before`, a reading of `wire`."""
        own = zip(self._wire, self.wire(), before, strict=True)
        total, between = (mark + now - then for mark, now, then in own)
        self._wire = total, between

    def wire(self) -> Wire:
        """The kernel's count of this rank so far."""
        world = self.world
        total, between = (
            math.nan if count is None else count
            for count in (world.wire_bytes(), world.wire_bytes_between_nodes())
        )
        return total, between

    def take_sent_bytes(self) -> int:
        """What the batches since the last call sent on the control group."""
        sent, self.sent_bytes = self.sent_bytes, 0
        return sent

    def is_due(self, step_time_s: float) -> bool:
        """Whether a batch is to go, given the slowest rank's time of one more step; the same on all ranks."""
        self._since_s += step_time_s
        self._aligned_s += step_time_s
        return len(self._steps) >= MOST_STEPS or self._since_s >= BATCH_S

    def send(self) -> None:
        """Start the batch. Every rank must call it at the same step; `receive` comes before the next."""
        self._land()
        own = torch.from_numpy(np.array(self._own, dtype=np.float64))
        if self.world.size > 1 and self._steps:
            control = self.world.control
            if self.world.rank == 0:
                for peer in range(1, self.world.size):
                    size = sum(self._length(peer, rows, seen) for rows, seen in self._steps)
                    buffer = torch.empty(size, dtype=torch.float64)
                    self._transfers.append((Recv(control, buffer, peer), buffer))
            else:
                self._transfers.append((Send(control, own, 0), own))
                self.sent_bytes += own.numel() * FLOAT64_BYTES
            for transfer, _ in self._transfers:
                transfer.operation, transfer.where = "stamps", control.where
                transfer.start()
        self._under_way, self._steps = self._steps, []
        self._batch, self._own = own, []
        self._since_s = 0.0
        if self._aligned_s >= AGAIN_S:
            self._aligned_s = 0.0
            self.clocks.align()

    def receive(self) -> list[Recorded]:
        """On rank 0 the steps of the batch under way, in order; nothing elsewhere, or where there is none."""
        if not self._under_way:
            return []
        steps, self._under_way = self._under_way, []
        if self.world.rank != 0:
            return []
        self.land()
        parts = [self._batch, *(buffer for _, buffer in self._transfers)]
        self._transfers = []
        cut = [self._cut(rank, part.numpy(), steps) for rank, part in enumerate(parts)]
        return [
            Recorded(
                rows,
                seen,
                [own[k][0] for own in cut],
                [own[k][1] for own in cut],
                [own[k][2] for own in cut],
            )
            for k, (rows, seen) in enumerate(steps)
        ]

    def _cut(
        self, rank: int, part: np.ndarray, steps: Sequence[tuple[int, bool]]
    ) -> list[tuple[np.ndarray, int | None, int | None]]:
        records, start = [], 0
        for rows, seen in steps:
            length = self._length(rank, rows, seen)
            record = part[start : start + length]
            total, between = record[-WIRE:] if seen else (math.nan, math.nan)
            times = (record[:-WIRE] if seen else record) + self.clocks.offset_s[rank]
            records.append((times, as_count(total), as_count(between)))
            start += length
        return records

    def _length(self, rank: int, rows: int, observed: bool) -> int:
        return self.timeline_of(rows).length(rank, observed) + (WIRE if observed else 0)

    def _land(self) -> None:
        """Before the next batch goes: a sender waits for its last one."""
        if self.world.rank != 0:
            self.land()
            self._transfers = []

    def land(self) -> None:
        """Wait for the batch under way, and keep it for `receive`."""
        for transfer, _ in self._transfers:
            transfer.wait()


def _sum(so_far: int | None, more: float) -> int | None:
    """None once a part of it is not known."""
    return None if so_far is None else as_count(so_far + more)

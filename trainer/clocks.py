"""How far the clocks of the ranks are apart, so that stamps of one can be put beside those of another.

Ranks on one machine read one clock (CLOCK_MONOTONIC), and the difference is exactly 0. Between machines it is
found as NTP does (RFC 5905, section 8): rank 0 asks, the other answers with its time, and of several rounds
the shortest counts, wrong by at most half its time. Clocks drift (some 10 us in a second), so it is found
again every `AGAIN_S`.
"""

from __future__ import annotations

import time
import zlib
from pathlib import Path

import torch
import torch.distributed as dist

from collectives.group import World

ROUNDS = 16
AGAIN_S = 20.0
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Clocks:
    """`offset_s[r]` added to a stamp of rank r gives rank 0's time; found on rank 0, zeros elsewhere."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.offset_s = [0.0] * world.size
        self.error_s = 0.0  # half the shortest round trip, of the worst rank
        self.is_one = world.size == 1 or len(set(_gathered(world, _machine()))) == 1
        self.align()

    def align(self) -> None:
        """Find the differences (again). Every rank must call it."""
        if self.is_one:
            return
        group, worst = self._world.control.process_group, 0.0
        answer = torch.zeros(1, dtype=torch.float64)
        for rank in range(1, self._world.size):
            if self._world.rank == 0:
                best = float("inf")
                for _ in range(ROUNDS):
                    asked = time.perf_counter()
                    dist.send(answer, rank, group)
                    dist.recv(answer, rank, group)
                    took = time.perf_counter() - asked
                    if took < best:
                        best = took
                        self.offset_s[rank] = asked + took / 2 - float(answer)
                worst = max(worst, best / 2)
            elif self._world.rank == rank:
                for _ in range(ROUNDS):
                    dist.recv(answer, 0, group)
                    answer.fill_(time.perf_counter())
                    dist.send(answer, 0, group)
        self.error_s = worst


def _machine() -> int:
    """A number that processes under one kernel share; of this process alone where the system does not say."""
    try:
        return zlib.crc32(BOOT_ID.read_bytes())
    except OSError:
        return time.perf_counter_ns()


def _gathered(world: World, value: int) -> list[int]:
    parts = [torch.zeros(1, dtype=torch.int64) for _ in range(world.size)]
    dist.all_gather(parts, torch.tensor([value]), group=world.control.process_group)
    return [int(part) for part in parts]

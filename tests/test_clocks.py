"""Clocks of ranks on several machines: found apart from each other, and laid on one."""

from __future__ import annotations

import time

import pytest

from collectives.group import World
from tests.ranks import RankPools
from trainer import clocks
from trainer.clocks import Clocks

AHEAD_S = (0.0, 5.0, -2.5)


class AnotherClock:
    """`time` of a machine whose clock is ahead."""

    def __init__(self, ahead_s: float) -> None:
        self.ahead_s = ahead_s

    def perf_counter(self) -> float:
        return time.perf_counter() + self.ahead_s


def aligned(world: World, one_machine: bool) -> tuple[list[float], float, bool]:
    """Job: offsets, error and whether the ranks share a clock."""
    saved = clocks.time, clocks._machine
    if not one_machine:
        clocks.time = AnotherClock(AHEAD_S[world.rank])  # type: ignore[assignment]
        clocks._machine = lambda: world.rank
    try:
        found = Clocks(world)
        return found.offset_s, found.error_s, found.is_one
    finally:
        clocks.time, clocks._machine = saved


def test_ranks_of_one_machine_share_a_clock(ranks: RankPools) -> None:
    assert ranks[3].run(aligned, True) == [([0.0, 0.0, 0.0], 0.0, True)] * 3
    assert ranks[1].run(aligned, True) == [([0.0], 0.0, True)]


def test_clocks_of_machines_are_found_to_within_half_a_round_trip(ranks: RankPools) -> None:
    """Rank 1 is 5 s ahead, so that its stamps need 5 s less; rank 2 is 2.5 s behind."""
    results = ranks[3].run(aligned, False)
    offsets, error_s, is_one = results[0]
    assert not is_one and 0 < error_s < 0.1
    for offset, ahead in zip(offsets, AHEAD_S, strict=True):
        assert offset == pytest.approx(-ahead, abs=error_s + 1e-4)
    assert results[1][0] == [0.0] * 3

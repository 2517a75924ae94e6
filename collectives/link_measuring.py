"""The link curve of this group of ranks, measured on all of them at once."""

from __future__ import annotations

import math
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

import torch

from collectives import operations as wire
from collectives.bench import SAMPLE_S, gather, percentile, synchronize
from collectives.group import Group, World
from collectives.link import Curve, LinkCurve, Point
from collectives.subject import OUT_OF_PLACE, Case, Subject

LONGEST_S = 2.0
MOST_ROUNDS = 15
WARM_UPS = 3
FEWEST_ROUNDS = 3  # fewer say nothing about the spread
SMALLEST_BYTES = 1024
LARGEST_BYTES = 64 * 2**20  # bandwidth hardly changes above, and every size needs memory of its own
STEP = 4  # from one size to the next
MOST_CALLS = 10  # of one sample, where a call is short
LONGEST_CALL = 0.03  # of the time allowed: sizes stop growing where the next would probably take more


def curve_sizes(largest_bytes: int) -> list[int]:
    """Sizes to measure, so that `largest_bytes` lies within, if it is not above `LARGEST_BYTES`."""
    sizes = [SMALLEST_BYTES]
    while sizes[-1] < min(largest_bytes, LARGEST_BYTES):
        sizes.append(sizes[-1] * STEP)
    return sizes


def measure_link(
    world: World,
    operations: Sequence[str],
    sizes: Sequence[int],
    algorithms: dict[str, str] | None = None,
    longest_s: float = LONGEST_S,
    most_rounds: int = MOST_ROUNDS,
) -> LinkCurve:
    """Measure, within about `longest_s` seconds, on all ranks at once; every rank gets the same curve.

    Sizes of an operation stop growing where the next would take too much of the time allowed. All operations
    and sizes take their turn in every round, so that what disturbs for a moment disturbs all alike.

    Args:
        operations: of `bench.Case`, and `send`.
        algorithms: of each operation; `auto` where it is not named.
    """
    if world.size == 1:
        return LinkCurve([], _where(world, []))
    group = world.group("world", range(world.size))
    started = time.perf_counter()
    turns: list[_Turn] = []
    for operation in operations:
        for size, following in zip(sizes, (*sizes[1:], sizes[-1]), strict=True):
            turn = _Turn(world, group, operation, size, (algorithms or {}).get(operation, "auto"))
            turns.append(turn)
            if turn.warm() * following / size > LONGEST_CALL * longest_s:
                break
    for count in range(most_rounds):
        spent_s = max(gather(world, [time.perf_counter() - started])[0])
        round_s = spent_s / (count + 2)
        if count >= FEWEST_ROUNDS and spent_s + round_s > longest_s:
            break
        for turn in turns:
            turn.sample()
    curves: dict[str, list[_Turn]] = {}
    for turn in turns:
        curves.setdefault(turn.operation, []).append(turn)
    return LinkCurve(
        [
            Curve(operation, world.size, tuple(_distinct(turn.point() for turn in own)))
            for operation, own in curves.items()
        ],
        _where(world, sizes),
    )


def _distinct(points: Iterable[Point]) -> list[Point]:
    """Sizes that were cut to the same whole elements are one point."""
    return list({point.size_bytes: point for point in points}.values())


class _Turn:
    """One operation at one size, sampled again and again."""

    def __init__(self, world: World, group: Group, operation: str, size: int, algorithm: str) -> None:
        self.world, self.group, self.operation = world, group, operation
        case = Case("send_recv" if operation == "send" else operation, size, algorithm=algorithm)
        subject = Subject(case, group, OUT_OF_PLACE)
        self.size_bytes = subject.size_bytes
        self._run: Callable[[], float | None] = self._started_and_waited_for
        self._subject = subject
        self.algorithm = subject.algorithm
        if operation == "send":
            self._run = self._there_and_back
        self._times_s: list[float] = []
        self._cpu_s: list[float] = []
        self._launch_s: list[float] = []
        self._calls = 1

    def warm(self) -> float:
        """Seconds of one call: the best of some, since one may be disturbed."""
        return min(self.sample(warming=True) for _ in range(WARM_UPS))

    def sample(self, warming: bool = False) -> float:
        """Seconds of one call, the slowest rank's."""
        wire.barrier(self.world.control)
        start, cpu = time.perf_counter(), time.process_time()
        launches = [self._run() for _ in range(self._calls)]
        synchronize(self.group)
        own_s = (time.perf_counter() - start) / self._calls
        own_cpu_s = (time.process_time() - cpu) / self._calls
        if self.operation == "send":
            own_s = own_s / 2 if self.group.index < 2 else 0.0
        slowest_s = max(gather(self.world, [own_s])[0])
        if warming:
            self._calls = min(MOST_CALLS, max(1, math.ceil(SAMPLE_S / max(slowest_s, 1e-7))))
        else:
            self._times_s.append(slowest_s)
            self._cpu_s.append(own_cpu_s)
            self._launch_s += [seconds for seconds in launches if seconds is not None]
        return slowest_s

    def _started_and_waited_for(self) -> float:
        """Seconds until the call that starts it returned."""
        start = time.perf_counter()
        transfer = self._subject.run(asynchronous=True)
        launch_s = time.perf_counter() - start
        transfer.wait()
        return launch_s

    def _there_and_back(self) -> None:
        first, second = self.group.ranks[:2]
        subject, group = self._subject, self.group
        if group.index == 0:
            wire.send(subject.input, group, second)
            wire.recv(subject.output, group, second)
        elif group.index == 1:
            wire.recv(subject.output, group, first)
            wire.send(subject.input, group, first)

    def point(self) -> Point:
        times, cpu_s = self._times_s, statistics.median(self._cpu_s)
        return Point(
            self.size_bytes,
            self.algorithm,
            statistics.median(times),
            percentile(times, 25),
            percentile(times, 75),
            len(times),
            max(gather(self.world, [cpu_s])[0]) / (2 if self.operation == "send" else 1),
            max(gather(self.world, [statistics.median(self._launch_s)])[0]) if self._launch_s else None,
        )


def _where(world: World, sizes: Sequence[int]) -> dict[str, Any]:
    return {
        "host": platform.node(),
        "backend": world.backend,
        "device": world.device.type,
        "world_size": world.size,
        "sizes": list(sizes),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
    }

"""One operation measured as a kernel is: warm up, synchronize, time many calls, divide bytes by time.

Sizes, algbw and busbw are those of nccl-tests (its doc/PERFORMANCE.md): algbw is S / t; busbw multiplies it
by what the busiest link must carry of S, so that it compares with the link's speed whatever the number of
ranks.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from collectives import operations as wire
from collectives.group import Group, World
from collectives.subject import IN_PLACE, ONLY_OUT_OF_PLACE, SHARDED, Case, Subject
from collectives.traffic import ITEMSIZE, bytes_least, traffic

SAMPLE_S = 5e-3  # calls are repeated until a sample takes this long: the skew of a barrier is noise then
MOST_CALLS = 100
Row = dict[str, Any]


def bus_factor(operation: str, n: int) -> float | None:
    """busbw / algbw (nccl-tests, doc/PERFORMANCE.md); None where nothing crosses a link."""
    if n == 1 or operation == "barrier":
        return None
    if operation == "all_reduce":
        return 2 * (n - 1) / n
    return (n - 1) / n if operation in SHARDED else 1.0


def bytes_needed(case: Case, n: int) -> int:
    """Memory of one rank's tensors: input, output, and what the algorithms borrow, at most."""
    total = case.elements(n) * ITEMSIZE[case.dtype]
    parts = {"all_reduce": 2, "reduce": 4, "broadcast": 2, "all_to_all": 2, "send_recv": 2, "barrier": 0}
    return total * parts.get(case.operation, 3)


def measure(
    world: World, case: Case, placement: str, warmup: int, iterations: int, check: bool
) -> Row | None:
    """Time and check one case over all ranks; every rank gets the same row.

    None for a placement that the operation does not have. Times are of one call: the median and
    percentiles over `iterations` samples of the slowest rank's, each after a barrier.
    """
    if placement == IN_PLACE and case.operation in ONLY_OUT_OF_PLACE:
        return None
    if case.operation == "send_recv" and world.size == 1:
        return None  # a rank has no peer
    group = world.group("world", range(world.size))
    subject = Subject(case, group, placement)
    wrong = _wrong(world, subject) if check else None
    calls = calls_per_sample(world, group, subject.run, max(1, warmup))
    before = _wire(world, group)
    samples = [sample(world, group, subject.run, calls) for _ in range(iterations)]
    after = _wire(world, group)
    if wrong is not None:  # again: a call of a kind that was checked before takes a shorter way
        wrong = max(wrong, _wrong(world, subject))
    by_rank = gather(world, samples)  # [iterations][ranks]
    slowest = [max(ranks) for ranks in by_rank]
    median_s = statistics.median(slowest)
    n = world.size
    size_bytes = subject.size_bytes
    factor = bus_factor(case.operation, n)
    algbw = size_bytes / median_s / 1e9 if size_bytes else None
    algorithm = subject.algorithm
    sent, least = busiest(case, algorithm, n, group.place(case.root))
    total_calls = calls * iterations
    wires = (
        None
        if before is None or after is None
        else [(b - a) / total_calls for a, b in zip(before, after, strict=True)]
    )
    wire_bytes = None if wires is None else max(wires)
    return {
        "algorithm": algorithm,
        "size_bytes": size_bytes,
        "count": subject.count,
        "time_s": median_s,
        "p50_s": median_s,
        "p95_s": percentile(slowest, 95),
        "p99_s": percentile(slowest, 99),
        "min_rank_s": min(statistics.median(times) for times in zip(*by_rank, strict=True)),
        "algbw_GBps": algbw,
        "busbw_GBps": None if algbw is None or factor is None else algbw * factor,
        "wrong": wrong,
        "sent_bytes": sent,
        "least_bytes": least,
        "wire_bytes": wire_bytes,
        "wire_over_least": wire_bytes / least if wire_bytes is not None and least else None,
        "calls": calls,
    }


def _wrong(world: World, subject: Subject) -> int:
    """Wrong elements on all ranks of one call, from fresh inputs to poisoned outputs."""
    subject.fill()
    wire.barrier(world.control)  # in place, a peer's late write would meet the new inputs
    subject.run()
    synchronize(subject.group)
    return int(sum(gather(world, [float(subject.wrong())])[0]))


def busiest(case: Case, algorithm: str, n: int, root: int) -> tuple[int, int]:
    """(bytes that the busiest rank sends in a call, the least that the busiest rank must)."""
    shards = case.shards(n)
    sent = (
        traffic(case.operation, algorithm, shards, case.dtype, n, rank, root).sent_bytes for rank in range(n)
    )
    least = (bytes_least(case.operation, shards, case.dtype, n, rank, root) for rank in range(n))
    return max(sent), max(least)


def calls_per_sample(world: World, group: Group, run: Callable[[], object], warmup: int) -> int:
    """Warm up, and choose how many calls make a sample; equal on all ranks."""
    run()
    synchronize(group)
    took_s = sample(world, group, run, warmup)
    slowest = max(gather(world, [took_s])[0])
    return min(MOST_CALLS, max(1, math.ceil(SAMPLE_S / max(slowest, 1e-7))))


def sample(world: World, group: Group, run: Callable[[], object], calls: int) -> float:
    """Seconds a call on this rank, from a barrier of all ranks to the end of `calls` of them."""
    wire.barrier(world.control)
    start = time.perf_counter()
    for _ in range(calls):
        run()
    synchronize(group)
    return (time.perf_counter() - start) / calls


def synchronize(group: Group) -> None:
    """Until the device has done what was asked of it. The CUDA side has not run on a GPU."""
    if group.device.type == "cuda":
        torch.cuda.synchronize(group.device)


def gather(world: World, values: list[float]) -> list[list[float]]:
    """[values][ranks] on every rank, over the control group."""
    own = torch.tensor(values, dtype=torch.float64)
    everyone = torch.empty(world.size, len(values), dtype=torch.float64)
    wire.all_gather(own, world.control, output=everyone)
    columns: list[list[float]] = everyone.t().tolist()
    return columns


def percentile(values: list[float], percent: float) -> float:
    """By linear interpolation between order statistics."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _wire(world: World, group: Group) -> list[float] | None:
    """Every rank's count by the kernel, once all have ended what came before; None where one has none."""
    wire.barrier(world.control)
    counter = group.wire
    own = None if counter is None else counter.bytes_sent()
    # NaN stands for null on its way through the gather.
    counts = gather(world, [math.nan if own is None else float(own)])[0]
    return None if any(math.isnan(count) for count in counts) else counts

"""Ours beside the backend's own, in turn, in one set of processes: medians of ratios, with their bounds."""

from __future__ import annotations

import math
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from collectives import operations as wire
from collectives.bench import Row, calls_per_sample, gather, sample
from collectives.group import World
from collectives.native import GLOO_OPS
from collectives.subject import IN_PLACE, OUT_OF_PLACE, Case, Subject
from collectives.traffic import native

FEWEST_HOST_CALLS, MOST_HOST_CALLS, HOST_S = 60, 400, 0.25


def compare(world: World, case: Case, warmup: int, rounds: int) -> Row:
    """Time `case` and torch.distributed's own function for it in turn; every rank gets the same row.

    A round takes both, the order changing from round to round; its ratio is ours over native, each the
    slowest rank's. `ratio_low` and `ratio_high` bound the median at 95 %.
    """
    with warnings.catch_warnings():  # around all calls: around each it would take as long as the call
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
        return _compare(world, case, warmup, rounds)


def _compare(world: World, case: Case, warmup: int, rounds: int) -> Row:
    group = world.group("world", range(world.size))
    # torch's functions for these work in place
    placement = IN_PLACE if case.operation in ("all_reduce", "reduce", "broadcast") else OUT_OF_PLACE
    subject, rival = Subject(case, group, placement), Rival(Subject(case, group, placement))
    algorithm = subject.algorithm
    runs: tuple[Callable[[], object], Callable[[], object]] = (subject.run, rival.run)
    calls = min(calls_per_sample(world, group, run, max(1, warmup)) for run in runs)
    samples: tuple[list[float], list[float]] = ([], [])
    for turn in range(rounds):
        for which in (0, 1) if turn % 2 == 0 else (1, 0):
            samples[which].append(sample(world, group, runs[which], calls))
    ours, theirs = ([max(ranks) for ranks in gather(world, times)] for times in samples)
    low, middle, high = median_bounds([a / b for a, b in zip(ours, theirs, strict=True)])
    takes_native = algorithm == native(case.operation, group.backend) and case.operation != "send_recv"
    return {
        "algorithm": algorithm,
        "size_bytes": subject.size_bytes,
        "count": subject.count,
        "ours_s": statistics.median(ours),
        "native_s": statistics.median(theirs),
        "ratio": middle,
        "ratio_low": low,
        "ratio_high": high,
        "host_added_s": _host_added(world, subject, rival, statistics.median(ours)) if takes_native else None,
        "rounds": rounds,
        "calls": calls,
    }


def median_bounds(values: list[float]) -> tuple[float, float, float]:
    """(lower, median, upper): order statistics that hold the true median with at least 95 %.

    The number of values below the median is binomial (n, 1/2), whatever they are distributed like
    (Conover, "Practical nonparametric statistics", section 3.2). Fewer than six values cannot give 95 %:
    the bounds are then the extremes.
    """
    ordered = sorted(values)
    n = len(ordered)
    below, rank = 0.0, 0
    while rank < n // 2:
        below += math.comb(n, rank) / 2**n
        if below > 0.025:
            break
        rank += 1
    rank = max(rank - 1, 0)
    return ordered[rank], statistics.median(ordered), ordered[n - 1 - rank]


class Rival:
    """torch.distributed's function for a case, on tensors of its own."""

    def __init__(self, subject: Subject) -> None:
        self.subject, self.group = subject, subject.group
        self.start = self._bound()

    def run(self) -> None:
        """One call, complete on return."""
        for work in self.start():
            work.wait()

    def _bound(self) -> Callable[[], Sequence[Any]]:
        """The call with its arguments, made once, as ours is; it returns what to wait for."""
        subject, root, group = self.subject, self.subject.case.root, self.group.process_group
        tensor, output, op = subject.input, subject.output, GLOO_OPS[subject.case.reduction]
        match subject.case.operation:
            case "all_reduce":
                return lambda: (dist.all_reduce(output, op, group, async_op=True),)
            case "reduce":
                return lambda: (dist.reduce(output, root, op, group, async_op=True),)
            case "broadcast":
                return lambda: (dist.broadcast(output, root, group, async_op=True),)
            case "all_gather":
                gather_ = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
                return lambda: (gather_(output, tensor, group=group, async_op=True),)
            case "reduce_scatter":
                scatter_ = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
                return lambda: (scatter_(output, tensor, op=op, group=group, async_op=True),)
            case "all_to_all":
                return lambda: (dist.all_to_all_single(output, tensor, group=group, async_op=True),)
            case "scatter":
                sources = self._blocks(tensor) if subject.is_root else None
                return lambda: (dist.scatter(output, sources, root, group, async_op=True),)
            case "gather":
                targets = self._blocks(output) if subject.is_root else None
                return lambda: (dist.gather(tensor, targets, root, group, async_op=True),)
            case "send_recv":
                ranks, index = self.group.ranks, self.group.index
                before, after = ranks[index - 1], ranks[(index + 1) % len(ranks)]
                return lambda: (dist.irecv(output, before, group), dist.isend(tensor, after, group))
            case "barrier":
                return lambda: (dist.barrier(group, async_op=True),)
        raise ValueError(f"operation={subject.case.operation} cannot be measured")

    def _blocks(self, tensor: Tensor) -> list[Tensor]:
        return list(tensor.split(self.subject.block))


def _host_added(world: World, subject: Subject, rival: Rival, call_s: float) -> float:
    """Seconds of the calling thread that starting ours takes beyond torch's: the worst rank's median.

    Of a call that follows another one, and as time on the processor: on the clock, the backend's own
    threads, which a call wakes, would count as well. `call_s` is equal on all ranks.
    """
    differences = []
    for turn in range(max(FEWEST_HOST_CALLS, min(MOST_HOST_CALLS, int(HOST_S / call_s)))):
        taken = [0.0, 0.0]
        for which in (0, 1) if turn % 2 == 0 else (1, 0):
            wire.barrier(world.control)
            if which == 0:
                transfers = [subject.run(asynchronous=True)]
                start = time.thread_time()
                transfers.append(subject.run(asynchronous=True))
                taken[0] = time.thread_time() - start
                for transfer in transfers:
                    transfer.wait()
            else:
                works = [*rival.start()]
                start = time.thread_time()
                following = rival.start()
                taken[1] = time.thread_time() - start
                for work in (*works, *following):
                    work.wait()
        differences.append(taken[0] - taken[1])
    return max(gather(world, [statistics.median(differences)])[0])

"""What computing takes on microbatches of sizes that the run did not have: measured, on its own blocks.

Runs after the last step, or between two: gradients, loss sums and activations are written over, parameters
are not. All ranks run it together, so that they disturb each other as they do in training.
"""

from __future__ import annotations

import logging
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from collectives.ledger import Ledger
from models.autograd import AutogradBlock
from strategies.compute import LayerOperation
from strategies.memory import lay_out
from strategies.schedule import Schedule
from strategies.strategy import Strategy
from trainer.binding import Binder
from trainer.config import OptimizerConfig
from trainer.costs import ComputeKey, compute_key
from trainer.executor import Rank
from trainer.machine import available_memory_bytes
from trainer.optimizer import FlatOptimizer
from trainer.program import Filled, Program
from trainer.spans import COMPUTE, spans_of

PASSES = 3
UPDATE_PASSES = 6
MOST_MICROBATCHES = 3  # of one size; the others take as long

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Probes:
    """Seconds measured apart from training.

    Args:
        microbatches: of computing, by their number, then by rank; None where a rank had no memory for them.
        loads: of copying a batch to the microbatches' buffers, by rank and their number.
        updates: by rank and elements.
    """

    microbatches: Mapping[int, Sequence[Mapping[ComputeKey, float] | None]] = field(default_factory=dict)
    loads: Mapping[tuple[int, int], float] = field(default_factory=dict)
    updates: Mapping[tuple[int, int], float] = field(default_factory=dict)


def probe_updates(rank: Rank, sizes: Iterable[int], config: OptimizerConfig) -> dict[int, float]:
    """Median seconds of an update of so many elements, on memory of its own; some may not fit."""
    found: dict[int, float] = {}
    for count in sorted(set(sizes)):
        try:
            parameters, gradients = (torch.zeros(count, dtype=rank.dtype, device=rank.device) for _ in "12")
            optimizer = FlatOptimizer(parameters, gradients, config)
            times = []
            for _ in range(UPDATE_PASSES):
                before = rank.stopwatch.now()
                optimizer.step()
                first, last = rank.stopwatch.seconds([before, rank.stopwatch.now()])
                times.append(last - first)
        except (MemoryError, RuntimeError):
            continue
        found[count] = statistics.median(times[1:])  # the first makes its state
    return found


class Probed(NamedTuple):
    """Median seconds of each kind of layer operation, and of copying a batch to its buffers."""

    computes: dict[ComputeKey, float]
    load_s: float


def probe(rank: Rank, strategy: Strategy, rows: int, budget_s: float) -> Probed | None:
    """What computing and loading take under `strategy`; None if that cannot be run here.

    Stops after `budget_s` seconds, but not within the first pass. Random numbers and the buffers of the
    user's modules are as they were. Whatever goes wrong, the other ranks are not left waiting.
    """
    with torch.no_grad(), torch.random.fork_rng(enabled=True), _kept(rank):
        try:
            return _probe(rank, strategy, rows, budget_s)
        except Exception as error:
            _log.warning(
                "strategy.microbatches=%d cannot be tried (%s)", strategy.options.microbatches, error
            )
            return None


@contextmanager
def _kept(rank: Rank) -> Iterator[None]:
    """Arena, ledger and module buffers are put back."""
    arena, ledger = rank.arena, rank.ledger
    modules = [own.module for own in rank.blocks.values() if isinstance(own, AutogradBlock)]
    buffers = [(buffer, buffer.clone()) for module in modules for buffer in module.buffers()]
    rank.ledger = Ledger()
    try:
        yield
    finally:
        rank.arena, rank.ledger = arena, ledger
        for buffer, before in buffers:
            buffer.copy_(before)


def _probe(rank: Rank, strategy: Strategy, rows: int, budget_s: float) -> Probed:
    begun, world = time.perf_counter(), rank.world
    schedule = strategy.schedule(rank.model, world.size, world.rank, rows, rank.task)
    arena_bytes = lay_out(schedule, rank.model).total_bytes
    _check_room(rank, arena_bytes)
    rank.arena = torch.zeros(arena_bytes, dtype=torch.uint8, device=rank.device)
    start, _ = strategy.rows_of(world.size, world.rank, rows)
    program = Binder(rank, schedule, True, start).bind()
    load_s = _load_s(rank, program)
    found: dict[ComputeKey, list[float]] = defaultdict(list)
    chosen = _chosen(schedule)
    calls = list(zip(spans_of(schedule, rank.norm_crosses), program.calls, strict=True))
    for turn in range(PASSES + 1):
        for span, call in calls:
            operation = span.operation
            if span.kind != COMPUTE or not isinstance(operation, LayerOperation):
                continue
            if operation.microbatch not in chosen:
                continue
            before = rank.stopwatch.now()
            call()
            first, last = rank.stopwatch.seconds([before, rank.stopwatch.now()])
            if turn:  # the first pass touches fresh memory
                found[compute_key(operation, schedule.rows)].append(last - first)
        if turn and time.perf_counter() - begun > budget_s:
            break
    return Probed({key: statistics.median(values) for key, values in found.items()}, load_s)


def _check_room(rank: Rank, arena_bytes: int) -> None:
    """Raise MemoryError where the ranks of this machine together would take more than is available.

    The kernel gives more than it has, and ends a process that then uses it.
    """
    available = available_memory_bytes(rank.device)
    together = 1 if rank.device.type == "cuda" else rank.world.nodes.count(rank.world.nodes[rank.world.rank])
    if available is not None and arena_bytes * together > available:
        raise MemoryError(f"{together} x {arena_bytes:,} B of activations, {available:,} B available")


def _load_s(rank: Rank, program: Program) -> float:
    """Median seconds of loading a batch; its zeros are targets that every loss can take."""
    inputs, targets = (_zeros(places) for places in (program.inputs, program.targets))
    times = []
    for _ in range(PASSES + 1):  # the first touches fresh memory
        before = rank.stopwatch.now()
        program.load(inputs, targets)
        first, last = rank.stopwatch.seconds([before, rank.stopwatch.now()])
        times.append(last - first)
    return statistics.median(times[1:])


def _zeros(places: Sequence[Filled]) -> Tensor | None:
    """A batch [rows, numbers of a row] that fits the places."""
    if not places:
        return None
    first, rows = places[0].buffer, max(place.rows.stop for place in places)
    width = first.numel() // max(1, places[0].rows.stop - places[0].rows.start)
    return torch.zeros((rows, width), dtype=first.dtype, device=first.device)


def _chosen(schedule: Schedule) -> set[int]:
    """Some microbatches of each size: not the first, which writes gradients where others add to them."""
    by_rows: dict[int, list[int]] = defaultdict(list)
    for m, rows in enumerate(schedule.rows):
        by_rows[rows].append(m)
    return {m for own in by_rows.values() for m in _some(own)}


def _some(microbatches: list[int]) -> Iterable[int]:
    later = [m for m in microbatches if m > 0]
    return (later or microbatches)[:MOST_MICROBATCHES]

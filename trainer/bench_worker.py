"""One rank of a bench, from plain configuration to exit code."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict

import torch
import torch.distributed as dist

from collectives.bench import measure
from collectives.group import World, choose_backend
from collectives.link_measuring import LARGEST_BYTES, measure_link
from collectives.rivals import compare
from collectives.subject import Case
from collectives.traffic import algorithms_of
from trainer.bench_cases import cases
from trainer.bench_config import BenchRun
from trainer.bench_output import BenchOutput
from trainer.bench_rows import Row, failures, make_row
from trainer.control import gather_numbers
from trainer.device import choose_device, rank_device
from trainer.errors import InputError, Stopped, exit_code_of
from trainer.link import FILE as LINK_FILE
from trainer.machine import ladder_with_network, measure_machine
from trainer.rank import wait_for
from trainer.signals import StopFlag

CURVE_OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "send")
WRITTEN_KEY = "bench_written"
WRITTEN_S = 120.0  # W&B may take its time at the end

_log = logging.getLogger(__name__)


class BenchFailed(Stopped):
    """A measurement has wrong values or is below the gate: the sentence names its row."""


def run(
    config: BenchRun,
    rank: int,
    world_size: int,
    local_rank: int,
    local_world_size: int,
    store: dist.Store | None,
    *,
    stop: StopFlag,
) -> int:
    """Measure every case on this rank; 0, or 128 + signal after an early end.

    Raises:
        InputError: what the backend cannot do.
        BenchFailed: wrong values or a gate that is not met; raised on all ranks with one sentence.
    """
    backend, device = _backend(config), _device(config)
    place = rank_device(device, backend, world_size, local_rank, local_world_size, key="device")
    if rank == 0 and world_size == 1:
        _log.warning("one rank sends nothing: times are of the calls alone, and there is no bus bandwidth")
    planned = cases(config.bench)
    world = World(rank, world_size, backend, config.collectives.timeout_s, store, place)
    try:
        output = None
        if rank == 0:
            output = BenchOutput(config, world_size, local_world_size, backend, device, len(planned))
            stop.on_emergency.append(lambda: output.close((), "interrupted", 128 + stop.requested))
        return run_cases(config, world, planned, output, store, stop)
    finally:
        world.close()


def run_cases(
    config: BenchRun,
    world: World,
    planned: Sequence[Case],
    output: BenchOutput | None,
    store: dist.Store | None,
    stop: StopFlag,
) -> int:
    """Measure the cases in order, with rank 0's `output`; returns and raises as `run` does.

    All ranks see the same rows and agree on a stop before each case, so they all end alike.
    """
    rows: list[Row] = []
    signum = 0
    try:
        for case in planned:
            signum = max(gather_numbers(world, stop.requested))
            if signum:
                break
            row = _measure(config, world, case)
            if row is None:
                if output is not None:
                    ranks = "one rank" if world.size == 1 else f"{world.size} ranks"
                    _log.warning(
                        "%s is left out: it has none of bench.placements on %s", case.operation, ranks
                    )
                continue
            rows.append(row)
            if output is not None:
                output.write(row)
    except Exception as error:
        if output is not None:
            output.close([str(error)], "failed", exit_code_of(error))
        raise
    if not signum:
        _measure_link(config, world, output)
    failed = failures(rows, config.bench)
    code = 128 + signum if signum else int(bool(failed))
    if output is not None:
        output.close(failed, "interrupted" if signum else "finished", code)
    if code:
        _await_output(world, store)
    if failed and not signum:
        further = f"; bench.json names {len(failed) - 1} further" if len(failed) > 1 else ""
        raise BenchFailed(failed[0] + further)
    return code


def _measure_link(config: BenchRun, world: World, output: BenchOutput | None) -> None:
    """The curve of what training's splits send, by the algorithms that they take."""
    bench = config.bench
    if world.size == 1 or bench.link_curve_s == 0:
        return
    algorithms = asdict(algorithms_of(world.backend, "auto"))
    sizes = [size for size in bench.sizes_bytes() if size <= LARGEST_BYTES] or [LARGEST_BYTES]
    curve = measure_link(world, CURVE_OPERATIONS, sizes, algorithms, bench.link_curve_s, bench.iterations)
    if output is not None:
        curve.save(output.path / LINK_FILE)
        if config.cluster.name == "local":
            output.keep_machine(ladder_with_network(measure_machine(), curve))


def _measure(config: BenchRun, world: World, case: Case) -> Row | None:
    """A case in every placement, and against the backend's own; None where it has no such placement.

    Raises:
        InputError: what the backend cannot do.
    """
    bench = config.bench
    try:
        measured = {
            placement: measure(world, case, placement, bench.warmup, bench.iterations, bench.check)
            for placement in bench.placements
        }
        against = None
        if bench.against is not None and case.algorithm != bench.against:
            against = compare(world, case, bench.warmup, bench.rounds)
    except ValueError as error:
        raise InputError(str(error)) from error
    return make_row(case, measured, against)


def _await_output(world: World, store: dist.Store | None) -> None:
    """Return when rank 0's files are written: the launcher ends all ranks as soon as one has failed."""
    if world.size == 1 or store is None:
        return
    if world.rank == 0:
        store.set(WRITTEN_KEY, "1")
    else:
        wait_for(store, WRITTEN_KEY, WRITTEN_S)


def _device(config: BenchRun) -> str:
    return choose_device(config.device, config.collectives.backend, key="device")


def _backend(config: BenchRun) -> str:
    return choose_backend(config.collectives.backend, torch.device(_device(config)))

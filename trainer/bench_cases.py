"""What a bench measures, case by case, and whether this machine can: checked before any rank starts."""

from __future__ import annotations

import torch

from collectives.bench import bytes_needed
from collectives.subject import Case
from collectives.traffic import ALGORITHMS
from trainer.bench_config import REDUCING, ROOTED, BenchRun, BenchSection
from trainer.device import choose_device
from trainer.errors import InputError, shown
from trainer.machine import available_memory_bytes

GENERAL = ("auto", "native")  # names that every operation knows


def cases(bench: BenchSection) -> list[Case]:
    """By operation, algorithm, dtype, reduction, and then size, smallest first.

    A barrier has none of these but the algorithm, and only operations that reduce have a reduction. A
    pair of operation and algorithm that does not exist is left out.
    """
    found = []
    for operation in bench.operations:
        is_barrier = operation == "barrier"
        for algorithm in bench.algorithms:
            if algorithm not in algorithms_of(operation):
                continue
            for dtype in ("float32",) if is_barrier else bench.dtypes:
                for reduction in bench.reductions if operation in REDUCING else ("sum",):
                    for size in (0,) if is_barrier else bench.sizes_bytes():
                        root = bench.root if operation in ROOTED else 0
                        found.append(Case(operation, size, dtype, reduction, root, algorithm))
    return found


def algorithms_of(operation: str) -> tuple[str, ...]:
    """Names that `bench.algorithms` may hold for an operation."""
    return (*GENERAL, *ALGORITHMS[operation])


def check(config: BenchRun, local_ranks: int) -> None:
    """Refuse algorithms that no chosen operation has, and sizes beyond this machine's memory.

    Raises:
        InputError: one sentence with the key.
    """
    _check_algorithms(config.bench)
    device = choose_device(config.device, config.collectives.backend, key="device")
    if device == "cpu" and config.collectives.backend == "nccl":
        raise InputError("collectives.backend=nccl needs a GPU that torch can use; take gloo or auto")
    if device == "cpu":
        _check_memory(config, local_ranks)


def _check_algorithms(bench: BenchSection) -> None:
    known = {operation: algorithms_of(operation) for operation in bench.operations}
    for i, algorithm in enumerate(bench.algorithms):
        if not any(algorithm in names for names in known.values()):
            valid = dict.fromkeys(name for names in known.values() for name in names)
            raise InputError(
                f"{shown(f'bench.algorithms[{i}]', algorithm)} must be one of {', '.join(valid)}"
            )
    for operation, names in known.items():
        if not set(names) & set(bench.algorithms):
            raise InputError(
                f"{shown('bench.algorithms', list(bench.algorithms))} has none of those of {operation}: "
                f"{', '.join(dict.fromkeys(names))}"
            )


def _check_memory(config: BenchRun, local_ranks: int) -> None:
    available = available_memory_bytes(torch.device("cpu"))
    assert config.world_size is not None
    copies = 1 if config.bench.against is None else 2  # the rival has tensors of its own
    needs = [
        (bytes_needed(case, config.world_size) * copies * local_ranks, case) for case in cases(config.bench)
    ]
    needed, case = max(needs, key=lambda pair: pair[0])
    if available is None or needed <= available:
        return
    bench = config.bench
    key = shown("bench.max_size", bench.max_size)
    if bench.sizes is not None:
        key = shown("bench.sizes", list(bench.sizes))
    raise InputError(
        f"{key} is beyond memory: {case.operation} of {case.size_bytes:,} bytes needs {needed:,} bytes for "
        f"the {local_ranks} ranks of this machine, which has {available:,} available"
    )

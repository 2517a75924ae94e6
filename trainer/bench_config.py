"""The typed configuration of a bench, and the refusal of wrong input.

As in `trainer.config`, nothing here imports torch.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from trainer.config import ClusterConfig, LoggerConfig
from trainer.errors import InputError, shown
from trainer.job import JobConfig
from trainer.sizes import read_size, sweep
from trainer.validate import CHOICES, MOST_S, check_choices, check_cluster, require

OPERATIONS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "reduce",
    "scatter",
    "gather",
    "send_recv",
    "barrier",
)
REDUCING = ("all_reduce", "reduce_scatter", "reduce")
ROOTED = ("broadcast", "reduce", "scatter", "gather")
REDUCTIONS = ("sum", "min", "max", "mean")
FLOATING = ("float64", "float32", "bfloat16", "float16")
INTEGER = ("int64", "int32", "uint8")
PLACEMENTS = ("out_of_place", "in_place")
ONE_PLACEMENT = ("all_to_all", "send_recv", "barrier")  # these have only the first

BENCH_CHOICES: dict[str, tuple[str, ...]] = {
    "bench.operations": OPERATIONS,
    "bench.dtypes": (*FLOATING, *INTEGER),
    "bench.reductions": REDUCTIONS,
    "bench.placements": PLACEMENTS,
    "bench.against": ("native",),
    "device": ("auto", "cpu", "cuda"),
    **{key: CHOICES[key] for key in ("collectives.backend", "logger.name", "logger.mode")},
}
LISTS = ("operations", "sizes", "dtypes", "reductions", "algorithms", "placements")


@dataclass(frozen=True)
class BenchSection:
    """What is measured. A size is the S of nccl-tests' algbw = S/t.

    That is a rank's buffer for all_reduce, all_to_all, broadcast, reduce and send_recv, and all ranks'
    blocks together for all_gather, reduce_scatter, gather and scatter.
    """

    operations: tuple[str, ...] = OPERATIONS[:-1]
    sizes: tuple[str, ...] | None = None  # null: from min_size to max_size by factor
    min_size: str = "1KiB"
    max_size: str = "16MiB"
    factor: float = 4.0
    dtypes: tuple[str, ...] = ("float32",)
    reductions: tuple[str, ...] = ("sum",)
    root: int = 0
    algorithms: tuple[str, ...] = ("auto",)
    placements: tuple[str, ...] = PLACEMENTS
    warmup: int = 5
    iterations: int = 20
    check: bool = True
    min_busbw: float | dict[str, Any] | None = None  # GB/s, for every operation or by operation
    against: str | None = None  # null, native
    rounds: int = 20  # of the comparison with `against`
    link_curve_s: float = 5.0  # seconds for link_curve.json, which training reads; 0 writes none
    ranks: int = 2  # where neither torchrun nor world_size says how many

    def sizes_bytes(self) -> list[int]:
        """The sizes to measure, in bytes, smallest first.

        Raises:
            InputError: a size that cannot be read, or none in the sweep.
        """
        if self.sizes is not None:
            sizes = {read_size(text, f"bench.sizes[{i}]") for i, text in enumerate(self.sizes)}
            if min(sizes) < 1:
                place = next(i for i, text in enumerate(self.sizes) if read_size(text, "") < 1)
                raise InputError(
                    f"{shown(f'bench.sizes[{place}]', self.sizes[place])} must be at least 1 byte"
                )
            return sorted(sizes)
        least = read_size(self.min_size, "bench.min_size")
        if least < 1:
            raise InputError(f"{shown('bench.min_size', self.min_size)} must be at least 1 byte")
        most = read_size(self.max_size, "bench.max_size")
        if least > most:
            raise InputError(f"bench.min_size={self.min_size} is more than bench.max_size={self.max_size}")
        return sweep(least, most, self.factor)

    def least_busbw(self, operation: str) -> float | None:
        """The gate of an operation in GB/s; None where there is none: a barrier has no bandwidth."""
        if operation == "barrier":
            return None
        if isinstance(self.min_busbw, dict):
            return self.min_busbw.get(operation)
        return self.min_busbw


@dataclass(frozen=True)
class BenchCollectives:
    """`bench.algorithms` says which algorithms are measured."""

    backend: str = "auto"  # auto, gloo, nccl
    timeout_s: float = 60.0


@dataclass(frozen=True)
class BenchRun(JobConfig):
    """One bench."""

    kind = "bench"
    root = "bench"
    worker = "trainer.bench_worker:run"
    preflight = "trainer.bench_cases:check"

    device: str = "auto"  # auto, cpu, cuda
    bench: BenchSection = field(default_factory=BenchSection)
    collectives: BenchCollectives = field(default_factory=BenchCollectives)
    logger: LoggerConfig = field(default_factory=LoggerConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)

    @property
    def default_world_size(self) -> int:
        return self.bench.ranks

    def validate(self) -> None:
        for name in LISTS:
            if getattr(self.bench, name) == ():
                raise InputError(f"bench.{name}=[] leaves nothing to measure; name at least one")
        check_choices(self, BENCH_CHOICES)
        at_least_one = ["world_size", "bench.iterations", "bench.rounds", "bench.ranks"]
        require(self, at_least_one, lambda number: number >= 1, "must be at least 1")
        at_least_zero = ["bench.warmup", "bench.root", "bench.link_curve_s"]
        require(self, at_least_zero, lambda number: number >= 0, "must be at least 0")
        require(self, ["bench.factor"], lambda number: number > 1, "must be above 1")
        positive = ["collectives.timeout_s", "logger.timeout_s"]
        require(self, positive, lambda number: number > 0, "must be above 0")
        require(self, positive, partial(operator.ge, MOST_S), f"must be at most {MOST_S:,}")
        if self.world_size == 1 and set(self.bench.operations) == {"send_recv"}:
            raise InputError("world_size=1 leaves nothing to measure: send_recv needs a peer; take 2 ranks")
        texts = ["bench.algorithms", "cluster.name", "logger.project"]
        require(self, texts, lambda text: bool(text.strip()), "must not be empty")
        check_cluster(self.cluster)
        self.bench.sizes_bytes()
        if PLACEMENTS[0] not in self.bench.placements and set(self.bench.operations) <= set(ONE_PLACEMENT):
            raise InputError(
                f"{shown('bench.placements', list(self.bench.placements))} leaves nothing to measure: "
                f"{' and '.join(self.bench.operations)} is out_of_place only"
            )
        self._check_reductions()
        self._check_gate()
        if self.collectives.backend == "nccl" and self.device == "cpu":
            raise InputError("collectives.backend=nccl needs GPUs; with device=cpu take gloo or auto")

    def _check_reductions(self) -> None:
        integers = [dtype for dtype in self.bench.dtypes if dtype in INTEGER]
        reduces = any(operation in REDUCING for operation in self.bench.operations)
        if "mean" in self.bench.reductions and integers and reduces:
            raise InputError(
                f"bench.reductions has mean, which {integers[0]} in bench.dtypes cannot hold; "
                f"take sum, min or max, or one of {', '.join(FLOATING)}"
            )

    def _check_gate(self) -> None:
        gate = self.bench.min_busbw
        by_operation = gate if isinstance(gate, dict) else {} if gate is None else {"": gate}
        measured = [name for name in self.bench.operations if name != "barrier"]
        for operation, value in by_operation.items():
            key = f"bench.min_busbw.{operation}".rstrip(".")
            if not measured or (operation and operation not in measured):
                raise InputError(
                    f"{shown(key, value)} must name an operation of this bench that has a bandwidth: "
                    f"{', '.join(measured) or 'there is none'}"
                )
            if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
                raise InputError(f"{shown(key, value)} must be a number of GB/s above 0")

    def check_world(self, world_size: int) -> None:
        if self.bench.root >= world_size:
            raise InputError(
                f"bench.root={self.bench.root} must be one of the {world_size} ranks, 0 to {world_size - 1}"
            )
        if self.bench.min_busbw is not None and world_size == 1:
            raise InputError(
                f"{shown('bench.min_busbw', self.bench.min_busbw)} needs world_size of 2 or more: "
                f"one rank sends nothing and has no bus bandwidth"
            )
        if self.bench.against is not None and world_size == 1:
            raise InputError(
                f"bench.against={self.bench.against} needs world_size of 2 or more: on one rank there is "
                f"nothing to compare"
            )

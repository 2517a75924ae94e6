"""What the operations of a run take, from its stamps: the simulator's costs, for its own plan or another.

From typical steps, those between the quartiles of the step time. Computing is known by layer, kind and rows
of the microbatch.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from strategies.communication import Communication, Wait
from strategies.compute import GradientNorm, LayerOperation, Update
from strategies.schedule import Schedule
from strategies.values import Layer, Operation
from trainer.history import FEWEST_STEPS, History, Kept, stacked
from trainer.services import service_times, shortest_wait_s
from trainer.spans import COMPUTE, LAUNCH
from trainer.timeline import Timeline

MOST_SAMPLES = 8

ComputeKey = tuple[str, int, int]  # kind of operation, layer, rows
TransferKey = tuple[str, int, str, int]  # verb, elements, dtype, ranks
ScaleTransfer = Callable[[Communication], float]


class UnknownCost(ValueError):
    """Nothing measured says what an operation takes."""


@dataclass(frozen=True)
class Measurements:
    """Seconds, by rank. Updates are known by elements of their layers, norms per element.

    `update_probes` are updates of other sizes, measured apart from training.
    """

    computes: dict[tuple[int, ComputeKey], float]
    updates: dict[tuple[int, int], float]
    norms: dict[int, float]
    launches: dict[tuple[int, str], float]
    waits: dict[int, float]
    transfers: dict[TransferKey, float]
    norm_s: float
    before: dict[int, tuple[float, float]]  # waiting for data, all else
    after: dict[int, float]
    scaled: ScaleTransfer | None = None  # for messages of sizes that the run did not send
    update_probes: Mapping[tuple[int, int], float] = field(default_factory=dict)
    cpu_share: ScaleTransfer | None = None  # of a transfer's seconds, what its launch is charged with

    def changed(self, **values: object) -> Measurements:
        return replace(self, **values)  # type: ignore[arg-type]


class PlanCosts:
    """`strategies.simulator.Costs` for the schedules of all ranks."""

    def __init__(self, measured: Measurements, schedules: Sequence[Schedule]) -> None:
        self._measured = measured
        self._rows = [schedule.rows for schedule in schedules]

    def compute_s(self, rank: int, operation: Operation) -> float:
        measured = self._measured
        if isinstance(operation, Update):
            return self._update_s(rank, elements(operation.layers))
        if isinstance(operation, GradientNorm):
            return measured.norms.get(rank, 0.0) * elements(operation.layers)
        assert isinstance(operation, LayerOperation)
        key = compute_key(operation, self._rows[rank])
        if (rank, key) in measured.computes:
            return measured.computes[rank, key]
        elsewhere = [seconds for (_, other), seconds in measured.computes.items() if other == key]
        if not elsewhere:
            raise UnknownCost(f"{operation.identity} on {key[2]} rows was not measured")
        return sum(elsewhere) / len(elsewhere)

    def _update_s(self, rank: int, count: int) -> float:
        """A call costs something whatever it updates, so that other sizes are probed; else by elements."""
        measured = self._measured
        if (rank, count) in measured.updates:
            return measured.updates[rank, count]
        own = {size: s for (r, size), s in measured.updates.items() if r == rank and size}
        total = sum(own.values())
        probes = measured.update_probes
        if (rank, count) in probes:
            probed = sum(probes.get((rank, size), 0.0) for size in own)
            return probes[rank, count] * (total / probed if probed else 1.0)
        return total / sum(own) * count if own else 0.0

    def launch_s(self, rank: int, operation: Communication) -> float:
        own, share = self._measured.launches, self._measured.cpu_share
        charged = share(operation) * self.transfer_s(operation) if share is not None else 0.0
        if (rank, operation.verb) in own:
            return own[rank, operation.verb] + charged
        others = [seconds for (_, verb), seconds in own.items() if verb == operation.verb]
        if not others:
            raise UnknownCost(f"{operation.verb} was not measured")
        return sum(others) / len(others) + charged

    def transfer_s(self, operation: Communication) -> float:
        known = self._measured.transfers.get(transfer_key(operation))
        if known is not None:
            return known
        if self._measured.scaled is None:
            raise UnknownCost(f"{operation.identity} was not measured, and there is no link curve")
        return self._measured.scaled(operation)

    def wait_s(self, rank: int, operation: Wait) -> float:
        return self._measured.waits.get(rank, 0.0)

    def before_s(self, rank: int) -> tuple[float, float]:
        return self._measured.before[rank]

    def after_s(self, rank: int) -> float:
        return self._measured.after[rank]

    def norm_s(self) -> float:
        return self._measured.norm_s


def compute_key(operation: LayerOperation, rows: Sequence[int]) -> ComputeKey:
    return (type(operation).__name__, operation.layer.index, rows[operation.microbatch])


def transfer_key(operation: Communication) -> TransferKey:
    group = getattr(operation, "group", None)
    verb = "send" if operation.verb == "recv" else operation.verb
    return (verb, operation.numel, operation.dtype, 2 if group is None else group.size)


def elements(layers: Sequence[Layer]) -> int:
    """Parameters of whole layers."""
    return sum(math.prod(own.shape) for layer in layers for own in layer.spec.parameters)


def typical(timeline: Timeline, steps: Sequence[Kept]) -> list[Kept]:
    """Those whose slowest rank's time lies between the quartiles; all where fewer than `FEWEST_STEPS` do."""
    if len(steps) < FEWEST_STEPS:
        return list(steps)
    times = np.array([step_time_s(timeline, kept) for kept in steps])
    low, high = np.quantile(times, (0.25, 0.75))
    between = [kept for kept, time in zip(steps, times, strict=True) if low <= time <= high]
    return between if len(between) >= FEWEST_STEPS else list(steps)


def step_time_s(timeline: Timeline, kept: Kept) -> float:
    """The slowest rank's."""
    records = kept.recorded.records
    return max(float(timeline.step_end(rank, record) - record[0]) for rank, record in enumerate(records))


def measure(timeline: Timeline, schedules: Sequence[Schedule], history: History) -> list[Measurements]:
    """Costs of the run's own plan, in each of up to `MOST_SAMPLES` typical steps.

    One step at a time, since ranks that are late in turns wait for each other, which their means would not.

    Raises:
        UnknownCost: fewer steps after warm-up than can say anything.
    """
    steps = typical(timeline, history.steady())
    if len(steps) < FEWEST_STEPS:
        raise UnknownCost(f"a verdict needs {FEWEST_STEPS} steps after warm-up, and has {len(steps)}")
    chosen = np.unique(np.linspace(0, len(steps) - 1, MOST_SAMPLES).astype(int))
    steps = [steps[k] for k in chosen]
    records = [stacked(steps, rank, timeline.length(rank, False)) for rank in range(len(schedules))]
    services = service_times(timeline, steps, history)
    waits = {rank: shortest_wait_s(timeline, rank, record) for rank, record in enumerate(records)}
    return [
        _of_step(timeline, schedules, [record[k] for record in records], services[k], waits)
        for k in range(len(steps))
    ]


def _of_step(
    timeline: Timeline,
    schedules: Sequence[Schedule],
    records: Sequence[np.ndarray],
    services: np.ndarray,
    waits: dict[int, float],
) -> Measurements:
    computes: dict[tuple[int, ComputeKey], list[float]] = defaultdict(list)
    launches: dict[tuple[int, str], list[float]] = defaultdict(list)
    updates: dict[tuple[int, int], list[float]] = defaultdict(list)
    norms: dict[int, float] = {}
    before: dict[int, tuple[float, float]] = {}
    after: dict[int, float] = {}
    for rank, (schedule, record) in enumerate(zip(schedules, records, strict=True)):
        marks = timeline.marks(rank, record)
        spent = np.diff(marks).tolist()
        norm_s, norm_elements = 0.0, 0
        for span, seconds in zip(timeline.tracks[rank].spans, spent, strict=True):
            operation = span.operation
            if span.kind == LAUNCH:
                assert isinstance(operation, Communication)
                launches[rank, operation.verb].append(seconds)
            elif isinstance(operation, LayerOperation):
                computes[rank, compute_key(operation, schedule.rows)].append(seconds)
            elif isinstance(operation, Update):
                updates[rank, elements(operation.layers)].append(seconds)
            elif isinstance(operation, GradientNorm) and span.kind == COMPUTE:
                norm_s += seconds
                norm_elements += elements(operation.layers) if span.part == 0 else 0
        norms[rank] = norm_s / norm_elements if norm_elements else 0.0
        data = float(record[2] - record[1])
        before[rank] = (data, max(0.0, float(marks[0] - record[0]) - data))
        after[rank] = float(timeline.step_end(rank, record) - marks[-1])
    transfers: dict[TransferKey, list[float]] = defaultdict(list)
    exchanges = []
    for meeting, service in zip(timeline.matching.meetings, services.tolist(), strict=True):
        if meeting.operation is None:
            exchanges.append(service)
        else:
            transfers[transfer_key(meeting.operation)].append(service)
    return Measurements(
        {key: sum(values) / len(values) for key, values in computes.items()},
        {key: sum(values) / len(values) for key, values in updates.items()},
        norms,
        {key: sum(values) / len(values) for key, values in launches.items()},
        waits,
        {key: sum(values) / len(values) for key, values in transfers.items()},
        sum(exchanges) / len(exchanges) if exchanges else 0.0,
        before,
        after,
    )

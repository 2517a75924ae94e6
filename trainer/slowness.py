"""Which rank takes longer than the others for the same work."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from strategies.compute import Backward, BackwardInput, LayerOperation
from strategies.schedule import Schedule
from trainer.costs import ComputeKey, Measurements, compute_key
from trainer.history import History, stacked
from trainer.timeline import Timeline

LEAST_SHARE_OF_STEPS = 0.75  # in which it must be slower: a rank is slow, or it was for a moment

Work = tuple[object, ...]  # what is the same work on another rank


def work_of(operation: LayerOperation, rows: Sequence[int]) -> Work:
    """Kind, shapes and rows; not which layer it is, nor, but for its gradient, whether one is below."""
    layer = operation.layer
    gives_below = layer.has_below and isinstance(operation, BackwardInput | Backward)
    columns = None if layer.columns is None else layer.columns[1] - layer.columns[0]
    return (
        type(operation).__name__,
        *layer.spec.work,
        gives_below,
        columns,
        rows[operation.microbatch],
    )


@dataclass(frozen=True)
class SlowRank:
    """`factors` say what each kind of work would take if the rank were like the others.

    Work that no other has is as much faster as the rest of it, `factor`.
    """

    rank: int
    factors: dict[Work, float]
    factor: float

    def healed(self, measured: Measurements, schedules: Sequence[Schedule]) -> Measurements:
        """The costs as if the rank were like the others."""
        computes, own = dict(measured.computes), schedules[self.rank]
        done: set[ComputeKey] = set()
        for operation in own.operations:
            if isinstance(operation, LayerOperation):
                key = compute_key(operation, own.rows)
                if key not in done:
                    done.add(key)
                    computes[self.rank, key] *= self.factors.get(work_of(operation, own.rows), self.factor)
        return measured.changed(computes=computes)


def slow_rank(timeline: Timeline, schedules: Sequence[Schedule], history: History) -> SlowRank | None:
    """The rank that is slower than the others by most; None where none is.

    Work is compared within each step, with the median of the other ranks that have the same.
    """
    if len(schedules) == 1:
        return None
    steps = history.steady()
    times: list[dict[Work, np.ndarray]] = []  # by rank, [steps]: mean seconds of one such operation
    counts: list[dict[Work, int]] = []
    for rank, schedule in enumerate(schedules):
        marks = timeline.marks(rank, stacked(steps, rank, timeline.length(rank, False)))
        spent = np.diff(marks, axis=-1)
        places: dict[Work, list[int]] = defaultdict(list)
        for place, span in enumerate(timeline.tracks[rank].spans):
            if isinstance(span.operation, LayerOperation):
                places[work_of(span.operation, schedule.rows)].append(place)
        times.append({work: spent[:, own].mean(axis=1) for work, own in places.items()})
        counts.append({work: len(own) for work, own in places.items()})
    worst: tuple[float, SlowRank] | None = None
    for rank, own in enumerate(times):
        excess, total = np.zeros(len(steps)), np.zeros(len(steps))
        factors: dict[Work, float] = {}
        for work, seconds in own.items():
            others = [
                times[other][work] for other in range(len(times)) if other != rank and work in times[other]
            ]
            if others:
                like = np.median(others, axis=0)
                excess += counts[rank][work] * (seconds - like)
                total += counts[rank][work] * seconds
                mean = float(seconds.mean())
                factors[work] = min(1.0, float(like.mean()) / mean) if mean > 0 else 1.0
        steadily = np.quantile(excess, 1 - LEAST_SHARE_OF_STEPS) > 0
        if steadily and (worst is None or excess.mean() > worst[0]):
            factor = min(1.0, float(1 - excess.mean() / total.mean()))
            worst = (float(excess.mean()), SlowRank(rank, factors, factor))
    return None if worst is None else worst[1]

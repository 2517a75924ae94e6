"""How much longer computing takes while other ranks of the machine compute, and what a change makes of it.

Ranks of one machine share its caches, memory and power. Under an uneven partition the largest stage computes
alone for most of the step; once the stages are even all compute at once, and what was measured of the one is
too short for all. How much is lost is read from the run's own stamps: the same operation of the same rank,
with company and without.

While a rank of the same node computes too, an operation advances by 1 - lost seconds of its time alone in a
second: seconds = alone + lost * (seconds in company).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from strategies.compute import LayerOperation
from strategies.schedule import Schedule
from strategies.simulator import Simulation, simulate
from trainer.costs import ComputeKey, Measurements, PlanCosts, compute_key
from trainer.history import Kept, stacked
from trainer.spans import COMPUTE
from trainer.timeline import Timeline

ROUNDS = 4  # of a fixed point: how long each rank computes depends on when the others do
LEAST_SPREAD = 0.1  # standard deviation of the company: with less, nothing can be told from it
MOST_LOST = 0.9
MOST_STEPS = 16  # that are looked at: it takes steps x ranks^2


@dataclass(frozen=True)
class Contention:
    """`lost`: 0 where computing does not disturb computing, 0.5 where two ranks share one core.

    `nodes` are those of the ranks.
    """

    lost: float
    nodes: tuple[int, ...]

    def step_s(
        self, before: Sequence[Schedule], after: Sequence[Schedule], costs: Measurements, *, pipeline: bool
    ) -> float:
        """Seconds of a step of the schedules `after`, from the costs of a run of those `before`."""
        if not self.lost:
            return simulate(after, PlanCosts(costs, after), pipeline=pipeline).step_time_s
        drawn = simulate(before, PlanCosts(costs, before), pipeline=pipeline, keep_intervals=True)
        factors = self._factors(drawn)
        alone: dict[ComputeKey, dict[int, float]] = defaultdict(dict)
        for (rank, key), seconds in costs.computes.items():
            alone[key][rank] = seconds / factors[rank]
        for _ in range(ROUNDS):
            computes = {
                (rank, key): own.get(rank, sum(own.values()) / len(own)) * factors[rank]
                for key, own in alone.items()
                for rank in range(len(after))
            }
            changed = PlanCosts(costs.changed(computes=computes), after)
            drawn = simulate(after, changed, pipeline=pipeline, keep_intervals=True)
            factors = self._factors(drawn)
        return drawn.step_time_s

    def _factors(self, drawn: Simulation) -> list[float]:
        """What each rank's computing takes over what it would alone."""
        pieces: list[list[tuple[float, float]]] = [[] for _ in self.nodes]
        for interval in drawn.intervals:
            if interval.kind == "compute":
                pieces[interval.rank].append((interval.start_s, interval.stop_s))
        found = []
        for rank, computing in enumerate(pieces):
            own = np.array(computing).reshape(-1, 2)
            total = float((own[:, 1] - own[:, 0]).sum())
            others = _union(pieces[other] for other in neighbours(self.nodes, rank))
            company = float(_within(own[:, 0], own[:, 1], others).sum()) / total if total else 0.0
            found.append(1 / (1 - self.lost * company))
        return found


def neighbours(nodes: Sequence[int], rank: int) -> list[int]:
    """The other ranks of its node."""
    return [other for other, node in enumerate(nodes) if other != rank and node == nodes[rank]]


def measured_contention(
    timeline: Timeline, schedules: Sequence[Schedule], steps: Sequence[Kept], nodes: Sequence[int]
) -> Contention:
    """What the stamps of `steps` say is lost; 0 where the company of operations hardly varies.

    `alone` is a number of its own for each operation of a layer on each rank, so that neither a large layer
    nor a slow rank looks like contention.
    """
    chosen = np.unique(np.linspace(0, len(steps) - 1, MOST_STEPS).astype(int))
    steps = [steps[k] for k in chosen]
    marks = [
        timeline.marks(rank, stacked(steps, rank, timeline.length(rank, False)))
        for rank in range(len(schedules))
    ]
    groups: list[tuple[np.ndarray, np.ndarray]] = []  # seconds of one operation, and its share in company
    for rank, schedule in enumerate(schedules):
        seconds = np.diff(marks[rank], axis=-1)
        shared = np.zeros_like(seconds)
        for step in range(len(steps)):
            others = _union(
                _pieces(marks[other][step], timeline.tracks[other].kinds == COMPUTE)
                for other in neighbours(nodes, rank)
            )
            shared[step] = _within(marks[rank][step][:-1], marks[rank][step][1:], others)
        places: dict[ComputeKey, list[int]] = defaultdict(list)
        for place, span in enumerate(timeline.tracks[rank].spans):
            if isinstance(span.operation, LayerOperation):
                places[compute_key(span.operation, schedule.rows)].append(place)
        for own in places.values():
            took, company = seconds[:, own].reshape(-1), shared[:, own].reshape(-1)
            if len(took) > 1 and took.min() > 0:
                groups.append((took, company / took))
    return Contention(_lost(groups), tuple(nodes))


def _lost(groups: Sequence[tuple[np.ndarray, np.ndarray]]) -> float:
    """The number that leaves the time alone no slope over the company, all groups together.

    A slope over the share in company, not over the seconds in it, in which a call that took long for another
    reason has been longer too.
    """
    spread = count = rise = moved = 0.0
    for seconds, company in groups:
        away = company - company.mean()
        spread += float((away**2).sum())
        count += len(away)
        rise += float((away * seconds).sum() / seconds.mean())
        moved += float((away * seconds * company).sum() / seconds.mean())
    if not count or spread < LEAST_SPREAD**2 * count or moved <= 0:
        return 0.0
    return min(MOST_LOST, max(0.0, rise / moved))


def _pieces(marks: np.ndarray, is_compute: np.ndarray) -> np.ndarray:
    """[pieces, 2]: begin and end of the spans in which a rank computes."""
    return np.stack([marks[:-1], marks[1:]], axis=-1)[is_compute]


def _union(pieces: Iterable[object]) -> tuple[np.ndarray, np.ndarray]:
    """Moments and, at each, the seconds until then in which at least one of the pieces was going on."""
    own = np.concatenate(
        [np.zeros((0, 2)), *(np.asarray(some, dtype=float).reshape(-1, 2) for some in pieces)]
    )
    own = own[np.argsort(own[:, 0], kind="stable")]
    if not len(own):
        return np.zeros(1), np.zeros(1)
    reached = np.maximum.accumulate(own[:, 1])
    begins = np.maximum(own[:, 0], np.concatenate([own[:1, 0], reached[:-1]]))
    going = np.maximum(own[:, 1] - begins, 0.0)
    after = np.cumsum(going)
    moments = np.stack([begins, begins + going], axis=-1).reshape(-1)
    return moments, np.stack([after - going, after], axis=-1).reshape(-1)


def _within(begin: np.ndarray, end: np.ndarray, union: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """Seconds between each begin and end in which the union is going on."""
    found: np.ndarray = np.interp(end, *union) - np.interp(begin, *union)
    return found

"""Rank 0's rows: the numbers of a step, and once its stamps are there, where its time went; in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from collectives.link import LinkCurve
from collectives.traffic import ITEMSIZE
from strategies.communication import Collective, Communication
from trainer.control import Gathered
from trainer.history import History
from trainer.meter import Measured, Meter, StepInfo
from trainer.recorder import Recorded
from trainer.timeline import SPLIT, Observation, Timeline

Row = dict[str, Any]
Score = tuple[float | None, float | None]


class Rows:
    """Takes what is known of a step when it is known, and hands on its row when it is whole."""

    def __init__(
        self,
        meter: Meter,
        timeline_of: Callable[[int], Timeline],
        curve: LinkCurve | None,
        history: History,
        on_row: Callable[[Row], None],
    ) -> None:
        self.meter, self.timeline_of, self.curve = meter, timeline_of, curve
        self.history, self.on_row = history, on_row
        self._waiting: deque[tuple[StepInfo, Gathered]] = deque()
        self._stamped: deque[Recorded] = deque()
        self._scores: dict[int, Score] = {}
        self._since_wire = 0

    def add(self, info: StepInfo, gathered: Gathered) -> None:
        self._waiting.append((info, gathered))

    def score(self, step: int, score: Score) -> None:
        self._scores[step] = score

    def stamped(self, steps: Sequence[Recorded]) -> None:
        """The stamps of the next steps."""
        self._stamped.extend(steps)
        while (count := min(len(self._stamped), len(self._waiting))) > 0:
            first = self._stamped[0]
            alike: list[Recorded] = []
            while len(alike) < count and self._stamped and self._stamped[0].rows == first.rows:
                alike.append(self._stamped.popleft())
            self._alike(alike)

    def close(self) -> None:
        """Hand on what is left; its stamps are not coming."""
        while self._waiting:
            info, gathered = self._waiting.popleft()
            self._hand_on(info, gathered, None)

    def _alike(self, steps: Sequence[Recorded]) -> None:
        timeline = self.timeline_of(steps[0].rows)
        ranks = range(len(steps[0].records))
        widths = [timeline.length(rank, observed=False) for rank in ranks]
        splits = timeline.splits(
            [np.stack([step.records[rank][: widths[rank]] for step in steps]) for rank in ranks]
        )
        of_steps = zip(*(splits[key].tolist() for key in SPLIT), strict=True)
        for step, own in zip(steps, of_steps, strict=True):
            split = [dict(zip(SPLIT, parts, strict=True)) for parts in zip(*own, strict=True)]
            info, gathered = self._waiting.popleft()
            observed = self._observed(timeline, step) if step.observed else None
            self._since_wire += 1
            wire_steps = self._since_wire if step.observed else None
            if step.observed:
                self._since_wire = 0
            self._hand_on(
                info, gathered, Measured(split, observed, step.wire_bytes, step.wire_between, wire_steps)
            )
            self.history.add(info.step, step)

    def _observed(self, timeline: Timeline, step: Recorded) -> list[Observation]:
        arrivals = timeline.arrivals(step.records)
        curve_time = self._curve_time if self.curve is not None else None
        return [
            timeline.observe(rank, record, arrivals, curve_time) for rank, record in enumerate(step.records)
        ]

    def _curve_time(self, operation: Communication) -> float | None:
        return curve_time_s(self.curve, operation, self.meter.plan.world_size)

    def _hand_on(self, info: StepInfo, gathered: Gathered, measured: Measured | None) -> None:
        row = self.meter.row(info, gathered, measured)
        if info.step in self._scores:
            row["eval_loss"], row["eval_accuracy"] = self._scores.pop(info.step)
            row["phase"] = "train+eval"
        self.on_row(row)


def curve_time_s(curve: LinkCurve | None, operation: Communication, world_size: int) -> float | None:
    """What the curve gives for one operation; None where it has none of that kind and group size.

    A message's was measured between two ranks while the whole group had been set up.
    """
    verb = "send" if operation.verb == "recv" else operation.verb
    n = operation.group.size if isinstance(operation, Collective) else world_size
    if curve is None or (verb, n) not in curve.curves:
        return None
    return curve.time_s(verb, n, operation.numel * ITEMSIZE[operation.dtype])

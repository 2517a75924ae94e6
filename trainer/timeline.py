"""Where the time of a step went, on every rank: cut from the stamps of all of them.

A rank's step is a record [3 + spans + 2]: the end of the step before, the moments before and after the batch
was taken, the start of every span, the end of the last, and the end of the step; of an observed step also
the completion of each of its transfers (NaN where it was not seen). Seconds, on rank 0's clock.

At every instant the first that holds: computing; waiting for a transfer whose parties have all arrived;
waiting for a party that is late, which for a pipeline's messages is being idle; else the host's own: taking
the batch, launching, logging. A transfer runs from the last arrival to its completion.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from strategies.communication import Communication, Recv
from strategies.schedule import Schedule
from trainer.matching import Matching
from trainer.spans import COMPUTE, MEET

HEAD = 3  # what stands before the spans in a record
SPLIT = ("compute_s", "exposed_comm_s", "wait_s", "idle_s", "host_s", "data_s")  # data_s is a part of host_s

CurveTime = Callable[[Communication], float | None]


@dataclass(frozen=True)
class Observation:
    """What completions say of one rank's step; None where nothing was sent, or a completion is missing."""

    overlap: float | None
    busy_s: float | None  # in which transfers were in progress
    sending_s: float | None  # the same of those that send
    curve_s: float | None  # what the link curve gives for those


class Timeline:
    """The steps on batches of one size."""

    def __init__(self, schedules: Sequence[Schedule], norm_crosses: bool, is_pipeline: bool) -> None:
        self.matching = Matching(schedules, norm_crosses)
        self.tracks = self.matching.tracks
        self.is_pipeline = is_pipeline
        offsets = np.cumsum([0, *(len(track.spans) for track in self.tracks)])
        parties = [[offsets[r] + place for r, place in m.parties] for m in self.matching.meetings]
        widest = max(map(len, parties), default=1)
        self._parties = np.array([[*own, *own[:1] * (widest - len(own))] for own in parties], dtype=np.int64)
        # A stage that is done idles until the others are, be it for a message or for their part of the norm.
        idles = [meeting.is_message or meeting.operation is None for meeting in self.matching.meetings]
        messages = np.array(idles, dtype=bool)
        self._waits = [np.array(track.waits, dtype=np.int64).reshape(-1, 2) for track in self.tracks]
        self._idles = [messages[own[:, 1]] & is_pipeline for own in self._waits]
        self._starts = [
            np.array([s for s in track.starts if track.kinds[s[0]] != MEET], dtype=np.int64).reshape(-1, 2)
            for track in self.tracks
        ]

    def length(self, rank: int, observed: bool) -> int:
        """Numbers in a record of `rank`."""
        return HEAD + len(self.tracks[rank].spans) + 2 + (len(self._starts[rank]) if observed else 0)

    def marks(self, rank: int, record: np.ndarray) -> np.ndarray:
        """[..., spans + 1]: the start of each span and the end of the last."""
        return record[..., HEAD : HEAD + len(self.tracks[rank].spans) + 1]

    def step_end(self, rank: int, record: np.ndarray) -> np.ndarray:
        end: np.ndarray = record[..., HEAD + len(self.tracks[rank].spans) + 1]
        return end

    def completions(self, rank: int, record: np.ndarray) -> np.ndarray:
        """[..., transfers] of an observed step."""
        return record[..., HEAD + len(self.tracks[rank].spans) + 2 :]

    def arrivals(self, records: Sequence[np.ndarray]) -> np.ndarray:
        """[..., meetings]: when the last party came, from the records [..., numbers] of all ranks."""
        if not len(self._parties):
            return np.empty((*records[0].shape[:-1], 0))
        starts = np.concatenate(
            [self.marks(rank, record)[..., :-1] for rank, record in enumerate(records)], axis=-1
        )
        latest: np.ndarray = starts[..., self._parties].max(axis=-1)
        return latest

    def splits(self, records: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        """Of steps [steps, numbers] of all ranks: `SPLIT`, each [steps, ranks]; all but data_s add up."""
        arrivals = self.arrivals(records)
        parts: dict[str, list[np.ndarray]] = {key: [] for key in SPLIT}
        for rank, record in enumerate(records):
            marks = self.marks(rank, record)
            spent = np.diff(marks, axis=-1)
            waits = self._waits[rank]
            begin, taken = marks[:, waits[:, 0]], spent[:, waits[:, 0]]
            late = np.clip(arrivals[:, waits[:, 1]] - begin, 0.0, taken)
            compute = spent[:, self.tracks[rank].kinds == COMPUTE].sum(axis=-1)
            exposed = (taken - late).sum(axis=-1)
            idle = late[:, self._idles[rank]].sum(axis=-1)
            waiting = late.sum(axis=-1) - idle
            step = self.step_end(rank, record) - record[:, 0]
            own = (compute, exposed, waiting, idle, step - compute - exposed - waiting - idle)
            for key, values in zip(SPLIT, (*own, record[:, 2] - record[:, 1]), strict=True):
                parts[key].append(values)
        return {key: np.stack(values, axis=-1) for key, values in parts.items()}

    def observe(
        self, rank: int, record: np.ndarray, arrivals: np.ndarray, curve_time: CurveTime | None
    ) -> Observation:
        """What one observed step [numbers] of `rank` shows; `arrivals` [meetings] are those of that step."""
        starts = self._starts[rank]
        if not len(starts):
            return Observation(None, None, None, None)
        begin = arrivals[starts[:, 1]]
        end = self.ends(rank, record)
        if np.isnan(end).any():
            return Observation(None, None, None, None)
        end = np.maximum(begin, end)
        marks = self.marks(rank, record)
        spent = np.where(self.tracks[rank].kinds == COMPUTE, np.diff(marks), 0.0)
        computed = np.concatenate([[0.0], np.cumsum(spent)])
        hidden = float((np.interp(end, marks, computed) - np.interp(begin, marks, computed)).sum())
        total = float((end - begin).sum())
        operations = [self.tracks[rank].spans[place].operation for place in starts[:, 0]]
        sends = np.array([not isinstance(operation, Recv) for operation in operations])
        curve: float | None = None
        if curve_time is not None:
            times = [curve_time(op) for op, sent in zip(operations, sends, strict=True) if sent]  # type: ignore[arg-type]
            curve = None if None in times else float(sum(times))  # type: ignore[arg-type]
        return Observation(
            hidden / total if total > 0 else None,
            union_s(begin, end),
            union_s(begin[sends], end[sends]),
            curve,
        )

    def idles(self, rank: int) -> dict[int, bool]:
        """Of each span that waits: whether waiting for a late party is being idle."""
        return dict(zip(self._waits[rank][:, 0].tolist(), self._idles[rank].tolist(), strict=True))

    def ends(self, rank: int, record: np.ndarray) -> np.ndarray:
        """Completions of the rank's transfers, each with the end of its wait at the latest."""
        seen = self.completions(rank, record)
        marks, track = self.marks(rank, record), self.tracks[rank]
        waited = {number: marks[place + 1] for place, number in track.waits}
        limits = np.array([waited[number] for _, number in self._starts[rank]])
        ends: np.ndarray = np.minimum(seen, limits)  # NaN stays
        return ends


def union_s(begin: np.ndarray, end: np.ndarray) -> float:
    """Seconds that lie in at least one of the intervals."""
    order = np.argsort(begin)
    begin, end = begin[order], end[order]
    covered = np.concatenate([[-np.inf], np.maximum.accumulate(end)[:-1]])
    return float((end - np.maximum(begin, covered)).clip(min=0.0).sum())

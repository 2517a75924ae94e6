"""How long transfers had their channel to themselves: from the stamps of ordinary and of observed steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trainer.history import History, Kept, stacked
from trainer.spans import LAUNCH, MEET, WAIT
from trainer.timeline import Timeline

WAITED = 4.0  # times the shortest wait, or what a transfer takes in observed steps


def service_times(timeline: Timeline, steps: Sequence[Kept], history: History) -> np.ndarray:
    """[steps, meetings]: seconds from the last arrival, or the channel's becoming free, to completion.

    Where a rank had to wait, its wait ended with the transfer. Where none had to, or the wait began when the
    transfer must have been complete, what observed steps took on average is nearer to the truth.
    """
    count = len(timeline.matching.meetings)
    seen = np.full(count, np.nan)
    if history.observed.steps and count:
        stamped = _stamps(timeline, history.observed.steps)
        took = _between(timeline, history.observed.steps, stamped)
        known = (~np.isnan(took)).sum(axis=0)
        seen = np.where(known > 0, np.nansum(took, axis=0) / np.maximum(known, 1), np.nan)
    ended, begun = _waits(timeline, steps)
    arrivals = _arrivals(timeline, steps)
    free: dict[object, np.ndarray] = {}
    services = np.zeros(arrivals.shape)
    for number, meeting in enumerate(timeline.matching.meetings):  # in order within a channel
        start = np.maximum(arrivals[:, number], free.get(meeting.channel, -np.inf))
        waited = np.maximum(ended[:, number] - start, 0.0)
        if not np.isnan(seen[number]):
            late = ~(begun[:, number] - start <= WAITED * seen[number])  # also where nobody had to wait
            waited = np.where(late, np.minimum(waited, seen[number]), waited)
        services[:, number] = waited
        free[meeting.channel] = start + waited
    return services


def _waits(timeline: Timeline, steps: Sequence[Kept]) -> tuple[np.ndarray, np.ndarray]:
    """[steps, meetings]: when the waits of those that had to wait ended, and the first of them began.

    Who begins to wait when another's wait is over did not have to. Where none had to, the end of the first
    wait, and NaN.
    """
    shape = (len(steps), len(timeline.matching.meetings))
    first = np.full(shape, np.inf)
    waits = []
    for rank, track in enumerate(timeline.tracks):
        if not track.waits:
            continue
        record = stacked(steps, rank, timeline.length(rank, False))
        marks = timeline.marks(rank, record)
        places, numbers = np.array(track.waits).T  # a rank waits once for each
        begin, end = marks[:, places], marks[:, places + 1]
        first[:, numbers] = np.minimum(first[:, numbers], end)
        waits.append((numbers, begin, end, WAITED * shortest_wait_s(timeline, rank, record)))
    total, count, begun = np.zeros(shape), np.zeros(shape), np.full(shape, np.nan)
    for numbers, begin, end, complete_s in waits:
        had_to = (end - begin > complete_s) & (begin < first[:, numbers])
        total[:, numbers] += np.where(had_to, end, 0.0)
        count[:, numbers] += had_to
        begun[:, numbers] = np.fmin(begun[:, numbers], np.where(had_to, begin, np.nan))
    return np.where(count > 0, total / np.maximum(count, 1), first), begun


def _stamps(timeline: Timeline, steps: Sequence[Kept]) -> np.ndarray:
    """[steps, meetings]: completions of observed steps, mean of the parties; NaN where none was seen."""
    found: list[list[np.ndarray]] = [[] for _ in timeline.matching.meetings]
    for rank, track in enumerate(timeline.tracks):
        ends = np.stack([timeline.ends(rank, kept.recorded.records[rank]) for kept in steps])
        starts = [own for own in track.starts if track.kinds[own[0]] != MEET]
        for k, (_, number) in enumerate(starts):
            found[number].append(ends[:, k])
    nothing = np.full(len(steps), np.nan)
    return np.stack([np.mean(own, axis=0) if own else nothing for own in found], axis=1)


def _between(timeline: Timeline, steps: Sequence[Kept], completed: np.ndarray) -> np.ndarray:
    """[steps, meetings]: what each had the channel for, by when it was complete."""
    arrivals = _arrivals(timeline, steps)
    free: dict[object, np.ndarray] = {}
    services = np.zeros(arrivals.shape)
    for number, meeting in enumerate(timeline.matching.meetings):
        begin = np.maximum(arrivals[:, number], free.get(meeting.channel, -np.inf))
        services[:, number] = np.maximum(completed[:, number] - begin, 0.0)
        free[meeting.channel] = np.fmax(completed[:, number], begin)
    return services


def _arrivals(timeline: Timeline, steps: Sequence[Kept]) -> np.ndarray:
    ranks = range(len(timeline.tracks))
    return timeline.arrivals([stacked(steps, rank, timeline.length(rank, False)) for rank in ranks])


def shortest_wait_s(timeline: Timeline, rank: int, record: np.ndarray) -> float:
    """What a wait takes whose transfer is complete: no longer than the shortest, nor than starting one."""
    kinds = timeline.tracks[rank].kinds
    spent = np.diff(timeline.marks(rank, record), axis=-1)[:, (kinds == WAIT) | (kinds == LAUNCH)]
    return float(spent.min()) if spent.size else 0.0

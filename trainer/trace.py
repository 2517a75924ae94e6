"""trace.json: two steps of a run in the trace event format, which Perfetto and chrome://tracing open.

A process for each rank; its lanes are what its thread does, and the transfers, each from
its last arrival to its completion. Transfers that overlap have lanes of their own: within one
lane the format has events that nest, and Perfetto drops one that only overlaps.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from collectives.traffic import ITEMSIZE, Algorithms
from strategies.communication import Communication, Recv
from strategies.compute import LayerOperation
from strategies.values import Operation
from trainer.files import write_atomically
from trainer.history import Kept
from trainer.spans import COMPUTE, LAUNCH, MEET, Span
from trainer.timeline import Timeline

FILE = "trace.json"
COMPUTE_LANE, COMMUNICATION_LANE = 0, 1
MICRO = 1e6

Event = dict[str, Any]


def write_trace(
    timeline: Timeline,
    steps: Sequence[Kept],
    run_dir: Path,
    clock_error_s: float,
    algorithms: Algorithms,
) -> None:
    """Write the steps, all on batches of one size; nothing where there are none.

    `algorithms` are those of the run's task.
    """
    if not steps:
        return
    origin = min(float(record[0]) for kept in steps for record in kept.recorded.records)
    events: list[Event] = []
    for kept in steps:
        events += _step_events(timeline, kept, origin, algorithms)
    trace = {
        "traceEvents": [*_names(events, len(timeline.tracks)), *events],
        "displayTimeUnit": "ms",
        "otherData": {
            "steps": [kept.step for kept in steps],
            "clock": f"rank 0's; those of other ranks are aligned to within {clock_error_s * 1e6:.0f} us",
        },
    }
    write_atomically(run_dir / FILE, json.dumps(trace, separators=(",", ":")))


def _names(events: Sequence[Event], ranks: int) -> Iterator[Event]:
    for rank in range(ranks):
        yield {"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}}
        yield {"ph": "M", "name": "process_sort_index", "pid": rank, "tid": 0, "args": {"sort_index": rank}}
        last = max((own["tid"] for own in events if own["pid"] == rank), default=COMMUNICATION_LANE)
        for lane in range(max(last, COMMUNICATION_LANE) + 1):
            name = "compute" if lane == COMPUTE_LANE else "communication"
            if lane > COMMUNICATION_LANE:
                name += f" {lane}"
            yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": lane, "args": {"name": name}}
            sort = {"sort_index": lane}
            yield {"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": lane, "args": sort}


def _step_events(timeline: Timeline, kept: Kept, origin: float, algorithms: Algorithms) -> Iterator[Event]:
    arrivals = timeline.arrivals(kept.recorded.records)
    for rank, record in enumerate(kept.recorded.records):
        track, marks = timeline.tracks[rank], timeline.marks(rank, record)
        meetings = dict(track.waits)
        idles = timeline.idles(rank)

        def event(
            name: str, kind: str, start: float, stop: float, lane: int = COMPUTE_LANE, **args: Any
        ) -> Event:
            return {
                "ph": "X",
                "name": name,
                "cat": kind,
                "pid": rank,  # noqa: B023  events are made within the turn
                "tid": lane,
                "ts": round((start - origin) * MICRO, 3),
                "dur": round(max(0.0, stop - start) * MICRO, 3),
                "args": {"step": kept.step, **args},
            }

        begin, asked, taken = record[0], record[1], record[2]
        yield event("logging and control", "host", begin, asked)
        yield event("waiting for data", "data", asked, taken)
        yield event("filling buffers", "host", taken, marks[0])
        for place, span in enumerate(track.spans):
            start, stop = float(marks[place]), float(marks[place + 1])
            args = arguments(span, algorithms)
            if span.kind == COMPUTE:
                yield event(span.operation.identity, "compute", start, stop, **args)
            elif span.kind == LAUNCH:
                yield event(f"start {span.operation.identity}", "launch", start, stop, **args)
            else:
                arrived = min(max(float(arrivals[meetings[place]]), start), stop)
                late = "idle" if idles[place] else "wait"
                name = span.operation.identity
                if arrived > start:
                    yield event(name, late, start, arrived, **args)
                if stop > arrived:
                    yield event(name, "exposed", arrived, stop, **args)
        yield event("logging and control", "host", marks[-1], float(timeline.step_end(rank, record)))
        if kept.recorded.observed:
            for place, start, stop, lane in _transfers(timeline, rank, record, arrivals):
                span = track.spans[place]
                yield event(
                    span.operation.identity, "transfer", start, stop, lane, **arguments(span, algorithms)
                )


def _transfers(
    timeline: Timeline, rank: int, record: np.ndarray, arrivals: np.ndarray
) -> Iterator[tuple[int, float, float, int]]:
    """(place of the span that starts it, start, stop, lane) of each of the rank's transfers."""
    track = timeline.tracks[rank]
    starts = [own for own in track.starts if track.kinds[own[0]] != MEET]
    found = []
    for (place, number), stop in zip(starts, timeline.ends(rank, record), strict=True):
        if not np.isnan(stop) and not isinstance(track.spans[place].operation, Recv):  # the sender draws it
            start = float(arrivals[number])
            found.append((start, max(start, float(stop)), place))
    free = [0.0]  # when each lane is
    for start, stop, place in sorted(found):
        lane = next((k for k, until in enumerate(free) if until <= start), len(free))
        free[lane:] = [stop, *free[lane + 1 :]]
        yield place, start, stop, COMMUNICATION_LANE + lane


def arguments(span: Span, algorithms: Algorithms) -> dict[str, Any]:
    """What a reader of the trace is told of a span."""
    operation: Operation = span.operation
    found: dict[str, Any] = {"what": what(operation)}
    if isinstance(operation, LayerOperation):
        found |= {"layer": operation.layer.index, "microbatch": operation.microbatch}
    if isinstance(operation, Communication):
        group = getattr(operation, "group", None)
        found |= {
            "bytes": operation.numel * ITEMSIZE[operation.dtype],
            "operation": operation.verb,
            "algorithm": getattr(algorithms, operation.verb, "direct"),  # a message to one peer has no other
            "group": "pair" if group is None else group.name,
            "ranks": 2 if group is None else group.size,
        }
        if operation.value.kind not in ("weight gradient", "parameter"):
            found["microbatch"] = operation.value.place
    return found


def what(operation: Operation) -> str:
    """The kind of operation, in the words of its identity."""
    if isinstance(operation, Communication):
        return operation.label
    text = operation.identity
    return text.rsplit(", ", 1)[-1] if isinstance(operation, LayerOperation) else text.split(" of ")[0]

"""The last whole step of a trace.json (Chrome's trace event format), as bars in lanes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

COMMUNICATION = 1  # tid of a rank's transfers, and above it those that overlap; tid 0 is its main thread
MOST_BARS = 6000  # a browser still zooms smoothly


@dataclass(frozen=True)
class Bar:
    """One operation, or a run of `count` short ones; times in seconds from the step's first instant."""

    rank: int
    lane: int  # 0 the main thread, 1 all transfers
    name: str
    kind: str  # compute, launch, exposed, wait, idle, host, data, transfer
    what: str | None  # forward, dX, dW, loss, update, ...
    start_s: float
    duration_s: float
    microbatch: int | None = None
    bytes: int | None = None
    algorithm: str | None = None
    group: str | None = None
    count: int = 1

    @property
    def end_s(self) -> float:
        return self.start_s + self.duration_s


@dataclass(frozen=True)
class StepTrace:
    """Bars of one step, by rank, lane and start."""

    step: int
    ranks: tuple[int, ...]
    bars: tuple[Bar, ...]
    clock: str | None

    @property
    def span_s(self) -> float:
        return max(bar.end_s for bar in self.bars)

    def transfers(self) -> list[Bar]:
        """Messages whose size is on record."""
        return [bar for bar in self.bars if bar.kind == "transfer" and bar.bytes and bar.duration_s > 0]


def read_trace(document: Mapping[str, Any]) -> StepTrace | None:
    """The last step in which every rank of the trace has operations; None when there is none."""
    steps: dict[int, list[Mapping[str, Any]]] = {}
    ranks: set[int] = set()
    events = document.get("traceEvents")
    for event in events if isinstance(events, list) else []:
        if not isinstance(event, dict) or type(event.get("pid")) is not int:
            continue
        if event.get("ph") == "M":
            ranks.add(event["pid"])
        elif _is_operation(event):
            ranks.add(event["pid"])
            steps.setdefault(event["args"]["step"], []).append(event)
    other = document.get("otherData")
    other = other if isinstance(other, dict) else {}
    recorded, clock = other.get("steps"), other.get("clock")
    whole = recorded if isinstance(recorded, list) and recorded else list(steps)
    for step in sorted((step for step in steps if step in whole), reverse=True):
        own = steps[step]
        if {event["pid"] for event in own} == ranks:
            first = min(event["ts"] for event in own)
            bars = sorted(
                (_bar(event, first) for event in own), key=lambda bar: (bar.rank, bar.lane, bar.start_s)
            )
            named = clock if isinstance(clock, str) else None
            return StepTrace(step, tuple(sorted(ranks)), tuple(bars), named)
    return None


def _is_operation(event: Mapping[str, Any]) -> bool:
    """A complete event that names its step."""
    args = event.get("args")
    return (
        event.get("ph") == "X"
        and isinstance(args, dict)
        and type(args.get("step")) is int
        and isinstance(event.get("cat"), str)
        and _is_time(event.get("ts"))
        and _is_time(event.get("dur"))
    )


def _bar(event: Mapping[str, Any], first: float) -> Bar:
    """`first` is the step's first instant, in microseconds as all of the file."""
    args = event["args"]
    microbatch, size, lane = args.get("microbatch"), args.get("bytes"), event.get("tid")
    return Bar(
        rank=event["pid"],
        lane=COMMUNICATION if type(lane) is int and lane >= COMMUNICATION else 0,
        name=str(event.get("name", "")),
        kind=event["cat"],
        what=_text(args.get("what")),
        start_s=(event["ts"] - first) / 1e6,
        duration_s=max(0.0, event["dur"] / 1e6),
        microbatch=microbatch if type(microbatch) is int else None,
        bytes=size if type(size) is int else None,
        algorithm=_text(args.get("algorithm")),
        group=_text(args.get("group")),
    )


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def thinned(bars: Iterable[Bar], span_s: float, most: int = MOST_BARS) -> tuple[list[Bar], float]:
    """At most about `most` bars, and the seconds below which bars of a kind were drawn as one.

    A bar that would be narrower than a pixel says nothing by itself. Seconds are 0 where all are drawn.
    """
    every = list(bars)
    found, window_s = every, 0.0
    while len(found) > most and window_s < span_s:
        window_s = 2 * window_s or span_s / 4096
        found = _merged(every, window_s)
    return found, window_s


def _merged(bars: list[Bar], window_s: float) -> list[Bar]:
    """Bars shorter than a window, joined by kind within each window of their lane.

    They stand one after the other from the first one's start, so that what is drawn of a kind is still the
    time that it took, and nothing lies over anything else but transfers that overlapped.
    """
    merged: list[Bar] = []
    windows: dict[tuple[int, int, int], dict[tuple[str, str | None], Bar]] = {}
    for bar in bars:
        if bar.duration_s >= window_s:
            merged.append(bar)
            continue
        kinds = windows.setdefault((bar.rank, bar.lane, int(bar.start_s / window_s)), {})
        last = kinds.get((bar.kind, bar.what))
        kinds[bar.kind, bar.what] = bar if last is None else _joined(last, bar)
    for kinds in windows.values():
        start_s = min(bar.start_s for bar in kinds.values())
        for bar in kinds.values():
            merged.append(replace(bar, start_s=start_s))
            start_s += bar.duration_s
    return sorted(merged, key=lambda bar: (bar.rank, bar.lane, bar.start_s))


def _joined(first: Bar, second: Bar) -> Bar:
    return replace(
        first,
        duration_s=first.duration_s + second.duration_s,
        microbatch=first.microbatch if first.microbatch == second.microbatch else None,
        bytes=(first.bytes or 0) + (second.bytes or 0) or None,
        count=first.count + second.count,
    )

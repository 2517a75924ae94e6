"""The link curve: how long an operation of a given size takes here, measured, by operation and group size.

Between measured sizes time is interpolated linearly in log(time) over log(size). A line through two points (a
latency and a bandwidth) is wrong by up to a quarter in between, where training's messages are. Below the
smallest measured size an operation takes as long as that one, above the largest it keeps its bandwidth.

Sizes are nccl-tests' S: the full tensor for all_gather, reduce_scatter, scatter and gather, a rank's own for
the others; `send` is one message from a rank to another, half a round trip.
"""

from __future__ import annotations

import bisect
import json
import math
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from collectives.bench import bus_factor

SCHEMA = 1


@dataclass(frozen=True)
class Point:
    """Seconds that one call takes: the slowest rank's, median and quartiles over `samples`.

    `cpu_s` is what it takes of a rank's processors, all threads together, and `launch_s` the part of the call
    that returns before the operation is complete: medians, of the rank with most.
    """

    size_bytes: int
    algorithm: str
    time_s: float
    q1_s: float
    q3_s: float
    samples: int
    cpu_s: float | None = None
    launch_s: float | None = None


@dataclass(frozen=True)
class Curve:
    """One operation on one group size, sizes ascending."""

    operation: str
    group_size: int
    points: tuple[Point, ...]

    def time_s(self, size_bytes: float) -> float:
        """Seconds for `size_bytes`, interpolated as the module says; 0 bytes take none."""
        if size_bytes <= 0:
            return 0.0
        points = self.points
        first, last = points[0], points[-1]
        if size_bytes <= first.size_bytes:
            return first.time_s
        if size_bytes >= last.size_bytes:
            return last.time_s * size_bytes / last.size_bytes
        k = bisect.bisect_right([point.size_bytes for point in points], size_bytes)
        low, high = points[k - 1], points[k]
        share = math.log(size_bytes / low.size_bytes) / math.log(high.size_bytes / low.size_bytes)
        return low.time_s * (high.time_s / low.time_s) ** share

    def cpu_share(self, size_bytes: float) -> float | None:
        """Seconds of a processor in a second of the call, of the nearest size measured; None if unknown."""
        nearest = self._nearest(size_bytes)
        return None if nearest.cpu_s is None else nearest.cpu_s / nearest.time_s

    def launch_s(self, size_bytes: float) -> float | None:
        """Seconds of the call that starts it, of the nearest size measured; None if unknown."""
        return self._nearest(size_bytes).launch_s

    def _nearest(self, size_bytes: float) -> Point:
        return min(self.points, key=lambda point: abs(math.log(point.size_bytes / max(1.0, size_bytes))))

    @property
    def latency_s(self) -> float:
        """Seconds of the smallest message measured."""
        return self.points[0].time_s

    @property
    def bandwidth_GBps(self) -> float:
        """The highest bus bandwidth measured (nccl-tests' busbw), decimal GB/s per direction."""
        factor = 1.0 if self.operation == "send" else bus_factor(self.operation, self.group_size) or 0.0
        return max(point.size_bytes * factor / point.time_s / 1e9 for point in self.points)


class LinkCurve:
    """Curves by (operation, group size), and where they were measured."""

    def __init__(self, curves: Iterable[Curve], measured: dict[str, Any]) -> None:
        self.curves = {(curve.operation, curve.group_size): curve for curve in curves}
        self.measured = measured

    def curve(self, operation: str, group_size: int) -> Curve:
        """
        Raises:
            ValueError: not measured; names what was.
        """
        found = self.curves.get((operation, group_size))
        if found is None:
            known = ", ".join(f"{name} on {n}" for name, n in sorted(self.curves)) or "nothing"
            raise ValueError(f"the link curve has no {operation} on {group_size} ranks; it has {known}")
        return found

    def time_s(self, operation: str, group_size: int, size_bytes: float) -> float:
        """Seconds of one call, by interpolation; 0 on one rank."""
        return 0.0 if group_size == 1 else self.curve(operation, group_size).time_s(size_bytes)

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "measured": self.measured,
            "curves": [
                {**asdict(curve), "points": [asdict(point) for point in curve.points]}
                for curve in self.curves.values()
            ],
        }

    def save(self, path: Path) -> None:
        """Whole or not at all."""
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        partial.write_text(json.dumps(self.to_json(), indent=1) + "\n", encoding="utf-8")
        partial.replace(path)


def load(path: Path) -> LinkCurve:
    """
    Raises:
        ValueError: no such file, or one that is no link curve, or holds a number that cannot be.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}); name a link_curve.json") from error
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); name a link_curve.json that is whole") from error
    if not isinstance(data, dict) or "curves" not in data:
        raise ValueError(f"{path} is no link curve: it has no curves")
    if data.get("schema") != SCHEMA:
        raise ValueError(f"{path} has schema {data.get('schema')} and must have {SCHEMA}; measure it anew")
    if not isinstance(data["curves"], list) or not isinstance(data.get("measured"), dict):
        raise ValueError(f"{path} is no link curve: curves must be a list, and measured a mapping")
    try:
        curves = [_curve(entry) for entry in data["curves"]]
        names = [(curve.operation, curve.group_size) for curve in curves]
        if len(set(names)) < len(names):
            raise ValueError("an operation stands there twice for one group size")
        return LinkCurve(curves, data["measured"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is no link curve: {error} is missing or of a wrong kind") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _curve(entry: dict[str, Any]) -> Curve:
    points = tuple(Point(**point) for point in entry["points"])
    name = f"{entry['operation']} on {entry['group_size']} ranks"
    if not points:
        raise ValueError(f"{name} has no points")
    if type(entry["group_size"]) is not int or entry["group_size"] < 2:
        raise ValueError(f"group_size={entry['group_size']} must be a whole number of at least 2")
    sizes = [point.size_bytes for point in points]
    if any(type(size) is not int or size <= 0 for size in sizes) or sizes != sorted(set(sizes)):
        raise ValueError(f"{name}: sizes must ascend from above 0, not {sizes}")
    for point in points:
        times = (point.time_s, point.q1_s, point.q3_s)
        if not all(type(value) in (int, float) and math.isfinite(value) and value > 0 for value in times):
            raise ValueError(f"{name}: the times of {point.size_bytes} bytes must be above 0, not {times}")
        if not point.q1_s <= point.time_s <= point.q3_s:
            raise ValueError(
                f"{name}: the times of {point.size_bytes} bytes must be quartiles in order, not {times}"
            )
        if type(point.samples) is not int or point.samples < 1 or type(point.algorithm) is not str:
            raise ValueError(
                f"{name}: {point.size_bytes} bytes have samples={point.samples} and algorithm="
                f"{point.algorithm}, and must have a number above 0 and a name"
            )
    return Curve(str(entry["operation"]), int(entry["group_size"]), points)

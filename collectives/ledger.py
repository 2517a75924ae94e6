"""What really ran: every communication, with its bytes, as it starts. Everything measured is read from it.

Identities and labels are opaque strings: this layer does not know what they name above it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Entry:
    """One communication operation of a program, registered before the first step."""

    identity: str
    label: str  # the row of the byte table it adds to
    group: str
    algorithm: str
    shape: tuple[int, ...] = ()
    received_bytes: int = 0  # of one call
    least_bytes: int = 0  # what any algorithm must send in one call
    between_bytes: int | None = 0  # what one call sends to other nodes; None is not known


class Ledger:
    """Counts of one rank over the run, by registered operation; a step is a difference of `total_bytes`.

    `between_bytes` is the part of it that went to other nodes, NaN once an operation ran of which that is not
    known.
    """

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.bytes_sent: list[int] = []
        self.calls: list[int] = []
        self.total_bytes = 0
        self.between_bytes = 0.0
        self._between: list[float] = []

    def register(self, entry: Entry) -> int:
        """A number under which `record` counts this operation."""
        self.entries.append(entry)
        self.bytes_sent.append(0)
        self.calls.append(0)
        self._between.append(math.nan if entry.between_bytes is None else entry.between_bytes)
        return len(self.entries) - 1

    def record(self, number: int, sent: int) -> None:
        """The operation started and sends `sent` bytes."""
        self.bytes_sent[number] += sent
        self.calls[number] += 1
        self.total_bytes += sent
        self.between_bytes += self._between[number]

    def by_operation(self) -> list[dict[str, Any]]:
        """A row for each label, shape and algorithm: calls, bytes sent and received so far."""
        rows: dict[tuple[object, ...], dict[str, Any]] = {}
        for entry, calls, sent in zip(self.entries, self.calls, self.bytes_sent, strict=True):
            if not calls:
                continue
            key = {
                "operation": entry.label,
                "shape": " x ".join(map(str, entry.shape)),
                "algorithm": entry.algorithm,
                "group": entry.group,
            }
            row = rows.setdefault(
                tuple(key.values()),
                {**key, "calls": 0, "bytes_sent": 0, "bytes_received": 0, "bytes_least": 0},
            )
            row["calls"] += calls
            row["bytes_sent"] += sent
            row["bytes_received"] += calls * entry.received_bytes
            row["bytes_least"] += calls * entry.least_bytes
        return list(rows.values())

    def by_label(self) -> dict[str, tuple[int, int]]:
        """label -> (calls, bytes sent) so far; labels that did not run are left out."""
        table: dict[str, tuple[int, int]] = {}
        for entry, calls, sent in zip(self.entries, self.calls, self.bytes_sent, strict=True):
            if calls:
                before = table.get(entry.label, (0, 0))
                table[entry.label] = (before[0] + calls, before[1] + sent)
        return table

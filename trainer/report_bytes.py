"""Bytes four ways: least, predicted, sent, and on the wire without framing; by rank and by operation."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from trainer.report import Row, Run, entries, number, present, ranks_of
from trainer.report_text import NONE, Markup, escape, folded, plain, table

COLUMNS = ("bytes_least", "bytes_predicted", "bytes_sent", "bytes_received")


@dataclass(frozen=True)
class FourCounts:
    """Of one rank, mean bytes a step; None where it was not counted.

    `wire` is the rank's entry of summary.json's list: sent, framing and wire over the same steps.
    """

    rank: int
    per_step: dict[str, float | None]
    wire: dict[str, Any]

    @property
    def wire_over_sent(self) -> float | None:
        """(wire - framing) / sent over the same steps."""
        sent, net = number(self.wire.get("bytes_sent")), net_wire(self.wire)
        return net / sent if sent and net is not None else None


def four_counts(run: Run) -> list[FourCounts]:
    """By rank; empty where no rank has a count.

    Least, predicted and sent come from the table of operations over all steps, wire from the steps at which
    it was read.
    """
    operations = entries(run.summary.get("bytes_by_operation"))
    wires = {entry["rank"]: entry for entry in entries(run.summary.get("wire")) if _has_rank(entry)}
    steps = number(run.summary.get("steps"))
    found = []
    for rank in sorted({entry["rank"] for entry in operations if _has_rank(entry)} | wires.keys()):
        own = [entry for entry in operations if entry.get("rank") == rank]
        wire = wires.get(rank, {})
        per_step: dict[str, float | None] = {}
        for name in ("least", "predicted", "sent"):
            total = column_sum(own, f"bytes_{name}")
            per_step[name] = total / steps if steps and total is not None else None
        net, wire_steps = net_wire(wire), number(wire.get("steps"))
        per_step["wire less framing"] = net / wire_steps if wire_steps and net is not None else None
        found.append(FourCounts(rank, per_step, wire))
    return found if any(value is not None for one in found for value in one.per_step.values()) else []


def net_wire(wire: dict[str, Any]) -> float | None:
    """Bytes on the wire less the framing of the backend; None where either is unknown."""
    total, framing = number(wire.get("bytes_wire")), number(wire.get("bytes_framing"))
    return None if total is None or framing is None else total - framing


def wire_readings(rows: Iterable[Row]) -> list[float]:
    """Bytes on the wire a step, with framing, of each reading: one covers its row's `wire_steps` steps."""
    readings = [(number(row.get("bytes_wire")), number(row.get("wire_steps"))) for row in rows]
    return [sent / steps for sent, steps in readings if sent is not None and steps]


def column_sum(rows: list[dict[str, Any]], key: str) -> float | None:
    """Sum of a column; None where a row lacks it, since a sum of some would pass for one of all."""
    values = present(row.get(key) for row in rows)
    return sum(values) if values and len(values) == len(rows) else None


def counts_table(counts: list[FourCounts]) -> Markup:
    """Mean bytes a step by rank, and what the wire had over the counted bytes of the same steps."""
    rows = [
        (
            one.rank,
            *(_rounded(value) for value in one.per_step.values()),
            plain(number(one.wire.get("bytes_framing"))),
            plain(number(one.wire.get("steps"))),
            NONE if one.wire_over_sent is None else f"{100 * (one.wire_over_sent - 1):+.3f} %",
        )
        for one in counts
    ]
    headings = (
        "rank",
        *counts[0].per_step,
        "framing, total",
        "steps on the wire",
        "differs from sent by",
    )
    return table(headings, rows, numbers=range(len(headings)))


def operations_tables(run: Run) -> Markup:
    """Every operation of the rank that sends most, with its sum; the other ranks folded away."""
    operations = [entry for entry in entries(run.summary.get("bytes_by_operation")) if _has_rank(entry)]
    ranks = sorted({entry["rank"] for entry in operations})
    if not ranks:
        return Markup("")
    headline = headline_rank(run, ranks)
    parts = [_heading(headline), _operations(operations, headline), sum_check(run, operations, headline)]
    others = [rank for rank in ranks if rank != headline]
    if others:
        body = "".join(_heading(rank) + _operations(operations, rank) for rank in others)
        parts.append(folded(f"The other ranks ({len(others)})", Markup(body)))
    return Markup("".join(parts))


def headline_rank(run: Run, ranks: list[int]) -> int:
    """The rank whose bytes stand in a row's headline: that which sends most, the lowest on ties."""
    known = run.summary.get("headline_rank")
    if known in ranks and type(known) is int:
        return known
    operations = entries(run.summary.get("bytes_by_operation"))

    def sent(rank: int) -> float:
        own = [entry for entry in operations if entry.get("rank") == rank]
        return column_sum(own, "bytes_sent") or 0

    return min(ranks, key=lambda rank: (-sent(rank), rank))


def sum_of_rows(run: Run, rank: int) -> float | None:
    """Bytes that the rows of metrics.jsonl say the rank sent; None unless every row says it."""
    if not run.rows or number(run.summary.get("steps")) != len(run.rows):
        return None
    key = f"rank/{rank}/bytes_sent" if ranks_of(run.rows[-1]) else "bytes_sent"
    return column_sum(run.rows, key)


def sum_check(run: Run, operations: list[dict[str, Any]], rank: int) -> Markup:
    """Whether the table's sum is that of the rows."""
    total = column_sum([entry for entry in operations if entry["rank"] == rank], "bytes_sent")
    rows = sum_of_rows(run, rank)
    if total is None or rows is None:
        text = "The sum cannot be compared with metrics.jsonl, which lacks rows or bytes of this rank."
    elif total == rows:
        text = (
            f"The bytes sent add up to those of all {len(run.rows)} rows of metrics.jsonl: {plain(rows)} B."
        )
    else:
        text = (
            f"The bytes sent add up to {plain(total)} B, but the {len(run.rows)} rows of metrics.jsonl to "
            f"{plain(rows)} B: they differ by {plain(total - rows)} B."
        )
    return Markup(f'<p class="note">{escape(text)}</p>\n')


def _heading(rank: int) -> Markup:
    return Markup(f"<h3>Operations of rank {rank}, all steps</h3>\n")


def _operations(operations: list[dict[str, Any]], rank: int) -> Markup:
    own = [entry for entry in operations if entry["rank"] == rank]
    columns = [key for key in COLUMNS if any(number(entry.get(key)) is not None for entry in own)]
    shaped = any(entry.get("shape") for entry in own)
    words = ("operation", "shape") if shaped else ("operation",)
    headings = (*words, "calls", *(key.removeprefix("bytes_") + " (B)" for key in columns))
    keys = ("calls", *columns)
    rows = [
        (
            *(entry.get(word) or NONE for word in words),
            *(plain(number(entry.get(key))) for key in keys),
        )
        for entry in own
    ]
    total = ("sum", *("" for _ in words[1:]), *(plain(column_sum(own, key)) for key in keys))
    return table(headings, rows, numbers=range(len(words), len(headings)), total=total)


def _rounded(value: float | None) -> str:
    return NONE if value is None else f"{value:,.0f}"


def _has_rank(entry: dict[str, Any]) -> bool:
    return type(entry.get("rank")) is int

"""A bench put on paper: a table for a person, bench.json, bench.csv and bench.md."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from trainer.bench_rows import AGAINST_KEYS, CASE_KEYS, MEASURED_KEYS, Row, flat, measurements, totals
from trainer.files import as_record, write_atomically

# heading, unit, width; nccl-tests' columns first, in its order
_CASE = (("size", "B", 13), ("count", "elements", 12), ("type", "", 8), ("redop", "", 5), ("root", "", 4))
_PLACEMENT = (("time", "us", 12), ("algbw", "GB/s", 7), ("busbw", "GB/s", 7), ("#wrong", "", 6))
_FURTHER = (
    ("algorithm", "", 22),
    ("wire/least", "", 10),
    ("p50", "us", 10),
    ("p95", "us", 10),
    ("p99", "us", 10),
    ("min rank", "us", 10),
)
COLUMNS = (*_CASE, *_PLACEMENT, *_PLACEMENT, *_FURTHER)
AGAINST_COLUMNS = (
    ("size", "B", 13),
    ("type", "", 8),
    ("redop", "", 5),
    ("algorithm", "", 22),
    ("ours", "us", 10),
    ("native", "us", 10),
    ("ratio", "", 7),
    ("95 % bounds", "", 15),
    ("host added", "us", 10),
)
CONVENTIONS = (
    "bandwidths are decimal GB/s per direction; busbw is algbw times the factor of nccl-tests for the "
    "operation (doc/PERFORMANCE.md there), and algbw is size / time",
    "time is the median over iterations of the slowest rank; p50, p95 and p99 are of the same times, "
    "min rank is the fastest rank's median",
    "wire/least is what the kernel says the busiest rank sent, framing included, over the least that any "
    "algorithm must send; - where it cannot be read or nothing must be sent",
    "the columns after the placements are of the out-of-place form where that was measured",
)
CSV_KEYS = (*CASE_KEYS, "placement", *MEASURED_KEYS, *AGAINST_KEYS)


def cells(row: Row) -> tuple[str, ...]:
    """A row's texts under `COLUMNS`."""
    first = next(found for _, found in measurements(row))
    sides = [text for side in ("out_of_place", "in_place") for text in _placement_cells(row[side])]
    return (
        f"{row['size_bytes']}",
        f"{row['count']}",
        row["dtype"] or "none",
        row["reduction"] or "none",
        "-1" if row["root"] is None else f"{row['root']}",
        *sides,
        _algorithm(row),
        _number(first["wire_over_least"], 3),
        *(_microseconds(first[key]) for key in ("p50_s", "p95_s", "p99_s", "min_rank_s")),
    )


def against_cells(row: Row) -> tuple[str, ...]:
    """A row's texts under `AGAINST_COLUMNS`."""
    found = row["against"]
    return (
        f"{row['size_bytes']}",
        row["dtype"] or "none",
        row["reduction"] or "none",
        _algorithm(row),
        _microseconds(found["ours_s"]),
        _microseconds(found["native_s"]),
        _number(found["ratio"], 3),
        f"{_number(found['ratio_low'], 3)} to {_number(found['ratio_high'], 3)}",
        _microseconds(found["host_added_s"]),
    )


def _algorithm(row: Row) -> str:
    """What ran, and what was asked for where that is another name; auto goes without saying."""
    asked, ran = row["algorithm_asked"], row["algorithm"]
    return ran if asked in ("auto", ran) else f"{ran} ({asked})"


def _placement_cells(found: Row | None) -> tuple[str, ...]:
    if found is None:
        return ("-", "-", "-", "-")
    return (
        _microseconds(found["time_s"]),
        _number(found["algbw_GBps"], 3),
        _number(found["busbw_GBps"], 3),
        "N/A" if found["wrong"] is None else f"{found['wrong']}",
    )


def _microseconds(time_s: float | None) -> str:
    return _number(None if time_s is None else time_s * 1e6, 1)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


class BenchTable:
    """Prints each row as it is measured, under a heading for each operation.

    Columns have fixed widths, so that lines printed minutes apart stand under each other, and a narrow
    terminal wraps them instead of losing figures.
    """

    def __init__(self, console: Console) -> None:
        width = sum(width + 1 for _, _, width in COLUMNS) + 1
        self.console = console if console.width >= width else Console(file=console.file, width=width)
        self._operation: str | None = None

    def show(self, row: Row) -> None:
        """A row; `against`, where there is one, in a line below it."""
        if row["operation"] != self._operation:
            self._operation = row["operation"]
            self.console.print(f"\n[bold]{self._operation}[/bold]")
            self._print(_headings(), header=True)
        self._print(cells(row))
        if row["against"] is not None:
            words = zip(AGAINST_COLUMNS, against_cells(row), strict=True)
            text = "  ".join(f"{name} {value} {unit}".rstrip() for (name, unit, _), value in list(words)[4:])
            self.console.print(f"{'':>14}against native: {text}", highlight=False)

    def _print(self, texts: Sequence[str], header: bool = False) -> None:
        columns = [Column(width=width, no_wrap=True, justify="right") for _, _, width in COLUMNS]
        table = Table(*columns, box=None, show_header=False, padding=(0, 1, 0, 0))
        for line in zip(*(text.split("\n") for text in texts), strict=True) if header else [texts]:
            table.add_row(*line, style="dim" if header else None)
        self.console.print(table, highlight=False)

    def close(self, report: Row) -> None:
        """The footer."""
        self.console.print()
        for line in footer(report):
            self.console.print(f"# {line}", highlight=False, markup=False, soft_wrap=True)


def _headings() -> list[str]:
    """Three lines each: placement, name, unit."""
    groups = [""] * len(_CASE) + ["out-of-place"] * len(_PLACEMENT) + ["in-place"] * len(_PLACEMENT)
    groups += [""] * len(_FURTHER)
    texts = []
    for (name, unit, width), group, before in zip(COLUMNS, groups, ["", *groups], strict=False):
        texts.append(f"{group[:width] if group != before else ''}\n{name}\n{f'({unit})' if unit else ''}")
    return texts


def make_report(facts: Row, rows: Sequence[Row], failed: Sequence[str], status: str) -> Row:
    """What bench.json holds: `facts` of the run, then conventions, rows, their totals and what failed."""
    return as_record(
        {
            **facts,
            "status": status,
            "conventions": list(CONVENTIONS),
            "rows": list(rows),
            "totals": totals(rows),
            "failures": list(failed),
        }
    )


def footer(report: Row) -> list[str]:
    """What a reader must know to read the table, and nccl-tests' closing lines."""
    environment, bench, total = report["environment"], report["bench"], report["totals"]
    ranks = "1 rank" if report["world_size"] == 1 else f"{report['world_size']} ranks"
    lines = [
        f"{ranks}, {report['backend']} on {report['device']}, "
        f"cluster {report['cluster']}; {environment['processor']}, {environment['cpu_count']} processors; "
        f"load average before: {report['load_average']:.1f}",
        f"torch {environment['torch']}, Python {environment['python']}, commit {environment['git_commit']}",
        f"{bench['warmup']} warm-up calls, then {bench['iterations']} iterations",
        *CONVENTIONS,
    ]
    if bench["against"] is not None:
        lines.append(
            f"against {bench['against']}: both in turn, {bench['rounds']} rounds; ratio is the median of "
            "ours / native in the same round, below 1 where ours is faster, with 95 % bounds of that median"
        )
    if report["status"] != "finished":
        lines.append(f"{report['status']}: {len(report['rows'])} of {report['cases']} cases are here")
    if total["wrong"] is None:
        lines.append("wrong values: not checked")
    else:
        verdict = "OK" if total["wrong"] == 0 else "FAILED"
        lines.append(f"wrong values: {total['wrong']} in {total['checked']} measurements {verdict}")
    average = total["average_busbw_GBps"]
    text = "none" if average is None else f"{average:.4g} GB/s over {total['averaged']} measurements"
    return [*lines, f"average bus bandwidth: {text}"]


def markdown(report: Row) -> str:
    """The same as a page."""
    lines = ["# Bench", "", f"`{report['command']}`", ""]
    lines += [f"- {line}" for line in footer(report)]
    lines += [f"- failed: {sentence}" for sentence in report["failures"]]
    for operation in dict.fromkeys(row["operation"] for row in report["rows"]):
        rows = [row for row in report["rows"] if row["operation"] == operation]
        names = [_named(name, unit) for name, unit, _ in _CASE]
        for side in ("", " in place"):
            names += [_named(name + side, unit) for name, unit, _ in _PLACEMENT]
        names += [_named(name, unit) for name, unit, _ in _FURTHER]
        lines += ["", f"## {operation}", "", *_table(names, [cells(row) for row in rows])]
        compared = [against_cells(row) for row in rows if row["against"] is not None]
        if compared:
            names = [_named(name, unit) for name, unit, _ in AGAINST_COLUMNS]
            lines += ["", "Against native, in turn:", "", *_table(names, compared)]
    return "\n".join([*lines, ""])


def _named(name: str, unit: str) -> str:
    return f"{name} ({unit})" if unit else name


def _table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    def line(parts: Sequence[str]) -> str:
        return "| " + " | ".join(parts) + " |"

    return [line(names), line(["---:"] * len(names)), *(line(row) for row in rows)]


def comma_separated(rows: Sequence[Row]) -> str:
    """bench.csv: a line for each row and placement, times in seconds; empty is unmeasured."""
    text = io.StringIO()
    writer = csv.DictWriter(text, CSV_KEYS, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerows(flat(row))
    return text.getvalue()


def write(report: Row, folder: Path) -> None:
    """bench.json, bench.csv and bench.md.

    Raises:
        OSError: one cannot be written.
    """
    rows: list[Any] = report["rows"]
    write_atomically(folder / "bench.json", json.dumps(report, indent=1, allow_nan=False) + "\n")
    write_atomically(folder / "bench.csv", comma_separated(rows))
    write_atomically(folder / "bench.md", markdown(report))

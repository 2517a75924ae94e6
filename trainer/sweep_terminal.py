"""A sweep's table on a terminal, 80 columns wide or more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from trainer.report import Row
from trainer.report_text import NONE, bandwidth, many, seconds, share, size
from trainer.sweep_advice import plan_text
from trainer.sweep_table import SweepTable
from trainer.sweep_text import cause_text, ratio, why_text

# heading, how a row's cell is written, and the width of a terminal from which on it is shown
CELLS: tuple[tuple[str, Callable[[Row], str], int], ...] = (
    ("step time", lambda row: seconds(row["step_time_s"]), 0),
    ("quartiles", lambda row: _spread(row), 0),
    ("speed-up", lambda row: ratio(row["speedup"]), 0),
    ("eff.", lambda row: ratio(row["efficiency"]), 0),
    ("sent", lambda row: size(row["bytes_sent"]), 110),
    ("bandwidth", lambda row: bandwidth(row["effective_bandwidth_GBps"]), 120),
    ("bubble", lambda row: share(row["bubble_fraction"]), 100),
    ("expected", lambda row: share(row["bubble_expected"]), 110),
    ("cause", cause_text, 0),
)


def show(table: SweepTable, console: Console) -> None:
    """Plans by problem, the best first; the jobs that are not compared with their reasons; the sentences."""
    for problem in table.problems:
        if problem.ranked:
            console.print(_plans(problem.ranked, problem.label, console.width))
    for row in table.others:
        why = why_text(row)
        text = f"job {row['number']} {row['state']}  {plan_text(row)}"
        if row["world_size"] is not None:
            text += f", {many(row['world_size'], 'rank')}"
        _say(console, f"{text}{': ' if why else ''}{why}")
    for sentence in (*table.sentences, *table.remarks):
        _say(console, sentence)


def _plans(rows: Sequence[Row], label: str, width: int) -> Table:
    title = "plans, the best first" + (f": {label}" if label else "")
    shown = Table(title=escape(title), title_justify="left", pad_edge=False, padding=(0, 1, 0, 0), box=None)
    cells = [one for one in CELLS if width >= one[2] and _has(rows, one[1])]
    shown.add_column("", justify="right", no_wrap=True)
    shown.add_column("job", justify="right", no_wrap=True)
    shown.add_column("plan", min_width=10)
    shown.add_column("ranks", justify="right", no_wrap=True)
    for heading, _, _ in cells:
        words = heading == "cause"
        shown.add_column(heading, justify="left" if words else "right", no_wrap=not words)
    for row in rows:
        tie = "\N{ALMOST EQUAL TO}" if row["tied_with"] else ""
        plan = plan_text(row).replace("microbatches=", "m=")
        known: list[Any] = [f"{tie}{row['place']}", row["number"], escape(plan), row["world_size"]]
        shown.add_row(*(str(value) for value in known), *(cell(row) for _, cell, _ in cells))
    return shown


def _has(rows: Sequence[Row], cell: Callable[[Row], str]) -> bool:
    return any(cell(row) != NONE for row in rows)


def _say(console: Console, text: str) -> None:
    console.print(text, highlight=False, markup=False)


def _spread(row: Row) -> str:
    low, high = row["step_time_low_s"], row["step_time_high_s"]
    if low is None or high is None:
        return NONE
    first, last = seconds(low).split(), seconds(high).split()
    same = first[1] == last[1]
    return f"{first[0] if same else ' '.join(first)}-{' '.join(last)}"

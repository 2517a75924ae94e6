"""The tables of a sweep's report as HTML; `<data value=...>` holds each number as it was read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from trainer.report import Row
from trainer.report_page import NAME
from trainer.report_text import NONE, Markup, code, escape, plain, seconds, share, size, table
from trainer.sweep_advice import plan_text
from trainer.sweep_bars import BYTES, SPLIT
from trainer.sweep_columns import COLUMNS
from trainer.sweep_text import cause_text, ratio, why_text

Written = Callable[[float | None], str]

# column, heading, how it is written; those of which no row has a value are left out
MAIN: tuple[tuple[str, str, Written], ...] = (
    ("samples_per_s", "samples/s", plain),
    ("speedup", "speed-up", ratio),
    ("efficiency", "efficiency", ratio),
    ("bytes_sent", "bytes sent", size),
    ("effective_bandwidth_GBps", "GB/s", plain),
    ("bubble_fraction", "bubble", share),
    ("bubble_expected", "expected", share),
)

LOSSES = ("loss", "eval_loss", "eval_accuracy")


def number(value: float | None, written: Written) -> Markup:
    """A number as it reads well, with the number as it is beside it for machines."""
    if value is None:
        return escape(NONE)
    return Markup(f'<data value="{value!r}">{escape(written(value))}</data>')


def job_link(row: Row, folder: Path, text: str) -> Markup:
    """The job's own report, by an address relative to the sweep's; the text alone where there is none."""
    if not (folder / row["name"] / NAME).is_file():
        return escape(text)
    return Markup(f'<a href="{quote(row["name"])}/{NAME}">{escape(text)}</a>')


def ranking(rows: Sequence[Row], folder: Path) -> Markup:
    """Complete jobs, the best plan first."""
    shown = [one for one in MAIN if any(row[one[0]] is not None for row in rows)]
    names = (heading for _, heading, _ in shown)
    headings = ("place", "job", "plan", "ranks", "step time", *names, "cause")
    body = [
        (
            f"\N{ALMOST EQUAL TO} {row['place']}" if row["tied_with"] else row["place"],
            job_link(row, folder, str(row["number"])),
            job_link(row, folder, plan_text(row)),
            row["world_size"],
            _step_time(row),
            *(number(row[key], written) for key, _, written in shown),
            cause_text(row),
        )
        for row in rows
    ]
    inside = table(headings, body, numbers=range(3, len(headings) - 1), stacked=True)
    return Markup(f'<div class="ranking">{inside}</div>\n')


def unranked(rows: Sequence[Row], folder: Path) -> Markup:
    """Jobs that are not compared, with the reason."""
    body = [
        (
            job_link(row, folder, str(row["number"])),
            row["state"],
            job_link(row, folder, plan_text(row)),
            _ranks(row),
            row["steps"],
            _step_time(row),
            number(row["samples_per_s"], plain),
            why_text(row) or NONE,
        )
        for row in rows
    ]
    headings = ("job", "state", "plan", "ranks", "steps", "step time", "samples a second", "why")
    return table(headings, body, numbers=(3, 4, 5, 6), stacked=True)


def verdicts(rows: Sequence[Row], folder: Path) -> Markup:
    """What each run says of itself; empty where none says anything."""
    body = [
        (
            job_link(row, folder, str(row["number"])),
            plan_text(row),
            _ranks(row),
            row["wall"] or NONE,
            cause_text(row),
            number(row["predicted_step_time_s"], seconds),
            row["verdict"],
        )
        for row in rows
        if row["verdict"] is not None
    ]
    headings = ("job", "plan", "ranks", "wall", "cause", "step without it", "what it says")
    return table(headings, body, numbers=(2, 5), stacked=True) if body else Markup("")


def split_table(rows: Sequence[Row]) -> Markup:
    headings = ("job", "plan", "ranks", *(part.removesuffix("_s").replace("_", " ") for part in SPLIT))
    return _numbers(rows, headings, SPLIT, seconds)


def bytes_table(rows: Sequence[Row]) -> Markup:
    return _numbers(
        rows, ("job", "plan", "ranks", *(name for name, _ in BYTES.values())), tuple(BYTES), _bytes
    )


def losses(rows: Sequence[Row]) -> Markup:
    """Losses of the last step and evaluation; jobs without any, and columns that no row has, are left out."""
    rows = [row for row in rows if any(row[key] is not None for key in LOSSES)]
    keys = [key for key in LOSSES if any(row[key] is not None for row in rows)]
    headings = ("job", "plan", "ranks", *(key.replace("_", " ") for key in keys))
    return _numbers(rows, headings, keys, lambda value: NONE if value is None else f"{value:.6g}")


def definitions() -> Markup:
    """The columns as docs/sweeps.md defines them."""
    rows = [
        (code(one.key), one.unit, one.kind, Markup(_with_code(escape(one.definition)))) for one in COLUMNS
    ]
    return table(("column", "unit", "kind", "definition"), rows, stacked=True)


def _numbers(rows: Sequence[Row], headings: Sequence[str], keys: Sequence[str], written: Written) -> Markup:
    body = [
        (
            row["number"],
            plan_text(row),
            _ranks(row),
            *(number(row[key], written) for key in keys),
        )
        for row in rows
    ]
    return table(headings, body, numbers=range(2, len(headings)), stacked=True)


def _ranks(row: Row) -> Any:
    return NONE if row["world_size"] is None else row["world_size"]


def _step_time(row: Row) -> Markup:
    """Median, and below it the quartiles."""
    if row["step_time_s"] is None:
        return escape(NONE)
    low, high = (number(row[key], seconds) for key in ("step_time_low_s", "step_time_high_s"))
    return Markup(
        f'<span>{number(row["step_time_s"], seconds)} <br><span class="spread">{low} to {high}</span></span>'
    )


def _bytes(value: float | None) -> str:
    return NONE if value is None else f"{value:,.0f}"


def _with_code(text: str) -> str:
    """`word` in a definition as code."""
    parts = text.split("`")
    return "".join(str(code(Markup(part))) if place % 2 else part for place, part in enumerate(parts))

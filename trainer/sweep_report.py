"""table.json, table.csv and report.html of a sweep: at its end, and at any time before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from trainer.files import write_atomically
from trainer.report import Row
from trainer.report_page import NO_PLOTLY, Page, has_plotly, tried, write_page
from trainer.report_text import Markup, code, escape, folded, items, many
from trainer.sweep_bars import MOST_JOBS, bytes_figure, split_figure
from trainer.sweep_figures import bubble_figure, heat_figures, throughput_figure
from trainer.sweep_html import (
    bytes_table,
    definitions,
    losses,
    ranking,
    split_table,
    unranked,
    verdicts,
)
from trainer.sweep_ranking import Problem
from trainer.sweep_table import SweepTable, csv_text, json_text, read_table
from trainer.sweep_terminal import show

TABLE_JSON, TABLE_CSV = "table.json", "table.csv"
MOST_PROBLEMS = 8  # with figures of their own


def write_sweep_report(folder: Path) -> Path:
    """Writes table.json, table.csv and report.html of a sweep into its folder; returns the page's path.

    Each file is whole or the one before: a report may be written while the sweep runs.

    Raises:
        InputError: it is no sweep's folder, or sweep.json or a job.json is damaged.
        OSError: a file cannot be written.
    """
    return write_sweep_page(write_table(folder))


def write_sweep_page(table: SweepTable) -> Path:
    """Writes report.html alone, of a table at hand; returns its path.

    Raises:
        OSError: the file cannot be written.
    """
    return write_page(table.folder, sweep_page(table))


def write_table(folder: Path) -> SweepTable:
    """Writes table.json and table.csv alone, which takes no time to speak of.

    Raises:
        InputError, OSError: as `write_sweep_report`.
    """
    table = read_table(folder)
    write_atomically(folder / TABLE_JSON, json_text(table))
    write_atomically(folder / TABLE_CSV, csv_text(table))
    return table


def print_table(sweep: Path | SweepTable, console: Console | None = None) -> None:
    """The table of a sweep, read or in its folder, on the terminal: best plan first, and its sentence.

    Raises:
        InputError: it is no sweep's folder, or sweep.json or a job.json is damaged.
    """
    show(read_table(sweep) if isinstance(sweep, Path) else sweep, console or Console())


def sweep_page(table: SweepTable) -> str:
    """The page as HTML."""
    name = table.folder.resolve().name or str(table.folder)
    page = Page(f"{name} · Splitmeter")
    page.sections.append(f"<header>{tried(lambda: _facts(table, name))}</header>\n")
    page.section("", lambda: _answer(table), "verdict answer")
    if not has_plotly():
        page.section("What is missing", lambda: items([f"{NO_PLOTLY}."]))
    page.section("Plans, the best first", lambda: _ranking(table))
    if table.others:
        page.section("Not compared", lambda: unranked(table.others, table.folder))
    for problem in table.problems[:MOST_PROBLEMS]:
        _add_figures(page, problem)
    undrawn = len(table.problems) - MOST_PROBLEMS
    if undrawn > 0:
        page.section("", lambda: _note(f"The figures of {many(undrawn, 'more problem')} are left out."))
    page.section("What each run says", lambda: _verdicts(table))
    page.section("Losses, files and definitions", lambda: _details(table))
    return page.html()


def _facts(table: SweepTable, name: str) -> Markup:
    counts = Counter(row["state"] for row in table.rows)
    words = [many(len(table.rows), "job"), *(f"{count} {state}" for state, count in counts.items())]
    state = table.sweep.state
    kind = {"complete": "finished", "failed": "failed"}.get(state, "unknown")
    overrides = " ".join(table.sweep.overrides)
    return Markup(
        f'<h1>{escape(name)}</h1>\n<p class="facts">sweep of {escape(" · ".join(words))} · '
        f'<span class="status {kind}">{escape(state)}</span></p>\n'
        + (f'<p class="facts">{code(overrides)}</p>\n' if overrides else "")
    )


def _answer(table: SweepTable) -> Markup:
    told = "".join(f"<h2>{escape(sentence)}</h2>\n" for sentence in table.sentences)
    return Markup(told + "".join(f'<p class="note">{escape(one)}</p>\n' for one in table.remarks))


def _ranking(table: SweepTable) -> Markup:
    if not table.ranked:
        return Markup("<p>No job is complete.</p>\n")
    note = _note(
        "Medians over the steps after warm-up, below the step time its quartiles. Speed-up and efficiency "
        "are against the best one-rank job. A place with \N{ALMOST EQUAL TO} is not sure: the quartiles of "
        "its samples per second overlap with those of another plan. A dash: not measured."
    )
    parts = [note]
    for problem in table.problems:
        if problem.ranked:
            parts += [_heading(problem), ranking(problem.ranked, table.folder)]
    return Markup("".join(parts))


def _heading(problem: Problem) -> Markup:
    return Markup(f"<h3>{escape(problem.label)}</h3>\n" if problem.label else "")


def _add_figures(page: Page, problem: Problem) -> None:
    """The figures of one problem, each where it has data, else why not."""
    number, rows = problem.number, problem.ranked
    of = f" ({problem.label})" if problem.label else ""

    def place(name: str, words: str, otherwise: str, make: Callable[[], Any], more: Markup) -> Markup:
        made = page.figure(f"{name}-{number}", make, otherwise)
        return Markup(_note(words) + made + more) if f"{name}-{number}" in page.figures else made

    page.section(
        f"Throughput over ranks{of}",
        lambda: place(
            "throughput",
            "The best plan of each strategy with its quartiles; circles are other plans. Dotted: one rank's "
            "throughput times the ranks.",
            "A line needs complete jobs with two numbers of ranks or more",
            lambda: throughput_figure(problem),
            Markup(""),
        ),
    )
    page.section(f"World size and microbatches{of}", lambda: _maps(page, problem))
    page.section(
        f"Bubble over microbatches{of}",
        lambda: place(
            "bubble",
            "Share of the step in which the rank that sends most has nothing to do. The closed form "
            "is (p\N{MINUS SIGN}1)/(m+p\N{MINUS SIGN}1) for p equal stages and m microbatches, "
            "for 1f1b and gpipe.",
            "No complete pipeline with two ranks or more has a measured bubble",
            lambda: bubble_figure(problem),
            Markup(""),
        ),
    )
    page.section(
        f"Where each job's step goes{of}",
        lambda: place(
            "split",
            "Medians of the rank that sends most, the best plan first. Medians of parts need not add up to "
            f"the median step.{_cut(rows)}",
            "No part of a step was measured",
            lambda: split_figure(rows),
            folded("The numbers", split_table(rows)),
        ),
    )
    page.section(
        f"Bytes, four ways{of}",
        lambda: place(
            "bytes",
            "What the rank that sends most sends in a step: what any algorithm must send, the closed form of "
            "the strategy, what its operations sent, and what the system says left it, the backend's framing "
            f"included.{_cut(rows)}",
            "No complete job sends bytes",
            lambda: bytes_figure(rows),
            folded("The numbers", bytes_table(rows)),
        ),
    )


def _maps(page: Page, problem: Problem) -> Markup:
    maps = heat_figures(problem) if has_plotly() else {}
    if not maps:
        why = "A map needs two complete jobs of a strategy" if has_plotly() else "This figure needs plotly"
        return Markup(f"<p>{why}.</p>\n")
    places = []
    for place, (strategy, figure) in enumerate(maps.items()):
        made = page.figure(f"map-{problem.number}-{place}", lambda figure=figure: figure, "")  # type: ignore[misc]
        places.append(f"<div><h3>{escape(strategy)}</h3>{made}</div>")
    words = "Samples a second of the best plan in each field; one scale for all strategies, darker is more."
    return Markup(f'{_note(words)}<div class="maps">{"".join(places)}</div>\n')


def _cut(rows: tuple[Row, ...]) -> str:
    return f" The best {MOST_JOBS} are drawn." if len(rows) > MOST_JOBS else ""


def _verdicts(table: SweepTable) -> Markup:
    return verdicts(table.rows, table.folder) or Markup("<p>No job has a verdict.</p>\n")


def _details(table: SweepTable) -> Markup:
    links = f'<a href="{TABLE_CSV}">{TABLE_CSV}</a>, <a href="{TABLE_JSON}">{TABLE_JSON}</a>'
    parts = [f"<p>{links} hold every column of every job.</p>\n"]
    if any(row["loss"] is not None for row in table.rows):
        parts.append(folded("Losses", losses(table.rows)))
    parts.append(folded("What each column means", definitions()))
    return Markup("".join(parts))


def _note(words: str) -> Markup:
    return Markup(f'<p class="note">{escape(words)}</p>\n')

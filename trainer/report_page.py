"""report.html of a run: one file, no network, the verdict first."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.files import write_atomically
from trainer.report import Run, read_run, series
from trainer.report_bytes import counts_table, four_counts, operations_tables
from trainer.report_figures import MAKERS
from trainer.report_nodes import nodes_table
from trainer.report_steps import longest_drawn_s
from trainer.report_style import POLICY, SCRIPT, STYLE
from trainer.report_summary import details, facts, numbers
from trainer.report_text import Markup, escape, items, many, seconds
from trainer.report_timeline import legend
from trainer.report_trace import thinned
from trainer.report_verdict import verdict

NAME = "report.html"
NO_PLOTLY = "plotly is not installed (pip install 'splitmeter[report]'): the figures are missing"

_log = logging.getLogger(__name__)


def write_report(run_dir: Path) -> Path:
    """Writes report.html of a run into its folder; damaged and missing files are named in the page.

    Raises:
        OSError: the page cannot be written.
    """
    return write_page(run_dir, report_page(read_run(run_dir)))


def write_page(run_dir: Path, page: str) -> Path:
    """
    Raises:
        OSError: the page cannot be written.
    """
    path = run_dir / NAME
    # A text that was cut within a character must not keep the page from being written.
    write_atomically(path, page.encode("utf-8", errors="replace").decode("utf-8"))
    return path


@dataclass
class Page:
    """A page as it grows: its sections and figures."""

    title: str
    sections: list[str] = field(default_factory=list)
    figures: dict[str, str] = field(default_factory=dict)

    def section(self, title: str, inside: Callable[[], Markup], kind: str = "") -> None:
        """Adds a section; one that fails says so and leaves the others alone."""
        heading = f"<h2>{escape(title)}</h2>\n" if title else ""
        self.sections.append(f'<section class="{kind}">{heading}{tried(inside)}</section>\n')

    def figure(self, name: str, make: Callable[[], Any], otherwise: str) -> Markup:
        """The place of a figure that `make` gives; the sentence `otherwise` where it gives none."""
        try:
            figure = make()
        except ImportError:
            return Markup("<p>This figure needs plotly.</p>\n")
        if figure is None:
            return Markup(f"<p>{escape(otherwise)}.</p>\n")
        self.figures[name] = figure.to_json()
        height = int(figure.layout.height or 400)
        return Markup(
            f'<div class="wide"><div class="figure {name}" id="figure-{name}" style="min-height:{height}px">'
            "</div></div>\n"
        )

    def html(self) -> str:
        script = _plotly_script() if self.figures else ""
        specs = ",".join(f'"{name}":{text}' for name, text in self.figures.items()).replace("<", "\\u003c")
        drawn = (
            f'<script type="application/json" id="figures">{{{specs}}}</script>\n'
            f"<script>{script}</script>\n<script>{SCRIPT}</script>\n"
            if script
            else ""
        )
        return (
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f'<title>{escape(self.title)}</title>\n<link rel="icon" href="data:,">\n'
            f"<style>{STYLE}</style>\n</head>\n<body>\n<main>\n{''.join(self.sections)}</main>\n"
            f"<noscript>The figures need JavaScript.</noscript>\n{drawn}</body>\n</html>\n"
        )


def report_page(run: Run) -> str:
    """The page of one run as HTML."""
    page = Page(f"{run.name} · Splitmeter")
    page.sections.append(f"<header>{tried(lambda: facts(run))}</header>\n")
    add_run(page, run)
    return page.html()


def add_run(page: Page, run: Run) -> None:
    """All sections of one run."""
    page.section("", lambda: verdict(run), "verdict")
    missing = list(run.missing)
    if not has_plotly():
        missing.append(NO_PLOTLY)
    if missing:
        page.section("What is missing", lambda: items(f"{one}." for one in missing))
    page.section("In numbers", lambda: numbers(run))
    page.section(_timeline_title(run), lambda: _timeline(page, run))
    page.section("Bytes, four ways", lambda: _bytes(page, run))
    page.section("Where each rank's step goes", lambda: _split(page, run))
    page.section("The link, and the step's messages on it", lambda: _link(page, run))
    page.section("Step time and loss over the run", lambda: _steps(page, run))
    page.section("Configuration and environment", lambda: details(run))


def has_plotly() -> bool:
    """Whether the page's figures can be drawn."""
    return bool(_plotly_script())


def tried(inside: Callable[[], Markup]) -> Markup:
    """What `inside` gives; an error becomes a sentence: a page that lacks a part is still a page."""
    try:
        return inside()
    except Exception as error:
        _log.debug("a part of the report failed", exc_info=True)
        return Markup(
            f"<p>This part could not be made ({escape(type(error).__name__)}: {escape(error)}).</p>\n"
        )


def _timeline_title(run: Run) -> str:
    return "A step's timeline" if run.trace is None else f"Step {run.trace.step}: its timeline"


def _timeline(page: Page, run: Run) -> Markup:
    place = _place(page, run, "timeline", _because(run, "trace.json", "trace.json is empty"))
    if run.trace is None:
        return place
    bars, shortest_s = thinned(run.trace.bars, run.trace.span_s)
    words = (
        f"{len(run.trace.bars):,} operations on {many(len(run.trace.ranks), 'rank')} in "
        f"{seconds(run.trace.span_s)}. For each rank the upper lane is its main thread and the lower one its "
        "transfers, from the last arrival to completion. Numbers are microbatches. Drag to zoom in, "
        "double-click to zoom out."
    )
    if shortest_s:
        words += f" Those of a kind within {seconds(shortest_s)} are drawn as one ({len(bars):,} bars)."
    return Markup(f"{_note(words)}{legend(run.trace)}{place}")


def _bytes(page: Page, run: Run) -> Markup:
    counts = four_counts(run)
    if not counts:
        alone = "One rank sends nothing" if run.world_size == 1 else "No bytes were counted"
        return Markup(f"<p>{escape(_because(run, 'summary.json', alone))}.</p>\n")
    note = _note(
        "What any algorithm must send, the closed form of the strategy, what the operations sent, and what "
        "the system says left on the wire less the backend's published framing; means over the steps of "
        "each. The last column compares wire and sent over the same steps; a dash: not measured."
    )
    figure = _place(page, run, "bytes", "No bytes were counted")
    return Markup(f"{note}{figure}{counts_table(counts)}{nodes_table(run)}{operations_tables(run)}")


def _split(page: Page, run: Run) -> Markup:
    place = _place(page, run, "time_split", "No part of a step was measured after warm-up")
    if not run.time_split():
        return place
    words = (
        "Median of each part over the steps after warm-up. Each instant of a step goes to the first that "
        "holds: compute, a transfer that is waited for with all peers there (exposed comm), waiting for a "
        "late peer, idle with nothing ready, else the host. Data, the wait for the next batch, is a part of "
        "host_s and drawn beside the rest of it."
    )
    return Markup(f"{_note(words)}{place}")


def _link(page: Page, run: Run) -> Markup:
    alone = run.world_size == 1
    why = "One rank has no link" if alone else _because(run, "link_curve.json", "The link curve is empty")
    place = _place(page, run, "link", why)
    if run.link is None or not run.link.curves:
        return place
    words = "Time of one call over its size, median and quartiles, measured when nothing else ran."
    if run.trace is not None and run.trace.transfers():
        words += " Crosses are the messages of the step above, by the bytes that the trace gives for them."
    return Markup(f"{_note(words)}{place}")


def _steps(page: Page, run: Run) -> Markup:
    place = _place(page, run, "steps", _because(run, "metrics.jsonl", "No step time is on record"))
    if run.median("step_time_s") is None:
        return place
    words = "Shaded: warm-up, left out of all medians. Dotted: the median."
    if longest_drawn_s(run) is not None:
        longest_s = max(series(run.rows, "step_time_s")[1])
        words += f" The longest step of the warm-up, {seconds(longest_s)}, is cut off at the top."
    return Markup(f"{_note(words)}{place}")


def _place(page: Page, run: Run, name: str, otherwise: str) -> Markup:
    return page.figure(name, lambda: MAKERS[name](run), otherwise)


def _because(run: Run, file: str, otherwise: str) -> str:
    """What is missing about a file, or else the sentence given."""
    return next((one for one in run.missing if one.startswith(file)), otherwise)


def _note(words: str) -> Markup:
    return Markup(f'<p class="note">{escape(words)}</p>\n')


def _plotly_script() -> str:
    """plotly.js; empty where plotly is not installed."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        return ""
    return str(get_plotlyjs())

"""Two runs side by side: numbers with their ratio, verdicts, and what was configured differently."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer.report import PARTS, Run, mapping, read_run
from trainer.report_bytes import wire_readings
from trainer.report_page import Page, add_run, tried, write_page
from trainer.report_steps import step_times_figure
from trainer.report_summary import facts
from trainer.report_text import (
    NONE,
    Markup,
    bandwidth,
    code,
    escape,
    items,
    plain,
    seconds,
    share,
    size,
    table,
)

MOST_KEYS = 60  # of the configuration that are listed

# a key of the rows' medians, label, how it is written
MEDIANS: tuple[tuple[str, str, Callable[[float | None], str]], ...] = (
    ("step_time_s", "step time", seconds),
    *((part, part.removesuffix("_s").replace("_", " "), seconds) for part in PARTS),
    ("bytes_least", "bytes, least", size),
    ("bytes_predicted", "bytes, predicted", size),
    ("bytes_sent", "bytes, sent", size),
    ("bytes_wire", "bytes, wire with framing", size),
    ("bytes_sent_total", "bytes, sent by all ranks", size),
    ("effective_bandwidth_GBps", "effective bandwidth", bandwidth),
    ("achieved_bandwidth_GBps", "achieved bandwidth", bandwidth),
    ("link_fraction", "link fraction", share),
    ("overlap", "overlap", share),
    ("bubble_fraction", "bubble", share),
    ("samples_per_s", "samples a second", plain),
    ("peak_memory_bytes", "peak memory", size),
)


def write_comparison(run_dir: Path, other_dir: Path) -> Path:
    """Writes report.html into the first folder: both runs side by side, then the first one's report.

    Raises:
        OSError: the page cannot be written.
    """
    return write_page(run_dir, comparison_page(read_run(run_dir), read_run(other_dir)))


def comparison_page(run: Run, other: Run) -> str:
    """The page as HTML."""
    first, second = names(run, other)
    page = Page(f"{first} and {second} · Splitmeter")
    page.sections.append(f"<header><h1>{escape(first)} beside {escape(second)}</h1></header>\n")
    page.section("", lambda: _verdicts(run, other, first, second), "verdict")
    page.section("Side by side", lambda: _numbers(page, run, other, first, second))
    page.section("Configured differently", lambda: _differences(run, other, first, second))
    if other.missing:
        page.section(f"Missing in {second}", lambda: items(f"{one}." for one in other.missing))
    page.sections.append(f'<header style="margin-top:36px">{tried(lambda: facts(run))}</header>\n')
    add_run(page, run)
    return page.html()


def names(run: Run, other: Run) -> tuple[str, str]:
    """What to call the two: the folders' names where they differ, else their paths."""
    if run.name != other.name:
        return run.name, other.name
    return str(run.folder), str(other.folder)


def ratio(value: float | None, other: float | None) -> str:
    """other / value, or a dash where it has no meaning."""
    return NONE if value is None or other is None or value == 0 else f"{other / value:.3f}"


def _median(run: Run, key: str) -> float | None:
    """A step's; a reading of the wire is over several."""
    if key != "bytes_wire":
        return run.median(key)
    readings = wire_readings(run.steady_rows)
    return statistics.median(readings) if readings else None


def _numbers(page: Page, run: Run, other: Run, first: str, second: str) -> Markup:
    rows = []
    for key, label, written in MEDIANS:
        value, beside = _median(run, key), _median(other, key)
        if value is None and beside is None:
            continue
        rows.append((label, written(value), written(beside), ratio(value, beside)))
    note = (
        f"Medians over {len(run.steady_rows):,} and {len(other.steady_rows):,} steps after warm-up. "
        f"The ratio is {second} / {first}."
    )
    headings = ("median", first, second, "ratio")
    figure = page.figure(
        "step_times",
        lambda: step_times_figure([(first, run), (second, other)]) if run.rows or other.rows else None,
        "Neither run has a step on record",
    )
    return Markup(f'<p class="note">{escape(note)}</p>\n{table(headings, rows, numbers=(1, 2, 3))}{figure}')


def _verdicts(run: Run, other: Run, first: str, second: str) -> Markup:
    def of(key: str, written: Callable[[Any], object] = str) -> tuple[object, object]:
        found = (run.verdict.get(key), other.verdict.get(key))
        return tuple(NONE if value is None else written(value) for value in found)  # type: ignore[return-value]

    def words(value: Any) -> str:
        return str(value).replace("_", " ")

    rows = [
        ("wall", *of("wall", words)),
        ("cause", *of("cause", words)),
        ("rank", *of("rank")),
        ("what it says", *of("sentence")),
        ("change", *of("override", code)),
        ("too noisy to tell", *of("too_noisy", lambda value: "yes" if value else "no")),
    ]
    rows = [row for row in rows if any(value != NONE for value in row[1:])]
    if not rows:
        return Markup("<h2>No verdicts</h2>\n<p>Neither run has a verdict.json.</p>\n")
    return Markup(f"<h2>Verdicts</h2>\n{table(('verdict', first, second), rows, stacked=True)}")


def _differences(run: Run, other: Run, first: str, second: str) -> Markup:
    if not run.config or not other.config:
        return Markup("<p>One of the two has no configuration that can be read.</p>\n")
    ours, theirs = flat(run.config), flat(other.config)
    keys = [key for key in ours | theirs if key != "run_dir" and ours.get(key) != theirs.get(key)]
    if not keys:
        return Markup("<p>Nothing: both have the same configuration.</p>\n")
    rows = [(code(key), ours.get(key, NONE), theirs.get(key, NONE)) for key in keys[:MOST_KEYS]]
    more = f'<p class="note">And {len(keys) - MOST_KEYS} keys more.</p>\n' if len(keys) > MOST_KEYS else ""
    return Markup(table(("key", first, second), rows, stacked=True) + more)


def flat(config: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """key.subkey -> value as text."""
    found: dict[str, str] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        if mapping(value):
            found |= flat(value, f"{name}.")
        else:
            found[name] = "null" if value is None else str(value)
    return found

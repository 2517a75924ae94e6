"""What a run was and how it went: the page's head, its numbers, configuration and environment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import yaml

from trainer.report import Run, mapping, number
from trainer.report_text import Markup, bandwidth, code, escape, folded, many, plain, seconds, share, size
from trainer.report_verdict import tile

# key of a row, label, how it is written
NUMBERS: tuple[tuple[str, str, Callable[[float | None], str]], ...] = (
    ("step_time_s", "step time", seconds),
    ("samples_per_s", "samples a second", plain),
    ("bytes_sent", "bytes sent a step", size),
    ("effective_bandwidth_GBps", "effective bandwidth", bandwidth),
    ("achieved_bandwidth_GBps", "achieved while transferring", bandwidth),
    ("link_fraction", "of the link curve", share),
    ("overlap", "transfer hidden under compute", share),
    ("bubble_fraction", "bubble", share),
    ("bubble_expected", "bubble of the closed form", share),
    ("peak_memory_bytes", "peak memory, largest rank", size),
)


def facts(run: Run) -> Markup:
    """Name, status, and in a line what ran."""
    status = run.summary.get("status")
    text = str(status) if isinstance(status, str) else "did not end in order, or is still running"
    kind = text.split(":")[0] if isinstance(status, str) else "unknown"
    kind = kind if kind in ("finished", "interrupted", "failed") else "unknown"
    environment = run.environment
    parts = [
        _named(run.config, "strategy"),
        _named(run.config, "model"),
        _named(run.config, "data"),
        "" if run.world_size is None else many(run.world_size, "rank"),
        " on ".join(str(environment[key]) for key in ("backend", "device") if environment.get(key)),
        many(len(run.rows), "step"),
    ]
    line = " · ".join(part for part in parts if part)
    return Markup(
        f'<h1>{escape(run.name)}</h1>\n<p class="facts">{escape(line)} · '
        f'<span class="status {kind}">{escape(text)}</span></p>\n'
    )


def numbers(run: Run) -> Markup:
    """Medians of the steps after warm-up, and the last loss."""
    tiles, absent = [], []
    for key, label, written in NUMBERS:
        value = run.median(key)
        if value is None:
            absent.append(key)
            continue
        quartiles = run.quartiles(key)
        spread = ""
        if quartiles is not None:
            low, high = written(quartiles[0]), written(quartiles[1])
            spread = f"quartiles {low} to {high}" if low != high else ""
        tiles.append(tile(written(value), label, spread))
    last = run.rows[-1] if run.rows else {}
    for key in ("loss", "eval_loss", "eval_accuracy"):
        value = number(run.summary.get(key))
        value = number(last.get(key)) if value is None else value
        if value is not None:
            tiles.append(tile(f"{value:.4g}", f"last {key.replace('_', ' ')}"))
    steady = len(run.steady_rows)
    words = (
        f"Medians over {many(steady, 'step')} after warm-up."
        if steady
        else "No step after warm-up: medians are missing."
    )
    headline = number(run.summary.get("headline_rank"))
    if steady and headline is not None and (run.world_size or 1) > 1:
        words += f" Bytes, bandwidths, overlap and bubble are those of rank {headline:.0f}, which sends most."
    grid = f'<div class="tiles">{"".join(tiles)}</div>' if tiles else ""
    unmeasured = ""
    if absent and steady:
        names = ", ".join(code(key) for key in absent)
        unmeasured = f'<p class="note">Not measured in this run: {names}.</p>'
    return Markup(f'<p class="note">{escape(words)}</p>\n{grid}\n{unmeasured}\n')


def details(run: Run) -> Markup:
    """config.yaml and the environment as they stand, folded; the folder's path and host names left out.

    This page goes to W&B.
    """
    parts = []
    if run.config_text:
        parts.append(folded("Configuration (config.yaml)", _text(_without_folder(run))))
    if run.environment:
        parts.append(folded("Environment (summary.json)", _text(_yaml(run.environment))))
    if run.link is not None:
        measured = {key: value for key, value in run.link.measured.items() if key not in ("sizes", "host")}
        parts.append(folded("Where the link curve was measured", _text(_yaml(measured))))
    if not parts:
        return Markup("<p>Neither is on record.</p>\n")
    return Markup("".join(parts))


def _named(config: dict[str, Any], group: str) -> str:
    name = mapping(config.get(group)).get("name")
    return f"{group} {name}" if name else ""


def _yaml(values: dict[str, Any]) -> str:
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


def _without_folder(run: Run) -> str:
    """The text itself where it has no run_dir, or cannot be read."""
    if "run_dir" not in run.config:
        return run.config_text
    return _yaml({key: value for key, value in run.config.items() if key != "run_dir"})


def _text(text: str) -> Markup:
    return Markup(f"<pre>{escape(text)}</pre>\n")

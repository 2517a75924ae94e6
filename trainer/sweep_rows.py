"""One job of a sweep as a row of the table, from the files of its folder."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from trainer.report import Row, Run, mapping, number, present, read_records
from trainer.report_bytes import wire_readings
from trainer.report_compare import flat
from trainer.sweep_columns import COLUMNS, MEDIANS
from trainer.sweep_files import Job

# A problem is all of a configuration but what tunes the plan and what only says how a run is recorded.
PLAN_KEYS = ("strategy", "collectives", "world_size", "data.batch_size", "trainer.num_threads")
RECORD_KEYS = (
    "run_dir",
    "logger",
    "sweep",
    "cluster",
    "trainer.log_every",
    "trainer.report",
    "trainer.verdict_every",
    "trainer.verdict_budget_s",
)


def job_row(job: Job) -> tuple[Row, Row]:
    """The table's row of a job, and what else is known: `problem_keys`, `cores` and whether it is `whole`.

    Columns that compare jobs (problem, place, tied_with, speedup, efficiency) are left null. `problem_keys`
    are the keys and values that make up its problem, or None where its config.yaml cannot be read; `cores`
    of the machine where its ranks had to share them, else None; `whole`: its numbers may be ranked.
    """
    run = read_records(job.folder)
    row: Row = {column.key: None for column in COLUMNS}
    row |= {"number": job.number, "name": job.folder.name, "state": job.state, "reason": job.reason}
    row |= {"tied_with": [], "swept": dict(job.swept)}
    row |= plan_of(run, given(job.overrides))
    row |= {"steps": len(run.rows), "steady_steps": len(run.steady_rows)}
    row |= _numbers(run)
    row |= {key: _text(run.verdict.get(key)) for key in ("wall", "cause")}
    row["too_noisy"] = run.verdict.get("too_noisy") if type(run.verdict.get("too_noisy")) is bool else None
    row["verdict"] = _text(run.verdict.get("sentence"))
    row["predicted_step_time_s"] = number(run.verdict.get("predicted_step_time_s"))
    notes = _notes(job, run)
    row["note"] = "; ".join(notes) or None
    damaged = any(note.startswith("metrics.jsonl") for note in notes)
    whole = job.state == "complete" and not damaged and None not in (row["samples_per_s"], row["world_size"])
    keys = {key: value for key, value in flat(run.config).items() if not within(key, PLAN_KEYS + RECORD_KEYS)}
    return row, {"problem_keys": keys if run.config else None, "cores": _cores(run), "whole": whole}


def within(key: str, groups: Iterable[str]) -> bool:
    """Whether a key is one of the groups or of a key in them."""
    return any(key == group or key.startswith(f"{group}.") for group in groups)


def given(overrides: Iterable[str]) -> dict[str, str]:
    """key -> value of overrides, the last of each."""
    pairs = (override.lstrip("+~").partition("=") for override in overrides)
    return {key: value for key, _, value in pairs}


def plan_of(run: Run, overrides: Mapping[str, str]) -> Row:
    """The columns that name a plan, from config.yaml, or where a job never wrote one, from its overrides."""
    strategy = mapping(run.config.get("strategy"))
    name = _text(strategy.get("name")) or overrides.get("strategy")
    schedule = _text(strategy.get("schedule")) or overrides.get("strategy.schedule")
    naive = name == "pipeline" and schedule == "naive"
    microbatches = _count(strategy.get("microbatches"), overrides.get("strategy.microbatches"))
    return {
        "strategy": name,
        "world_size": run.world_size or _count(None, overrides.get("world_size")),
        "microbatches": 1 if naive else microbatches,
        "schedule": schedule if name == "pipeline" else None,
        "batch_size": _count(
            mapping(run.config.get("data")).get("batch_size"), overrides.get("data.batch_size")
        ),
    }


def quartiles(values: list[float]) -> tuple[float | None, float | None, float | None]:
    """First quartile, median and third one, linearly interpolated; None without values."""
    if len(values) < 2:
        return (values[0],) * 3 if values else (None, None, None)
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
    return q1, median, q3


def _numbers(run: Run) -> Row:
    steady = run.steady_rows
    found: Row = {}
    low, median, high = quartiles(present(row.get("step_time_s") for row in steady))
    found |= {"step_time_s": median, "step_time_low_s": low, "step_time_high_s": high}
    low, median, high = quartiles(present(row.get("samples_per_s") for row in steady))
    found |= {"samples_per_s": median, "samples_per_s_low": low, "samples_per_s_high": high}
    for key in MEDIANS:
        found[key] = _median(present(row.get(key) for row in steady))
    found["bytes_wire"] = _median(wire_readings(steady))
    found["loss"] = number(run.rows[-1].get("loss")) if run.rows else None
    for key in ("eval_loss", "eval_accuracy"):
        values = present(row.get(key) for row in run.rows)
        found[key] = values[-1] if values else None
    return found


def _median(values: list[float]) -> float | None:
    """Of whole numbers a whole one, where it is: bytes are counted."""
    if not values:
        return None
    median = statistics.median(values)
    whole = all(type(value) is int for value in values) and median == int(median)
    return int(median) if whole else median


def _notes(job: Job, run: Run) -> list[str]:
    """What the folder lacks that such a job has; a skipped one has nothing, and others have no end."""
    if job.state == "skipped":
        return []
    notes = [one for one in run.missing if job.state == "complete" or not _is_unfinished(one)]
    steps = number(run.summary.get("steps"))
    cut = any(one.startswith("metrics.jsonl") for one in notes)
    if steps is not None and steps != len(run.rows) and not cut:
        notes.append(f"metrics.jsonl has {len(run.rows)} rows of {steps} steps")
    return notes


def _is_unfinished(sentence: str) -> bool:
    """Whether a run's folder lacks this until the run has ended."""
    return " is missing: " in sentence or " has no whole row" in sentence or " is cut within " in sentence


def _cores(run: Run) -> int | None:
    """The cores that a machine's ranks may use, where they are fewer; None where each has one, or a GPU."""
    environment = run.environment
    cores, ranks = environment.get("cores"), environment.get("local_world_size")
    if environment.get("device") != "cpu" or type(cores) is not int or type(ranks) is not int:
        return None
    return cores if ranks > cores else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _count(value: Any, text: str | None) -> int | None:
    if type(value) is int:
        return value
    return int(text) if text is not None and text.isdecimal() else None

"""A sweep's summary run in W&B: the scaling table, the best plans over world size, and the report.

W&B draws lines over the rows of one run only, so "throughput against world size" needs a run of its own. It
joins its jobs in their group as job type `sweep-summary`. Everything else is as for a job (see
`trainer.wandb_sink`): a helper process with bounded waits, offline where online cannot be, nothing private.
Its files lie in `wandb-summary` in the sweep's folder; logged again, it replaces the run that was there.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from trainer.config import LoggerConfig
from trainer.files import plain, write_atomically
from trainer.reading import read_section
from trainer.secrets import Redactor
from trainer.sweep_files import is_left_over
from trainer.sweep_ranking import best_plans
from trainer.wandb_labels import group_name
from trainer.wandb_sink import Series, open_wandb

FOLDER = "wandb-summary"
JOB_TYPE = "sweep-summary"
TABLE = "jobs"  # the name of the table of all jobs
WORLD_SIZE = "scaling/world_size"
PLOTTED = ("samples_per_s", "speedup", "efficiency", "step_time_s", "strategy", "microbatches")
SUMMARISED = ("name", "strategy", "world_size", "microbatches", *PLOTTED[:4], "wall", "cause", "verdict")

_log = logging.getLogger(__name__)
Row = Mapping[str, Any]


def log_sweep(folder: Path, logger: LoggerConfig) -> None:
    """Log the summary run of the sweep in `folder`, whose table.json is there.

    Takes at most as long as the start and end of a run; what goes wrong costs one warning. A sweep that was
    stopped gets none: who stops it does not want to wait, and resuming it ends in one.
    """
    if logger.name == "none":
        return
    try:
        _log_sweep(folder, logger)
    except Exception as error:
        _log.warning("W&B has no summary of the sweep (%s: %s)", type(error).__name__, error)


def sweep_logger(folder: Path) -> LoggerConfig | None:
    """The logger of the sweep's first job that left a config.yaml, for a caller that has none at hand."""
    for path in sorted(folder.glob("*/config.yaml")):
        if is_left_over(path.parent):
            continue
        try:
            section = yaml.safe_load(path.read_text(encoding="utf-8"))["logger"]
            return read_section(LoggerConfig, section)
        except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
            continue
    return None


def _log_sweep(folder: Path, logger: LoggerConfig) -> None:
    sweep = _read(folder / "sweep.json")
    if sweep.get("state") == "stopped":
        return
    redactor = Redactor({"logger": asdict(logger)})
    table = redactor.mapping(_read(folder / "table.json"), texts_only=True)
    rows: list[Row] = table["rows"]
    own = folder / FOLDER
    shutil.rmtree(own / "wandb", ignore_errors=True)  # of the run that this one replaces
    own.mkdir(exist_ok=True)
    write_atomically(own / "rows.jsonl", _lines(rows))
    write_atomically(own / "scaling.jsonl", _lines(scaling_rows(rows)))
    labels = [problem.get("label") for problem in table.get("problems", ())]
    config = redactor.mapping(summary_config(folder, logger, sweep, rows, labels))
    series = Series({"scaling/*": WORLD_SIZE}, resume=None)
    sink = open_wandb(logger, own, own / "scaling.jsonl", plain(config, "", []), redactor, series)
    if sink is None:
        return
    report = folder / "report.html"
    media = {"table": TABLE, "rows": str(own / "rows.jsonl")}
    media |= {"html": str(report)} if report.is_file() else {}
    sink.close({"status": "finished", "sweep": sweep_summary(table, sweep), "media": media}, exit_code=0)


def scaling_rows(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """The best plan of each world size under `scaling/`, beside the line of ideal scaling.

    A sweep's further problems stand under `scaling/problem-1/` and so on. Ideal is the one-rank job's
    samples per second times the ranks, which is samples_per_s / efficiency.
    """
    found = []
    for row in best_plans(rows):
        values = {key: row.get(key) for key in PLOTTED}
        if row.get("efficiency"):
            values["ideal_samples_per_s"] = row["samples_per_s"] / row["efficiency"]
            values["ideal_speedup"] = row["world_size"]
        prefix = f"scaling/problem-{row['problem']}" if row["problem"] else "scaling"
        line = {f"{prefix}/{key}": value for key, value in values.items()}
        found.append({WORLD_SIZE: row["world_size"], **line})
    return found


def sweep_summary(table: Row, sweep: Row) -> dict[str, Any]:
    """Of the sweep: its sentences, the best plan of its first problem, and how many jobs ended how."""
    states = [str(row.get("state")) for row in table["rows"]]
    best: Row = next((row for row in table["rows"] if row.get("place") == 1), {})
    return {
        "sentence": " ".join(table.get("sentences") or ()) or None,
        "state": sweep.get("state"),
        "jobs": {state: states.count(state) for state in dict.fromkeys(states)},
        "best": {key: best.get(key) for key in SUMMARISED},
    }


def summary_config(
    folder: Path, logger: LoggerConfig, sweep: Row, rows: Sequence[Row], labels: Sequence[Any] = ()
) -> dict[str, Any]:
    """The summary run's config: what was swept, and the `logger` section with group, job type and name."""
    group = logger.group or group_name(folder)
    named = {"group": group, "job_type": JOB_TYPE, "run_name": f"{logger.run_name or group} summary"}
    return {
        "overrides": sweep.get("overrides"),
        "strategies": sorted({str(row["strategy"]) for row in rows if row.get("strategy")}),
        "world_sizes": sorted({int(row["world_size"]) for row in rows if row.get("world_size")}),
        "problems": labels,
        "logger": {**asdict(logger), **named},
    }


def _read(path: Path) -> dict[str, Any]:
    record = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(record, dict):
        raise ValueError(f"{path} holds no mapping")
    return record


def _lines(rows: Iterable[Row]) -> str:
    return "".join(json.dumps(plain(row, "", [])) + "\n" for row in rows)

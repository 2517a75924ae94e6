"""A sweep's folder written by hand: jobs of a few steps of 100 rows, one of them warm-up."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

BATCH = 100
WARM_UP_S = 9.0  # of the first step, which no median may rest on


def write_sweep_file(folder: Path, state: str = "complete", **changes: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    record = {"schema": 1, "overrides": ["strategy=single,ddp"], "started_at": 1.0, "ended_at": 9.0}
    (folder / "sweep.json").write_text(json.dumps({**record, "state": state, **changes}))


def write_job(
    folder: Path,
    number: int,
    strategy: str,
    world_size: int,
    times_s: Sequence[float] = (),
    *,
    state: str = "complete",
    reason: str | None = None,
    microbatches: int = 1,
    swept: dict[str, str] | None = None,
    config: dict[str, Any] | None = None,
    verdict: dict[str, Any] | None = None,
    cores: int = 8,
    batch: int = BATCH,
    **row: Any,
) -> Path:
    """A job with a warm-up step and one step for each of `times_s`; without any, it never started to train.

    `row` is added to each step's row; a list in it has a value for each step after warm-up.
    """
    own = {"strategy": strategy, "world_size": str(world_size), **(swept or {})}
    overrides = [f"{key}={value}" for key, value in own.items()]
    path = folder / f"{number}-{','.join(overrides)}"
    path.mkdir(parents=True)
    record = {
        "schema": 1,
        "number": number,
        "overrides": overrides,
        "swept": own,
        "state": state,
        "reason": reason,
        "exit_code": 0 if state == "complete" else 1,
        "started_at": 1.0,
        "ended_at": 2.0,
        "config_sha256": "0" * 64,
    }
    (path / "job.json").write_text(json.dumps(record))
    if not times_s:
        return path
    settings = {
        "run_dir": str(path),
        "world_size": world_size,
        "strategy": {"name": strategy, "microbatches": microbatches, "schedule": "1f1b"},
        "model": {"name": "mlp", "hidden_dim": 128},
        "data": {"batch_size": batch},
        **(config or {}),
    }
    (path / "config.yaml").write_text(yaml.safe_dump(settings))
    rows = [metrics_row(0, WARM_UP_S, batch, **dict.fromkeys(row))]
    for place, time_s in enumerate(times_s):
        values = {key: value[place] if isinstance(value, list) else value for key, value in row.items()}
        rows.append(metrics_row(place + 1, time_s, batch, **values))
    (path / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    environment = {
        "cpu_count": 64,  # of which the run may use some
        "cores": cores,
        "local_world_size": world_size,
        "world_size": world_size,
        "device": "cpu",
    }
    if state == "complete":
        summary = {"schema": 1, "status": "finished", "steps": len(rows), "environment": environment}
        (path / "summary.json").write_text(json.dumps(summary))
        told = {
            "wall": "compute",
            "cause": "none",
            "too_noisy": False,
            "sentence": f"Job {number}.",
            **(verdict or {}),
        }
        (path / "verdict.json").write_text(json.dumps(told))
        (path / "report.html").write_text("a report")
    return path


def metrics_row(step: int, time_s: float, batch: int = BATCH, **more: Any) -> dict[str, Any]:
    return {
        "schema": 1,
        "step": step,
        "is_warmup": step == 0,
        "loss": 4.0 - step,
        "step_time_s": time_s,
        "samples_per_s": batch / time_s,
        **more,
    }


def scaling_sweep(folder: Path, **four: Any) -> Path:
    """One rank 500 rows/s, two 1000 (900 to 1125), four 1250 with no spread, unless `four` says otherwise."""
    write_sweep_file(folder)
    write_job(folder, 0, "single", 1, (0.2, 0.2, 0.2))
    write_job(folder, 1, "ddp", 2, (0.08, 0.1, 0.125))
    write_job(folder, 2, "ddp", 4, **{"times_s": (0.08, 0.08, 0.08), **four})
    return folder

"""A sweep's folder written by hand: five jobs, of which one failed and one made no sense."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SENTENCE = "Use 2 ranks with ddp, microbatches=1: 1.6 times one rank."


def row(number: int, strategy: str, world_size: int, rate: float | None, **further: Any) -> dict[str, Any]:
    """`rate` in samples per second, of batches of 16; None where the job is not complete."""
    return {
        "number": number,
        "name": f"{number}-strategy={strategy},world_size={world_size}",
        "state": "complete" if rate else "failed",
        "reason": None,
        "problem": 0,
        "place": None,
        "tied_with": [],
        "swept": {"strategy": strategy, "world_size": str(world_size)},
        "strategy": strategy,
        "world_size": world_size,
        "microbatches": 1,
        "samples_per_s": rate,
        "step_time_s": 16 / rate if rate else None,
        "speedup": rate / 100 if rate else None,
        "efficiency": rate / 100 / world_size if rate else None,
        "cause": "none" if rate else None,
        **further,
    }


ROWS = [
    row(3, "pipeline", 4, 200.0, place=1),
    row(1, "ddp", 2, 160.0, place=2),
    row(2, "pipeline", 2, 125.0, place=3),
    row(0, "ddp", 1, 100.0, place=4),
    row(4, "ddp", 4, None, reason="Rank 1 of 4 failed: ValueError: boom"),
    row(5, "single", 2, None, state="skipped", reason="strategy=single runs on one rank"),
]


def write_sweep(folder: Path, rows: list[dict[str, Any]] = ROWS, state: str = "failed") -> Path:
    """The folder, with sweep.json, table.json and a report; returned for convenience."""
    folder.mkdir(parents=True)
    sweep = {"schema": 1, "overrides": ["strategy=ddp,pipeline,single", "world_size=1,2,4"], "state": state}
    (folder / "sweep.json").write_text(json.dumps(sweep))
    labels = {row["problem"]: f"problem {row['problem']}" for row in rows}
    problems = [{"number": number, "label": label} for number, label in labels.items()]
    table = {"schema": 1, "sentences": [SENTENCE], "problems": problems, "rows": rows}
    (folder / "table.json").write_text(json.dumps(table))
    (folder / "report.html").write_text("<p>the report</p>")
    return folder

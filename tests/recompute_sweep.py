"""The numbers of a sweep's table, worked out again from metrics.jsonl and config.yaml alone.

    python tests/recompute_sweep.py SWEEP

compares them with table.json, prints a line for each job, and exits 1 where they differ. Nothing of the
project is imported.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

import yaml

TOLERANCE = 1e-9
MEDIANS = (
    "bytes_least bytes_predicted bytes_sent effective_bandwidth_GBps bubble_fraction bubble_expected "
    "compute_s exposed_comm_s wait_s idle_s host_s"
).split()


def job_numbers(folder: Path) -> dict[str, Any]:
    """The columns that one job's rows give."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    steady = [row for row in rows if not row["is_warmup"]]
    config = yaml.safe_load((folder / "config.yaml").read_text())
    found: dict[str, Any] = {
        "strategy": config["strategy"]["name"],
        "batch_size": config["data"]["batch_size"],
        "steps": len(rows),
        "steady_steps": len(steady),
        "loss": rows[-1]["loss"],
    }
    for key, low, high in (
        ("step_time_s", "step_time_low_s", "step_time_high_s"),
        ("samples_per_s", "samples_per_s_low", "samples_per_s_high"),
    ):
        values = sorted(row[key] for row in steady)
        found |= {low: quantile(values, 0.25), key: quantile(values, 0.5), high: quantile(values, 0.75)}
    for key in MEDIANS:
        known = [row[key] for row in steady if row.get(key) is not None]
        found[key] = statistics.median(known) if known else None
    readings = [row["bytes_wire"] / row["wire_steps"] for row in steady if row.get("bytes_wire") is not None]
    found["bytes_wire"] = statistics.median(readings) if readings else None
    return found


def quantile(values: list[float], share: float) -> float:
    """Of sorted values, linearly interpolated between neighbours."""
    place = share * (len(values) - 1)
    below = math.floor(place)
    above = min(below + 1, len(values) - 1)
    return values[below] + (place - below) * (values[above] - values[below])


def differences(sweep: Path) -> list[str]:
    """What table.json says otherwise, of complete jobs; every job must be of the same problem."""
    table = json.loads((sweep / "table.json").read_text())
    rows = [row for row in table["rows"] if row["state"] == "complete"]
    fresh = {row["name"]: job_numbers(sweep / row["name"]) for row in rows}
    ones = [fresh[row["name"]]["samples_per_s"] for row in rows if row["world_size"] == 1]
    order = sorted(rows, key=lambda row: -fresh[row["name"]]["samples_per_s"])
    wrong = []
    for place, row in enumerate(order, 1):
        own = fresh[row["name"]]
        own["place"] = place
        own["speedup"] = own["samples_per_s"] / max(ones) if ones else None
        own["efficiency"] = own["speedup"] / row["world_size"] if ones else None
        for key, value in own.items():
            if not same(value, row[key]):
                wrong.append(f"{row['name']}: {key} is {row[key]}, from the rows {value}")
    return wrong


def same(value: Any, told: Any) -> bool:
    if isinstance(value, int | float) and isinstance(told, int | float):
        return math.isclose(value, told, rel_tol=TOLERANCE, abs_tol=1e-15)
    return bool(value == told)


def main() -> int:
    sweep = Path(sys.argv[1])
    wrong = differences(sweep)
    for line in wrong:
        print(line)
    count = sum(row["state"] == "complete" for row in json.loads((sweep / "table.json").read_text())["rows"])
    print(f"{count} complete jobs, {len(wrong)} differences")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

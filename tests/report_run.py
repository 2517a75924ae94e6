"""A run's folder written by hand, two ranks, one step of warm-up and three after it; a page read back."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

STEP_TIMES_S = (0.090, 0.010, 0.012, 0.014)  # the first is warm-up; median of the others 0.012
PARTS = {  # shares of a step; data_s is a part of host_s
    "compute_s": 0.5,
    "exposed_comm_s": 0.2,
    "wait_s": 0.1,
    "idle_s": 0.0,
    "host_s": 0.2,
    "data_s": 0.05,
}
SENT = (1000, 900)  # bytes a step, by rank


def row(step: int) -> dict[str, Any]:
    time_s = STEP_TIMES_S[step]
    own: dict[str, Any] = {}
    for rank, sent in enumerate(SENT):
        own |= {f"rank/{rank}/{part}": share * time_s for part, share in PARTS.items()}
        own |= {f"rank/{rank}/step_time_s": time_s, f"rank/{rank}/bytes_sent": sent}
    return {
        "schema": 1,
        "step": step,
        "is_warmup": step == 0,
        "loss": 2.0 - step / 2,
        "eval_loss": None,
        "step_time_s": time_s,
        "bytes_sent": 1000,
        "effective_bandwidth_GBps": 1e-6 / time_s,
        "overlap": None,
        **own,
    }


def operation(name: str, rank: int, sent: int) -> dict[str, Any]:
    return {
        "operation": name,
        "shape": "8 x 4 float32",
        "rank": rank,
        "calls": 4,
        "bytes_least": sent - 40,
        "bytes_predicted": sent,
        "bytes_sent": sent,
        "bytes_received": sent,
    }


def wire(rank: int, sent: int, total: int) -> dict[str, Any]:
    return {"rank": rank, "steps": 4, "bytes_sent": sent, "bytes_framing": 388, "bytes_wire": total}


SUMMARY: dict[str, Any] = {
    "schema": 1,
    "status": "finished",
    "exit_code": 0,
    "steps": 4,
    "steady": {
        "rows": 3,
        "every": 1,
        "step_time_s": {"median": 0.012, "q1": 0.011, "q3": 0.013},
        "bytes_sent": {"median": 1000, "q1": 1000, "q3": 1000},
    },
    "environment": {"world_size": 2, "backend": "gloo", "device": "cpu", "torch": "2.13.0"},
    "headline_rank": 0,
    # four steps of 1000 and of 900 bytes
    "bytes_by_operation": [
        operation("all_reduce weight gradient", 0, 2400),
        operation("all_reduce <script>alert(1)</script>", 0, 1600),
        operation("all_reduce weight gradient", 1, 3600),
    ],
    "wire": [wire(0, 4000, 4400), wire(1, 3600, 3988)],
}

VERDICT: dict[str, Any] = {
    "schema": 1,
    "wall": "link",
    "cause": "no_overlap",
    "rank": None,
    "sentence": "Half of the step waits for the link & <b>nothing</b> hides it.",
    "step_time_s": 0.012,
    "step_time_q1_s": 0.011,
    "step_time_q3_s": 0.013,
    "steps": 3,
    "noise_s": 0.0005,
    "simulated_step_time_s": 0.0123,
    "predicted_step_time_s": 0.0084,
    "gain_s": 0.0036,
    "gain_share": 0.3,
    "override": "strategy.overlap=true",
    "too_noisy": False,
    "missing": ["no bytes of the wire in step 1"],
    "time_split": [],
    "evidence": [{"name": "exposed_comm_s", "value": 0.0024, "unit": "s", "text": "seen by the main thread"}],
    "causes": [
        {
            "cause": "no_overlap",
            "rank": None,
            "gain_s": 0.0036,
            "gain_share": 0.3,
            "predicted_step_time_s": 0.0084,
            "override": "strategy.overlap=true",
            "text": "transfers under compute",
        },
        {
            "cause": "slow_rank",
            "rank": 1,
            "gain_s": 0.001,
            "gain_share": None,
            "override": None,
            "text": None,
        },
    ],
}


def event(rank: int, name: str, kind: str, start: float, duration: float, step: int, **args: Any) -> Any:
    """`start` and `duration` in microseconds."""
    return {
        "ph": "X",
        "pid": rank,
        "tid": int(kind == "transfer"),
        "name": name,
        "cat": kind,
        "ts": start,
        "dur": duration,
        "args": {"step": step, **args},
    }


def step_events(step: int, start: float, ranks: tuple[int, ...] = (0, 1)) -> list[Any]:
    events = []
    for rank in ranks:
        own = [
            ("layer 0, microbatch 3, forward", "compute", 0, 4000, {"microbatch": 3, "what": "forward"}),
            ("layer 0, microbatch 3, dW", "compute", 4000, 2000, {"microbatch": 3, "what": "dW"}),
            (
                "all_reduce <i>",
                "transfer",
                6000,
                2500,
                {"bytes": 1000, "algorithm": "ring", "group": "world"},
            ),
            ("all_reduce <i>", "exposed", 6000, 2500, {}),
            ("late peer", "wait", 8500, 500, {}),
        ]
        events += [
            event(rank, name, kind, start + at, time, step, **args) for name, kind, at, time, args in own
        ]
    return events


# Step 3 was cut off before rank 1 had done anything: step 2 is the last whole one.
TRACE: dict[str, Any] = {
    "traceEvents": [
        {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": "rank 0"}},
        {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "rank 1"}},
        *step_events(1, 100_000.0),
        *step_events(2, 200_000.0),
        *step_events(3, 300_000.0, ranks=(0,)),
    ],
    "displayTimeUnit": "ms",
    "otherData": {"steps": [1, 2, 3], "clock": "monotonic"},
}


def point(size_bytes: int, time_s: float) -> dict[str, Any]:
    spread = {"q1_s": time_s * 0.9, "q3_s": time_s * 1.1, "samples": 5}
    return {"size_bytes": size_bytes, "algorithm": "ring", "time_s": time_s, **spread}


LINK: dict[str, Any] = {
    "schema": 1,
    "measured": {"host": "a host", "backend": "gloo"},
    "curves": [
        {"operation": "all_reduce", "group_size": 2, "points": [point(100, 0.001), point(10_000, 0.004)]}
    ],
}

CONFIG = """\
strategy:
  name: ddp
  overlap: false
model:
  name: mlp
note: <script>alert(2)</script>
"""

FILES: dict[str, str] = {
    "config.yaml": CONFIG,
    "metrics.jsonl": "".join(json.dumps(row(step)) + "\n" for step in range(4)),
    "summary.json": json.dumps(SUMMARY),
    "verdict.json": json.dumps(VERDICT),
    "trace.json": json.dumps(TRACE),
    "link_curve.json": json.dumps(LINK),
}


def write_run(folder: Path, **changes: str | None) -> Path:
    """The folder with all files, but for `changes` (`verdict_json=text`); None leaves a file out."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in FILES.items():
        text = changes.get(name.replace(".", "_"), text)
        if text is not None:
            (folder / name).write_text(text, encoding="utf-8")
    return folder


def markup(path: Path) -> str:
    """The page without its scripts."""
    page = path.read_text(encoding="utf-8")
    start = page.find("<script")
    return page if start < 0 else page[:start]


def words(path: Path) -> str:
    """What a reader sees, spaces joined."""
    body = re.sub(r"<style>.*?</style>", "", markup(path), flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", body)).split())


def table_rows(path: Path) -> list[list[str]]:
    """The rows of all tables as texts."""
    found = re.findall(r"<tr>(.*?)</tr>", markup(path), flags=re.DOTALL)
    cells = [re.findall(r"<t[dh].*?>(.*?)</t[dh]>", one, flags=re.DOTALL) for one in found]
    return [[" ".join(re.sub(r"<[^>]+>", "", cell).split()) for cell in one] for one in cells]

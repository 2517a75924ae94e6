"""What each operation uses of the link between two hosts, and how it compares with gloo's own: one rank's
side, and the report.

iperf3 and an operation take turns: it reads the rate of TCP payload with both directions busy, and the
operation follows at once. The share is the median over turns of the two rates' ratio, so that what disturbs
the machine for a while disturbs both.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import time
from dataclasses import asdict, dataclass
from typing import Any

from collectives.group import World
from collectives.link_share import IN_FLIGHT, OPERATIONS, late_ratio, link_case, link_rate
from collectives.operations import barrier
from trainer.errors import Stopped
from trainer.two_hosts import ADDRESSES

Row = dict[str, Any]

LEAST_SHARE = 0.95
MOST_RATIO = {"reduce_scatter": 0.55, "all_gather": 0.75, "all_to_all": 0.6}  # ours over gloo's own
IPERF_S, IPERF_OMIT_S = 1, 1
IPERF_TRIES, IPERF_RETRY_S = 20, 0.25  # the server may not listen yet, or not again
SCHEMA = 1


@dataclass(frozen=True)
class Request:
    """What to measure; bytes are those that a rank sends."""

    message_bytes: int = 4 * 2**20
    total_bytes: int = 64_000_000
    turns: int = 5
    in_flight: int = IN_FLIGHT
    shard_bytes: int = 16_000_000  # of the comparison with gloo's own
    rounds: int = 20  # 0: no comparison


def measure(world: World, request: Request) -> Row:
    """One rank's side; both get the same operations and ratios, rank 0 the readings of iperf3 too."""
    turns: dict[str, list[Row]] = {operation: [] for operation in OPERATIONS}
    for _ in range(request.turns):
        for operation, rows in turns.items():
            reading = _read(world)
            row = link_rate(
                world, operation, request.message_bytes, request.total_bytes, 1, request.in_flight
            )
            rows.append({**row, "iperf3_GBps": reading})
    ratios = [
        late_ratio(world, link_case(operation, request.shard_bytes), request.rounds)
        for operation in (MOST_RATIO if request.rounds else ())
    ]
    return {"operations": [over_turns(rows) for rows in turns.values()], "ratios": ratios}


def over_turns(rows: list[Row]) -> Row:
    """One row of an operation: medians, and the readings and shares of its turns."""
    readings = [row["iperf3_GBps"] for row in rows]
    shares = [row["GBps"] / reading if reading else 0.0 for row, reading in zip(rows, readings, strict=True)]
    return {
        **rows[0],
        "time_s": statistics.median(row["time_s"] for row in rows),
        "times_s": [row["time_s"] for row in rows],
        "GBps": statistics.median(row["GBps"] for row in rows),
        "wrong": sum(row["wrong"] for row in rows),
        "iperf3_GBps": statistics.median(readings),
        "readings_GBps": readings,
        "shares": shares,
        "share": statistics.median(shares),
    }


def _read(world: World) -> float:
    """iperf3's reading on rank 0, while the other waits; 0.0 there."""
    reading = iperf3_GBps() if world.rank == 0 else 0.0
    barrier(world.control)
    return reading


def iperf3_GBps(server: str = ADDRESSES[1], seconds: int = IPERF_S) -> float:
    """Decimal GB/s of TCP payload that arrive in the slower direction, both being busy.

    Raises:
        Stopped: no server answers.
    """
    command = ["iperf3", "--client", server, "--bidir", "--json", "--time", str(seconds)]
    command += ["--omit", str(IPERF_OMIT_S)]
    said = ""
    for _ in range(IPERF_TRIES):
        found = subprocess.run(command, capture_output=True, text=True, check=False)
        try:
            answer = json.loads(found.stdout)
        except ValueError:
            answer = {"error": found.stderr.strip() or f"exit code {found.returncode}"}
        if "error" not in answer:
            return slower_direction_GBps(answer)
        said = answer["error"]
        time.sleep(IPERF_RETRY_S)
    raise Stopped(f"iperf3 cannot read the link to {server}: {said}")


def slower_direction_GBps(answer: Row) -> float:
    """Of iperf3's JSON after --bidir."""
    end = answer["end"]
    received = (end[name]["bits_per_second"] for name in ("sum_received", "sum_received_bidir_reverse"))
    return float(min(received)) / 8e9


def make_report(measured: Row, request: Request, rate: str, burst: str) -> Row:
    """What rank 0 measured, with shares and bars."""
    operations = [{**row, "least_share": LEAST_SHARE} for row in measured["operations"]]
    ratios = [{**row, "most_ratio": MOST_RATIO[row["operation"]]} for row in measured["ratios"]]
    return {
        "schema": SCHEMA,
        "rate": rate,
        "burst": burst,
        "request": asdict(request),
        "operations": operations,
        "ratios": ratios,
        "load_average": os.getloadavg()[0],
    }


def failures(report: Row) -> list[str]:
    """One sentence for each wrong result and each bar that is missed."""
    found = []
    for row in report["operations"]:
        if row["wrong"]:
            found.append(f"{row['operation']}: {row['wrong']} elements of the result are wrong")
        if not row["share"] >= row["least_share"]:
            found.append(
                f"{row['operation']} moves {row['GBps']:.4f} GB/s in each direction, {row['share']:.3f} of "
                f"what iperf3 reads, and at least {row['least_share']} is asked"
            )
    for row in report["ratios"]:
        if not row["ratio"] <= row["most_ratio"]:
            found.append(
                f"{row['operation']} takes {row['ratio']:.3f} of the time of gloo's own, and at most "
                f"{row['most_ratio']} is asked"
            )
    return found

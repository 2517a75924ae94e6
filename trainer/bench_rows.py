"""A bench's rows: both placements of a case side by side, what they add up to, and what they fail to show."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trainer.bench_config import PLACEMENTS, REDUCING, ROOTED, BenchSection

if TYPE_CHECKING:
    from collectives.subject import Case

Row = dict[str, Any]

CASE_KEYS = ("operation", "size_bytes", "count", "dtype", "reduction", "root", "algorithm_asked", "algorithm")
MEASURED_KEYS = (
    "time_s",
    "p50_s",
    "p95_s",
    "p99_s",
    "min_rank_s",
    "algbw_GBps",
    "busbw_GBps",
    "wrong",
    "sent_bytes",
    "least_bytes",
    "wire_bytes",
    "wire_over_least",
    "calls",
)
AGAINST_KEYS = ("ours_s", "native_s", "ratio", "ratio_low", "ratio_high", "host_added_s", "rounds")


def make_row(case: Case, measured: Mapping[str, Row | None], against: Row | None) -> Row | None:
    """One case with what was measured of it by placement; None when it has none of the placements.

    What has no meaning for the operation is null: a reduction where nothing is reduced, a root where there
    is none, and a barrier's dtype.
    """
    found = [result for result in measured.values() if result is not None]
    if not found:
        return None
    operation = case.operation
    return {
        "operation": operation,
        "size_bytes": found[0]["size_bytes"],
        "count": found[0]["count"],
        "dtype": None if operation == "barrier" else case.dtype,
        "reduction": case.reduction if operation in REDUCING else None,
        "root": case.root if operation in ROOTED else None,
        "algorithm_asked": case.algorithm,
        "algorithm": found[0]["algorithm"],
        **{placement: _measured(measured.get(placement)) for placement in PLACEMENTS},
        "against": None if against is None else {key: against[key] for key in AGAINST_KEYS},
    }


def _measured(result: Row | None) -> Row | None:
    return None if result is None else {key: result[key] for key in MEASURED_KEYS}


def measurements(row: Row) -> Iterator[tuple[str, Row]]:
    """The placements that were measured, and what was found."""
    for placement in PLACEMENTS:
        if row[placement] is not None:
            yield placement, row[placement]


def flat(row: Row) -> list[Row]:
    """One mapping per placement, every key in it: the rows of bench.csv and of W&B."""
    against = row["against"] or dict.fromkeys(AGAINST_KEYS)
    return [
        {**{key: row[key] for key in CASE_KEYS}, "placement": placement, **found, **against}
        for placement, found in measurements(row)
    ]


def totals(rows: Sequence[Row]) -> Row:
    """nccl-tests' footer: wrong values and the average bus bandwidth over every row and placement."""
    found = [result for row in rows for _, result in measurements(row)]
    checked = [result["wrong"] for result in found if result["wrong"] is not None]
    bandwidths = [result["busbw_GBps"] for result in found if result["busbw_GBps"] is not None]
    return {
        "measurements": len(found),
        "checked": len(checked),
        "wrong": sum(checked) if checked else None,
        "averaged": len(bandwidths),
        "average_busbw_GBps": statistics.fmean(bandwidths) if bandwidths else None,
    }


def failures(rows: Sequence[Row], bench: BenchSection) -> list[str]:
    """A sentence for each measurement with wrong values, then for each below `bench.min_busbw`.

    The gate looks at the largest size of each operation and dtype alone. Where there is no bus bandwidth
    there is nothing to compare; `BenchRun.check_world` has refused a gate on one rank.
    """
    sentences = [
        f"{described(row, placement)} gave {found['wrong']:,} wrong values"
        for row in rows
        for placement, found in measurements(row)
        if found["wrong"]
    ]
    largest: dict[tuple[str, str], int] = {}
    for row in rows:
        kind = (row["operation"], row["dtype"])  # a dtype may cut a size to other whole elements
        largest[kind] = max(row["size_bytes"], largest.get(kind, 0))
    for row in rows:
        least = bench.least_busbw(row["operation"])
        if least is None or row["size_bytes"] < largest[row["operation"], row["dtype"]]:
            continue
        for placement, found in measurements(row):
            if found["busbw_GBps"] is not None and found["busbw_GBps"] < least:
                sentences.append(
                    f"{described(row, placement)} has a bus bandwidth of {found['busbw_GBps']:.4g} GB/s, "
                    f"below bench.min_busbw={least:g}"
                )
    return sentences


def described(row: Row, placement: str) -> str:
    """A measurement in words."""
    details = [row["dtype"], row["reduction"], None if row["root"] is None else f"root {row['root']}"]
    details += [row["algorithm"], placement.replace("_", " ")]
    return f"{row['operation']} of {row['size_bytes']:,} bytes ({', '.join(filter(None, details))})"

"""Hand-made measurements for tests of what stands around the measuring."""

from __future__ import annotations

from typing import Any


def measured(**changes: Any) -> dict[str, Any]:
    """A placement of 4,000 bytes among two ranks in 2 us: 2 GB/s, and as much busbw in an all_reduce."""
    return {
        "algorithm": "ring",
        "size_bytes": 4000,
        "count": 1000,
        "time_s": 2e-6,
        "p50_s": 2e-6,
        "p95_s": 3e-6,
        "p99_s": 4e-6,
        "min_rank_s": 1e-6,
        "algbw_GBps": 2.0,
        "busbw_GBps": 2.0,
        "wrong": 0,
        "sent_bytes": 4000,
        "least_bytes": 4000,
        "wire_bytes": 4100,
        "wire_over_least": 1.025,
        "calls": 1,
        **changes,
    }


AGAINST = {
    "algorithm": "ring",
    "size_bytes": 4000,
    "ours_s": 2e-6,
    "native_s": 4e-6,
    "ratio": 0.5,
    "ratio_low": 0.4,
    "ratio_high": 0.6,
    "host_added_s": 1e-7,
    "rounds": 20,
}

"""Closed forms: the bytes one rank sends in one operation, for each algorithm, and the least possible.

Payload only: framing is measured and reported apart. S is the full tensor, n the group's size.

| operation      | algorithm  | bytes rank r sends                                              |
|----------------|------------|-----------------------------------------------------------------|
| all_reduce     | ring       | 2 (n-1)/n S, in whole segments: see `ring_all_reduce_bytes`     |
| all_gather     | direct     | (n-1) times its own shard                                       |
| all_gather     | ring       | (n-1)/n S, shards equal                                         |
| reduce_scatter | direct     | all of S but its own shard                                      |
| reduce_scatter | reduce_all | as all_reduce: gloo reduces all of S everywhere and slices      |
| send           | direct     | S                                                               |
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

ITEMSIZE = {"float32": 4, "float64": 8, "bfloat16": 2}
GLOO_MAX_SEGMENT_BYTES = 2**20  # gloo/allreduce.h, kDefaultMaxSegmentSize
GLOO_SEGMENTS_PER_RANK = 2  # one is sent while another is reduced

Shards = int | Sequence[int]


@dataclass(frozen=True)
class Algorithms:
    """What moves the bytes of each collective."""

    all_reduce: str = "ring"
    all_gather: str = "direct"
    reduce_scatter: str = "direct"


def algorithms_of(backend: str, choice: str) -> Algorithms:
    """Algorithms that `collectives.algorithm` stands for on a backend.

    On gloo the direct exchange sends half of what gloo's own reduce_scatter sends; nccl's own are rings.
    """
    if backend == "nccl" or choice == "native":
        return Algorithms("ring", "ring", "ring" if backend == "nccl" else "reduce_all")
    return Algorithms("ring", "direct", "direct")


def bytes_sent(operation: str, algorithm: str, shards: Shards, dtype: str, n: int, rank: int) -> int:
    """Bytes that `rank` (its place in the group) sends.

    Args:
        shards: elements of each rank's shard, or of the full tensor where nothing is sharded.

    Raises:
        ValueError: an operation and algorithm without a closed form.
    """
    itemsize = ITEMSIZE[dtype]
    sizes = [shards] if isinstance(shards, int) else list(shards)
    total = sum(sizes)
    if n == 1 and operation != "send":
        return 0
    match operation, algorithm:
        case ("all_reduce", "ring") | ("reduce_scatter", "reduce_all"):
            return ring_all_reduce_bytes(total, itemsize, n, rank)
        case ("all_gather", "direct") | ("all_gather", "ring"):
            return (n - 1) * sizes[rank] * itemsize
        case ("reduce_scatter", "direct") | ("reduce_scatter", "ring"):
            return (total - sizes[rank]) * itemsize
        case ("send", _):
            return total * itemsize
    raise ValueError(f"no closed form for {operation} by {algorithm}")


def bytes_least(operation: str, shards: Shards, dtype: str, n: int, rank: int) -> int:
    """Bytes that any algorithm must send from `rank`, taken as even over ranks where it may choose."""
    itemsize = ITEMSIZE[dtype]
    sizes = [shards] if isinstance(shards, int) else list(shards)
    if n == 1 and operation != "send":
        return 0
    match operation:
        case "all_reduce":
            return math.ceil(2 * (n - 1) * sum(sizes) * itemsize / n)
        case "all_gather":
            return (n - 1) * sizes[rank] * itemsize
        case "reduce_scatter":
            return (sum(sizes) - sizes[rank]) * itemsize
        case "send":
            return sum(sizes) * itemsize
    raise ValueError(f"no least traffic known for {operation}")


def ring_all_reduce_bytes(numel: int, itemsize: int, n: int, rank: int) -> int:
    """Ring all_reduce as gloo runs it: 2 (n-1)/n S, but for tensors that do not fill their segments.

    The tensor is cut into n chunks of equally many segments, at least two per rank and at most 1 MiB
    each; the last segments may be short or empty. A rank sends every chunk twice, once to be reduced and
    once reduced, but for its own and the one below, each sent once (gloo/allreduce.cc, `ring`; the kernel's
    own counters agree to the byte once framing is taken off).
    """
    total = numel * itemsize
    if total == 0 or n == 1:
        return 0
    max_segment = itemsize * max(1, GLOO_MAX_SEGMENT_BYTES // itemsize)
    segments = _round_up(max(-(-total // max_segment), n * GLOO_SEGMENTS_PER_RANK), n)
    segment_bytes = _round_up(-(-total // segments), itemsize)
    chunk_bytes = segments // n * segment_bytes

    def chunk(index: int) -> int:
        start = index % n * chunk_bytes
        return max(0, min(chunk_bytes, total - start))

    return 2 * total - chunk(rank) - chunk(rank - 1)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple

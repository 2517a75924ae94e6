"""Closed forms: what one rank sends in one operation, for each algorithm, and the least possible.

Bytes are payload. Framing follows from the number of messages, and is reported apart. S is the full tensor,
n the group's size, a block one rank's part of S.

| operation      | algorithm        | the busiest rank sends                             | least           |
|----------------|------------------|----------------------------------------------------|-----------------|
| all_reduce     | ring             | 2 (n-1)/n S, in whole segments                     | 2 (n-1)/n S     |
| all_gather     | ring, direct     | (n-1) blocks                                       | (n-1) blocks    |
| reduce_scatter | ring, direct     | S but its own block                                | S but its block |
|                | reduce_all       | as all_reduce: gloo reduces all of S, then slices  |                 |
| all_to_all     | pairwise, direct | S but its own block                                | S but its block |
| broadcast      | tree             | S times the rounds in which the root sends, log2 n | S               |
|                | fan              | S: the root a slice to each, which they exchange   |                 |
| reduce         | ring_gather      | all of S but two segments, then its block          | S               |
|                | fan              | S: slices are exchanged, reduced, sent to the root |                 |
| scatter        | linear, direct   | S but its own block: the root                      | S but its block |
| gather         | linear, direct   | its own block: every rank but the root             | its block       |
| send_recv      | direct           | S                                                  | S               |
| barrier        | dissemination    | nothing                                            | nothing         |

The least of all_reduce, all_gather and reduce_scatter: Patarasuk and Yuan, "Bandwidth optimal all-reduce
algorithms for clusters of workstations" (2009), section 3. In a broadcast the root must send S once, and in a
reduce every other rank.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from collectives.gloo_traffic import (
    NOTHING,
    Traffic,
    one,
    ring_all_reduce,
    ring_gather_reduce,
    tree_broadcast,
)

ITEMSIZE = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int64": 8,
    "int32": 4,
    "int8": 1,
    "uint8": 1,
}

# operation -> what moves the bytes: gloo's own first, then those written by hand
ALGORITHMS: dict[str, tuple[str, ...]] = {
    "all_reduce": ("ring",),
    "all_gather": ("ring", "direct"),
    "reduce_scatter": ("reduce_all", "direct"),
    "all_to_all": ("pairwise", "direct"),
    "broadcast": ("tree", "fan"),
    "reduce": ("ring_gather", "fan"),
    "scatter": ("linear", "direct"),
    "gather": ("linear", "direct"),
    "send_recv": ("direct",),
    "barrier": ("dissemination",),
}
# nccl chooses among rings, trees and NVLS by itself; its traffic is counted as a ring's.
NCCL_NATIVE = {"reduce_scatter": "ring"}

PIECE_BYTES = 2**20  # by-hand reductions move pieces of this size, and add one while the next is under way

Shards = int | Sequence[int]


@dataclass(frozen=True)
class Algorithms:
    """What moves the bytes of each collective."""

    all_reduce: str = "ring"
    all_gather: str = "direct"
    reduce_scatter: str = "direct"


def algorithms_of(backend: str, choice: str) -> Algorithms:
    """Algorithms that `collectives.algorithm` stands for on a backend, in training.

    On gloo the direct exchange sends half of what gloo's own reduce_scatter sends; nccl's own are rings.
    """
    if backend == "nccl" or choice == "native":
        return Algorithms("ring", "ring", native("reduce_scatter", backend))
    return Algorithms()


def native(operation: str, backend: str) -> str:
    """What moves the bytes of the backend's own."""
    own = ALGORITHMS[operation][0]
    return NCCL_NATIVE.get(operation, own) if backend == "nccl" else own


def bytes_sent(
    operation: str, algorithm: str, shards: Shards, dtype: str, n: int, rank: int, root: int = 0
) -> int:
    """Bytes that `rank` (its place in the group) sends; arguments as for `traffic`."""
    return traffic(operation, algorithm, shards, dtype, n, rank, root).sent_bytes


def traffic(
    operation: str, algorithm: str, shards: Shards, dtype: str, n: int, rank: int, root: int = 0
) -> Traffic:
    """What `rank` (its place in the group) sends, and in how many messages.

    Args:
        shards: elements of each rank's block, or of the full tensor where nothing is sharded; for
            all_to_all those of the blocks that this rank sends.
        root: place of the root, in operations that have one.

    Raises:
        ValueError: an operation and algorithm without a closed form.
    """
    itemsize = ITEMSIZE[dtype]
    sizes = [shards * itemsize] if isinstance(shards, int) else [size * itemsize for size in shards]
    total = sum(sizes)
    if operation == "send":
        return Traffic(total, 1, 0)
    if operation == "recv":
        return Traffic(0, 0, 1)
    if n == 1 or (total == 0 and operation != "barrier"):
        return NOTHING
    full = sum(size > 0 for size in sizes)
    match operation, algorithm:
        case ("all_reduce", "ring") | ("reduce_scatter", "reduce_all"):
            return ring_all_reduce(total, itemsize, n, rank)
        case ("all_gather", "direct"):
            own = sizes[rank]
            return Traffic((n - 1) * own, (n - 1) * (own > 0), full - (own > 0))
        case ("all_gather", "ring"):  # each block in two halves (gloo/allgather.cc)
            return Traffic((n - 1) * sizes[rank], 2 * (n - 1), 2 * (n - 1))
        case ("reduce_scatter", "direct"):
            pieces = [pieces_of(size, itemsize) for size in sizes]
            return Traffic(total - sizes[rank], sum(pieces) - pieces[rank], (n - 1) * pieces[rank])
        case ("reduce_scatter", "ring"):
            return Traffic(total - sizes[rank], n - 1, n - 1)
        case ("all_to_all", "direct" | "pairwise"):
            count = full - (sizes[rank] > 0) if algorithm == "direct" else n - 1
            return Traffic(total - sizes[rank], count, count)
        case ("broadcast", "tree"):
            return tree_broadcast(total, n, (rank - root) % n)
        case ("broadcast", "fan"):
            return _fan_broadcast(total // itemsize, itemsize, n, (rank - root) % n)
        case ("reduce", "fan"):
            return _fan_reduce(total // itemsize, itemsize, n, (rank - root) % n)
        case ("reduce", "ring_gather"):
            return ring_gather_reduce(total, itemsize, n, rank, root)
        case ("scatter", "direct" | "linear"):
            sends = full - (sizes[root] > 0)
            return Traffic(total - sizes[root], sends, 0) if rank == root else Traffic(0, 0, one(sizes[rank]))
        case ("gather", "direct" | "linear"):
            receives = full - (sizes[root] > 0)
            return Traffic(0, 0, receives) if rank == root else Traffic(sizes[rank], one(sizes[rank]), 0)
        case ("send_recv", "direct"):  # to the next rank, from the one before
            return Traffic(total, 1, 1)
        case ("barrier", "dissemination"):
            rounds = (n - 1).bit_length()
            return Traffic(0, rounds, rounds)
    raise ValueError(f"no closed form for {operation} by {algorithm}")


def bytes_received(operation: str, algorithm: str, shards: Shards, dtype: str, n: int, rank: int) -> int:
    """Bytes that `rank` receives in what a step is made of; arguments as for `traffic`.

    Raises:
        ValueError: another operation.
    """
    sizes = [shards] if isinstance(shards, int) else list(shards)
    total = sum(sizes) * ITEMSIZE[dtype]
    if operation in ("send", "recv"):
        return total if operation == "recv" else 0
    if n == 1:
        return 0
    match operation, algorithm:
        case ("all_reduce", "ring") | ("reduce_scatter", "reduce_all"):
            return bytes_sent(operation, algorithm, shards, dtype, n, (rank + 1) % n)  # from the rank above
        case ("all_gather", "direct" | "ring"):
            return total - sizes[rank] * ITEMSIZE[dtype]
        case ("reduce_scatter", "direct" | "ring"):
            return (n - 1) * sizes[rank] * ITEMSIZE[dtype]
    raise ValueError(f"no closed form for what {operation} by {algorithm} receives")


def bytes_least(operation: str, shards: Shards, dtype: str, n: int, rank: int, root: int = 0) -> int:
    """Bytes that any algorithm must send from `rank`, taken as even over ranks where it may choose.

    A broadcast's is S for the root and nothing for the others, and a reduce's S for all but the root.
    """
    itemsize = ITEMSIZE[dtype]
    sizes = [shards] if isinstance(shards, int) else list(shards)
    total = sum(sizes) * itemsize
    if operation == "send":
        return total
    if n == 1:
        return 0
    match operation:
        case "all_reduce":
            return math.ceil(2 * (n - 1) * total / n)
        case "all_gather":
            return (n - 1) * sizes[rank] * itemsize
        case "reduce_scatter" | "all_to_all":
            return total - sizes[rank] * itemsize
        case "broadcast":
            return total if rank == root else 0
        case "reduce":
            return 0 if rank == root else total
        case "scatter":
            return total - sizes[root] * itemsize if rank == root else 0
        case "gather":
            return 0 if rank == root else sizes[rank] * itemsize
        case "send_recv":
            return total
        case "barrier":
            return 0
    raise ValueError(f"no least traffic known for {operation}")


# Cuts that the by-hand algorithms and their closed forms share


def pieces_of(size_bytes: int, itemsize: int) -> int:
    """Number of pieces in which a by-hand reduction moves a block."""
    return -(-size_bytes // (PIECE_BYTES // itemsize * itemsize))


@lru_cache(maxsize=256)
def fan_slices(numel: int, itemsize: int, n: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """[piece][peer] -> (start, stop) in elements: a slice for each rank but the root, nearest above it first.

    A piece is one slice of `PIECE_BYTES` for each of the n-1 peers, the last one what is left.
    """
    peers = n - 1
    step = PIECE_BYTES // itemsize * peers
    cuts = []
    for start in range(0, numel, step):
        length = min(step, numel - start)
        bounds = [start + length * k // peers for k in range(peers + 1)]
        cuts.append(tuple(pairwise(bounds)))
    return tuple(cuts)


def fan_scratch(numel: int, itemsize: int, n: int, place: int) -> int:
    """Elements of scratch that a fan's reduce needs at `place`, counted from the root."""
    if place == 0:
        return numel
    if n == 2:
        return 0
    slices = (piece[place - 1] for piece in fan_slices(numel, itemsize, n))
    return (n - 1) * sum(stop - start for start, stop in slices)


def _fan_broadcast(numel: int, itemsize: int, n: int, place: int) -> Traffic:
    """`place` counts from the root."""
    pieces = fan_slices(numel, itemsize, n)
    if place == 0:
        return Traffic(numel * itemsize, sum(stop > start for piece in pieces for start, stop in piece), 0)
    sent = messages = received = 0
    for piece in pieces:
        start, stop = piece[place - 1]
        sent += (stop - start) * (n - 2) * itemsize
        messages += (n - 2) * (stop > start)
        received += sum(b > a for a, b in piece)
    return Traffic(sent, messages, received)


def _fan_reduce(numel: int, itemsize: int, n: int, place: int) -> Traffic:
    pieces = fan_slices(numel, itemsize, n)
    if place == 0:
        return Traffic(0, 0, sum(stop > start for piece in pieces for start, stop in piece))
    messages = received = 0
    for piece in pieces:
        start, stop = piece[place - 1]
        messages += sum(b > a for a, b in piece)  # others' slices to them, and its own to the root
        received += (n - 2) * (stop > start)
    return Traffic(numel * itemsize, messages, received)

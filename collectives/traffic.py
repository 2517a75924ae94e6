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
GLOO_MAX_SEGMENT_BYTES = 2**20  # gloo/allreduce.h, kDefaultMaxSegmentSize
GLOO_SEGMENTS_PER_RANK = 2  # one is sent while another is reduced
GLOO_PREAMBLE_BYTES = 48  # gloo/transport/tcp/pair.h, in front of every message and notice

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


@dataclass(frozen=True)
class Traffic:
    """What one rank has to do with one call."""

    sent_bytes: int = 0
    messages_sent: int = 0
    messages_received: int = 0

    @property
    def gloo_framing_bytes(self) -> int:
        """Bytes beside the payload that gloo sends over TCP.

        For each message its sender announces it and then puts a preamble in front of the data, and its
        receiver says that it is ready (gloo/transport/tcp/pair.cc: sendNotifySendReady,
        sendUnboundBuffer, sendNotifyRecvReady).
        """
        return GLOO_PREAMBLE_BYTES * (2 * self.messages_sent + self.messages_received)


NOTHING = Traffic()


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
    if n == 1 or (total == 0 and operation != "barrier"):
        return NOTHING
    full = sum(size > 0 for size in sizes)
    match operation, algorithm:
        case ("all_reduce", "ring") | ("reduce_scatter", "reduce_all"):
            return _ring_all_reduce(total, itemsize, n, rank)
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
            return _tree_broadcast(total, n, (rank - root) % n)
        case ("broadcast", "fan"):
            return _fan_broadcast(total // itemsize, itemsize, n, (rank - root) % n)
        case ("reduce", "fan"):
            return _fan_reduce(total // itemsize, itemsize, n, (rank - root) % n)
        case ("reduce", "ring_gather"):
            return _ring_gather_reduce(total, itemsize, n, rank, root)
        case ("scatter", "direct" | "linear"):
            sends = full - (sizes[root] > 0)
            return (
                Traffic(total - sizes[root], sends, 0) if rank == root else Traffic(0, 0, _one(sizes[rank]))
            )
        case ("gather", "direct" | "linear"):
            receives = full - (sizes[root] > 0)
            return Traffic(0, 0, receives) if rank == root else Traffic(sizes[rank], _one(sizes[rank]), 0)
        case ("send_recv", "direct"):  # to the next rank, from the one before
            return Traffic(total, 1, 1)
        case ("barrier", "dissemination"):
            rounds = (n - 1).bit_length()
            return Traffic(0, rounds, rounds)
    raise ValueError(f"no closed form for {operation} by {algorithm}")


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


def _one(size: int) -> int:
    return 1 if size else 0


# gloo's own


def _tree_broadcast(total: int, n: int, place: int) -> Traffic:
    """Binomial tree: in round i every rank below 2^i sends to the one 2^i above (gloo/broadcast.cc)."""
    rounds = range((n - 1).bit_length())
    sends = sum(place < 2**i and place + 2**i < n for i in rounds)
    return Traffic(total * sends, sends, _one(place))


def ring_all_reduce_bytes(numel: int, itemsize: int, n: int, rank: int) -> int:
    """Bytes that gloo's all_reduce sends: see `_ring_all_reduce`."""
    return _ring_all_reduce(numel * itemsize, itemsize, n, rank).sent_bytes


def _ring_all_reduce(total: int, itemsize: int, n: int, rank: int) -> Traffic:
    """Ring all_reduce as gloo runs it: 2 (n-1)/n S, but for tensors that do not fill their segments.

    The tensor is cut into n chunks of equally many segments, at least two per rank and at most 1 MiB
    each; the last segments may be short or empty. A rank sends every chunk twice, once to be reduced and
    once reduced, but for its own and the one below, each sent once (gloo/allreduce.cc, `ring`; the kernel's
    own counters agree to the byte).
    """
    if total == 0 or n == 1:
        return NOTHING
    max_segment = itemsize * max(1, GLOO_MAX_SEGMENT_BYTES // itemsize)
    segments = _round_up(max(-(-total // max_segment), n * GLOO_SEGMENTS_PER_RANK), n)
    segment = _round_up(-(-total // segments), itemsize)
    chunk_bytes = segments // n * segment
    chunks = [max(0, min(chunk_bytes, total - start * chunk_bytes)) for start in range(n)]
    counts = [-(-chunk // segment) for chunk in chunks]
    above = (rank + 1) % n
    return Traffic(
        2 * total - chunks[rank] - chunks[rank - 1],
        2 * sum(counts) - counts[rank] - counts[rank - 1],
        2 * sum(counts) - counts[above] - counts[rank],
    )


def _ring_gather_reduce(total: int, itemsize: int, n: int, rank: int, root: int) -> Traffic:
    """A ring's reduce_scatter, then every chunk to the root (gloo/reduce.cc).

    The ring passes on every segment but the last two of a rank's own chunk: for chunks of more than two
    segments that is more than a reduce_scatter needs.
    """
    max_segment = itemsize * max(1, GLOO_MAX_SEGMENT_BYTES // itemsize)
    segment = _round_up(min(-(-total // (2 * n)), max_segment), itemsize)
    segments = _round_up(max(-(-total // segment), n * GLOO_SEGMENTS_PER_RANK), n)
    per_chunk = segments // n

    def length(first: int, count: int) -> int:
        start = first * segment
        return max(0, min(count * segment, total - start))

    def last_two(chunk: int) -> tuple[int, int]:
        """Bytes and messages of a chunk's last two segments."""
        size = length((chunk % n + 1) * per_chunk - 2, 2)
        return size, -(-size // segment)

    messages = -(-total // segment)
    kept, kept_messages = last_two(rank)
    sent, sent_messages = total - kept, messages - kept_messages
    received_messages = messages - last_two(rank + 1)[1]
    if rank == root:
        others = (length(peer * per_chunk, per_chunk) for peer in range(n) if peer != root)
        return Traffic(sent, sent_messages, received_messages + sum(_one(size) for size in others))
    own = length(rank * per_chunk, per_chunk)
    return Traffic(sent + own, sent_messages + _one(own), received_messages)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple

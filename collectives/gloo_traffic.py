"""What gloo's own collectives send: read from its source, and equal to the kernel's count to the byte."""

from __future__ import annotations

from dataclasses import dataclass

GLOO_MAX_SEGMENT_BYTES = 2**20  # gloo/allreduce.h, kDefaultMaxSegmentSize
GLOO_SEGMENTS_PER_RANK = 2  # one is sent while another is reduced
GLOO_PREAMBLE_BYTES = 48  # gloo/transport/tcp/pair.h, in front of every message and notice


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


def one(size: int) -> int:
    return 1 if size else 0


def tree_broadcast(total: int, n: int, place: int) -> Traffic:
    """Binomial tree: in round i every rank below 2^i sends to the one 2^i above (gloo/broadcast.cc)."""
    rounds = range((n - 1).bit_length())
    sends = sum(place < 2**i and place + 2**i < n for i in rounds)
    return Traffic(total * sends, sends, one(place))


def ring_all_reduce_bytes(numel: int, itemsize: int, n: int, rank: int) -> int:
    """Bytes that gloo's all_reduce sends: see `ring_all_reduce`."""
    return ring_all_reduce(numel * itemsize, itemsize, n, rank).sent_bytes


def ring_all_reduce(total: int, itemsize: int, n: int, rank: int) -> Traffic:
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


def ring_gather_reduce(total: int, itemsize: int, n: int, rank: int, root: int) -> Traffic:
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
        return Traffic(sent, sent_messages, received_messages + sum(one(size) for size in others))
    own = length(rank * per_chunk, per_chunk)
    return Traffic(sent + own, sent_messages + one(own), received_messages)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple

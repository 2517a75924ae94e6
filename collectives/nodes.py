"""Which node each rank runs on, and how much of a transfer goes from one node to another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

Ends = tuple[str, str]  # of a connection: "address port" here, and at the peer


def sent_by_place(operation: str, algorithm: str, sent: int, n: int, place: int) -> Mapping[int, int] | None:
    """place in the group -> bytes that one call of gloo's own collective sends there; None where not known.

    gloo's rings: an all_reduce sends to the rank below (gloo/allreduce.cc, `ring`), and so does torch's
    reduce_scatter, which is one; an all_gather sends to the rank above (gloo/allgather.cc).
    """
    match operation, algorithm:
        case ("all_reduce", "ring") | ("reduce_scatter", "reduce_all"):
            return {(place - 1) % n: sent}
        case ("all_gather", "ring"):
            return {(place + 1) % n: sent}
    return None


def bytes_between(
    nodes: Sequence[int], rank: int, ranks: Sequence[int], sent: int, by_place: Mapping[int, int] | None
) -> int | None:
    """Of `sent` bytes of `rank`, those that go to other nodes; None where that is not known.

    Args:
        nodes: node of every rank of the world.
        ranks: the group's members.
        by_place: bytes by the place in the group that they go to; None is not known.
    """
    others = [place for place, peer in enumerate(ranks) if peer != rank]
    away = [place for place in others if nodes[ranks[place]] != nodes[rank]]
    if not away or not sent:
        return 0
    if len(away) == len(others):
        return sent
    return None if by_place is None else sum(by_place.get(place, 0) for place in away)


def peers_of_connections(rank: int, ends_of_rank: Sequence[Sequence[Sequence[str]]]) -> list[int | None]:
    """The rank at the other end of each of `rank`'s connections; None where it is not certain.

    Args:
        ends_of_rank: of every rank, its connections as (own end, peer's end); an end that could not be read
            is empty.
    """
    owners: dict[Ends, int] = {}
    count: Counter[Ends] = Counter()
    for owner, connections in enumerate(ends_of_rank):
        for here, there in connections:
            count[here, there] += 1
            owners[here, there] = owner
    # Two nodes may each have a connection between the same ports of their own loopback.
    return [
        owners[there, here] if here and there and count[there, here] == count[here, there] == 1 else None
        for here, there in ends_of_rank[rank]
    ]

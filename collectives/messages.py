"""Messages of an operation that is written by hand over point-to-point: counted, posted, combined.

By hand is for gloo, where the backend's own sends more or waits longer. Every tensor is flat and contiguous;
blocks are one flat tensor for each place in the group, and may differ in size. A block without elements is
not sent.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from collectives.group import Group
from collectives.transfer import receive, send

Combine = Callable[..., Tensor]  # (a, b, out=c), elementwise
Messages = list[tuple[Tensor, int]]  # tensor, place of the peer

COMBINE: dict[str, Combine] = {
    "sum": torch.add,
    "mean": torch.add,  # divided once all is summed
    "min": torch.minimum,
    "max": torch.maximum,
}


def bytes_of(messages: Messages) -> int:
    return sum(tensor.nbytes for tensor, _ in messages)


def bytes_by_place(messages: Messages) -> dict[int, int]:
    found: dict[int, int] = {}
    for tensor, peer in messages:
        found[peer] = found.get(peer, 0) + tensor.nbytes
    return found


def post_messages(group: Group, receives: Messages, sends: Messages, tag: int) -> list[dist.Work]:
    """Their works, in that order.

    Receives go first, so that both directions of a link are busy at once: a send that is under way delays the
    notice that a receive is ready.
    """
    works = [receive(group, tensor, peer, tag) for tensor, peer in receives]
    works += [send(group, tensor, peer, tag) for tensor, peer in sends]
    return works

"""By-hand calls of a kind that was checked before: nothing is made but the messages.

A message of 1 MiB takes a few hundred microseconds, of which checks and lists would be a quarter. Blocks are
equal, and of at most one piece; what is larger goes through `collectives.direct`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from collectives.group import Group
from collectives.messages import COMBINE
from collectives.native import Starter
from collectives.traffic import PIECE_BYTES
from collectives.transfer import COLLECTIVE_TAG, peers_of


def ready_all_gather(group: Group, numel: int) -> Starter:
    """Starts the direct all_gather of blocks of `numel` elements."""
    receive, send, peers, index = *_messages(group), peers_of(group), group.index

    def start(tensor: Tensor, output: Tensor) -> Posted:
        own, blocks = tensor.view(-1), output.view(-1).split(numel)
        works = [receive([blocks[peer]], peer, COLLECTIVE_TAG) for peer in peers]
        works += [send([own], peer, COLLECTIVE_TAG) for peer in peers]
        blocks[index].copy_(own)  # while messages are on their way
        return Posted(works)

    return start


def ready_reduce_scatter(group: Group, numel: int, itemsize: int, reduction: str) -> Starter | None:
    """Starts the direct reduce_scatter to blocks of `numel` elements; None where one moves in pieces."""
    if numel * itemsize > PIECE_BYTES:
        return None
    receive, send, peers, index = *_messages(group), peers_of(group), group.index
    combine, divisor = COMBINE[reduction], group.size if reduction == "mean" else None

    def start(tensor: Tensor, output: Tensor) -> Reducing:
        blocks = tensor.view(-1).split(numel)
        scratch, buffer = group.scratch.take(len(peers) * numel, tensor.dtype, tensor.device)
        received = scratch.split(numel)
        works = [receive([received[k]], peer, COLLECTIVE_TAG) for k, peer in enumerate(peers)]
        works += [send([blocks[peer]], peer, COLLECTIVE_TAG) for peer in peers]
        posted = Reducing(works)
        posted.received, posted.own, posted.output = received, blocks[index], output.view(-1)
        posted.combine, posted.divisor, posted.group, posted.buffer = combine, divisor, group, buffer
        return posted

    return start


class Posted:
    """Messages under way."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        self.works = works

    def wait(self) -> None:
        for work in self.works:
            work.wait()


class Reducing(Posted):
    """Messages under way, and what to do with the first of them as they come."""

    received: Sequence[Tensor]
    own: Tensor
    output: Tensor
    combine: Any
    divisor: int | None
    group: Group
    buffer: Tensor

    def wait(self) -> None:
        sofar, works = self.own, iter(self.works)
        for received, work in zip(self.received, works, strict=False):  # sends are left in `works`
            work.wait()
            self.combine(sofar, received, out=self.output)
            sofar = self.output
        for work in works:
            work.wait()
        self.group.scratch.give_back(self.buffer)
        if self.divisor is not None:
            self.output.div_(self.divisor)


def _messages(group: Group) -> tuple[Any, Any]:
    assert group.process_group is not None
    return group.process_group.recv, group.process_group.send

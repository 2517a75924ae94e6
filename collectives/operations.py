"""Communication bound to its buffers: views cut and messages sized once, started and waited for many times.

All are asynchronous: `start` posts, `wait` completes. On nccl `wait` orders streams and does not block
the host; that side has not run on a GPU.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from collectives.group import Group
from collectives.ledger import Entry, Ledger

REDUCTIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


class Transfer(abc.ABC):
    """One operation of a program. `algorithm` is what moves its bytes, `sent_bytes` what one call sends."""

    def __init__(self, algorithm: str, sent_bytes: int) -> None:
        self.algorithm, self.sent_bytes = algorithm, sent_bytes
        self._works: list[dist.Work] = []
        self._ledger: Ledger | None = None
        self._number = -1

    def register(self, ledger: Ledger, identity: str, label: str, group: str) -> None:
        """Count every start of this operation in `ledger`."""
        self._ledger, self._number = ledger, ledger.register(Entry(identity, label, group, self.algorithm))

    def start(self) -> None:
        """Post it; returns at once."""
        self._works = self.post()
        if self._ledger is not None:
            self._ledger.record(self._number, self.sent_bytes)

    def wait(self) -> None:
        """Complete it: the result is there, and buffers may be written again."""
        for work in self._works:
            work.wait()
        self._works = []
        self.finish()

    @abc.abstractmethod
    def post(self) -> list[dist.Work]:
        """Start the messages."""

    def finish(self) -> None:  # noqa: B027  most operations end with their last message
        """Work that is left once all messages are there."""


class AllReduce(Transfer):
    """In place: every rank ends with the reduction over the group. `tensor` contiguous, any shape."""

    def __init__(self, tensor: Tensor, reduction: str, group: Group, sent_bytes: int) -> None:
        super().__init__("ring", sent_bytes)
        self.tensor, self.reduction, self.group = tensor, REDUCTIONS[reduction], group.process_group

    def post(self) -> list[dist.Work]:
        return [dist.all_reduce(self.tensor, self.reduction, self.group, async_op=True)]


class DirectAllGather(Transfer):
    """Every rank sends its own block to every other; blocks land in place, sizes may differ.

    Args:
        whole: [sum of sizes, ...] contiguous; this rank's block is already in it.
        sizes: rows of each rank's block.
    """

    def __init__(self, whole: Tensor, sizes: Sequence[int], group: Group, sent_bytes: int) -> None:
        super().__init__("direct", sent_bytes)
        self.process_group = group.process_group
        blocks = torch.split(whole, list(sizes))
        peers = _peers(group)
        self.own = blocks[group.index]
        self.receives = [(blocks[peer], peer) for peer in peers if blocks[peer].numel()]
        self.sends = peers if self.own.numel() else []

    def post(self) -> list[dist.Work]:
        works = [_irecv(block, peer, self.process_group) for block, peer in self.receives]
        works += [_isend(self.own, peer, self.process_group) for peer in self.sends]
        return works


class DirectReduceScatter(Transfer):
    """Every rank sends every other that rank's block of its partial sums; the receiver adds them.

    Sends the least possible, where gloo's own reduce_scatter sends an all_reduce.

    Args:
        partial: [sum of sizes, ...] contiguous, this rank's partial sums. Its own block becomes the result.
        received: [n - 1, own size, ...] scratch.
    """

    def __init__(
        self, partial: Tensor, received: Tensor, sizes: Sequence[int], group: Group, sent_bytes: int
    ) -> None:
        super().__init__("direct", sent_bytes)
        self.process_group = group.process_group
        blocks = torch.split(partial, list(sizes))
        peers = _peers(group)
        self.own = blocks[group.index]
        self.sends = [(blocks[peer], peer) for peer in peers if blocks[peer].numel()]
        self.receives = [(received[k], peer) for k, peer in enumerate(peers)] if self.own.numel() else []

    def post(self) -> list[dist.Work]:
        works = [_irecv(block, peer, self.process_group) for block, peer in self.receives]
        works += [_isend(block, peer, self.process_group) for block, peer in self.sends]
        return works

    def finish(self) -> None:
        for block, _ in self.receives:
            self.own.add_(block)


class NativeAllGather(Transfer):
    """The backend's own; equal blocks only. Arguments as for `DirectAllGather`."""

    def __init__(self, whole: Tensor, sizes: Sequence[int], group: Group, sent_bytes: int) -> None:
        super().__init__("ring", sent_bytes)
        refuse_uneven("all_gather", sizes)
        self.whole, self.process_group = whole, group.process_group
        self.own = torch.split(whole, list(sizes))[group.index]

    def post(self) -> list[dist.Work]:
        return [dist.all_gather_into_tensor(self.whole, self.own, self.process_group, async_op=True)]


class NativeReduceScatter(Transfer):
    """The backend's own; equal blocks only. Arguments as for `DirectReduceScatter`."""

    def __init__(
        self, partial: Tensor, received: Tensor, sizes: Sequence[int], group: Group, sent_bytes: int
    ) -> None:
        super().__init__("ring" if group.backend == "nccl" else "reduce_all", sent_bytes)
        refuse_uneven("reduce_scatter", sizes)
        self.partial, self.process_group = partial, group.process_group
        self.own, self.result = torch.split(partial, list(sizes))[group.index], received[0]

    def post(self) -> list[dist.Work]:
        return [
            dist.reduce_scatter_tensor(self.result, self.partial, group=self.process_group, async_op=True)
        ]

    def finish(self) -> None:
        self.own.copy_(self.result)


class Send(Transfer):
    """`tensor` to a global rank; complete once the peer has received it."""

    def __init__(self, tensor: Tensor, peer: int, group: Group, sent_bytes: int) -> None:
        super().__init__("direct", sent_bytes)
        self.tensor, self.peer, self.process_group = tensor, group.place(peer), group.process_group

    def post(self) -> list[dist.Work]:
        return [_isend(self.tensor, self.peer, self.process_group)]


class Recv(Transfer):
    """From a global rank into `tensor`; messages of one pair arrive in the order in which they were sent."""

    def __init__(self, tensor: Tensor, peer: int, group: Group) -> None:
        super().__init__("direct", 0)
        self.tensor, self.peer, self.process_group = tensor, group.place(peer), group.process_group

    def post(self) -> list[dist.Work]:
        return [_irecv(self.tensor, self.peer, self.process_group)]


def refuse_uneven(operation: str, sizes: Sequence[int]) -> None:
    """The backends' own collectives take equal blocks.

    Raises:
        ValueError: blocks that differ.
    """
    if len(set(sizes)) > 1:
        raise ValueError(
            f"collectives.algorithm=native cannot {operation} blocks of unequal sizes {list(sizes)}; "
            "use collectives.algorithm=direct, or a width that the world size divides"
        )


def _peers(group: Group) -> list[int]:
    """The others, nearest above first, so that not all ranks send to the same one at once."""
    return [(group.index + distance) % group.size for distance in range(1, group.size)]


def _isend(tensor: Tensor, peer: int, group: dist.ProcessGroup | None) -> dist.Work:
    work = dist.isend(tensor, group=group, group_dst=peer)
    assert work is not None, "this rank is not in the group"
    return work


def _irecv(tensor: Tensor, peer: int, group: dist.ProcessGroup | None) -> dist.Work:
    work = dist.irecv(tensor, group=group, group_src=peer)
    assert work is not None, "this rank is not in the group"
    return work

"""Operations by hand in which every rank sends straight to those who want it: all messages at once.

`collectives.messages` says what their tensors are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from collectives.group import Group
from collectives.messages import COMBINE, Messages, bytes_by_place, bytes_of, post_messages
from collectives.traffic import PIECE_BYTES
from collectives.transfer import COLLECTIVE_TAG, USER_TAG, Transfer, peers_of


class Direct(Transfer):
    """All messages of an operation at once, and nothing to do when they are there.

    `kept` is (target, source) of what this rank sends to itself.
    """

    tag = COLLECTIVE_TAG

    def __init__(
        self,
        group: Group,
        receives: Messages,
        sends: Messages,
        kept: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        super().__init__("direct")
        self.sent_bytes = bytes_of(sends)
        self.group = group
        self.kept = kept
        self.receives = [(tensor, peer) for tensor, peer in receives if tensor.numel()]
        self.sends = [(tensor, peer) for tensor, peer in sends if tensor.numel()]

    def post(self) -> list[dist.Work]:
        works = post_messages(self.group, self.receives, self.sends, self.tag)
        if self.kept is not None:
            target, source = self.kept
            target.copy_(source)  # while messages are on their way
        return works

    def sent_by_place(self) -> dict[int, int]:
        return bytes_by_place(self.sends)


class DirectAllGather(Direct):
    """Every rank sends its own block to every other; it is in place among `blocks`, or is brought there."""

    def __init__(self, group: Group, blocks: Sequence[Tensor], own: Tensor | None = None) -> None:
        peers, place = peers_of(group), blocks[group.index]
        source = place if own is None else own
        super().__init__(
            group,
            [(blocks[peer], peer) for peer in peers],
            [(source, peer) for peer in peers],
            _kept(place, source),
        )


class DirectAllToAll(Direct):
    """Every rank sends each other the block that is for it, and keeps its own."""

    def __init__(self, group: Group, sent: Sequence[Tensor], received: Sequence[Tensor]) -> None:
        peers = peers_of(group)
        super().__init__(
            group,
            [(received[peer], peer) for peer in peers],
            [(sent[peer], peer) for peer in peers],
            _kept(received[group.index], sent[group.index]),
        )


class DirectScatter(Direct):
    """The root sends every other rank its block. `blocks` matter at the root, `output` everywhere."""

    def __init__(self, group: Group, blocks: Sequence[Tensor], root: int, output: Tensor) -> None:
        if group.index == root:
            sends = [(blocks[peer], peer) for peer in peers_of(group)]
            super().__init__(group, [], sends, _kept(output, blocks[root]))
        else:
            super().__init__(group, [(output, root)], [])


class DirectGather(Direct):
    """Every rank sends its block to the root, into `blocks`."""

    def __init__(self, group: Group, own: Tensor, blocks: Sequence[Tensor], root: int) -> None:
        if group.index == root:
            receives = [(blocks[peer], peer) for peer in peers_of(group)]
            super().__init__(group, receives, [], _kept(blocks[root], own))
        else:
            super().__init__(group, [], [(own, root)])


def _kept(target: Tensor, source: Tensor) -> tuple[Tensor, Tensor] | None:
    """What a rank keeps, if it is not where it belongs."""
    return None if target.data_ptr() == source.data_ptr() or not source.numel() else (target, source)


class Send(Direct):
    """`tensor` to a place in the group; complete once the peer has received it."""

    tag = USER_TAG

    def __init__(self, group: Group, tensor: Tensor, peer: int) -> None:
        super().__init__(group, [], [(tensor, peer)])
        self.sends = [(tensor, peer)]  # also without elements: the peer waits for it


class Recv(Direct):
    """From a place in the group; messages of one pair arrive in the order in which they were sent."""

    tag = USER_TAG

    def __init__(self, group: Group, tensor: Tensor, peer: int) -> None:
        super().__init__(group, [(tensor, peer)], [])
        self.receives = [(tensor, peer)]


class DirectReduceScatter(Transfer):
    """Every rank sends each other that rank's block; the receiver combines what comes with its own.

    A block moves in pieces: one is combined, still in the cache, while the next is under way.

    Args:
        blocks: this rank's contribution to each place's result.
        output: like this rank's own block, where its result goes; the same memory is allowed.
        scratch: [n - 1, elements of the own block].
    """

    def __init__(
        self, group: Group, blocks: Sequence[Tensor], output: Tensor, scratch: Tensor, reduction: str = "sum"
    ) -> None:
        peers, own = peers_of(group), blocks[group.index]
        super().__init__("direct")
        self.sent_bytes = sum(blocks[peer].nbytes for peer in peers)
        self.group, self.combine = group, COMBINE[reduction]
        self.sends = [(piece, peer) for peer in peers for piece in _pieces(blocks[peer])]
        # [piece][peer], and what each is combined with: the own block first, then the result so far
        pieces, results = _pieces(own), _pieces(output)
        received = [_pieces(scratch[k]) for k in range(len(peers))]
        self.steps = [
            [(pieces[i] if k == 0 else results[i], received[k][i], results[i]) for k in range(len(peers))]
            for i in range(len(pieces))
        ]
        self.receives = [(received[k][i], peer) for i in range(len(pieces)) for k, peer in enumerate(peers)]

    def post(self) -> list[dist.Work]:
        return post_messages(self.group, self.receives, self.sends, COLLECTIVE_TAG)

    def complete(self) -> None:
        works = iter(self._works)
        for piece in self.steps:
            for first, second, result in piece:
                next(works).wait()
                self.combine(first, second, out=result)
        for work in works:
            work.wait()
        self._works = ()

    def sent_by_place(self) -> dict[int, int]:
        return bytes_by_place(self.sends)


def _pieces(block: Tensor) -> list[Tensor]:
    return list(block.split(PIECE_BYTES // block.element_size())) if block.numel() else []

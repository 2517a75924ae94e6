"""Collectives by hand over point-to-point, for gloo, where the backend's own sends more or waits longer.

Receives are posted before sends, so that both directions of a link are busy at once (a send that is under way
delays the notice that a receive is ready). Bytes are counted from the messages themselves.

Every tensor here is flat and contiguous; blocks are one flat tensor for each place in the group, and may
differ in size. A block without elements is not sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from collectives.group import Group
from collectives.traffic import PIECE_BYTES, fan_slices
from collectives.transfer import COLLECTIVE_TAG, USER_TAG, Phased, Transfer, peers_of, receive, send

Combine = Callable[..., Tensor]  # (a, b, out=c), elementwise
Messages = list[tuple[Tensor, int]]  # tensor, place of the peer

COMBINE: dict[str, Combine] = {
    "sum": torch.add,
    "mean": torch.add,  # divided once all is summed
    "min": torch.minimum,
    "max": torch.maximum,
}


def _bytes(messages: Messages) -> int:
    return sum(tensor.nbytes for tensor, _ in messages)


def _by_place(messages: Messages) -> dict[int, int]:
    found: dict[int, int] = {}
    for tensor, peer in messages:
        found[peer] = found.get(peer, 0) + tensor.nbytes
    return found


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
        self.sent_bytes = _bytes(sends)
        self.group = group
        self.kept = kept
        self.receives = [(tensor, peer) for tensor, peer in receives if tensor.numel()]
        self.sends = [(tensor, peer) for tensor, peer in sends if tensor.numel()]

    def post(self) -> list[dist.Work]:
        group, tag = self.group, self.tag
        works = [receive(group, tensor, peer, tag) for tensor, peer in self.receives]
        works += [send(group, tensor, peer, tag) for tensor, peer in self.sends]
        if self.kept is not None:
            target, source = self.kept
            target.copy_(source)  # while messages are on their way
        return works

    def sent_by_place(self) -> dict[int, int]:
        return _by_place(self.sends)


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
        group = self.group
        works = [receive(group, tensor, peer, COLLECTIVE_TAG) for tensor, peer in self.receives]
        works += [send(group, tensor, peer, COLLECTIVE_TAG) for tensor, peer in self.sends]
        return works

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
        return _by_place(self.sends)


def _pieces(block: Tensor) -> list[Tensor]:
    return list(block.split(PIECE_BYTES // block.element_size())) if block.numel() else []


class FanBroadcast(Phased):
    """The root sends each other rank a different slice, and they exchange slices: no rank sends more than S.

    A tree's root sends S in every round.
    """

    def __init__(self, group: Group, tensor: Tensor, root: int) -> None:
        peers = [(root + distance) % group.size for distance in range(1, group.size)]
        place = (group.index - root) % group.size - 1
        others = [(k, peer) for k, peer in enumerate(peers) if k != place]
        self.first_receives: Messages = []
        self.first_sends: Messages = []
        self.passed_on: list[Messages] = []
        rest: Messages = []
        for slices in fan_slices(tensor.numel(), tensor.element_size(), group.size):
            views = [tensor[start:stop] for start, stop in slices]
            if place < 0:
                self.first_sends += [
                    (view, peer) for view, peer in zip(views, peers, strict=True) if view.numel()
                ]
            else:
                own = views[place]
                if own.numel():
                    self.first_receives.append((own, root))
                    self.passed_on.append([(own, peer) for _, peer in others])
                rest += [(views[k], peer) for k, peer in others if views[k].numel()]
        self.own_count = len(self.first_receives)
        self.first_receives += rest
        super().__init__("fan", group)
        self.sent_bytes = _bytes(self.first_sends) + sum(_bytes(messages) for messages in self.passed_on)

    def post(self) -> list[dist.Work]:
        group, tag = self.group, self.tag
        works = [receive(group, tensor, peer, tag) for tensor, peer in self.first_receives]
        works += [send(group, tensor, peer, tag) for tensor, peer in self.first_sends]
        return works

    def complete(self) -> None:
        works = list(self._works[self.own_count :])
        for work, messages in zip(self._works[: self.own_count], self.passed_on, strict=True):
            work.wait()
            works += [send(self.group, tensor, peer, self.tag) for tensor, peer in messages]
        for work in works:
            work.wait()
        self._works = ()


class FanReduce(Phased):
    """All ranks but the root exchange slices, reduce one each, and send it to the root, who adds its own.

    No rank sends more than S, and the root receives S once.

    Args:
        tensor: this rank's contribution; only read, but where it is `output`.
        output: like `tensor`, at the root; the same memory is allowed. None elsewhere.
        scratch: flat; at the root as many elements as `tensor`, elsewhere n - 1 times those of its slices.
    """

    def __init__(
        self, group: Group, tensor: Tensor, root: int, output: Tensor | None, scratch: Tensor, reduction: str
    ) -> None:
        self.combine = COMBINE[reduction]
        peers = [(root + distance) % group.size for distance in range(1, group.size)]
        place = (group.index - root) % group.size - 1
        others = [(k, peer) for k, peer in enumerate(peers) if k != place]
        self.receives: Messages = []
        self.sends: Messages = []
        # of each piece: what is combined as its parts come in, and what then goes to the root
        self.steps: list[tuple[list[tuple[Tensor, Tensor, Tensor]], Tensor | None]] = []
        used = 0

        def take(like: Tensor) -> Tensor:
            nonlocal used
            used += like.numel()
            return scratch[used - like.numel() : used]

        for slices in fan_slices(tensor.numel(), tensor.element_size(), group.size):
            if place < 0:
                assert output is not None
                for (start, stop), peer in zip(slices, peers, strict=True):
                    if stop > start:
                        received = take(tensor[start:stop])
                        self.receives.append((received, peer))
                        self.steps.append(([(tensor[start:stop], received, output[start:stop])], None))
                continue
            self.sends += [
                (tensor[slice(*slices[k])], peer) for k, peer in others if slices[k][1] > slices[k][0]
            ]
            own = tensor[slice(*slices[place])]
            if not own.numel():
                continue
            if not others:
                self.sends.append((own, root))
                continue
            combined = take(own)
            parts, so_far = [], own
            for _, peer in others:
                received = take(own)
                self.receives.append((received, peer))
                parts.append((so_far, received, combined))
                so_far = combined
            self.steps.append((parts, combined))
        self.root = root
        to_root = sum(combined.nbytes for _, combined in self.steps if combined is not None)
        super().__init__("fan", group)
        self.sent_bytes = _bytes(self.sends) + to_root

    def post(self) -> list[dist.Work]:
        group, tag = self.group, self.tag
        works = [receive(group, tensor, peer, tag) for tensor, peer in self.receives]
        works += [send(group, tensor, peer, tag) for tensor, peer in self.sends]
        return works

    def complete(self) -> None:
        arrivals = iter(self._works[: len(self.receives)])
        works = list(self._works[len(self.receives) :])
        for parts, combined in self.steps:
            for first, second, result in parts:
                next(arrivals).wait()
                self.combine(first, second, out=result)
            if combined is not None:
                works.append(send(self.group, combined, self.root, self.tag))
        for work in works:
            work.wait()
        self._works = ()

"""Operations with a root by hand, in two phases: ranks exchange slices, so that no rank sends more than S.

`collectives.messages` says what their tensors are.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from collectives.group import Group
from collectives.messages import COMBINE, Messages, bytes_of, post_messages
from collectives.traffic import fan_slices
from collectives.transfer import Phased, send


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
        self.sent_bytes = bytes_of(self.first_sends) + sum(bytes_of(messages) for messages in self.passed_on)

    def post(self) -> list[dist.Work]:
        return post_messages(self.group, self.first_receives, self.first_sends, self.tag)

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
        self.sent_bytes = bytes_of(self.sends) + to_root

    def post(self) -> list[dist.Work]:
        return post_messages(self.group, self.receives, self.sends, self.tag)

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

"""One operation in flight: started, counted, waited for; the same object may run many times.

All are asynchronous: `start` posts, `wait` completes. On nccl `wait` orders streams and does not block
the host; that side has not run on a GPU.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch import Tensor

from collectives.group import Group
from collectives.ledger import Entry, Ledger

# Tags keep messages of different kinds between one pair apart, so that an order of starting them suffices.
USER_TAG = 0  # sends and receives that the caller pairs up
COLLECTIVE_TAG = 1  # all messages are posted at the start, in the order in which operations start
FIRST_PHASED_TAG, PHASED_TAGS = 2, 1024  # later messages: each operation in flight has a tag of its own


class Transfer(abc.ABC):
    """One operation. `algorithm` is what moves its bytes.

    `sent_bytes` is what one call sends: counted from its own messages where they are written by hand, for the
    backend's own what its algorithm is known to send, and None where nobody has said that.
    """

    # Defaults on the class: an operation of a few microseconds has no time to fill in fields.
    sent_bytes: int | None = None
    _then: tuple[Callable[[], object], ...] = ()
    _works: Sequence[dist.Work] = ()
    _running = False
    _ledger: Ledger | None = None
    _number = -1

    def __init__(self, algorithm: str, output: Tensor | None = None) -> None:
        self.algorithm, self.output = algorithm, output

    def after(self, step: Callable[[], object]) -> None:
        """Have `step` run once the result is there, every time."""
        self._then = (*self._then, step)

    def register(self, ledger: Ledger, identity: str, label: str, group: str) -> None:
        """Count every start of this operation in `ledger`."""
        self._ledger, self._number = ledger, ledger.register(Entry(identity, label, group, self.algorithm))

    def start(self) -> None:
        """Post it; returns at once."""
        self._works = self.post()
        self._running = True
        if self._ledger is not None:
            assert self.sent_bytes is not None
            self._ledger.record(self._number, self.sent_bytes)

    def wait(self) -> None:
        """Complete it: the result is there, and buffers may be written again. A second wait does nothing."""
        if not self._running:
            return
        self._running = False
        self.complete()
        for step in self._then:
            step()

    @abc.abstractmethod
    def post(self) -> list[dist.Work]:
        """Start the messages that need nothing received first."""

    def complete(self) -> None:
        """Wait for all messages, and do what is left once they are there."""
        for work in self._works:
            work.wait()
        self._works = ()


class Nothing(Transfer):
    """An operation that sends nothing: one rank, or no elements."""

    sent_bytes = 0

    def post(self) -> list[dist.Work]:
        return []


class Native(Transfer):
    """The backend's own."""

    def __init__(
        self,
        algorithm: str,
        launch: Callable[[], dist.Work | None],
        output: Tensor | None = None,
        sent_bytes: int | None = None,
    ) -> None:
        super().__init__(algorithm, output)
        self.sent_bytes = sent_bytes
        self._launch = launch

    def post(self) -> list[dist.Work]:
        work = self._launch()
        return [] if work is None else [work]


class Started(Transfer):
    """One call of the backend's own that is under way already, for a single use."""

    def __init__(self, algorithm: str, work: dist.Work, output: Tensor | None) -> None:
        self.algorithm, self.output = algorithm, output
        self._works = (work,)
        self._running = True

    def post(self) -> list[dist.Work]:
        raise AssertionError("it has started")


class Phased(Transfer):
    """An operation in which a rank passes on what it has received, when it is waited for.

    Two ranks that wait for two such operations in different orders would wait for each other; so waiting
    for one first completes those of the group that started before it.
    """

    def __init__(self, algorithm: str, group: Group, output: Tensor | None = None) -> None:
        super().__init__(algorithm, output)
        self.group = group
        self.tag = FIRST_PHASED_TAG

    def start(self) -> None:
        group = self.group
        self.tag = FIRST_PHASED_TAG + group.phased_count % PHASED_TAGS
        group.phased_count += 1
        group.in_flight.append(self)
        super().start()

    def wait(self) -> None:
        while self._running:
            first = self.group.in_flight.popleft()
            Transfer.wait(first)


def send(group: Group, tensor: Tensor, peer: int, tag: int) -> dist.Work:
    """Post a send of a contiguous tensor to a place in the group."""
    assert group.process_group is not None
    return group.process_group.send([tensor], peer, tag)


def receive(group: Group, tensor: Tensor, peer: int, tag: int) -> dist.Work:
    """Post a receive into a contiguous tensor from a place in the group."""
    assert group.process_group is not None
    return group.process_group.recv([tensor], peer, tag)


def peers_of(group: Group) -> list[int]:
    """The others, nearest above first, so that not all ranks send to the same one at once."""
    return [(group.index + distance) % group.size for distance in range(1, group.size)]

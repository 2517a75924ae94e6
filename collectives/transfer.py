"""One operation in flight: started, counted, waited for.

All are asynchronous: `start` posts, `wait` completes. On nccl `wait` orders streams and does not block
the host; that side has not run on a GPU.
"""

from __future__ import annotations

import abc
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import torch.distributed as dist
from torch import Tensor

from collectives.group import Group
from collectives.ledger import Entry, Ledger
from collectives.observer import Observer

# Tags keep messages of different kinds between one pair apart, so that an order of starting them suffices.
USER_TAG = 0  # sends and receives that the caller pairs up
COLLECTIVE_TAG = 1  # all messages are posted at the start, in the order in which operations start
FIRST_PHASED_TAG, PHASED_TAGS = 2, 1024  # later messages: each operation in flight has a tag of its own


class Transfer(abc.ABC):
    """One operation. `algorithm` is what moves its bytes.

    `sent_bytes` is what one call sends: counted from its own messages where they are written by hand, for the
    backend's own what its algorithm is known to send, and None where nobody has said that.

    A plan starts the same object again and again; one that an operation has returned runs once.
    """

    # Defaults on the class: an operation of a few microseconds has no time to fill in fields.
    operation, where = "", ""  # for messages
    sent_bytes: int | None = None
    by_place: Mapping[int, int] | None = None
    single_use = False
    pending: deque[Phased] | None = None  # operations that wait for this rank to pass something on
    _then: tuple[Callable[[], object], ...] = ()
    _works: Sequence[dist.Work] = ()
    _running = False
    observer: Observer | None = None  # stamps when it completes, in steps that are observed
    completed_s = math.nan  # the stamp of the last observed call; NaN where there is none
    _ledger: Ledger | None = None
    _number = -1

    def __init__(self, algorithm: str, output: Tensor | None = None) -> None:
        self.algorithm, self.output = algorithm, output

    def after(self, step: Callable[[], object]) -> None:
        """Have `step` run once the result is there, every time."""
        self._then = (*self._then, step)

    def register(
        self,
        ledger: Ledger,
        identity: str,
        label: str,
        group: str,
        shape: tuple[int, ...] = (),
        received_bytes: int = 0,
        least_bytes: int = 0,
        between_bytes: int | None = 0,
    ) -> None:
        """Count every start of this operation in `ledger`.

        Raises:
            ValueError: an operation whose bytes nobody has said.
        """
        if self.sent_bytes is None:
            raise ValueError(f"{identity}: {self.algorithm} cannot be counted without its bytes")
        self.operation, self.where = identity, f"in group {group}"
        entry = Entry(
            identity, label, group, self.algorithm, shape, received_bytes, least_bytes, between_bytes
        )
        self._ledger, self._number = ledger, ledger.register(entry)

    def sent_by_place(self) -> Mapping[int, int] | None:
        """place in the group -> bytes that one call sends there; None where nobody has said that."""
        return self.by_place

    def start(self) -> None:
        """Post it; returns at once.

        Raises:
            ValueError: it is under way, or was for a single use.
            RuntimeError: a peer is gone; names the operation.
        """
        if self._running or self.single_use:
            reason = "is under way: wait for it first" if self._running else "has run: call it again"
            raise ValueError(f"{self.operation or self.algorithm} {reason}")
        try:
            self._works = self.post()
        except RuntimeError as error:
            raise self._failed(error) from error
        if self.observer is not None and self.observer.active:
            self._works = self.observer.watch(self, self._works)
        self._running = True
        if self._ledger is not None:
            assert self.sent_bytes is not None  # register saw to it
            self._ledger.record(self._number, self.sent_bytes)

    def wait(self) -> None:
        """Complete it: the result is there, and buffers may be written again. A second wait does nothing.

        Raises:
            RuntimeError: a peer is gone, or did not come in time; names the operation.
        """
        if self.pending:
            complete_all(self.pending)  # a peer may need their messages before it comes here
        self.finish()

    def finish(self) -> None:
        """`wait`, without looking after others."""
        if not self._running:
            return
        self._running = False
        try:
            self.complete()
        except RuntimeError as error:
            raise self._failed(error) from error
        for step in self._then:
            step()

    @abc.abstractmethod
    def post(self) -> Sequence[dist.Work]:
        """Start the messages that need nothing received first."""

    def complete(self) -> None:
        """Wait for all messages, and do what is left once they are there."""
        for work in self._works:
            work.wait()
        self._works = ()

    def _failed(self, error: RuntimeError) -> RuntimeError:
        return RuntimeError(
            f"{self.operation or self.algorithm} {self.where} did not complete; a peer has died, or did not "
            f"come to it in time: {error}"
        )


class Nothing(Transfer):
    """An operation that sends nothing: one rank, or no elements."""

    sent_bytes = 0

    def post(self) -> Sequence[dist.Work]:
        return ()


class Native(Transfer):
    """The backend's own."""

    def __init__(
        self,
        algorithm: str,
        launch: Callable[[], dist.Work | None],
        output: Tensor | None = None,
        sent_bytes: int | None = None,
        by_place: Mapping[int, int] | None = None,
    ) -> None:
        super().__init__(algorithm, output)
        self.sent_bytes, self.by_place = sent_bytes, by_place
        self._launch = launch

    def post(self) -> Sequence[dist.Work]:
        work = self._launch()
        return () if work is None else (work,)


class Started(Transfer):
    """One call of the backend's own that is under way already.

    Made and waited for in every call of a small message, so it has few fields and short ways.
    """

    single_use = True
    _running = True

    def __init__(
        self, operation: str, algorithm: str, work: dist.Work, output: Tensor | None, group: Group
    ) -> None:
        self.operation, self.algorithm, self.output = operation, algorithm, output
        self.work, self.group = work, group

    def post(self) -> Sequence[dist.Work]:
        raise AssertionError("it has started")

    def wait(self) -> None:
        if not self._running:
            return
        if self.group.in_flight:
            complete_all(self.group.in_flight)
        self._running = False
        try:
            self.work.wait()
        except RuntimeError as error:
            self.where = self.group.where
            raise self._failed(error) from error
        for step in self._then:
            step()


class Phased(Transfer):
    """An operation in which a rank passes on what it has received, when it is waited for.

    A rank that waited for something else, while a peer waits for what it should pass on, would wait for
    ever. So every wait of an operation first completes, in the order in which they started, the phased
    ones that are under way in any group of the world.
    """

    def __init__(self, algorithm: str, group: Group, output: Tensor | None = None) -> None:
        super().__init__(algorithm, output)
        self.group = group
        self.tag = FIRST_PHASED_TAG

    def start(self) -> None:
        group = self.group
        while len(group.in_flight) >= PHASED_TAGS:  # the next tag is still somebody's
            group.in_flight.popleft().finish()
        self.tag = FIRST_PHASED_TAG + group.phased_count % PHASED_TAGS
        super().start()
        group.phased_count += 1
        group.in_flight.append(self)

    def wait(self) -> None:
        while self._running:
            self.group.in_flight.popleft().finish()


def complete_all(pending: deque[Phased]) -> None:
    """Complete phased operations in the order in which they started."""
    while pending:
        pending.popleft().finish()


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

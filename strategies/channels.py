"""When simulated transfers run: once every participant has started them and their channel is free.

The times follow from the arrivals alone, whichever rank is replayed first.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

from strategies.communication import Communication, Recv, Send
from strategies.values import Group, Operation


class Transfer:
    """Who is still to arrive; once nobody is, when it runs."""

    __slots__ = ("arrived_s", "done_s", "duration_s", "missing", "start_s", "waiting")

    def __init__(self, participants: int) -> None:
        self.missing = participants
        self.waiting: list[int] = []  # ranks that stand until all have arrived
        self.arrived_s = self.duration_s = self.start_s = self.done_s = 0.0


class Channel:
    """Transfers of one group, or from one rank to another: one after the other, in the order of their starts.

    Every participant starts them in the same order, so each rank's k-th belongs to the others' k-th.
    """

    def __init__(self, first: int, participants: int) -> None:
        self.first, self.participants = first, participants
        self.free_s = 0.0
        self.joined: dict[int, int] = {}  # transfers that a rank has started
        self.incomplete: dict[int, Transfer] = {}

    def join(self, rank: int, at_s: float, duration_s: float) -> Transfer:
        """`rank` arrives; `duration_s` counts if it is the first."""
        number = self.joined.get(rank, 0)
        self.joined[rank] = number + 1
        transfer = self.incomplete.get(number)
        if transfer is None:
            transfer = self.incomplete[number] = Transfer(self.participants)
        if rank == self.first:
            transfer.duration_s = duration_s
        transfer.arrived_s = max(transfer.arrived_s, at_s)
        transfer.missing -= 1
        if transfer.missing == 0:
            transfer.start_s = max(transfer.arrived_s, self.free_s)
            transfer.done_s = self.free_s = transfer.start_s + transfer.duration_s
            del self.incomplete[number]
        return transfer


class Channels:
    """All channels, what their transfers cost, and the ranks that a complete transfer lets go on.

    Args:
        transfer_s: seconds of a transfer, given as the sending rank or the first of the group has it.
        norm_s: seconds of the gradient norm's exchange.
    """

    def __init__(self, transfer_s: Callable[[Communication], float], norm_s: float) -> None:
        self.ready: deque[int] = deque()
        self.norm_s = checked_s(norm_s, "the gradient norm's exchange")
        self._transfer_s = transfer_s
        self._groups: dict[tuple[Group, bool], Channel] = {}
        self._messages: dict[tuple[int, int], Channel] = {}
        self._durations_s: dict[int, float] = {}  # by id: to hash an operation takes longer than all the rest

    def of_group(self, group: Group, control: bool = False) -> Channel:
        """The data channel of `group`, or that of the control plane."""
        return self._groups.setdefault((group, control), Channel(group.ranks[0], group.size))

    def of_message(self, rank: int, message: Send | Recv) -> Channel:
        """Each direction between two ranks is a channel of its own."""
        pair = (rank, message.peer) if isinstance(message, Send) else (message.peer, rank)
        if pair not in self._messages:
            self._messages[pair] = Channel(pair[0], 2)
        return self._messages[pair]

    def join(self, rank: int, operation: Operation, channel: Channel, at_s: float) -> Transfer:
        duration_s = self._duration_s(operation) if rank == channel.first else 0.0
        transfer = channel.join(rank, at_s, duration_s)
        if transfer.missing == 0:
            self.ready.extend(transfer.waiting)
        return transfer

    def _duration_s(self, operation: Operation) -> float:
        if not isinstance(operation, Communication):
            return self.norm_s
        known = self._durations_s.get(id(operation))
        if known is None:
            known = checked_s(self._transfer_s(operation), "the transfer of", operation)
            self._durations_s[id(operation)] = known
        return known


def checked_s(seconds: float, *what: object) -> float:
    """A cost that a clock can go on by; `what` are the words that name it.

    Raises:
        ValueError: it is negative, infinite or no number.
    """
    if not 0 <= seconds < math.inf:
        named = " ".join(map(str, what))
        raise ValueError(f"{named} costs {seconds} s; use a finite time of at least 0")
    return seconds

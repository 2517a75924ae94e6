"""Which start of one rank belongs to which of another: what a wait has been waiting for.

The schedules of all ranks say so. Collectives of a group meet in their order, messages of a pair in theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from strategies.communication import AllGather, AllReduce, Communication, Recv, ReduceScatter, Send, Wait
from strategies.schedule import Schedule
from strategies.values import Value
from trainer.spans import MEET, Span, spans_of

Channel = tuple[object, ...]


@dataclass
class Meeting:
    """One transfer. `parties` are (rank, place of its start among the rank's spans).

    `channel` is what it shares with others, one after the other: a group, or a pair in one direction.
    """

    channel: Channel
    operation: Communication | None  # as the first party has it; None for the norm's exchange
    parties: list[tuple[int, int]] = field(default_factory=list)

    @property
    def is_message(self) -> bool:
        return isinstance(self.operation, Send | Recv)


@dataclass
class Track:
    """One rank's spans. `waits` are (place of the span, number of the meeting), `starts` likewise."""

    spans: tuple[Span, ...]
    kinds: np.ndarray
    starts: list[tuple[int, int]]
    waits: list[tuple[int, int]]


class Matching:
    """Meetings of all ranks' schedules, and each rank's way through them."""

    def __init__(self, schedules: Sequence[Schedule], norm_crosses: bool) -> None:
        self.meetings: list[Meeting] = []
        self.tracks: list[Track] = []
        self._numbers: dict[tuple[Channel, int], int] = {}
        known: dict[int, tuple[Span, ...]] = {}
        for rank, schedule in enumerate(schedules):
            spans = known.setdefault(id(schedule), spans_of(schedule, norm_crosses))
            self.tracks.append(self._follow(rank, spans))

    def _follow(self, rank: int, spans: tuple[Span, ...]) -> Track:
        counts: dict[Channel, int] = {}
        in_flight: dict[Value, int] = {}
        starts, waits = [], []

        def meet(place: int, channel: Channel, operation: Communication | None) -> int:
            count = counts[channel] = counts.get(channel, -1) + 1
            number = self._numbers.setdefault((channel, count), len(self.meetings))
            if number == len(self.meetings):
                self.meetings.append(Meeting(channel, operation))
            meeting = self.meetings[number]
            if isinstance(operation, Send):
                meeting.operation = operation
            meeting.parties.append((rank, place))
            starts.append((place, number))
            return number

        for place, span in enumerate(spans):
            operation = span.operation
            if span.kind == MEET:
                waits.append((place, meet(place, ("norm",), None)))
            elif isinstance(operation, Communication):
                in_flight[operation.value] = meet(place, channel_of(rank, operation), operation)
            elif isinstance(operation, Wait):
                waits.append((place, in_flight.pop(operation.value)))
        kinds = np.array([span.kind for span in spans], dtype=np.int8)
        return Track(spans, kinds, starts, waits)


def channel_of(rank: int, operation: Communication) -> Channel:
    if isinstance(operation, AllReduce | AllGather | ReduceScatter):
        return ("group", operation.group.name, operation.group.ranks)
    if isinstance(operation, Send):
        return ("pair", rank, operation.peer)
    assert isinstance(operation, Recv)
    return ("pair", operation.peer, rank)

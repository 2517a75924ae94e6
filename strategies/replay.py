"""One rank's simulated thread: it runs its schedule in order, step after step, on a clock of its own."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Literal, NamedTuple

from strategies.channels import Channel, Channels, Transfer
from strategies.checker import ScheduleError
from strategies.communication import Collective, Communication, Recv, Send, Wait
from strategies.compute import GradientNorm
from strategies.schedule import Schedule
from strategies.values import Operation, Value

Kind = Literal["compute", "launch", "exposed", "wait", "idle", "host", "transfer"]

DATA, BEFORE, AFTER = "waiting for data", "before the operations", "after the operations"


class Instruction(NamedTuple):
    """What a rank's thread does next; the same for all ranks that share a schedule.

    Args:
        subject: the operation, or a name for what is none.
        channel: of a launch over a group; a message's depends on the rank.
        launched_at: of a wait: the place of the launch that it completes.
        is_message: of a wait: it is for one peer alone.
    """

    kind: Literal["host", "compute", "launch", "wait"]
    subject: Operation | str
    channel: Channel | None = None
    launched_at: int = -1
    is_message: bool = False


def instructions(rank: int, schedule: Schedule, channels: Channels) -> Iterator[Instruction]:
    """A step of `schedule`. A norm that crosses ranks is a computation, a launch and a wait.

    Raises:
        ScheduleError: a wait for what is not in flight.
    """
    launched: dict[Value, tuple[int, bool]] = {}
    yield Instruction("host", DATA)
    yield Instruction("host", BEFORE)
    position = 2
    for operation in schedule.operations:
        if isinstance(operation, Wait):
            if operation.value not in launched:
                raise ScheduleError(f"rank {rank}: {operation} has nothing in flight to wait for")
            launched_at, is_message = launched.pop(operation.value)
            yield Instruction("wait", operation, None, launched_at, is_message)
        elif isinstance(operation, Communication):
            channel = channels.of_group(operation.group) if isinstance(operation, Collective) else None
            launched[operation.value] = (position, channel is None)
            yield Instruction("launch", operation, channel)
        else:
            yield Instruction("compute", operation)
            if isinstance(operation, GradientNorm) and operation.group.size > 1 and channels.norm_s > 0:
                yield Instruction("launch", operation, channels.of_group(operation.group, control=True))
                yield Instruction("wait", operation, None, position + 1)
                position += 2
        position += 1
    yield Instruction("host", AFTER)


class Piece(NamedTuple):
    """A time in which the thread was in one thing, or in which a transfer ran."""

    start_s: float
    stop_s: float
    subject: Operation | str
    kind: Kind


class RankReplay:
    """A rank's place in its program and its clock, and what it did in the last of its steps.

    Args:
        seconds: what each instruction takes the thread.
        pipeline: waiting for a late peer of a message is idleness.
    """

    def __init__(
        self,
        number: int,
        program: tuple[Instruction, ...],
        seconds: array[float],
        channels: Channels,
        pipeline: bool,
        steps: int,
    ) -> None:
        self.number, self.program, self.seconds, self.channels = number, program, seconds, channels
        self.pipeline, self.steps_left = pipeline, steps
        self.position = 0
        self.begin_s = self.clock_s = 0.0
        self.in_flight: dict[int, Transfer] = {}  # by the place of the launch
        self.thread: list[Piece] = []  # without a gap from begin_s to clock_s
        self.transfers: list[Piece] = []

    def run(self) -> Transfer | None:
        """Go on to a transfer that somebody has still to start, which is returned, or to the end."""
        while self.steps_left:
            while self.position < len(self.program):
                instruction, seconds = self.program[self.position], self.seconds[self.position]
                if instruction.kind == "wait":
                    transfer = self.in_flight[instruction.launched_at]
                    if transfer.missing:
                        return transfer
                    self._wait(instruction, transfer, seconds)
                else:
                    if instruction.kind == "launch":
                        self._launch(instruction)
                    self._spend(self.clock_s + seconds, instruction.subject, instruction.kind)
                self.position += 1
            self.steps_left -= 1
            if self.steps_left:
                self.position, self.begin_s = 0, self.clock_s
        return None

    def _launch(self, instruction: Instruction) -> None:
        operation, channel = instruction.subject, instruction.channel
        assert isinstance(operation, Operation)
        if channel is None:
            assert isinstance(operation, Send | Recv)
            channel = self.channels.of_message(self.number, operation)
        self.in_flight[self.position] = self.channels.join(self.number, operation, channel, self.clock_s)

    def _wait(self, instruction: Instruction, transfer: Transfer, seconds: float) -> None:
        """Until the last participant has arrived it is late; from then on the transfer is exposed."""
        subject = instruction.subject
        stop_s = max(self.clock_s + seconds, transfer.done_s)
        if transfer.arrived_s > self.clock_s:
            idles = instruction.is_message or isinstance(subject, GradientNorm)
            late: Kind = "idle" if self.pipeline and idles else "wait"
            self._spend(transfer.arrived_s, subject, late)
        self._spend(stop_s, subject, "exposed")
        del self.in_flight[instruction.launched_at]
        if self.steps_left == 1 and isinstance(subject, Wait):
            launch = self.program[instruction.launched_at].subject
            self.transfers.append(Piece(transfer.start_s, transfer.done_s, launch, "transfer"))

    def _spend(self, stop_s: float, subject: Operation | str, kind: Kind) -> None:
        if self.steps_left == 1 and stop_s > self.clock_s:
            self.thread.append(Piece(self.clock_s, stop_s, subject, kind))
        self.clock_s = stop_s

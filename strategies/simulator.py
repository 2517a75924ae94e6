"""Replays all ranks' schedules with what each operation costs, and says how long a step takes and why.

`strategies.replay` runs a rank's thread, `strategies.channels` the transfers between them.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from strategies.channels import Channels, checked_s
from strategies.checker import ScheduleError
from strategies.communication import Communication, Wait
from strategies.compute import GradientNorm
from strategies.replay import AFTER, BEFORE, DATA, Instruction, Kind, Piece, RankReplay, instructions
from strategies.schedule import Schedule
from strategies.values import Operation

Lane = Literal["compute", "communication"]


class Costs(Protocol):
    """What operations take, in seconds; each is asked for once a rank and holds for every step."""

    def compute_s(self, rank: int, operation: Operation) -> float:
        """Every operation of the compute lane, and the gradient norm's own part."""

    def launch_s(self, rank: int, operation: Communication) -> float:
        """Time of the thread that starts a transfer."""

    def transfer_s(self, operation: Communication) -> float:
        """From the last arrival, or the channel's becoming free, to completion.

        `operation` is the sending rank's, or that of the first rank of the group.
        """

    def wait_s(self, rank: int, operation: Wait) -> float:
        """Time of the thread that a wait takes when its transfer is complete already."""

    def before_s(self, rank: int) -> tuple[float, float]:
        """Waiting for data, and other host time, before the first operation of a step."""

    def after_s(self, rank: int) -> float:
        """Host time after the last operation of a step."""

    def norm_s(self) -> float:
        """The norm's exchange over ranks on the control group, or 0 where it crosses none."""


@dataclass(frozen=True)
class Split:
    """One rank's step. compute_s, exposed_comm_s, wait_s, idle_s and host_s add up to step_time_s.

    Args:
        data_s: the part of host_s in which the rank waits for data.
        overlap: transfer time under this rank's compute / all its transfer time; None without any. The
            norm's exchange, which goes over the control group, is left out.
    """

    step_time_s: float
    compute_s: float
    exposed_comm_s: float
    wait_s: float
    idle_s: float
    host_s: float
    data_s: float
    overlap: float | None


@dataclass(frozen=True)
class Interval:
    """A piece of the drawing; second 0 is when the first rank begins the step.

    The compute lane holds all that the thread does, without a gap; the communication lane the transfers.
    """

    rank: int
    lane: Lane
    start_s: float
    stop_s: float
    identity: str
    kind: Kind


@dataclass(frozen=True)
class Simulation:
    """The last step that was simulated.

    Args:
        step_time_s: the slowest rank's, from its end of the step before to its end of this one.
        splits: by rank.
        bubble_fraction: idle_s / step_time_s, each summed over ranks; 0 where nothing takes time.
        intervals: by rank; empty unless asked for.
    """

    step_time_s: float
    splits: tuple[Split, ...]
    bubble_fraction: float
    intervals: tuple[Interval, ...]


def simulate(
    schedules: Sequence[Schedule],
    costs: Costs,
    *,
    pipeline: bool,
    steps: int = 3,
    keep_intervals: bool = False,
) -> Simulation:
    """Replay the schedules of all ranks, rank 0 first, `steps` times with no barrier between the steps.

    In the first step every rank begins at second 0; in a running job ranks begin apart, so take two steps
    or more. The schedules are those that `strategies.checker.check` lets pass: that the k-th collectives
    of two ranks are the same one is not looked at again.

    Args:
        pipeline: waiting for a late peer of a message, or of the norm, is idle_s, not wait_s.

    Raises:
        ScheduleError: ranks wait for ever.
        ValueError: a cost that is negative or no finite number, or no step to simulate.
    """
    if steps < 1:
        raise ValueError(f"steps={steps} simulates nothing; use at least 1")
    ranks = _replay(schedules, costs, pipeline, steps)
    splits = tuple(_split(rank) for rank in ranks)
    total_s = sum(split.step_time_s for split in splits)
    return Simulation(
        step_time_s=max((split.step_time_s for split in splits), default=0.0),
        splits=splits,
        bubble_fraction=sum(split.idle_s for split in splits) / total_s if total_s > 0 else 0.0,
        intervals=tuple(_intervals(ranks)) if keep_intervals else (),
    )


def _replay(schedules: Sequence[Schedule], costs: Costs, pipeline: bool, steps: int) -> list[RankReplay]:
    """Run each rank as far as it goes; one that stands goes on once its transfer's last participant came."""
    channels = Channels(costs.transfer_s, costs.norm_s())
    programs: dict[int, tuple[Instruction, ...]] = {}
    ranks = []
    for number, schedule in enumerate(schedules):
        if id(schedule) not in programs:
            programs[id(schedule)] = tuple(instructions(number, schedule, channels))
        program = programs[id(schedule)]
        seconds = array("d", _seconds(number, program, costs))
        ranks.append(RankReplay(number, program, seconds, channels, pipeline, steps))
    channels.ready.extend(range(len(ranks)))
    while channels.ready:
        rank = ranks[channels.ready.popleft()]
        if (blocker := rank.run()) is not None:
            blocker.waiting.append(rank.number)
    stuck = [rank for rank in ranks if rank.steps_left]
    if stuck:
        where = "; ".join(
            f"rank {rank.number} at {rank.program[rank.position].subject}" for rank in stuck[:4]
        )
        more = f"; and {len(stuck) - 4} more" if len(stuck) > 4 else ""
        raise ScheduleError(f"ranks wait for transfers that never start: {where}{more}")
    return ranks


def _seconds(rank: int, program: Sequence[Instruction], costs: Costs) -> Iterator[float]:
    """What each instruction takes the thread of `rank`."""
    data_s, before_s = costs.before_s(rank)
    hosts_s = {DATA: data_s, BEFORE: before_s, AFTER: costs.after_s(rank)}
    for instruction in program:
        subject = instruction.subject
        if isinstance(subject, str):
            seconds = hosts_s[subject]
        elif instruction.kind == "compute":
            seconds = costs.compute_s(rank, subject)
        elif isinstance(subject, Communication):
            seconds = costs.launch_s(rank, subject)
        elif isinstance(subject, Wait):
            seconds = costs.wait_s(rank, subject)
        else:
            assert isinstance(subject, GradientNorm)
            seconds = 0.0
        yield checked_s(seconds, f"rank {rank}:", subject)


def _split(rank: RankReplay) -> Split:
    spent: defaultdict[Kind, float] = defaultdict(float)
    for start_s, stop_s, _, kind in rank.thread:
        spent[kind] += stop_s - start_s
    return Split(
        step_time_s=rank.clock_s - rank.begin_s,
        compute_s=spent["compute"],
        exposed_comm_s=spent["exposed"],
        wait_s=spent["wait"],
        idle_s=spent["idle"],
        host_s=spent["launch"] + spent["host"],
        data_s=sum(piece.stop_s - piece.start_s for piece in rank.thread if piece.subject is DATA),
        overlap=_overlap(rank.thread, rank.transfers),
    )


def _overlap(thread: Sequence[Piece], transfers: Sequence[Piece]) -> float | None:
    """Share of the transfers' time in which the thread computed."""
    transfer_s = sum(piece.stop_s - piece.start_s for piece in transfers)
    if transfer_s == 0:
        return None
    computing = [piece for piece in thread if piece.kind == "compute"]
    starts_s = [piece.start_s for piece in computing]
    hidden_s = 0.0
    for start_s, stop_s, _, _ in transfers:
        # From the computation that runs at the transfer's start, or the first one after it.
        for piece in computing[max(0, bisect_right(starts_s, start_s) - 1) :]:
            if piece.start_s >= stop_s:
                break
            hidden_s += max(0.0, min(stop_s, piece.stop_s) - max(start_s, piece.start_s))
    return hidden_s / transfer_s


def _intervals(ranks: Sequence[RankReplay]) -> Iterator[Interval]:
    zero_s = min((rank.begin_s for rank in ranks), default=0.0)
    lanes: tuple[Lane, Lane] = ("compute", "communication")
    for rank in ranks:
        for lane, pieces in zip(lanes, (rank.thread, rank.transfers), strict=True):
            for start_s, stop_s, subject, kind in pieces:
                yield Interval(rank.number, lane, start_s - zero_s, stop_s - zero_s, str(subject), kind)

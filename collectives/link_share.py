"""Two ranks and a link: how much of it an operation uses, and its time beside the backend's own."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable

from collectives import operations as wire
from collectives.bench import Row, gather, synchronize
from collectives.group import Group, World
from collectives.rivals import Rival, median_bounds
from collectives.subject import OUT_OF_PLACE, SHARDED, Case, Subject
from collectives.traffic import bytes_sent
from collectives.transfer import Transfer

OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv")
RANKS = 2  # what each sends then crosses one link, in one direction
# A rank's notice that it can receive waits behind what it sends. With d calls in flight the notices come d at
# a time, and the link waits for one in d calls only.
IN_FLIGHT = 4
# gloo's all_to_all sends in both directions at once only where both ranks call it within the link's latency;
# that is chance after a barrier, and rare in a program. A rank that comes late makes every round alike.
LATE_S = 1e-3


def link_case(operation: str, message_bytes: int) -> Case:
    """The case in which each of two ranks sends `message_bytes` to the other in a call."""
    return Case(operation, message_bytes * RANKS if operation in SHARDED else message_bytes)


def link_rate(
    world: World,
    operation: str,
    message_bytes: int,
    total_bytes: int,
    repeats: int,
    in_flight: int = IN_FLIGHT,
) -> Row:
    """Move at least `total_bytes` in each direction of the link between two ranks; both get the same row.

    Args:
        message_bytes: what a rank sends in one call.
        repeats: how often all of it is moved; the time is the median of the slowest rank's.
        in_flight: calls that are under way at once, each with tensors of its own.

    Returns:
        `GBps` is payload per second in each direction. `wire_bytes` is what the kernel counted for a rank
        in one repeat, framing included; None where it does not count. `wrong` counts elements of the results
        that differ from what they must be.

    Raises:
        ValueError: not two ranks, or another operation.
    """
    if world.size != RANKS:
        raise ValueError(f"world_size={world.size} must be {RANKS}: a link has two ends")
    if operation not in OPERATIONS:
        raise ValueError(f"operation={operation} is unknown; valid are {', '.join(OPERATIONS)}")
    case = link_case(operation, message_bytes)
    group = world.group("world", range(RANKS))
    subjects = [Subject(case, group, OUT_OF_PLACE) for _ in range(in_flight)]
    for subject in subjects:
        subject.fill()
    first = _start(subjects[0])
    _wait(first)
    algorithm = first[0].algorithm
    sent = bytes_sent(operation, algorithm, case.shards(RANKS), case.dtype, RANKS, group.index)
    calls = math.ceil(total_bytes / sent)
    _stream(subjects, min(calls, 2 * in_flight))  # warm up
    wire.barrier(world.control)  # so that none of the warm-up's bytes still wait in a queue
    counted_before = None if group.wire is None else group.wire.bytes_sent()
    times = []
    for _ in range(repeats):
        wire.barrier(world.control)
        start = time.perf_counter()
        _stream(subjects, calls)
        synchronize(group)
        times.append(time.perf_counter() - start)
    wire.barrier(world.control)
    counted_after = None if group.wire is None else group.wire.bytes_sent()
    slowest = [max(ranks) for ranks in gather(world, times)]
    time_s = statistics.median(slowest)
    counted = None
    if counted_before is not None and counted_after is not None:
        counted = (counted_after - counted_before) / repeats
    wrong = int(sum(gather(world, [float(sum(subject.wrong() for subject in subjects))])[0]))
    return {
        "operation": operation,
        "algorithm": algorithm,
        "message_bytes": sent,
        "calls": calls,
        "sent_bytes": sent * calls,
        "wire_bytes": counted,
        "time_s": time_s,
        "times_s": slowest,
        "GBps": sent * calls / time_s / 1e9,
        "wrong": wrong,
    }


def late_ratio(world: World, case: Case, rounds: int, late_s: float = LATE_S) -> Row:
    """Time `case` and torch.distributed's own function in turn; both ranks get the same row.

    In each round one of the ranks, in turns of two rounds, calls `late_s` after the barrier that starts it.
    Times run from the barrier to the end on the slower rank; `ratio` is ours over native, the median over
    rounds, and `ratio_low` and `ratio_high` bound it at 95 %.
    """
    group = world.group("world", range(RANKS))
    subject, rival = Subject(case, group, OUT_OF_PLACE), Rival(Subject(case, group, OUT_OF_PLACE))
    algorithm = subject.run().algorithm
    rival.run()
    runs: tuple[Callable[[], object], Callable[[], object]] = (subject.run, rival.run)
    samples: tuple[list[float], list[float]] = ([], [])
    for turn in range(rounds):
        is_late = turn // 2 % RANKS == group.index
        for which in (0, 1) if turn % 2 == 0 else (1, 0):
            wire.barrier(world.control)
            start = time.perf_counter()
            if is_late:
                time.sleep(late_s)
            runs[which]()
            synchronize(group)
            samples[which].append(time.perf_counter() - start)
    ours, theirs = ([max(ranks) for ranks in gather(world, times)] for times in samples)
    low, middle, high = median_bounds([a / b for a, b in zip(ours, theirs, strict=True)])
    return {
        "operation": case.operation,
        "algorithm": algorithm,
        "size_bytes": case.size_bytes,
        "late_s": late_s,
        "rounds": rounds,
        "ours_s": statistics.median(ours),
        "native_s": statistics.median(theirs),
        "ratio": middle,
        "ratio_low": low,
        "ratio_high": high,
    }


def _stream(subjects: list[Subject], calls: int) -> None:
    """`calls` calls, as many under way at once as there are subjects."""
    under_way: deque[list[Transfer]] = deque()
    for number in range(calls):
        if len(under_way) == len(subjects):
            _wait(under_way.popleft())
        under_way.append(_start(subjects[number % len(subjects)]))
    while under_way:
        _wait(under_way.popleft())


def _start(subject: Subject) -> list[Transfer]:
    """One call, the receive before the send, so that both directions are busy at once."""
    if subject.case.operation != "send_recv":
        return [subject.run(asynchronous=True)]
    group: Group = subject.group
    peer = group.ranks[1 - group.index]
    return [
        wire.recv(subject.output, group, peer, asynchronous=True),
        wire.send(subject.input, group, peer, asynchronous=True),
    ]


def _wait(transfers: list[Transfer]) -> None:
    for transfer in transfers:
        transfer.wait()

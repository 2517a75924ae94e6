"""Replays all ranks' schedules without running them, and refuses what would hang or corrupt.

Three passes, cheapest first: each distinct schedule alone (reads, writes, what is in flight), then
the order and shapes of what the ranks say to each other, then a replay that finds cycles. Ranks
that share one schedule object are looked at once where that is enough, so that hundreds of
data-parallel ranks cost little.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from strategies.communication import AllGather, AllReduce, Communication, Recv, ReduceScatter, Send, Wait
from strategies.compute import Backward, BackwardWeight, Forward, GradientNorm, Update
from strategies.schedule import Schedule
from strategies.values import Group, Operation, Value


class ScheduleError(ValueError):
    """A plan that would hang or corrupt; the sentence names rank and operation."""


def check(schedules: Sequence[Schedule]) -> None:
    """Refuse schedules of all ranks, rank 0 first, that cannot all run to their end with right data.

    Raises:
        ScheduleError: a read before its write, a write while a transfer uses the value, a transfer never
            completed, a gradient missing or counted twice, a send without its recv, collectives that
            differ in order, shape, dtype or reduction, or a cycle in which ranks wait for each other.
    """
    checked: set[int] = set()
    for rank, schedule in enumerate(schedules):
        if id(schedule) not in checked:
            checked.add(id(schedule))
            _check_alone(rank, schedule)
            _check_gradients(rank, schedule)
    _match_collectives(schedules)
    _match_messages(schedules)
    _replay(schedules)


def _check_alone(rank: int, schedule: Schedule) -> None:
    """Data flow within one rank. Values of kind "parameter" are always there."""
    written: set[Value] = set(schedule.given)
    in_flight: dict[Value, Communication] = {}  # by the value to wait for
    busy: dict[Value, tuple[Communication, bool]] = {}  # value -> (its transfer, whether that writes it)

    for operation in schedule.operations:
        if isinstance(operation, Wait):
            transfer = in_flight.pop(operation.value, None)
            if transfer is None:
                raise ScheduleError(f"rank {rank}: {operation} has nothing in flight to wait for")
            for value in (*transfer.reads, *transfer.writes):
                busy.pop(value, None)
            written.update(transfer.writes)
            continue
        for value in operation.reads:
            transfer_of, writes_it = busy.get(value, (None, False))
            if writes_it:
                raise ScheduleError(
                    f"rank {rank}: {operation} reads {value} before {transfer_of} is waited for"
                )
            if value not in written and value.kind != "parameter":
                raise ScheduleError(f"rank {rank}: {operation} reads {value} before anything has written it")
        for value in operation.writes:
            if value in busy:
                raise ScheduleError(
                    f"rank {rank}: {operation} writes {value} while {busy[value][0]} is still in flight"
                )
        if isinstance(operation, Communication):
            if operation.value in in_flight:
                raise ScheduleError(
                    f"rank {rank}: {operation} starts while {in_flight[operation.value]} is still in flight"
                )
            in_flight[operation.value] = operation
            for value in operation.reads:
                busy[value] = (operation, False)
            for value in operation.writes:
                busy[value] = (operation, True)
                written.discard(value)
        else:
            written.update(operation.writes)
    if in_flight:
        transfer = next(iter(in_flight.values()))
        raise ScheduleError(f"rank {rank}: {transfer} is never waited for")


def _check_gradients(rank: int, schedule: Schedule) -> None:
    """Before a layer's update, every microbatch that went forward has added its gradient exactly once."""
    forwards: dict[int, set[int]] = {}
    gradients: dict[int, set[int]] = {}
    updated: set[int] = set()
    for operation in schedule.operations:
        if isinstance(operation, Forward):
            forwards.setdefault(operation.layer.index, set()).add(operation.microbatch)
        elif isinstance(operation, BackwardWeight | Backward):
            added = gradients.setdefault(operation.layer.index, set())
            if operation.microbatch in added:
                raise ScheduleError(f"rank {rank}: {operation} is run twice")
            if operation.accumulate != bool(added):
                wrong = "overwrites" if added else "adds to nothing instead of writing"
                raise ScheduleError(f"rank {rank}: {operation} {wrong} the layer's gradient")
            added.add(operation.microbatch)
        elif isinstance(operation, Update):
            for layer in operation.layers:
                missing = forwards.get(layer.index, set()) - gradients.get(layer.index, set())
                if missing:
                    raise ScheduleError(
                        f"rank {rank}: {operation} comes before dW of layer {layer.index}, "
                        f"microbatch {min(missing)}"
                    )
                updated.add(layer.index)
    trained = {
        layer.index for layer in schedule.layers if gradients.get(layer.index) and layer.spec.parameters
    }
    if trained - updated:
        raise ScheduleError(f"rank {rank}: layer {min(trained - updated)} is never updated")


def _group(operation: Operation) -> Group | None:
    """The group whose every member must take part, or None."""
    if isinstance(operation, AllReduce | AllGather | ReduceScatter | GradientNorm):
        return operation.group
    return None


def _signature(operation: Operation) -> tuple[object, ...]:
    return operation.signature if isinstance(operation, Communication) else (operation.identity,)


def _match_collectives(schedules: Sequence[Schedule]) -> None:
    """All members of a group run the same collectives in the same order."""
    per_schedule: dict[int, dict[Group, list[Operation]]] = {}
    for schedule in schedules:
        if id(schedule) not in per_schedule:
            by_group: dict[Group, list[Operation]] = {}
            for operation in schedule.operations:
                if (group := _group(operation)) is not None:
                    by_group.setdefault(group, []).append(operation)
            per_schedule[id(schedule)] = by_group
    groups: dict[Group, None] = {}
    for rank, schedule in enumerate(schedules):
        for group, own in per_schedule[id(schedule)].items():
            if rank not in group.ranks:
                raise ScheduleError(f"rank {rank}: {own[0]} is for group {group.name}, which it is not in")
            if max(group.ranks) >= len(schedules):
                raise ScheduleError(
                    f"rank {rank}: {own[0]} needs rank {max(group.ranks)}, "
                    f"but there are {len(schedules)} ranks"
                )
            groups[group] = None
    for group in groups:
        # What equals the first member's equals each other's: one comparison a distinct schedule.
        first = group.ranks[0]
        own = per_schedule[id(schedules[first])].get(group, [])
        compared = {id(schedules[first])}
        for member in group.ranks:
            if id(schedules[member]) not in compared:
                compared.add(id(schedules[member]))
                _compare(first, own, member, per_schedule[id(schedules[member])].get(group, []))


def _compare(rank: int, own: list[Operation], member: int, others: list[Operation]) -> None:
    for mine, theirs in zip(own, others, strict=False):
        if mine is theirs:
            continue
        if _signature(mine) != _signature(theirs) or mine.identity != theirs.identity:
            raise ScheduleError(
                f"rank {rank} runs {_describe(mine)} where rank {member} runs {_describe(theirs)}"
            )
    if len(own) != len(others):
        longer, operation = (rank, own) if len(own) > len(others) else (member, others)
        shorter = member if longer == rank else rank
        missing = operation[min(len(own), len(others))]
        raise ScheduleError(f"rank {shorter} skips {_describe(missing)}, which rank {longer} runs")


def _describe(operation: Operation) -> str:
    if isinstance(operation, Communication):
        shape = " x ".join(map(str, operation.shape)) or "scalar"
        reduction = f", {operation.reduction}" if isinstance(operation, AllReduce) else ""
        return f"{operation} ({shape} {operation.dtype}{reduction})"
    return str(operation)


def _match_messages(schedules: Sequence[Schedule]) -> None:
    """Between each pair, the k-th send meets the k-th recv."""
    sends: dict[tuple[int, int], list[Send]] = {}
    recvs: dict[tuple[int, int], list[Recv]] = {}
    for rank, schedule in enumerate(schedules):
        for operation in schedule.operations:
            if isinstance(operation, Send | Recv):
                if not 0 <= operation.peer < len(schedules) or operation.peer == rank:
                    raise ScheduleError(f"rank {rank}: {operation} names a peer that there is not")
                if isinstance(operation, Send):
                    sends.setdefault((rank, operation.peer), []).append(operation)
                else:
                    recvs.setdefault((operation.peer, rank), []).append(operation)
    for pair in sends.keys() | recvs.keys():
        source, target = pair
        sent, received = sends.get(pair, []), recvs.get(pair, [])
        for send, recv in zip(sent, received, strict=False):
            if (send.value, send.shape, send.dtype) != (recv.value, recv.shape, recv.dtype):
                raise ScheduleError(
                    f"rank {source} runs {_describe(send)} where rank {target} runs {_describe(recv)}"
                )
        if len(sent) > len(received):
            raise ScheduleError(
                f"rank {source}: {_describe(sent[len(received)])} has no recv on rank {target}"
            )
        if len(received) > len(sent):
            raise ScheduleError(
                f"rank {target}: {_describe(received[len(sent)])} has no send on rank {source}"
            )


class _Transfers:
    """Which transfers every participant has started. Transfers are numbered within their group or pair."""

    def __init__(self, size: int) -> None:
        self.started: dict[object, int] = {}
        self.counts: list[dict[object, int]] = [{} for _ in range(size)]

    def start(self, rank: int, operation: Operation) -> tuple[object, int]:
        """Note that `rank` starts this; return its key and how many participants it needs."""
        group = _group(operation)
        if group is not None:
            channel: object = group
            needed = group.size
        elif isinstance(operation, Send):
            channel, needed = (rank, operation.peer), 2
        else:
            assert isinstance(operation, Recv)
            channel, needed = (operation.peer, rank), 2
        counts = self.counts[rank]
        number = counts.get(channel, 0)
        counts[channel] = number + 1
        key = (channel, number)
        self.started[key] = self.started.get(key, 0) + 1
        return key, needed

    def complete(self, key: object, needed: int) -> bool:
        return self.started[key] >= needed


def _replay(schedules: Sequence[Schedule]) -> None:
    """Run every rank to its end, starting transfers at once and blocking only on waits.

    A rank that blocks is run again when the transfer it waits for completes; when none can run
    and one has not ended, they wait for each other.
    """
    transfers = _Transfers(len(schedules))
    positions = [0] * len(schedules)
    pending: list[dict[Value, tuple[object, int]]] = [{} for _ in schedules]
    blocked: dict[object, list[int]] = {}
    ready = deque(range(len(schedules)))

    def started(rank: int, operation: Operation) -> tuple[object, int]:
        key, needed = transfers.start(rank, operation)
        if transfers.complete(key, needed):
            ready.extend(blocked.pop(key, ()))
        return key, needed

    while ready:
        rank = ready.popleft()
        blocker = _advance(schedules[rank], rank, positions, pending[rank], transfers, started)
        if blocker is not None:
            blocked.setdefault(blocker, []).append(rank)
    stuck = [rank for rank, schedule in enumerate(schedules) if positions[rank] < len(schedule.operations)]
    if stuck:
        where = "; ".join(
            f"rank {rank} at {schedules[rank].operations[positions[rank]]}" for rank in stuck[:4]
        )
        more = f"; and {len(stuck) - 4} more" if len(stuck) > 4 else ""
        raise ScheduleError(f"ranks wait for each other in a cycle: {where}{more}")


def _advance(
    schedule: Schedule,
    rank: int,
    positions: list[int],
    pending: dict[Value, tuple[object, int]],
    transfers: _Transfers,
    started: Callable[[int, Operation], tuple[object, int]],
) -> object | None:
    """Run `rank` as far as it goes; the key of the transfer that blocks it, or None at its end."""
    operations = schedule.operations
    while positions[rank] < len(operations):
        operation = operations[positions[rank]]
        if isinstance(operation, Wait):
            key, needed = pending[operation.value]
            if not transfers.complete(key, needed):
                return key
        elif isinstance(operation, GradientNorm):
            norm = Value("gradient norm", -1, 0)
            if norm not in pending:
                pending[norm] = started(rank, operation)
            key, needed = pending[norm]
            if not transfers.complete(key, needed):
                return key
            del pending[norm]
        elif isinstance(operation, Communication):
            pending[operation.value] = started(rank, operation)
        positions[rank] += 1
    return None

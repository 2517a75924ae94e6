"""The checker: 1,000 random plans pass, and whatever is broken in one of them is refused by name."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from models.mlp import DeepMLP
from strategies.checker import ScheduleError, check
from strategies.communication import (
    AllGather,
    AllReduce,
    Collective,
    Communication,
    Recv,
    ReduceScatter,
    Send,
    Wait,
)
from strategies.compute import BackwardWeight, Forward, GradientNorm, LayerOperation, Loss, LossSums, Update
from strategies.registry import make_strategy
from strategies.schedule import Schedule
from strategies.strategy import Options, Task
from strategies.values import Group, Operation, Value
from tests.problems import KINDS, random_problem


@pytest.mark.parametrize("part", range(4))
def test_a_thousand_random_plans_pass(part: int) -> None:
    rng = random.Random(part)
    for _ in range(250):
        problem = random_problem(rng)
        check(problem.schedules())
        check(problem.schedules(training=False))


# What goes wrong. A mutation takes the schedules of all ranks and breaks that of one; it returns the rank,
# its new operations and those of which one must be named, or None where there is nothing to break.

Mutated = tuple[int, list[Operation], Sequence[Operation]]
Mutation = Callable[[random.Random, list[Schedule]], "Mutated | None"]


def pick(
    rng: random.Random, schedules: Sequence[Schedule], wanted: Callable[[Operation], bool]
) -> tuple[int, list[Operation], int] | None:
    """A random place in a random rank's operations at which `wanted` holds."""
    places = [
        (rank, position)
        for rank, schedule in enumerate(schedules)
        for position, operation in enumerate(schedule.operations)
        if wanted(operation)
    ]
    if not places:
        return None
    rank, position = rng.choice(places)
    return rank, list(schedules[rank].operations), position


def is_collective(operation: Operation) -> bool:
    return isinstance(operation, Collective | GradientNorm) and operation.group.size > 1


def drop(wanted: Callable[[Operation], bool], with_wait: bool = False) -> Mutation:
    """Leave an operation out, and what waits for it too if asked."""

    def mutate(rng: random.Random, schedules: list[Schedule]) -> Mutated | None:
        found = pick(rng, schedules, wanted)
        if found is None:
            return None
        rank, operations, position = found
        dropped = operations.pop(position)
        if with_wait and isinstance(dropped, Communication):
            del operations[wait_for(operations, position, dropped.value)]
        return rank, operations, [dropped]

    return mutate


def wait_for(operations: list[Operation], after: int, value: Value) -> int:
    """Place of the first wait for `value` from `after` on."""
    for position in range(after, len(operations)):
        operation = operations[position]
        if isinstance(operation, Wait) and operation.value == value:
            return position
    raise AssertionError(f"nothing waits for {value}")


def peer(operation: Operation) -> int | None:
    return operation.peer if isinstance(operation, Send | Recv) else None


def swap(wanted: Callable[[Operation], bool]) -> Mutation:
    """Two operations change places; messages only with those of the same peer, whose order alone matters."""

    def mutate(rng: random.Random, schedules: list[Schedule]) -> Mutated | None:
        found = pick(rng, schedules, wanted)
        if found is None:
            return None
        rank, operations, position = found
        others = [
            i
            for i, other in enumerate(operations)
            if wanted(other) and i != position and peer(other) == peer(operations[position])
        ]
        if not others:
            return None
        other = rng.choice(others)
        operations[position], operations[other] = operations[other], operations[position]
        return rank, operations, [operations[position], operations[other]]

    return mutate


def change(wanted: Callable[[Operation], bool], **changes: Callable[[Any], Any]) -> Mutation:
    """Replace fields of an operation by what is computed from it."""

    def mutate(rng: random.Random, schedules: list[Schedule]) -> Mutated | None:
        found = pick(rng, schedules, wanted)
        if found is None:
            return None
        rank, operations, position = found
        old: Any = operations[position]
        operations[position] = replace(old, **{name: make(old) for name, make in changes.items()})
        return rank, operations, [operations[position]]

    return mutate


def repeat_start(rng: random.Random, schedules: list[Schedule]) -> Mutated | None:
    """Start a transfer twice."""
    found = pick(rng, schedules, lambda operation: isinstance(operation, Communication))
    if found is None:
        return None
    rank, operations, position = found
    operations.insert(position, operations[position])
    return rank, operations, [operations[position]]


def write_in_flight(rng: random.Random, schedules: list[Schedule]) -> Mutated | None:
    """Compute once more what a transfer is just reading."""
    found = pick(
        rng,
        schedules,
        lambda operation: (
            isinstance(operation, Send | AllGather)
            or (isinstance(operation, AllReduce) and operation.value.kind == "weight gradient")
        ),
    )
    if found is None:
        return None
    rank, operations, position = found
    read = set(operations[position].reads)
    for earlier in reversed(operations[:position]):
        if isinstance(earlier, Forward | BackwardWeight) and read & set(earlier.writes):
            operations.insert(position + 1, earlier)
            return rank, operations, [earlier]
    return None


def late_wait(rng: random.Random, schedules: list[Schedule]) -> Mutated | None:
    """Wait for a transfer only after what it brings has been read."""
    found = pick(rng, schedules, lambda operation: isinstance(operation, Wait))
    if found is None:
        return None
    rank, operations, position = found
    wait = operations[position]
    assert isinstance(wait, Wait)
    transfer = next(
        operation
        for operation in reversed(operations[:position])
        if isinstance(operation, Communication) and operation.value == wait.value
    )
    for reader in range(position + 1, len(operations)):
        if set(operations[reader].reads) & set(transfer.writes):
            operations.insert(reader + 1, wait)
            del operations[position]
            return rank, operations, [operations[reader - 1]]
    return None


def is_message(operation: Operation) -> bool:
    return isinstance(operation, Send | Recv)


def crosses(operation: Operation) -> bool:
    return is_message(operation) or (isinstance(operation, Collective) and is_collective(operation))


MUTATIONS: dict[str, Mutation] = {
    "drop a collective": drop(is_collective),
    "drop a collective and its wait": drop(is_collective, with_wait=True),
    "drop a recv": drop(lambda operation: isinstance(operation, Recv)),
    "drop a recv and its wait": drop(lambda operation: isinstance(operation, Recv), with_wait=True),
    "drop a send": drop(lambda operation: isinstance(operation, Send)),
    "drop a send and its wait": drop(lambda operation: isinstance(operation, Send), with_wait=True),
    "drop a forward": drop(lambda operation: isinstance(operation, Forward)),
    "drop a loss": drop(lambda operation: isinstance(operation, Loss | LossSums)),
    "drop a first dW": drop(
        lambda operation: isinstance(operation, BackwardWeight) and not operation.accumulate
    ),
    "drop a wait": drop(lambda operation: isinstance(operation, Wait)),
    "swap two collectives": swap(is_collective),
    "swap two sends": swap(lambda operation: isinstance(operation, Send)),
    "swap two recvs": swap(lambda operation: isinstance(operation, Recv)),
    "wrong shape": change(crosses, shape=lambda old: (*old.shape[:-1], old.shape[-1] + 1)),
    "wrong dtype": change(crosses, dtype=lambda old: "float64" if old.dtype == "float32" else "float32"),
    "wrong reduction": change(
        lambda operation: isinstance(operation, AllReduce),
        reduction=lambda old: "sum" if old.reduction == "max" else "max",
    ),
    "wrong sizes": change(
        lambda operation: isinstance(operation, AllGather | ReduceScatter),
        sizes=lambda old: (old.sizes[0] + 1, *old.sizes[1:]),
    ),
    "start twice": repeat_start,
    "write what a transfer reads": write_in_flight,
    "read what a transfer writes": late_wait,
    "a peer that there is not": change(is_message, peer=lambda old: 99),
    "a negative peer": change(is_message, peer=lambda old: -1),
    "a group with a rank that there is not": change(
        lambda operation: isinstance(operation, Collective),
        group=lambda old: Group("larger", (*old.group.ranks, 99)),
    ),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_what_is_broken_is_refused_by_rank_and_operation(name: str) -> None:
    rng, broken = random.Random(name), 0
    for _ in range(400):
        schedules = random_problem(rng, rng.choice(KINDS), least_ranks=2).schedules(rng.random() < 0.85)
        mutated = MUTATIONS[name](rng, schedules)
        if mutated is None:
            continue
        rank, operations, culprits = mutated
        schedules[rank] = replace(schedules[rank], operations=tuple(operations))
        with pytest.raises(ScheduleError) as refusal:
            check(schedules)
        message = str(refusal.value)
        assert f"rank {rank}" in message, message
        assert any(names(message, culprit) for culprit in culprits), f"{culprits} not in: {message}"
        broken += 1
        if broken == 25:
            return
    pytest.fail(f"{name}: only {broken} schedules could be broken so")


def names(message: str, culprit: Operation) -> bool:
    """Whether the sentence has the broken operation, or a value that it reads or writes."""
    values = {*culprit.reads, *culprit.writes}
    if isinstance(culprit, Wait | Communication):
        values.add(culprit.value)
    if isinstance(culprit, LayerOperation):
        values.add(culprit.layer.output(culprit.microbatch))
    return str(culprit) in message or any(str(value) in message for value in values)


# By hand, sentence by sentence

PAIR = Group("world", (0, 1))
A, B = Value("output", 0, 0), Value("output", 1, 0)
LAYERS = DeepMLP(4, 4, 2, 4).layers


def by_hand(*operations: Operation, given: tuple[Value, ...] = ()) -> Schedule:
    return Schedule(operations, (3,), 3, (), given, "float32")


def send(value: Value, peer: int) -> Send:
    return Send(value, (4, 3), "float32", peer)


def recv(value: Value, peer: int) -> Recv:
    return Recv(value, (4, 3), "float32", peer)


def reduce(value: Value, shape: tuple[int, ...] = (4,), group: Group = PAIR, **changes: Any) -> AllReduce:
    return AllReduce(value, shape, "float32", group, **changes)


REFUSED: dict[str, tuple[list[Schedule], str]] = {
    "a read before its write": (
        [by_hand(send(A, 1), Wait(A)), by_hand(recv(A, 0), Wait(A))],
        "rank 0: send output of layer 0, microbatch 0 to rank 1 reads output of layer 0, microbatch 0 "
        "before anything has written it",
    ),
    "a read while it arrives": (
        [by_hand(send(A, 1), Wait(A), given=(A,)), by_hand(recv(A, 0), send(A, 0), Wait(A))],
        "rank 1: send output of layer 0, microbatch 0 to rank 0 reads output of layer 0, microbatch 0 "
        "before recv output of layer 0, microbatch 0 from rank 0 is waited for",
    ),
    "a write during a send": (
        [by_hand(send(A, 1), recv(A, 1), Wait(A), given=(A,)), by_hand(recv(A, 0), Wait(A))],
        "rank 0: recv output of layer 0, microbatch 0 from rank 1 writes output of layer 0, microbatch 0 "
        "while send output of layer 0, microbatch 0 to rank 1 is still in flight",
    ),
    "a start before the first is done": (
        [by_hand(send(A, 1), send(A, 1), Wait(A), Wait(A), given=(A,)), by_hand(recv(A, 0), Wait(A))],
        "rank 0: send output of layer 0, microbatch 0 to rank 1 starts while "
        "send output of layer 0, microbatch 0 to rank 1 is still in flight",
    ),
    "a wait for nothing": (
        [by_hand(Wait(A), given=(A,)), by_hand()],
        "rank 0: wait for output of layer 0, microbatch 0 has nothing in flight to wait for",
    ),
    "a transfer that nobody completes": (
        [by_hand(send(A, 1), given=(A,)), by_hand(recv(A, 0), Wait(A))],
        "rank 0: send output of layer 0, microbatch 0 to rank 1 is never waited for",
    ),
    "a send without a recv": (
        [by_hand(send(A, 1), Wait(A), given=(A,)), by_hand()],
        "rank 0: send output of layer 0, microbatch 0 to rank 1 (4 x 3 float32) has no recv on rank 1",
    ),
    "a recv without a send": (
        [by_hand(), by_hand(recv(A, 0), Wait(A))],
        "rank 1: recv output of layer 0, microbatch 0 from rank 0 (4 x 3 float32) has no send on rank 0",
    ),
    "messages in another order": (
        [
            by_hand(send(A, 1), send(B, 1), Wait(A), Wait(B), given=(A, B)),
            by_hand(recv(B, 0), recv(A, 0), Wait(A), Wait(B)),
        ],
        "rank 0 runs send output of layer 0, microbatch 0 to rank 1 (4 x 3 float32) where "
        "rank 1 runs recv output of layer 1, microbatch 0 from rank 0 (4 x 3 float32)",
    ),
    "messages of unequal shape": (
        [
            by_hand(Send(A, (4, 2), "float32", 1), Wait(A), given=(A,)),
            by_hand(recv(A, 0), Wait(A)),
        ],
        "rank 0 runs send output of layer 0, microbatch 0 to rank 1 (4 x 2 float32) where "
        "rank 1 runs recv output of layer 0, microbatch 0 from rank 0 (4 x 3 float32)",
    ),
    "a message to oneself": (
        [by_hand(send(A, 0), Wait(A), given=(A,)), by_hand()],
        "rank 0: send output of layer 0, microbatch 0 to rank 0 names a peer that there is not",
    ),
    "collectives in another order": (
        [
            by_hand(reduce(A), reduce(B), Wait(A), Wait(B), given=(A, B)),
            by_hand(reduce(B), reduce(A), Wait(A), Wait(B), given=(A, B)),
        ],
        "rank 0 runs all_reduce output of layer 0, microbatch 0 (4 float32, sum) where "
        "rank 1 runs all_reduce output of layer 1, microbatch 0 (4 float32, sum)",
    ),
    "collectives of unequal shape": (
        [by_hand(reduce(A), Wait(A), given=(A,)), by_hand(reduce(A, (5,)), Wait(A), given=(A,))],
        "rank 0 runs all_reduce output of layer 0, microbatch 0 (4 float32, sum) where "
        "rank 1 runs all_reduce output of layer 0, microbatch 0 (5 float32, sum)",
    ),
    "another reduction": (
        [
            by_hand(reduce(A), Wait(A), given=(A,)),
            by_hand(reduce(A, reduction="max"), Wait(A), given=(A,)),
        ],
        "rank 0 runs all_reduce output of layer 0, microbatch 0 (4 float32, sum) where "
        "rank 1 runs all_reduce output of layer 0, microbatch 0 (4 float32, max)",
    ),
    "a collective that one skips": (
        [by_hand(reduce(A), Wait(A), given=(A,)), by_hand()],
        "rank 1 skips all_reduce output of layer 0, microbatch 0 (4 float32, sum), which rank 0 runs",
    ),
    "a collective that the first skips": (
        [by_hand(), by_hand(reduce(A), Wait(A), given=(A,))],
        "rank 0 skips all_reduce output of layer 0, microbatch 0 (4 float32, sum), which rank 1 runs",
    ),
    "a group without oneself": (
        [by_hand(reduce(A, group=Group("others", (1,))), Wait(A), given=(A,)), by_hand()],
        "rank 0: all_reduce output of layer 0, microbatch 0 is for group others, which it is not in",
    ),
    "a group with too many": (
        [by_hand(reduce(A, group=Group("three", (0, 1, 2))), Wait(A), given=(A,))] * 2,
        "rank 0: all_reduce output of layer 0, microbatch 0 needs rank 2, but there are 2 ranks",
    ),
    "both receive before they send": (
        [
            by_hand(recv(B, 1), Wait(B), send(A, 1), Wait(A), given=(A,)),
            by_hand(recv(A, 0), Wait(A), send(B, 0), Wait(B), given=(B,)),
        ],
        "ranks wait for each other in a cycle: rank 0 at wait for output of layer 1, microbatch 0; "
        "rank 1 at wait for output of layer 0, microbatch 0",
    ),
    "both send and wait before they receive": (
        [
            by_hand(send(A, 1), Wait(A), recv(B, 1), Wait(B), given=(A,)),
            by_hand(send(B, 0), Wait(B), recv(A, 0), Wait(A), given=(B,)),
        ],
        "ranks wait for each other in a cycle: rank 0 at wait for output of layer 0, microbatch 0; "
        "rank 1 at wait for output of layer 1, microbatch 0",
    ),
    "a norm that waits for a message that waits for the norm": (
        [
            by_hand(GradientNorm((), PAIR), send(A, 1), Wait(A), given=(A,)),
            by_hand(recv(A, 0), Wait(A), GradientNorm((), PAIR)),
        ],
        "ranks wait for each other in a cycle: rank 0 at gradient norm; "
        "rank 1 at wait for output of layer 0, microbatch 0",
    ),
    "an update by a norm that nobody took": (
        [by_hand(Update((), clips=True))],
        "rank 0: update of nothing reads gradient norm",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_the_sentence_says_rank_and_operation(name: str) -> None:
    schedules, sentence = REFUSED[name]
    with pytest.raises(ScheduleError) as refusal:
        check(schedules)
    assert str(refusal.value).startswith(sentence)
    assert "\n" not in str(refusal.value)


def test_a_long_cycle_names_four_ranks_and_counts_the_rest() -> None:
    """Six ranks in a ring, each of which receives from the one below before it sends."""
    values = [Value("output", rank, 0) for rank in range(6)]
    ring = [
        by_hand(
            recv(values[rank - 1], (rank - 1) % 6),
            Wait(values[rank - 1]),
            send(values[rank], (rank + 1) % 6),
            Wait(values[rank]),
            given=(values[rank],),
        )
        for rank in range(6)
    ]
    with pytest.raises(ScheduleError, match=r"rank 3 at wait for output of layer 2, .*; and 2 more$"):
        check(ring)


def test_messages_that_cross_are_no_cycle() -> None:
    """Receives posted first: both sides send, then both wait."""
    check(
        [
            by_hand(recv(B, 1), send(A, 1), Wait(A), Wait(B), given=(A,)),
            by_hand(recv(A, 0), send(B, 0), Wait(B), Wait(A), given=(B,)),
        ]
    )


def test_a_forward_that_reads_what_is_not_there_yet() -> None:
    model = DeepMLP(4, 4, 2, 4)
    schedule = make_strategy("single", Options()).schedule(model, 1, 0, 3, Task("mse"))
    operations = schedule.operations
    assert isinstance(operations[0], Forward)
    with pytest.raises(ScheduleError) as refusal:
        check([replace(schedule, operations=operations[1:])])
    assert str(refusal.value) == (
        "rank 0: layer 1, microbatch 0, forward reads output of layer 0, microbatch 0 "
        "before anything has written it"
    )


SCALE = """
import json, sys, time
from models.mlp import DeepMLP
from strategies.checker import check
from strategies.registry import make_strategy
from strategies.strategy import Options, Task

name, world_size, microbatches, bucket_mb = sys.argv[1], *map(int, sys.argv[2:])
def memory_bytes(name):
    text = open("/proc/self/status").read()
    return int(text.split(name + ":")[1].split()[0]) * 1024

# A build of torch with CUDA is half a gigabyte by itself, before anything is planned.
imported_bytes = memory_bytes("VmRSS")
start = time.process_time()
model = DeepMLP(64, 64, 64, 64)
strategy = make_strategy(name, Options(microbatches=microbatches, bucket_mb=bucket_mb))
strategy.check(model, world_size, 1024)
schedules = [strategy.schedule(model, world_size, rank, 1024, Task("mse")) for rank in range(world_size)]
check(schedules)
print(json.dumps({
    "operations": [len(schedules[0].operations), len(schedules[-1].operations)],
    "time_s": time.process_time() - start,
    "planned_bytes": memory_bytes("VmHWM") - imported_bytes,
}))
"""


@pytest.mark.parametrize(
    ("arguments", "operations"),
    [
        # First stage: a receive, a forward, a send, two waits, dX and dW a microbatch, and the update. The
        # last: a receive, its wait, forward, loss, dX, send, its wait and dW.
        (("pipeline", "64", "256", "25"), [256 * 7 + 1, 256 * 8 + 1]),
        # A layer: forward, dX, dW, a reduction and a wait for weight and bias, an update. Besides, the loss.
        (("ddp", "512", "1", "0"), [64 * (1 + 2 + 4 + 1) + 1] * 2),
    ],
)
def test_large_plans_are_built_and_checked_in_ten_seconds_and_500_MB(
    arguments: tuple[str, ...], operations: list[int]
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCALE, *arguments], capture_output=True, text=True, timeout=50, check=True
    )
    result = json.loads(done.stdout)
    assert result["operations"] == operations
    assert result["time_s"] <= 10
    assert 0 < result["planned_bytes"] <= 500e6

"""Collectives on real gloo ranks against numpy: every operation, dtype, reduction, group, size and form."""

from __future__ import annotations

import contextlib
import io
import time
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from collectives import operations as wire
from collectives.group import World
from collectives.traffic import ALGORITHMS
from tests.collective_cases import FLOATS, INTEGERS, REDUCING, Call, run_calls
from tests.ranks import RankPools
from tests.system import needs_resident_bytes, resident_bytes

MOVING = ("broadcast", "scatter", "gather", "all_gather", "all_to_all")
OPERATIONS = (*REDUCING, *MOVING)
SIZES = (1, 2, 3, 4, 5)
MOST_SIZES = (1, 2, 3, *(pytest.param(size, marks=pytest.mark.slow) for size in (4, 5)))


def check(ranks: RankPools, size: int, calls: list[Call], members: tuple[int, ...] | None = None) -> None:
    errors = [error for errors in ranks[size].run(run_calls, calls, members) for error in errors]
    assert not errors, errors[0]


# The example that everybody knows


def four_vectors(world: World) -> dict[str, Any]:
    group = world.group("world", range(4))
    summed = torch.tensor([0.0, 1.0, 2.0, 3.0]) + world.rank
    memory = summed.data_ptr()
    transfer = wire.all_reduce(summed, group)
    mine = torch.tensor([0.0, 1.0, 2.0, 3.0]) + world.rank
    part, whole = torch.empty(1), torch.empty(4)
    wire.reduce_scatter(mine, group, output=part)
    wire.all_gather(part, group, output=whole)
    assert transfer.output is summed and summed.data_ptr() == memory
    return {"all_reduce": summed.tolist(), "part": part.tolist(), "rebuilt": whole.tolist()}


def test_four_ranks_sum_their_vectors(ranks: RankPools) -> None:
    for rank, result in enumerate(ranks[4].run(four_vectors)):
        assert result["all_reduce"] == [6, 10, 14, 18]
        assert result["part"] == [6 + 4 * rank]
        assert result["rebuilt"] == [6, 10, 14, 18]


# Against numpy


@pytest.mark.parametrize("size", MOST_SIZES)
def test_every_dtype_reduction_and_algorithm(ranks: RankPools, size: int) -> None:
    calls = []
    for operation in OPERATIONS:
        names = ("auto", "native", *ALGORITHMS[operation])
        for dtype, algorithm, rows in product((*FLOATS, *INTEGERS), names, (7,)):
            reductions = ("sum", "min", "max") if operation in REDUCING else ("sum",)
            if operation in REDUCING and dtype in FLOATS:
                reductions += ("mean",)
            calls += [
                Call(operation, dtype, op, rows, algorithm=algorithm, root=size - 1) for op in reductions
            ]
    check(ranks, size, [*calls, *calls])  # a second call of a kind is begun another way


@pytest.mark.parametrize("size", MOST_SIZES)
def test_sizes_from_nothing_to_large(ranks: RankPools, size: int) -> None:
    """997 rows are prime, 150,001 of 2 are 1.2 MB: two pieces of a by-hand reduction."""
    calls = [
        Call(operation, rows=rows, row=row, algorithm=algorithm, in_place=in_place, root=size // 2)
        for operation in OPERATIONS
        for algorithm in ("auto", *ALGORITHMS[operation])
        for rows, row in ((0, (2,)), (1, ()), (997, (1,)), (150_001 if algorithm != "auto" else 0, (2,)))
        for in_place in (False, True)
    ]
    check(ranks, size, calls)


@pytest.mark.parametrize("size", SIZES)
def test_blocks_of_unequal_sizes(ranks: RankPools, size: int) -> None:
    operations = ("all_gather", "reduce_scatter", "scatter", "gather", "all_to_all")
    rows = ((3, 0, 1, 5, 2), (0, 0, 4, 0, 0), (1, 2, 3, 4, 5))
    calls = [
        Call(operation, dtype, rows=cut, contiguous=contiguous, in_place=in_place, root=size - 1)
        for operation in operations
        for cut in rows
        for dtype in ("float32", "int64")
        for contiguous in (True, False)
        for in_place in (False, True)
    ]
    check(ranks, size, calls)


@pytest.mark.parametrize(
    ("size", "members"), [(4, (0, 1)), (4, (2, 3)), (4, (3, 1)), (5, (4, 0, 2)), (3, (1,))]
)
def test_groups_of_some_ranks(ranks: RankPools, size: int, members: tuple[int, ...]) -> None:
    """Roots are global ranks; places in a group follow their order, however the group was named."""
    calls = [
        Call(operation, rows=rows, algorithm=algorithm, root=len(members) - 1)
        for operation in OPERATIONS
        for algorithm in ("auto", "native")
        for rows in (2, 1001)
    ]
    check(ranks, size, calls, members)


@st.composite
def any_call(draw: st.DrawFn) -> Call:
    operation = draw(st.sampled_from(OPERATIONS))
    dtype = draw(st.sampled_from((*FLOATS, *INTEGERS)))
    reductions = ("sum", "min", "max", "mean") if dtype in FLOATS else ("sum", "min", "max")
    uneven = operation in ("all_gather", "reduce_scatter", "scatter", "gather", "all_to_all")
    even = draw(st.integers(0, 40))
    rows = draw(st.one_of(st.just(even), st.tuples(*[st.integers(0, 9)] * 5))) if uneven else even
    by_hand = [name for name in ALGORITHMS[operation] if name in ("direct", "fan")]
    choices = ("auto", *by_hand) if isinstance(rows, tuple) else ("auto", "native", *ALGORITHMS[operation])
    return Call(
        operation,
        dtype,
        draw(st.sampled_from(reductions)) if operation in REDUCING else "sum",
        rows,
        draw(st.sampled_from(((), (1,), (3,), (2, 3)))),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.sampled_from(choices)),
        draw(st.integers(0, 4)),
        draw(st.booleans()),
        draw(st.integers(0, 2**20)),
    )


@pytest.mark.parametrize("size", SIZES)
@settings(
    max_examples=25,
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.generate],  # the error names the call, and every failing round costs a pool of ranks
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(calls=st.lists(any_call(), min_size=1, max_size=12))
def test_anything_agrees_with_numpy(ranks: RankPools, size: int, calls: list[Call]) -> None:
    from dataclasses import replace

    check(ranks, size, [replace(call, root=call.root % size) for call in calls])


# Order


def hundred_sends(world: World) -> list[float]:
    group = world.group("world", range(2))
    if world.rank == 0:
        sends = [wire.send(torch.full((k % 7 + 1,), k), group, 1, asynchronous=True) for k in range(100)]
        for transfer in sends:
            transfer.wait()
        return []
    received = [torch.full((k % 7 + 1,), -1) for k in range(100)]
    receives = [wire.recv(tensor, group, 0, asynchronous=True) for tensor in received]
    for transfer in reversed(receives):
        transfer.wait()
    assert all(len(set(tensor.tolist())) == 1 for tensor in received)
    return [float(tensor[0]) for tensor in received]


def test_a_hundred_sends_arrive_in_order(ranks: RankPools) -> None:
    assert ranks[2].run(hundred_sends)[1] == list(range(100))


def many_in_flight(world: World, backwards: bool) -> list[list[float]]:
    """Job: operations of all kinds in flight at once, waited for in another order on each rank."""
    group, n = world.group("world", range(world.size)), world.size
    made = []
    for k in range(12):
        root = group.ranks[k % n]
        tensor = torch.full((4,), float(world.rank + k))
        blocks = torch.full((n, 2), float(world.rank * 10 + k))
        whole = torch.zeros(n)
        made.append(wire.broadcast(tensor, group, root, algorithm="fan", asynchronous=True))
        made.append(
            wire.reduce(
                torch.full((4,), 2.0 * (world.rank + k)),
                group,
                root,
                output=torch.zeros(4),
                asynchronous=True,
            )
        )
        made.append(wire.reduce_scatter(blocks, group, asynchronous=True))
        made.append(wire.all_gather(torch.tensor([float(k)]), group, output=whole, asynchronous=True))
        made.append(wire.all_reduce(torch.ones(3) * k, group, asynchronous=True))
    order = list(range(len(made)))
    if backwards and world.rank % 2:
        order.reverse()
    for place in order:
        made[place].wait()
    return [[] if transfer.output is None else transfer.output.tolist() for transfer in made]


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("backwards", [False, True])
def test_operations_in_flight_do_not_mix(ranks: RankPools, size: int, backwards: bool) -> None:
    """Also when ranks wait for them in opposite orders."""
    results = ranks[size].run(many_in_flight, backwards)
    for rank, result in enumerate(results):
        for k in range(12):
            root = k % size
            broadcast, reduced, scattered, gathered, summed = result[5 * k : 5 * k + 5]
            assert broadcast == [root + k] * 4
            assert reduced == ([2.0 * sum(r + k for r in range(size))] * 4 if rank == root else [])
            assert scattered == [float(sum(r * 10 + k for r in range(size)))] * 2
            assert gathered == [k] * size
            assert summed == [k * size] * 3


def sends_between(world: World) -> float:
    """Job: a receive posted before a collective whose messages take the same way."""
    group = world.group("world", range(2))
    value, whole = torch.full((1,), -1.0), torch.zeros(2)
    if world.rank == 1:
        received = wire.recv(value, group, 0, asynchronous=True)
        wire.all_gather(torch.ones(1), group, output=whole)
        received.wait()
    else:
        wire.all_gather(torch.ones(1), group, output=whole)
        wire.send(torch.full((1,), 5.0), group, 1)
    assert whole.tolist() == [1, 1]
    return float(value)


def test_sends_and_collectives_are_kept_apart(ranks: RankPools) -> None:
    assert ranks[2].run(sends_between)[1] == 5.0


def spoken(world: World) -> tuple[str, float]:
    class Clocked(io.StringIO):
        when = 0.0

        def write(self, text: str) -> int:
            self.when = self.when or time.monotonic()
            return super().write(text)

    heard = Clocked()
    with contextlib.redirect_stdout(heard):
        wire.print_in_rank_order({"here": world.rank}, world.group("world", range(world.size)))
    return heard.getvalue(), heard.when


def test_ranks_print_in_order(ranks: RankPools) -> None:
    texts, times = zip(*ranks[4].run(spoken), strict=True)
    assert list(texts) == [f"rank {rank}: {{'here': {rank}}}\n" for rank in range(4)]
    assert list(times) == sorted(times)


# What cannot be done


def refusals(world: World) -> list[str]:
    """Job: what each wrong call says; the group works afterwards."""
    group, n = world.group("world", range(world.size)), world.size
    outside = world.group("test (0,)", (0,))
    floats, integers = torch.ones(n, 2), torch.ones(n, 2, dtype=torch.int64)
    calls = [
        lambda: wire.all_reduce(floats, group, op="product"),
        lambda: wire.all_reduce(integers, group, op="mean"),
        lambda: wire.all_reduce(torch.ones(2, dtype=torch.complex64), group),
        lambda: wire.all_reduce(floats, group, algorithm="tree"),
        lambda: wire.all_reduce(floats, group, output=torch.ones(n)),
        lambda: wire.all_reduce(floats, group, output=integers),
        lambda: wire.all_reduce(torch.ones(2, device="meta"), group),
        lambda: wire.reduce_scatter(torch.ones(n + 1, 2), group),
        lambda: wire.reduce_scatter(torch.ones(()), group),
        lambda: wire.reduce_scatter(torch.ones(n + 1, 2), group, output=torch.ones(2)),
        lambda: wire.reduce_scatter(floats, group, output=torch.ones(2), sizes=[1] * (n + 1)),
        lambda: wire.all_gather(torch.ones(2), group, output=torch.ones(2 * n + 1)),
        lambda: wire.all_gather(
            torch.ones(1 + world.rank), group, output=torch.ones(6), sizes=[1, 2, 3], algorithm="native"
        ),
        lambda: wire.all_to_all(torch.ones(n + 1), group, output=torch.ones(n + 1)),
        lambda: wire.all_to_all(torch.ones(n), group, output=torch.ones(n), sizes=[1] * n),
        lambda: wire.broadcast(floats, group, n),
        lambda: wire.gather(floats, group, world.rank),
        lambda: wire.scatter(None, group, world.rank, output=floats),
        lambda: wire.scatter([floats] * n, group, world.rank, output=floats),  # type: ignore[arg-type]
        lambda: wire.send(floats, group, world.rank),
        lambda: wire.recv(floats, group, n + 3),
    ]
    said = []
    for call in calls:
        try:
            call()
            said.append("nothing")
        except ValueError as error:
            said.append(str(error))
        total = torch.ones(1)
        wire.all_reduce(total, group)
        assert total.item() == n
    if world.rank:
        try:
            wire.all_reduce(floats, outside)
            said.append("nothing")
        except ValueError as error:
            said.append(str(error))
    return said


def test_what_cannot_be_done_is_said_before_anything_is_sent(ranks: RankPools) -> None:
    said = ranks[3].run(refusals)[1]
    for text, parts in zip(
        said,
        [
            ("op=product", "sum, min, max, mean"),
            ("op=mean of int64",),
            ("complex64", "float32"),
            ("algorithm=tree", "all_reduce", "auto, native, ring"),
            ("[3]", "[3, 2]"),
            ("int64", "float32"),
            ("meta", "cpu"),
            ("[4, 2]", "[3, *block]"),
            ("[]", "[3, *block]"),
            ("[4, 2]", "[3, 2]", "[6]"),
            ("sizes=[1, 1, 1, 1]", "3 whole numbers"),
            ("[7]", "[3, 2]", "[6]"),
            ("algorithm=native", "unequal", "direct"),
            ("[4]", "multiple of 3"),
            ("sizes and output_sizes",),
            ("root=3", "[0, 1, 2]"),
            ("gather needs an output",),
            ("scatter needs a tensor",),
            ("scatter takes one tensor", "not a list"),
            ("peer=1 is this rank itself",),
            ("peer=6", "[0, 1, 2]"),
            ("not in group", "[0]"),
        ],
        strict=True,
    ):
        for part in parts:
            assert part in text, (part, text)


# Operations that are given up, started again, or waited for in an odd order


def phased_and_blocking(world: World) -> list[float]:
    """Job: rank 0 completes a phased reduction before it reduces; the others only afterwards."""
    group = world.group("world", range(world.size))
    other = world.group("other", range(world.size))
    found = []
    for k, second in enumerate((group, other, group)):
        summed = torch.full((3,), float(world.rank + k))
        total = torch.ones(2)
        reduced = wire.reduce(summed, group, 0, output=torch.zeros(3), algorithm="fan", asynchronous=True)
        sent = wire.broadcast(torch.full((3,), float(k)), second, 1, algorithm="fan", asynchronous=True)
        if world.rank == 0:
            reduced.wait()
            sent.wait()
            wire.all_reduce(total, second)
        else:
            wire.all_reduce(total, second)
            sent.wait()
            reduced.wait()
        wire.barrier(second)
        found.append(float(total[0]) + (float(reduced.output[0]) if reduced.output is not None else 0.0))
    return found


@pytest.mark.parametrize("size", [3, 4])
def test_whoever_waits_first_is_not_left_alone(ranks: RankPools, size: int) -> None:
    """A rank that waits in another operation still passes on what a peer's reduction needs."""
    results = ranks[size].run(phased_and_blocking)
    sums = [sum(rank + k for rank in range(size)) for k in range(3)]
    assert results[0] == [size + total for total in sums]
    assert results[1:] == [[size] * 3] * (size - 1)


def more_than_the_tags(world: World) -> int:
    """Job: wrong results of more phased operations than there are tags, the root changing on the way."""
    group = world.group("world", range(3))
    made = []
    for k in range(1100):
        root = 0 if k < 1024 else 2
        tensor = torch.full((4,), float(k + world.rank))
        made.append(
            wire.reduce(tensor, group, root, output=torch.zeros(4), algorithm="fan", asynchronous=True)
        )
    wrong = 0
    for k, transfer in enumerate(made):
        transfer.wait()
        if transfer.output is not None:
            wrong += transfer.output.tolist() != [3 * k + 3] * 4
    return wrong


def test_tags_are_not_lent_twice(ranks: RankPools) -> None:
    assert ranks[3].run(more_than_the_tags) == [0, 0, 0]


def started_again(world: World) -> list[str]:
    """Job: what is said where an operation is started again."""
    group = world.group("world", range(world.size))
    said = []
    for make in (
        lambda: wire.reduce_scatter(torch.ones(world.size, 2), group, algorithm="direct"),
        lambda: wire.all_reduce(torch.ones(2), group),
        lambda: wire.all_reduce(torch.ones(2), group),
        lambda: wire.reduce(torch.ones(2), group, 0, asynchronous=True),
    ):
        transfer = make()
        try:
            transfer.start()
        except ValueError as error:
            said.append(str(error))
        transfer.wait()
        transfer.wait()
    first = wire.reduce_scatter(torch.ones(world.size, 4), group, algorithm="direct", asynchronous=True)
    second = wire.reduce_scatter(torch.ones(world.size, 4) * 2, group, algorithm="direct", asynchronous=True)
    second.wait()
    first.wait()
    assert first.output is not None and first.output.tolist() == [world.size] * 4
    assert second.output is not None and second.output.tolist() == [2 * world.size] * 4
    return said


def test_an_operation_runs_once(ranks: RankPools) -> None:
    assert ranks[2].run(started_again)[1] == [
        "reduce_scatter has run: call it again",
        "all_reduce has run: call it again",
        "all_reduce has run: call it again",
        "reduce is under way: wait for it first",
    ]


def kept_memory(world: World) -> dict[str, Any]:
    """Job: calls of one kind, some in flight together, of tensors that change, that are others, that go."""
    group, root = world.group("world", range(world.size)), 1
    is_root = world.rank == root
    tensor = torch.arange(4.0)
    found: dict[str, Any] = {"scattered": [], "reduced": []}
    output = torch.zeros(2)

    def scatter(source: torch.Tensor) -> None:
        wire.scatter(source if is_root else None, group, root, output=output)
        found["scattered"].append(output.tolist())

    scatter(tensor)
    scatter(tensor)
    scatter(tensor.add_(10))
    scatter(torch.arange(4.0) * 100)
    scatter(tensor.set_(torch.arange(4.0) + 50))  # other memory under the same name
    large, part = torch.ones(2**25), torch.ones(2**24)
    for _ in range(3):
        wire.scatter(large if is_root else None, group, root, output=part)
    before = resident_bytes()
    del large
    deadline = time.monotonic() + 10  # gloo's own thread lets go of a call's tensors after its end is known
    while before - resident_bytes() <= 2**26 and time.monotonic() < deadline:
        time.sleep(0.01)
    found["freed"] = before - resident_bytes()
    own = [torch.full((1,), float(10 * k + world.rank)) for k in range(3)]
    for _ in range(2):
        made = [wire.reduce(one.clone(), group, root, algorithm="native", asynchronous=True) for one in own]
        for transfer in reversed(made):
            transfer.wait()
        found["reduced"].append([t.output.item() if t.output is not None else None for t in made])
    inputs = own[0].clone()
    wire.reduce(inputs, group, root, algorithm="native")
    found["input"] = inputs.item()
    return found


@needs_resident_bytes
def test_memory_that_is_kept_between_calls_holds_nothing_back_and_mixes_nothing_up(ranks: RankPools) -> None:
    first, second = ranks[2].run(kept_memory)
    assert first["scattered"] == [[0, 1], [0, 1], [10, 11], [0, 100], [50, 51]]
    assert second["scattered"] == [[2, 3], [2, 3], [12, 13], [200, 300], [52, 53]]
    assert first["freed"] > 2**26 and second["freed"] > 2**26  # half of what it had
    assert first["reduced"] == [[None] * 3] * 2 and second["reduced"] == [[1, 21, 41]] * 2
    assert first["input"] == 0 and second["input"] == 1  # the sum


# Tensors that are more than numbers


def parameters(world: World) -> dict[str, list[float]]:
    """Job: parameters of a model as inputs and results."""
    group, n = world.group("world", range(world.size)), world.size

    def parameter(*shape: int) -> torch.nn.Parameter:
        return torch.nn.Parameter(torch.full(shape, float(world.rank + 1)))

    reduced, whole, own = parameter(2), torch.zeros(2 * n), torch.zeros(2)
    wire.all_reduce(reduced, group, op="mean")
    wire.all_gather(parameter(2), group, output=whole, algorithm="direct")
    wire.reduce_scatter(parameter(n, 2), group, output=own, algorithm="direct")
    sent = parameter(2)
    wire.broadcast(sent, group, 1)
    root = wire.reduce(parameter(2), group, 0, output=parameter(2), algorithm="fan").output
    assert isinstance(reduced, torch.nn.Parameter) and reduced.requires_grad
    found = {"reduced": reduced, "whole": whole, "own": own, "sent": sent}
    found.update({} if root is None else {"root": root})
    return {name: tensor.tolist() for name, tensor in found.items()}


def test_parameters_are_tensors(ranks: RankPools) -> None:
    first, second = ranks[2].run(parameters)
    assert first.pop("root") == [3, 3]
    expected = {"reduced": [1.5, 1.5], "whole": [1, 1, 2, 2], "own": [3, 3], "sent": [2, 2]}
    assert first == second == expected


def overlapping(world: World) -> list[str]:
    """Job: what is said of memory that is input and result at once; then what may be."""
    group, n = world.group("world", range(world.size)), world.size
    memory = torch.arange(24.0)
    blocks = memory[: 2 * n].view(n, 2)
    other = (group.index + 1) % n
    expanded = torch.ones(1).expand(4)
    said = []
    for call in (
        lambda: world.rank == 0 and wire.reduce(memory[:8], group, 0, output=memory[4:12]),
        lambda: wire.all_reduce(memory[:8], group, output=memory[4:12]),
        lambda: wire.all_to_all(memory[: 2 * n], group, output=memory[: 2 * n]),
        lambda: wire.reduce_scatter(blocks, group, output=blocks[other]),
        lambda: wire.all_gather(blocks[other], group, output=memory[: 2 * n]),
        lambda: wire.all_reduce(expanded, group),
        lambda: wire.recv(expanded, group, group.ranks[other]),
        lambda: wire.all_reduce(None, group),  # type: ignore[arg-type]
        lambda: wire.all_reduce(torch.eye(2).to_sparse(), group),
        lambda: wire.all_gather(torch.ones(2), group, output=torch.ones(2 * n), sizes=[2.0] * n),  # type: ignore[list-item]
        lambda: world.group("world", [0]),
        lambda: world.group("outside", [0, n]),
    ):
        try:
            call()
            said.append("nothing")
        except ValueError as error:
            said.append(str(error))
    wire.all_reduce(memory[:2], group, output=memory[:2])
    total = torch.ones(1)
    wire.all_reduce(total, group)
    assert total.item() == n and memory[:2].tolist() == [0, n]
    return said


def test_memory_that_overlaps_is_refused(ranks: RankPools) -> None:
    said = ranks[2].run(overlapping)
    for rank, sentences in enumerate(said):
        reduced_to_root, reduced, exchanged, scattered, gathered, *others = sentences
        assert ("overlap" in reduced_to_root) == (rank == 0)  # only the root writes
        assert "all_reduce: tensor and output overlap" in reduced
        assert exchanged == "all_to_all: tensor and output overlap in memory, and must not"
        own = "overlap in memory, and must not but for this rank's own block"
        assert scattered == f"reduce_scatter: tensor and output {own}"
        assert gathered == f"all_gather: tensor and output {own}"
        for text, part in zip(
            others,
            (
                "expanded",
                "expanded",
                "a NoneType cannot be sent",
                "layout",
                "whole numbers",
                "another name",
                "0 to 1",
            ),
            strict=True,
        ):
            assert part in text

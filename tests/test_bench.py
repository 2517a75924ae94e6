"""Measuring the wire: nccl-tests' sizes and factors, values that are really checked, honest ratios."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from collectives import direct, messages, native
from collectives.bench import bus_factor, bytes_needed, measure, percentile
from collectives.group import World
from collectives.rivals import compare, median_bounds
from collectives.subject import IN_PLACE, OUT_OF_PLACE, PLACEMENTS, Case, Subject
from collectives.traffic import ALGORITHMS, ITEMSIZE
from tests.ranks import RankPools


@pytest.mark.parametrize(
    ("operation", "n", "factor"),
    [
        ("all_reduce", 2, 1.0),
        ("all_reduce", 4, 1.5),
        ("all_gather", 4, 0.75),
        ("reduce_scatter", 8, 0.875),
        ("all_to_all", 2, 0.5),
        ("scatter", 4, 0.75),
        ("gather", 4, 0.75),
        ("broadcast", 4, 1.0),
        ("reduce", 3, 1.0),
        ("send_recv", 2, 1.0),
        ("all_reduce", 1, None),
        ("barrier", 4, None),
    ],
)
def test_bus_factors_are_those_of_nccl_tests(operation: str, n: int, factor: float | None) -> None:
    assert bus_factor(operation, n) == factor


def test_sizes_are_cut_to_whole_elements_of_equal_blocks() -> None:
    assert Case("all_reduce", 1001, "float64").elements(3) == 125
    assert Case("all_gather", 1001, "float64").elements(3) == 123  # three blocks of 41
    assert Case("broadcast", 1, "float32").elements(4) == 1
    assert Case("gather", 1, "uint8").elements(4) == 4
    assert Case("barrier", 10**6).elements(4) == 0
    assert Case("all_reduce", 400_000_000).elements(4) == 100_000_000


def test_the_classic_needs_two_buffers_of_memory() -> None:
    """400 MB in and 400 MB out."""
    assert bytes_needed(Case("all_reduce", 400_000_000), 4) == 800_000_000


def test_percentiles_are_numpys() -> None:
    values = np.random.default_rng(0).exponential(size=37).tolist()
    for percent in (0, 5, 50, 95, 99, 100):
        assert percentile(values, percent) == pytest.approx(np.percentile(values, percent), rel=1e-12)


def test_bounds_of_a_median_are_order_statistics() -> None:
    """Of 20 values the 6th and 15th: binomial(20, 1/2) is at most 5 with 2.07 %, at most 6 with 5.77 %."""
    assert median_bounds([float(k) for k in range(1, 21)]) == (6.0, 10.5, 15.0)
    assert median_bounds([3.0, 1.0, 2.0]) == (1.0, 2.0, 3.0)
    # 6 values: each extreme lies on one side of the median with 1/64, 1.6 %.
    assert median_bounds([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])[0] == 1.0


def rows_of(world: World, cases: list[Case]) -> list[Any]:
    return [measure(world, case, placement, 1, 2, True) for case in cases for placement in PLACEMENTS]


@pytest.mark.parametrize("n", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_nothing_is_wrong_in_any_operation(ranks: RankPools, n: int) -> None:
    cases = [
        Case(operation, 4000, dtype, reduction, n - 1, algorithm)
        for operation, names in ALGORITHMS.items()
        for algorithm in ("auto", *names)
        for dtype in ("float32", "bfloat16", "uint8")
        for reduction in (("sum", "max") if "reduce" in operation else ("sum",))
    ]
    results = ranks[n].run(rows_of, cases)
    assert all(result == results[0] for result in results), "every rank has the same rows"
    for row in results[0]:
        if row is not None:
            assert row["wrong"] == 0, row
            assert row["time_s"] > 0 and row["p50_s"] <= row["p95_s"] <= row["p99_s"]
            assert row["min_rank_s"] <= row["time_s"]
            assert (row["busbw_GBps"] is None) == (n == 1 or row["size_bytes"] == 0)
    in_place = {case.operation: row for case, row in zip(cases, results[0][1::2], strict=True)}
    assert [name for name, row in in_place.items() if row is None] == [
        "all_to_all",
        "send_recv",
        "barrier",
    ]


def row_of(world: World, case: Case) -> Any:
    return measure(world, case, OUT_OF_PLACE, 1, 3, True)


def test_a_row_adds_up(ranks: RankPools) -> None:
    """A reduce_scatter of 3 MB on 3 ranks: 2 MB of payload from each, in one piece of 1 MB to each peer."""
    case = Case("reduce_scatter", 3_000_000, algorithm="direct")
    row = ranks[3].run(row_of, case)[0]
    assert row["size_bytes"] == 3_000_000 and row["count"] == 750_000
    assert row["algbw_GBps"] == pytest.approx(3e6 / row["time_s"] / 1e9)
    assert row["busbw_GBps"] == pytest.approx(row["algbw_GBps"] * 2 / 3)
    assert row["sent_bytes"] == row["least_bytes"] == 2_000_000
    assert row["wire_bytes"] == 2_000_000 + 2 * 144
    assert row["wire_over_least"] == pytest.approx(1.000144)


def broken(world: World, fault: str) -> dict[str, int | None]:
    """Job: values that are wrong, by operation, with one of our algorithms broken on rank 1."""
    saved = messages.COMBINE["sum"], direct.Direct.post
    remembered = world.group("world", range(world.size)).ready
    remembered.clear()  # calls of earlier jobs, which bound what is broken here
    if fault == "adds wrongly" and world.rank == 1:
        messages.COMBINE["sum"] = lambda a, b, out: torch.add(a, b, alpha=2, out=out)
    if fault == "sends its first message twice" and world.rank == 1:

        def post(transfer: direct.Direct) -> Any:
            if len(transfer.sends) > 1:
                transfer.sends[1] = (transfer.sends[0][0], transfer.sends[1][1])
            return saved[1](transfer)

        direct.Direct.post = post  # type: ignore[method-assign]
    try:
        found = {}
        for operation, algorithm in (
            ("reduce_scatter", "direct"),
            ("reduce", "fan"),
            ("all_to_all", "direct"),
            ("all_reduce", "ring"),
        ):
            row = measure(world, Case(operation, 1200, root=1, algorithm=algorithm), OUT_OF_PLACE, 1, 1, True)
            assert row is not None
            found[operation] = row["wrong"]
        return found
    finally:
        messages.COMBINE["sum"], direct.Direct.post = saved  # type: ignore[method-assign]
        remembered.clear()


def test_a_broken_algorithm_is_caught(ranks: RankPools) -> None:
    """Three ranks of 100 elements: rank 1 counts the others' values twice, zero in one of seven at most."""
    wrong = ranks[3].run(broken, "adds wrongly")
    assert wrong == [wrong[0]] * 3
    assert 80 <= wrong[0]["reduce_scatter"] <= 100
    assert 240 <= wrong[0]["reduce"] <= 300
    assert wrong[0]["all_to_all"] == wrong[0]["all_reduce"] == 0
    # 100 elements to rank 0 that were for rank 2: one in seven is equal by chance.
    wrong = ranks[3].run(broken, "sends its first message twice")[0]
    assert 75 <= wrong.pop("all_to_all") <= 96
    assert wrong == {"reduce_scatter": 0, "reduce": 0, "all_reduce": 0}


def poisoned(world: World) -> dict[str, int]:
    """Job: values that are wrong where nothing was sent at all."""
    group = world.group("world", range(world.size))
    found = {}
    for operation in ALGORITHMS:
        if operation != "barrier":
            subject = Subject(Case(operation, 1200, root=0), group, OUT_OF_PLACE)
            subject.fill()
            found[operation] = subject.wrong()
    return found


def test_a_result_that_never_came_is_wrong(ranks: RankPools) -> None:
    for rank, found in enumerate(ranks[2].run(poisoned)):
        for operation, wrong in found.items():
            rooted = operation in ("reduce", "gather")
            blocks = operation in ("reduce_scatter", "scatter")
            expected = 150 if blocks else 300
            assert wrong == (0 if rooted and rank != 0 else expected), (operation, rank)


def test_dtypes_hold_the_values_exactly() -> None:
    """Sums of up to 6 from each of 18 ranks stay below 128 and 256."""
    for dtype in ITEMSIZE:
        kind = getattr(torch, dtype)
        for value in range(6 * 18 + 1):
            assert float(torch.tensor(value, dtype=kind)) == value


def comparison(world: World, case: Case) -> Any:
    return compare(world, case, 1, 7)


@pytest.mark.parametrize("operation", list(ALGORITHMS))
def test_a_comparison_takes_both_in_turn(ranks: RankPools, operation: str) -> None:
    results = ranks[2].run(comparison, Case(operation, 4096))
    assert results[0] == results[1]
    row = results[0]
    assert row["rounds"] == 7 and row["ours_s"] > 0 and row["native_s"] > 0
    assert row["ratio_low"] <= row["ratio"] <= row["ratio_high"]
    own = row["algorithm"] == ALGORITHMS[operation][0] and operation != "send_recv"
    assert (row["host_added_s"] is not None) == own
    if own:
        assert math.isfinite(row["host_added_s"])


def test_in_place_needs_no_second_buffer(ranks: RankPools) -> None:
    assert ranks[2].run(memory_of, IN_PLACE) == [(True, True)] * 2
    assert ranks[2].run(memory_of, OUT_OF_PLACE) == [(False, False)] * 2


def memory_of(world: World, placement: str) -> tuple[bool, bool]:
    """Job: whether input and output share memory, in all_reduce and all_gather."""
    group = world.group("world", range(world.size))
    reduced = Subject(Case("all_reduce", 4096), group, placement)
    gathered = Subject(Case("all_gather", 4096), group, placement)
    offset = gathered.block * 4 * group.index
    return (
        reduced.input.data_ptr() == reduced.output.data_ptr(),
        gathered.input.data_ptr() == gathered.output.data_ptr() + offset,
    )


def together(world: World) -> list[float]:
    """Job: what arrives from the rank before, with the form of send_recv that nccl needs."""
    group, n = world.group("world", range(world.size)), world.size
    received = torch.full((3,), -1.0)
    transfer = native.Together(
        group, received, (world.rank - 1) % n, torch.full((3,), float(world.rank)), (world.rank + 1) % n
    )
    transfer.start()
    transfer.wait()
    assert transfer.sent_bytes == 12
    return received.tolist()


@pytest.mark.parametrize("n", [2, 3])
def test_a_receive_and_a_send_go_together(ranks: RankPools, n: int) -> None:
    assert ranks[n].run(together) == [[(rank - 1) % n] * 3 for rank in range(n)]

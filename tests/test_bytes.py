"""Bytes: what the closed forms predict, what the ledger counts, and what the kernel saw leaving."""

from __future__ import annotations

import os
import socket
import struct
from itertools import pairwise, product

import numpy as np
import pytest
import torch

from collectives.gloo_traffic import ring_all_reduce_bytes
from collectives.group import World
from collectives.operations import all_reduce
from tests.ranks import RankPools
from tests.truth import Case, OptimizerConfig, Options, replace, train

PLAIN_SGD = OptimizerConfig("sgd", lr=1e-3)

# Eight layers of 1024 x 1024

DEEP = Case(
    inputs=1024,
    outputs=1024,
    num_layers=8,
    hidden_dim=1024,
    bias=False,
    loss="mse",
    dtype="float32",
    optimizer=PLAIN_SGD,
    batches=(256,),
)
ACTIVATION = 256 * 1024 * 4  # bytes, 1,048,576
# 8 matrices of 4 MiB, each rank sends 2 * 3/4 of them.
DDP = [{"all_reduce weight gradient": 50_331_648}] * 4
# Each rank sends its quarter of 7 activations to 3 others, and 3 quarters of 7 gradients.
TENSOR = [{"all_gather output": 5_505_024, "reduce_scatter partial gradient": 5_505_024}] * 4
TENSOR_ALL_REDUCE = [{"all_gather output": 5_505_024, "all_reduce partial gradient": 11_010_048}] * 4
PIPELINE = [
    {"send output": ACTIVATION},
    {"send output": ACTIVATION, "send gradient": ACTIVATION},
    {"send output": ACTIVATION, "send gradient": ACTIVATION},
    {"send gradient": ACTIVATION},
]
EXACT = {
    "ddp": ("ddp", Options(), DDP, [50_331_648] * 4),
    "tensor": ("tensor", Options(), TENSOR, [11_010_048] * 4),
    "tensor, all_reduce": ("tensor", Options(backward="all_reduce"), TENSOR_ALL_REDUCE, [16_515_072] * 4),
    **{
        f"pipeline, {m} microbatches": (
            "pipeline",
            Options(microbatches=m),
            PIPELINE,
            [1_048_576, 2_097_152, 2_097_152, 1_048_576],
        )
        for m in (1, 4, 8)
    },
}


@pytest.mark.parametrize("name", EXACT)
def test_the_published_figures_are_predicted(name: str) -> None:
    strategy, options, tables, totals = EXACT[name]
    case = replace(DEEP, strategy=strategy, options=options)
    for rank in range(4):
        table = case.make_strategy().bytes_predicted(case.model(), 4, rank, 256, case.task)
        assert {label: count for label, count in table.items() if count} == tables[rank]
        assert sum(table.values()) == totals[rank]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", EXACT)
def test_the_published_figures_are_sent(ranks: RankPools, name: str) -> None:
    strategy, options, tables, totals = EXACT[name]
    case = replace(DEEP, strategy=strategy, options=options)
    results = ranks[4].run(train, case, False)
    assert [result["sent"] for result in results] == [[table] for table in tables]
    assert [sum(result["sent"][0].values()) for result in results] == totals


# gloo's ring


def ring_by_simulation(numel: int, itemsize: int, n: int, rank: int) -> int:
    """Bytes of one all_reduce, walking the ring segment by segment as gloo/allreduce.cc cuts it.

    Reduce-scatter starts with the chunk above this rank's own and passes on n - 1 chunks; all-gather
    starts with its own. A segment that begins behind the end is not sent, the last one is short.
    """
    total = numel * itemsize
    longest = 2**20 // itemsize * itemsize
    segments = max((total + longest - 1) // longest, 2 * n)
    while segments % n:
        segments += 1
    length = (total + segments - 1) // segments
    while length % itemsize:
        length += 1
    sent = 0
    for first_chunk in (rank + 1, rank):
        for step in range(segments - segments // n):
            begin = (first_chunk * (segments // n) + step) % segments * length
            sent += max(0, min(begin + length, total) - begin)
    return sent


@pytest.mark.parametrize("n", [2, 3, 4, 5, 8, 13])
def test_the_ring_closed_form_equals_a_simulation(n: int) -> None:
    sizes = [*range(1, 70), 255, 256, 257, 1000, 4099, 2**18 - 1, 2**18, 2**18 + 1]
    sizes += [n * 2**18 - 1, 2 * n * 2**18, 2 * n * 2**18 + 1, 2 * n * 2**17 + 1, 9 * 10**6 + 7]
    for numel, itemsize in product(sizes, (2, 4, 8)):
        closed = [ring_all_reduce_bytes(numel, itemsize, n, rank) for rank in range(n)]
        assert closed == [ring_by_simulation(numel, itemsize, n, rank) for rank in range(n)], (
            numel,
            itemsize,
        )
        assert sum(closed) == 2 * (n - 1) * numel * itemsize


@pytest.mark.parametrize(
    ("numel", "itemsize", "by_rank"),
    [
        # 40 B in 4 segments of 12: chunks of 24 and 16. Each rank sends each chunk once.
        (10, 4, [40, 40]),
        # 4 B in 6 segments of 4: only the first has anything, and rank 2 sends it in both phases.
        (1, 4, [4, 4, 8]),
        # 40 B in 8 segments of 8: chunks 16, 16, 8, 0; 80 less the own chunk and the one below.
        (5, 8, [64, 48, 56, 72]),
        # 8 MiB need 8 segments of 1 MiB, so 9 of 932,068 B: chunks 2,796,204 twice and 2,796,200.
        (2**21, 4, [11_184_812, 11_184_808, 11_184_812]),
        # 2 * 3/4 of 4 MiB.
        (2**20, 4, [6_291_456] * 4),
        (0, 4, [0, 0]),
        (1000, 4, [0]),
    ],
)
def test_the_ring_closed_form_by_hand(numel: int, itemsize: int, by_rank: list[int]) -> None:
    n = len(by_rank)
    assert [ring_all_reduce_bytes(numel, itemsize, n, rank) for rank in range(n)] == by_rank


# Random configurations


def random_case(generator: np.random.Generator) -> tuple[int, Case]:
    """World size and case: any strategy, options and sizes that it takes."""

    def pick(*choices: object) -> object:
        return choices[generator.integers(len(choices))]

    def between(low: int, high: int) -> int:
        return int(generator.integers(low, high + 1))

    strategy = str(pick("ddp", "tensor", "pipeline", "ddp", "tensor", "pipeline", "single"))
    size = 1 if strategy == "single" else between(1, 4)
    widths = tuple(between(1, 19) for _ in range(between(size - 1 if strategy == "pipeline" else 0, 5)))
    rows = between(1, 17)
    partition = None
    if strategy == "pipeline" and generator.random() < 0.3:
        cuts = sorted(generator.choice(len(widths), size - 1, replace=False) + 1) if size > 1 else []
        edges = [0, *(int(cut) for cut in cuts), len(widths) + 1]
        partition = tuple(b - a for a, b in pairwise(edges))
    return size, Case(
        strategy=strategy,
        options=Options(
            microbatches=between(1, min(rows, 5)),
            schedule=str(pick("naive", "gpipe", "1f1b")),
            partition=partition,
            overlap=bool(pick(True, False)),
            bucket_mb=float(pick(0.0, 25.0, 400 / 2**20, 3000 / 2**20)),  # type: ignore[arg-type]
            backward=str(pick("reduce_scatter", "all_reduce")),
        ),
        inputs=between(1, 9),
        outputs=between(2, 11),
        widths=widths,
        activation=str(pick("relu", "gelu", "tanh", "identity")),
        bias=bool(pick(True, False)),
        loss=str(pick("cross_entropy", "mse")),
        dtype=str(pick("float32", "float64")),
        optimizer=PLAIN_SGD,
        clip_norm=0.5,
        batches=(rows, between(1, rows)) if generator.random() < 0.3 else (rows,),
        seed=between(0, 1000),
    )


def parts(total: int, n: int) -> list[int]:
    return [total // n + (r < total % n) for r in range(n)]


def bytes_by_hand(case: Case, size: int, rank: int, rows: int) -> dict[str, int]:
    """Bytes of a step by label, from the widths alone."""
    item = {"float32": 4, "float64": 8}[case.dtype]
    assert case.widths is not None
    edges = [case.inputs, *case.widths, case.outputs]
    microbatches = parts(rows, max(1, min(case.options.microbatches, rows)))
    table: dict[str, int] = {}

    def add(label: str, count: int) -> None:
        if count:
            table[label] = table.get(label, 0) + count

    if size == 1:
        return {}
    if case.strategy == "ddp":
        waiting = 0
        for below, above in reversed(list(pairwise(edges))):
            tensors = [above] * case.bias + [below * above]
            messages = tensors
            if case.options.bucket_mb > 0:
                waiting += sum(tensors)
                is_full = waiting * item >= case.options.bucket_mb * 2**20
                messages, waiting = ([waiting], 0) if is_full else ([], waiting)
            for numel in messages:
                add("all_reduce weight gradient", ring_by_simulation(numel, item, size, rank))
        if waiting:
            add("all_reduce weight gradient", ring_by_simulation(waiting, item, size, rank))
    elif case.strategy == "tensor":
        for own_rows in microbatches:
            for width in case.widths:
                own = parts(width, size)[rank]
                add("all_gather output", (size - 1) * own * own_rows * item)
                if case.options.backward == "reduce_scatter":
                    add("reduce_scatter partial gradient", (width - own) * own_rows * item)
                else:
                    whole = ring_by_simulation(width * own_rows, item, size, rank)
                    add("all_reduce partial gradient", whole)
            if case.loss == "cross_entropy":
                add("all_reduce class maximum", ring_by_simulation(own_rows, item, size, rank))
                add("all_reduce class sums", ring_by_simulation(2 * own_rows, item, size, rank))
    elif case.strategy == "pipeline":
        layers = case.options.partition or parts(len(edges) - 1, size)
        if rank < size - 1:
            add("send output", edges[sum(layers[: rank + 1])] * rows * item)
        if rank > 0:
            add("send gradient", edges[sum(layers[:rank])] * rows * item)
    return table


@pytest.mark.timeout(240)
def test_sent_equals_predicted_for_random_configurations(ranks: RankPools) -> None:
    generator = np.random.default_rng(2026)
    cases = sorted((random_case(generator) for _ in range(200)), key=lambda pair: pair[0])
    seen = {(size, case.strategy) for size, case in cases}
    assert len(seen) == 13, "every strategy on 1 to 4 ranks, single on one"
    for size, case in cases:
        results = ranks[size].run(train, case, False)
        for rank, result in enumerate(results):
            assert result["sent"] == result["predicted"], f"rank {rank} of {size}, {case}"
            expected = [bytes_by_hand(case, size, rank, rows) for rows in case.batches]
            assert result["sent"] == expected, f"rank {rank} of {size}, {case}"


# The kernel's own count

TCP_INFO_BYTES_SENT, TCP_INFO_BYTES_RETRANSMITTED = 200, 208  # offsets in linux/tcp.h, struct tcp_info


def tcp_bytes_sent() -> int:
    """Bytes that this process has put on all its TCP connections, retransmissions taken off."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                if connection.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 240)
        except OSError:
            continue  # the folder's own descriptor is gone by now
        total += struct.unpack_from("=Q", info, TCP_INFO_BYTES_SENT)[0]
        total -= struct.unpack_from("=Q", info, TCP_INFO_BYTES_RETRANSMITTED)[0]
    return total


def settled_bytes(world: World) -> int:
    """`tcp_bytes_sent` once all ranks have taken in what was sent to them; of two in a row, a barrier's."""
    world.sum_on_control(torch.zeros(1))
    return tcp_bytes_sent()


@torch.no_grad()
def wire_of_second_step(world: World, case: Case) -> tuple[int, int]:
    """Job: (bytes that the kernel sent, bytes that the ledger counted) over one step, connections warm."""
    rank = case.rank(world)
    (inputs, targets) = case.data()[0]
    program = rank.program(len(inputs))
    start, stop = rank.strategy.rows_of(world.size, world.rank, len(inputs))
    wants_inputs, wants_targets = rank.strategy.takes(world.size, world.rank)
    program.load(inputs[start:stop] if wants_inputs else None, targets[start:stop] if wants_targets else None)
    program.run(0)
    first, second, counted = settled_bytes(world), settled_bytes(world), rank.ledger.total_bytes
    program.run(1)
    barrier = second - first
    return settled_bytes(world) - second - barrier, rank.ledger.total_bytes - counted


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    ("strategy", "options", "algorithm"),
    [
        ("ddp", Options(bucket_mb=1.0), "auto"),
        ("tensor", Options(microbatches=2), "auto"),
        ("tensor", Options(backward="all_reduce"), "auto"),
        ("tensor", Options(), "native"),  # gloo's own reduce_scatter is counted as the all_reduce that it is
        ("pipeline", Options(microbatches=4), "auto"),
    ],
)
def test_counted_bytes_are_what_leaves_the_process(
    ranks: RankPools, size: int, strategy: str, options: Options, algorithm: str
) -> None:
    """Above the counted payload there is only framing, under 1 %."""
    case = Case(
        strategy=strategy,
        options=options,
        inputs=600,
        outputs=600,
        num_layers=4,
        hidden_dim=600,
        loss="mse",
        dtype="float32",
        optimizer=PLAIN_SGD,
        batches=(600,),
        algorithm=algorithm,
    )
    results = ranks[size].run(wire_of_second_step, case)
    wire, counted = (sum(column) for column in zip(*results, strict=True))
    assert counted > 2_000_000
    assert 0 <= wire - counted < 0.01 * counted, results


def wire_of_all_reduce(world: World, sizes: tuple[int, ...]) -> list[int]:
    """Job: bytes that the kernel sent for an all_reduce of each of `sizes` float64, and for a barrier."""
    group = world.group("world", range(world.size))
    sent = []
    for numel in sizes:
        tensor = torch.ones(numel, dtype=torch.float64)
        before = settled_bytes(world)
        all_reduce(tensor, group)
        sent.append(settled_bytes(world) - before)
    return sent


@pytest.mark.parametrize("size", [2, 3])
def test_the_ring_closed_form_is_the_wire_to_the_byte(ranks: RankPools, size: int) -> None:
    """Both sizes fill as many segments, so that framing and barrier cancel in the difference."""
    small, large = 3_001, 30_011
    for rank, (first, second) in enumerate(ranks[size].run(wire_of_all_reduce, (small, large))):
        expected = ring_all_reduce_bytes(large, 8, size, rank) - ring_all_reduce_bytes(small, 8, size, rank)
        assert second - first == expected, f"rank {rank}: {first}, {second}"

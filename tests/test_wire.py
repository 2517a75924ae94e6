"""Closed forms against the kernel's own count, and the least that any algorithm must send."""

from __future__ import annotations

import math

import pytest

from collectives import operations as wire
from collectives.choice import choose
from collectives.gloo_traffic import Traffic
from collectives.group import World
from collectives.subject import OUT_OF_PLACE, Case, Subject
from collectives.traffic import ALGORITHMS, bytes_least, traffic
from tests.ranks import RankPools

KIB, MIB = 2**10, 2**20
PREAMBLE_BYTES = 48
SHARDED = ("all_gather", "reduce_scatter", "scatter", "gather", "all_to_all")


def kernel_counts(world: World, cases: list[Case]) -> list[tuple[int, int | None]]:
    """Job: (bytes that the kernel sent for one call, bytes that the operation says it sent)."""
    group = world.group("world", range(world.size))
    assert group.wire is not None
    found = []
    for case in cases:
        subject = Subject(case, group, OUT_OF_PLACE)
        wire.barrier(world.control)
        before = group.wire.bytes_sent()
        wire.barrier(world.control)  # all have read
        transfer = subject.run()
        wire.barrier(world.control)
        after = group.wire.bytes_sent()
        assert before is not None and after is not None
        found.append((after - before, transfer.sent_bytes))
    return found


def cases_of(n: int, sizes: tuple[int, ...], dtype: str = "float32") -> list[Case]:
    return [
        Case(operation, size, dtype, root=n - 1, algorithm=algorithm)
        for operation, names in ALGORITHMS.items()
        for algorithm in names
        for size in sizes
    ]


def check_counts(ranks: RankPools, n: int, cases: list[Case]) -> None:
    for rank, counts in enumerate(ranks[n].run(kernel_counts, cases, timeout_s=200)):
        for case, (kernel, counted) in zip(cases, counts, strict=True):
            form = traffic(case.operation, case.algorithm, case.shards(n), case.dtype, n, rank, case.root)
            framing = PREAMBLE_BYTES * (2 * form.messages_sent + form.messages_received)
            assert kernel == form.sent_bytes + framing, (n, rank, case, kernel, form)
            assert form.gloo_framing_bytes == framing
            if counted is not None and case.operation != "send_recv":  # two operations: one call's is zero
                assert counted == form.sent_bytes


@pytest.mark.timeout(300)
@pytest.mark.parametrize("n", [2, 3, 4])
def test_every_closed_form_is_the_wire_to_the_byte(ranks: RankPools, n: int) -> None:
    """Payload and framing together, also where segments are short, empty or uneven."""
    check_counts(ranks, n, cases_of(n, (4, 4 * KIB, 100_004, 3 * MIB + 40)))
    check_counts(ranks, n, cases_of(n, (2, 70_002), "bfloat16"))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("n", [2, 3, 4])
def test_every_closed_form_is_the_wire_up_to_64_mebibytes(ranks: RankPools, n: int) -> None:
    check_counts(ranks, n, cases_of(n, tuple(4 * KIB * 4**k for k in range(8))))  # 4 KiB ... 64 MiB


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("n", [2, 3, 4])
def test_auto_sends_the_least_at_16_megabyte_shards(ranks: RankPools, n: int) -> None:
    shard = 16 * MIB
    cases = [
        Case(operation, shard * n if operation in SHARDED else shard, root=n - 1)
        for operation in ALGORITHMS
        if operation != "barrier"
    ]
    by_rank = ranks[n].run(kernel_counts, cases, timeout_s=200)
    for k, case in enumerate(cases):
        least = max(least_by_hand(case.operation, shard, n, rank, n - 1) for rank in range(n))
        busiest = max(counts[k][0] for counts in by_rank)
        assert busiest <= 1.02 * least, (case, busiest / least)


def least_by_hand(operation: str, shard: int, n: int, rank: int, root: int) -> float:
    """The table of the docs, written down again: `shard` bytes are a block, or the whole tensor."""
    is_root = rank == root
    return {
        "all_reduce": 2 * (n - 1) / n * shard,
        "all_gather": (n - 1) * shard,
        "reduce_scatter": (n - 1) * shard,
        "all_to_all": (n - 1) * shard,
        "broadcast": shard if is_root else 0,
        "reduce": 0 if is_root else shard,
        "scatter": (n - 1) * shard if is_root else 0,
        "gather": 0 if is_root else shard,
        "send_recv": shard,
    }[operation]


@pytest.mark.parametrize("n", [2, 3, 5])
def test_the_least_is_the_table(n: int) -> None:
    for operation in ALGORITHMS:
        if operation == "barrier":
            continue
        shards = [30] * n if operation in SHARDED else 30  # divides by 2, 3 and 5
        for rank in range(n):
            least = least_by_hand(operation, 120, n, rank, n - 1)
            assert bytes_least(operation, shards, "float32", n, rank, n - 1) == least


# Values worked out by hand


@pytest.mark.parametrize(
    ("operation", "algorithm", "shards", "n", "rank", "root", "expected"),
    [
        # 400 bytes on 4 ranks: 8 segments of 52, the last of 36.
        # Rank 0 sends all twice, but its own chunk and rank 3's once.
        ("all_reduce", "ring", 100, 4, 0, 0, Traffic(2 * 400 - 104 - 88, 12, 12)),
        # gloo's reduce_scatter of two blocks of 8 MiB is an all_reduce of 16: twice what is needed.
        ("reduce_scatter", "reduce_all", [2 * MIB] * 2, 2, 1, 0, Traffic(16 * MIB, 16, 16)),
        ("reduce_scatter", "direct", [2 * MIB] * 2, 2, 1, 0, Traffic(8 * MIB, 8, 8)),
        ("reduce_scatter", "direct", [3, 0, 5], 3, 1, 0, Traffic(32, 2, 0)),
        ("all_gather", "direct", [3, 0, 5], 3, 0, 0, Traffic(24, 2, 1)),
        ("all_gather", "ring", [25] * 4, 4, 2, 0, Traffic(300, 6, 6)),
        # Five ranks' tree from root 1: it sends to 2, 3 and 5 above it, and rank 2 to 4 (places 1 and 3).
        ("broadcast", "tree", 10, 5, 1, 1, Traffic(120, 3, 0)),
        ("broadcast", "tree", 10, 5, 2, 1, Traffic(40, 1, 1)),
        ("broadcast", "tree", 10, 5, 0, 1, Traffic(0, 0, 1)),
        # Three slices of 10 elements: 3, 3 and 4; each peer passes its own to two others.
        ("broadcast", "fan", 10, 4, 0, 0, Traffic(40, 3, 0)),
        ("broadcast", "fan", 10, 4, 3, 0, Traffic(32, 2, 3)),
        ("reduce", "fan", 10, 4, 3, 0, Traffic(40, 3, 2)),
        ("reduce", "fan", 10, 4, 0, 0, Traffic(0, 0, 3)),
        # Two ranks, 4 segments of 100 bytes: the ring moves the other's chunk, then rank 1 sends its own.
        ("reduce", "ring_gather", 100, 2, 1, 0, Traffic(400, 3, 2)),
        ("reduce", "ring_gather", 100, 2, 0, 0, Traffic(200, 2, 3)),
        ("scatter", "linear", [7] * 3, 3, 2, 2, Traffic(56, 2, 0)),
        ("gather", "direct", [7, 0, 2], 3, 1, 2, Traffic(0, 0, 0)),
        ("gather", "direct", [7, 0, 2], 3, 2, 2, Traffic(0, 0, 1)),
        ("all_to_all", "direct", [1, 2, 3], 3, 1, 0, Traffic(16, 2, 2)),
        ("barrier", "dissemination", 0, 5, 0, 0, Traffic(0, 3, 3)),
        ("send_recv", "direct", 6, 2, 0, 0, Traffic(24, 1, 1)),
    ],
)
def test_closed_forms_by_hand(
    operation: str,
    algorithm: str,
    shards: int | list[int],
    n: int,
    rank: int,
    root: int,
    expected: Traffic,
) -> None:
    assert traffic(operation, algorithm, shards, "float32", n, rank, root) == expected


def test_one_rank_sends_nothing() -> None:
    for operation, names in ALGORITHMS.items():
        if operation != "send_recv":
            for name in names:
                shards = [8] if operation in SHARDED else 8
                assert traffic(operation, name, shards, "float32", 1, 0) == Traffic()


def test_unknown_algorithms_are_refused() -> None:
    with pytest.raises(ValueError, match="all_reduce by tree"):
        traffic("all_reduce", "tree", 4, "float32", 2, 0)
    with pytest.raises(ValueError, match="unknown for broadcast; valid are auto, native, tree, fan"):
        choose("broadcast", "ring", "gloo", 2, 4)
    with pytest.raises(ValueError, match="for gloo"):
        choose("broadcast", "fan", "nccl", 2, 4)


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_auto_is_least_for_large_tensors_at_any_size(n: int) -> None:
    """Also on more ranks than can be started here: of what `auto` takes, the busiest rank's closed form."""
    for operation in ALGORITHMS:
        if operation == "barrier":
            continue
        total = 64 * MIB * n
        name = choose(operation, "auto", "gloo", n, total)
        shards = [total // 4 // n] * n if operation in SHARDED else total // 4
        sent = max(traffic(operation, name, shards, "float32", n, r).sent_bytes for r in range(n))
        least = max(bytes_least(operation, shards, "float32", n, r) for r in range(n))
        assert sent <= math.ceil(1.001 * least), (operation, name)

"""Schedules and their memory, against texts and numbers worked out by hand."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import pytest

from models.block import Model
from models.mlp import DeepMLP
from strategies.communication import AllGather, AllReduce, Collective, Communication, ReduceScatter, Wait
from strategies.compute import BackwardWeight
from strategies.ddp import fill_buckets
from strategies.memory import lay_out
from strategies.registry import make_strategy
from strategies.schedule import Schedule
from strategies.strategy import Options, Task, whole_layers
from strategies.values import Operation, Value
from tests.problems import random_problem
from trainer.dryrun import listing, outline

MIB = 2**20
ITEM_BYTES = {"float32": 4, "float64": 8, "bfloat16": 2}


def schedules(
    name: str, model: Model, ranks: int, rows: int = 8, task: Task | None = None, **options: object
) -> list[Schedule]:
    strategy = make_strategy(name, Options(**options))  # type: ignore[arg-type]
    strategy.check(model, ranks, rows)
    task = task or Task("mse")
    return [strategy.schedule(model, ranks, rank, rows, task) for rank in range(ranks)]


def lines(schedule: Schedule) -> list[str]:
    return [str(operation) for operation in schedule.operations]


def text(block: str) -> list[str]:
    return [line.strip() for line in block.strip().splitlines()]


# Pipelines. GPipe: every forward, then every backward (Huang et al. 2019, section 2.3; microbatches in
# the order of Narayanan et al. 2021, figure 3). 1F1B: stage s of p runs p - s - 1 forwards, then one
# forward and one backward in turn, then the backwards that are left (Narayanan et al. 2021, figure 4, top).

FOUR_LAYERS = DeepMLP(6, 3, 4, 5)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (
            "naive",
            """rank 0 | layers 0-1 | F0 B0
               rank 1 | layers 2-3 | F0 B0""",
        ),
        (
            "gpipe",
            """rank 0 | layers 0-1 | F0 F1 F2 F3 B0 B1 B2 B3
               rank 1 | layers 2-3 | F0 F1 F2 F3 B0 B1 B2 B3""",
        ),
        (
            "1f1b",
            """rank 0 | layers 0-1 | F0 F1 B0 F2 B1 F3 B2 B3
               rank 1 | layers 2-3 | F0 B0 F1 B1 F2 B2 F3 B3""",
        ),
    ],
)
def test_four_layers_on_two_stages_with_four_microbatches(schedule: str, expected: str) -> None:
    plans = schedules("pipeline", FOUR_LAYERS, 2, microbatches=4, schedule=schedule)
    assert outline(plans) == text(expected)


def test_1f1b_on_four_stages_is_the_papers_figure() -> None:
    plans = schedules("pipeline", FOUR_LAYERS, 4, microbatches=8, schedule="1f1b")
    assert outline(plans) == text(
        """rank 0 | layer 0 | F0 F1 F2 F3 B0 F4 B1 F5 B2 F6 B3 F7 B4 B5 B6 B7
           rank 1 | layer 1 | F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 F6 B4 F7 B5 B6 B7
           rank 2 | layer 2 | F0 F1 B0 F2 B1 F3 B2 F4 B3 F5 B4 F6 B5 F7 B6 B7
           rank 3 | layer 3 | F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5 F6 B6 F7 B7"""
    )


def test_1f1b_with_fewer_microbatches_than_stages() -> None:
    plans = schedules("pipeline", FOUR_LAYERS, 4, microbatches=2, schedule="1f1b")
    assert outline(plans) == text(
        """rank 0 | layer 0 | F0 F1 B0 B1
           rank 1 | layer 1 | F0 F1 B0 B1
           rank 2 | layer 2 | F0 F1 B0 B1
           rank 3 | layer 3 | F0 B0 F1 B1"""
    )


def test_every_operation_of_1f1b_with_two_microbatches() -> None:
    """Receives are posted two ahead; a gradient leaves before the lowest layer's dW."""
    plans = schedules("pipeline", FOUR_LAYERS, 2, microbatches=2, schedule="1f1b")
    assert [line.split() for line in listing(plans)] == [
        line.split()
        for line in text(
            """
            operations of rank 0
              communication  recv gradient of layer 1, microbatch 0 from rank 1
              communication  recv gradient of layer 1, microbatch 1 from rank 1
              compute        layer 0, microbatch 0, forward
              compute        layer 1, microbatch 0, forward
              communication  send output of layer 1, microbatch 0 to rank 1
              compute        layer 0, microbatch 1, forward
              compute        layer 1, microbatch 1, forward
              communication  send output of layer 1, microbatch 1 to rank 1
              communication  wait for gradient of layer 1, microbatch 0
              communication  wait for output of layer 1, microbatch 0
              compute        layer 1, microbatch 0, dX
              compute        layer 1, microbatch 0, dW
              compute        layer 0, microbatch 0, dX
              compute        layer 0, microbatch 0, dW
              communication  wait for gradient of layer 1, microbatch 1
              communication  wait for output of layer 1, microbatch 1
              compute        layer 1, microbatch 1, dX
              compute        layer 1, microbatch 1, dW
              compute        layer 0, microbatch 1, dX
              compute        layer 0, microbatch 1, dW
              compute        update of layers 0-1
            operations of rank 1
              communication  recv output of layer 1, microbatch 0 from rank 0
              communication  recv output of layer 1, microbatch 1 from rank 0
              communication  wait for output of layer 1, microbatch 0
              compute        layer 2, microbatch 0, forward
              compute        layer 3, microbatch 0, forward
              compute        microbatch 0, loss
              compute        layer 3, microbatch 0, dX
              compute        layer 3, microbatch 0, dW
              compute        layer 2, microbatch 0, dX
              communication  send gradient of layer 1, microbatch 0 to rank 0
              compute        layer 2, microbatch 0, dW
              communication  wait for output of layer 1, microbatch 1
              compute        layer 2, microbatch 1, forward
              compute        layer 3, microbatch 1, forward
              compute        microbatch 1, loss
              compute        layer 3, microbatch 1, dX
              compute        layer 3, microbatch 1, dW
              compute        layer 2, microbatch 1, dX
              communication  send gradient of layer 1, microbatch 1 to rank 0
              compute        layer 2, microbatch 1, dW
              communication  wait for gradient of layer 1, microbatch 0
              communication  wait for gradient of layer 1, microbatch 1
              compute        update of layers 2-3
            """
        )
    ]


def test_a_pipelines_gradients_add_up_from_its_first_backward_on() -> None:
    for schedule in ("gpipe", "1f1b"):
        for plan in schedules("pipeline", FOUR_LAYERS, 2, microbatches=3, schedule=schedule):
            weights = [op for op in plan.operations if isinstance(op, BackwardWeight)]
            adds = [(op.microbatch, op.accumulate) for op in weights]
            assert adds == [(0, False)] * 2 + [(1, True)] * 2 + [(2, True)] * 2


def test_a_partition_names_the_layers_of_each_stage() -> None:
    plans = schedules("pipeline", FOUR_LAYERS, 3, partition=(1, 2, 1))
    assert [[layer.index for layer in plan.layers] for plan in plans] == [[0], [1, 2], [3]]
    plans = schedules("pipeline", DeepMLP(2, 2, 7, 2), 4)
    assert [[layer.index for layer in plan.layers] for plan in plans] == [[0, 1], [2, 3], [4, 5], [6]]


def test_a_pipelines_evaluation_is_forwards_and_a_score() -> None:
    strategy = make_strategy("pipeline", Options(microbatches=2))
    first, last = (strategy.evaluation(FOUR_LAYERS, 2, rank, 8, Task()) for rank in (0, 1))
    assert lines(first) == text(
        """layer 0, microbatch 0, forward
           layer 1, microbatch 0, forward
           send output of layer 1, microbatch 0 to rank 1
           layer 0, microbatch 1, forward
           layer 1, microbatch 1, forward
           send output of layer 1, microbatch 1 to rank 1
           wait for output of layer 1, microbatch 0
           wait for output of layer 1, microbatch 1"""
    )
    assert lines(last) == text(
        """recv output of layer 1, microbatch 0 from rank 0
           recv output of layer 1, microbatch 1 from rank 0
           wait for output of layer 1, microbatch 0
           layer 2, microbatch 0, forward
           layer 3, microbatch 0, forward
           microbatch 0, score
           wait for output of layer 1, microbatch 1
           layer 2, microbatch 1, forward
           layer 3, microbatch 1, forward
           microbatch 1, score"""
    )


@pytest.mark.parametrize(
    ("ranks", "microbatches", "schedule", "expected"),
    [(4, 8, "1f1b", 3 / 11), (4, 8, "gpipe", 3 / 11), (4, 8, "naive", 3 / 4), (1, 8, "1f1b", 0.0)],
)
def test_bubble(ranks: int, microbatches: int, schedule: str, expected: float) -> None:
    strategy = make_strategy("pipeline", Options(microbatches=microbatches, schedule=schedule))
    assert strategy.bubble_expected(ranks, 64) == pytest.approx(expected)


def test_fewer_rows_than_microbatches_make_fewer_microbatches() -> None:
    strategy = make_strategy("pipeline", Options(microbatches=4))
    assert strategy.bubble_expected(2, 3) == pytest.approx(1 / 4)
    assert strategy.schedule(FOUR_LAYERS, 2, 0, 3, Task()).rows == (1, 1, 1)
    assert strategy.schedule(FOUR_LAYERS, 2, 0, 10, Task()).rows == (3, 3, 2, 2)


# Data parallel. Each of these layers has 4 x 4 weights and 4 biases: 80 bytes in float32.

THREE_LAYERS = DeepMLP(4, 4, 3, 4)
LAYER_BYTES = 80


def test_buckets_fill_from_the_last_layer_down() -> None:
    layers = whole_layers(THREE_LAYERS.layers)
    for bytes_wanted, expected in (
        (1, [[2], [1], [0]]),
        (LAYER_BYTES, [[2], [1], [0]]),
        (LAYER_BYTES + 1, [[1, 2], [0]]),
        (2 * LAYER_BYTES, [[1, 2], [0]]),
        (1000, [[0, 1, 2]]),
    ):
        buckets = fill_buckets(layers, bytes_wanted / MIB, "float32")
        assert [[layer.index for layer in bucket.layers] for bucket in buckets] == expected
        assert [bucket.numel * 4 for bucket in buckets] == [LAYER_BYTES * len(part) for part in expected]
        for bucket, part in zip(buckets, expected, strict=True):
            wanted = [Value("weight gradient", layer, place) for layer in part for place in (0, 1)]
            assert list(bucket.gradients) == wanted


def test_a_bucket_leaves_right_after_the_dw_that_fills_it() -> None:
    (first, second) = schedules("ddp", THREE_LAYERS, 2, bucket_mb=2 * LAYER_BYTES / MIB)
    assert first is second
    assert lines(first) == text(
        """layer 0, microbatch 0, forward
           layer 1, microbatch 0, forward
           layer 2, microbatch 0, forward
           microbatch 0, loss
           layer 2, microbatch 0, dX
           layer 2, microbatch 0, dW
           layer 1, microbatch 0, dX
           layer 1, microbatch 0, dW
           all_reduce weight gradients of layers 1-2
           layer 0, microbatch 0, dX
           layer 0, microbatch 0, dW
           all_reduce weight gradients of layers 0-0
           wait for weight gradient 0 of layer 1
           update of layers 1-2
           wait for weight gradient 0 of layer 0
           update of layer 0"""
    )


def test_bucket_mb_0_reduces_every_gradient_by_itself() -> None:
    plan = schedules("ddp", DeepMLP(4, 4, 2, 4), 2, bucket_mb=0)[0]
    assert lines(plan)[3:] == text(
        """layer 1, microbatch 0, dX
           layer 1, microbatch 0, dW
           all_reduce weight gradient 1 of layer 1
           all_reduce weight gradient 0 of layer 1
           layer 0, microbatch 0, dX
           layer 0, microbatch 0, dW
           all_reduce weight gradient 1 of layer 0
           all_reduce weight gradient 0 of layer 0
           wait for weight gradient 1 of layer 1
           wait for weight gradient 0 of layer 1
           update of layer 1
           wait for weight gradient 1 of layer 0
           wait for weight gradient 0 of layer 0
           update of layer 0"""
    )
    shapes = [op.shape for op in plan.operations if isinstance(op, AllReduce)]
    assert shapes == [(4,), (16,), (4,), (16,)]


def test_without_overlap_all_reductions_stand_at_the_end() -> None:
    plan = schedules("ddp", THREE_LAYERS, 2, bucket_mb=2 * LAYER_BYTES / MIB, overlap=False)[0]
    assert lines(plan)[-7:] == text(
        """layer 0, microbatch 0, dW
           all_reduce weight gradients of layers 1-2
           all_reduce weight gradients of layers 0-0
           wait for weight gradient 0 of layer 1
           update of layers 1-2
           wait for weight gradient 0 of layer 0
           update of layer 0"""
    )


def test_only_the_last_microbatchs_gradients_are_reduced() -> None:
    plan = schedules("ddp", DeepMLP(4, 4, 2, 4, bias=False), 2, microbatches=2, bucket_mb=0)[0]
    assert lines(plan) == text(
        """layer 0, microbatch 0, forward
           layer 1, microbatch 0, forward
           microbatch 0, loss
           layer 1, microbatch 0, dX
           layer 1, microbatch 0, dW
           layer 0, microbatch 0, dX
           layer 0, microbatch 0, dW
           layer 0, microbatch 1, forward
           layer 1, microbatch 1, forward
           microbatch 1, loss
           layer 1, microbatch 1, dX
           layer 1, microbatch 1, dW
           all_reduce weight gradient 0 of layer 1
           layer 0, microbatch 1, dX
           layer 0, microbatch 1, dW
           all_reduce weight gradient 0 of layer 0
           wait for weight gradient 0 of layer 1
           update of layer 1
           wait for weight gradient 0 of layer 0
           update of layer 0"""
    )


def test_clipping_takes_the_norm_of_reduced_gradients() -> None:
    plan = schedules("ddp", DeepMLP(4, 4, 2, 4, bias=False), 2, bucket_mb=0, task=Task("mse", clips=True))[0]
    assert lines(plan)[-4:] == text(
        """wait for weight gradient 0 of layer 1
           wait for weight gradient 0 of layer 0
           gradient norm
           update of layers 0-1"""
    )


def test_one_rank_has_nothing_to_say() -> None:
    for name in ("single", "ddp", "tensor", "pipeline"):
        (plan,) = schedules(name, THREE_LAYERS, 1)
        assert not [op for op in plan.operations if isinstance(op, Communication | Wait)]


# Tensor parallel

TENSOR_HEAD = """
    layer 0, microbatch 0, forward
    all_gather output of layer 0, microbatch 0
    wait for output of layer 0, microbatch 0
    layer 1, microbatch 0, forward
"""
TENSOR_TAIL = """
    layer 1, microbatch 0, dX
    reduce_scatter partial gradient of layer 0, microbatch 0
    layer 1, microbatch 0, dW
    wait for partial gradient of layer 0, microbatch 0
    layer 0, microbatch 0, dX
    layer 0, microbatch 0, dW
    update of layers 0-1
"""


def test_tensor_gathers_forward_and_reduces_under_dw() -> None:
    plan = schedules("tensor", DeepMLP(4, 4, 2, 6), 2)[0]
    assert lines(plan) == [*text(TENSOR_HEAD), "microbatch 0, loss", *text(TENSOR_TAIL)]
    cut = [op for op in plan.operations if isinstance(op, AllGather | ReduceScatter)]
    shapes = [(op.shape, op.sizes) for op in cut]
    assert shapes == [((6, 8), (3, 3))] * 2


def test_tensor_cross_entropy_reduces_a_maximum_and_sums() -> None:
    plan = schedules("tensor", DeepMLP(4, 5, 2, 6), 2, task=Task("cross_entropy", "bfloat16"))[0]
    loss = text(
        """microbatch 0, class maximum
           all_reduce class maximum of layer 1, microbatch 0
           wait for class maximum of layer 1, microbatch 0
           microbatch 0, class sums
           all_reduce class sums of layer 1, microbatch 0
           wait for class sums of layer 1, microbatch 0
           microbatch 0, loss"""
    )
    assert lines(plan) == [*text(TENSOR_HEAD), *loss, *text(TENSOR_TAIL)]
    reductions = [(op.reduction, op.shape, op.dtype) for op in plan.operations if isinstance(op, AllReduce)]
    assert reductions == [("max", (1, 8), "float32"), ("sum", (2, 8), "float32")]


def test_tensor_without_overlap_waits_before_dw() -> None:
    plan = schedules("tensor", DeepMLP(4, 4, 2, 6), 2, overlap=False, backward="all_reduce")[0]
    assert lines(plan)[5:9] == text(
        """layer 1, microbatch 0, dX
           all_reduce partial gradient of layer 0, microbatch 0
           wait for partial gradient of layer 0, microbatch 0
           layer 1, microbatch 0, dW"""
    )


def test_tensor_cuts_columns_that_do_not_divide() -> None:
    plans = schedules("tensor", DeepMLP(4, 2, 2, 10), 4)
    assert [plan.layers[0].columns for plan in plans] == [(0, 3), (3, 6), (6, 8), (8, 10)]
    assert [plan.layers[1].columns for plan in plans] == [(0, 1), (1, 2), (2, 2), (2, 2)]


def test_tensor_evaluation_gathers_the_outputs_too_and_one_rank_counts() -> None:
    strategy = make_strategy("tensor", Options())
    plans = [strategy.evaluation(DeepMLP(4, 4, 1), 2, rank, 8, Task()) for rank in (0, 1)]
    for plan in plans:
        assert lines(plan) == text(
            """layer 0, microbatch 0, forward
               all_gather output of layer 0, microbatch 0
               wait for output of layer 0, microbatch 0
               microbatch 0, score"""
        )
    assert [getattr(plan.operations[-1], "counts", None) for plan in plans] == [True, False]


# Memory

Range = tuple[int, int]


def test_memory_of_a_model_worked_out_by_hand() -> None:
    """Three layers of 4 x 4 without activation, 8 rows, float32: every value has 128 bytes.

    Operations 0 to 9 are F0 F1 F2, loss, dX2 dW2 dX1 dW1 dX0 dW0. Alive: input -1..9, outputs 0: 0..7,
    1: 1..5, 2: 2..3, gradients 2: 3..5, 1: 4..7, 0: 6..9. At most five at a time (operations 3, 4 and 5).
    """
    model = DeepMLP(4, 4, 3, 4, activation="identity", bias=False)
    arena = lay_out(schedules("single", model, 1)[0], model)
    assert arena.total_bytes == 5 * 128
    offsets = {value: slot.offset_bytes for value, slot in arena.slots.items()}
    assert offsets[Value("activation gradient", 1, 0)] == offsets[Value("gradient", 1, 0)]
    assert offsets[Value("gradient", 1, 0)] == offsets[Value("output", 2, 0)]
    assert offsets[Value("gradient", 0, 0)] in (
        offsets[Value("output", 1, 0)],
        offsets[Value("gradient", 2, 0)],
    )
    assert {slot.shape for slot in arena.slots.values()} == {(4, 8)}


def test_gelu_keeps_its_preactivation() -> None:
    """One hidden layer: F0 F1, loss, dX1 dW1 dX0 dW0; input, preactivation and gradients last to the end.

    At the loss alive: input, preactivation, both outputs, the last gradient. The hidden gradient takes the
    place of the last output. Rows of 12 bytes make values of 48 and 24 bytes, padded to 64.
    """
    model = DeepMLP(4, 2, 2, 4, activation="gelu")
    arena = lay_out(schedules("single", model, 1, rows=3)[0], model)
    assert arena.total_bytes == 5 * 64


def test_a_tensor_shard_lies_in_the_whole_that_is_gathered() -> None:
    model = DeepMLP(4, 6, 2, 10)
    for rank, start in enumerate((0, 4, 7)):
        arena = lay_out(schedules("tensor", model, 3)[rank], model)
        whole, shard = (arena.slots[Value(kind, 0, 0)] for kind in ("output", "output shard"))
        assert shard.offset_bytes - whole.offset_bytes == start * 8 * 4
        assert whole.shape == (10, 8) and shard.shape == ((4, 3, 3)[rank], 8)
        partial, own = (arena.slots[Value(kind, 0, 0)] for kind in ("partial gradient", "gradient shard"))
        assert own.offset_bytes - partial.offset_bytes == start * 8 * 4
        assert arena.slots[Value("received partials", 0, 0)].shape == (2, (4, 3, 3)[rank], 8)


def test_1f1b_holds_as_many_microbatches_as_stages_lie_above_and_gpipe_all() -> None:
    model = DeepMLP(8, 8, 4, 8)

    def arena_bytes(schedule: str, microbatches: int) -> int:
        plans = schedules(
            "pipeline", model, 4, rows=4 * microbatches, microbatches=microbatches, schedule=schedule
        )
        return lay_out(plans[1], model).total_bytes

    assert arena_bytes("1f1b", 8) == arena_bytes("1f1b", 32)
    assert arena_bytes("gpipe", 32) > 3 * arena_bytes("gpipe", 8)
    assert arena_bytes("1f1b", 32) < arena_bytes("gpipe", 32) / 4


def families(schedule: Schedule) -> dict[Value, Range]:
    """First and last operation that touches each piece of memory; -1 is before the first.

    Some values are meant to share: a shard lies in the whole, and dz takes the place of dy. A transfer
    touches what it reads and writes until it has been waited for.
    """
    alive: dict[Value, Range] = {}
    in_flight: dict[Value, Communication] = {}

    def touch(value: Value, position: int) -> None:
        if (family := family_of(value)) is not None:
            first, _ = alive.get(family, (position, position))
            alive[family] = (first, position)

    for value in schedule.given:
        touch(value, -1)
    for position, operation in enumerate(schedule.operations):
        for value in values_of(operation, in_flight):
            touch(value, position)
        if isinstance(operation, Communication):
            in_flight[operation.value] = operation
    return alive


def values_of(operation: Operation, in_flight: dict[Value, Communication]) -> Iterator[Value]:
    yield from operation.reads
    yield from operation.writes
    if isinstance(operation, Wait):
        transfer = in_flight[operation.value]
        yield from transfer.reads
        yield from transfer.writes


def family_of(value: Value) -> Value | None:
    """The memory that a value is part of, None for what does not lie in the arena."""
    kinds = {
        "output": "output",
        "output shard": "output",
        "preactivation": "preactivation",
        "gradient": "gradient",
        "gradient shard": "gradient",
        "activation gradient": "gradient",
        "partial gradient": "gradient",
        "received partials": "received partials",
    }
    return value._replace(kind=kinds[value.kind]) if value.kind in kinds else None


def test_values_alive_at_the_same_time_never_share_memory() -> None:
    rng = random.Random(5)
    compared = 0
    for _ in range(80):
        problem = random_problem(rng)
        for schedule in problem.schedules(rng.random() < 0.8):
            arena = lay_out(schedule, problem.model)
            alive = families(schedule)
            spans: dict[Value, Range] = {}
            for value, slot in arena.slots.items():
                size = ITEM_BYTES[problem.task.dtype]
                for length in slot.shape:
                    size *= length
                assert slot.offset_bytes % ITEM_BYTES[problem.task.dtype] == 0
                assert slot.offset_bytes >= 0
                assert slot.offset_bytes + size <= arena.total_bytes
                family = family_of(value)
                assert family is not None
                start, stop = spans.get(family, (slot.offset_bytes, slot.offset_bytes))
                spans[family] = (min(start, slot.offset_bytes), max(stop, slot.offset_bytes + size))
            assert spans.keys() == alive.keys()
            in_order = sorted(spans.items(), key=lambda item: item[1])
            for i, (one, (start, stop)) in enumerate(in_order):
                for other, (other_start, _) in in_order[i + 1 :]:
                    if other_start >= stop:
                        break
                    if start == stop:
                        continue
                    assert apart(alive[one], alive[other]), (one, other, schedule)
                    compared += 1
    assert compared > 500  # slots are really reused


def apart(one: Range, other: Range) -> bool:
    return one[1] < other[0] or other[1] < one[0]


def test_what_shares_memory_with_a_whole_is_the_whole_itself() -> None:
    """Of one family only a shard in its whole, or dz in dy's place, may overlap."""
    rng = random.Random(6)
    for _ in range(40):
        problem = random_problem(rng, "tensor", least_ranks=2)
        for rank, schedule in enumerate(problem.schedules()):
            slots = lay_out(schedule, problem.model).slots
            for value, slot in slots.items():
                if value.kind not in ("output shard", "gradient shard", "activation gradient"):
                    continue
                whole_kind = "output" if value.kind == "output shard" else "partial gradient"
                whole = slots.get(value._replace(kind=whole_kind))
                if whole is None:
                    continue
                width, ranks = whole.shape[0], problem.world_size
                before = sum(width // ranks + (r < width % ranks) for r in range(rank))
                row_bytes = whole.shape[1] * ITEM_BYTES[problem.task.dtype]
                assert slot.offset_bytes == whole.offset_bytes + before * row_bytes


# Scale: pure functions plan any rank without the others

LARGE = DeepMLP(1024, 1024, 8, 1024, bias=False)


def test_one_of_4096_data_parallel_ranks_is_planned_by_itself() -> None:
    start = time.process_time()
    strategy = make_strategy("ddp", Options())
    task = Task("mse")
    plan = strategy.schedule(LARGE, 4096, 0, 10_000, task)
    assert plan.rows == (3,)  # 10,000 = 4096 * 2 + 1808: the first 1,808 ranks have three rows
    assert strategy.schedule(LARGE, 4096, 1807, 10_000, task) is plan
    assert strategy.schedule(LARGE, 4096, 4095, 10_000, task).rows == (2,)
    # Seven layers of 4 MiB reach 25 MiB; the last bucket is one layer.
    reductions = [op for op in plan.operations if isinstance(op, AllReduce)]
    assert [op.numel for op in reductions] == [7 * MIB, MIB]
    assert all(op.group.size == 4096 for op in reductions)
    assert strategy.layout(LARGE, 4096, "float32").numel(4095) == 8 * MIB
    assert time.process_time() - start < 1


def test_one_of_64_tensor_ranks_is_planned_by_itself() -> None:
    start = time.process_time()
    strategy = make_strategy("tensor", Options())
    plan = strategy.schedule(LARGE, 64, 63, 256, Task("mse"))
    assert [layer.columns for layer in plan.layers] == [(1008, 1024)] * 8
    collectives = [op for op in plan.operations if isinstance(op, Collective)]
    assert [op.shape for op in collectives] == [(1024, 256)] * 14
    assert strategy.layout(LARGE, 64, "float32").numel(63) == 8 * MIB // 64
    assert time.process_time() - start < 1

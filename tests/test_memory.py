"""Memory: every rank holds its share and no more, and after the first steps no step allocates."""

from __future__ import annotations

import gc
from collections import Counter
from itertools import product
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from collectives.group import World
from strategies.compute import Update
from strategies.layout import GRADIENT, OPTIMIZER_STATE, PARAMETER
from strategies.memory import lay_out
from tests.ranks import RankPools
from tests.truth import Case, OptimizerConfig, Options, replace
from trainer.control import FIELDS, Control
from trainer.executor import Rank
from trainer.optimizer import optimizer_slots, step_counters

MOMENTUM = OptimizerConfig("sgd", lr=0.01, momentum=0.9)
ADAMW = OptimizerConfig("adamw", lr=0.01)
PLAIN = OptimizerConfig("sgd", lr=0.01)
SLOTS = {"sgd": 1, "adamw": 2}  # numbers kept for each parameter: momentum; first and second moment


def run_step(rank: Rank, case_data: list[tuple[torch.Tensor, torch.Tensor]], step: int) -> None:
    world, strategy = rank.world, rank.strategy
    inputs, targets = case_data[step]
    start, stop = strategy.rows_of(world.size, world.rank, len(inputs))
    wants_inputs, wants_targets = strategy.takes(world.size, world.rank)
    program = rank.program(len(inputs))
    program.load(inputs[start:stop] if wants_inputs else None, targets[start:stop] if wants_targets else None)
    rank.loss_total.zero_()
    program.run(step)


# What lives


def live_storages() -> list[int]:
    """Bytes of each block of memory that a tensor made since `gc.freeze` uses, largest first."""
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
    storages = [tensor.untyped_storage() for tensor in tensors if tensor.device.type == "cpu"]
    return sorted({block.data_ptr(): block.nbytes() for block in storages}.values(), reverse=True)


@torch.no_grad()
def memory(world: World, case: Case) -> dict[str, Any]:
    """Job: bytes by role as the rank, the layout and the garbage collector see them, after two steps."""
    data = case.data()
    gc.freeze()  # what lives now is not looked at again
    try:
        rank = case.rank(world)
        for step in range(2):
            run_step(rank, data, step)
        gc.collect()
        live = live_storages()
    finally:
        gc.unfreeze()
    schedule = rank.schedule(case.batches[0], training=True)
    updates = sum(isinstance(operation, Update) for operation in schedule.operations)
    slots, counters = optimizer_slots(case.optimizer), step_counters(case.optimizer) * updates
    layout = rank.layout
    return {
        "rank": rank.role_bytes(),
        "layout": {
            PARAMETER: layout.role_bytes(world.rank, PARAMETER),
            GRADIENT: layout.role_bytes(world.rank, GRADIENT),
            OPTIMIZER_STATE: layout.role_bytes(world.rank, OPTIMIZER_STATE, slots, counters),
        },
        "arena": rank.arena.nbytes,
        "planned arena": lay_out(schedule, rank.model).total_bytes,
        "live": live,
    }


# 32 -> 64 -> 64 -> 64 -> 16: 2,112 + 4,160 + 4,160 + 1,040 = 11,472 parameters.
FOUR_LAYERS = Case(inputs=32, outputs=16, hidden_dim=64, dtype="float32", batches=(16, 16))
# 6 -> 10 -> 10 -> 10 -> 3: 70 + 110 + 110 + 33; columns of 4 ranks are 3, 3, 2, 2 and 1, 1, 1, 0.
UNEVEN = replace(FOUR_LAYERS, inputs=6, outputs=3, hidden_dim=10)

HELD: dict[str, tuple[Case, list[int]]] = {
    "single": (FOUR_LAYERS, [11_472]),
    "ddp on 2": (replace(FOUR_LAYERS, strategy="ddp"), [11_472] * 2),
    "ddp on 4": (replace(FOUR_LAYERS, strategy="ddp"), [11_472] * 4),
    "tensor on 2": (replace(FOUR_LAYERS, strategy="tensor"), [5_736] * 2),
    "tensor on 4": (replace(FOUR_LAYERS, strategy="tensor"), [2_868] * 4),
    "tensor on 4, uneven": (replace(UNEVEN, strategy="tensor"), [98, 98, 69, 58]),
    "pipeline on 2": (replace(FOUR_LAYERS, strategy="pipeline"), [6_272, 5_200]),
    "pipeline on 3": (replace(FOUR_LAYERS, strategy="pipeline"), [6_272, 4_160, 1_040]),
    "pipeline on 4": (replace(FOUR_LAYERS, strategy="pipeline"), [2_112, 4_160, 4_160, 1_040]),
    "pipeline, 1 and 3": (
        replace(FOUR_LAYERS, strategy="pipeline", options=Options(partition=(1, 3))),
        [2_112, 9_360],
    ),
}


@pytest.mark.parametrize("name", HELD)
def test_each_rank_holds_its_share_of_every_role(ranks: RankPools, name: str) -> None:
    case, numbers = HELD[name]
    for optimizer, dtype in product((MOMENTUM, ADAMW, PLAIN), ("float32", "float64")):
        item = {"float32": 4, "float64": 8}[dtype]
        one = replace(case, optimizer=optimizer, dtype=dtype)
        slots = 0 if optimizer is PLAIN else SLOTS[optimizer.name]
        for number, found in zip(numbers, ranks[len(numbers)].run(memory, one), strict=True):
            expected = {
                PARAMETER: number * item,
                GRADIENT: number * item,
                OPTIMIZER_STATE: number * item * slots + (4 if optimizer is ADAMW else 0),
            }
            assert found["rank"] == expected, f"{name}, {optimizer.name}, {dtype}"
            assert found["layout"] == expected, f"{name}, {optimizer.name}, {dtype}"


@pytest.mark.parametrize(
    ("bucket_mb", "clip_norm", "optimizers"),
    # A reduction per gradient updates its layer alone; a clipped step updates all at once. Buckets of at
    # least 16 KiB hold, from the top, 1,040 + 4,160 numbers, then 4,160, then 2,112.
    [(0.0, None, 4), (0.0, 0.1, 1), (16 / 1024, None, 3), (25.0, None, 1)],
)
def test_a_step_counter_for_each_optimizer(
    ranks: RankPools, bucket_mb: float, clip_norm: float | None, optimizers: int
) -> None:
    case = replace(FOUR_LAYERS, strategy="ddp", options=Options(bucket_mb=bucket_mb))
    for found in ranks[2].run(memory, replace(case, optimizer=ADAMW, clip_norm=clip_norm)):
        assert found["rank"][OPTIMIZER_STATE] == 2 * 11_472 * 4 + 4 * optimizers
        assert found["layout"] == found["rank"]


# 32 -> 64 -> 16, 16 rows: 2,112 + 1,040 parameters. Numbers in the arena, by what lives together:
# input, hidden output, its gradient, output and its gradient.
TWO_LAYERS = replace(FOUR_LAYERS, num_layers=2)
INPUT, HIDDEN, OUTPUT = 32 * 16, 64 * 16, 16 * 16
WHOLE_ARENA = INPUT + 2 * HIDDEN + 2 * OUTPUT
ARENAS: dict[str, tuple[Case, list[tuple[int, int]]]] = {
    # (parameters, numbers in the arena) of each rank
    "single": (TWO_LAYERS, [(3_152, WHOLE_ARENA)]),
    "ddp": (replace(TWO_LAYERS, strategy="ddp"), [(3_152, WHOLE_ARENA // 2)] * 2),
    # Input and hidden output whole, the partial sums of its gradient whole, half of them received; half of
    # the output and of its gradient.
    "tensor": (
        replace(TWO_LAYERS, strategy="tensor"),
        [(1_576, INPUT + 2 * HIDDEN + HIDDEN // 2 + OUTPUT)] * 2,
    ),
    "pipeline": (
        replace(TWO_LAYERS, strategy="pipeline"),
        [(2_112, INPUT + 2 * HIDDEN), (1_040, 2 * HIDDEN + 2 * OUTPUT)],
    ),
}
SMALL_BYTES = 2048  # larger than any buffer of the loss below, smaller than any role's
# Of the loss: three numbers for an output and row, twelve for a row, a few more.
ALLOWED_BYTES = 16 * (3 * 16 * 4 + 12 * 8) + 32 * 8


@pytest.mark.parametrize("loss", ["cross_entropy", "mse"])
@pytest.mark.parametrize("name", ARENAS)
def test_nothing_else_lives(ranks: RankPools, name: str, loss: str) -> None:
    """All tensors that the garbage collector finds are the roles', the arena, and small change."""
    case, expected = ARENAS[name]
    for optimizer, clip_norm in product((MOMENTUM, ADAMW), (None, 0.1)):
        one = replace(case, loss=loss, optimizer=optimizer, clip_norm=clip_norm)
        for (number, arena), found in zip(expected, ranks[len(expected)].run(memory, one), strict=True):
            assert found["arena"] == found["planned arena"] == arena * 4
            large = [size for size in found["live"] if size >= SMALL_BYTES]
            roles = [number * 4] * (2 + SLOTS[optimizer.name])
            assert large == sorted([*roles, arena * 4], reverse=True), f"{name}, {optimizer.name}"
            rest = [size for size in found["live"] if size < SMALL_BYTES]
            assert sum(rest) <= ALLOWED_BYTES, f"{name}, {optimizer.name}: {rest}"


def arena_bytes(schedule: str, stage: int, microbatches: int) -> int:
    """Arena of one of four stages, microbatches of two rows."""
    options = Options(schedule=schedule, microbatches=microbatches)
    case = Case(strategy="pipeline", options=options, hidden_dim=64, batches=(2 * microbatches,))
    model = case.model()
    return lay_out(
        case.make_strategy().schedule(model, 4, stage, 2 * microbatches, case.task), model
    ).total_bytes


def test_1f1b_holds_fewer_activations_than_gpipe() -> None:
    """GPipe holds every microbatch's, 1F1B those in flight, however many there are."""
    for stage in range(4):
        assert arena_bytes("1f1b", stage, 8) < arena_bytes("gpipe", stage, 8)
    for stage in (1, 2, 3):  # the first is given the inputs of the whole batch
        assert arena_bytes("1f1b", stage, 16) == arena_bytes("1f1b", stage, 8)
        assert arena_bytes("gpipe", stage, 16) > 1.8 * arena_bytes("gpipe", stage, 8)


# What a step allocates

SCALAR_BYTES = 8  # torch makes a tensor of one number from a Python number, and for AdamW's own count


@torch.no_grad()
def allocations(world: World, case: Case) -> tuple[int, Counter[tuple[str, int]]]:
    """Job: (operators seen, allocations by operator and bytes) over steps 3 to 5 and their exchange.

    The profiler sees this thread; gloo's own threads move bytes between buffers that exist.
    """
    data = case.data()
    rank, control = case.rank(world), Control(world)

    def step(number: int) -> None:
        run_step(rank, data, number)
        control.exchange(number, [float(rank.loss_total)] * len(FIELDS))

    for number in range(3):
        step(number)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        for number in range(3, 6):
            step(number)
        control.complete()  # what is in flight when the profiler stops corrupts its records
    events = trace.events()
    assert events is not None
    sizes = Counter((e.name, e.self_cpu_memory_usage) for e in events if e.self_cpu_memory_usage > 0)
    operators = sum(event.name.startswith("aten::") for event in events)
    del trace, events
    gc.collect()  # the profiler's results lie in cycles
    return operators, sizes


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "strategy",
    ["single", "ddp", "tensor", pytest.param("tensor all_reduce", marks=pytest.mark.slow), "pipeline"],
)
def test_no_step_allocates(ranks: RankPools, strategy: str) -> None:
    name, *all_reduce = strategy.split()
    for optimizer, clip_norm, loss, microbatches in product(
        (MOMENTUM, ADAMW), (None, 0.1), ("cross_entropy", "mse"), (1, 3)
    ):
        case = Case(
            strategy=name,
            options=Options(microbatches=microbatches, backward="".join(all_reduce) or "reduce_scatter"),
            hidden_dim=64,
            dtype="float32",
            optimizer=optimizer,
            clip_norm=clip_norm,
            loss=loss,
            batches=(24,) * 6,
        )
        for operators, sizes in ranks[1 if name == "single" else 2].run(allocations, case):
            assert operators > 50
            large = {key: count for key, count in sizes.items() if key[1] > SCALAR_BYTES}
            assert not large, f"{case}: {large}"


def test_the_profiler_would_see_an_allocation(ranks: RankPools) -> None:
    """Autograd allocates in every step: an output of the hidden layers has 64 * 24 numbers of 8 bytes."""
    ((_, sizes),) = ranks[1].run(allocations, Case(modules=True, hidden_dim=64, batches=(24,) * 6))
    assert any(size == 64 * 24 * 8 for _, size in sizes)

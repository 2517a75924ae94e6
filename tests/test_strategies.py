"""What each strategy refuses, how it lays out parameters, and its closed-form bytes."""

from __future__ import annotations

import math
import random
from functools import partial

import pytest
from torch import nn

from collectives.traffic import Algorithms
from models.autograd import AutogradModel
from models.block import Model
from models.mlp import DeepMLP
from strategies.layout import GRADIENT, OPTIMIZER_STATE, PARAMETER, Layout
from strategies.registry import make_strategy
from strategies.single import Single
from strategies.strategy import Options, Strategy, Task
from strategies.values import Group
from tests.problems import random_problem

MLP = DeepMLP(6, 3, 4, 5)
MODULES = AutogradModel([partial(nn.Linear, 4, 4)] * 3, (4,))


REFUSED: dict[str, tuple[str, Options, Model, int, str]] = {
    "single on several ranks": (
        "single",
        Options(),
        MLP,
        3,
        "strategy=single with world_size=3 would train 3 unrelated models; "
        "use world_size=1, or strategy=ddp, tensor or pipeline",
    ),
    "more microbatches than rows": (
        "ddp",
        Options(microbatches=9),
        MLP,
        2,
        "strategy.microbatches=9 is more than data.batch_size=8; a microbatch needs at least one row",
    ),
    "more stages than layers": (
        "pipeline",
        Options(),
        MLP,
        5,
        "world_size=5 makes more stages than the 4 layers of the model; "
        "use at most 4 ranks or raise model.num_layers",
    ),
    "a partition with too few stages": (
        "pipeline",
        Options(partition=(4,)),
        MLP,
        2,
        "strategy.partition=[4] must give each of the 2 stages at least one layer "
        "and add up to the 4 layers of the model",
    ),
    "a partition with a layer too many": (
        "pipeline",
        Options(partition=(2, 3)),
        MLP,
        2,
        "strategy.partition=[2, 3] must give each of the 2 stages at least one layer "
        "and add up to the 4 layers of the model",
    ),
    "a partition with an empty stage": (
        "pipeline",
        Options(partition=(4, 0)),
        MLP,
        2,
        "strategy.partition=[4, 0] must give each of the 2 stages at least one layer "
        "and add up to the 4 layers of the model",
    ),
    "an unknown schedule": (
        "pipeline",
        Options(schedule="zigzag"),
        MLP,
        2,
        "strategy.schedule=zigzag is unknown; valid are naive, gpipe, 1f1b",
    ),
    "an unknown backward": (
        "tensor",
        Options(backward="broadcast"),
        MLP,
        2,
        "strategy.backward=broadcast is unknown; valid are reduce_scatter, all_reduce",
    ),
    "a module without a column rule": (
        "tensor",
        Options(),
        MODULES,
        2,
        "strategy=tensor cannot split layer 0 (Linear): it has no rule for a shard of its columns; "
        "use strategy=ddp or pipeline, or model=mlp",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_strategy_cannot_do_is_refused(name: str) -> None:
    strategy, options, model, ranks, sentence = REFUSED[name]
    with pytest.raises(ValueError) as refusal:
        make_strategy(strategy, options).check(model, ranks, batch_size=8)
    assert str(refusal.value) == sentence


def test_an_unknown_strategy_is_refused_with_the_valid_ones() -> None:
    with pytest.raises(ValueError) as refusal:
        make_strategy("zero", Options(), {"mine": Single})
    assert str(refusal.value).startswith(
        "strategy=zero is unknown; valid are single, ddp, tensor, pipeline, mine"
    )


def test_a_plug_in_joins_the_built_in_ones() -> None:
    class Mine(Single):
        name = "mine"

    assert isinstance(make_strategy("mine", Options(), {"mine": Mine}), Mine)
    assert isinstance(make_strategy("single", Options(), {"mine": Mine}), Single)


@pytest.mark.parametrize(("name", "ranks"), [("single", 1), ("ddp", 3), ("tensor", 5), ("pipeline", 4)])
def test_what_a_strategy_can_do_is_not_refused(name: str, ranks: int) -> None:
    strategy = make_strategy(name, Options(microbatches=8))
    strategy.check(MLP, ranks, batch_size=8)
    assert strategy.name == name


# Who holds what


def layout(name: str, model: Model, ranks: int, **options: object) -> Layout:
    return make_strategy(name, Options(**options)).layout(model, ranks, "float32")  # type: ignore[arg-type]


def test_a_layout_names_every_part_and_its_place() -> None:
    """6 x 5, 5 x 5, 5 x 5, 5 x 3 with biases, on two ranks of columns."""
    held = layout("tensor", MLP, 2).held(1)
    assert [(part.name, part.shape, part.columns, part.start, part.replicas) for part in held] == [
        ("layers.0.weight", (2, 6), (3, 5), 0, 1),
        ("layers.0.bias", (2,), (3, 5), 12, 1),
        ("layers.1.weight", (2, 5), (3, 5), 14, 1),
        ("layers.1.bias", (2,), (3, 5), 24, 1),
        ("layers.2.weight", (2, 5), (3, 5), 26, 1),
        ("layers.2.bias", (2,), (3, 5), 36, 1),
        ("layers.3.weight", (1, 5), (2, 3), 38, 1),
        ("layers.3.bias", (1,), (2, 3), 43, 1),
    ]
    assert layout("tensor", MLP, 2).numel(1) == 44


def test_replicas_are_data_parallels_alone() -> None:
    assert {part.replicas for part in layout("ddp", MLP, 3).held(2)} == {3}
    assert {part.replicas for part in layout("pipeline", MLP, 3).held(2)} == {1}
    assert make_strategy("ddp", Options()).replica_group(3) == Group("world", (0, 1, 2))
    assert make_strategy("ddp", Options()).replica_group(1) is None
    assert make_strategy("tensor", Options()).replica_group(3) is None


def test_every_parameter_is_held_whole_by_all_ranks_together() -> None:
    rng = random.Random(9)
    for _ in range(100):
        problem = random_problem(rng)
        cut = problem.strategy.layout(problem.model, problem.world_size, problem.task.dtype)
        total = sum(math.prod(p.shape) for layer in problem.model.layers for p in layer.parameters)
        copies = problem.world_size if problem.strategy.name == "ddp" else 1
        assert sum(cut.numel(rank) for rank in range(problem.world_size)) == copies * total


def test_bytes_of_each_role() -> None:
    """30 + 5 + 25 + 5 parameters on the first stage; AdamW keeps two values of each and a step counter."""
    cut = layout("pipeline", MLP, 2)
    assert cut.role_bytes(0, PARAMETER) == cut.role_bytes(0, GRADIENT) == 65 * 4
    assert cut.role_bytes(0, OPTIMIZER_STATE, optimizer_slots=2, step_counters=1) == 2 * 65 * 4 + 4
    assert cut.role_bytes(1, OPTIMIZER_STATE, optimizer_slots=1) == 48 * 4


def test_each_rank_takes_its_rows_and_what_it_needs_of_them() -> None:
    ddp, pipeline = make_strategy("ddp", Options()), make_strategy("pipeline", Options())
    assert [ddp.rows_of(4, rank, 10) for rank in range(4)] == [(0, 3), (3, 6), (6, 8), (8, 10)]
    assert [ddp.rows_of(4, rank, 2) for rank in range(4)] == [(0, 1), (1, 2), (2, 2), (2, 2)]
    assert [pipeline.rows_of(3, rank, 10) for rank in range(3)] == [(0, 10)] * 3
    assert [pipeline.takes(3, rank) for rank in range(3)] == [(True, False), (False, False), (False, True)]
    assert pipeline.takes(1, 0) == ddp.takes(2, 1) == (True, True)


# Bytes: 8 layers of 1024 x 1024 without bias, 256 rows, float32

LARGE = DeepMLP(1024, 1024, 8, 1024, bias=False)


def sent(strategy: Strategy, task: Task, rank: int = 0, ranks: int = 4) -> int:
    return sum(strategy.bytes_predicted(LARGE, ranks, rank, 256, task).values())


@pytest.mark.parametrize("microbatches", [1, 3, 8])
@pytest.mark.parametrize("clips", [False, True])
def test_bytes_of_a_large_step(microbatches: int, clips: bool) -> None:
    task = Task("mse", "float32", clips)
    for bucket_mb in (0.0, 1.0, 25.0):
        ddp = make_strategy("ddp", Options(microbatches=microbatches, bucket_mb=bucket_mb))
        assert [sent(ddp, task, rank) for rank in range(4)] == [50_331_648] * 4
    for schedule in ("gpipe", "1f1b", "naive"):
        pipeline = make_strategy("pipeline", Options(microbatches=microbatches, schedule=schedule))
        expected = [1_048_576, 2_097_152, 2_097_152, 1_048_576]
        assert [sent(pipeline, task, rank) for rank in range(4)] == expected
    tensor = make_strategy("tensor", Options(microbatches=microbatches))
    assert [sent(tensor, task, rank) for rank in range(4)] == [11_010_048] * 4


def test_bytes_of_tensor_by_all_reduce() -> None:
    """Seven gathers of 3/4 MiB; seven reductions of 1 MiB send twice that."""
    tensor, task = make_strategy("tensor", Options(backward="all_reduce")), Task("mse")
    assert tensor.bytes_predicted(LARGE, 4, 0, 256, task) == {
        "all_gather output": 7 * 786_432,
        "all_reduce partial gradient": 7 * 2 * 786_432,
    }
    assert sent(tensor, task) == 16_515_072


def test_bytes_of_gloos_own_reduce_scatter_are_those_of_an_all_reduce() -> None:
    task = Task("mse", algorithms=Algorithms("ring", "ring", "reduce_all"))
    assert sent(make_strategy("tensor", Options()), task) == 16_515_072


def test_bytes_of_cross_entropy_on_column_shards() -> None:
    """A maximum and two sums of 256 rows: 1 KiB and 2 KiB, of which a rank of four sends 3/2."""
    table = make_strategy("tensor", Options()).bytes_predicted(LARGE, 4, 2, 256, Task("cross_entropy"))
    assert table["all_reduce class maximum"] == 1536
    assert table["all_reduce class sums"] == 3072
    table = make_strategy("tensor", Options()).bytes_predicted(
        LARGE, 4, 2, 256, Task("cross_entropy", "bfloat16")
    )
    assert table["all_gather output"] == 7 * 786_432 // 2
    assert table["all_reduce class sums"] == 3072  # in float32 all the same


def test_one_rank_sends_nothing() -> None:
    for name in ("single", "ddp", "tensor", "pipeline"):
        assert sent(make_strategy(name, Options()), Task("mse"), ranks=1) == 0


def test_bytes_of_sizes_that_do_not_divide() -> None:
    """10 columns of 2 rows on 4 ranks: 3, 3, 2, 2 columns, so 24, 24, 16 and 16 bytes of 80."""
    model, tensor = DeepMLP(4, 2, 2, 10), make_strategy("tensor", Options())
    for rank, own in enumerate((24, 24, 16, 16)):
        assert tensor.bytes_predicted(model, 4, rank, 2, Task("mse")) == {
            "all_gather output": 3 * own,
            "reduce_scatter partial gradient": 80 - own,
        }

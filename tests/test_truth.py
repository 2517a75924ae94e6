"""Every split trains what one process trains: losses, gradient norms and parameters equal the reference's."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from collectives.group import World
from tests.ranks import RankPools
from tests.truth import (
    Case,
    OptimizerConfig,
    Options,
    held_parts,
    initial_parameters,
    reference,
    replace,
    train,
    worst_difference,
)

TOLERANCE = {"float64": 1e-10, "float32": 1e-5}
STEPS = 20
CLIP = 0.1  # all problems that are clipped have larger gradients at every step, which `clips` asserts
FAULTS_SHOWN = 5

SGD = OptimizerConfig("sgd", lr=0.05, momentum=0.9)
ADAMW = OptimizerConfig("adamw", lr=0.01, weight_decay=0.1)

SPLITS = {
    "single": ("single", Options()),
    "ddp": ("ddp", Options()),
    "tensor": ("tensor", Options()),
    "tensor all_reduce": ("tensor", Options(backward="all_reduce")),
    "naive": ("pipeline", Options(schedule="naive")),
    "gpipe": ("pipeline", Options(schedule="gpipe")),
    "1f1b": ("pipeline", Options(schedule="1f1b")),
}
EVERY = tuple(SPLITS)
TENSOR = ("tensor", "tensor all_reduce")
PIPELINE = ("naive", "gpipe", "1f1b")


def under(split: str, case: Case) -> Case:
    """The case under a split; of its options, those that the split's name does not set stay."""
    strategy, options = SPLITS[split]
    merged = replace(case.options, schedule=options.schedule, backward=options.backward)
    return replace(case, strategy=strategy, options=merged)


def fault(ranks: RankPools, size: int, case: Case) -> str | None:
    """What is wrong with a case on `size` ranks, or None."""
    try:
        results = ranks[size].run(train, case)
    except AssertionError as error:
        return f"{size} ranks, {case}\n  raises {error}"
    difference = worst_difference(case, results)
    if not difference <= TOLERANCE[case.dtype]:
        return f"{size} ranks, {case}\n  differs by {difference:.2e}"
    if case.strategy == "ddp" and (rank := first_other_replica(results)) is not None:
        return f"{size} ranks, {case}\n  rank {rank} has other parameters than rank 0"
    return None


def first_other_replica(results: list[dict[str, Any]]) -> int | None:
    """The first rank whose parameters are not bitwise rank 0's."""
    own = [b"".join(values.tobytes() for _, _, values in result["parts"]) for result in results]
    return next((rank for rank, value in enumerate(own) if value != own[0]), None)


def assert_equal_to_truth(ranks: RankPools, cases: list[tuple[int, Case]]) -> None:
    faults: list[str] = []
    for size, case in cases:
        if (text := fault(ranks, size, case)) is not None:
            faults.append(text)
        if len(faults) == FAULTS_SHOWN or "raises" in (text or ""):  # after that the ranks must start again
            break
    assert not faults, "\n".join(faults)


def clips(case: Case) -> bool:
    return min(reference(case).norms) > case.clip_norm if case.clip_norm is not None else True


# The whole grid


def grid(split: str) -> list[Case]:
    """Microbatches, optimizers, clipping, losses and formats; 3 layers are enough where none is a stage."""
    base = Case(inputs=6, outputs=5, hidden_dim=8, num_layers=3 if split in TENSOR else 4)
    return [
        under(
            split,
            replace(
                base,
                options=Options(microbatches=microbatches),
                optimizer=optimizer,
                clip_norm=clip,
                loss=loss,
                dtype=dtype,
                batches=(12,) * STEPS,
            ),
        )
        for microbatches, optimizer, clip, loss, dtype in product(
            (1, 3, 4), (SGD, ADAMW), (None, CLIP), ("cross_entropy", "mse"), TOLERANCE
        )
    ]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("split", "size"),
    [(split, size) for split in SPLITS for size in (1, 2, 3, 4) if split != "single" or size == 1],
)
def test_every_strategy_equals_the_truth(ranks: RankPools, split: str, size: int) -> None:
    cases = grid(split)
    assert len(cases) == 48 and all(clips(case) for case in cases)
    if split == "naive":
        one = [case for case in cases if case.options.microbatches == 1]
        assert_naive_is_one_microbatch(cases, one * 3, size)
        cases = one
    assert_equal_to_truth(ranks, [(size, case) for case in cases])


def assert_naive_is_one_microbatch(cases: list[Case], same: list[Case], size: int) -> None:
    """Naive schedules do not depend on the number of microbatches: the same operations need one run."""
    for case, other in zip(cases, same, strict=True):
        for rank in range(size):
            first, second = (
                one.make_strategy().schedule(one.model(), size, rank, 12, one.task) for one in (case, other)
            )
            assert first == second


# What does not divide, and every option: each in both formats, on the splits and world sizes named

ODD: dict[str, tuple[Case, tuple[str, ...], tuple[int, ...]]] = {
    "hidden 10 on 4 ranks": (Case(hidden_dim=10, batches=(10,) * STEPS), EVERY, (1, 3, 4)),
    "7 layers on 4 stages": (
        Case(num_layers=7, hidden_dim=9, options=Options(microbatches=4)),
        PIPELINE,
        (2, 3, 4),
    ),
    "batch 10 on 4 ranks": (
        Case(hidden_dim=8, options=Options(microbatches=3), batches=(10,) * STEPS, clip_norm=CLIP),
        EVERY,
        (1, 4),
    ),
    "10 classes on 3 ranks": (Case(outputs=10, hidden_dim=8, num_layers=3), EVERY, (3,)),
    "2 classes on 4 ranks": (
        Case(outputs=2, hidden_dim=8, options=Options(microbatches=2), clip_norm=CLIP),
        EVERY,
        (4,),
    ),
    "2 values on 4 ranks": (Case(outputs=2, hidden_dim=8, loss="mse", clip_norm=CLIP), EVERY, (4,)),
    "1 value on 3 ranks": (Case(outputs=1, hidden_dim=8, loss="mse", num_layers=3), EVERY, (3,)),
    "last batch of 2, 3 microbatches": (
        Case(hidden_dim=8, options=Options(microbatches=3), batches=(12, 12, 2) * 7),
        EVERY,
        (1, 3, 4),
    ),
    "last batch of 1, 4 microbatches": (
        Case(hidden_dim=8, options=Options(microbatches=4), batches=(8, 8, 1) * 7, clip_norm=CLIP),
        EVERY,
        (1, 2, 4),
    ),
    "batch 128 as 4 of 32": (
        Case(hidden_dim=8, options=Options(microbatches=4), batches=(128,) * STEPS),
        EVERY,
        (1, 2, 4),
    ),
    "one layer": (
        Case(num_layers=1, options=Options(microbatches=3), clip_norm=CLIP),
        ("single", "ddp", *TENSOR),
        (1, 2, 4),
    ),
    "one layer, one stage": (Case(num_layers=1, options=Options(microbatches=3)), PIPELINE, (1,)),
    "one sample": (Case(hidden_dim=8, batches=(1,) * STEPS, clip_norm=1e-3), EVERY, (1, 2, 4)),
    "one layer, one sample": (
        Case(num_layers=1, batches=(1,) * STEPS),
        ("single", "ddp", *TENSOR),
        (1, 4),
    ),
    "hidden 1": (Case(hidden_dim=1, activation="tanh", options=Options(microbatches=2)), EVERY, (1, 2, 4)),
    "one input": (Case(inputs=1, hidden_dim=6, activation="tanh"), EVERY, (3,)),
    "widths": (
        Case(widths=(7, 3, 16, 5), options=Options(microbatches=3), clip_norm=CLIP),
        EVERY,
        (1, 2, 3, 4),
    ),
    # Rows of 4 or 8 KiB: the product with the transposed weight is taken in parts of 32 rows.
    "rows of whole pages": (
        Case(widths=(1024, 40), options=Options(microbatches=2), clip_norm=CLIP, activation="tanh"),
        EVERY,
        (1, 2, 3),
    ),
    "no bias": (Case(bias=False, hidden_dim=9, clip_norm=CLIP, optimizer=ADAMW), EVERY, (1, 2, 3)),
    "tanh": (Case(activation="tanh", hidden_dim=7, options=Options(microbatches=2)), EVERY, (1, 2, 3)),
    "gelu": (Case(activation="gelu", hidden_dim=7, options=Options(microbatches=2)), EVERY, (1, 2, 3)),
    "identity": (Case(activation="identity", hidden_dim=7, loss="mse"), EVERY, (1, 2, 3)),
    "no overlap": (
        Case(hidden_dim=9, options=Options(microbatches=3, overlap=False, bucket_mb=0.0)),
        ("ddp", *TENSOR, *PIPELINE),
        (2, 3),
    ),
    "no overlap, clipped": (
        Case(hidden_dim=9, options=Options(microbatches=3, overlap=False), clip_norm=CLIP, optimizer=ADAMW),
        ("ddp", *TENSOR, *PIPELINE),
        (2, 3),
    ),
    "a reduction for each gradient": (
        Case(hidden_dim=9, options=Options(microbatches=2, bucket_mb=0.0), optimizer=ADAMW),
        ("ddp",),
        (1, 2, 3, 4),
    ),
    "a reduction for each gradient, clipped": (
        Case(hidden_dim=9, options=Options(bucket_mb=0.0), clip_norm=CLIP),
        ("ddp",),
        (2, 3),
    ),
    # 1,500 bytes: less than a hidden layer of 16 in float64 (2,176), more than one in float32 (1,088).
    "tiny buckets": (
        Case(num_layers=6, options=Options(microbatches=3, bucket_mb=1500 / 2**20), optimizer=ADAMW),
        ("ddp",),
        (2, 3, 4),
    ),
    "tiny buckets, clipped": (
        Case(num_layers=6, options=Options(bucket_mb=1500 / 2**20), clip_norm=CLIP),
        ("ddp",),
        (2, 3),
    ),
    "tiny buckets, no overlap": (
        Case(num_layers=6, options=Options(bucket_mb=1500 / 2**20, overlap=False)),
        ("ddp",),
        (2, 3),
    ),
    "nesterov": (
        Case(hidden_dim=9, optimizer=OptimizerConfig("sgd", lr=0.02, momentum=0.9, nesterov=True)),
        EVERY,
        (1, 2),
    ),
    "plain sgd": (Case(hidden_dim=9, optimizer=OptimizerConfig("sgd", lr=0.1)), EVERY, (1, 2)),
    "weight decay": (
        Case(hidden_dim=9, optimizer=OptimizerConfig("sgd", lr=0.05, momentum=0.9, weight_decay=0.1)),
        EVERY,
        (1, 2),
    ),
    "clipping that does nothing": (Case(hidden_dim=9, clip_norm=1e3), EVERY, (1, 3)),
    "the backend's own collectives": (
        Case(hidden_dim=12, outputs=6, algorithm="native", options=Options(microbatches=2)),
        TENSOR,
        (2, 3),
    ),
    "partition (1, 3)": (
        Case(options=Options(partition=(1, 3), microbatches=3), clip_norm=CLIP),
        PIPELINE,
        (2,),
    ),
    "partition (3, 1)": (Case(options=Options(partition=(3, 1), microbatches=4)), PIPELINE, (2,)),
    "partition (1, 2, 1)": (Case(options=Options(partition=(1, 2, 1), microbatches=5)), PIPELINE, (3,)),
    "modules": (
        Case(modules=True, hidden_dim=8, options=Options(microbatches=3), clip_norm=CLIP / 10),
        ("single", "ddp", *PIPELINE),
        (1, 2, 3),
    ),
    "modules, regression": (
        Case(modules=True, hidden_dim=7, activation="gelu", loss="mse", optimizer=ADAMW),
        ("single", "ddp", *PIPELINE),
        (1, 2, 4),
    ),
    "modules, empty slices": (
        Case(modules=True, hidden_dim=7, options=Options(microbatches=4), batches=(8, 8, 1) * 7),
        ("single", "ddp", *PIPELINE),
        (1, 2, 4),
    ),
    "modules, buckets": (
        Case(modules=True, hidden_dim=7, bias=False, options=Options(microbatches=2, bucket_mb=0.0)),
        ("ddp",),
        (2, 3),
    ),
}


SLOW = (
    "widths",
    "batch 128 as 4 of 32",
    "last batch of 1, 4 microbatches",
    "rows of whole pages",
    "no overlap, clipped",
    "batch 10 on 4 ranks",
    "last batch of 2, 3 microbatches",
    "no overlap",
    "gelu",
    "tanh",
    "hidden 10 on 4 ranks",
)


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in ODD]
)
def test_odd_sizes_and_options_equal_the_truth(ranks: RankPools, name: str) -> None:
    case, splits, sizes = ODD[name]
    cases = [
        (size, under(split, replace(case, dtype=dtype)))
        for split, size, dtype in product(splits, sizes, TOLERANCE)
        if split != "single" or size == 1
    ]
    assert name == "clipping that does nothing" or all(clips(case) for _, case in cases)
    assert_equal_to_truth(ranks, cases)


def test_modules_keep_their_inputs_until_backward() -> None:
    """The smallest case: what autograd saved of a layer's input must still be there for its dW."""
    case = Case(modules=True, num_layers=3, hidden_dim=4, batches=(2,) * 2)
    assert worst_difference(case, [train(World(0, 1, "gloo", 1.0), case)]) <= TOLERANCE["float64"]


def test_a_rank_without_rows_can_hold_modules(ranks: RankPools) -> None:
    """One sample on two ranks: the second one's slice is empty."""
    case = under("ddp", Case(modules=True, num_layers=1, batches=(1,)))
    assert_equal_to_truth(ranks, [(2, case)])


# The start


def initial(world: World, case: Case) -> list[tuple[str, tuple[int, int] | None, np.ndarray]]:
    """Job: the parameters before the first step."""
    return held_parts(case.rank(world))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_split_starts_from_slices_of_the_same_model(ranks: RankPools, size: int, dtype: str) -> None:
    case = Case(widths=(10, 7, 1, 3), outputs=2, dtype=dtype, batches=(12,))
    whole = {name: value.numpy() for name, value in initial_parameters(case).items()}
    for split in ("ddp", "tensor", "1f1b"):
        seen = {name: np.zeros(value.shape[0], dtype=int) for name, value in whole.items()}
        for parts in ranks[size].run(initial, under(split, case)):
            for name, columns, values in parts:
                rows = slice(*columns) if columns is not None else slice(None)
                assert values.tobytes() == whole[name][rows].tobytes(), f"{split} on {size} ranks, {name}"
                seen[name][rows] += 1
        copies = size if split == "ddp" else 1
        assert all((count == copies).all() for count in seen.values()), f"{split} on {size} ranks: {seen}"


def test_the_full_model_is_made_from_seed_and_layer_alone() -> None:
    """Weights are numpy's Philox stream of key (seed, layer), scaled to variance 2 / inputs."""
    case = Case(inputs=5, widths=(4, 7), outputs=3, seed=11, activation="relu")
    gains = {0: 2.0, 1: 2.0, 2: 1.0}  # the last layer has no activation
    for layer, (outputs, inputs) in {0: (4, 5), 1: (7, 4), 2: (3, 7)}.items():
        generator = np.random.Generator(np.random.Philox(key=np.array([11, layer], dtype=np.uint64)))
        bound = np.sqrt(3 * gains[layer] / inputs)
        expected = generator.random((outputs, inputs)) * 2 * bound - bound
        weight = initial_parameters(case)[f"layers.{layer}.weight"].numpy()
        np.testing.assert_allclose(weight, expected, rtol=1e-14, atol=1e-15)
        assert not initial_parameters(case)[f"layers.{layer}.bias"].any()


# The loss


def test_the_first_loss_is_the_same_on_any_number_of_ranks(ranks: RankPools) -> None:
    """Against the mean cross-entropy worked out in numpy, for 10 rows that neither 3 nor 4 ranks divide."""
    case = Case(hidden_dim=10, outputs=7, options=Options(microbatches=3), batches=(10,), activation="tanh")
    inputs, targets = (tensor.numpy() for tensor in case.data()[0])
    parameters = {name: value.numpy() for name, value in initial_parameters(case).items()}
    values = inputs
    for layer in range(4):
        values = values @ parameters[f"layers.{layer}.weight"].T + parameters[f"layers.{layer}.bias"]
        values = np.tanh(values) if layer < 3 else values
    picked = values[np.arange(10), targets]
    expected = float((np.log(np.exp(values).sum(axis=1)) - picked).mean())
    for split in EVERY:
        for size in (1, 2, 3, 4) if split != "single" else (1,):
            results = ranks[size].run(train, under(split, case))
            loss = sum(result["shares"][0] for result in results)
            assert loss == pytest.approx(expected, rel=1e-12), f"{split} on {size} ranks"

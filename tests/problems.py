"""Random plans: a model, a split with any of its settings, and a batch."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from torch import nn

from models.autograd import AutogradModel
from models.block import Model
from models.mlp import ACTIVATIONS, DeepMLP
from strategies.registry import make_strategy
from strategies.schedule import Schedule
from strategies.strategy import Options, Strategy, Task

KINDS = ("ddp", "tensor", "gpipe", "1f1b", "naive")


@dataclass(frozen=True)
class Problem:
    """A model, a split and a batch, from which the schedules of all ranks follow."""

    model: Model
    strategy: Strategy
    world_size: int
    rows: int
    task: Task

    def schedules(self, training: bool = True) -> list[Schedule]:
        make = self.strategy.schedule if training else self.strategy.evaluation
        ranks = range(self.world_size)
        return [make(self.model, self.world_size, rank, self.rows, self.task) for rank in ranks]


def random_problem(rng: random.Random, kind: str | None = None, least_ranks: int = 1) -> Problem:
    """Any strategy and any of its settings; sizes need not divide, batches may leave ranks without rows."""
    kind = kind or rng.choice(("single", *KINDS))
    world_size = 1 if kind == "single" else rng.randint(least_ranks, 5)
    widths = [rng.randint(1, 9) for _ in range(rng.randint(max(0, world_size - 1), 6))]
    edges = [rng.randint(1, 9), *widths, rng.randint(1, 7)]
    model: Model
    if kind != "tensor" and rng.random() < 0.1:
        pairs = pairwise(edges)
        model = AutogradModel([partial(nn.Linear, *pair) for pair in pairs], (edges[0],))
    else:
        activation, bias = rng.choice(ACTIVATIONS), rng.random() < 0.5
        model = DeepMLP(edges[0], edges[-1], widths=widths, activation=activation, bias=bias)
    rows = rng.randint(1, 13)
    options = Options(
        microbatches=rng.randint(1, rows),
        schedule=kind if kind in ("gpipe", "1f1b", "naive") else "1f1b",
        overlap=rng.random() < 0.7,
        bucket_mb=rng.choice((0.0, 1e-4, 3e-4, 25.0)),
        backward=rng.choice(("reduce_scatter", "all_reduce")),
        partition=random_partition(rng, len(widths) + 1, world_size) if rng.random() < 0.3 else None,
    )
    name = kind if kind in ("single", "ddp", "tensor") else "pipeline"
    task = Task(
        loss=rng.choice(("cross_entropy", "mse")),
        dtype=rng.choice(("float32", "float64", "bfloat16")),
        clips=rng.random() < 0.5,
    )
    strategy = make_strategy(name, options)
    strategy.check(model, world_size, rows)
    return Problem(model, strategy, world_size, rows, task)


def random_partition(rng: random.Random, layers: int, stages: int) -> tuple[int, ...] | None:
    if layers < stages:
        return None
    cuts = [0, *sorted(rng.sample(range(1, layers), stages - 1)), layers]
    return tuple(b - a for a, b in pairwise(cuts))

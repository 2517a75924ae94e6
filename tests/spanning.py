"""Plants from next to nothing to a quarter of the step, across the 5 % below which nothing is named.

What is right is told by the run beside it, without the plant: see `tests.planted_matrix.Outcome`.
"""

from __future__ import annotations

import math
from pathlib import Path
from random import Random

from tests.planted import LINK_BYTES_PER_S, ONE_THREAD, Case, Plant, sleeping, strategy


def _between(random: Random, low: float, high: float) -> float:
    """Log-uniform: as many small ones as large."""
    return math.exp(random.uniform(math.log(low), math.log(high)))


def small_messages(random: Random, folder: Path) -> Plant:
    """An all_reduce for each of 64 small layers, each beside 0.5 to 10 ms of computing."""
    layer_s = _between(random, 0.25e-3, 5e-3)
    model = sleeping(20, 32, num_layers=64, parameters=1056, per_row_s=layer_s / 16)
    own = (*model, *strategy("ddp", bucket_mb=0))
    return Plant(own, 2, cured=(*model, *strategy("ddp")))


def _tensor(random: Random) -> tuple[str, ...]:
    """Four layers; each gather or reduction takes the link 1.7 ms, beside 4 to 150 ms of computing."""
    layer_s, rows = _between(random, 2e-3, 75e-3), 512
    model = sleeping(15, rows, num_layers=4, width=192, per_row_s=2 * layer_s / rows)
    return (*model, "data.dim=192", *strategy("tensor"), *ONE_THREAD)


def bad_algorithm(random: Random, folder: Path) -> Plant:
    own = _tensor(random)
    return Plant((*own, "collectives.algorithm=native"), 2, cured=own, two_hosts=True)


def wrong_link(random: Random, folder: Path) -> Plant:
    return Plant(_tensor(random), 2, two_hosts=True, assumes_loopback=True)


def no_overlap(random: Random, folder: Path) -> Plant:
    """Eight layers of 0.24 MB; reducing one takes x of its backward, and 7/8 / (1 + 1.5 / x) of the step."""
    parameters, x = 60_000, _between(random, 0.03, 0.4)
    row_s = 4 * parameters / LINK_BYTES_PER_S / x / 2 / 16
    model = sleeping(25, 32, num_layers=8, parameters=parameters, per_row_s=row_s, weight_ratio=1)
    own, rest = strategy("ddp", bucket_mb=0.2, overlap=False), strategy("ddp", bucket_mb=0.2)
    return Plant((*model, *own, *ONE_THREAD), 2, cured=(*model, *rest, *ONE_THREAD), two_hosts=True)


def idle_bubble(random: Random, folder: Path) -> Plant:
    """Twice as many microbatches give back 1 - (2m + p - 1) / (2m + 2p - 2): from 1.5 to 21 %."""
    p, m = random.choice((2, 3, 4)), random.choice((4, 8, 16, 32))
    model = sleeping(20, 128, num_layers=p, per_row_s=random.uniform(0.5e-3, 0.8e-3))
    own, rest = strategy("pipeline", microbatches=m), strategy("pipeline", microbatches=2 * m)
    return Plant((*model, *own), p, cured=(*model, *rest))


def small_microbatches(random: Random, folder: Path) -> Plant:
    """Starting costs as much as f rows: m microbatches take (m + 3) (f + 128 / m), from 0 to 25 % less."""
    row_s, f = 0.3e-3, random.uniform(0.2, 5.0)
    best = min((1, 2, 4, 8, 16, 32), key=lambda m: (m + 3) * (f + 128 / m))
    model = sleeping(20, 128, num_layers=4, fixed_s=f * row_s, per_row_s=row_s)
    own, rest = strategy("pipeline", microbatches=32), strategy("pipeline", microbatches=best)
    return Plant((*model, *own), 4, cured=(*model, *rest))


def uneven_shards(random: Random, folder: Path) -> Plant:
    """Two stages of n/2 + s and n/2 - s layers: s / (n/2 + s) of the step, 3 to 20 %."""
    n, s = random.choice((16, 32, 64)), random.choice((1, 2))
    sizes = [n // 2 + s, n // 2 - s]
    if random.random() < 0.5:
        sizes.reverse()
    model = sleeping(15, 128, num_layers=n, per_row_s=random.uniform(2.5e-3, 4e-3) / n)
    own = strategy("pipeline", microbatches=16, partition=sizes)
    return Plant((*model, *own), 2, cured=(*model, *strategy("pipeline", microbatches=16)))


def slow_rank(random: Random, folder: Path) -> Plant:
    """One rank computes up to 30 % longer, and the others wait for it."""
    ranks = random.choice((2, 3, 4))
    slow, factor = random.randrange(ranks), random.uniform(1.01, 1.3)
    sizes = {"num_layers": 6, "per_row_s": random.uniform(5e-3, 10e-3) / 16}
    planted = sleeping(25, 16 * ranks, **sizes, slow_rank=slow, slow_factor=factor)
    cured = sleeping(25, 16 * ranks, **sizes)
    split = strategy("ddp")
    return Plant((*planted, *split), ranks, cured=(*cured, *split), rank=slow)


SPANNING = tuple(
    Case(f"{draw.__name__}_spanning", draw.__name__, draw, spans=True)
    for draw in (
        small_messages, bad_algorithm, no_overlap, idle_bubble, small_microbatches, uneven_shards,
        slow_rank, wrong_link,
    )
)  # fmt: skip

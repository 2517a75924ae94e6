"""Runs with a cause planted in them, and healthy ones: what each is, drawn from a seeded range.

A planted cause takes about 10 % of the step or more by the arithmetic beside it, and in a healthy run no
change gives back more than about 3 %: both keep off the verdict's threshold of 5 %. The spanning cases in
`tests.spanning` go across it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np

LINK_BYTES_PER_S = 0.118e9  # 1 Gbit/s carries 1,448 bytes of payload in 1,538 on the wire
ONE_THREAD = ("trainer.num_threads=1",)  # two hosts on one machine would each take all of its cores
SLEEPS = ("plugins=[tests.sleeping]", "model.name=sleeping")


@dataclass(frozen=True)
class Plant:
    """One drawn configuration.

    Args:
        cured: overrides that take the plant out, where no override of the verdict's does, and in all
            spanning cases.
        rank: that the verdict must name.
        two_hosts: the ranks stand on both sides of the 1 Gbit/s link.
        assumes_loopback: the plan counts on a link curve of the same run without that link, which also is
            what takes the plant out.
    """

    overrides: tuple[str, ...]
    world_size: int = 1
    cured: tuple[str, ...] | None = None
    rank: int | None = None
    two_hosts: bool = False
    assumes_loopback: bool = False


@dataclass(frozen=True)
class Case:
    """`draw` may write data files into the folder that it is given. `wall` None: any.

    `spans`: magnitudes go from nothing to a lot, and what is right is told by a run without the plant.
    """

    name: str
    cause: str
    draw: Callable[[Random, Path], Plant]
    wall: str | None = None
    spans: bool = False

    @property
    def is_healthy(self) -> bool:
        return self.cause == "none" and self.wall is None


def sleeping(steps: int, rows: int, **options: object) -> tuple[str, ...]:
    """A model of sleeping layers on batches of `rows` rows of a few numbers."""
    text = ",".join(f"{key}:{_plain(value)}" for key, value in options.items())
    return (*SLEEPS, f"+model.options={{{text}}}", *_synthetic(4, rows), *_length(steps))


def mlp(steps: int, rows: int, layers: int, width: int, *, dim: int | None = None) -> tuple[str, ...]:
    """A real model; all layers are equal where `dim` is left out."""
    sizes = (f"model.num_layers={layers}", f"model.hidden_dim={width}")
    return (*sizes, *_synthetic(width if dim is None else dim, rows), *_length(steps))


def digits(steps: int, rows: int, layers: int, width: int) -> tuple[str, ...]:
    sizes = (f"model.num_layers={layers}", f"model.hidden_dim={width}")
    return (*sizes, "data=digits", f"data.batch_size={rows}", "data.drop_last=true", *_length(steps))


def strategy(name: str, **options: object) -> tuple[str, ...]:
    return (f"strategy={name}", *(f"strategy.{key}={_plain(value)}" for key, value in options.items()))


def _synthetic(dim: int, rows: int) -> tuple[str, ...]:
    sizes = (f"data.dim={dim}", f"data.batch_size={rows}", f"data.num_samples={4 * rows}")
    return ("data=synthetic", *sizes, "data.eval_samples=0", "optimizer=sgd", "optimizer.lr=1e-3")


def _length(steps: int) -> tuple[str, ...]:
    return (f"trainer.max_steps={steps}", "trainer.warmup_steps=3")


def _plain(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(list(value)).replace(" ", "") if isinstance(value, list | tuple) else str(value)


# Planted


def small_messages(random: Random, folder: Path) -> Plant:
    """Two all_reduce for each of 64 layers of 1,056 parameters: all latency."""
    rows = random.choice((64, 128, 256))
    model = digits if random.random() < 0.5 else mlp
    return Plant((*model(60, rows, random.randint(48, 80), 32), *strategy("ddp", bucket_mb=0)), 2)


def bad_algorithm(random: Random, folder: Path) -> Plant:
    """Gathers and reductions of 0.5 to 1 MB over the link: native sends twice as much."""
    rows, width = random.choice((512, 768, 1024)), random.choice((192, 256))
    own = (*mlp(30, rows, random.randint(3, 5), width), *strategy("tensor"), *ONE_THREAD)
    return Plant((*own, "collectives.algorithm=native"), 2, two_hosts=True)


def over_the_link(random: Random, per_compute: tuple[float, float], overlap: bool) -> Plant:
    """Eight layers of 1 MB; reducing one takes `per_compute` of its backward, which is two forwards."""
    layers, parameters = 8, 250_000
    backward_s = 4 * parameters / LINK_BYTES_PER_S / random.uniform(*per_compute)
    rows, row_s = 32, backward_s / 2 / 16
    model = sleeping(
        25,
        rows,
        num_layers=layers,
        parameters=parameters,
        per_row_s=row_s,
        weight_ratio=1,
    )
    own = (*model, *strategy("ddp", bucket_mb=0.5, overlap=overlap), *ONE_THREAD)
    return Plant(own, 2, two_hosts=True)


def no_overlap(random: Random, folder: Path) -> Plant:
    """Seven of eight reductions could hide: 7/8 / (1 + 1.5 / x) of the step, 10 % at x = 0.2."""
    return over_the_link(random, (0.25, 0.9), overlap=False)


def link(random: Random, folder: Path) -> Plant:
    """Overlapped, and yet so much longer than what could hide it that more is exposed than is computed."""
    return over_the_link(random, (4.5, 10.0), overlap=True)


def idle_bubble(random: Random, folder: Path) -> Plant:
    """Four stages of 20 ms and more each way, one microbatch: three quarters of the step are bubble."""
    rows = random.choice((32, 64))
    stage_s = random.uniform(0.02, 0.03)
    model = sleeping(25, rows, num_layers=4, per_row_s=stage_s / rows)
    return Plant((*model, *strategy("pipeline", microbatches=1)), 4)


def small_microbatches(random: Random, folder: Path) -> Plant:
    """128 microbatches of one row, each of which costs 20 times more to start than to compute."""
    fixed_s = random.uniform(0.8e-3, 1.5e-3)
    model = sleeping(20, 128, num_layers=4, fixed_s=fixed_s, per_row_s=fixed_s / 20)
    return Plant((*model, *strategy("pipeline", microbatches=128)), 4)


def uneven_shards(random: Random, folder: Path) -> Plant:
    """Seven of eight layers on one of two ranks."""
    rows = random.choice((1024, 1536))  # enough that a microbatch is no small one
    model = mlp(80, rows, 8, random.choice((256, 384, 512)))  # real computing scatters
    partition = random.choice(([7, 1], [1, 7]))
    return Plant((*model, *strategy("pipeline", microbatches=8, partition=partition)), 2)


def uneven_shards_sleeping(random: Random, folder: Path) -> Plant:
    """The largest of four stages has 1.5 times its share or more."""
    partition = random.choice(([5, 1, 1, 1], [1, 4, 2, 1], [2, 2, 3, 1], [1, 1, 3, 3]))
    model = sleeping(25, 128, num_layers=8, per_row_s=random.uniform(2e-4, 4e-4))
    return Plant((*model, *strategy("pipeline", microbatches=16, partition=partition)), 4)


def slow_rank(random: Random, folder: Path) -> Plant:
    """Its step takes 1.3 to 2 times as long, and the others wait for it."""
    ranks = random.choice((2, 3, 4))
    slow, factor = random.randrange(ranks), random.uniform(1.3, 2.0)
    if random.random() < 0.5:
        split, rows, layer_s = strategy("ddp"), 16 * ranks, random.uniform(5e-3, 10e-3)
        sizes: dict[str, object] = {"num_layers": 6, "per_row_s": layer_s / 16}
    else:
        split, rows = strategy("pipeline", microbatches=32), 128
        sizes = {"num_layers": 2 * ranks, "per_row_s": random.uniform(2e-4, 4e-4)}
    planted = sleeping(25, rows, **sizes, slow_rank=slow, slow_factor=factor)
    cured = sleeping(25, rows, **sizes)
    return Plant((*planted, *split), ranks, cured=(*cured, *split), rank=slow)


def slow_input(random: Random, folder: Path) -> Plant:
    """Rows of half a megabyte, read and converted from float64, for a layer that only writes zeros."""
    features, rows = random.choice((49152, 65536)), random.choice((16, 24, 32))
    inputs, targets = folder / "inputs.npy", folder / "targets.npy"
    generator = np.random.default_rng(random.randrange(2**32))
    np.save(inputs, generator.standard_normal((4 * rows, features)))
    np.save(targets, np.arange(4 * rows) % 10)
    files = ("data=arrays", f"data.inputs={inputs}", f"data.targets={targets}", f"data.batch_size={rows}")
    model = (*SLEEPS, "+model.options={num_layers:1}", "optimizer=sgd")
    return Plant((*model, *files, f"data.prefetch={random.choice((0, 2))}", *_length(60)))


def compute(random: Random, folder: Path) -> Plant:
    return Plant(mlp(25, random.choice((128, 256)), random.randint(3, 5), random.choice((768, 1024, 1536))))


def wrong_link(random: Random, folder: Path) -> Plant:
    """Gathers and reductions of 1 to 4 MB each, of which half takes the link 4 to 17 ms one way."""
    rows, width = random.choice((1024, 2048)), random.choice((256, 512))
    model = mlp(30, rows, random.randint(3, 5), width)
    own = (*model, *strategy("tensor"), *ONE_THREAD)
    return Plant(own, 2, two_hosts=True, assumes_loopback=True)


# Healthy


def fixed(world_size: int, *overrides: str) -> Callable[[Random, Path], Plant]:
    return lambda random, folder: Plant(overrides, world_size)


def balanced_pipeline(ranks: int, schedule: str = "1f1b") -> Callable[[Random, Path], Plant]:
    """Of m = 16 p microbatches the bubble takes (p - 1) / (17 p - 1), and twice as many give half of that."""

    def draw(random: Random, folder: Path) -> Plant:
        m = 16 * ranks
        model = sleeping(12, 2 * m, num_layers=ranks, per_row_s=random.uniform(1e-3, 2e-3))
        return Plant((*model, *strategy("pipeline", microbatches=m, schedule=schedule)), ranks)

    return draw


def sleeping_split(name: str, ranks: int, **options: object) -> Callable[[Random, Path], Plant]:
    """Much more computing than the few numbers that are sent."""

    def draw(random: Random, folder: Path) -> Plant:
        layer_s = random.uniform(6e-3, 12e-3)
        joint = name != "tensor" and random.random() < 0.5
        rows = 16 if name == "tensor" else 16 * ranks
        model = sleeping(25, rows, num_layers=6, per_row_s=layer_s / 16, joint=joint)
        return Plant((*model, *strategy(name, **options)), ranks)

    return draw


def alone(*widths: int, **options: object) -> Callable[[Random, Path], Plant]:
    """One rank, with nothing to change."""

    def draw(random: Random, folder: Path) -> Plant:
        model = mlp(30, random.choice((256, 512)), random.randint(2, 6), random.choice(widths))
        return Plant((*model, *strategy("single", **options)))

    return draw


def wide(name: str, **options: object) -> Callable[[Random, Path], Plant]:
    """Two busy ranks on wide layers and many rows: computing takes nearly all of the step."""

    def draw(random: Random, folder: Path) -> Plant:
        model = mlp(20, random.choice((512, 768)), 3, random.choice((640, 768, 1024)))
        return Plant((*model, *strategy(name, **options)), 2)

    return draw


def shared_pipeline(random: Random, folder: Path) -> Plant:
    """Two stages of real layers, 16 microbatches of 256 rows: fewer rows cost some cores a third more."""
    return Plant((*mlp(25, 4096, 4, random.choice((384, 512))), *strategy("pipeline", microbatches=16)), 2)


def unequal_but_best(random: Random, folder: Path) -> Plant:
    """Five layers on two stages have no better cut; of 16 microbatches the bubble takes 4 %."""
    model = sleeping(12, 64, num_layers=5, per_row_s=random.uniform(1e-3, 1.5e-3))
    return Plant((*model, *strategy("pipeline", microbatches=16)), 2)


PLANTED = (
    Case("small_messages", "small_messages", small_messages),
    Case("bad_algorithm", "bad_algorithm", bad_algorithm),
    Case("no_overlap", "no_overlap", no_overlap),
    Case("link", "none", link, "link"),
    Case("idle_bubble", "idle_bubble", idle_bubble),
    Case("small_microbatches", "small_microbatches", small_microbatches),
    Case("uneven_shards", "uneven_shards", uneven_shards),
    Case("uneven_shards_sleeping", "uneven_shards", uneven_shards_sleeping),
    Case("slow_rank", "slow_rank", slow_rank),
    Case("input", "none", slow_input, "input"),
    Case("compute", "none", compute, "compute"),
    Case("wrong_link", "wrong_link", wrong_link),
)
_HEALTHY: dict[str, Callable[[Random, Path], Plant]] = {
    "single_narrow": alone(32, 64, 128),
    "single_wide": alone(512, 768),
    "single_microbatches": sleeping_split("single", 1, microbatches=2),
    "single_sleeping": fixed(1, *sleeping(25, 16, num_layers=6, per_row_s=5e-4)),
    "single_digits": fixed(1, *digits(80, 128, 4, 128)),
    "ddp_sleeping_2": sleeping_split("ddp", 2),
    "ddp_sleeping_3": sleeping_split("ddp", 3),
    "ddp_sleeping_4": sleeping_split("ddp", 4),
    "ddp_sleeping_buckets": sleeping_split("ddp", 2, bucket_mb=0),
    "ddp_sleeping_no_overlap": sleeping_split("ddp", 3, overlap=False),
    "ddp_sleeping_microbatches": sleeping_split("ddp", 2, microbatches=2),
    "ddp_wide": wide("ddp"),
    "ddp_wide_small_buckets": wide("ddp", bucket_mb=1),
    "ddp_digits": fixed(2, *digits(80, 128, 4, 128), *strategy("ddp")),
    "tensor_sleeping_2": sleeping_split("tensor", 2),
    "tensor_sleeping_4": sleeping_split("tensor", 4),
    "tensor_wide": wide("tensor"),
    "pipeline_2": balanced_pipeline(2),
    "pipeline_2_gpipe": balanced_pipeline(2, "gpipe"),
    "pipeline_3": balanced_pipeline(3),
    "pipeline_4": balanced_pipeline(4),
    "pipeline_shared": shared_pipeline,
    "pipeline_five_layers": unequal_but_best,
}
HEALTHY = tuple(Case(name, "none", draw) for name, draw in _HEALTHY.items())

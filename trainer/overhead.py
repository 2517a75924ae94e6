"""What metering costs: the same training with it and without, in turn, in one set of processes.

Without means: no stamps, nothing read from the kernel, nothing gathered but what a step needs to go on, and a
row without what they show. Both write their rows to a file.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table

from collectives.group import World
from collectives.rivals import median_bounds
from trainer.config import RunConfig
from trainer.control import sum_over_ranks
from trainer.data import load_dataset
from trainer.errors import InputError
from trainer.files import MetricsFile, as_record
from trainer.loop import Loop
from trainer.plan import make_plan
from trainer.program import Program
from trainer.rank import tell
from trainer.recorder import Wire
from trainer.signals import leave
from trainer.two_hosts_cli import Parser
from trainer.worker import make_rank

SETTINGS = ("ddp,6,512,256", "ddp,4,128,128", "tensor,6,512,256", "pipeline,6,512,256")
WARM_UP = 20


class NotStopped:
    requested = 0


class Unmetered:
    """What the loop asks of a recorder, doing nothing."""

    totals: dict[str, int] = {}  # noqa: RUF012

    def begin(self, step: int) -> None: ...

    def record(self, *arguments: Any) -> None: ...

    def take_sent_bytes(self) -> int:
        return 0

    def is_due(self, step_time_s: float) -> bool:
        return False

    def receive(self) -> list[Any]:
        return []

    def send(self) -> None: ...

    def land(self) -> None: ...

    def wire(self) -> Wire:
        return math.nan, math.nan

    def skip_wire(self, before: Wire) -> None: ...


def bare_run(program: Program, step: int) -> None:
    """`Program.run` without stamps."""
    for context in program.contexts:
        context.step = step
    for call in program.calls:
        call()


def steps_of(world: World, config: RunConfig, metered: bool, path: Path) -> Iterator[int]:
    """A training that goes on for as long as it is asked for a step."""
    plan = make_plan(config, world.size)
    rank = make_rank(plan, world)
    rows = MetricsFile(path)
    loop = Loop(
        plan,
        world,
        rank,
        load_dataset(config.data, seed=config.seed, hidden_dim=config.model.hidden_dim),
        NotStopped(),
        lambda row: rows.write(as_record(row)),
    )
    if not metered:
        loop.recorder = Unmetered()  # type: ignore[assignment]
        for count in plan.batch_rows:
            program = rank.program(count)
            program.run = partial(bare_run, program)  # type: ignore[method-assign]
    with torch.no_grad():
        for step in loop.steps(loop.loader(), config.trainer.max_steps):
            if not metered:
                loop.rows.close()
            yield step


def compare(world: World, config: RunConfig, rounds: int, burst: int) -> tuple[list[float], list[float]]:
    """Seconds a step, with metering and without, of each round: this rank's.

    Two trainings of each kind, made in the order on, off, off, on: where memory lies makes a difference too.
    """
    with tempfile.TemporaryDirectory() as folder:
        kinds = (True, False, False, True)
        trainings = [
            steps_of(world, config, metered, Path(folder, f"{place}.jsonl"))
            for place, metered in enumerate(kinds)
        ]
        for own in trainings:
            for _ in range(WARM_UP):
                next(own)
        times: tuple[list[float], list[float]] = ([], [])
        for turn in range(rounds):
            taken = [0.0, 0.0]
            for place in range(4) if turn % 2 == 0 else reversed(range(4)):
                sum_over_ranks(world, [0.0])
                start = time.perf_counter()
                for _ in range(burst):
                    next(trainings[place])
                taken[not kinds[place]] += (time.perf_counter() - start) / burst / 2
            for own_times, seconds in zip(times, taken, strict=True):
                own_times.append(seconds)
        return times


def config_of(setting: str, ranks: int, steps: int) -> RunConfig:
    """
    Raises:
        InputError: a setting that is not strategy,layers,width,batch.
    """
    try:
        strategy, layers, width, batch = setting.split(",")
        sizes = [int(layers), int(width), int(batch)]
    except ValueError:
        raise InputError(
            f"--setting={setting} must be strategy,layers,width,batch, such as {SETTINGS[0]}"
        ) from None
    mapping = {
        "world_size": ranks,
        "strategy": {"name": strategy, "microbatches": 4 if strategy == "pipeline" else 1},
        "model": {"num_layers": sizes[0], "hidden_dim": sizes[1]},
        "data": {
            "name": "synthetic",
            "batch_size": sizes[2],
            "num_samples": 16 * sizes[2],
            "eval_samples": 0,
        },
        "optimizer": {"name": "sgd", "lr": 1e-3},
        "trainer": {"max_steps": steps, "warmup_steps": 0},
        "logger": {"name": "none"},
    }
    config = RunConfig.from_mapping(mapping, "/nonexistent")
    config.validate()
    return config


def _rank(rank: int, request: argparse.Namespace, store: str) -> None:
    torch.set_num_threads(1)
    world = World(rank, request.ranks, "gloo", 120.0, dist.FileStore(store, request.ranks))
    table = Table("setting", "off (ms)", "on (ms)", "on / off", "95 % bounds", title="metering, in turn")
    for setting in request.setting:
        # One more than is asked for, so that no training comes to its end.
        steps = WARM_UP + request.rounds * request.burst + 1
        on, off = compare(world, config_of(setting, request.ranks, steps), request.rounds, request.burst)
        ratios = [max(a) / max(b) for a, b in zip(_of_all(world, on), _of_all(world, off), strict=True)]
        low, middle, high = median_bounds(ratios)
        cells = [f"{statistics.median(own) * 1e3:.2f}" for own in (off, on)]
        table.add_row(setting, *cells, f"{middle:.3f}", f"{low:.3f} to {high:.3f}")
    if rank == 0:
        Console().print(table)
    world.close()
    leave(0)  # a thread that torch keeps can abort a process that ends by itself


def _of_all(world: World, times: list[float]) -> list[list[float]]:
    """[rounds][ranks]."""
    own = torch.zeros(len(times), world.size, dtype=torch.float64)
    own[:, world.rank] = torch.tensor(times)
    world.sum_on_control(own)
    found: list[list[float]] = own.tolist()
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit code."""
    parser = Parser(
        prog="overhead.py", description="Measure what metering costs, in turn with the same run without."
    )
    parser.add_argument("--setting", action="append", help="strategy,layers,width,batch; may be repeated")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--burst", type=int, default=20, help="steps in a turn")
    try:
        request = parser.parse_args(arguments)
        for name in ("ranks", "rounds", "burst"):
            if getattr(request, name) < 1:
                raise InputError(f"--{name}={getattr(request, name)} must be at least 1")
        request.setting = request.setting or list(SETTINGS)
        for setting in request.setting:
            make_plan(config_of(setting, request.ranks, 1), request.ranks)
    except InputError as error:
        tell(str(error))
        return 2
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (request, f"{folder}/store"), nprocs=request.ranks)
    return 0

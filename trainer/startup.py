"""What a job of a sweep costs to start, beside torch's own launcher whose ranks do nothing but import torch.

A job's start is the end of the job before it, so that what Hydra does between them counts; its first step is
the moment at which that step is complete on the slowest rank. Both are taken in turn, in a process that has
imported torch already, as a sweep has after its first job.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from trainer import cli
from trainer.elastic import launch_config
from trainer.errors import InputError
from trainer.rank import loopback, tell
from trainer.startup_rank import ENDED, import_torch
from trainer.sweep_files import read_sweep
from trainer.two_hosts_cli import Parser

SMALLEST = (
    "data=synthetic data.batch_size=8 data.num_samples=8 data.eval_samples=0 model.num_layers=2 "
    "model.hidden_dim=4 optimizer=sgd trainer.max_steps=1 trainer.warmup_steps=0"
).split()
# Not start-up, and left out: measuring the link, judging, the report, W&B's helper.
BARE = "logger=none trainer.report=false trainer.verdict_budget_s=0 collectives.link_budget_s=0".split()
FULL = ["logger.mode=offline"]
BAR = 1.3
TRAIN = Path(__file__).resolve().parent.parent / "scripts" / "train.py"


@dataclass(frozen=True)
class Cost:
    """Seconds from a job's start to its first step, and to its end."""

    start_s: float
    total_s: float


def job_cost(world_size: int, settings: Sequence[str]) -> Cost:
    """The second job of a sweep of two.

    Raises:
        RuntimeError: the sweep failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        strategy = "single" if world_size == 1 else "ddp"
        own = [f"strategy={strategy}", f"world_size={world_size}", *SMALLEST, *settings]
        before, sys.argv = sys.argv, ["train.py", "-m", "seed=0,1", f"hydra.sweep.dir={folder}/s", *own]
        told = Path(folder, "told")
        try:
            with _told_to(told), _started_by(TRAIN):
                code = cli.main("trainer.startup_rank:timed_run")
        finally:
            sys.argv = before
        if code != 0:
            raise RuntimeError(told.read_text())
        first, second = read_sweep(Path(folder, "s")).jobs
        assert first.ended_at is not None and second.ended_at is not None
        stepped = max(float(path.read_text()) for path in second.folder.glob(f"{ENDED}*"))
        return Cost(stepped - first.ended_at, second.ended_at - first.ended_at)


@contextmanager
def _started_by(script: Path) -> Iterator[None]:
    """The ranks import the file that was run: this one, as in a sweep of the user's."""
    main = sys.modules["__main__"]
    kept, main.__file__ = main.__file__, str(script)
    try:
        yield
    finally:
        main.__file__ = kept


@contextmanager
def _told_to(path: Path) -> Iterator[None]:
    """What this process and those that it starts print goes to a file."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = [os.dup(1), os.dup(2)]
    with path.open("w") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, descriptor in zip((1, 2), kept, strict=True):
            os.dup2(descriptor, number)
            os.close(descriptor)


def launcher_cost(world_size: int) -> Cost:
    """torch's elastic launcher with the settings of `trainer.elastic`, and ranks that import torch."""
    from torch.distributed.launcher.api import elastic_launch

    name = loopback()
    if name is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
    begun = time.time()
    ended = elastic_launch(launch_config(world_size), import_torch)()
    return Cost(max(ended.values()) - begun, time.time() - begun)


def measure(world_size: int, rounds: int, full: bool) -> dict[str, list[Cost]]:
    """`rounds` of each kind, in turn, the order turned round from one to the next; the first is left out."""
    kinds = {
        "torch's launcher, import torch": lambda: launcher_cost(world_size),
        "job, bare": lambda: job_cost(world_size, BARE),
    }
    if full:
        kinds["job, with link, verdict, report, W&B"] = lambda: job_cost(world_size, FULL)
    found: dict[str, list[Cost]] = {name: [] for name in kinds}
    for turn in range(rounds + 1):
        for name in list(kinds) if turn % 2 else reversed(kinds):
            cost = kinds[name]()
            if turn:
                found[name].append(cost)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit code: 1 where start-up costs more than the bar."""
    parser = Parser(
        prog="startup.py", description="Time the start-up of a sweep's jobs beside torch's launcher."
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="world sizes (default: 1 2)")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each kind (default: 5)")
    parser.add_argument("--full", action="store_true", help="also a job with all that a run does by default")
    parser.add_argument("--json", type=Path, help="a file for all measurements")
    try:
        options = parser.parse_args(arguments)
        for name, number in (("--rounds", options.rounds), ("--ranks", min(options.ranks))):
            if number < 1:
                raise InputError(f"{name}={number} must be at least 1")
    except InputError as error:
        tell(str(error))
        return 2
    import torch

    table = Table(
        "ranks", "what", "to first step (s)", "ratio", "in all (s)", title=f"torch {torch.__version__}"
    )
    record, within = [], True
    for world_size in options.ranks:
        found = measure(world_size, options.rounds, options.full)
        base = statistics.median(cost.start_s for cost in found["torch's launcher, import torch"])
        for name, costs in found.items():
            start = statistics.median(cost.start_s for cost in costs)
            total = statistics.median(cost.total_s for cost in costs)
            within = within and (name != "job, bare" or start <= BAR * base)
            table.add_row(str(world_size), name, f"{start:.2f}", f"{start / base:.2f}", f"{total:.2f}")
            for cost in costs:
                record.append({"ranks": world_size, "what": name, **vars(cost)})
    Console().print(table)
    if options.json is not None:
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0 if within else 1

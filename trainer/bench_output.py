"""Rank 0's side of a bench: the table, the files in the run's folder, and the W&B run."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import shlex
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from trainer.bench_config import BenchRun
from trainer.bench_plot import write_plot
from trainer.bench_report import BenchTable, make_report, write
from trainer.bench_rows import Row, flat
from trainer.comparison_report import processor
from trainer.config import Tier
from trainer.files import as_record, write_atomically
from trainer.refusals import hide
from trainer.sinks import open_folder, tell_wandb

ROWS_FILE = "bench.jsonl"
PLOT_FILE = "bandwidth.html"
MACHINE_FILE = "machine.json"

_log = logging.getLogger(__name__)


class BenchOutput:
    """Takes rows as they are measured; `close` completes the folder.

    Raises:
        InputError: the folder cannot be written.
    """

    def __init__(
        self, config: BenchRun, world_size: int, local_world_size: int, backend: str, device: str, cases: int
    ) -> None:
        self.load_average = os.getloadavg()[0]
        environment = {
            "processor": processor(),
            "threads_per_rank": torch.get_num_threads(),
            "world_size": world_size,
            "local_world_size": local_world_size,
            "backend": backend,
            "device": device,
        }
        self._folder = open_folder(config, config.logger, environment, ROWS_FILE)
        self._wandb = self._folder.wandb
        self._facts = {
            "command": self._folder.redactor.text(command_line(world_size, local_world_size)),
            "environment": self._folder.environment,
            "git_commit": self._folder.environment["git_commit"],
            "load_average": self.load_average,
            "backend": backend,
            "device": device,
            "world_size": world_size,
            "cluster": config.cluster.name,
            "bench": asdict(config.bench),
            "cases": cases,
        }
        self._rows: list[Row] = []
        self._written = 0
        self._table = BenchTable(Console())
        self._closing = threading.Lock()  # taken by the first to close, be it the worker or an emergency

    @property
    def path(self) -> Path:
        """The run's folder."""
        return self._folder.path

    def keep_machine(self, tiers: Sequence[Tier]) -> None:
        """This machine's memory ladder, as the files in conf/cluster have others'."""
        ladder = {"name": "local", "tiers": [asdict(tier) for tier in tiers]}
        write_atomically(self.path / MACHINE_FILE, json.dumps(ladder, indent=1) + "\n")

    def write(self, row: Row) -> None:
        """Prints and keeps a row."""
        if self._closing.locked():
            return
        self._rows.append(row)
        self._table.show(row)
        for line in flat(row):
            record = as_record({"step": self._written, **line})
            self._written += 1
            self._folder.rows.write(record)
            self._wandb = tell_wandb(self._wandb, "write", record)

    def close(self, failed: Sequence[str], status: str, exit_code: int) -> None:
        """Writes all files, prints the footer and ends the W&B run. Called again, it does nothing.

        `status` is finished, interrupted or failed; `failed` holds a sentence for each failure.
        """
        if not self._closing.acquire(blocking=False):
            return
        failed = [self._folder.redactor.text(sentence) for sentence in failed]
        report = make_report(self._facts, self._rows, failed, status)
        result: dict[str, Any] = {"status": status, "steps": self._written, "bench": report["totals"]}
        try:
            self._folder.rows.close()
            write(report, self._folder.path)
            self._table.close(report)
            if exit_code <= 128 and self._rows:
                result["media"] = {"table": "measurements", **self._plot(report)}
        finally:
            self._wandb = tell_wandb(self._wandb, "close", result, exit_code)
        self._table.console.print(
            f"run folder  {self._folder.path}", highlight=False, markup=False, soft_wrap=True
        )

    def _plot(self, report: Row) -> dict[str, str]:
        path = self._folder.path / PLOT_FILE
        try:
            write_plot(report, path)
        except ImportError:
            _log.warning("%s is left out: plotly is not installed (pip install 'splitmeter[report]')", path)
            return {}
        return {"html": str(path)}


def command_line(world_size: int, local_world_size: int) -> str:
    """What was typed, as far as a rank can know; values of secret-like keys left out."""
    # Our own launcher's ranks are children that it spawned; torchrun starts the script itself.
    by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ and multiprocessing.parent_process() is None
    start = ["python"]
    if by_torchrun:
        start = ["torchrun", "--nproc-per-node", str(local_world_size)]
        if world_size > local_world_size:
            start += ["--nnodes", str(world_size // local_world_size)]
    arguments = [hide(argument, sys.argv[1:]) for argument in sys.argv[1:]]
    return shlex.join([*start, sys.argv[0], *arguments])

"""One rank of a run, from plain configuration to exit code."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console

from collectives.group import World
from collectives.link import LinkCurve
from trainer.config import InputError, RunConfig
from trainer.console import ProgressLine, show_summary
from trainer.control import gather_json
from trainer.data import load_dataset
from trainer.device import rank_device
from trainer.executor import Rank
from trainer.link import check_link_file, keep, obtain_link
from trainer.loop import Loop
from trainer.meter import byte_table
from trainer.plan import Plan, make_plan
from trainer.signals import StopFlag
from trainer.sinks import Sinks, open_sinks

KEPT_ROWS = 10_000  # rows of the steady state that the closing lines take their medians from

_log = logging.getLogger(__name__)


def run(
    config: RunConfig,
    rank: int,
    world_size: int,
    local_rank: int,
    local_world_size: int,
    store: dist.Store | None,
    *,
    stop: StopFlag,
) -> int:
    """Train on this rank; 0, or 128 + signal after an early end.

    Raises:
        InputError: wrong input found before or while reading the data.
        TrainingStopped: training cannot go on; raised on all ranks with one sentence.
    """
    plan = make_plan(config, world_size)
    if rank == 0:
        plan.check_schedules()
        check_link_file(plan)
        if world_size == 1 and config.strategy.name != "single":
            _log.warning("strategy=%s on one rank: there is nothing to split", config.strategy.name)
    device = rank_device(plan.device_type, plan.backend, world_size, local_rank, local_world_size)
    torch.use_deterministic_algorithms(config.trainer.deterministic)
    dataset = load_dataset(config.data, seed=config.seed, hidden_dim=config.model.hidden_dim)
    world = World(rank, world_size, plan.backend, config.collectives.timeout_s, store, device)
    try:
        trainer = make_rank(plan, world)
        link = obtain_link(plan, world)
        output = Output(config, plan, local_world_size, stop, link) if rank == 0 else None
        loop = Loop(plan, world, trainer, dataset, stop, output.write if output else _ignore)
        return _train(loop, output)
    finally:
        world.close()


def make_rank(plan: Plan, world: World) -> Rank:
    """This rank's memory, blocks and optimizers, ready for the first step."""
    config = plan.config
    rank = Rank(
        plan.model,
        plan.strategy,
        world,
        plan.task,
        config.optimizer,
        config.seed,
        plan.batch_rows,
        plan.eval_rows,
        config.trainer.clip_grad_norm,
        profile=config.trainer.profile is not None,
    )
    for rows in plan.batch_rows:  # bound here, so that the first steps are as long as all others
        rank.program(rows)
    return rank


def _train(loop: Loop, output: Output | None) -> int:
    error: Exception | None = None
    try:
        loop.run()
    except Exception as reason:
        error = reason
        raise
    finally:
        tables = gather_json(loop.world, loop.rank.ledger.by_label()) if error is None else []
        if output is not None:
            output.close(loop, tables, error)
    return 128 + loop.stopped_by if loop.stopped_by else 0


class Output:
    """Rank 0's side of a run: sinks, progress line and closing lines."""

    def __init__(
        self, config: RunConfig, plan: Plan, local_world_size: int, stop: StopFlag, link: LinkCurve | None
    ) -> None:
        self.config, self.plan, self.stop = config, plan, stop
        environment = {
            "threads_per_rank": torch.get_num_threads(),
            "world_size": plan.world_size,
            "local_world_size": local_world_size,
            "backend": plan.backend,
            "device": plan.device_type,
            "algorithms": asdict(plan.task.algorithms),
        }
        self.sinks: Sinks = open_sinks(config, environment)
        self.link = [] if link is None else keep(link, config.run_dir)
        stop.on_emergency.append(self._emergency)
        self.console = Console()
        self.progress = ProgressLine(config, self.console)
        self.steady: deque[dict[str, Any]] = deque(maxlen=KEPT_ROWS)
        self.last: dict[str, Any] | None = None

    def write(self, row: dict[str, Any]) -> None:
        self.last = row
        if not row["is_warmup"]:
            self.steady.append(row)
        self.progress.show(row)
        self.sinks.write(row)

    def close(self, loop: Loop, tables: list[dict[str, Any]], error: Exception | None) -> None:
        self.progress.close()
        summary: dict[str, Any] = {"link": self.link} if self.link else {}
        table: list[dict[str, Any]] = []
        headline = 0
        if tables and loop.steps_of:
            totals = [sum(sent for _, sent in counted.values()) for counted in tables]
            headline = totals.index(max(totals))
            table = byte_table(self.plan, loop.steps_of, tables)
            summary["bytes_by_operation"] = table
            summary["headline_rank"] = headline
        if error is not None:
            summary["error"] = str(error)
        code = 2 if isinstance(error, InputError) else 1 if error is not None else 0
        if loop.stopped_by:
            code = 128 + loop.stopped_by
            summary["stopped_by_signal"] = loop.stopped_by
        self.sinks.close(summary, code)
        if error is None:
            show_summary(
                self.console,
                list(self.steady),
                self.last,
                table,
                headline,
                self.config.run_dir,
                self.link,
            )

    def _emergency(self) -> None:
        """The loop did not return in time after a signal: complete the folder without it."""
        self.sinks.close({"stopped_by_signal": self.stop.requested}, 128 + self.stop.requested)


def _ignore(row: dict[str, Any]) -> None:
    """Only rank 0 writes rows."""

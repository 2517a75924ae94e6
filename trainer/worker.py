"""One rank of a run, from plain configuration to exit code."""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from rich.console import Console

from collectives.group import World
from trainer.config import RunConfig
from trainer.console import ProgressLine, show_summary
from trainer.control import gather_json
from trainer.data import load_dataset
from trainer.device import rank_device
from trainer.errors import exit_code_of
from trainer.executor import Rank
from trainer.link import Links, check_link_file, keep, obtain_links
from trainer.loop import Loop
from trainer.meter import byte_table, wire_table
from trainer.nodes import NodeMap, find_peers, spread_over_nodes
from trainer.place import Place
from trainer.plan import Plan, make_plan
from trainer.rank import node_cores
from trainer.signals import StopFlag
from trainer.sinks import Sinks, open_sinks

if TYPE_CHECKING:
    from trainer.probe import Probes

VERDICT_KEYS = ("wall", "cause", "rank", "sentence", "predicted_step_time_s", "gain_share", "override")
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
    # Only where it changes something: the call imports torch's compiler, which takes seconds.
    if config.trainer.deterministic != torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(config.trainer.deterministic)
    dataset = load_dataset(config.data, seed=config.seed, hidden_dim=config.model.hidden_dim)
    world = World(rank, world_size, plan.backend, config.collectives.timeout_s, store, device)
    try:
        nodes = spread_over_nodes(world)
        trainer = make_rank(plan, world)
        find_peers(world)
        links = obtain_links(plan, world)
        output = Output(config, plan, local_world_size, stop, links, nodes) if rank == 0 else None
        on_row = output.write if output else _ignore

        def on_verdict(loop: Loop) -> None:
            ended = Ended(probes=_probes(loop))
            if output is not None:
                step = loop.last.step if loop.last else 0
                _log.info("verdict after step %d: %s", step, output.judge(loop, ended)["sentence"])

        loop = Loop(plan, world, trainer, dataset, stop, on_row, links.here or links.plan, on_verdict)
        if output is not None:
            stop.on_emergency.insert(0, loop.rows.close)  # rows that wait for their stamps
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
        ended = Ended()
        try:
            if error is None:
                ended = _gather(loop)
        except Exception as reason:
            error = reason
            raise
        finally:
            if output is not None:
                output.close(loop, ended, error)
    return 128 + loop.stopped_by if loop.stopped_by else 0


@dataclass(frozen=True)
class Ended:
    """What all ranks say at the end of a run; nothing where it broke off. By rank, but for the probes."""

    operations: Sequence[list[dict[str, Any]]] = ()
    wire: Sequence[dict[str, int]] = ()
    probes: Probes | None = None


def _gather(loop: Loop) -> Ended:
    world, rank = loop.world, loop.rank
    own = [rank.ledger.by_operation(), loop.recorder.totals]
    operations, wire = zip(*gather_json(world, own), strict=True)
    waits = not loop.stopped_by and loop.last is not None  # who asked to stop does not want to wait
    return Ended(operations, wire, _probes(loop) if waits else None)


def _probes(loop: Loop) -> Probes:
    from trainer.judging import run_probes  # here, not before the first step

    return run_probes(loop.plan, loop.world, loop.rank, loop.config.trainer.verdict_budget_s)


class Output:
    """Rank 0's side of a run: sinks, progress line and closing lines."""

    def __init__(
        self,
        config: RunConfig,
        plan: Plan,
        local_world_size: int,
        stop: StopFlag,
        links: Links,
        nodes: NodeMap,
    ) -> None:
        self.config, self.plan, self.stop, self.links, self.nodes = config, plan, stop, links, nodes
        usable = node_cores(Place.from_environment(os.environ))
        busy = local_world_size * torch.get_num_threads()
        self.cpu_is_shared = plan.device_type == "cpu" and busy >= usable
        environment = {
            "cores": usable,
            "threads_per_rank": torch.get_num_threads(),
            "world_size": plan.world_size,
            "local_world_size": local_world_size,
            "backend": plan.backend,
            "device": plan.device_type,
            "algorithms": asdict(plan.task.algorithms),
        }
        self.sinks: Sinks = open_sinks(config, environment)
        curve = links.here or links.plan
        self.link = [] if curve is None else keep(curve, config.run_dir)
        stop.on_emergency.append(self._emergency)
        self.console = Console()
        self.progress = ProgressLine(config, self.console)
        self.steady: deque[dict[str, Any]] = deque(maxlen=KEPT_ROWS)
        self.last: dict[str, Any] | None = None
        self.report: Path | None = None

    def write(self, row: dict[str, Any]) -> None:
        self.last = row
        if not row["is_warmup"]:
            self.steady.append(row)
        self.progress.show(row)
        self.sinks.write(row)

    def close(self, loop: Loop, ended: Ended, error: Exception | None) -> None:
        self.progress.close()
        summary: dict[str, Any] = {"nodes": self.nodes, **({"link": self.link} if self.link else {})}
        table: list[dict[str, Any]] = []
        headline = 0
        if ended.operations and loop.steps_of:
            totals = [sum(row["bytes_sent"] for row in rows) for rows in ended.operations]
            headline = totals.index(max(totals))
            table = byte_table(self.plan, loop.steps_of, ended.operations)
            summary["bytes_by_operation"] = table
            summary["operations"] = [
                {"rank": rank, **row} for rank, rows in enumerate(ended.operations) for row in rows
            ]
            summary["headline_rank"] = headline
            summary["wire"] = wire_table(ended.wire)
        if error is not None:
            summary["error"] = str(error)
        code = 0 if error is None else exit_code_of(error)
        if loop.stopped_by:
            code = 128 + loop.stopped_by
            summary["stopped_by_signal"] = loop.stopped_by
        verdict = self.judge(loop, ended)
        summary["verdict"] = {key: verdict[key] for key in VERDICT_KEYS if key in verdict}
        self.sinks.close(summary, code, self._report)
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
            self.console.print(f"verdict  {verdict['sentence']}", highlight=False, soft_wrap=True)
            if self.report is not None:
                self.console.print(f"report  {self.report}", highlight=False, soft_wrap=True)

    def judge(self, loop: Loop, ended: Ended) -> dict[str, Any]:
        """Write trace.json and verdict.json; what the latter holds, or a sentence why there is none.

        What goes wrong costs a warning.
        """
        if loop.last is None:
            return {"sentence": "there is none: no step has run"}
        folder = Path(self.config.run_dir)
        try:
            from trainer.judging import write_verdict  # here, not before the first step
            from trainer.probe import Probes
            from trainer.remedies import Remedies
            from trainer.trace import write_trace
            from trainer.verdict import Judge

            last = loop.history.last
            if last:
                clocks = loop.recorder.clocks
                drawn = loop.timeline(last[0].recorded.rows)
                write_trace(drawn, last, folder, clocks.error_s, self.plan.task.algorithms)
            timeline = loop.timeline(self.plan.batch_rows[0])
            remedies = Remedies(self.plan, self.links, self.cpu_is_shared, ended.probes or Probes())
            judge = Judge(self.plan, timeline, loop.history, remedies, loop.world.nodes)
            return write_verdict(judge.verdict(), folder)
        except Exception as error:
            _log.warning("there is no verdict (%s: %s)", type(error).__name__, error, exc_info=True)
            return {"sentence": "there is none; the log says why"}

    def _report(self) -> dict[str, str]:
        """Write report.html; what W&B is to show of it. What goes wrong costs a warning."""
        if not self.config.trainer.report:
            return {}
        try:
            from trainer.report_page import write_report  # here, not before the first step

            self.report = write_report(Path(self.config.run_dir))
            return {"html": str(self.report)}
        except ImportError:
            _log.warning(
                "report.html is left out: plotly is not installed (pip install 'splitmeter[report]')"
            )
        except Exception as error:
            _log.warning("there is no report (%s: %s)", type(error).__name__, error, exc_info=True)
        return {}

    def _emergency(self) -> None:
        """The loop did not return in time after a signal: complete the folder without it."""
        self.sinks.close(
            {"nodes": self.nodes, "stopped_by_signal": self.stop.requested}, 128 + self.stop.requested
        )


def _ignore(row: dict[str, Any]) -> None:
    """Only rank 0 writes rows."""

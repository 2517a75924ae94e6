"""The link that a run's step crosses: read from a file, or measured at the start.

Every rank measures together; rank 0 keeps the curve, as link_curve.json in the run's folder.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from collectives import link, link_measuring
from collectives.bench import gather
from collectives.group import World
from collectives.traffic import ITEMSIZE, Algorithms, algorithms_of
from strategies.communication import Communication, Recv
from strategies.schedule import Schedule
from trainer.config import InputError
from trainer.plan import Plan

FILE = "link_curve.json"
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "send")


def check_link_file(plan: Plan) -> None:
    """Refuse a curve that a run cannot read, before any rank starts.

    Raises:
        InputError: no link curve there, or one without an operation that the schedules have.
    """
    path = plan.config.collectives.link_curve
    if path is None or plan.world_size == 1:
        return
    curve = _load(path)
    for key, own in (("backend", plan.backend), ("device", plan.device_type)):
        if curve.measured.get(key) != own:
            raise InputError(
                f"collectives.link_curve={path} was measured with {key}={curve.measured.get(key)}, and this "
                f"run has {own}; measure it anew, or leave it null"
            )
    for schedule in plan.schedules(plan.batch_rows[0]):
        for operation in largest_messages(schedule):
            try:
                curve.curve(operation, plan.world_size)
            except ValueError as error:
                raise InputError(
                    f"collectives.link_curve={path}: {error}; measure one on this many ranks, or leave "
                    "it null"
                ) from None


@dataclass(frozen=True)
class Links:
    """Curves of a run; None where there is nothing to measure, or measuring is switched off.

    Args:
        plan: what the plan counts on: the file's, or else what was measured.
        here: measured at the start of this run.
        best: measured with the algorithms of `auto`, where the run has others.
    """

    plan: link.LinkCurve | None = None
    here: link.LinkCurve | None = None
    best: link.LinkCurve | None = None


def obtain_links(plan: Plan, world: World) -> Links:
    """Every rank must call it; all have the same answer."""
    config = plan.config.collectives
    if world.size == 1:
        return Links()
    given = None if config.link_curve is None else _load(config.link_curve)
    if config.link_budget_s == 0:
        return Links(given)
    largest = _largest_of_all(plan, world)
    agreed = {
        name: max(sizes)
        for name, sizes in zip(
            OPERATIONS, gather(world, [float(largest.get(name, 0)) for name in OPERATIONS]), strict=True
        )
    }
    operations = [name for name, size in agreed.items() if size]
    if not operations:
        return Links(given)
    sizes = link_measuring.curve_sizes(math.ceil(max(agreed.values())))
    auto = algorithms_of(plan.backend, "auto")
    budget_s = config.link_budget_s / (1 if plan.task.algorithms == auto else 2)

    def measured(algorithms: Algorithms, names: list[str]) -> link.LinkCurve:
        chosen = {name: getattr(algorithms, name) for name in names if name != "send"}
        return link_measuring.measure_link(world, names, sizes, chosen, budget_s)

    here = measured(plan.task.algorithms, operations)
    best = None
    if plan.task.algorithms != auto:
        best = measured(auto, [name for name in operations if name != "send"])
    return Links(given or here, here, best)


def _largest_of_all(plan: Plan, world: World) -> dict[str, int]:
    """This rank's largest messages in the plan, and in what the verdict may change it to."""
    rows = plan.batch_rows[0]
    plans = [(plan.strategy, plan.task), *((own.strategy, own.task) for own in plan.changes)]
    largest: dict[str, int] = {}
    for strategy, task in plans:
        schedule = strategy.schedule(plan.model, world.size, world.rank, rows, task)
        for verb, size in largest_messages(schedule).items():
            largest[verb] = max(size, largest.get(verb, 0))
    return largest


def largest_messages(schedule: Schedule) -> dict[str, int]:
    """Operation -> S in bytes of the largest that this rank has in a step."""
    largest: dict[str, int] = {}
    for operation in schedule.operations:
        if isinstance(operation, Communication) and not isinstance(operation, Recv):
            size = operation.numel * ITEMSIZE[operation.dtype]
            largest[operation.verb] = max(size, largest.get(operation.verb, 0))
    return largest


def keep(curve: link.LinkCurve, run_dir: str) -> list[dict[str, Any]]:
    """Write the curve to the run's folder; what summary.json says of it."""
    curve.save(Path(run_dir) / FILE)
    return [
        {
            "operation": own.operation,
            "group_size": own.group_size,
            "latency_s": own.latency_s,
            "bandwidth_GBps": own.bandwidth_GBps,
            "largest": asdict(own.points[-1]),
        }
        for own in curve.curves.values()
    ]


def _load(path: str) -> link.LinkCurve:
    try:
        return link.load(Path(path))
    except ValueError as error:
        raise InputError(f"collectives.link_curve={path}: {error}") from error

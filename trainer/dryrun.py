"""`trainer.dry_run`: what a run would do, without ranks: schedule, bytes, memory, bubble."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from strategies.compute import Update
from strategies.layout import GRADIENT, OPTIMIZER_STATE, PARAMETER
from strategies.memory import lay_out
from strategies.schedule import Schedule
from trainer.config import InputError, RunConfig
from trainer.console import bytes_text
from trainer.optimizer import optimizer_slots, step_counters
from trainer.plan import Plan, make_plan

LISTED_OPERATIONS = 400  # of each distinct schedule
LISTED_SCHEDULES = 4
LISTED_RANKS = 64

ENTRY_LETTERS = {"forward": "F", "backward": "B"}


def print_plan(config: RunConfig) -> None:
    """Print the plan of one step on a full batch.

    Raises:
        InputError: a plan that cannot run.
    """
    plan = make_plan(config, config.world_size or 1)
    if not plan.batch_rows:
        raise InputError("the data leave no training step; lower data.batch_size or set data.drop_last=false")
    rows = plan.batch_rows[0]
    plan.check_schedules()
    schedules = plan.schedules(rows)
    console = Console(soft_wrap=True, highlight=False)
    console.print(
        f"strategy {config.strategy.name} on {plan.world_size} ranks, {len(plan.model.layers)} layers, "
        f"batch of {rows} rows; the schedules of all ranks are checked"
    )
    bubble = plan.strategy.bubble_expected(plan.world_size, rows)
    if bubble is not None:
        console.print(f"bubble expected with equal stages: {bubble:.4f} of the step")
    table = _rank_table(plan, schedules, rows)
    # No number is cut, however narrow the terminal: its lines are wrapped instead.
    console.width = max(
        console.width, console.measure(table, options=console.options.update(width=1000)).maximum
    )
    console.print(table)
    if schedules[0].outline:
        console.print("order of microbatches")
        for line in outline(schedules):
            console.print("  " + line)
    for line in listing(schedules):
        console.print(line)


def outline(schedules: list[Schedule]) -> list[str]:
    """A line per rank: its layers, and its forwards and backwards in order, as in `F0 F1 B0 B1`."""
    lines = []
    for rank, schedule in enumerate(schedules):
        first, last = schedule.layers[0].index, schedule.layers[-1].index
        layers = f"layer {first}" if first == last else f"layers {first}-{last}"
        entries = " ".join(f"{ENTRY_LETTERS[kind]}{m}" for kind, m in schedule.outline)
        lines.append(f"rank {rank} | {layers} | {entries}")
    return lines


def listing(schedules: list[Schedule]) -> list[str]:
    """Every operation of every distinct schedule, by identity; long ones are cut and say so."""
    lines: list[str] = []
    seen: dict[int, int] = {}
    for rank, schedule in enumerate(schedules):
        if id(schedule) in seen:
            continue
        seen[id(schedule)] = rank
        if len(seen) > LISTED_SCHEDULES:
            lines.append(f"and the schedules of {len(schedules) - rank} more ranks")
            break
        same = sum(1 for other in schedules if other is schedule)
        lines.append(f"operations of rank {rank}" + (f" ({same} ranks do the same)" if same > 1 else ""))
        for operation in schedule.operations[:LISTED_OPERATIONS]:
            lines.append(f"  {operation.lane:<13}  {operation}")
        if len(schedule.operations) > LISTED_OPERATIONS:
            lines.append(f"  and {len(schedule.operations) - LISTED_OPERATIONS} more")
    return lines


def _rank_table(plan: Plan, schedules: list[Schedule], rows: int) -> Table:
    table = Table(title="bytes per rank, all predicted", title_justify="left")
    for name in ("rank", "sends in a step", "parameters", "gradients", "optimizer", "activations", "memory"):
        table.add_column(name, justify="right")
    for rank, schedule in enumerate(schedules[:LISTED_RANKS]):
        sent = plan.strategy.bytes_predicted(plan.model, plan.world_size, rank, rows, plan.task)
        memory = memory_bytes(plan, schedule, rank)
        by_operation = ", ".join(f"{name} {bytes_text(count)}" for name, count in sent.items())
        total = f"{sum(sent.values()):,}" + (f" ({by_operation})" if by_operation else "")
        table.add_row(
            str(rank), total, *(f"{size:,}" for size in memory.values()), f"{sum(memory.values()):,}"
        )
    if len(schedules) > LISTED_RANKS:
        table.caption = f"and {len(schedules) - LISTED_RANKS} more ranks"
    return table


def memory_bytes(plan: Plan, schedule: Schedule, rank: int) -> dict[str, int]:
    """Bytes that `rank` holds by role; activations are the arena, without what autograd keeps."""
    config = plan.config.optimizer
    layout = plan.strategy.layout(plan.model, plan.world_size, plan.task.dtype)
    updates = sum(1 for operation in schedule.operations if isinstance(operation, Update))
    slots, counters = optimizer_slots(config), step_counters(config) * updates
    return {
        PARAMETER: layout.role_bytes(rank, PARAMETER),
        GRADIENT: layout.role_bytes(rank, GRADIENT),
        OPTIMIZER_STATE: layout.role_bytes(rank, OPTIMIZER_STATE, slots, counters),
        "activation": lay_out(schedule, plan.model).total_bytes,
    }

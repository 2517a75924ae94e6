"""Changes to a plan that a user can make, each with the cause that it removes.

Pure: what a change would give is for the simulator to say.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from collectives.traffic import algorithms_of
from models.block import even_parts
from strategies.registry import BUILT_IN
from strategies.schedule import Schedule
from strategies.strategy import Options, Strategy, Task

if TYPE_CHECKING:
    from trainer.plan import Plan

CAUSES = (
    "small_messages",
    "bad_algorithm",
    "no_overlap",
    "idle_bubble",
    "uneven_shards",
    "slow_rank",
    "small_microbatches",
    "wrong_link",
)
LEAST_SHARE = 0.05  # of the step: what is worth a change
BUCKETS_MB = (1.0, 5.0, 25.0, 100.0)


@dataclass(frozen=True)
class Change:
    """One change of the configuration, and the plan that it makes."""

    cause: str
    override: str
    strategy: Strategy
    task: Task

    def schedules(self, plan: Plan, rows: int) -> list[Schedule]:
        make = self.strategy.schedule
        return [make(plan.model, plan.world_size, rank, rows, self.task) for rank in range(plan.world_size)]


def changes(plan: Plan) -> list[Change]:
    """What could be changed in a run of several ranks, or in its microbatches. All ranks have the same."""
    return [change for change in _changes(plan) if change is not None]


def possible(plan: Plan, cause: str, override: str, options: Options, task: Task) -> Change | None:
    """The change, or None where a run with it would not start.

    A plug-in's strategy refuses where it likes, in making it too or in a schedule: whatever it raises, it
    must not end a run that has not asked for the change. All ranks try the schedules of all, and so decide
    alike.
    """
    try:
        change = Change(cause, override, type(plan.strategy)(options), task)
        change.strategy.check(plan.model, plan.world_size, plan.config.data.batch_size)
        if type(plan.strategy) not in BUILT_IN.values():  # their check refuses all that they cannot schedule
            change.schedules(plan, plan.batch_rows[0])
    except Exception:
        return None
    return change


def _changes(plan: Plan) -> Iterator[Change | None]:
    options, task = plan.strategy.options, plan.task
    name = plan.strategy.name

    def change(cause: str, override: str, new: Options = options, with_task: Task = task) -> Change | None:
        return possible(plan, cause, override, new, with_task)

    many = plan.world_size > 1
    if many and name in ("ddp", "tensor") and not options.overlap:
        yield change("no_overlap", "strategy.overlap=true", replace(options, overlap=True))
    if many and name == "ddp":
        for size in BUCKETS_MB:
            text, new = f"strategy.bucket_mb={size:g}", replace(options, bucket_mb=size)
            if size > options.bucket_mb:
                yield change("small_messages", text, new)
            elif size < options.bucket_mb and options.overlap:
                # They are filled earlier, so that they can go while backward goes on.
                yield change("no_overlap", text, new)
            elif size < options.bucket_mb:
                # A bucket that holds the whole model is full when backward ends: overlap alone hides nothing.
                yield change("no_overlap", f"strategy.overlap=true {text}", replace(new, overlap=True))
    best = algorithms_of(plan.backend, "auto")
    if many and best != task.algorithms:
        yield change("bad_algorithm", "collectives.algorithm=auto", with_task=replace(task, algorithms=best))
    if many and name == "tensor" and options.backward == "all_reduce":
        # It gives every rank the whole gradient, of which one needs its own columns.
        text = "strategy.backward=reduce_scatter"
        yield change("bad_algorithm", text, replace(options, backward="reduce_scatter"))
    if many and name == "pipeline" and options.partition is not None:
        text = "strategy.partition=null"
        yield change("uneven_shards", text, replace(options, partition=None))
    yield from _microbatches(plan)


def microbatches_of(strategy: Strategy) -> int:
    """Number of microbatches that it makes of a batch with enough rows."""
    return 1 if _is_naive(strategy) else strategy.options.microbatches


def _is_naive(strategy: Strategy) -> bool:
    return strategy.name == "pipeline" and strategy.options.schedule == "naive"


def _microbatches(plan: Plan) -> Iterator[Change | None]:
    """More of them fill a pipeline's bubble, fewer are larger: by factors of two."""
    options, rows = plan.strategy.options, plan.batch_rows[0]
    is_pipeline = plan.strategy.name == "pipeline" and plan.world_size > 1
    now = microbatches_of(plan.strategy)
    most = plan.strategy.rows_of(plan.world_size, 0, rows)[1]
    counts = []
    if is_pipeline:
        larger, stages = now, plan.world_size
        # Once the bubble is too small to be worth a change, so is any larger number.
        while larger * 2 <= most and (stages - 1) / (larger + stages - 1) >= LEAST_SHARE:
            larger *= 2
            counts.append(larger)
    smaller = now // 2
    while smaller >= 1:
        counts.append(smaller)
        smaller //= 2
    for count in counts:
        cause = "idle_bubble" if count > now else "small_microbatches"
        new, text = replace(options, microbatches=count), f"strategy.microbatches={count}"
        if _is_naive(plan.strategy):
            new, text = replace(new, schedule="1f1b"), f"strategy.schedule=1f1b {text}"
        yield possible(plan, cause, text, new, plan.task)


def rebalanced(plan: Plan, layer_s: Sequence[float]) -> tuple[int, ...]:
    """Layers per stage so that the slowest stage is as fast as can be, given seconds of each layer.

    The least bound that a greedy filling meets is among the sums of neighbouring layers; each stage keeps
    at least one layer.
    """
    stages = plan.world_size
    sums = sorted({sum(layer_s[i:j]) for i in range(len(layer_s)) for j in range(i + 1, len(layer_s) + 1)})
    low, high = 0, len(sums) - 1
    while low < high:
        middle = (low + high) // 2
        if _fill(layer_s, stages, sums[middle]) is None:
            low = middle + 1
        else:
            high = middle
    found = _fill(layer_s, stages, sums[low])
    return found or tuple(stop - start for start, stop in even_parts(len(layer_s), stages))


def _fill(layer_s: Sequence[float], stages: int, bound: float) -> tuple[int, ...] | None:
    counts, filled = [0], 0.0
    left = len(layer_s)
    for seconds in layer_s:
        needs_rest = counts[-1] > 0 and left <= stages - len(counts)  # a layer for each stage to come
        if counts[-1] and (filled + seconds > bound * (1 + 1e-9) or needs_rest):
            counts.append(0)
            filled = 0.0
        counts[-1] += 1
        filled += seconds
        left -= 1
        if len(counts) > stages or filled > bound * (1 + 1e-9):
            return None
    return tuple(counts) if len(counts) == stages else None

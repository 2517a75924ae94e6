"""Data parallel by hand: every rank the whole model, its slice of the batch, and gradients all-reduced.

The loss is scaled by the global number of rows (see models/loss.py), so the reduced SUM is the
gradient of the mean over the batch: the division by world size is in that scale already.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from collectives.traffic import ITEMSIZE, bytes_sent
from models.block import Model, even_parts
from strategies.communication import AllReduce, Wait
from strategies.compute import Backward, BackwardWeight, GradientNorm, Update
from strategies.layout import Layout
from strategies.schedule import Schedule
from strategies.strategy import (
    Strategy,
    Task,
    cut_rows,
    make_schedule,
    refuse_batch_statistics,
    score,
    step,
    whole_layers,
    world,
)
from strategies.values import Group, Layer, Operation, Value

MIB = 2**20


@dataclass(frozen=True)
class Bucket:
    """Gradients that lie next to each other in the flat buffer and are reduced as one.

    `layers` are those whose gradients are all reduced once this bucket is: empty for a bucket that holds
    only a part of a layer.
    """

    gradients: tuple[Value, ...]
    layers: tuple[Layer, ...]
    numel: int

    def reduce(self, dtype: str, group: Group) -> AllReduce:
        first, *others = self.gradients
        return AllReduce(first, (self.numel,), dtype, group, with_values=tuple(others))


def fill_buckets(layers: Sequence[Layer], bucket_mb: float, dtype: str) -> tuple[Bucket, ...]:
    """Cut the gradients into buckets of at least `bucket_mb` MiB, from the last layer down, as backward goes.

    0 makes a bucket of every gradient. A layer is never cut in two otherwise.
    """
    if bucket_mb == 0:
        return tuple(
            Bucket((value,), (layer,) if place == 0 else (), math.prod(layer.spec.parameters[place].shape))
            for layer in reversed(layers)
            for place, value in reversed(list(enumerate(layer.weight_gradients())))
        )
    buckets: list[Bucket] = []
    pending: list[Layer] = []
    for layer in reversed(layers):
        pending.insert(0, layer)
        numel = sum(math.prod(p.shape) for held in pending for p in held.spec.parameters)
        if numel * ITEMSIZE[dtype] >= bucket_mb * MIB or layer is layers[0]:
            gradients = tuple(value for held in pending for value in held.weight_gradients())
            buckets.append(Bucket(gradients, tuple(pending), numel))
            pending = []
    return tuple(bucket for bucket in buckets if bucket.numel > 0)


def data_parallel(
    operations: Iterable[Operation],
    buckets: Sequence[Bucket],
    last_microbatch: int,
    group: Group,
    dtype: str,
    overlap: bool,
) -> Iterator[Operation]:
    """Add the reductions: each bucket launched once backward has filled it, waited for before its update.

    Without overlap all are launched and waited for at the end.
    """
    lowest = {bucket.gradients[0].layer: [] for bucket in buckets}  # type: dict[int, list[Bucket]]
    for bucket in buckets:
        lowest[bucket.gradients[0].layer].append(bucket)
    for operation in operations:
        if isinstance(operation, GradientNorm):
            yield from _reduce_all(buckets, overlap, dtype, group)
            yield operation
        elif isinstance(operation, Update) and operation.clips:
            yield operation
        elif isinstance(operation, Update):
            yield from _reduce_and_update(buckets, overlap, dtype, group)
        else:
            yield operation
            if overlap and isinstance(operation, BackwardWeight | Backward):
                filled = (
                    lowest.get(operation.layer.index, ()) if operation.microbatch == last_microbatch else ()
                )
                for bucket in filled:
                    yield bucket.reduce(dtype, group)


def _reduce_all(buckets: Sequence[Bucket], launched: bool, dtype: str, group: Group) -> Iterator[Operation]:
    if not launched:
        for bucket in buckets:
            yield bucket.reduce(dtype, group)
    for bucket in buckets:
        yield Wait(bucket.gradients[0])


def _reduce_and_update(
    buckets: Sequence[Bucket], launched: bool, dtype: str, group: Group
) -> Iterator[Operation]:
    """In the order of launch, so that all but the last update run while later buckets are in flight."""
    if not launched:
        for bucket in buckets:
            yield bucket.reduce(dtype, group)
    for bucket in buckets:
        yield Wait(bucket.gradients[0])
        if bucket.layers:
            yield Update(bucket.layers)


class DataParallel(Strategy):
    name = "ddp"

    def check(self, model: Model, world_size: int, batch_size: int) -> None:
        super().check(model, world_size, batch_size)
        if world_size > 1:
            refuse_batch_statistics(model, f"strategy=ddp with world_size={world_size}")

    def layout(self, model: Model, world_size: int, dtype: str) -> Layout:
        whole = range(len(model.layers))
        return Layout(model, dtype, world_size, lambda rank: whole, lambda layer, rank: None, world_size)

    def rows_of(self, world_size: int, rank: int, rows: int) -> tuple[int, int]:
        return even_parts(rows, world_size)[rank]

    def replica_group(self, world_size: int) -> Group | None:
        return world(world_size) if world_size > 1 else None

    def schedule(self, model: Model, world_size: int, rank: int, rows: int, task: Task) -> Schedule:
        start, stop = self.rows_of(world_size, rank, rows)
        return self._schedule(model, world_size, stop - start, rows, task)

    @lru_cache(maxsize=8)  # noqa: B019  ranks with as many rows share one schedule; strategies live as long as a run
    def _schedule(self, model: Model, world_size: int, own_rows: int, rows: int, task: Task) -> Schedule:
        layers, microbatches = whole_layers(model.layers), self.microbatches(own_rows)
        group = world(world_size)
        whole_step = step(layers, microbatches, group, task.clips)
        buckets = fill_buckets(layers, self.options.bucket_mb, task.dtype)
        operations: Iterable[Operation] = whole_step
        if world_size > 1:
            operations = data_parallel(
                whole_step, buckets, microbatches - 1, group, task.dtype, self.options.overlap
            )
        return make_schedule(operations, layers, cut_rows(0, own_rows, microbatches), rows, task.dtype)

    def evaluation(self, model: Model, world_size: int, rank: int, rows: int, task: Task) -> Schedule:
        start, stop = self.rows_of(world_size, rank, rows)
        layers, microbatches = whole_layers(model.layers), self.microbatches(stop - start)
        own_rows = cut_rows(start, stop, microbatches)
        return make_schedule(score(layers, microbatches), layers, own_rows, rows, task.dtype)

    def bytes_predicted(
        self, model: Model, world_size: int, rank: int, rows: int, task: Task
    ) -> dict[str, int]:
        """all_reduce of every parameter's gradient once, 2 (n-1)/n of its bytes when evenly divisible."""
        if world_size == 1:
            return {}
        sizes = [[math.prod(p.shape) for p in layer.parameters] for layer in model.layers]
        if self.options.bucket_mb == 0:
            messages = [size for layer in sizes for size in layer]
        else:
            messages, filled = [], 0
            for layer in reversed(sizes):
                filled += sum(layer)
                if filled * ITEMSIZE[task.dtype] >= self.options.bucket_mb * MIB:
                    messages.append(filled)
                    filled = 0
            messages.append(filled)
        total = sum(
            bytes_sent("all_reduce", task.algorithms.all_reduce, size, task.dtype, world_size, rank)
            for size in messages
        )
        return {"all_reduce weight gradient": total}

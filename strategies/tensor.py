"""Tensor parallel: every layer's columns split; gather forward, reduce and scatter backward.

Each rank holds 1/world_size of every weight [out, in], a block of its rows, and so computes a
block of the output's features. Activations are [features, rows], so that block is contiguous and
gathering lands in place. Backward, each rank has a partial sum of the whole input gradient, of
which it needs the reduced block that belongs to its columns of the layer below.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from collectives.traffic import bytes_sent
from models.block import Model, even_parts
from strategies.communication import AllGather, AllReduce, ReduceScatter, Wait
from strategies.compute import BackwardInput, BackwardWeight, Forward, Loss, LossMaximum, LossSums, Score
from strategies.layout import Layout
from strategies.schedule import Schedule
from strategies.strategy import Strategy, Task, cut_rows, make_schedule, score, step, whole_layers, world
from strategies.values import Group, Layer, Operation, Value

BACKWARDS = ("reduce_scatter", "all_reduce")


class TensorParallel(Strategy):
    name = "tensor"

    def check(self, model: Model, world_size: int, batch_size: int) -> None:
        super().check(model, world_size, batch_size)
        if self.options.backward not in BACKWARDS:
            raise ValueError(
                f"strategy.backward={self.options.backward} is unknown; valid are {', '.join(BACKWARDS)}"
            )
        for layer in model.layers:
            if not layer.splits_columns:
                raise ValueError(
                    f"strategy=tensor cannot split layer {layer.index} ({layer.kind}): it has no rule for a "
                    "shard of its columns; use strategy=ddp or pipeline, or model=mlp"
                )

    def layout(self, model: Model, world_size: int, dtype: str) -> Layout:
        every = range(len(model.layers))

        def columns(layer: int, rank: int) -> tuple[int, int] | None:
            if world_size == 1:
                return None
            return even_parts(model.layers[layer].output_shape[0], world_size)[rank]

        return Layout(model, dtype, world_size, lambda rank: every, columns)

    def schedule(self, model: Model, world_size: int, rank: int, rows: int, task: Task) -> Schedule:
        layers = self._shards(model, world_size, rank, gathers_last=False)
        microbatches, group = self.microbatches(rows), world(world_size)
        cut = cut_rows(0, rows, microbatches)
        operations: Iterable[Operation] = step(layers, microbatches, group, task.clips)
        if world_size > 1:
            split = _Split(group, rank, cut, task)
            operations = split.training(operations, self.options.overlap, self.options.backward)
        return make_schedule(operations, layers, cut, rows, task.dtype)

    def evaluation(self, model: Model, world_size: int, rank: int, rows: int, task: Task) -> Schedule:
        layers = self._shards(model, world_size, rank, gathers_last=True)
        microbatches, group = self.microbatches(rows), world(world_size)
        cut = cut_rows(0, rows, microbatches)
        operations: Iterable[Operation] = score(layers, microbatches)
        if world_size > 1:
            operations = _Split(group, rank, cut, task).scoring(operations)
        return make_schedule(operations, layers, cut, rows, task.dtype)

    def _shards(self, model: Model, world_size: int, rank: int, gathers_last: bool) -> tuple[Layer, ...]:
        if world_size == 1:
            return whole_layers(model.layers)
        last = len(model.layers) - 1
        return tuple(
            Layer(
                spec,
                columns=even_parts(spec.output_shape[0], world_size)[rank],
                has_below=spec.index > 0,
                gathered=spec.index < last or gathers_last,
            )
            for spec in model.layers
        )

    def bytes_predicted(
        self, model: Model, world_size: int, rank: int, rows: int, task: Task
    ) -> dict[str, int]:
        """Per hidden activation one gather and one reduction; (n-1)/n of its bytes each where it divides.

        Cross-entropy also reduces a maximum and two sums per row.
        """
        if world_size == 1:
            return {}
        totals: dict[str, int] = {}

        def add(operation: str, kind: str, shape: int | tuple[int, ...], dtype: str = task.dtype) -> None:
            algorithm = getattr(task.algorithms, operation)
            label = f"{operation} {kind}"
            sent = bytes_sent(operation, algorithm, shape, dtype, world_size, rank)
            totals[label] = totals.get(label, 0) + sent

        for cut in cut_rows(0, rows, self.microbatches(rows)):
            for layer in model.layers[:-1]:
                shards = tuple(
                    (stop - start) * cut for start, stop in even_parts(layer.output_shape[0], world_size)
                )
                add("all_gather", "output", shards)
                if self.options.backward == "reduce_scatter":
                    add("reduce_scatter", "partial gradient", shards)
                else:
                    add("all_reduce", "partial gradient", sum(shards))
            if task.loss == "cross_entropy":
                add("all_reduce", "class maximum", cut, loss_dtype(task.dtype))
                add("all_reduce", "class sums", 2 * cut, loss_dtype(task.dtype))
        return totals


def loss_dtype(dtype: str) -> str:
    """The loss sums over classes in float32 at least."""
    return "float32" if dtype == "bfloat16" else dtype


class _Split:
    """The rewriting, for one rank: what is needed besides the operations."""

    def __init__(self, group: Group, rank: int, rows: tuple[int, ...], task: Task) -> None:
        self.group, self.rank, self.rows, self.task = group, rank, rows, task

    def training(self, operations: Iterable[Operation], overlap: bool, backward: str) -> Iterator[Operation]:
        """Gather every hidden output; reduce every input gradient, in flight while dW is computed."""
        for operation in operations:
            match operation:
                case Loss(layer, m):
                    yield from self.loss(layer, m)
                case Forward(layer, m) if layer.gathered:
                    yield operation
                    yield from self.gather(layer, m)
                case BackwardInput(layer, m) if layer.has_below:
                    yield operation
                    yield self.reduce(layer, m, backward)
                    if not overlap:
                        yield Wait(layer.input_gradient(m))
                case BackwardWeight(layer, m) if layer.has_below and overlap:
                    yield operation
                    yield Wait(layer.input_gradient(m))
                case _:
                    yield operation

    def scoring(self, operations: Iterable[Operation]) -> Iterator[Operation]:
        """Every rank gathers the whole output and scores it; one counts."""
        for operation in operations:
            match operation:
                case Forward(layer, m):
                    yield operation
                    yield from self.gather(layer, m)
                case Score(layer, m):
                    yield Score(layer, m, counts=self.rank == self.group.ranks[0])
                case _:
                    yield operation

    def gather(self, layer: Layer, m: int) -> Iterator[Operation]:
        yield AllGather(
            layer.output(m),
            (layer.spec.output_shape[0], self.rows[m]),
            self.task.dtype,
            self.group,
            self.sizes(layer.spec.output_shape[0]),
            layer.own_output(m),
        )
        yield Wait(layer.output(m))

    def reduce(self, layer: Layer, m: int, backward: str) -> Operation:
        width = layer.spec.input_shape[0]
        partial, shape, dtype = layer.input_gradient(m), (width, self.rows[m]), self.task.dtype
        if backward == "all_reduce":
            return AllReduce(partial, shape, dtype, self.group)
        result = Value("gradient shard", layer.index - 1, m)
        return ReduceScatter(partial, shape, dtype, self.group, self.sizes(width), result)

    def loss(self, layer: Layer, m: int) -> Iterator[Operation]:
        """Mean squared error needs only this rank's columns; cross-entropy a maximum and sums over all."""
        first = self.rank == self.group.ranks[0]
        if self.task.loss != "cross_entropy":
            yield Loss(layer, m)
            return
        dtype = loss_dtype(self.task.dtype)
        maximum = Value("class maximum", layer.index, m)
        sums = Value("class sums", layer.index, m)
        yield LossMaximum(layer, m)
        yield AllReduce(maximum, (1, self.rows[m]), dtype, self.group, reduction="max")
        yield Wait(maximum)
        yield LossSums(layer, m)
        yield AllReduce(sums, (2, self.rows[m]), dtype, self.group)
        yield Wait(sums)
        yield Loss(layer, m, sharded=True, counts=first)

    def sizes(self, width: int) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in even_parts(width, self.group.size))

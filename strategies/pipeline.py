"""Pipeline: layers split by depth, microbatches fill the bubble, the last stage computes the loss.

A schedule function gives the order of a stage's forwards and backwards; `run_stage` runs the
stage's layers for each entry, with receives in front and sends behind. Receives are posted ahead
of their use, since a send completes only once its receive is there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from collectives.traffic import bytes_sent
from models.block import Model, even_parts
from strategies.communication import Recv, Send, Wait
from strategies.compute import Backward, BackwardInput, Forward, Loss, Score
from strategies.layout import Layout
from strategies.schedule import Schedule
from strategies.strategy import (
    Strategy,
    Task,
    backward,
    cut_rows,
    finish,
    make_schedule,
    world,
)
from strategies.values import Layer, Operation, Value

Entry = tuple[str, int]

RECEIVES_AHEAD = 2  # one lands while another is waited for; more would only hold buffers


def gpipe(stage: int, stages: int, microbatches: int) -> Iterator[Entry]:
    """All forwards, then all backwards (Huang et al. 2019). Holds every microbatch's activations."""
    for m in range(microbatches):
        yield "forward", m
    for m in range(microbatches):
        yield "backward", m


def one_forward_one_backward(stage: int, stages: int, microbatches: int) -> Iterator[Entry]:
    """PipeDream-flush (Narayanan et al. 2021): at most `stages - stage` microbatches in flight."""
    warmup = min(microbatches, stages - stage - 1)
    forward, backwards = iter(range(microbatches)), iter(range(microbatches))
    for m in islice(forward, warmup):
        yield "forward", m
    for m in forward:
        yield "forward", m
        yield "backward", next(backwards)
    for m in backwards:
        yield "backward", m


def naive(stage: int, stages: int, microbatches: int) -> Iterator[Entry]:
    """The whole batch as one microbatch: all stages but one are idle at any time."""
    yield "forward", 0
    yield "backward", 0


ORDERS: dict[str, Callable[[int, int, int], Iterator[Entry]]] = {
    "naive": naive,
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
}


class Stage:
    """One rank's part of the model, and the operations that its entries stand for."""

    def __init__(self, layers: Sequence[Layer], stage: int, stages: int, model: Model, task: Task) -> None:
        self.layers, self.stage, self.stages = layers, stage, stages
        self.model, self.task = model, task
        self.is_first, self.is_last = stage == 0, stage == stages - 1

    def input(self, m: int) -> Value:
        return self.layers[0].input(m)

    def output_gradient(self, m: int) -> Value:
        return self.layers[-1].own_gradient(m)

    def shape(self, value: Value, rows: int) -> tuple[int, ...]:
        width = self.model.layers[value.layer].output_shape
        return self.model.activation_shape(width, rows)

    def run(self, entries: Sequence[Entry], rows: Sequence[int], receives_ahead: int) -> Iterator[Operation]:
        """The stage's step without its update; a receive is posted `receives_ahead` entries before use."""
        forwards = [m for kind, m in entries if kind == "forward"]
        backwards = [m for kind, m in entries if kind == "backward"]
        inputs = self._receives([] if self.is_first else forwards, self.input, self.stage - 1, rows)
        gradients = self._receives(
            [] if self.is_last else backwards, self.output_gradient, self.stage + 1, rows
        )
        yield from islice(inputs, receives_ahead)
        yield from islice(gradients, receives_ahead)
        in_flight: deque[Value] = deque()
        first_backward = backwards[0] if backwards else -1
        for kind, m in entries:
            if kind == "forward":
                yield from self._forward(m, rows[m])
                yield from islice(inputs, 1)
            else:
                yield from self._backward(m, rows[m], m != first_backward, in_flight)
                yield from islice(gradients, 1)
        for value in in_flight:
            yield Wait(value)

    def _receives(
        self, order: Sequence[int], value: Callable[[int], Value], peer: int, rows: Sequence[int]
    ) -> Iterator[Operation]:
        for m in order:
            yield Recv(value(m), self.shape(value(m), rows[m]), self.task.dtype, peer)

    def _forward(self, m: int, rows: int) -> Iterator[Operation]:
        if not self.is_first:
            yield Wait(self.input(m))
        for layer in self.layers:
            yield Forward(layer, m)
        if self.is_last:
            yield Loss(self.layers[-1], m)
        else:
            output = self.layers[-1].output(m)
            yield Send(output, self.shape(output, rows), self.task.dtype, self.stage + 1)

    def _backward(self, m: int, rows: int, accumulate: bool, in_flight: deque[Value]) -> Iterator[Operation]:
        if not self.is_last:
            yield Wait(self.output_gradient(m))
            # The gradient that came back proves that the output has arrived: this never blocks.
            yield Wait(self.layers[-1].output(m))
        for layer in reversed(self.layers):
            for operation in backward(layer, m, accumulate):
                yield operation
                if layer is self.layers[0] and isinstance(operation, BackwardInput | Backward):
                    yield from self._send_gradient(m, rows, in_flight)

    def _send_gradient(self, m: int, rows: int, in_flight: deque[Value]) -> Iterator[Operation]:
        """Before the lowest layer's dW, so that the stage below waits for nothing it does not need."""
        if self.is_first:
            return
        if len(in_flight) == RECEIVES_AHEAD:
            yield Wait(in_flight.popleft())
        gradient = self.layers[0].input_gradient(m)
        yield Send(gradient, self.shape(gradient, rows), self.task.dtype, self.stage - 1)
        in_flight.append(gradient)

    def scoring(self, rows: Sequence[int]) -> Iterator[Operation]:
        """Evaluation: forwards only, the last stage scores."""
        inputs = self._receives([] if self.is_first else range(len(rows)), self.input, self.stage - 1, rows)
        yield from islice(inputs, RECEIVES_AHEAD)
        for m, own_rows in enumerate(rows):
            for operation in self._forward(m, own_rows):
                yield Score(operation.layer, m) if isinstance(operation, Loss) else operation
            yield from islice(inputs, 1)
        if not self.is_last:
            for m in range(len(rows)):
                yield Wait(self.layers[-1].output(m))


class Pipeline(Strategy):
    name = "pipeline"

    def check(self, model: Model, world_size: int, batch_size: int) -> None:
        if self.options.schedule not in ORDERS:
            raise ValueError(
                f"strategy.schedule={self.options.schedule} is unknown; valid are {', '.join(ORDERS)}"
            )
        super().check(model, world_size, batch_size)
        layers, partition = len(model.layers), self.options.partition
        if world_size > layers:
            raise ValueError(
                f"world_size={world_size} makes more stages than the {layers} layers of the model; "
                f"use at most {layers} ranks or raise model.num_layers"
            )
        if partition is None:
            return
        if len(partition) != world_size or sum(partition) != layers or min(partition) < 1:
            raise ValueError(
                f"strategy.partition={list(partition)} must give each of the {world_size} stages at least "
                f"one layer and add up to the {layers} layers of the model"
            )

    def stages(self, model: Model, world_size: int) -> tuple[tuple[int, int], ...]:
        """Range of layers of each stage: even, larger first, or as `strategy.partition` says."""
        if self.options.partition is None:
            return even_parts(len(model.layers), world_size)
        ranges, start = [], 0
        for count in self.options.partition:
            ranges.append((start, start + count))
            start += count
        return tuple(ranges)

    def microbatches(self, rows: int) -> int:
        return 1 if self.options.schedule == "naive" else super().microbatches(rows)

    def layout(self, model: Model, world_size: int, dtype: str) -> Layout:
        stages = self.stages(model, world_size)
        return Layout(model, dtype, world_size, lambda rank: range(*stages[rank]), lambda layer, rank: None)

    def takes(self, world_size: int, rank: int) -> tuple[bool, bool]:
        return (rank == 0, rank == world_size - 1)

    def bubble_expected(self, world_size: int, rows: int) -> float | None:
        """(p-1)/(m+p-1): each stage idles p-1 of the m+p-1 slots, under GPipe and 1F1B alike."""
        return (world_size - 1) / (self.microbatches(rows) + world_size - 1)

    def schedule(self, model: Model, world_size: int, rank: int, rows: int, task: Task) -> Schedule:
        stage, cut = self._stage(model, world_size, rank, task), self._cut(rows)
        outline = tuple(ORDERS[self.options.schedule](rank, world_size, len(cut)))
        ahead = RECEIVES_AHEAD if self.options.overlap else 1
        operations = [
            *stage.run(outline, cut, ahead),
            *finish(stage.layers, world(world_size), task.clips),
        ]
        takes = self.takes(world_size, rank)
        return make_schedule(operations, stage.layers, cut, rows, task.dtype, takes, outline)

    def evaluation(self, model: Model, world_size: int, rank: int, rows: int, task: Task) -> Schedule:
        stage, cut = self._stage(model, world_size, rank, task), self._cut(rows)
        takes = self.takes(world_size, rank)
        return make_schedule(stage.scoring(cut), stage.layers, cut, rows, task.dtype, takes)

    def _stage(self, model: Model, world_size: int, rank: int, task: Task) -> Stage:
        start, stop = self.stages(model, world_size)[rank]
        layers = tuple(Layer(spec, has_below=spec.index > 0) for spec in model.layers[start:stop])
        return Stage(layers, rank, world_size, model, task)

    def _cut(self, rows: int) -> tuple[int, ...]:
        return cut_rows(0, rows, self.microbatches(rows))

    def bytes_predicted(
        self, model: Model, world_size: int, rank: int, rows: int, task: Task
    ) -> dict[str, int]:
        """Every row crosses each boundary once each way, whatever the number of microbatches."""
        start, stop = self.stages(model, world_size)[rank]

        def crossing(layer: int) -> int:
            elements = rows
            for size in model.layers[layer].output_shape:
                elements *= size
            return bytes_sent("send", "direct", elements, task.dtype, world_size, rank)

        totals = {}
        if rank < world_size - 1:
            totals["send output"] = crossing(stop - 1)
        if rank > 0:
            totals["send gradient"] = crossing(start - 1)
        return totals

"""What every split is to the rest: a plug-in that turns model and world into layout and schedules.

All methods are pure functions of their arguments: no process group, no tensor, so a laptop can
plan thousands of ranks, and a wrong plan is refused before anything runs.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from collectives.traffic import Algorithms
from models.block import LayerSpec, Model, even_parts
from strategies.compute import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    GradientNorm,
    Loss,
    Score,
    Update,
)
from strategies.layout import Layout
from strategies.schedule import Schedule
from strategies.values import Group, Layer, Operation, Value


@dataclass(frozen=True)
class Task:
    """What is trained, apart from the model: loss, number format, clipping, how collectives run."""

    loss: str = "cross_entropy"
    dtype: str = "float32"
    clips: bool = False
    algorithms: Algorithms = field(default_factory=Algorithms)


@dataclass(frozen=True)
class Options:
    """A strategy's configuration; the config group `strategy` has the same keys."""

    microbatches: int = 1
    schedule: str = "1f1b"
    partition: tuple[int, ...] | None = None
    overlap: bool = True
    bucket_mb: float = 25.0
    backward: str = "reduce_scatter"
    options: dict[str, Any] = field(default_factory=dict)


class Strategy(abc.ABC):
    """A way to split a training step over ranks."""

    name: ClassVar[str]

    def __init__(self, options: Options) -> None:
        self.options = options

    def check(self, model: Model, world_size: int, batch_size: int) -> None:
        """Refuse what this split cannot do.

        Raises:
            ValueError: one sentence with the config key, the value and what would be right.
        """
        if self.options.microbatches > batch_size:
            raise ValueError(
                f"strategy.microbatches={self.options.microbatches} is more than "
                f"data.batch_size={batch_size}; a microbatch needs at least one row"
            )
        if self.microbatches(batch_size) > 1:
            refuse_batch_statistics(model, f"strategy.microbatches={self.options.microbatches}")

    @abc.abstractmethod
    def layout(self, model: Model, world_size: int, dtype: str) -> Layout:
        """Which rank holds what of the parameters."""

    @abc.abstractmethod
    def schedule(self, model: Model, world_size: int, rank: int, rows: int, task: Task) -> Schedule:
        """One rank's training step on a batch of `rows` global rows."""

    @abc.abstractmethod
    def evaluation(self, model: Model, world_size: int, rank: int, rows: int, task: Task) -> Schedule:
        """One rank's part in evaluating a batch of `rows` global rows."""

    @abc.abstractmethod
    def bytes_predicted(
        self, model: Model, world_size: int, rank: int, rows: int, task: Task
    ) -> dict[str, int]:
        """Closed form of the bytes that `rank` sends in a step, by operation; no schedule is built."""

    def microbatches(self, rows: int) -> int:
        """Microbatches that `rows` rows are cut into; none is empty but where there are no rows."""
        return max(1, min(self.options.microbatches, rows))

    def rows_of(self, world_size: int, rank: int, rows: int) -> tuple[int, int]:
        """The rows of a global batch that `rank` works on."""
        return (0, rows)

    def takes(self, world_size: int, rank: int) -> tuple[bool, bool]:
        """Whether `rank` needs (inputs, targets)."""
        return (True, True)

    def replica_group(self, world_size: int) -> Group | None:
        """Ranks that must hold bitwise equal parameters, or None."""
        return None

    def bubble_expected(self, world_size: int, rows: int) -> float | None:
        """Closed form of the idle share of a step with equal stages, or None outside pipelines."""
        return None


def refuse_batch_statistics(model: Model, setting: str) -> None:
    """Layers whose rows depend on each other need the whole batch in one piece."""
    for layer in model.layers:
        if layer.per_batch is not None:
            raise ValueError(
                f"{setting} cuts the batch, but layer {layer.index} ({layer.kind}) cannot take a part: "
                f"{layer.per_batch}; use one microbatch and a split that keeps the batch whole"
            )


def world(world_size: int) -> Group:
    """All ranks."""
    return Group("world", tuple(range(world_size)))


def cut_rows(start: int, stop: int, microbatches: int) -> tuple[int, ...]:
    """Rows of each microbatch of the slice start..stop."""
    return tuple(b - a for a, b in even_parts(stop - start, microbatches))


def whole_layers(specs: Sequence[LayerSpec]) -> tuple[Layer, ...]:
    return tuple(Layer(spec, has_below=spec.index > 0) for spec in specs)


def backward(layer: Layer, m: int, accumulate: bool) -> Iterator[Operation]:
    """dX first, since the layer below waits for it; both at once where they cannot be taken apart."""
    if layer.spec.splits_backward:
        yield BackwardInput(layer, m)
        yield BackwardWeight(layer, m, accumulate)
    else:
        yield Backward(layer, m, accumulate)


def step(layers: Sequence[Layer], microbatches: int, group: Group, clips: bool) -> Iterator[Operation]:
    """The whole model on one rank: what every split rewrites."""
    for m in range(microbatches):
        for layer in layers:
            yield Forward(layer, m)
        yield Loss(layers[-1], m)
        for layer in reversed(layers):
            yield from backward(layer, m, accumulate=m > 0)
    yield from finish(layers, group, clips)


def finish(layers: Sequence[Layer], group: Group, clips: bool) -> Iterator[Operation]:
    """What ends a step once all gradients are there."""
    if clips:
        yield GradientNorm(tuple(layers), group)
    yield Update(tuple(layers), clips)


def score(layers: Sequence[Layer], microbatches: int) -> Iterator[Operation]:
    """Forward only: what every split's evaluation rewrites."""
    for m in range(microbatches):
        for layer in layers:
            yield Forward(layer, m)
        yield Score(layers[-1], m)


def given(layers: Sequence[Layer], microbatches: int, inputs: bool, targets: bool) -> tuple[Value, ...]:
    """Values that the data loader writes before a step."""
    values: list[Value] = []
    for m in range(microbatches):
        if inputs:
            values.append(Value("output", -1, m))
        if targets:
            values.append(Value("target", layers[-1].index, m))
    return tuple(values)


def make_schedule(
    operations: Iterable[Operation],
    layers: Sequence[Layer],
    rows: tuple[int, ...],
    global_rows: int,
    dtype: str,
    takes: tuple[bool, bool] = (True, True),
    outline: tuple[tuple[str, int], ...] = (),
) -> Schedule:
    """A schedule with its given values worked out."""
    return Schedule(
        tuple(operations),
        rows,
        global_rows,
        tuple(layers),
        given(layers, len(rows), *takes),
        dtype,
        outline,
    )

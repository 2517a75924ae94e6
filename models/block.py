"""The face of one layer: what a split must know of it (`LayerSpec`) and what runs (`Block`).

Activations of a model whose `row_axis` is 1 are stored as [features, rows]: a column
shard of a layer's output is then a contiguous block of memory, so that gathering the
shards lands in place and sending one copies nothing. A model with `row_axis` 0 stores
[rows, *shape], the layout that arbitrary modules expect.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


def even_parts(total: int, parts: int) -> tuple[tuple[int, int], ...]:
    """Cut range(total) into `parts` ranges (start, stop), as even as possible, larger parts first."""
    small, larger = divmod(total, parts)
    ranges, start = [], 0
    for part in range(parts):
        stop = start + small + (part < larger)
        ranges.append((start, stop))
        start = stop
    return tuple(ranges)


@dataclass(frozen=True)
class ParameterSpec:
    """One parameter of a layer: global shape, and the axis along which a column split cuts it."""

    name: str
    shape: tuple[int, ...]
    column_axis: int | None = None

    def shard(self, columns: tuple[int, int] | None) -> tuple[int, ...]:
        """Shape of the part that holds these output columns; the whole when `columns` is None."""
        if columns is None:
            return self.shape
        assert self.column_axis is not None, f"{self.name} has no column axis"
        shape = list(self.shape)
        shape[self.column_axis] = columns[1] - columns[0]
        return tuple(shape)


@dataclass(frozen=True)
class LayerSpec:
    """What a plan knows of a layer without building it. Shapes are those of one row.

    `saves` names what backward reads besides the output gradient: "input" (for the weight
    gradient), "output" or "preactivation" (for the activation's derivative) or "graph" (an
    autograd graph, whose size is not known here). `forward_flops` counts one row, a multiply
    and an add as two.
    """

    index: int
    kind: str
    input_shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    parameters: tuple[ParameterSpec, ...]
    saves: tuple[str, ...]
    forward_flops: int
    splits_backward: bool = True  # input and weight gradient can be taken apart
    splits_columns: bool = True  # has a rule for a column shard
    per_batch: str | None = None  # why rows are not independent (batch statistics, ...), None when they are

    @property
    def work(self) -> tuple[object, ...]:
        """Equal for layers that take the same computing for a row."""
        sizes = (self.input_shape, self.output_shape, self.saves)
        return (self.kind, *sizes, self.parameters, self.forward_flops)


@dataclass
class Saved:
    """Buffers of one layer and microbatch; None where the layer saves none."""

    input: Tensor
    output: Tensor
    preactivation: Tensor | None = None
    graph: tuple[Tensor, Tensor] | None = None


@dataclass
class Context:
    """Where in the run a block is: `rows` is this microbatch's range of the global batch's rows."""

    training: bool
    step: int
    microbatch: int
    rows: tuple[int, int]
    seed: int

    def key(self, layer: int, row: int) -> tuple[int, int, int, int]:
        """What anything random must be made from, so that it is equal under every split."""
        return (self.seed, self.step, layer, self.rows[0] + row)


class Block(abc.ABC):
    """One layer on one rank, bound to its slices of the flat parameter and gradient buffers."""

    @abc.abstractmethod
    def forward(self, saved: Saved, context: Context) -> None:
        """Read `saved.input`, write `saved.output` and whatever else backward needs."""

    @abc.abstractmethod
    def backward_input(self, saved: Saved, gradient: Tensor, input_gradient: Tensor | None) -> None:
        """Write dLoss/dinput, given dLoss/doutput in `gradient`, which this call may overwrite.

        With `input_gradient` None (nothing below waits for it) only the part that
        `backward_weight` builds on is done.
        """

    @abc.abstractmethod
    def backward_weight(self, saved: Saved, gradient: Tensor, accumulate: bool) -> None:
        """Write (add, when `accumulate`) parameter gradients; `gradient` as `backward_input` left it."""


class JointBlock(Block):
    """A layer whose backward is one indivisible pass."""

    @abc.abstractmethod
    def backward(
        self, saved: Saved, gradient: Tensor, input_gradient: Tensor | None, accumulate: bool
    ) -> None:
        """Input and parameter gradients in one pass."""

    def backward_input(self, saved: Saved, gradient: Tensor, input_gradient: Tensor | None) -> None:
        raise TypeError("this layer's backward cannot be split; its LayerSpec says so")

    def backward_weight(self, saved: Saved, gradient: Tensor, accumulate: bool) -> None:
        raise TypeError("this layer's backward cannot be split; its LayerSpec says so")


class Model(abc.ABC):
    """A chain of layers, described without tensors; blocks are built one at a time."""

    layers: tuple[LayerSpec, ...]
    row_axis: int  # 1: activations are [features, rows]; 0: [rows, *shape]

    @abc.abstractmethod
    def initialize(
        self, layer: int, parameters: Mapping[str, Tensor], columns: tuple[int, int] | None, seed: int
    ) -> None:
        """Fill this layer's (shard of) parameters. The values follow from (seed, layer) alone."""

    @abc.abstractmethod
    def block(self, layer: int, parameters: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> Block:
        """The layer bound to views of the flat buffers; shard or whole follows from their shapes."""

    @property
    def input_shape(self) -> tuple[int, ...]:
        return self.layers[0].input_shape

    @property
    def output_shape(self) -> tuple[int, ...]:
        return self.layers[-1].output_shape

    def activation_shape(self, shape: tuple[int, ...], rows: int) -> tuple[int, ...]:
        """Stored shape of an activation whose rows have this shape."""
        if self.row_axis == 0:
            return (rows, *shape)
        assert len(shape) == 1, "row_axis 1 is for layers with one feature dimension"
        return (shape[0], rows)

    def step_flops(self, rows: int) -> int:
        """Model FLOPs of a training step: forward, weight gradient, and input gradient but the first's."""
        forward = [layer.forward_flops for layer in self.layers]
        return rows * (3 * sum(forward) - forward[0])


def torch_dtype(name: str) -> torch.dtype:
    """float32, float64 or bfloat16 by its config name."""
    return {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}[name]

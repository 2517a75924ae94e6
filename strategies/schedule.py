"""The schedule of one rank: the operations of a step in the order in which it runs them.

A schedule holds no tensor and no process group: it is drawn, counted, checked and simulated as
it stands, and an executor runs it. Ranks that do the same share one object.
"""

from __future__ import annotations

from dataclasses import dataclass

from models.block import Model
from strategies.values import Layer, Operation, Value


@dataclass(frozen=True)
class Schedule:
    """One rank's step. Ranks that do the same share one object.

    Args:
        rows: rows of each microbatch on this rank.
        global_rows: rows of the whole batch.
        layers: the layers this rank holds, lowest first.
        given: values that the data loader writes before the first operation.
        outline: entries that a person draws a pipeline by, such as ("forward", 0); may be empty.
    """

    operations: tuple[Operation, ...]
    rows: tuple[int, ...]
    global_rows: int
    layers: tuple[Layer, ...]
    given: tuple[Value, ...]
    dtype: str
    outline: tuple[tuple[str, int], ...] = ()

    def shape(self, model: Model, value: Value) -> tuple[int, ...]:
        """Stored shape of an activation-like value on this rank."""
        kind, index, m = value
        spec = model.layers[index] if index >= 0 else None
        width = spec.output_shape if spec is not None else model.input_shape
        if kind in ("output", "gradient", "partial gradient"):
            return model.activation_shape(width, self.rows[m])
        layer = next(layer for layer in self.layers if layer.index == index)
        if kind == "activation gradient":
            kind = layer.own_gradient(m).kind
        if kind in ("output shard", "gradient shard", "preactivation", "gradient"):
            if layer.columns is None:
                return model.activation_shape(width, self.rows[m])
            return (layer.columns[1] - layer.columns[0], self.rows[m])
        raise AssertionError(f"{value} has no activation shape")

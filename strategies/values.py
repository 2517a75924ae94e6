"""What operations are made of: named values, groups of ranks, and layers as one rank holds them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from models.block import LayerSpec


class Value(NamedTuple):
    """A tensor that operations read and write, by name.

    `place` is the microbatch; for "weight gradient" and "parameter" the place of the tensor in
    its layer. Layer -1 is the input of the model.
    """

    kind: str
    layer: int
    place: int

    def __str__(self) -> str:
        if self.kind in ("weight gradient", "parameter"):
            return f"{self.kind} {self.place} of layer {self.layer}"
        if self.layer < 0:
            return f"input, microbatch {self.place}" if self.kind == "output" else self.kind
        return f"{self.kind} of layer {self.layer}, microbatch {self.place}"


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that communicate together, by name."""

    name: str
    ranks: tuple[int, ...]

    @property
    def size(self) -> int:
        return len(self.ranks)


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer as one rank holds it: whole, or a range of its output columns."""

    spec: LayerSpec
    columns: tuple[int, int] | None = None
    has_below: bool = True  # a layer below waits for this one's input gradient
    gathered: bool = True  # under a column split, the whole output is gathered on every rank

    @property
    def index(self) -> int:
        return self.spec.index

    def input(self, m: int) -> Value:
        return Value("output", self.index - 1, m)

    def output(self, m: int) -> Value:
        return Value("output", self.index, m)

    def own_output(self, m: int) -> Value:
        """What this rank's forward writes: the whole output, or its columns of it."""
        return self.output(m) if self.columns is None else Value("output shard", self.index, m)

    def preactivation(self, m: int) -> Value:
        return Value("preactivation", self.index, m)

    def own_gradient(self, m: int) -> Value:
        """Loss gradient of what this rank's forward wrote."""
        return Value("gradient" if self.columns is None else "gradient shard", self.index, m)

    def activation_gradient(self, m: int) -> Value:
        """The same behind the activation's derivative (dz), in place."""
        return Value("activation gradient", self.index, m)

    def input_gradient(self, m: int) -> Value:
        """Loss gradient of the input: complete, or this rank's partial sum under a column split."""
        return Value("gradient" if self.columns is None else "partial gradient", self.index - 1, m)

    def weight_gradients(self) -> tuple[Value, ...]:
        return tuple(Value("weight gradient", self.index, k) for k in range(len(self.spec.parameters)))

    def parameters(self) -> tuple[Value, ...]:
        return tuple(Value("parameter", self.index, k) for k in range(len(self.spec.parameters)))

    def saved(self, m: int) -> tuple[Value, ...]:
        """What the activation's derivative reads."""
        if "output" in self.spec.saves:
            return (self.own_output(m),)
        return (self.preactivation(m),) if "preactivation" in self.spec.saves else ()


class Operation:
    """Base of all operations; `lane` is where it takes time: "compute" or "communication"."""

    __slots__ = ()
    lane: ClassVar[str] = "compute"

    @property
    def identity(self) -> str:
        """What a person calls it; the same on every rank that takes part."""
        raise AssertionError

    @property
    def reads(self) -> tuple[Value, ...]:
        return ()

    @property
    def writes(self) -> tuple[Value, ...]:
        return ()

    def __str__(self) -> str:
        return self.identity

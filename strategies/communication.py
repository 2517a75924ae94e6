"""Operations that cross the wire. They start a transfer; `Wait` on the same value completes it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from strategies.values import Group, Operation, Value


@dataclass(frozen=True, slots=True)
class Communication(Operation):
    """Base of what crosses the wire. `shape` is the whole tensor's, of this rank's message for Send, Recv."""

    value: Value
    shape: tuple[int, ...]
    dtype: str
    lane: ClassVar[str] = "communication"
    verb: ClassVar[str] = ""

    @property
    def label(self) -> str:
        """The row of the byte table that this operation belongs to."""
        return f"{self.verb} {self.value.kind}"

    @property
    def identity(self) -> str:
        return f"{self.verb} {self.value}"

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def signature(self) -> tuple[object, ...]:
        """What must be equal on all ranks of a collective."""
        return (self.verb, self.shape, self.dtype)


@dataclass(frozen=True, slots=True)
class AllReduce(Communication):
    """In place over `group`; `value` and those in `with_values` lie next to each other in memory."""

    group: Group
    reduction: str = "sum"
    with_values: tuple[Value, ...] = ()
    verb: ClassVar[str] = "all_reduce"

    @property
    def identity(self) -> str:
        if not self.with_values:
            return f"all_reduce {self.value}"
        # The last value lies highest in the model: buckets fill from the last layer down.
        return f"all_reduce {self.value.kind}s of layers {self.value.layer}-{self.with_values[-1].layer}"

    @property
    def signature(self) -> tuple[object, ...]:
        return (self.verb, self.shape, self.dtype, self.reduction)

    @property
    def reads(self) -> tuple[Value, ...]:
        return (self.value, *self.with_values)

    @property
    def writes(self) -> tuple[Value, ...]:
        if self.value.kind == "partial gradient":
            return (Value("gradient shard", self.value.layer, self.value.place),)
        return self.reads


@dataclass(frozen=True, slots=True)
class AllGather(Communication):
    """Shards of the leading axis, `sizes` per rank of the group, become the whole on every rank."""

    group: Group
    sizes: tuple[int, ...]
    source: Value
    verb: ClassVar[str] = "all_gather"

    @property
    def signature(self) -> tuple[object, ...]:
        return (self.verb, self.shape, self.dtype, self.sizes)

    @property
    def reads(self) -> tuple[Value, ...]:
        return (self.source,)

    @property
    def writes(self) -> tuple[Value, ...]:
        return (self.value,)


@dataclass(frozen=True, slots=True)
class ReduceScatter(Communication):
    """Partial sums of the whole become, on each rank, the sum of its `sizes[rank]` of the leading axis."""

    group: Group
    sizes: tuple[int, ...]
    result: Value
    verb: ClassVar[str] = "reduce_scatter"

    @property
    def signature(self) -> tuple[object, ...]:
        return (self.verb, self.shape, self.dtype, self.sizes)

    @property
    def scratch(self) -> Value:
        """Room for what the other ranks send of this rank's slice."""
        return Value("received partials", self.value.layer, self.value.place)

    @property
    def reads(self) -> tuple[Value, ...]:
        return (self.value,)

    @property
    def writes(self) -> tuple[Value, ...]:
        return (self.scratch, self.result)


@dataclass(frozen=True, slots=True)
class Send(Communication):
    peer: int
    verb: ClassVar[str] = "send"

    @property
    def identity(self) -> str:
        return f"send {self.value} to rank {self.peer}"

    @property
    def reads(self) -> tuple[Value, ...]:
        return (self.value,)


@dataclass(frozen=True, slots=True)
class Recv(Communication):
    peer: int
    verb: ClassVar[str] = "recv"

    @property
    def identity(self) -> str:
        return f"recv {self.value} from rank {self.peer}"

    @property
    def writes(self) -> tuple[Value, ...]:
        return (self.value,)


@dataclass(frozen=True, slots=True)
class Wait(Operation):
    """Completes the communication in flight that writes `value`, or sends it."""

    value: Value
    lane: ClassVar[str] = "communication"

    @property
    def identity(self) -> str:
        return f"wait for {self.value}"


Collective = AllReduce | AllGather | ReduceScatter

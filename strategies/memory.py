"""Where a schedule's activations live: one arena per rank, slots reused once nobody reads them again."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from collectives.traffic import ITEMSIZE
from models.block import Model
from strategies.communication import ReduceScatter, Wait
from strategies.schedule import Schedule
from strategies.values import Layer, Value

ALIGNMENT_BYTES = 64  # a cache line, and what vectorized kernels like best

# Kinds that live in the arena. Parameters and their gradients have flat buffers of their own, targets and
# class sums belong to the loss, an autograd graph to autograd.
ACTIVATION_KINDS = frozenset(
    {"output", "output shard", "preactivation", "gradient", "gradient shard", "partial gradient"}
    | {"activation gradient", "received partials"}
)


@dataclass(frozen=True)
class Slot:
    """Shape of one value, and where it begins in the arena."""

    offset_bytes: int
    shape: tuple[int, ...]


@dataclass
class Arena:
    """Slots of all activation values of a schedule; `total_bytes` is what a rank must hold."""

    slots: dict[Value, Slot] = field(default_factory=dict)
    total_bytes: int = 0


def lay_out(schedule: Schedule, model: Model) -> Arena:
    """Give every activation a slot from its first use to its last, reusing slots of the same size.

    Layers of one width make most values equal in size, so first fit by size is close to the
    least possible, and simple enough to be checked by hand.
    """
    first: dict[Value, int] = {}
    last: dict[Value, int] = {}
    scratch_until: dict[Value, tuple[Value, ...]] = {}
    held = _Held(schedule, model)
    for value in schedule.given:
        if value.kind in ACTIVATION_KINDS:
            first[held.base(value)] = -1
            last[held.base(value)] = -1
    for position, operation in enumerate(schedule.operations):
        touched = [*operation.reads, *operation.writes]
        if isinstance(operation, Wait):
            touched += [operation.value, *scratch_until.get(operation.value, ())]
        elif isinstance(operation, ReduceScatter):
            scratch_until[operation.value] = (operation.scratch,)
        for value in touched:
            if value.kind in ACTIVATION_KINDS:
                base = held.base(value)
                first.setdefault(base, position)
                last[base] = position
                held.seen.add(value)

    arena = Arena()
    free: dict[int, list[int]] = {}
    expiring = sorted(last, key=lambda value: last[value])
    next_expiring = 0
    bases: dict[Value, int] = {}
    for value in sorted(first, key=lambda value: first[value]):
        while next_expiring < len(expiring) and last[expiring[next_expiring]] < first[value]:
            dead = expiring[next_expiring]
            free.setdefault(held.size_bytes(dead), []).append(bases[dead])
            next_expiring += 1
        size = held.size_bytes(value)
        if free.get(size):
            bases[value] = free[size].pop()
        else:
            bases[value] = arena.total_bytes
            arena.total_bytes += size
    for value in held.seen | set(schedule.given):
        if value.kind in ACTIVATION_KINDS:
            offset = bases[held.base(value)] + held.offset_bytes(value)
            arena.slots[value] = Slot(offset, held.shape(value))
    return arena


class _Held:
    """Which values are parts of others, and their sizes, on the rank of one schedule."""

    def __init__(self, schedule: Schedule, model: Model) -> None:
        self.schedule, self.model = schedule, model
        self.layers: dict[int, Layer] = {layer.index: layer for layer in schedule.layers}
        self.itemsize = ITEMSIZE[schedule.dtype]
        self.scratch = {
            op.scratch: op for op in schedule.operations if isinstance(op, ReduceScatter)
        }  # received partials have the shape of the operation that fills them
        self.seen: set[Value] = set()

    def base(self, value: Value) -> Value:
        """The value whose memory this one uses."""
        layer = self.layers.get(value.layer)
        if value.kind == "activation gradient":
            assert layer is not None
            return self.base(layer.own_gradient(value.place))
        if layer is not None and layer.columns is not None and layer.gathered:
            if value.kind == "output shard":
                return layer.output(value.place)
            if value.kind == "gradient shard":
                return Value("partial gradient", value.layer, value.place)
        return value

    def offset_bytes(self, value: Value) -> int:
        base = self.base(value)
        if base == value or base.kind not in ("output", "partial gradient"):
            return 0
        layer = self.layers[value.layer]
        if layer.columns is None:
            return 0
        return layer.columns[0] * self.schedule.rows[value.place] * self.itemsize

    def shape(self, value: Value) -> tuple[int, ...]:
        if value.kind == "received partials":
            operation = self.scratch[value]
            own = self.layers[value.layer].columns
            assert own is not None
            return (operation.group.size - 1, own[1] - own[0], *operation.shape[1:])
        return self.schedule.shape(self.model, value)

    def size_bytes(self, base: Value) -> int:
        size = math.prod(self.shape(base)) * self.itemsize
        return -(-size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES

"""Where every tensor lies: global shape, what each rank holds of it, replicas, dtype, role.

Memory is counted from it, clipping takes its norm by it, and the flat buffers are cut by it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from collectives.traffic import ITEMSIZE
from models.block import Model

PARAMETER, GRADIENT, OPTIMIZER_STATE = "parameter", "gradient", "optimizer state"
STEP_COUNTER_BYTES = 4  # AdamW counts its steps in one float32 for each optimizer


@dataclass(frozen=True, slots=True)
class Held:
    """What one rank holds of one parameter: shape of its part and place in the rank's flat buffer."""

    name: str
    layer: int
    place: int  # in its layer
    shape: tuple[int, ...]
    columns: tuple[int, int] | None
    start: int  # element of the flat buffer
    replicas: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def stop(self) -> int:
        return self.start + self.numel


@dataclass(frozen=True)
class Layout:
    """The parameters of a model over the ranks; gradients and optimizer state lie alike.

    Args:
        layers_of: rank -> layers that it holds, lowest first.
        columns_of: (layer, rank) -> its output columns, or None for the whole layer.
        replicas: how many ranks hold the same of each tensor.
    """

    model: Model
    dtype: str
    world_size: int
    layers_of: Callable[[int], Sequence[int]]
    columns_of: Callable[[int, int], tuple[int, int] | None]
    replicas: int = 1

    def held(self, rank: int) -> tuple[Held, ...]:
        """Parts of the parameters on `rank`, in the order of its flat buffer."""
        parts: list[Held] = []
        start = 0
        for layer in self.layers_of(rank):
            columns = self.columns_of(layer, rank)
            for place, spec in enumerate(self.model.layers[layer].parameters):
                name, shape = f"layers.{layer}.{spec.name}", spec.shard(columns)
                parts.append(Held(name, layer, place, shape, columns, start, self.replicas))
                start = parts[-1].stop
        return tuple(parts)

    def numel(self, rank: int) -> int:
        """Parameters that `rank` holds."""
        held = self.held(rank)
        return held[-1].stop if held else 0

    def role_bytes(self, rank: int, role: str, optimizer_slots: int = 0, step_counters: int = 0) -> int:
        """Bytes of one role on `rank`.

        `optimizer_slots` is how many values the optimizer keeps per parameter (momentum 1, AdamW 2),
        `step_counters` how many step counters besides.
        """
        own = self.numel(rank) * ITEMSIZE[self.dtype]
        if role == OPTIMIZER_STATE:
            return own * optimizer_slots + step_counters * STEP_COUNTER_BYTES
        return own

"""A plug-in model whose layers sleep instead of computing, so that more ranks than cores can be busy at once.

plugins=[tests.sleeping] model.name=sleeping +model.options={num_layers:4,per_row_s:1e-4}
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from models.block import Block, Context, JointBlock, LayerSpec, Model, ParameterSpec, Saved


@dataclass(frozen=True)
class Sleeps:
    """Options of the model; seconds are those of a whole layer.

    Args:
        num_layers: equal layers.
        width: features between them; what goes in and comes out is the data's.
        parameters: of each layer, rounded down to a multiple of its width, at least that.
        fixed_s, per_row_s: a forward takes fixed_s + per_row_s * rows.
        input_ratio, weight_ratio: input and weight gradient, in forwards.
        joint: both gradients in one pass.
        slow_rank: this rank's sleeps are all `slow_factor` times as long.
    """

    num_layers: int = 4
    width: int = 4
    parameters: int = 4
    fixed_s: float = 0.0
    per_row_s: float = 0.0
    input_ratio: float = 1.0
    weight_ratio: float = 0.0
    joint: bool = False
    slow_rank: int | None = None
    slow_factor: float = 1.0


MOST_LATE_S = 1e-3


class SleepingBlock(Block):
    """Writes zeros, and sleeps as long as a layer, or its shard of the columns, would take.

    A timer is always late, and later where cores are busy. The next sleep is shorter by as much, so that they
    are right on average, as computing does not get longer by a constant.
    """

    def __init__(self, sleeps: Sleeps, share: float, gradient: Tensor) -> None:
        is_slow = os.environ.get("RANK", "0") == str(sleeps.slow_rank)
        factor = share * (sleeps.slow_factor if is_slow else 1.0)
        self.fixed_s, self.per_row_s = sleeps.fixed_s * factor, sleeps.per_row_s * factor
        self.sleeps, self.gradient = sleeps, gradient
        self.late_s = 0.0

    def forward(self, saved: Saved, context: Context) -> None:
        saved.output.zero_()
        self._sleep(saved.output.shape[1], 1.0)

    def backward_input(self, saved: Saved, gradient: Tensor, input_gradient: Tensor | None) -> None:
        if input_gradient is not None:
            input_gradient.zero_()
        self._sleep(gradient.shape[1], self.sleeps.input_ratio)

    def backward_weight(self, saved: Saved, gradient: Tensor, accumulate: bool) -> None:
        if not accumulate:
            self.gradient.zero_()
        self._sleep(gradient.shape[1], self.sleeps.weight_ratio)

    def _sleep(self, rows: int, ratio: float) -> None:
        if (seconds := (self.fixed_s + self.per_row_s * rows) * ratio) > 0 and rows:
            until = time.perf_counter() + seconds - self.late_s
            time.sleep(max(0.0, until - time.perf_counter()))
            self.late_s = min(MOST_LATE_S, time.perf_counter() - until)


class JointSleepingBlock(SleepingBlock, JointBlock):
    """Both gradients in one sleep."""

    def backward(
        self, saved: Saved, gradient: Tensor, input_gradient: Tensor | None, accumulate: bool
    ) -> None:
        if input_gradient is not None:
            input_gradient.zero_()
        if not accumulate:
            self.gradient.zero_()
        self._sleep(gradient.shape[1], self.sleeps.input_ratio + self.sleeps.weight_ratio)


class SleepingModel(Model):
    """A chain of sleeping layers. Activations are [features, rows]."""

    row_axis = 1

    def __init__(self, input_dim: int, output_dim: int, sleeps: Sleeps) -> None:
        self.sleeps = sleeps
        widths = [input_dim, *[sleeps.width] * (sleeps.num_layers - 1), output_dim]
        self.layers = tuple(
            LayerSpec(
                index,
                "sleeping",
                (widths[index],),
                (widths[index + 1],),
                (self._parameters(widths[index + 1]),),
                saves=("graph",) if sleeps.joint else (),  # what a joint backward reads
                forward_flops=0,
                splits_backward=not sleeps.joint,
                splits_columns=not sleeps.joint,
            )
            for index in range(sleeps.num_layers)
        )

    def _parameters(self, width: int) -> ParameterSpec:
        return ParameterSpec("weight", (width, max(1, self.sleeps.parameters // width)), column_axis=0)

    def initialize(
        self, layer: int, parameters: Mapping[str, Tensor], columns: tuple[int, int] | None, seed: int
    ) -> None:
        torch.nn.init.zeros_(parameters["weight"])

    def block(self, layer: int, parameters: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> Block:
        share = parameters["weight"].shape[0] / self.layers[layer].output_shape[0]
        kind = JointSleepingBlock if self.sleeps.joint else SleepingBlock
        return kind(self.sleeps, share, gradients["weight"])


def sleeping(input_shape: tuple[int, ...], output_dim: int, options: Mapping[str, Any]) -> SleepingModel:
    return SleepingModel(math.prod(input_shape), output_dim, Sleeps(**options))


MODELS = {"sleeping": sleeping}

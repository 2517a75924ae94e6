"""A plug-in model of modules that keep statistics of the batch, and draw numbers of their own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import nn

from models.autograd import AutogradModel


def normalized(input_shape: tuple[int, ...], output_dim: int, options: Mapping[str, Any]) -> AutogradModel:
    def first() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), 16))

    def middle() -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(16), nn.RReLU(), nn.Linear(16, 16))

    return AutogradModel([first, middle, middle, lambda: nn.Linear(16, output_dim)], input_shape)


MODELS = {"normalized": normalized}

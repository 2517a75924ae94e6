"""A split and a model of one's own: plugins=[my_splits] strategy=blocking model=residual."""

import math
from dataclasses import replace

from torch import nn

from models.autograd import AutogradModel
from strategies.communication import AllReduce, Wait
from strategies.ddp import DataParallel


class Blocking(DataParallel):
    """Data parallel that waits for each reduction where it starts: the difference is what overlap buys."""

    def schedule(self, model, world_size, rank, rows, task):
        plan = super().schedule(model, world_size, rank, rows, task)
        operations = [operation for operation in plan.operations if not isinstance(operation, Wait)]
        for place, operation in reversed(list(enumerate(operations))):
            if isinstance(operation, AllReduce):
                operations.insert(place + 1, Wait(operation.value))
        return replace(plan, operations=tuple(operations))


class Residual(nn.Sequential):
    def forward(self, x):
        return x + super().forward(x)


def residual(input_shape, output_dim, options):
    """Each layer is made by a function, on the ranks that hold it; options are those of conf/model."""
    width = options["width"]
    layers = [lambda: nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), width))]
    layers += [lambda: Residual(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())] * options["blocks"]
    return AutogradModel([*layers, lambda: nn.Linear(width, output_dim)], input_shape)


STRATEGIES = {"blocking": Blocking}
MODELS = {"residual": residual}

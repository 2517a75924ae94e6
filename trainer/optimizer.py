"""torch's own optimizers over slices of the flat buffer, fused, and the learning rate of each step."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from trainer.config import LrScheduleConfig, OptimizerConfig

SLOTS = {"sgd": 0, "adamw": 2}  # values kept per parameter; momentum makes it 1 for sgd


def optimizer_slots(config: OptimizerConfig) -> int:
    """Values that the optimizer keeps for each parameter."""
    return 1 if config.name == "sgd" and config.momentum else SLOTS[config.name]


def step_counters(config: OptimizerConfig) -> int:
    """Step counters that each optimizer keeps: AdamW has one."""
    return 1 if config.name == "adamw" else 0


class FlatOptimizer:
    """One optimizer on one contiguous part of a rank's flat buffers.

    Elementwise optimizers do not care where one tensor ends and the next begins, so one fused
    call over the flat part replaces one per tensor.
    """

    def __init__(self, parameters: Tensor, gradients: Tensor, config: OptimizerConfig) -> None:
        parameter = nn.Parameter(parameters)
        parameter.grad = gradients
        self.optimizer: torch.optim.Optimizer
        if config.name == "sgd":
            self.optimizer = torch.optim.SGD(
                [parameter],
                lr=config.lr,
                momentum=config.momentum,
                nesterov=config.nesterov,
                weight_decay=config.weight_decay,
                fused=True,
            )
        else:
            self.optimizer = torch.optim.AdamW(
                [parameter],
                lr=config.lr,
                betas=config.betas,
                eps=config.eps,
                weight_decay=config.weight_decay,
                fused=True,
            )
        self.parameter = parameter
        self.step = self.optimizer.step

    def set_learning_rate(self, value: float) -> None:
        self.optimizer.param_groups[0]["lr"] = value

    def state_tensors(self) -> list[Tensor]:
        """Everything the optimizer keeps, step counters included; empty before the first step."""
        state = self.optimizer.state[self.parameter]
        return [value for value in state.values() if isinstance(value, Tensor)]


def learning_rate(step: int, max_steps: int, base: float, config: LrScheduleConfig) -> float:
    """Learning rate of a step, counted from 0: linear warm-up, then constant, or half a cosine down.

    The cosine (Loshchilov & Hutter 2017, eq. 5 without restarts) falls from `base` on the first step after
    warm-up to `min_ratio * base` at `max_steps`.
    """
    if step < config.warmup_steps:
        return base * (step + 1) / config.warmup_steps
    if config.name == "constant":
        return base
    progress = min(1.0, (step - config.warmup_steps) / max(1, max_steps - config.warmup_steps))
    return base * (config.min_ratio + (1 - config.min_ratio) * 0.5 * (1 + math.cos(math.pi * progress)))

"""torch's own optimizers over slices of the flat buffer, fused, and the learning rate of each step."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

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
    call over the flat part replaces one per tensor. It is torch's functional form: the classes import
    torch's compiler when they are made, which takes each rank more than a second.
    """

    def __init__(self, parameters: Tensor, gradients: Tensor, config: OptimizerConfig) -> None:
        self.config, self.learning_rate = config, config.lr
        self.parameters, self.gradients = [parameters], [gradients]
        self._momenta: list[Tensor | None] = [None] if config.momentum else []
        self._means: list[Tensor] = []
        self._squares: list[Tensor] = []
        self._steps: list[Tensor] = []

    def step(self) -> None:
        """Update the parameters in place from the gradients."""
        with torch.no_grad():
            if self.config.name == "sgd":
                self._sgd()
            else:
                self._adamw()

    def _sgd(self) -> None:
        config = self.config
        sgd(
            self.parameters,
            self.gradients,
            self._momenta,
            fused=True,
            weight_decay=config.weight_decay,
            momentum=config.momentum,
            lr=self.learning_rate,
            dampening=0.0,
            nesterov=config.nesterov,
            maximize=False,
        )

    def _adamw(self) -> None:
        config = self.config
        if not self._steps:
            self._means, self._squares = ([torch.zeros_like(self.parameters[0])] for _ in range(2))
            self._steps = [torch.zeros((), dtype=torch.float32, device=self.parameters[0].device)]
        adamw(
            self.parameters,
            self.gradients,
            self._means,
            self._squares,
            [],
            self._steps,
            fused=True,
            amsgrad=False,
            beta1=config.betas[0],
            beta2=config.betas[1],
            lr=self.learning_rate,
            weight_decay=config.weight_decay,
            eps=config.eps,
            maximize=False,
        )

    def set_learning_rate(self, value: float) -> None:
        self.learning_rate = value

    def state_tensors(self) -> list[Tensor]:
        """Everything the optimizer keeps, step counters included; empty before the first step."""
        kept = [*self._momenta, *self._means, *self._squares, *self._steps]
        return [tensor for tensor in kept if tensor is not None]


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

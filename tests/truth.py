"""The independent reference: one process, nn.Sequential, autograd and torch's own optimizers; and the job
that trains the same under a split."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from collectives.group import World
from models.autograd import AutogradModel
from models.block import Model
from models.mlp import DeepMLP
from strategies.checker import check
from strategies.registry import make_strategy
from strategies.strategy import Options, Task
from trainer.config import OptimizerConfig
from trainer.executor import Rank

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "tanh": nn.Tanh,
    "identity": nn.Identity,
}


@dataclass(frozen=True)
class Case:
    """One training problem; `batches` are global row counts, one per step."""

    strategy: str = "single"
    options: Options = field(default_factory=Options)
    inputs: int = 12
    outputs: int = 5
    num_layers: int = 4
    hidden_dim: int = 16
    widths: tuple[int, ...] | None = None
    activation: str = "relu"
    bias: bool = True
    loss: str = "cross_entropy"
    dtype: str = "float64"
    optimizer: OptimizerConfig = field(default_factory=lambda: OptimizerConfig("sgd", lr=0.05, momentum=0.9))
    clip_norm: float | None = None
    batches: tuple[int, ...] = (12,) * 20
    seed: int = 3
    modules: bool = False  # the same layers as AutogradBlocks

    def model(self) -> Model:
        mlp = DeepMLP(
            self.inputs,
            self.outputs,
            self.num_layers,
            self.hidden_dim,
            self.widths,
            self.activation,
            self.bias,
        )
        return AutogradModel(layer_factories(self, mlp), (self.inputs,)) if self.modules else mlp

    def data(self) -> list[tuple[Tensor, Tensor]]:
        """Batches of inputs [rows, inputs] and targets, equal on every rank."""
        generator = np.random.default_rng(self.seed)
        dtype = getattr(torch, self.dtype)
        batches = []
        for rows in self.batches:
            inputs = torch.from_numpy(generator.normal(size=(rows, self.inputs))).to(dtype)
            if self.loss == "cross_entropy":
                targets = torch.from_numpy(generator.integers(0, self.outputs, rows))
            else:
                targets = torch.from_numpy(generator.normal(size=(rows, self.outputs))).to(dtype)
            batches.append((inputs, targets))
        return batches


def layer_factories(case: Case, mlp: DeepMLP) -> list[Any]:
    def factory(index: int) -> nn.Module:
        spec = mlp.layers[index]
        linear = nn.Linear(spec.input_shape[0], spec.output_shape[0], bias=case.bias)
        return nn.Sequential(linear, ACTIVATIONS[mlp.activations[index]]())

    return [lambda index=index: factory(index) for index in range(len(mlp.layers))]


def initial_parameters(case: Case) -> dict[str, Tensor]:
    """The full model's parameters, each layer filled whole."""
    model = case.model()
    dtype = getattr(torch, case.dtype)
    parameters: dict[str, Tensor] = {}
    for layer in model.layers:
        views = {spec.name: torch.zeros(spec.shape, dtype=dtype) for spec in layer.parameters}
        model.initialize(layer.index, views, None, case.seed)
        parameters.update({f"layers.{layer.index}.{name}": view for name, view in views.items()})
    return parameters


def reference(case: Case) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of all steps and final parameters, by autograd in one process."""
    mlp = DeepMLP(
        case.inputs, case.outputs, case.num_layers, case.hidden_dim, case.widths, case.activation, case.bias
    )
    modules = nn.ModuleList(factory() for factory in layer_factories(case, mlp)).to(
        getattr(torch, case.dtype)
    )
    names = {}
    initial = initial_parameters(case)
    for index, module in enumerate(modules):
        for name, parameter in module.named_parameters():
            key = f"layers.{index}.{name if case.modules else name.split('.')[-1]}"
            names[key] = parameter
            parameter.data.copy_(initial[key])
    network = nn.Sequential(*modules)
    config = case.optimizer
    optimizer: torch.optim.Optimizer
    if config.name == "sgd":
        optimizer = torch.optim.SGD(
            network.parameters(), config.lr, config.momentum, 0, config.weight_decay, config.nesterov
        )
    else:
        optimizer = torch.optim.AdamW(
            network.parameters(), config.lr, config.betas, config.eps, config.weight_decay
        )
    criterion: nn.Module = nn.CrossEntropyLoss() if case.loss == "cross_entropy" else nn.MSELoss()
    losses = []
    for inputs, targets in case.data():
        optimizer.zero_grad()
        loss = criterion(network(inputs), targets)
        loss.backward()
        if case.clip_norm is not None:
            nn.utils.clip_grad_norm_(network.parameters(), case.clip_norm)
        optimizer.step()
        losses.append(float(loss))
    return losses, {name: parameter.detach() for name, parameter in names.items()}


def train(world: World, case: Case) -> dict[str, Any]:
    """Job: train under the case's split. Loss shares, parts of the parameters, and counted bytes by step."""
    torch.manual_seed(0)
    strategy = make_strategy(case.strategy, case.options)
    model = case.model()
    strategy.check(model, world.size, max(case.batches))
    task = Task(case.loss, case.dtype, case.clip_norm is not None)
    for rows in sorted(set(case.batches)):
        check([strategy.schedule(model, world.size, r, rows, task) for r in range(world.size)])
    rank = Rank(
        model, strategy, world, task, case.optimizer, case.seed, sorted(set(case.batches)), (), case.clip_norm
    )
    shares, sent, predicted = [], [], []
    for step, (inputs, targets) in enumerate(case.data()):
        program = rank.program(len(inputs))
        start, stop = strategy.rows_of(world.size, world.rank, len(inputs))
        wants_inputs, wants_targets = strategy.takes(world.size, world.rank)
        program.load(
            inputs[start:stop] if wants_inputs else None, targets[start:stop] if wants_targets else None
        )
        rank.loss_total.zero_()
        before = rank.ledger.by_label()
        program.run(step)
        shares.append(float(rank.loss_total))
        after = rank.ledger.by_label()
        step_sent = {label: count - before.get(label, (0, 0))[1] for label, (_, count) in after.items()}
        sent.append({label: count for label, count in step_sent.items() if count})
        table = strategy.bytes_predicted(model, world.size, world.rank, len(inputs), task)
        predicted.append({label: count for label, count in table.items() if count})
    parts = [
        (part.name, part.columns, rank.parameter_views[part.layer][part.place].clone().numpy())
        for part in rank.held
    ]
    return {
        "shares": shares,
        "parts": parts,
        "sent": sent,
        "predicted": predicted,
        "role_bytes": rank.role_bytes(),
    }


def assemble(case: Case, results: list[dict[str, Any]]) -> tuple[list[float], dict[str, Tensor]]:
    """Losses summed over ranks and whole parameters put together from the ranks' parts."""
    losses = [sum(shares) for shares in zip(*(result["shares"] for result in results), strict=True)]
    whole = {name: torch.full_like(value, float("nan")) for name, value in initial_parameters(case).items()}
    for result in results:
        for name, columns, part in result["parts"]:
            rows = slice(*columns) if columns is not None else slice(None)
            whole[name][rows] = torch.from_numpy(part)
    return losses, whole


def worst_difference(case: Case, results: list[dict[str, Any]]) -> float:
    """Largest relative difference to the reference: every loss, and per tensor max|a-b| / max|b|."""
    losses, parameters = assemble(case, results)
    expected_losses, expected = reference(case)
    worst = max(abs(a - b) / abs(b) for a, b in zip(losses, expected_losses, strict=True))
    assert parameters.keys() == expected.keys()
    for name, value in expected.items():
        scale = float(value.abs().max())
        if value.numel():
            difference = float((parameters[name] - value).abs().max())
            worst = max(worst, difference / scale if scale else difference)
    return worst


__all__ = ["Case", "OptimizerConfig", "Options", "replace", "train", "worst_difference"]

"""The independent reference: one process, nn.Sequential, autograd and torch's own optimizers; and the job
that trains the same under a split."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from collectives.group import World
from collectives.traffic import algorithms_of
from models.autograd import AutogradModel
from models.block import Model
from models.mlp import DeepMLP
from strategies.checker import check
from strategies.registry import make_strategy
from strategies.strategy import Options, Strategy, Task
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
    options: Options = field(default_factory=Options, hash=False)  # it holds a dict
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
    algorithm: str = "auto"  # of the collectives: auto, native, direct

    @property
    def task(self) -> Task:
        algorithms = algorithms_of("gloo", self.algorithm)
        return Task(self.loss, self.dtype, self.clip_norm is not None, algorithms)

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    def make_strategy(self) -> Strategy:
        return make_strategy(self.strategy, self.options)

    def mlp(self) -> DeepMLP:
        return DeepMLP(
            self.inputs,
            self.outputs,
            self.num_layers,
            self.hidden_dim,
            self.widths,
            self.activation,
            self.bias,
        )

    def model(self) -> Model:
        mlp = self.mlp()
        return AutogradModel(layer_factories(self, mlp), (self.inputs,)) if self.modules else mlp

    def data(self) -> list[tuple[Tensor, Tensor]]:
        """Batches of inputs [rows, inputs] and targets, equal on every rank."""
        generator = np.random.default_rng(self.seed)
        batches = []
        for rows in self.batches:
            inputs = torch.from_numpy(generator.normal(size=(rows, self.inputs))).to(self.torch_dtype)
            if self.loss == "cross_entropy":
                targets = torch.from_numpy(generator.integers(0, self.outputs, rows))
            else:
                targets = torch.from_numpy(generator.normal(size=(rows, self.outputs))).to(self.torch_dtype)
            batches.append((inputs, targets))
        return batches

    def rank(self, world: World) -> Rank:
        """This rank's state, its schedules checked."""
        strategy, model = self.make_strategy(), self.model()
        sizes = sorted(set(self.batches))
        strategy.check(model, world.size, max(sizes))
        for rows in sizes:
            check([strategy.schedule(model, world.size, r, rows, self.task) for r in range(world.size)])
        return Rank(model, strategy, world, self.task, self.optimizer, self.seed, sizes, (), self.clip_norm)


def layer_factories(case: Case, mlp: DeepMLP) -> list[Any]:
    def factory(index: int) -> nn.Module:
        spec = mlp.layers[index]
        linear = nn.Linear(spec.input_shape[0], spec.output_shape[0], bias=case.bias)
        return nn.Sequential(linear, ACTIVATIONS[mlp.activations[index]]())

    return [lambda index=index: factory(index) for index in range(len(mlp.layers))]


def _problem(case: Case) -> Case:
    """What a case trains, whatever splits it."""
    return replace(case, strategy="single", options=Options(), algorithm="auto")


def initial_parameters(case: Case) -> dict[str, Tensor]:
    """The full model's parameters, each layer filled whole. Cached: do not write to them."""
    return _initial_parameters(_problem(case))


@lru_cache(maxsize=1024)
def _initial_parameters(case: Case) -> dict[str, Tensor]:
    model = case.model()
    parameters: dict[str, Tensor] = {}
    for layer in model.layers:
        views = {spec.name: torch.zeros(spec.shape, dtype=case.torch_dtype) for spec in layer.parameters}
        model.initialize(layer.index, views, None, case.seed)
        parameters.update({f"layers.{layer.index}.{name}": view for name, view in views.items()})
    return parameters


@dataclass(frozen=True)
class Trained:
    """What training leaves behind: losses and gradient norms (where clipped) by step, final parameters."""

    losses: list[float]
    norms: list[float]
    parameters: dict[str, Tensor]


def reference(case: Case) -> Trained:
    """The truth of a case, by autograd in one process. Cached: do not write to it."""
    return _reference(_problem(case))


@lru_cache(maxsize=1024)
def _reference(case: Case) -> Trained:
    modules = nn.ModuleList(factory() for factory in layer_factories(case, case.mlp())).to(case.torch_dtype)
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
    losses, norms = [], []
    for inputs, targets in case.data():
        optimizer.zero_grad()
        loss = criterion(network(inputs), targets)
        loss.backward()
        if case.clip_norm is not None:
            norms.append(float(nn.utils.clip_grad_norm_(network.parameters(), case.clip_norm)))
        optimizer.step()
        losses.append(float(loss.detach()))
    return Trained(losses, norms, {name: parameter.detach() for name, parameter in names.items()})


@torch.no_grad()
def train(world: World, case: Case, keep_parameters: bool = True) -> dict[str, Any]:
    """Job: train under the case's split. Loss shares, parts of the parameters, and counted bytes by step."""
    rank = case.rank(world)
    strategy = rank.strategy
    shares, norms, sent, predicted = [], [], [], []
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
        norms.append(float(rank.gradient_norm))
        after = rank.ledger.by_label()
        step_sent = {label: count - before.get(label, (0, 0))[1] for label, (_, count) in after.items()}
        sent.append({label: count for label, count in step_sent.items() if count})
        table = strategy.bytes_predicted(rank.model, world.size, world.rank, len(inputs), rank.task)
        predicted.append({label: count for label, count in table.items() if count})
    return {
        "shares": shares,
        "norms": norms,
        "parts": held_parts(rank) if keep_parameters else [],
        "sent": sent,
        "predicted": predicted,
        "role_bytes": rank.role_bytes(),
    }


def held_parts(rank: Rank) -> list[tuple[str, tuple[int, int] | None, np.ndarray]]:
    """(name, output columns or None, values) of every parameter that the rank holds."""
    return [
        (part.name, part.columns, rank.parameter_views[part.layer][part.place].clone().numpy())
        for part in rank.held
    ]


def assemble(case: Case, results: list[dict[str, Any]]) -> Trained:
    """Losses summed over ranks and whole parameters put together from the ranks' parts."""
    losses = [sum(shares) for shares in zip(*(result["shares"] for result in results), strict=True)]
    whole = {name: torch.full_like(value, float("nan")) for name, value in initial_parameters(case).items()}
    for result in results:
        for name, columns, part in result["parts"]:
            rows = slice(*columns) if columns is not None else slice(None)
            whole[name][rows] = torch.from_numpy(part)
    return Trained(losses, results[0]["norms"], whole)


def worst_difference(case: Case, results: list[dict[str, Any]]) -> float:
    """Largest relative difference to the reference: every loss, every gradient norm of every rank where
    gradients are clipped, and per tensor max|a-b| / max|b|. NaN anywhere makes it infinite."""
    trained, expected = assemble(case, results), reference(case)
    pairs = list(zip(trained.losses, expected.losses, strict=True))
    if case.clip_norm is not None:
        for result in results:
            pairs += zip(result["norms"], expected.norms, strict=True)
    differences = [abs(a - b) / abs(b) for a, b in pairs]
    assert trained.parameters.keys() == expected.parameters.keys()
    for name, value in expected.parameters.items():
        if value.numel():
            scale = float(value.abs().max())
            difference = float((trained.parameters[name] - value).abs().max())
            differences.append(difference / scale if scale else difference)
    return max(d if d == d else float("inf") for d in differences)


__all__ = ["Case", "OptimizerConfig", "Options", "Trained", "replace", "train", "worst_difference"]

"""From a configuration to what will run: data, model, strategy and task, checked before anything starts."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from collectives.choice import refuse_uneven
from collectives.group import choose_backend
from collectives.traffic import algorithms_of
from models.block import Model
from models.mlp import DeepMLP
from strategies.checker import check
from strategies.communication import AllGather, ReduceScatter
from strategies.registry import make_strategy
from strategies.schedule import Schedule
from strategies.strategy import Options, Strategy, Task
from trainer.config import InputError, RunConfig
from trainer.data import DataSpec, describe, steps_per_epoch
from trainer.device import choose_device
from trainer.whatif import Change, changes

if TYPE_CHECKING:
    from collections.abc import Iterator

ModelFactory = Callable[[tuple[int, ...], int, Mapping[str, Any]], Model]


@dataclass(frozen=True)
class Plan:
    """What all ranks agree on."""

    config: RunConfig
    world_size: int
    data: DataSpec
    model: Model
    strategy: Strategy
    task: Task
    backend: str
    device_type: str

    @property
    def batch_rows(self) -> tuple[int, ...]:
        """Global rows of the training batches that the run will meet, largest first."""
        size, rows = self.config.data.batch_size, self.data.train_rows
        sizes = [size] if rows >= size else []
        per_epoch = steps_per_epoch(rows, size, self.config.data.drop_last)
        meets_last = self.config.trainer.max_steps >= per_epoch
        if rows % size and not self.config.data.drop_last and (meets_last or not sizes):
            sizes.append(rows % size)
        return tuple(sizes)

    @property
    def eval_rows(self) -> tuple[int, ...]:
        """Global rows of the evaluation batches."""
        size, rows = self.config.data.batch_size, self.data.eval_rows
        sizes = [size] if rows >= size else []
        return tuple([*sizes, rows % size] if rows % size else sizes)

    @property
    def is_pipeline(self) -> bool:
        """Whether ranks are stages, which idle where others wait."""
        return self.strategy.bubble_expected(self.world_size, self.config.data.batch_size) is not None

    @cached_property
    def changes(self) -> tuple[Change, ...]:
        """What could be changed in it; see `trainer.whatif.changes`."""
        return tuple(changes(self))

    def schedules(self, rows: int, training: bool = True) -> list[Schedule]:
        """Schedules of all ranks for a batch of `rows` global rows."""
        make = self.strategy.schedule if training else self.strategy.evaluation
        return [make(self.model, self.world_size, rank, rows, self.task) for rank in range(self.world_size)]

    def check_schedules(self) -> None:
        """
        Raises:
            InputError: schedules that would hang or corrupt, or that the chosen algorithm cannot run.
        """
        with wrong_input():
            for training, sizes in ((True, self.batch_rows), (False, self.eval_rows)):
                for rows in sizes:
                    schedules = self.schedules(rows, training)
                    check(schedules)
                    self._check_algorithms(schedules[0])

    def _check_algorithms(self, schedule: Schedule) -> None:
        for operation in schedule.operations:
            if not isinstance(operation, AllGather | ReduceScatter):
                continue
            if getattr(self.task.algorithms, operation.verb) != "direct":
                refuse_uneven(operation.verb, operation.sizes)


def make_plan(config: RunConfig, world_size: int) -> Plan:
    """Build and check the plan; reads no data beyond headers.

    Raises:
        InputError: anything in the configuration that cannot run.
    """
    plugins = load_plugins(config.plugins)
    device_type = choose_device(config.trainer.device, config.collectives.backend)
    with wrong_input():
        backend = choose_backend(config.collectives.backend, torch.device(device_type))
    data = describe(config.data, seed=config.seed, hidden_dim=config.model.hidden_dim)
    with wrong_input():
        model = build_model(config, data, plugins)
        strategy = make_strategy(
            config.strategy.name, strategy_options(config), _collect(plugins, "STRATEGIES")
        )
        strategy.check(model, world_size, config.data.batch_size)
    task = Task(
        loss=choose_loss(config.trainer.loss, data.task),
        dtype=config.trainer.dtype,
        clips=config.trainer.clip_grad_norm is not None,
        algorithms=algorithms_of(backend, config.collectives.algorithm),
    )
    return Plan(config, world_size, data, model, strategy, task, backend, device_type)


@contextmanager
def wrong_input() -> Iterator[None]:
    """What models, strategies and collectives refuse is wrong input of the user."""
    try:
        yield
    except InputError:
        raise
    except ValueError as error:
        raise InputError(str(error)) from error


def strategy_options(config: RunConfig) -> Options:
    own = config.strategy
    return Options(
        own.microbatches,
        own.schedule,
        own.partition,
        own.overlap,
        own.bucket_mb,
        own.backward,
        dict(own.options),
    )


def load_plugins(names: Sequence[str]) -> list[Any]:
    """The user's declared modules, imported.

    Raises:
        InputError: a module that cannot be imported.
    """
    modules = []
    for name in names:
        try:
            modules.append(importlib.import_module(name))
        except ImportError as error:
            raise InputError(
                f"plugins={name} cannot be imported ({error}); give a module that Python finds, "
                "for example with its folder on PYTHONPATH"
            ) from error
    return modules


def _collect(plugins: Sequence[Any], attribute: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for module in plugins:
        found.update(getattr(module, attribute, {}))
    return found


def build_model(config: RunConfig, data: DataSpec, plugins: Sequence[Any]) -> Model:
    """The built-in MLP, or a plug-in's model from its `MODELS`.

    Raises:
        ValueError: an unknown model, sizes that are wrong, or an output that does not fit the data.
    """
    own = config.model
    if own.name == "mlp":
        return DeepMLP(
            math.prod(data.input_shape),
            data.output_dim,
            own.num_layers,
            own.hidden_dim,
            own.widths,
            own.activation,
            own.bias,
        )
    models = _collect(plugins, "MODELS")
    if own.name not in models:
        valid = ", ".join(["mlp", *models])
        raise ValueError(f"model={own.name} is unknown; valid are {valid}")
    build: ModelFactory = models[own.name]
    model = build(data.input_shape, data.output_dim, own.options)
    if not isinstance(model, Model):
        raise ValueError(
            f"model={own.name}: its function in MODELS returned a {type(model).__name__}; it must return a "
            "models.block.Model, such as models.autograd.AutogradModel of functions that make modules"
        )
    outputs = math.prod(model.output_shape)
    if outputs != data.output_dim:
        raise ValueError(
            f"model={own.name} has {outputs} outputs where data={config.data.name} needs {data.output_dim}"
        )
    return model


def choose_loss(choice: str, task: str) -> str:
    """`trainer.loss` resolved for the data's task.

    Raises:
        InputError: a loss that the data's targets cannot feed.
    """
    natural = "cross_entropy" if task == "classification" else "mse"
    if choice not in ("auto", natural):
        raise InputError(f"trainer.loss={choice} does not fit {task} data; use {natural} or auto")
    return natural

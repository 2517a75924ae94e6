"""One rank's memory, blocks and optimizers, and the programs that run on them.

The executor does not know which split is on: it binds whatever schedule the strategy gives.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from collectives.gloo_traffic import ring_all_reduce_bytes
from collectives.group import Group, World
from collectives.ledger import Ledger
from collectives.observer import Observer
from collectives.traffic import ITEMSIZE
from models.block import Block, Model, torch_dtype
from strategies.compute import Update
from strategies.layout import GRADIENT, OPTIMIZER_STATE, PARAMETER, Held
from strategies.memory import lay_out
from strategies.schedule import Schedule
from strategies.strategy import Strategy, Task
from strategies.values import Value
from trainer.binding import Binder
from trainer.config import OptimizerConfig
from trainer.optimizer import FlatOptimizer
from trainer.program import Call, Program
from trainer.stopwatch import make_stopwatch

CLIP_EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_ has it


class Rank:
    """State of one rank, cut by its layout.

    Args:
        batch_rows: global rows of every training batch that may come (full and last), for the arena.
        eval_rows: the same for evaluation.
        clip_norm: largest global gradient norm, or None.
    """

    def __init__(
        self,
        model: Model,
        strategy: Strategy,
        world: World,
        task: Task,
        optimizer: OptimizerConfig,
        seed: int,
        batch_rows: Sequence[int],
        eval_rows: Sequence[int] = (),
        clip_norm: float | None = None,
        profile: bool = False,
    ) -> None:
        self.model, self.strategy, self.world, self.task = model, strategy, world, task
        self.seed, self.clip_norm, self.profile = seed, clip_norm, profile
        self.device, self.dtype = world.device, torch_dtype(task.dtype)
        self.ledger, self.evaluation_ledger = Ledger(), Ledger()
        self.observer, self.stopwatch = Observer(), make_stopwatch(world.device)
        self.layout = strategy.layout(model, world.size, task.dtype)
        self.held = self.layout.held(world.rank)
        self._open_groups()

        count = self.layout.numel(world.rank)
        self.parameters = torch.zeros(count, dtype=self.dtype, device=self.device)
        self.gradients = torch.zeros(count, dtype=self.dtype, device=self.device)
        self.gradient_views = _by_layer(self.held, self.gradients)
        self.parameter_views = _by_layer(self.held, self.parameters)
        self.blocks = self._build_blocks()

        self.loss_total = torch.zeros((), dtype=torch.float64, device=self.device)
        self.correct_total = torch.zeros((), dtype=torch.int64, device=self.device)
        self.gradient_norm = torch.full((1,), math.nan, dtype=torch.float64, device=self.device)
        self._norm = torch.zeros((), dtype=self.dtype, device=self.device)
        self._clip = torch.ones((), dtype=torch.float64, device=self.device)

        self._optimizer_config = optimizer
        self.optimizers: dict[tuple[int, int], FlatOptimizer] = {}
        self._programs: dict[tuple[bool, int], Program] = {}
        schedules = [self.schedule(rows, training=True) for rows in batch_rows]
        schedules += [self.schedule(rows, training=False) for rows in eval_rows]
        arena_bytes = max(lay_out(schedule, model).total_bytes for schedule in schedules)
        self.arena = torch.zeros(arena_bytes, dtype=torch.uint8, device=self.device)
        self.control_bytes = self._norm_bytes()

    # Programs

    def schedule(self, rows: int, training: bool) -> Schedule:
        """This rank's schedule for a batch of `rows` global rows."""
        make = self.strategy.schedule if training else self.strategy.evaluation
        return make(self.model, self.world.size, self.world.rank, rows, self.task)

    def program(self, rows: int, training: bool = True) -> Program:
        """The bound schedule, made on the first batch of this size."""
        key = (training, rows)
        if key not in self._programs:
            start, _ = self.strategy.rows_of(self.world.size, self.world.rank, rows)
            binder = Binder(self, self.schedule(rows, training), training, start)
            self._programs[key] = binder.bind(self.profile)
        return self._programs[key]

    # Memory

    def arena_view(self, offset_bytes: int, shape: tuple[int, ...]) -> Tensor:
        """Activation memory as a tensor of the run's dtype."""
        size = math.prod(shape) * ITEMSIZE[self.task.dtype]
        return self.arena[offset_bytes : offset_bytes + size].view(self.dtype).view(shape)

    def gradient_range(self, first: Value, numel: int) -> Tensor:
        """`numel` elements of the flat gradients, from where the value `first` begins."""
        start = next(
            part.start for part in self.held if (part.layer, part.place) == (first.layer, first.place)
        )
        return self.gradients[start : start + numel]

    def role_bytes(self) -> dict[str, int]:
        """Bytes of the tensors that live, by the layout's roles; optimizer state from the first step on."""
        state = [tensor for optimizer in self.optimizers.values() for tensor in optimizer.state_tensors()]
        return {
            PARAMETER: self.parameters.nbytes,
            GRADIENT: self.gradients.nbytes,
            OPTIMIZER_STATE: sum(tensor.nbytes for tensor in state),
        }

    def _build_blocks(self) -> dict[int, Block]:
        blocks: dict[int, Block] = {}
        for layer in self.layout.layers_of(self.world.rank):
            specs = self.model.layers[layer].parameters
            names = [spec.name for spec in specs]
            parameters = dict(zip(names, self.parameter_views.get(layer, ()), strict=True))
            gradients = dict(zip(names, self.gradient_views.get(layer, ()), strict=True))
            columns = self.layout.columns_of(layer, self.world.rank)
            self.model.initialize(layer, parameters, columns, self.seed)
            blocks[layer] = self.model.block(layer, parameters, gradients)
        return blocks

    # Groups

    def _open_groups(self) -> None:
        """All ranks make the same groups in the same order, before any is used."""
        everyone = range(self.world.size)
        self.world.group("world", everyone)
        if self.world.backend == "nccl":
            # A posted nccl receive occupies its communicator's stream until its send comes: with both
            # directions on one communicator, two stages that wait for each other would deadlock.
            self.world.group("upward", everyone)
            self.world.group("downward", everyone)

    def channel(self, upward: bool) -> Group:
        """The group that carries messages to higher ranks, or to lower ones."""
        name = "world" if self.world.backend == "gloo" else ("upward" if upward else "downward")
        return self.world.group(name, range(self.world.size))

    # Norm and update

    def _norm_bytes(self) -> int:
        """What the norm sends on the control group in a step."""
        if not self.task.clips or not self.norm_crosses:
            return 0
        return ring_all_reduce_bytes(1, 8, self.world.size, self.world.rank)

    @property
    def norm_crosses(self) -> bool:
        """Replicas have the whole norm each; shards and stages have a part of it."""
        return self.world.size > 1 and self.layout.replicas < self.world.size

    def own_norm(self) -> None:
        torch.linalg.vector_norm(self.gradients, out=self._norm)
        self.gradient_norm.copy_(self._norm)

    def share_norm(self) -> None:
        """From the norms of all ranks' parts to that of the whole."""
        self.gradient_norm.square_()
        self.world.sum_on_control(self.gradient_norm)
        self.gradient_norm.sqrt_()

    def scale_gradients(self) -> None:
        """Scale all gradients so that their global norm is at most `clip_norm`, as clip_grad_norm_ does."""
        assert self.clip_norm is not None
        torch.add(self.gradient_norm[0], CLIP_EPSILON, out=self._clip)
        self._clip.reciprocal_().mul_(self.clip_norm).clamp_(max=1.0)
        self.gradients.mul_(self._clip)

    def clip_gradients(self) -> None:
        """Norm and scaling where no other rank has a part of the norm."""
        self.own_norm()
        self.scale_gradients()

    def update_of(self, operation: Update) -> Call:
        """The optimizer step on these layers' part of the flat buffer; one optimizer per part."""
        layers = {layer.index for layer in operation.layers}
        parts = [part for part in self.held if part.layer in layers]
        if not parts:
            return _nothing
        key = (parts[0].start, parts[-1].stop)
        assert sum(part.numel for part in parts) == key[1] - key[0], "layers of one update lie together"
        if key not in self.optimizers:
            rows = slice(*key)
            self.optimizers[key] = FlatOptimizer(
                self.parameters[rows], self.gradients[rows], self._optimizer_config
            )
        return self.optimizers[key].step

    def set_learning_rate(self, value: float) -> None:
        for optimizer in self.optimizers.values():
            optimizer.set_learning_rate(value)

    def named_parameters(self) -> dict[str, Tensor]:
        """This rank's part of every parameter it holds."""
        return {part.name: self.parameter_views[part.layer][part.place] for part in self.held}


def _by_layer(held: Sequence[Held], flat: Tensor) -> dict[int, list[Tensor]]:
    views: dict[int, list[Tensor]] = {}
    for part in held:
        views.setdefault(part.layer, []).append(flat[part.start : part.stop].view(part.shape))
    return views


def _nothing() -> None:
    """Layers without parameters have no update."""

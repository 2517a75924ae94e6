"""What a comparison is about: the request, one problem, the face of a contender, and ours."""

from __future__ import annotations

import abc
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from collectives.group import World
from models.block import even_parts
from models.mlp import DeepMLP
from strategies.checker import check
from strategies.registry import make_strategy
from strategies.strategy import Options, Task
from trainer.config import InputError, OptimizerConfig
from trainer.executor import Rank

FAMILIES = ("ddp", "tensor", "pipeline")
LEARNING_RATE = 0.01


@dataclass(frozen=True)
class Setting:
    """A deep MLP of `layers` square layers of `width`, the global `batch`, the pipelines' `microbatches`."""

    layers: int
    width: int
    batch: int
    microbatches: int

    def __str__(self) -> str:
        return f"{self.layers},{self.width},{self.batch},{self.microbatches}"


@dataclass(frozen=True)
class Request:
    """What to compare. `burst` is how many steps a contender takes in its turn, `schedule` our pipeline's."""

    settings: tuple[Setting, ...] = (Setting(8, 1024, 256, 4), Setting(8, 512, 256, 8))
    families: tuple[str, ...] = FAMILIES
    ranks: int = 2
    rounds: int = 30
    warmup: int = 5
    burst: int = 1
    schedule: str = "1f1b"
    seed: int = 0

    def check(self) -> None:
        """
        Raises:
            InputError: sizes that some contender cannot do, or cannot do as the others do.
        """
        for setting in self.settings:
            self._check(setting)

    def _check(self, setting: Setting) -> None:
        divided = {"ddp": ("batch", setting.batch), "tensor": ("width", setting.width)}
        for family, (name, size) in divided.items():
            if family in self.families and size % self.ranks:
                raise InputError(
                    f"--setting={setting} has a {name} of {size}; give one that {self.ranks} ranks divide"
                )
        if "pipeline" not in self.families:
            return
        if self.ranks > setting.layers:
            raise InputError(f"--setting={setting} has too few layers; give each of {self.ranks} ranks one")
        if setting.batch % setting.microbatches or setting.microbatches < self.ranks:
            raise InputError(
                f"--setting={setting} has {setting.microbatches} microbatches; torch's pipelines need at "
                f"least {self.ranks}, one for each rank, and that divide the batch of {setting.batch}"
            )


class Problem:
    """One setting on one rank: the same model, batch and initial weights for every contender.

    Linear layers without bias, relu between them, mean squared error against fixed random targets, float32.
    """

    def __init__(self, setting: Setting, world: World, seed: int) -> None:
        self.setting, self.world, self.seed = setting, world, seed
        self.model = DeepMLP(setting.width, setting.width, setting.layers, setting.width, bias=False)
        generator = torch.Generator().manual_seed(seed)
        self.inputs, self.targets = torch.randn(2, setting.batch, setting.width, generator=generator)
        self.stages = even_parts(setting.layers, world.size)

    @property
    def rows(self) -> slice:
        """This rank's rows of the batch under data parallel."""
        return slice(*even_parts(self.setting.batch, self.world.size)[self.world.rank])

    def network(self, layers: Iterable[int], inplace: bool = True) -> nn.Sequential:
        """These layers as torch's modules `linear<i>` and `relu<i>`, with our initial weights.

        An `inplace` relu saves memory and time, where what splits the linear layers admits it.
        """
        network = nn.Sequential()
        for layer in layers:
            linear = nn.Linear(self.setting.width, self.setting.width, bias=False)
            self.model.initialize(layer, {"weight": linear.weight.data}, None, self.seed)
            network.add_module(f"linear{layer}", linear)
            if layer < self.setting.layers - 1:
                network.add_module(f"relu{layer}", nn.ReLU(inplace))
        return network


class Contender(abc.ABC):
    """One implementation of one split. Those of equal `family` and `name` are tuned down to the fastest.

    `tuning` says in words what is particular to this candidate.
    """

    family: str
    name: str
    is_ours = False
    tuning = ""

    @abc.abstractmethod
    def step(self) -> None:
        """One training step on the problem's batch, complete on return."""

    @abc.abstractmethod
    def gradients(self) -> dict[int, Tensor]:
        """Layer -> whole weight gradient [out, in] of the last step, for the layers that this rank holds."""


class OurSplit(Contender):
    """One of our strategies, run as the training loop runs it, with its optimizer."""

    is_ours = True

    def __init__(self, problem: Problem, family: str, options: Options, tuning: str = "") -> None:
        self.problem, self.family, self.tuning = problem, family, tuning
        self.name = f"ours, {options.schedule}" if family == "pipeline" else "ours"
        world, rows = problem.world, problem.setting.batch
        if family == "pipeline":
            options = replace(options, microbatches=problem.setting.microbatches)
        strategy, task = make_strategy(family, options), Task("mse", "float32")
        strategy.check(problem.model, world.size, rows)
        check([strategy.schedule(problem.model, world.size, rank, rows, task) for rank in range(world.size)])
        optimizer = OptimizerConfig("sgd", lr=LEARNING_RATE)
        self.rank = Rank(problem.model, strategy, world, task, optimizer, problem.seed, [rows])
        self.program = self.rank.program(rows)
        wants_inputs, wants_targets = strategy.takes(world.size, world.rank)
        own = slice(*strategy.rows_of(world.size, world.rank, rows))
        self.inputs = problem.inputs[own] if wants_inputs else None
        self.targets = problem.targets[own] if wants_targets else None
        self.steps = 0

    def step(self) -> None:
        with torch.no_grad():
            self.rank.loss_total.zero_()
            self.program.load(self.inputs, self.targets)
            self.program.run(self.steps)
        self.steps += 1

    def gradients(self) -> dict[int, Tensor]:
        return {part.layer: self._whole(self.rank.gradient_views[part.layer][0]) for part in self.rank.held}

    def _whole(self, part: Tensor) -> Tensor:
        width = self.problem.setting.width
        if part.shape[0] == width:
            return part.clone()
        whole = torch.empty(width, width)
        dist.all_gather(list(whole.chunk(self.problem.world.size)), part)
        return whole

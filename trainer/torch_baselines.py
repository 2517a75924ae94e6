"""What torch itself offers for each split, set up as its documentation says, with what makes it fast.

All compute the same step: forward, mean squared error over the whole batch, backward, plain SGD. Each
is a user's program around torch's own class, and nothing of ours runs in it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from trainer.contenders import LEARNING_RATE, Contender, Problem

MIB = 2**20
PIPELINE_SCHEDULES: dict[str, Any] = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}


class TorchDDP(Contender):
    """DistributedDataParallel: gradients as views of its buckets, static graph, fused optimizer.

    `buckets` is how many it cuts the gradients into; `batched_copy` fills a bucket in one call.
    """

    family, name = "ddp", "torch DDP"

    def __init__(self, problem: Problem, buckets: int, batched_copy: bool) -> None:
        network = problem.network(range(problem.setting.layers))
        total_bytes = sum(parameter.nbytes for parameter in network.parameters())
        options: dict[str, Any] = {"batched_grad_copy": True} if batched_copy else {}
        self.network = DistributedDataParallel(
            network,
            bucket_cap_mb=total_bytes / buckets / MIB,
            gradient_as_bucket_view=True,
            static_graph=True,
            **options,
        )
        self.optimizer = torch.optim.SGD(self.network.parameters(), LEARNING_RATE, fused=True)
        self.inputs, self.targets = problem.inputs[problem.rows], problem.targets[problem.rows]
        self.tuning = f"buckets: {buckets}" + (", batched copies" if batched_copy else "")

    def step(self) -> None:
        self.optimizer.zero_grad()
        F.mse_loss(self.network(self.inputs), self.targets).backward()
        self.optimizer.step()

    def gradients(self) -> dict[int, Tensor]:
        return _by_layer(self.network.module)


class TorchColumns(Contender):
    """DTensor, every layer's columns split; its output replicated, so that the next layer has all of it."""

    family, name = "tensor", "DTensor columns"
    tuning = "foreach optimizer: DTensor has no fused SGD"

    def __init__(self, problem: Problem) -> None:
        mesh = init_device_mesh("cpu", (problem.world.size,))
        layers = problem.setting.layers
        network = problem.network(range(layers), inplace=False)  # DTensor's outputs are views
        self.network = parallelize_module(network, mesh, self.plan(layers))
        self.optimizer = torch.optim.SGD(self.network.parameters(), LEARNING_RATE, foreach=True)
        self.inputs, self.targets = problem.inputs, problem.targets

    def plan(self, layers: int) -> dict[str, Any]:
        return {f"linear{layer}": ColwiseParallel(output_layouts=Replicate()) for layer in range(layers)}

    def step(self) -> None:
        self.optimizer.zero_grad()
        F.mse_loss(self.network(self.inputs), self.targets).backward()
        self.optimizer.step()

    def gradients(self) -> dict[int, Tensor]:
        return _by_layer(self.network)


class TorchPairs(TorchColumns):
    """DTensor, layers in pairs: columns, then rows, so that a pair needs one reduction in each direction.

    A layer that is left over is split by columns.
    """

    name = "DTensor pairs"

    def plan(self, layers: int) -> dict[str, Any]:
        plan: dict[str, Any] = {}
        for layer in range(0, layers - 1, 2):
            plan[f"linear{layer}"] = ColwiseParallel(output_layouts=Shard(-1))
            plan[f"linear{layer + 1}"] = RowwiseParallel(output_layouts=Replicate())
        if layers % 2:
            plan[f"linear{layers - 1}"] = ColwiseParallel(output_layouts=Replicate())
        return plan


class TorchPipeline(Contender):
    """torch.distributed.pipelining, one stage a rank, the layers cut as ours are.

    The loss is scaled to its share of the batch, which spares torch a pass over all gradients.
    """

    family = "pipeline"

    def __init__(self, problem: Problem, schedule: str) -> None:
        self.name = f"torch {schedule}"
        rank, ranks = problem.world.rank, problem.world.size
        self.network = problem.network(range(*problem.stages[rank]))
        self.optimizer = torch.optim.SGD(self.network.parameters(), LEARNING_RATE, fused=True)
        scale = 1.0 / problem.targets.numel()

        def loss(output: Tensor, target: Tensor) -> Tensor:
            return F.mse_loss(output, target, reduction="sum") * scale

        stage = PipelineStage(self.network, rank, ranks, torch.device("cpu"))
        make = PIPELINE_SCHEDULES[schedule]
        self.schedule = make(stage, problem.setting.microbatches, loss_fn=loss, scale_grads=False)
        self.arguments = (problem.inputs,) if rank == 0 else ()
        self.targets = problem.targets if rank == ranks - 1 else None

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.schedule.step(*self.arguments, target=self.targets, return_outputs=False)
        self.optimizer.step()

    def gradients(self) -> dict[int, Tensor]:
        return _by_layer(self.network)


def ddp_candidates(problem: Problem, bucket_counts: tuple[int, ...]) -> Iterator[TorchDDP]:
    """Every bucket size, with and without batched copies where this torch has them."""
    has_batched_copy = "batched_grad_copy" in inspect.signature(DistributedDataParallel.__init__).parameters
    for buckets in bucket_counts:
        for batched_copy in (False, True) if has_batched_copy else (False,):
            yield TorchDDP(problem, buckets, batched_copy)


def _by_layer(network: nn.Module) -> dict[int, Tensor]:
    """Whole gradients, gathered where they are distributed, by the number behind `linear`."""
    gradients: dict[int, Tensor] = {}
    for name, parameter in network.named_parameters():
        gradient = parameter.grad
        assert gradient is not None
        whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient.clone()
        gradients[int(name.removeprefix("linear").removesuffix(".weight"))] = whole
    return gradients

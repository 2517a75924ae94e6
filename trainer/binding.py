"""A schedule bound to one rank's memory and groups: a list of calls with everything resolved.

Views are cut, transfers built and the table from operation to method looked up once, before the
first step, so that running a step is one loop over ready calls. Here is what computes; transfers are bound
by `trainer.binding_transfers`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.profiler import record_function

from models.block import Context, JointBlock, Saved, torch_dtype
from models.loss import CrossEntropy, Loss, count_correct, make_loss
from strategies import compute
from strategies.memory import ACTIVATION_KINDS, lay_out
from strategies.schedule import Schedule
from strategies.values import Layer, Operation, Value
from trainer.binding_transfers import TransferBinder
from trainer.program import Call, Filled, Program
from trainer.spans import spans_of

if TYPE_CHECKING:
    from trainer.executor import Rank


class Binder:
    """Binds one schedule on one rank."""

    def __init__(self, rank: Rank, schedule: Schedule, training: bool, row_start: int) -> None:
        self.rank, self.schedule, self.training = rank, schedule, training
        self.model, self.task = rank.model, rank.task
        self.arena = lay_out(schedule, rank.model)
        self.layers: dict[int, Layer] = {layer.index: layer for layer in schedule.layers}
        self.losses: dict[int, Loss] = {}
        self.program = Program(schedule, clock=rank.stopwatch.now)
        self.saved: dict[tuple[int, int], Saved] = {}
        self.target_of: dict[int, Tensor] = {}
        start = 0
        for m, rows in enumerate(schedule.rows):
            within = slice(start, start + rows)
            first = row_start + start
            self.program.contexts.append(Context(training, 0, m, (first, first + rows), rank.seed))
            self._bind_given(m, within)
            start += rows

    def bind(self, profile: bool = False) -> Program:
        """The program; with `profile` each operation is named in torch.profiler's trace."""
        table: dict[type[Operation], Callable[..., Call]] = {
            compute.Forward: self._forward,
            compute.BackwardInput: self._backward_input,
            compute.BackwardWeight: self._backward_weight,
            compute.Backward: self._backward,
            compute.LossMaximum: self._loss_maximum,
            compute.LossSums: self._loss_sums,
            compute.Loss: self._loss,
            compute.Score: self._score,
            compute.Update: lambda operation: self.rank.update_of(operation),
            **TransferBinder(self.rank, self.program, self.tensor, self.training).table(),
        }
        norm = (self.rank.own_norm, self.rank.share_norm, self.rank.scale_gradients)
        for span in spans_of(self.schedule, self.rank.norm_crosses):
            operation = span.operation
            if not isinstance(operation, compute.GradientNorm):
                call = table[type(operation)](operation)
            else:
                call = norm[span.part] if self.rank.norm_crosses else self.rank.clip_gradients
            self.program.calls.append(_named(operation.identity, call) if profile else call)
        return self.program

    def tensor(self, value: Value) -> Tensor:
        """The memory of a value."""
        if value.kind in ACTIVATION_KINDS:
            slot = self.arena.slots[value]
            if value.layer < 0 and self.model.row_axis == 1:
                # As the data come, [rows, features]: matrix products take it transposed as it is.
                return self.rank.arena_view(slot.offset_bytes, slot.shape[::-1]).t()
            return self.rank.arena_view(slot.offset_bytes, slot.shape)
        if value.kind == "weight gradient":
            return self.rank.gradient_views[value.layer][value.place]
        loss = self.losses[value.place]
        assert isinstance(loss, CrossEntropy)
        return {"class maximum": loss.maximum, "class sums": loss.sums}[value.kind]

    def _bind_given(self, m: int, rows: slice) -> None:
        given = set(self.schedule.given)
        inputs = Value("output", -1, m)
        if inputs in given:
            stored = self.tensor(inputs)
            self.program.inputs.append(Filled(rows, stored.t() if self.model.row_axis == 1 else stored))
        if any(value.kind == "target" and value.place == m for value in given):
            count = rows.stop - rows.start
            if self.task.loss == "cross_entropy":
                target = torch.empty(count, dtype=torch.int64, device=self.rank.device)
            else:
                shape = (math.prod(self.model.output_shape), count)
                target = torch.empty(shape, dtype=torch_dtype(self.task.dtype), device=self.rank.device)
            self.target_of[m] = target
            self.program.targets.append(Filled(rows, target, self.task.loss == "mse"))

    # Compute

    def _saved(self, layer: Layer, m: int) -> Saved:
        key = (layer.index, m)
        if key not in self.saved:
            before = self.tensor(layer.preactivation(m)) if "preactivation" in layer.spec.saves else None
            self.saved[key] = Saved(self.tensor(layer.input(m)), self.tensor(layer.own_output(m)), before)
        return self.saved[key]

    def _forward(self, op: compute.Forward) -> Call:
        block, m = self.rank.blocks[op.layer.index], op.microbatch
        return partial(block.forward, self._saved(op.layer, m), self.program.contexts[m])

    def _input_gradient(self, op: compute.LayerOperation) -> Tensor | None:
        return self.tensor(op.layer.input_gradient(op.microbatch)) if op.layer.has_below else None

    def _backward_input(self, op: compute.BackwardInput) -> Call:
        block, saved = self.rank.blocks[op.layer.index], self._saved(op.layer, op.microbatch)
        gradient = self.tensor(op.layer.own_gradient(op.microbatch))
        return partial(block.backward_input, saved, gradient, self._input_gradient(op))

    def _backward_weight(self, op: compute.BackwardWeight) -> Call:
        block, saved = self.rank.blocks[op.layer.index], self._saved(op.layer, op.microbatch)
        gradient = self.tensor(op.layer.activation_gradient(op.microbatch))
        return partial(block.backward_weight, saved, gradient, op.accumulate)

    def _backward(self, op: compute.Backward) -> Call:
        block, saved = self.rank.blocks[op.layer.index], self._saved(op.layer, op.microbatch)
        assert isinstance(block, JointBlock)
        gradient = self.tensor(op.layer.own_gradient(op.microbatch))
        return partial(block.backward, saved, gradient, self._input_gradient(op), op.accumulate)

    # Loss: always sees [outputs, rows]

    def _outputs_first(self, tensor: Tensor) -> Tensor:
        return tensor if self.model.row_axis == 1 else tensor.flatten(1).t()

    def _make_loss(self, layer: Layer, m: int, output: Value, counts: bool) -> Loss:
        if m not in self.losses:
            outputs = math.prod(self.model.output_shape)
            gradient = None
            if self.training:
                gradient = self._outputs_first(self.tensor(layer.own_gradient(m)))
            self.losses[m] = make_loss(
                self.task.loss,
                self._outputs_first(self.tensor(output)),
                gradient,
                self.target_of[m],
                (layer.columns if self.training else None) or (0, outputs),
                self.schedule.global_rows,
                outputs,
            )
        self.losses[m].counts = counts
        return self.losses[m]

    def _loss_maximum(self, op: compute.LossMaximum) -> Call:
        loss = self._make_loss(op.layer, op.microbatch, op.layer.own_output(op.microbatch), True)
        assert isinstance(loss, CrossEntropy)
        return loss.take_maximum

    def _loss_sums(self, op: compute.LossSums) -> Call:
        loss = self.losses[op.microbatch]
        assert isinstance(loss, CrossEntropy)
        return loss.take_sums

    def _loss(self, op: compute.Loss) -> Call:
        loss = self._make_loss(op.layer, op.microbatch, op.layer.own_output(op.microbatch), op.counts)
        total = self.rank.loss_total
        if isinstance(loss, CrossEntropy) and not op.sharded:
            return partial(_whole_loss, loss, total)
        return partial(loss.add_to, total)

    def _score(self, op: compute.Score) -> Call:
        """Every rank that scores the whole output computes it; only one of equals counts."""
        if not op.counts:
            return _nothing
        output = op.layer.output(op.microbatch)
        loss = self._make_loss(op.layer, op.microbatch, output, True)
        if isinstance(loss, CrossEntropy):
            return partial(_whole_score, loss, self.rank.loss_total, self.rank.correct_total)
        return partial(loss.add_to, self.rank.loss_total)


def _whole_loss(loss: CrossEntropy, total: Tensor) -> None:
    loss.take_maximum()
    loss.take_sums()
    loss.add_to(total)


def _whole_score(loss: CrossEntropy, total: Tensor, correct: Tensor) -> None:
    correct.add_(count_correct(loss.output, loss.target))
    _whole_loss(loss, total)


def _nothing() -> None:
    """An operation in which this rank has no part."""


def _named(identity: str, call: Call) -> Call:
    def run() -> None:
        with record_function(identity):
            call()

    return run

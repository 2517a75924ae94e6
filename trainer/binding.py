"""A schedule bound to one rank's memory and groups: a list of calls with everything resolved.

Views are cut, transfers built and the table from operation to method looked up once, before the
first step, so that running a step is one loop over ready calls.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from collectives import direct, native
from collectives.group import Group
from collectives.nodes import sent_by_place
from collectives.traffic import bytes_least, bytes_received, bytes_sent, traffic
from collectives.transfer import Native, Transfer
from models.block import Context, JointBlock, Saved, torch_dtype
from models.loss import CrossEntropy, Loss, count_correct, make_loss
from strategies import communication as comm
from strategies import compute
from strategies.memory import ACTIVATION_KINDS, lay_out
from strategies.schedule import Schedule
from strategies.values import Layer, Operation, Value
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
        self.in_flight: dict[Value, Transfer] = {}
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
            comm.AllReduce: self._all_reduce,
            comm.AllGather: self._all_gather,
            comm.ReduceScatter: self._reduce_scatter,
            comm.Send: self._send,
            comm.Recv: self._recv,
            comm.Wait: lambda operation: self.in_flight.pop(operation.value).wait,
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

    # Communication

    def _started(
        self, op: comm.Communication, transfer: Transfer, group: Group, shards: int | list[int]
    ) -> Call:
        """Count and stamp the transfer; `shards` as for `traffic`."""
        ledger = self.rank.ledger if self.training else self.rank.evaluation_ledger
        n, place = group.size, group.index
        least = 0 if op.verb == "recv" else bytes_least(op.verb, shards, op.dtype, n, place)
        own = traffic(op.verb, transfer.algorithm, shards, op.dtype, n, place)
        received = bytes_received(op.verb, transfer.algorithm, shards, op.dtype, n, place)
        sent = own.sent_bytes if transfer.sent_bytes is None else transfer.sent_bytes
        between = self.rank.world.bytes_between_nodes(group, sent, transfer.sent_by_place())
        transfer.register(ledger, op.identity, op.label, group.name, op.shape, received, least, between)
        transfer.observer = self.rank.observer if self.training else None
        self.in_flight[op.value] = transfer
        self.program.transfers.append(transfer)
        self.program.bytes_least += least
        self.program.framing_bytes += own.gloo_framing_bytes
        return transfer.start

    def _native(
        self,
        op: comm.Collective,
        group: Group,
        launch: Callable[[], dist.Work | None],
        output: Tensor,
        shards: int | list[int],
    ) -> Native:
        """The backend's own, with what it sends."""
        algorithm = getattr(self.task.algorithms, op.verb)
        sent = bytes_sent(op.verb, algorithm, shards, op.dtype, group.size, group.index)
        by_place = None
        if group.backend == "gloo":
            by_place = sent_by_place(op.verb, algorithm, sent, group.size, group.index)
        return Native(algorithm, launch, output, sent, by_place)

    def _all_reduce(self, op: comm.AllReduce) -> Call:
        group = self.rank.world.group(op.group.name, op.group.ranks)
        if op.value.kind == "weight gradient":
            tensor = self.rank.gradient_range(op.value, op.numel)
        else:
            tensor = self.tensor(op.value)
        launch = partial(native.all_reduce, group, tensor, op.reduction)
        return self._started(op, self._native(op, group, launch, tensor, op.numel), group, op.numel)

    def _all_gather(self, op: comm.AllGather) -> Call:
        group = self.rank.world.group(op.group.name, op.group.ranks)
        shards = _elements(op.sizes, op.shape)
        whole = self.tensor(op.value)
        blocks = _blocks(whole, op.sizes)
        if self.task.algorithms.all_gather == "direct":
            transfer: Transfer = direct.DirectAllGather(group, blocks)
        else:
            launch = partial(native.all_gather, group, whole.view(-1), blocks[group.index])
            transfer = self._native(op, group, launch, whole, shards)
        return self._started(op, transfer, group, shards)

    def _reduce_scatter(self, op: comm.ReduceScatter) -> Call:
        group = self.rank.world.group(op.group.name, op.group.ranks)
        shards = _elements(op.sizes, op.shape)
        partial_sums, scratch = self.tensor(op.value), self.tensor(op.scratch)
        blocks = _blocks(partial_sums, op.sizes)
        own = blocks[group.index]
        if self.task.algorithms.reduce_scatter == "direct":
            received = scratch.view(group.size - 1, own.numel())
            transfer: Transfer = direct.DirectReduceScatter(group, blocks, own, received)
        else:
            result = scratch[0].view(-1)
            launch = partial(native.reduce_scatter, group, result, partial_sums.view(-1), "sum")
            transfer = self._native(op, group, launch, own, shards)
            transfer.after(partial(own.copy_, result))
        return self._started(op, transfer, group, shards)

    def _send(self, op: comm.Send) -> Call:
        group = self.rank.channel(op.peer > self.rank.world.rank)
        transfer = direct.Send(group, self.tensor(op.value), group.place(op.peer))
        return self._started(op, transfer, group, op.numel)

    def _recv(self, op: comm.Recv) -> Call:
        group = self.rank.channel(op.peer < self.rank.world.rank)
        transfer = direct.Recv(group, self.tensor(op.value), group.place(op.peer))
        return self._started(op, transfer, group, op.numel)


def _blocks(whole: Tensor, sizes: tuple[int, ...]) -> list[Tensor]:
    """Each rank's block of the leading axis, flat."""
    return [block.view(-1) for block in whole.split(list(sizes))]


def _elements(sizes: tuple[int, ...], shape: tuple[int, ...]) -> list[int]:
    """Elements of each rank's block of the leading axis."""
    return [size * math.prod(shape[1:]) for size in sizes]


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

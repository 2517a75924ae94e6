"""A schedule's transfers, bound to one rank's memory and groups: counted, stamped, ready to be started."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor

from collectives import native
from collectives.direct import DirectAllGather, DirectReduceScatter, Recv, Send
from collectives.group import Group
from collectives.nodes import sent_by_place
from collectives.traffic import bytes_least, bytes_received, bytes_sent, traffic
from collectives.transfer import Native, Transfer
from strategies import communication as comm
from strategies.values import Operation, Value
from trainer.program import Call, Program

if TYPE_CHECKING:
    from trainer.executor import Rank


class TransferBinder:
    """Binds what one schedule communicates on one rank; `tensor` gives the memory of a value."""

    def __init__(
        self, rank: Rank, program: Program, tensor: Callable[[Value], Tensor], training: bool
    ) -> None:
        self.rank, self.program, self.tensor, self.training = rank, program, tensor, training
        self.algorithms = rank.task.algorithms
        self.in_flight: dict[Value, Transfer] = {}

    def table(self) -> dict[type[Operation], Callable[..., Call]]:
        """From a communication to the method that makes its call."""
        return {
            comm.AllReduce: self._all_reduce,
            comm.AllGather: self._all_gather,
            comm.ReduceScatter: self._reduce_scatter,
            comm.Send: self._send,
            comm.Recv: self._recv,
            comm.Wait: lambda operation: self.in_flight.pop(operation.value).wait,
        }

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
        algorithm = getattr(self.algorithms, op.verb)
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
        if self.algorithms.all_gather == "direct":
            transfer: Transfer = DirectAllGather(group, blocks)
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
        if self.algorithms.reduce_scatter == "direct":
            received = scratch.view(group.size - 1, own.numel())
            transfer: Transfer = DirectReduceScatter(group, blocks, own, received)
        else:
            result = scratch[0].view(-1)
            launch = partial(native.reduce_scatter, group, result, partial_sums.view(-1), "sum")
            transfer = self._native(op, group, launch, own, shards)
            transfer.after(partial(own.copy_, result))
        return self._started(op, transfer, group, shards)

    def _send(self, op: comm.Send) -> Call:
        group = self.rank.channel(op.peer > self.rank.world.rank)
        transfer = Send(group, self.tensor(op.value), group.place(op.peer))
        return self._started(op, transfer, group, op.numel)

    def _recv(self, op: comm.Recv) -> Call:
        group = self.rank.channel(op.peer < self.rank.world.rank)
        transfer = Recv(group, self.tensor(op.value), group.place(op.peer))
        return self._started(op, transfer, group, op.numel)


def _blocks(whole: Tensor, sizes: tuple[int, ...]) -> list[Tensor]:
    """Each rank's block of the leading axis, flat."""
    return [block.view(-1) for block in whole.split(list(sizes))]


def _elements(sizes: tuple[int, ...], shape: tuple[int, ...]) -> list[int]:
    """Elements of each rank's block of the leading axis."""
    return [size * math.prod(shape[1:]) for size in sizes]

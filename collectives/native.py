"""The backend's own collectives, started on flat contiguous tensors.

The process group's methods are called rather than torch.distributed's functions around them, which take
longer than the call itself. The nccl side has not run on a GPU.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from collectives.group import Group
from collectives.transfer import Transfer

Starter = Callable[[Any, Any], Any]  # (tensor, output) -> work

MOST_KEPT_BYTES = 65536  # of a kind of call, of which a group remembers thousands

GLOO_OPS = {
    "sum": dist.ReduceOp.SUM,
    "mean": dist.ReduceOp.SUM,  # gloo has no mean: its caller divides
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}
NCCL_OPS = {**GLOO_OPS, "mean": dist.ReduceOp.AVG}


def averages(group: Group) -> bool:
    """Whether the backend's own reductions know `mean`."""
    return group.backend == "nccl"


def all_reduce(group: Group, tensor: Tensor, reduction: str) -> dist.Work:
    return _of(group).allreduce([tensor], _options("AllreduceOptions", group, reduction))


def reduce(group: Group, tensor: Tensor, reduction: str, root: int) -> dist.Work:
    """gloo overwrites `tensor` on every rank."""
    return _of(group).reduce([tensor], _options("ReduceOptions", group, reduction, rootRank=root))


def broadcast(group: Group, tensor: Tensor, root: int) -> dist.Work:
    return _of(group).broadcast([tensor], _options("BroadcastOptions", group, rootRank=root))


def scatter(group: Group, blocks: Sequence[Tensor], output: Tensor, root: int) -> dist.Work:
    sources = [list(blocks)] if group.index == root else []
    return _of(group).scatter([output], sources, _options("ScatterOptions", group, rootRank=root))


def gather(group: Group, own: Tensor, blocks: Sequence[Tensor], root: int) -> dist.Work:
    targets = [list(blocks)] if group.index == root else []
    return _of(group).gather(targets, [own], _options("GatherOptions", group, rootRank=root))


def all_to_all(
    group: Group, output: Tensor, tensor: Tensor, received: Sequence[int], sent: Sequence[int]
) -> dist.Work:
    """`received` and `sent` hold the elements of each block; empty where all are equal."""
    options = _options("AllToAllOptions", group)
    return _of(group).alltoall_base(output, tensor, list(received), list(sent), options)


def all_gather(group: Group, output: Tensor, own: Tensor) -> dist.Work | None:
    # torch 2.13 gave these two new names; the old ones warn there
    launch = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    work: dist.Work | None = launch(output, own, group=group.process_group, async_op=True)
    return work


def all_gather_uneven(group: Group, blocks: Sequence[Tensor], own: Tensor) -> dist.Work | None:
    """nccl only: gloo's takes equal blocks."""
    work: dist.Work | None = dist.all_gather(list(blocks), own, group=group.process_group, async_op=True)
    return work


def reduce_scatter(group: Group, output: Tensor, tensor: Tensor, reduction: str) -> dist.Work | None:
    launch = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    op = _op(group, reduction)
    work: dist.Work | None = launch(output, tensor, op=op, group=group.process_group, async_op=True)
    return work


def reduce_scatter_uneven(
    group: Group, output: Tensor, blocks: Sequence[Tensor], reduction: str
) -> dist.Work | None:
    """nccl only: gloo's takes equal blocks."""
    op = _op(group, reduction)
    work: dist.Work | None = dist.reduce_scatter(
        output, list(blocks), op=op, group=group.process_group, async_op=True
    )
    return work


class Together(Transfer):
    """A receive and a send that nccl takes as one: one after the other, ranks in a ring would wait for ever.

    `before` and `following` are global ranks.
    """

    def __init__(self, group: Group, received: Tensor, before: int, sent: Tensor, following: int) -> None:
        super().__init__("direct", received)
        self.sent_bytes = sent.nbytes
        self.messages = [
            dist.P2POp(dist.irecv, received, before, group.process_group),
            dist.P2POp(dist.isend, sent, following, group.process_group),
        ]

    def post(self) -> Sequence[dist.Work]:
        return dist.batch_isend_irecv(self.messages)


# Of calls that have been checked before: the options made, the method looked up


def ready_all_reduce(group: Group, reduction: str) -> Starter:
    call, options = _of(group).allreduce, _options("AllreduceOptions", group, reduction)
    return lambda tensor, output: call([tensor], options)


def ready_reduce(group: Group, reduction: str, root: int) -> Starter:
    call, options = _of(group).reduce, _options("ReduceOptions", group, reduction, rootRank=root)
    if group.index == root:
        return lambda tensor, output: call([tensor], options)
    spare: list[Tensor] = []

    def start(tensor: Tensor, output: object) -> OnACopy:
        memory = spare.pop() if spare else torch.empty_like(tensor)  # it is written over
        memory.copy_(tensor)
        return OnACopy(call([memory], options), memory, spare)

    return start


def ready_broadcast(group: Group, root: int) -> Starter:
    call, options = _of(group).broadcast, _options("BroadcastOptions", group, rootRank=root)
    return lambda tensor, output: call([tensor], options)


def ready_all_gather(group: Group) -> Starter:
    call = getattr(_of(group), "all_gather_single", None)  # from torch 2.13 on
    if call is None:
        return lambda tensor, output: all_gather(group, output.view(-1), tensor.view(-1))
    return lambda tensor, output: call(_flat(output), _flat(tensor))


def ready_reduce_scatter(group: Group, reduction: str) -> Starter:
    call = getattr(_of(group), "reduce_scatter_single", None)
    if call is None:
        return lambda tensor, output: reduce_scatter(group, output.view(-1), tensor.view(-1), reduction)
    options = _options("ReduceScatterOptions", group, reduction)
    return lambda tensor, output: call(_flat(output), _flat(tensor), options)


def ready_all_to_all(group: Group) -> Starter:
    call, options = _of(group).alltoall_base, _options("AllToAllOptions", group)
    return lambda tensor, output: call(_flat(output), _flat(tensor), [], [], options)


def ready_scatter(group: Group, root: int) -> Starter:
    call, options = _of(group).scatter, _options("ScatterOptions", group, rootRank=root)
    if group.index != root:
        return lambda tensor, output: call([_flat(output)], [], options)
    blocks = LastBlocks(group.size)
    return lambda tensor, output: call([_flat(output)], [blocks.of(tensor)], options)


def ready_send(group: Group, place: int, tag: int) -> Starter:
    call = _of(group).send
    return lambda tensor, output: call([tensor], place, tag)


def ready_recv(group: Group, place: int, tag: int) -> Starter:
    call = _of(group).recv
    return lambda tensor, output: call([tensor], place, tag)


class OnACopy:
    """A work on memory that is kept for the next call once this one is complete, if it is small."""

    def __init__(self, work: dist.Work, memory: Tensor, spare: list[Tensor]) -> None:
        self.work, self.memory, self.spare = work, memory, spare

    def wait(self) -> None:
        self.work.wait()
        if self.memory.nbytes <= MOST_KEPT_BYTES:
            self.spare.append(self.memory)


class LastBlocks:
    """A tensor's `n` blocks; those of the last one are kept while it lives, and not cut again.

    Cutting costs more of the caller's time than all the rest of a call.
    """

    def __init__(self, n: int) -> None:
        self.n, self.start = n, 0
        self.blocks: list[Tensor] = []
        self.last: Callable[[], Tensor | None] = lambda: None

    def of(self, tensor: Tensor) -> list[Tensor]:
        start = tensor.data_ptr()
        if self.last() is not tensor or self.start != start:
            self.last, self.start = weakref.ref(tensor, self._forget), start
            flat = tensor.detach().view(-1)  # blocks of `tensor` itself would keep it alive
            self.blocks = list(flat.chunk(self.n))
        return self.blocks

    def _forget(self, gone: object) -> None:
        if gone is self.last:
            self.blocks = []


def barrier(group: Group) -> dist.Work:
    return _of(group).barrier()


def _flat(tensor: Tensor) -> Tensor:
    """A view costs as much as all checks together: none where the tensor is flat already."""
    return tensor if tensor.dim() == 1 else tensor.view(-1)


def _of(group: Group) -> dist.ProcessGroup:
    assert group.process_group is not None
    return group.process_group


def _op(group: Group, reduction: str) -> Any:
    return (NCCL_OPS if group.backend == "nccl" else GLOO_OPS)[reduction]


def _options(kind: str, group: Group, reduction: str | None = None, **fields: int) -> Any:
    """The options of a call, made once for each group: making them costs as much as the call."""
    key = (kind, reduction, *fields.values())
    options = group.options.get(key)
    if options is None:
        options = getattr(dist, kind)()
        if reduction is not None:
            options.reduceOp = _op(group, reduction)
        for name, value in fields.items():
            setattr(options, name, value)
        if hasattr(options, "asyncOp"):
            options.asyncOp = True  # nccl: on a stream of its own
        group.options[key] = options
    return options

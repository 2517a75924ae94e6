"""Operations in which all ranks have the same part. `collectives.operations` says what they share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from collectives import calls, native, ready
from collectives.checks import (
    check_apart,
    check_member,
    check_output,
    check_tensor,
    check_whole,
    numels_of_blocks,
    numels_of_sizes,
    output_like,
)
from collectives.choice import choose
from collectives.direct import DirectAllGather, DirectAllToAll, DirectReduceScatter
from collectives.group import Group
from collectives.transfer import Native, Nothing, Transfer


def all_reduce(
    tensor: Tensor,
    group: Group,
    *,
    op: str = "sum",
    output: Tensor | None = None,
    algorithm: str = "auto",
    asynchronous: bool = False,
) -> Transfer:
    """Every rank ends with the reduction of all ranks' tensors, in place or in `output`.

    Args:
        tensor: any shape, the same on all ranks.
        output: like `tensor`; without it the result replaces `tensor`.
    """
    key = ("all_reduce", op, algorithm, tensor.dtype, tensor.shape) if isinstance(tensor, Tensor) else None
    if output is None and (known := group.ready.get(key)) and calls.plain(tensor):
        return calls.begun(known, group, tensor, None, tensor, asynchronous)
    check_tensor(tensor, group, op)
    result = output_like(tensor, output, "all_reduce")
    memory, back = calls.landing(result.detach())
    if output is not None:
        check_apart("all_reduce", tensor, output, may_be_equal=True)
        memory.copy_(calls.flat(tensor.detach()))
    name = choose("all_reduce", algorithm, group.backend, group.size, memory.nbytes)
    if calls.is_nothing(group, memory.numel()):
        return calls.begin(Nothing(name), "all_reduce", group, result, asynchronous, back)
    transfer = Native(name, lambda: native.all_reduce(group, memory, op))
    if op != "mean" and key is not None:
        calls.remember(group, key, "all_reduce", name, lambda: native.ready_all_reduce(group, op))
    calls.average(transfer, group, op, memory)
    return calls.begin(transfer, "all_reduce", group, result, asynchronous, back)


def all_gather(
    tensor: Tensor,
    group: Group,
    *,
    output: Tensor,
    sizes: Sequence[int] | None = None,
    algorithm: str = "auto",
    asynchronous: bool = False,
) -> Transfer:
    """Every rank ends with every rank's tensor, one block of `output` each.

    `tensor` may be this rank's own block of `output`, which is then in place.
    """
    key = None
    if isinstance(tensor, Tensor) and isinstance(output, Tensor) and sizes is None:
        key = ("all_gather", algorithm, tensor.dtype, tensor.shape, output.dtype, output.shape)
        known = group.ready.get(key)
        if known and calls.plain(tensor) and calls.plain(output) and calls.apart(tensor, output):
            return calls.begun(known, group, tensor, output, output, asynchronous)
    dtype = check_tensor(tensor, group)
    check_output("all_gather", output, tensor)
    numels = numels_of_blocks("all_gather", "output", output.shape, tensor.shape, group, sizes)
    name = calls.blocks_choice("all_gather", algorithm, group, numels, dtype)
    memory, back = calls.landing(output.detach())
    own = calls.flat(tensor.detach())
    blocks = list(memory.split(numels))
    check_apart("all_gather", tensor, output, allowed=blocks[group.index] if back is None else None)
    if calls.is_nothing(group, sum(numels)):
        calls.copy(blocks[group.index], own)
        return calls.begin(Nothing(name), "all_gather", group, output, asynchronous, back)
    if name == "direct":
        transfer: Transfer = DirectAllGather(group, blocks, own)
        if key is not None:
            calls.remember(group, key, "all_gather", name, lambda: ready.ready_all_gather(group, numels[0]))
    elif calls.uneven(numels):
        transfer = Native(name, lambda: native.all_gather_uneven(group, blocks, own))
    else:
        transfer = Native(name, lambda: native.all_gather(group, memory, own))
        if key is not None:
            calls.remember(group, key, "all_gather", name, lambda: native.ready_all_gather(group))
    return calls.begin(transfer, "all_gather", group, output, asynchronous, back)


def reduce_scatter(
    tensor: Tensor,
    group: Group,
    *,
    op: str = "sum",
    output: Tensor | None = None,
    sizes: Sequence[int] | None = None,
    algorithm: str = "auto",
    asynchronous: bool = False,
) -> Transfer:
    """Every rank ends with its block of the reduction of all ranks' tensors; `tensor` stays as it is.

    Args:
        tensor: one block of each rank. Without `output` it is stacked, [n, *block], and nothing else.
        output: a block; it may be this rank's own block of `tensor`, which is then in place.
    """
    key = None
    if isinstance(tensor, Tensor) and isinstance(output, Tensor) and sizes is None:
        key = ("reduce_scatter", op, algorithm, tensor.dtype, tensor.shape, output.dtype, output.shape)
        known = group.ready.get(key)
        if known and calls.plain(tensor) and calls.plain(output) and calls.apart(tensor, output):
            return calls.begun(known, group, tensor, output, output, asynchronous)
    dtype = check_tensor(tensor, group, op)
    if output is None:
        if tensor.dim() == 0 or tensor.shape[0] != group.size or sizes is not None:
            raise ValueError(
                f"reduce_scatter of shape {list(tensor.shape)} on {group.size} ranks without output needs "
                f"[{group.size}, *block]; give output for the concatenated form or for sizes"
            )
        output = torch.empty_like(tensor.detach()[0])
    check_output("reduce_scatter", output, tensor)
    numels = numels_of_blocks("reduce_scatter", "tensor", tensor.shape, output.shape, group, sizes)
    name = calls.blocks_choice("reduce_scatter", algorithm, group, numels, dtype)
    memory, back = calls.landing(output.detach())
    whole = calls.flat(tensor.detach())
    blocks = list(whole.split(numels))
    own_block = blocks[group.index] if tensor.is_contiguous() else None
    check_apart("reduce_scatter", tensor, output, allowed=own_block)
    if calls.is_nothing(group, sum(numels)):
        calls.copy(memory, blocks[group.index])
        return calls.begin(Nothing(name), "reduce_scatter", group, output, asynchronous, back)
    if name == "direct":
        shape = (group.size - 1, numels[group.index])
        transfer = calls.borrow(
            lambda scratch: DirectReduceScatter(group, blocks, memory, scratch, op),
            group,
            shape,
            whole,
        )
        if op == "mean":
            transfer.after(lambda: memory.div_(group.size))
        start = ready.ready_reduce_scatter(group, numels[0], whole.itemsize, op)
        if key is not None and start is not None:
            calls.remember(group, key, "reduce_scatter", name, lambda: start)
    elif calls.uneven(numels):
        transfer = Native(name, lambda: native.reduce_scatter_uneven(group, memory, blocks, op))
    else:
        transfer = Native(name, lambda: native.reduce_scatter(group, memory, whole, op))
        if key is not None and op != "mean":
            calls.remember(group, key, "reduce_scatter", name, lambda: native.ready_reduce_scatter(group, op))
        calls.average(transfer, group, op, memory)
    return calls.begin(transfer, "reduce_scatter", group, output, asynchronous, back)


def all_to_all(
    tensor: Tensor,
    group: Group,
    *,
    output: Tensor,
    sizes: Sequence[int] | None = None,
    output_sizes: Sequence[int] | None = None,
    algorithm: str = "auto",
    asynchronous: bool = False,
) -> Transfer:
    """Block j of rank i's tensor ends as block i of rank j's output.

    Args:
        tensor: a block for each rank; may not overlap `output`.
        output: a block from each rank.
        sizes: rows for each rank, where they differ; then `output_sizes` holds the rows from each rank.
    """
    key = None
    if isinstance(tensor, Tensor) and isinstance(output, Tensor) and sizes is output_sizes is None:
        key = ("all_to_all", algorithm, tensor.dtype, tensor.shape, output.dtype, output.shape)
        known = group.ready.get(key)
        if known and calls.plain(tensor) and calls.plain(output) and calls.apart(tensor, output):
            return calls.begun(known, group, tensor, output, output, asynchronous)
    check_tensor(tensor, group)
    check_output("all_to_all", output, tensor)
    check_apart("all_to_all", tensor, output)
    if (sizes is None) != (output_sizes is None):
        raise ValueError("all_to_all takes sizes and output_sizes together, or neither")
    if sizes is None or output_sizes is None:
        check_whole(tensor.shape, group, "all_to_all", "tensor")
        output_like(tensor, output, "all_to_all")
        sent = received = [tensor.numel() // group.size] * group.size
    else:
        sent = numels_of_sizes("all_to_all", "sizes", tensor.shape, group, sizes)
        received = numels_of_sizes("all_to_all", "output_sizes", output.shape, group, output_sizes)
        if sent[group.index] != received[group.index]:
            raise ValueError(
                f"all_to_all: this rank keeps sizes[{group.index}]={sizes[group.index]} rows, but "
                f"output_sizes[{group.index}]={output_sizes[group.index]}"
            )
        if algorithm == "auto" and group.backend == "gloo":
            algorithm = "direct"  # ranks with other sizes must choose alike
    name = choose("all_to_all", algorithm, group.backend, group.size, tensor.nbytes)
    memory, back = calls.landing(output.detach())
    whole = calls.flat(tensor.detach())
    sources, targets = list(whole.split(sent)), list(memory.split(received))
    if group.size == 1 or (sizes is None and tensor.numel() == 0):
        calls.copy(targets[group.index], sources[group.index])
        return calls.begin(Nothing(name), "all_to_all", group, output, asynchronous, back)
    if name == "direct":
        transfer: Transfer = DirectAllToAll(group, sources, targets)
    elif sizes is not None:
        transfer = Native(name, lambda: native.all_to_all(group, memory, whole, received, sent))
    else:
        transfer = Native(name, lambda: native.all_to_all(group, memory, whole, (), ()))
        if key is not None:
            calls.remember(group, key, "all_to_all", name, lambda: native.ready_all_to_all(group))
    return calls.begin(transfer, "all_to_all", group, output, asynchronous, back)


def barrier(group: Group, *, asynchronous: bool = False) -> Transfer:
    """Complete once every rank of the group has called it."""
    check_member(group)
    transfer: Transfer = Nothing("dissemination")
    if group.size > 1:
        transfer = Native("dissemination", lambda: native.barrier(group))
    return calls.begin(transfer, "barrier", group, None, asynchronous)

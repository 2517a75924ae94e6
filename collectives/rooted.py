"""Operations with a root, and point-to-point. `collectives.operations` says what they share."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from collectives import calls, native
from collectives.checks import (
    check_apart,
    check_output,
    check_tensor,
    numels_from_own,
    numels_of_blocks,
    other_place,
    output_like,
    place_of,
)
from collectives.choice import choose
from collectives.direct import DirectGather, DirectScatter, Recv, Send
from collectives.fan import FanBroadcast, FanReduce
from collectives.group import Group
from collectives.traffic import fan_scratch
from collectives.transfer import USER_TAG, Native, Nothing, Transfer


def broadcast(
    tensor: Tensor,
    group: Group,
    root: int,
    *,
    output: Tensor | None = None,
    algorithm: str = "auto",
    asynchronous: bool = False,
) -> Transfer:
    """Every rank ends with the root's tensor, in place or in `output` (on all ranks, the root too).

    Args:
        tensor: any shape, the same on all ranks; where `output` is given it matters at the root alone.
    """
    key = ("broadcast", root, algorithm, tensor.dtype, tensor.shape) if isinstance(tensor, Tensor) else None
    if output is None and (ready := group.ready.get(key)) and calls.plain(tensor):
        return calls.begun(ready, group, tensor, None, tensor, asynchronous)
    check_tensor(tensor, group)
    place = place_of(group, root, "root")
    result = output_like(tensor, output, "broadcast")
    memory, back = calls.landing(result.detach())
    if output is not None:
        check_apart("broadcast", tensor, output, may_be_equal=True)
        if place == group.index:
            memory.copy_(calls.flat(tensor.detach()))
    name = choose("broadcast", algorithm, group.backend, group.size, memory.nbytes)
    if calls.is_nothing(group, memory.numel()):
        return calls.begin(Nothing(name), "broadcast", group, result, asynchronous, back)
    if name == "fan":
        transfer: Transfer = FanBroadcast(group, memory, place)
    else:
        transfer = Native(name, lambda: native.broadcast(group, memory, place))
        if key is not None:
            calls.remember(group, key, "broadcast", name, lambda: native.ready_broadcast(group, place))
    return calls.begin(transfer, "broadcast", group, result, asynchronous, back)


def reduce(
    tensor: Tensor,
    group: Group,
    root: int,
    *,
    op: str = "sum",
    output: Tensor | None = None,
    algorithm: str = "auto",
    asynchronous: bool = False,
) -> Transfer:
    """The root ends with the reduction, in place or in `output`; other ranks' tensors stay as they are."""
    key = ("reduce", root, op, algorithm, tensor.dtype, tensor.shape) if isinstance(tensor, Tensor) else None
    if output is None and (ready := group.ready.get(key)) and calls.plain(tensor):
        kept = tensor if root == group.ranks[group.index] else None
        return calls.begun(ready, group, tensor, None, kept, asynchronous)
    check_tensor(tensor, group, op)
    place = place_of(group, root, "root")
    is_root = place == group.index
    target = output_like(tensor, output, "reduce") if is_root else tensor
    result = target if is_root else None
    if output is not None and is_root:
        check_apart("reduce", tensor, output, may_be_equal=True)
    numel = tensor.numel()
    name = choose("reduce", algorithm, group.backend, group.size, tensor.nbytes)
    if calls.is_nothing(group, numel):
        if output is not None and is_root:
            output.detach().copy_(tensor.detach())
        return calls.begin(Nothing(name), "reduce", group, result, asynchronous)
    source = calls.flat(tensor.detach())
    memory, back = calls.landing(target.detach()) if is_root else (None, None)
    if name == "fan":
        elements = numel
        if not is_root:
            above_root = (group.index - place) % group.size
            elements = fan_scratch(numel, source.element_size(), group.size, above_root)
        transfer = calls.borrow(
            lambda scratch: FanReduce(group, source, place, memory, scratch, op),
            group,
            (elements,),
            source,
        )
        if memory is not None and op == "mean":
            transfer.after(lambda: memory.div_(group.size))
        return calls.begin(transfer, "reduce", group, result, asynchronous, back)
    # The backend's own writes over its tensor on every rank.
    if memory is None:
        work = tensor.detach().clone(memory_format=torch.contiguous_format).view(-1)
    else:
        work = memory
        calls.copy(work, source)
    transfer = Native(name, lambda: native.reduce(group, work, op, place))
    if op != "mean" and key is not None:
        calls.remember(group, key, "reduce", name, lambda: native.ready_reduce(group, op, place))
    if is_root:
        calls.average(transfer, group, op, work)
    return calls.begin(transfer, "reduce", group, result, asynchronous, back)


def scatter(
    tensor: Tensor | None,
    group: Group,
    root: int,
    *,
    output: Tensor,
    sizes: Sequence[int] | None = None,
    algorithm: str = "auto",
    asynchronous: bool = False,
) -> Transfer:
    """Every rank ends with its block of the root's tensor.

    Args:
        tensor: at the root, one block of each rank; None elsewhere.
        output: a block; at the root it may be its own block of `tensor`.
        sizes: on all ranks, or on none.
    """
    key = None
    if tensor is not None and not isinstance(tensor, Tensor):
        raise ValueError(f"scatter takes one tensor with a block for each, not a {type(tensor).__name__}")
    if isinstance(output, Tensor) and sizes is None:
        source = None if tensor is None else (tensor.dtype, tensor.shape)
        key = ("scatter", root, algorithm, source, output.dtype, output.shape)
        ready = group.ready.get(key)
        has_room = tensor is None or (calls.plain(tensor) and calls.apart(tensor, output))
        if ready and calls.plain(output) and has_room:
            return calls.begun(ready, group, tensor, output, output, asynchronous)
    dtype = check_tensor(output, group)
    check_output("scatter", output, output)
    place = place_of(group, root, "root")
    is_root = place == group.index
    if is_root and tensor is None:
        raise ValueError("scatter needs a tensor at the root")
    memory, back = calls.landing(output.detach())
    blocks: list[Tensor] = []
    if is_root and tensor is not None:
        check_output("scatter", output, tensor)
        numels = numels_of_blocks("scatter", "tensor", tensor.shape, output.shape, group, sizes)
        blocks = list(calls.flat(tensor.detach()).split(numels))
        own_block = blocks[place] if tensor.is_contiguous() else None
        check_apart("scatter", tensor, output, allowed=own_block)
    else:
        numels = numels_from_own("scatter", output, group, sizes)
    name = calls.blocks_choice("scatter", algorithm, group, numels, dtype)
    if calls.is_nothing(group, sum(numels)):
        if is_root:
            calls.copy(memory, blocks[place])
        return calls.begin(Nothing(name), "scatter", group, output, asynchronous, back)
    if name == "direct":
        transfer: Transfer = DirectScatter(group, blocks, place, memory)
    else:
        transfer = Native(name, lambda: native.scatter(group, blocks, memory, place))
        if key is not None:
            calls.remember(group, key, "scatter", name, lambda: native.ready_scatter(group, place))
    return calls.begin(transfer, "scatter", group, output, asynchronous, back)


def gather(
    tensor: Tensor,
    group: Group,
    root: int,
    *,
    output: Tensor | None = None,
    sizes: Sequence[int] | None = None,
    algorithm: str = "auto",
    asynchronous: bool = False,
) -> Transfer:
    """The root ends with every rank's tensor, one block of `output` each; `output` is for the root alone.

    At the root `tensor` may be its own block of `output`. `sizes` are given on all ranks, or on none.
    """
    dtype = check_tensor(tensor, group)
    place = place_of(group, root, "root")
    is_root = place == group.index
    if is_root and output is None:
        raise ValueError("gather needs an output at the root")
    own, back = calls.flat(tensor.detach()), None
    blocks: list[Tensor] = []
    if is_root and output is not None:
        check_output("gather", output, tensor)
        numels = numels_of_blocks("gather", "output", output.shape, tensor.shape, group, sizes)
        memory, back = calls.landing(output.detach())
        blocks = list(memory.split(numels))
        check_apart("gather", tensor, output, allowed=blocks[place] if back is None else None)
    else:
        numels = numels_from_own("gather", tensor, group, sizes)
    name = calls.blocks_choice("gather", algorithm, group, numels, dtype)
    result = output if is_root else None
    if calls.is_nothing(group, sum(numels)):
        if is_root:
            calls.copy(blocks[place], own)
        return calls.begin(Nothing(name), "gather", group, result, asynchronous, back)
    if name == "direct":
        transfer: Transfer = DirectGather(group, own, blocks, place)
    else:
        transfer = Native(name, lambda: native.gather(group, own, blocks, place))
    return calls.begin(transfer, "gather", group, result, asynchronous, back)


def send(tensor: Tensor, group: Group, peer: int, *, asynchronous: bool = False) -> Transfer:
    """`tensor` to a rank that receives it; messages of one pair arrive in the order of their sending.

    Keep what an asynchronous one returns until it is complete: dropped, the message is lost. On nccl a
    posted receive holds up what follows it in its group: messages both ways at once need a group each.
    """
    key = ("send", peer, tensor.dtype) if isinstance(tensor, Tensor) else None  # of any size
    if (ready := group.ready.get(key)) and calls.plain(tensor):
        return calls.begun(ready, group, tensor, None, tensor, asynchronous)
    check_tensor(tensor, group)
    place = other_place(group, peer)
    if key is not None:
        calls.remember(group, key, "send", "direct", lambda: native.ready_send(group, place, USER_TAG))
    transfer = Send(group, calls.flat(tensor.detach()), place)
    return calls.begin(transfer, "send", group, tensor, asynchronous)


def recv(tensor: Tensor, group: Group, peer: int, *, asynchronous: bool = False) -> Transfer:
    """Into `tensor`, which must have as many elements as the sender's: no rank can check that by itself."""
    key = ("recv", peer, tensor.dtype) if isinstance(tensor, Tensor) else None  # of any size
    if (ready := group.ready.get(key)) and calls.plain(tensor):
        return calls.begun(ready, group, tensor, None, tensor, asynchronous)
    check_tensor(tensor, group)
    check_output("recv", tensor, tensor)
    place = other_place(group, peer)
    if key is not None:
        calls.remember(group, key, "recv", "direct", lambda: native.ready_recv(group, place, USER_TAG))
    memory, back = calls.landing(tensor.detach())
    return calls.begin(Recv(group, memory, place), "recv", group, tensor, asynchronous, back)

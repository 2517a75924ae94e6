"""Seven collectives, all_to_all, barrier and point-to-point, with one signature style.

    operation(tensor, group, root or peer, output=, op=, sizes=, algorithm="auto", asynchronous=False)

Each returns its `Transfer`, complete unless `asynchronous`; its `output` is the result. Everything wrong that
one rank can see raises ValueError before anything is sent, and leaves the group usable.

`root` and `peer` are global ranks. `op` is sum, min, max or mean; mean is for floating point. `algorithm` is
`auto` (by size and group, from measurement), `native` (the backend's own) or a name in `traffic.ALGORITHMS`.
Integer sums wrap. Tensors need not be contiguous; what is not is copied.

Where a tensor holds one block of each rank, its leading dimension says so, in either of two forms: stacked,
[n, *block], or concatenated, [n * rows, *row]. With `sizes`, rows of each rank's block, it is
[sum of sizes, *row].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from collectives import algorithms as by_hand
from collectives import native
from collectives.checks import (
    check_member,
    check_same_kind,
    check_tensor,
    check_whole,
    numels_from_own,
    numels_of_blocks,
    numels_of_sizes,
    other_place,
    output_like,
    place_of,
)
from collectives.choice import choose
from collectives.group import Group
from collectives.traffic import ITEMSIZE, fan_scratch
from collectives.transfer import USER_TAG, Native, Nothing, Started, Transfer

Back = Callable[[], object] | None
Key = tuple[object, ...]
MOST_READY = 4096  # kinds of calls that are remembered


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
    key = ("all_reduce", op, algorithm, tensor.dtype, tensor.shape)
    if output is None and (ready := group.ready.get(key)) and _plain(tensor):
        return _started(ready, tensor, None, tensor, asynchronous)
    check_tensor(tensor, group, op)
    target = output_like(tensor, output, "all_reduce")
    flat, back = _landing(target)
    if output is not None:
        flat.copy_(tensor.contiguous().view(-1))
    name = choose("all_reduce", algorithm, group.backend, group.size, flat.nbytes)
    if _is_nothing(group, flat.numel()):
        return _begin(Nothing(name, target), asynchronous, back)
    transfer = Native(name, lambda: native.all_reduce(group, flat, op), target)
    if op != "mean":
        _remember(group, key, name, lambda: native.ready_all_reduce(group, op))
    _average(transfer, group, op, flat)
    return _begin(transfer, asynchronous, back)


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
    check_tensor(tensor, group, op)
    place = place_of(group, root, "root")
    is_root = place == group.index
    target = output_like(tensor, output, "reduce")
    name = choose("reduce", algorithm, group.backend, group.size, tensor.nbytes)
    numel = tensor.numel()
    if _is_nothing(group, numel):
        if output is not None and is_root:
            output.copy_(tensor)
        return _begin(Nothing(name, target if is_root else None), asynchronous)
    if name == "fan":
        flat = tensor.contiguous().view(-1)
        landing, back = _landing(target) if is_root else (None, None)
        elements = fan_scratch(numel, tensor.element_size(), group.size, (group.index - place) % group.size)
        scratch, buffer = group.scratch.take(elements, tensor.dtype, tensor.device)
        transfer: Transfer = by_hand.FanReduce(group, flat, place, landing, scratch, op)
        transfer.output = target if is_root else None
        transfer.after(lambda: group.scratch.give_back(buffer))
        if landing is not None and op == "mean":
            transfer.after(lambda: landing.div_(group.size))
        return _begin(transfer, asynchronous, back)
    # The backend's own writes over its tensor on every rank.
    if is_root:
        work, back = _landing(target)
        if output is not None:
            work.copy_(tensor.contiguous().view(-1))
    else:
        work, back = tensor.clone(memory_format=torch.contiguous_format).view(-1), None
    transfer = Native(name, lambda: native.reduce(group, work, op, place), target if is_root else None)
    if is_root:
        _average(transfer, group, op, work)
    return _begin(transfer, asynchronous, back)


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
    key = ("broadcast", root, algorithm, tensor.dtype, tensor.shape)
    if output is None and (ready := group.ready.get(key)) and _plain(tensor):
        return _started(ready, tensor, None, tensor, asynchronous)
    check_tensor(tensor, group)
    place = place_of(group, root, "root")
    target = output_like(tensor, output, "broadcast")
    flat, back = _landing(target)
    if output is not None and place == group.index:
        flat.copy_(tensor.contiguous().view(-1))
    name = choose("broadcast", algorithm, group.backend, group.size, flat.nbytes)
    if _is_nothing(group, flat.numel()):
        return _begin(Nothing(name, target), asynchronous, back)
    if name == "fan":
        transfer: Transfer = by_hand.FanBroadcast(group, flat, place, target)
    else:
        transfer = Native(name, lambda: native.broadcast(group, flat, place), target)
        _remember(group, key, name, lambda: native.ready_broadcast(group, place))
    return _begin(transfer, asynchronous, back)


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
    """
    source = None if tensor is None else (tensor.dtype, tensor.shape)
    key = ("scatter", root, algorithm, source, output.dtype, output.shape)
    ready = group.ready.get(key) if sizes is None else None
    if ready and _plain(output) and (tensor is None or _plain(tensor)):
        return _started(ready, tensor, output, output, asynchronous)
    dtype = check_tensor(output, group)
    place = place_of(group, root, "root")
    is_root = place == group.index
    if is_root and tensor is None:
        raise ValueError("scatter needs a tensor at the root")
    if is_root and tensor is not None:
        check_same_kind(tensor, output, "scatter")
        numels = numels_of_blocks("scatter", "tensor", tensor.shape, output.shape, group, sizes)
    else:
        numels = numels_from_own("scatter", output, group, sizes)
    name = choose("scatter", algorithm, group.backend, group.size, _nbytes(numels, dtype), _uneven(numels))
    flat, back = _landing(output)
    blocks: list[Tensor] = []
    if is_root and tensor is not None:
        blocks = list(tensor.contiguous().view(-1).split(numels))
        if _is_nothing(group, sum(numels)):
            _copy(flat, blocks[place])
    if _is_nothing(group, sum(numels)):
        return _begin(Nothing(name, output), asynchronous, back)
    if name == "direct":
        transfer: Transfer = by_hand.DirectScatter(group, blocks, place, flat)
        transfer.output = output
    else:
        transfer = Native(name, lambda: native.scatter(group, blocks, flat, place), output)
        _remember(group, key, name, lambda: native.ready_scatter(group, place))
    return _begin(transfer, asynchronous, back)


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

    At the root `tensor` may be its own block of `output`.
    """
    dtype = check_tensor(tensor, group)
    place = place_of(group, root, "root")
    is_root = place == group.index
    if is_root and output is None:
        raise ValueError("gather needs an output at the root")
    if is_root and output is not None:
        check_same_kind(tensor, output, "gather")
        numels = numels_of_blocks("gather", "output", output.shape, tensor.shape, group, sizes)
    else:
        numels = numels_from_own("gather", tensor, group, sizes)
    name = choose("gather", algorithm, group.backend, group.size, _nbytes(numels, dtype), _uneven(numels))
    own, back = tensor.contiguous().view(-1), None
    blocks: list[Tensor] = []
    if is_root and output is not None:
        flat, back = _landing(output)
        blocks = list(flat.split(numels))
        if _is_nothing(group, sum(numels)):
            _copy(blocks[place], own)
    result = output if is_root else None
    if _is_nothing(group, sum(numels)):
        return _begin(Nothing(name, result), asynchronous, back)
    if name == "direct":
        transfer: Transfer = by_hand.DirectGather(group, own, blocks, place, result)
    else:
        transfer = Native(name, lambda: native.gather(group, own, blocks, place), result)
    return _begin(transfer, asynchronous, back)


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
    key = ("all_gather", algorithm, tensor.dtype, tensor.shape, output.dtype, output.shape)
    if sizes is None and (ready := group.ready.get(key)) and _plain(tensor) and _plain(output):
        return _started(ready, tensor, output, output, asynchronous)
    dtype = check_tensor(tensor, group)
    check_same_kind(tensor, output, "all_gather")
    numels = numels_of_blocks("all_gather", "output", output.shape, tensor.shape, group, sizes)
    name = choose("all_gather", algorithm, group.backend, group.size, _nbytes(numels, dtype), _uneven(numels))
    flat, back = _landing(output)
    own = tensor.contiguous().view(-1)
    blocks = list(flat.split(numels))
    if _is_nothing(group, sum(numels)):
        _copy(blocks[group.index], own)
        return _begin(Nothing(name, output), asynchronous, back)
    if name == "direct":
        transfer: Transfer = by_hand.DirectAllGather(group, blocks, output, own)
    elif _uneven(numels):
        transfer = Native(name, lambda: native.all_gather_uneven(group, blocks, own), output)
    else:
        transfer = Native(name, lambda: native.all_gather(group, flat, own), output)
        _remember(group, key, name, lambda: native.ready_all_gather(group))
    return _begin(transfer, asynchronous, back)


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
    key: Key | None = None
    if output is not None and sizes is None:
        key = ("reduce_scatter", op, algorithm, tensor.dtype, tensor.shape, output.dtype, output.shape)
        if (ready := group.ready.get(key)) and _plain(tensor) and _plain(output):
            return _started(ready, tensor, output, output, asynchronous)
    dtype = check_tensor(tensor, group, op)
    if output is None:
        if tensor.dim() == 0 or tensor.shape[0] != group.size or sizes is not None:
            raise ValueError(
                f"reduce_scatter of shape {list(tensor.shape)} on {group.size} ranks without output needs "
                f"[{group.size}, *block]; give output for the concatenated form or for sizes"
            )
        output = torch.empty_like(tensor[0])
    check_same_kind(tensor, output, "reduce_scatter")
    numels = numels_of_blocks("reduce_scatter", "tensor", tensor.shape, output.shape, group, sizes)
    size_bytes = _nbytes(numels, dtype)
    name = choose("reduce_scatter", algorithm, group.backend, group.size, size_bytes, _uneven(numels))
    flat, back = _landing(output)
    whole = tensor.contiguous().view(-1)
    blocks = list(whole.split(numels))
    if _is_nothing(group, sum(numels)):
        _copy(flat, blocks[group.index])
        return _begin(Nothing(name, output), asynchronous, back)
    if name == "direct":
        shape = (group.size - 1, numels[group.index])
        scratch, buffer = group.scratch.take(math.prod(shape), tensor.dtype, tensor.device)
        transfer: Transfer = by_hand.DirectReduceScatter(group, blocks, flat, scratch.view(shape), op)
        transfer.output = output
        transfer.after(lambda: group.scratch.give_back(buffer))
        if op == "mean":
            transfer.after(lambda: flat.div_(group.size))
    elif _uneven(numels):
        transfer = Native(name, lambda: native.reduce_scatter_uneven(group, flat, blocks, op), output)
    else:
        transfer = Native(name, lambda: native.reduce_scatter(group, flat, whole, op), output)
        if key is not None and op != "mean":
            _remember(group, key, name, lambda: native.ready_reduce_scatter(group, op))
        _average(transfer, group, op, flat)
    return _begin(transfer, asynchronous, back)


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
    key = ("all_to_all", algorithm, tensor.dtype, tensor.shape, output.dtype, output.shape)
    if (
        sizes is output_sizes is None
        and (ready := group.ready.get(key))
        and _plain(tensor)
        and _plain(output)
    ):
        return _started(ready, tensor, output, output, asynchronous)
    check_tensor(tensor, group)
    check_same_kind(tensor, output, "all_to_all")
    if (sizes is None) != (output_sizes is None):
        raise ValueError("all_to_all takes sizes and output_sizes together, or neither")
    if sizes is None or output_sizes is None:
        check_whole(tensor.shape, group, "all_to_all", "tensor")
        if output.shape != tensor.shape:
            raise ValueError(
                f"all_to_all: output has shape {list(output.shape)} and must have tensor's, "
                f"{list(tensor.shape)}"
            )
        sent = received = [tensor.numel() // group.size] * group.size
    else:
        sent = numels_of_sizes("all_to_all", "sizes", tensor.shape, group, sizes)
        received = numels_of_sizes("all_to_all", "output_sizes", output.shape, group, output_sizes)
        if sent[group.index] != received[group.index]:
            raise ValueError(
                f"all_to_all: this rank keeps sizes[{group.index}]={sizes[group.index]} rows, but "
                f"output_sizes[{group.index}]={output_sizes[group.index]}"
            )
    uneven = sizes is not None
    size_bytes = tensor.nbytes
    if uneven and algorithm == "auto" and group.backend == "gloo":
        algorithm = "direct"  # ranks with other sizes must choose alike
    name = choose("all_to_all", algorithm, group.backend, group.size, size_bytes)
    flat, back = _landing(output)
    whole = tensor.contiguous().view(-1)
    sources, targets = list(whole.split(sent)), list(flat.split(received))
    if group.size == 1 or (not uneven and tensor.numel() == 0):
        _copy(targets[group.index], sources[group.index])
        return _begin(Nothing(name, output), asynchronous, back)
    if name == "direct":
        transfer: Transfer = by_hand.DirectAllToAll(group, sources, targets, output)
    else:
        splits = (received, sent) if uneven else ((), ())
        transfer = Native(name, lambda: native.all_to_all(group, flat, whole, *splits), output)
        if not uneven:
            _remember(group, key, name, lambda: native.ready_all_to_all(group))
    return _begin(transfer, asynchronous, back)


def send(tensor: Tensor, group: Group, peer: int, *, asynchronous: bool = False) -> Transfer:
    """`tensor` to a rank that receives it; messages of one pair arrive in the order of their sending."""
    key = ("send", peer, tensor.dtype, tensor.shape)
    if (ready := group.ready.get(key)) and _plain(tensor):
        return _started(ready, tensor, None, tensor, asynchronous)
    check_tensor(tensor, group)
    place = other_place(group, peer)
    _remember(group, key, "direct", lambda: native.ready_send(group, place, USER_TAG))
    return _begin(by_hand.Send(group, tensor.contiguous().view(-1), place), asynchronous)


def recv(tensor: Tensor, group: Group, peer: int, *, asynchronous: bool = False) -> Transfer:
    """Into `tensor`, which must have as many elements as the sender's."""
    key = ("recv", peer, tensor.dtype, tensor.shape)
    if (ready := group.ready.get(key)) and _plain(tensor):
        return _started(ready, tensor, None, tensor, asynchronous)
    check_tensor(tensor, group)
    place = other_place(group, peer)
    _remember(group, key, "direct", lambda: native.ready_recv(group, place, USER_TAG))
    flat, back = _landing(tensor)
    transfer = by_hand.Recv(group, flat, place)
    transfer.output = tensor
    return _begin(transfer, asynchronous, back)


def barrier(group: Group, *, asynchronous: bool = False) -> Transfer:
    """Complete once every rank of the group has called it."""
    check_member(group)
    if group.size == 1:
        return _begin(Nothing("dissemination"), asynchronous)
    return _begin(Native("dissemination", lambda: native.barrier(group)), asynchronous)


def print_in_rank_order(text: object, group: Group) -> None:
    """Print every rank's text, rank after rank. For debugging: it takes a barrier for each rank."""
    for place, rank in enumerate(group.ranks):
        if place == group.index:
            print(f"rank {rank}: {text}", flush=True)
        barrier(group)


# Parts


def _is_nothing(group: Group, numel: int) -> bool:
    return group.size == 1 or numel == 0


def _uneven(numels: Sequence[int]) -> bool:
    return len(set(numels)) > 1


def _nbytes(numels: Sequence[int], dtype: str) -> int:
    return sum(numels) * ITEMSIZE[dtype]


def _copy(target: Tensor, source: Tensor) -> None:
    if target.data_ptr() != source.data_ptr():
        target.copy_(source)


def _plain(tensor: Tensor) -> bool:
    """Contiguous and on the CPU: what gloo takes as it is."""
    return tensor.is_cpu and tensor.is_contiguous()


def _remember(group: Group, key: Key, name: str, prepare: Callable[[], native.Starter]) -> None:
    """Calls of this kind have been checked, and go to the backend: the next ones start at once.

    Only on gloo, whose own operations take tens of microseconds and are measured against torch's calls.
    """
    if group.backend != "gloo":
        return
    if len(group.ready) >= MOST_READY:
        group.ready.clear()
    group.ready[key] = (name, prepare())


def _started(
    ready: tuple[str, native.Starter],
    tensor: Tensor | None,
    target: Tensor | None,
    output: Tensor,
    asynchronous: bool,
) -> Transfer:
    name, start = ready
    transfer = Started(name, start(tensor, target), output)
    if not asynchronous:
        transfer.wait()
    return transfer


def _landing(output: Tensor) -> tuple[Tensor, Back]:
    """(flat contiguous memory for a result, what brings the result from there to `output`)."""
    if output.is_contiguous():
        return output.view(-1), None
    flat = output.contiguous().view(-1)
    return flat, lambda: output.copy_(flat.view(output.shape))


def _average(transfer: Transfer, group: Group, op: str, flat: Tensor) -> None:
    if op == "mean" and not native.averages(group):
        transfer.after(lambda: flat.div_(group.size))


def _begin(transfer: Transfer, asynchronous: bool, back: Back = None) -> Transfer:
    if back is not None:
        transfer.after(back)
    transfer.start()
    if not asynchronous:
        transfer.wait()
    return transfer

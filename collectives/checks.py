"""What one rank can see to be wrong with a call before anything is sent, and the blocks that shapes mean.

All raise ValueError with one sentence that names what was given and what would be right.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from collectives.group import Group
from collectives.traffic import ITEMSIZE

DTYPES = {getattr(torch, name): name for name in ITEMSIZE}
REDUCTIONS = ("sum", "min", "max", "mean")


def check_member(group: Group) -> None:
    if group.index < 0:
        raise ValueError(f"this rank is not in group {group.name} of ranks {list(group.ranks)}")


def check_tensor(tensor: Tensor, group: Group, op: str | None = None) -> str:
    """The dtype's name, if this group can carry the tensor and do the reduction."""
    check_member(group)
    if not isinstance(tensor, Tensor):
        raise ValueError(f"a {type(tensor).__name__} cannot be sent; give a tensor")
    if tensor.layout != torch.strided:
        raise ValueError(f"a tensor of layout {tensor.layout} cannot be sent; give a dense one")
    dtype = DTYPES.get(tensor.dtype)
    if dtype is None:
        raise ValueError(f"dtype {tensor.dtype} cannot be sent; valid are {', '.join(ITEMSIZE)}")
    if tensor.device.type != group.device.type:
        raise ValueError(
            f"the tensor is on {tensor.device}, and group {group.name} ({group.backend}) carries tensors on "
            f"{group.device}"
        )
    if op is not None:
        if op not in REDUCTIONS:
            raise ValueError(f"op={op} is unknown; valid are {', '.join(REDUCTIONS)}")
        if op == "mean" and not tensor.is_floating_point():
            raise ValueError(f"op=mean of {dtype} would be cut to a whole number; take sum, or a float")
    return dtype


def place_of(group: Group, rank: int, key: str) -> int:
    if not isinstance(rank, int) or rank not in group.ranks:
        raise ValueError(f"{key}={rank} is not in group {group.name} of ranks {list(group.ranks)}")
    return group.place(rank)


def other_place(group: Group, peer: int) -> int:
    place = place_of(group, peer, "peer")
    if place == group.index:
        raise ValueError(f"peer={peer} is this rank itself")
    return place


def output_like(tensor: Tensor, output: Tensor | None, operation: str) -> Tensor:
    """Where the result goes: `output`, or `tensor` itself."""
    if output is None:
        check_output(operation, tensor, tensor)
        return tensor
    check_output(operation, output, tensor)
    if output.shape != tensor.shape:
        raise ValueError(
            f"{operation}: output has shape {list(output.shape)} and must have tensor's, {list(tensor.shape)}"
        )
    return output


def check_output(operation: str, output: Tensor, tensor: Tensor) -> None:
    """A result can be written there, and is of the tensor's kind."""
    if not isinstance(output, Tensor):
        raise ValueError(f"{operation}: output is a {type(output).__name__} and must be a tensor")
    strides = zip(output.stride(), output.shape, strict=True)
    if output.numel() and any(step == 0 and size > 1 for step, size in strides):
        raise ValueError(
            f"{operation}: the result cannot be written to an expanded tensor of shape {list(output.shape)}, "
            "whose elements share memory; clone it first"
        )
    if output.dtype != tensor.dtype or output.device != tensor.device:
        raise ValueError(
            f"{operation}: output is {output.dtype} on {output.device} and must be as the tensor, "
            f"{tensor.dtype} on {tensor.device}"
        )


def check_apart(
    operation: str,
    tensor: Tensor,
    output: Tensor,
    allowed: Tensor | None = None,
    may_be_equal: bool = False,
) -> None:
    """Input and result share no memory, but for `allowed`, a rank's own block, or for all of it.

    What is not contiguous is copied on its way, and cannot be written while it is being sent.
    """
    if not (tensor.is_contiguous() and output.is_contiguous()) or not (tensor.numel() and output.numel()):
        return
    first, second = tensor.data_ptr(), output.data_ptr()
    if first + tensor.nbytes <= second or second + output.nbytes <= first:
        return
    if may_be_equal and first == second and tensor.numel() == output.numel():
        return
    if allowed is not None:
        own = (allowed.data_ptr(), allowed.numel())
        if own in ((first, tensor.numel()), (second, output.numel())):
            return
    exception = " but for this rank's own block" if allowed is not None else ""
    exception = " or be the same" if may_be_equal else exception
    raise ValueError(f"{operation}: tensor and output overlap in memory, and must not{exception}")


def check_whole(shape: torch.Size, group: Group, operation: str, key: str) -> None:
    if len(shape) == 0 or shape[0] % group.size:
        raise ValueError(
            f"{operation}: {key} has shape {list(shape)}; its first dimension must be a multiple of "
            f"{group.size}, the ranks"
        )


def numels_of_sizes(
    operation: str, key: str, shape: torch.Size, group: Group, sizes: Sequence[int]
) -> list[int]:
    """Elements of each block, from rows."""
    if len(sizes) != group.size or any(not isinstance(size, int) or size < 0 for size in sizes):
        raise ValueError(
            f"{operation}: {key}={list(sizes)} must hold {group.size} whole numbers of at least 0"
        )
    if len(shape) == 0 or shape[0] != sum(sizes):
        raise ValueError(
            f"{operation}: {key}={list(sizes)} add up to {sum(sizes)} rows, but the shape is {list(shape)}"
        )
    row = math.prod(shape[1:])
    return [size * row for size in sizes]


def numels_of_blocks(
    operation: str,
    key: str,
    whole: torch.Size,
    block: torch.Size,
    group: Group,
    sizes: Sequence[int] | None,
) -> list[int]:
    """Elements of each rank's block of the tensor called `key`, of which this rank's has shape `block`."""
    n = group.size
    if sizes is not None:
        numels = numels_of_sizes(operation, "sizes", whole, group, sizes)
        expected = (sizes[group.index], *whole[1:])
        if tuple(block) != expected:
            raise ValueError(
                f"{operation}: this rank's block has shape {list(block)} and must have {list(expected)}"
            )
        return numels
    stacked = tuple(whole) == (n, *block)
    concatenated = len(block) > 0 and tuple(whole) == (n * block[0], *block[1:])
    if not (stacked or concatenated):
        forms = f"{[n, *block]}" + (f" or {[n * block[0], *block[1:]]}" if len(block) else "")
        raise ValueError(
            f"{operation} on {n} ranks: {key} has shape {list(whole)}, and for blocks of {list(block)} must "
            f"have {forms}"
        )
    return [math.prod(block)] * n


def numels_from_own(operation: str, block: Tensor, group: Group, sizes: Sequence[int] | None) -> list[int]:
    """Elements of each rank's block, where only this rank's is at hand."""
    if sizes is None:
        return [block.numel()] * group.size
    whole = torch.Size((sum(sizes), *block.shape[1:]))
    return numels_of_blocks(operation, "tensor", whole, block.shape, group, sizes)

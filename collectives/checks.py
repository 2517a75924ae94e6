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
    if rank not in group.ranks:
        raise ValueError(f"{key}={rank} is not in group {group.name} of ranks {list(group.ranks)}")
    return group.place(rank)


def other_place(group: Group, peer: int) -> int:
    place = place_of(group, peer, "peer")
    if place == group.index:
        raise ValueError(f"peer={peer} is this rank itself")
    return place


def output_like(tensor: Tensor, output: Tensor | None, operation: str) -> Tensor:
    if output is None:
        return tensor
    check_same_kind(tensor, output, operation)
    if output.shape != tensor.shape:
        raise ValueError(
            f"{operation}: output has shape {list(output.shape)} and must have tensor's, {list(tensor.shape)}"
        )
    return output


def check_same_kind(tensor: Tensor, output: Tensor, operation: str) -> None:
    if output.dtype != tensor.dtype or output.device != tensor.device:
        raise ValueError(
            f"{operation}: output is {output.dtype} on {output.device} and must be as the tensor, "
            f"{tensor.dtype} on {tensor.device}"
        )


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
    if len(sizes) != group.size or any(size < 0 for size in sizes):
        raise ValueError(f"{operation}: {key}={list(sizes)} must hold {group.size} sizes of at least 0")
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

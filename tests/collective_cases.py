"""What every collective must give, by numpy in float64 (integers exactly), and jobs that run them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from collectives import operations as wire
from collectives.group import Group, World

FLOATS = ("float64", "float32", "bfloat16", "float16")
INTEGERS = ("int64", "int32", "int8", "uint8")
EPSILON = {"float64": 2**-52, "float32": 2**-23, "bfloat16": 2**-7, "float16": 2**-10}
POISON = 77
REDUCING = ("all_reduce", "reduce", "reduce_scatter")


@dataclass(frozen=True)
class Call:
    """One collective on one group; `rows` are those of a block, or of each rank's."""

    operation: str
    dtype: str = "float32"
    op: str = "sum"
    rows: int | tuple[int, ...] = 3
    row: tuple[int, ...] = (2,)
    stacked: bool = False
    contiguous: bool = True
    in_place: bool = False
    algorithm: str = "auto"
    root: int = 0  # place in the group
    asynchronous: bool = False
    seed: int = 0

    def sizes(self, n: int) -> list[int]:
        return [self.rows] * n if isinstance(self.rows, int) else list(self.rows[:n])

    @property
    def even(self) -> bool:
        return isinstance(self.rows, int)


def values(call: Call, place: int, shape: tuple[int, ...]) -> np.ndarray:
    """A rank's input as it is in the call's dtype, in float64 or int64."""
    generator = np.random.default_rng((call.seed, place))
    if call.dtype in INTEGERS:
        low, high = (0, 256) if call.dtype == "uint8" else (-100, 100)
        return generator.integers(low, high, shape)
    rounded = torch.from_numpy(generator.uniform(-4, 4, shape)).to(getattr(torch, call.dtype))
    return rounded.to(torch.float64).numpy()


def reduced(call: Call, inputs: list[np.ndarray]) -> np.ndarray:
    """The reduction in float64, or in integers that wrap as the dtype's do."""
    stack = np.stack(inputs)
    if call.op in ("min", "max"):
        return stack.min(0) if call.op == "min" else stack.max(0)
    total = stack.sum(0)
    if call.op == "mean":
        return total / len(inputs)
    return total.astype(call.dtype).astype(np.int64) if call.dtype in INTEGERS else total


def expected(call: Call, n: int, place: int) -> np.ndarray | None:
    """What the rank at `place` must hold afterwards; None where it gets nothing."""
    sizes = call.sizes(n)
    starts = [sum(sizes[:k]) for k in range(n + 1)]
    whole = (sum(sizes), *call.row)

    def block(k: int) -> np.ndarray:
        return values(call, k, (sizes[k], *call.row))

    match call.operation:
        case "all_reduce":
            return reduced(call, [values(call, k, whole) for k in range(n)])
        case "reduce":
            inputs = [values(call, k, whole) for k in range(n)]
            return reduced(call, inputs) if place == call.root else None
        case "broadcast":
            return values(call, call.root, whole)
        case "scatter":
            return values(call, call.root, whole)[starts[place] : starts[place + 1]]
        case "gather":
            return np.concatenate([block(k) for k in range(n)]) if place == call.root else None
        case "all_gather":
            return np.concatenate([block(k) for k in range(n)])
        case "reduce_scatter":
            inputs = [values(call, k, whole) for k in range(n)]
            return reduced(call, inputs)[starts[place] : starts[place + 1]]
        case "all_to_all":  # rank k sends sizes[j] rows to j where even, (k + j) % 3 rows where not
            parts = []
            for k in range(n):
                rows = all_to_all_rows(call, n, k)
                sent = values(call, k, (sum(rows), *call.row))
                parts.append(sent[sum(rows[:place]) : sum(rows[: place + 1])])
            return np.concatenate(parts)
    raise AssertionError(call.operation)


def all_to_all_rows(call: Call, n: int, place: int) -> list[int]:
    return call.sizes(n) if call.even else [(place + k) % 3 for k in range(n)]


def tensor_of(array: np.ndarray, dtype: str, contiguous: bool) -> Tensor:
    made = torch.from_numpy(np.ascontiguousarray(array)).to(getattr(torch, dtype))
    if contiguous or made.dim() == 0:
        return made
    spread = torch.full((*made.shape, 2), POISON, dtype=made.dtype)
    spread[..., 0] = made
    return spread[..., 0]


def poisoned(shape: tuple[int, ...], dtype: str, contiguous: bool) -> Tensor:
    return tensor_of(np.full(shape, POISON), dtype, contiguous)


def perform(call: Call, group: Group) -> Tensor | None:
    """Run the call on this rank; its result, with its shape made [rows, *row]."""
    n, place = group.size, group.index
    sizes = call.sizes(n)
    whole, own = (sum(sizes), *call.row), (sizes[place], *call.row)
    stacked = (n, *own) if call.stacked and call.even else None
    options: dict[str, Any] = {"algorithm": call.algorithm, "asynchronous": call.asynchronous}
    given = None if call.even else sizes
    root = group.ranks[call.root]

    def made(shape: tuple[int, ...]) -> Tensor:
        return tensor_of(values(call, place, shape), call.dtype, call.contiguous)

    def blank(shape: tuple[int, ...]) -> Tensor:
        return poisoned(shape, call.dtype, call.contiguous)

    function: Callable[..., Any] = getattr(wire, call.operation)
    before: Tensor | None = None
    match call.operation:
        case "all_reduce" | "reduce" | "broadcast":
            tensor = made(whole)
            before = tensor.clone()
            output = None if call.in_place else blank(whole)
            if call.operation != "broadcast":
                options["op"] = call.op
            if call.operation == "all_reduce":
                transfer = function(tensor, group, output=output, **options)
            else:
                transfer = function(tensor, group, root, output=output, **options)
            if call.asynchronous:
                transfer.wait()
            untouched = not call.in_place or (call.operation == "reduce" and place != call.root)
            assert not untouched or torch.equal(tensor, before), "the input was written"
            if call.operation == "reduce" and place != call.root:
                return None
            result = transfer.output
            assert result is (tensor if call.in_place else output)
            return result
        case "scatter":
            tensor = made(whole).view(stacked) if stacked and call.contiguous else made(whole)
            source = tensor if place == call.root else None
            output = blank(own)
            if call.in_place and source is not None:
                output = made(whole)[sum(sizes[:place]) : sum(sizes[: place + 1])]
            transfer = function(source, group, root, output=output, sizes=given, **options)
        case "gather" | "all_gather":
            tensor = made(own)
            output = blank(stacked or whole)
            if call.in_place and not stacked:
                part = output[sum(sizes[:place]) : sum(sizes[: place + 1])]
                part.copy_(tensor)
                tensor = part
            if call.operation == "all_gather":
                transfer = function(tensor, group, output=output, sizes=given, **options)
            else:
                target = output if place == call.root else None
                transfer = function(tensor, group, root, output=target, sizes=given, **options)
        case "reduce_scatter":
            options["op"] = call.op
            tensor = made(whole)
            output = blank(own)
            if call.in_place:
                output = tensor[sum(sizes[:place]) : sum(sizes[: place + 1])]
            if stacked and call.contiguous:
                tensor = tensor.view(stacked)
            transfer = function(tensor, group, output=output, sizes=given, **options)
        case "all_to_all":
            rows = all_to_all_rows(call, n, place)
            received = call.sizes(n) if call.even else [(k + place) % 3 for k in range(n)]
            tensor, output = made((sum(rows), *call.row)), blank((sum(received), *call.row))
            cuts = {} if call.even else {"sizes": rows, "output_sizes": received}
            transfer = function(tensor, group, output=output, **cuts, **options)
        case _:
            raise AssertionError(call.operation)
    if call.asynchronous:
        transfer.wait()
    result = transfer.output
    return None if result is None else result.reshape(-1, *call.row)


def magnitude(call: Call, n: int, place: int) -> np.ndarray:
    """What rounding is relative to: the sum (for a mean, the mean) of absolute values."""
    sizes = call.sizes(n)
    total = sum(np.abs(values(call, k, (sum(sizes), *call.row))) for k in range(n))
    if call.operation == "reduce_scatter":
        total = total[sum(sizes[:place]) : sum(sizes[: place + 1])]
    return total / n if call.op == "mean" else total


def error_of(call: Call, group: Group) -> str | None:
    """What is wrong with this rank's result, by comparison with the independent one."""
    n, place = group.size, group.index
    result, truth = perform(call, group), expected(call, n, place)
    if truth is None or result is None:
        return None if truth is None and result is None else f"{call}: {result} where {truth} was expected"
    if tuple(result.shape) != truth.shape:
        return f"{call}: shape {tuple(result.shape)}, not {truth.shape}"
    if call.dtype in INTEGERS:
        right = np.array_equal(result.numpy().astype(np.int64), truth)
    else:
        moved = call.op in ("min", "max") or call.operation not in REDUCING
        tolerance = 0.0 if moved else n * EPSILON[call.dtype] * magnitude(call, n, place)
        difference = np.abs(result.to(torch.float64).numpy() - truth)
        right = bool((difference <= tolerance).all())
    return None if right else f"{call} on {n} ranks, place {place}: {result} where {truth} was expected"


def run_calls(world: World, calls: list[Call], ranks: tuple[int, ...] | None = None) -> list[str]:
    """Job: what went wrong on this rank, in these calls on the group of `ranks`."""
    members = tuple(range(world.size)) if ranks is None else ranks
    name = "world" if ranks is None else f"test {members}"
    group = world.group(name, members)
    if group.index < 0:
        return []
    return [error for call in calls if (error := error_of(call, group)) is not None]

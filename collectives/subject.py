"""What a bench measures: one operation on tensors of its own, with values that are known beforehand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from collectives import native
from collectives import operations as wire
from collectives.calls import begin
from collectives.choice import choose
from collectives.group import Group
from collectives.traffic import ITEMSIZE
from collectives.transfer import Transfer

OUT_OF_PLACE, IN_PLACE = "out_of_place", "in_place"
PLACEMENTS = (OUT_OF_PLACE, IN_PLACE)
REDUCING = ("all_reduce", "reduce_scatter", "reduce")
ROOTED = ("broadcast", "reduce", "scatter", "gather")
SHARDED = ("all_gather", "reduce_scatter", "scatter", "gather", "all_to_all")
ONLY_OUT_OF_PLACE = ("all_to_all", "send_recv", "barrier")

CHECK_CHUNK = 2**20  # elements compared at a time
POISON = 99


@dataclass(frozen=True)
class Case:
    """What to measure. `root` is a rank, `size_bytes` nccl-tests' S before it is cut to whole elements."""

    operation: str
    size_bytes: int
    dtype: str = "float32"
    reduction: str = "sum"
    root: int = 0
    algorithm: str = "auto"

    def elements(self, n: int) -> int:
        """Elements of S: whole ones, and as many in every rank's block; at least one."""
        if self.operation == "barrier":
            return 0
        count = self.size_bytes // ITEMSIZE[self.dtype]
        return max(1, count // n) * n if self.operation in SHARDED else max(1, count)

    def shards(self, n: int) -> int | list[int]:
        """As `traffic` wants them."""
        count = self.elements(n)
        return [count // n] * n if self.operation in SHARDED else count


class Subject:
    """Tensors of one case on one rank, and the call that moves them."""

    def __init__(self, case: Case, group: Group, placement: str) -> None:
        self.case, self.group, self.placement = case, group, placement
        self.count = case.elements(group.size)
        self.block = self.count // group.size if case.operation in SHARDED else self.count
        self.is_root = group.index == group.place(case.root)
        dtype, device = getattr(torch, case.dtype), group.device
        whole_in = case.operation in ("reduce_scatter", "scatter", "all_to_all") or not self._is_sharded()
        whole_out = case.operation in ("all_gather", "gather", "all_to_all") or not self._is_sharded()
        own = slice(group.index * self.block, (group.index + 1) * self.block)
        self.input = torch.zeros(self.count if whole_in else self.block, dtype=dtype, device=device)
        if placement == OUT_OF_PLACE:
            self.output = torch.zeros(self.count if whole_out else self.block, dtype=dtype, device=device)
        elif whole_in and whole_out:
            self.output = self.input
        elif whole_in:
            self.output = self.input[own]
        else:
            self.output = torch.zeros(self.count, dtype=dtype, device=device)
            self.input = self.output[own]
        self._call = self._bound()

    def _is_sharded(self) -> bool:
        return self.case.operation in SHARDED

    @property
    def algorithm(self) -> str:
        """What moves the bytes of a call."""
        case, group = self.case, self.group
        return choose(case.operation, case.algorithm, group.backend, group.size, self.size_bytes)

    @property
    def size_bytes(self) -> int:
        return self.count * ITEMSIZE[self.case.dtype]

    def run(self, asynchronous: bool = False) -> Transfer:
        """One call, as a user would write it."""
        return self._call(asynchronous)

    def _bound(self) -> Callable[[bool], Transfer]:
        """The call with its arguments, made once: what is measured is the operation."""
        case, group, tensor = self.case, self.group, self.input
        op, root, algorithm = case.reduction, case.root, case.algorithm
        result = self.output
        output = result if self.placement == OUT_OF_PLACE else None
        match case.operation:
            case "all_reduce":
                return lambda later: wire.all_reduce(
                    tensor, group, op=op, output=output, algorithm=algorithm, asynchronous=later
                )
            case "reduce":
                return lambda later: wire.reduce(
                    tensor, group, root, op=op, output=output, algorithm=algorithm, asynchronous=later
                )
            case "broadcast":
                return lambda later: wire.broadcast(
                    tensor, group, root, output=output, algorithm=algorithm, asynchronous=later
                )
            case "reduce_scatter":
                return lambda later: wire.reduce_scatter(
                    tensor, group, op=op, output=result, algorithm=algorithm, asynchronous=later
                )
            case "all_gather":
                return lambda later: wire.all_gather(
                    tensor, group, output=result, algorithm=algorithm, asynchronous=later
                )
            case "all_to_all":
                return lambda later: wire.all_to_all(
                    tensor, group, output=result, algorithm=algorithm, asynchronous=later
                )
            case "scatter":
                source = tensor if self.is_root else None
                return lambda later: wire.scatter(
                    source, group, root, output=result, algorithm=algorithm, asynchronous=later
                )
            case "gather":
                target = result if self.is_root else None
                return lambda later: wire.gather(
                    tensor, group, root, output=target, algorithm=algorithm, asynchronous=later
                )
            case "send_recv":
                return self._send_recv()
            case "barrier":
                return lambda later: wire.barrier(group, asynchronous=later)
        raise ValueError(f"operation={case.operation} cannot be measured")

    def _send_recv(self) -> Callable[[bool], Transfer]:
        """To the next rank, from the one before: the receive first, so that both directions are busy."""
        group, tensor, output = self.group, self.input, self.output
        before, following = group.ranks[group.index - 1], group.ranks[(group.index + 1) % group.size]

        def together(later: bool) -> Transfer:
            messages = native.Together(group, output, before, tensor, following)
            return begin(messages, "send_recv", group, output, later)

        def both(later: bool) -> Transfer:
            received = wire.recv(output, group, before, asynchronous=True)
            sent = wire.send(tensor, group, following, asynchronous=True)
            if later:
                received.after(sent.wait)
            else:
                received.wait()  # this way round: waiting for the send first wakes the rank twice
                sent.wait()
            return received

        return together if group.backend == "nccl" else both

    # Values: whole numbers so small that every dtype holds their sums exactly

    def fill(self) -> None:
        """Inputs as `expected` assumes; poison where the result goes."""
        self.output.fill_(POISON)
        self.input.copy_(_values(self.group.size, self.group.index, 0, self.input.numel()))

    def wrong(self) -> int:
        """Elements of this rank's result that differ from what they must be."""
        if self.case.operation == "barrier" or (
            self.case.operation in ("reduce", "gather") and not self.is_root
        ):
            return 0
        count = 0
        for start in range(0, self.output.numel(), CHECK_CHUNK):
            stop = min(start + CHECK_CHUNK, self.output.numel())
            truth = self._expected(start, stop)
            found = self.output[start:stop].to("cpu", torch.float64)
            tolerance = torch.finfo(self.output.dtype).eps if self.output.is_floating_point() else 0.0
            count += int((~((found - truth).abs() <= tolerance * truth.abs())).sum())
        return count

    def _expected(self, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of the result, in float64, from every rank's `_values`."""
        case, n, index = self.case, self.group.size, self.group.index
        root = self.group.place(case.root)
        match case.operation:
            case "all_reduce" | "reduce" | "reduce_scatter":
                shift = index * self.block if case.operation == "reduce_scatter" else 0
                parts = torch.stack([_values(n, r, start + shift, stop + shift) for r in range(n)])
                if case.reduction in ("min", "max"):
                    return parts.amin(0) if case.reduction == "min" else parts.amax(0)
                return parts.sum(0) / (n if case.reduction == "mean" else 1)
            case "broadcast":
                return _values(n, root, start, stop)
            case "scatter":
                return _values(n, root, start + index * self.block, stop + index * self.block)
            case "send_recv":
                return _values(n, (index - 1) % n, start, stop)
        # One block of each rank: all_to_all takes it from the sender's block for this rank.
        shift = index * self.block if case.operation == "all_to_all" else 0
        pieces = []
        for rank in range(n):
            first, last = max(start, rank * self.block), min(stop, (rank + 1) * self.block)
            if first < last:
                low = first - rank * self.block + shift
                pieces.append(_values(n, rank, low, low + last - first))
        return torch.cat(pieces)


def _values(n: int, rank: int, start: int, stop: int) -> Tensor:
    """float64 [stop - start]: what `rank` of `n` has at these places, whole numbers below `_values_below(n)`.

    Scattered, so that a block in the wrong place shows, wherever it went.
    """
    mask = 2**31 - 1
    mixed = (torch.arange(start, stop, dtype=torch.int64) + rank * 1_000_003).mul_(2_654_435_761)
    mixed.bitwise_and_(mask)
    mixed.bitwise_xor_(mixed >> 15).mul_(1_103_515_245).bitwise_and_(mask)
    mixed.bitwise_xor_(mixed >> 12)
    return mixed.remainder_(_values_below(n)).to(torch.float64)


def _values_below(n: int) -> int:
    """So small that sums over n ranks stay below 128 in every dtype, as far as that goes."""
    return max(2, min(7, 1 + 127 // n))

"""Seven collectives, all_to_all, barrier and point-to-point, with one signature style.

    operation(tensor, group, root or peer, output=, op=, sizes=, algorithm="auto", asynchronous=False)

Each returns its `Transfer`, complete unless `asynchronous`; its `output` is the result. Everything wrong that
one rank can see raises ValueError before anything is sent, and leaves the group usable. A peer that is gone,
or does not come within the group's timeout, raises a RuntimeError that names the operation and the group.

`root` and `peer` are global ranks. `op` is sum, min, max or mean; mean is for floating point, and sums before
it divides: what overflows as a sum overflows. What min and max make of a NaN is the algorithm's: those
written by hand pass it on, gloo's may not. Integer sums wrap. `algorithm` is `auto` (by size and group, from
measurement), `native` (the backend's own) or a name in `traffic.ALGORITHMS`. Tensors need not be contiguous;
what is not is copied. Keep what an asynchronous call returns until it is complete: dropped, its messages may
be lost, and a peer waits for them. Gradients are not recorded.

Where a tensor holds one block of each rank, its leading dimension says so, in either of two forms: stacked,
[n, *block], or concatenated, [n * rows, *row]. With `sizes`, rows of each rank's block, it is
[sum of sizes, *row].
"""

from __future__ import annotations

from collectives.group import Group
from collectives.rooted import broadcast, gather, recv, reduce, scatter, send
from collectives.symmetric import all_gather, all_reduce, all_to_all, barrier, reduce_scatter

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "gather",
    "print_in_rank_order",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
]


def print_in_rank_order(text: object, group: Group) -> None:
    """Print every rank's text, rank after rank. For debugging: it takes a barrier for each rank."""
    for place, rank in enumerate(group.ranks):
        if place == group.index:
            print(f"rank {rank}: {text}", flush=True)
        barrier(group)

"""Which algorithm moves an operation: asked for by name, or `auto`, from measurement."""

from __future__ import annotations

from collections.abc import Sequence

from collectives.traffic import ALGORITHMS, native

AUTO, NATIVE = "auto", "native"
EQUAL_BLOCKS_ONLY = ("all_gather", "reduce_scatter", "scatter", "gather")  # gloo's own

# gloo: the by-hand algorithm from this many bytes of S on, for two ranks and for more; None: never. Below,
# the backend's own is as fast or faster. `bench.algorithms=[direct]` with `bench.against=native` measures it,
# and docs/wire.md has the figures.
KIB, MIB = 2**10, 2**20
BY_HAND_FROM_BYTES: dict[str, tuple[int | None, int | None]] = {
    "all_gather": (256 * KIB, 0),
    "reduce_scatter": (64 * KIB, 0),
    "all_to_all": (4 * MIB, 4 * MIB),
    "broadcast": (None, 4 * MIB),  # between two ranks a tree is one message
    "reduce": (8, 0),  # gloo's moves one element in one message
    "scatter": (None, None),  # the same messages either way
    "gather": (0, 0),
}


def choose(operation: str, choice: str, backend: str, n: int, size_bytes: int, uneven: bool = False) -> str:
    """The name in `traffic.ALGORITHMS` of what will move the bytes; equal on all ranks.

    Args:
        choice: `auto`, `native`, or a name in `traffic.ALGORITHMS[operation]`.
        size_bytes: S, the full tensor.
        uneven: blocks differ in size.

    Raises:
        ValueError: no such algorithm, or one that cannot do it.
    """
    own, *by_hand = ALGORITHMS[operation]
    if backend == "nccl":
        if choice not in (AUTO, NATIVE):
            raise ValueError(
                f"algorithm={choice} is for gloo; on nccl {operation} is its own: auto or native"
            )
        return native(operation, backend)
    if choice == AUTO:
        if not by_hand:
            return own
        if uneven and operation in EQUAL_BLOCKS_ONLY:
            return by_hand[0]
        start = BY_HAND_FROM_BYTES[operation][0 if n == 2 else 1]
        return own if start is None or size_bytes < start else by_hand[0]
    if choice in (NATIVE, own):
        if uneven and operation in EQUAL_BLOCKS_ONLY:
            raise ValueError(
                f"algorithm={choice} cannot {operation} blocks of unequal sizes on gloo; "
                f"use auto or {by_hand[0]}"
            )
        return own
    if choice not in by_hand:
        names = ", ".join((AUTO, NATIVE, own, *by_hand))
        raise ValueError(f"algorithm={choice} is unknown for {operation}; valid are {names}")
    return choice


def refuse_uneven(operation: str, sizes: Sequence[int]) -> None:
    """The backend's own collectives take equal blocks in a plan.

    Raises:
        ValueError: blocks that differ.
    """
    if len(set(sizes)) > 1:
        raise ValueError(
            f"collectives.algorithm=native cannot {operation} blocks of unequal sizes {list(sizes)}; "
            "use collectives.algorithm=direct, or a width that the world size divides"
        )

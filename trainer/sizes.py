"""Sizes of messages as people write them, and sweeps of them."""

from __future__ import annotations

import re
from fractions import Fraction

from trainer.errors import InputError, shown

UNITS = {
    "": 1,
    "B": 1,
    "kB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
}
MOST_SIZES = 1000
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)")


def read_size(text: str, key: str) -> int:
    """Bytes of `4096`, `16MiB` (binary) or `400MB` (decimal). `key` is for the sentence.

    Raises:
        InputError: no number, an unknown unit, or no whole number of bytes.
    """
    match = _SIZE.fullmatch(text.strip())
    factor = UNITS.get(match[2]) if match else None
    size = Fraction(match[1]) * factor if match and factor else None
    if size is None or size.denominator != 1:
        raise InputError(
            f"{shown(key, text)} must be a whole number of bytes, or a number with one of "
            f"{', '.join(unit for unit in UNITS if unit)}, such as 16MiB"
        )
    return int(size)


def sweep(least: int, most: int, factor: float) -> list[int]:
    """Sizes from `least` up, each `factor` times the last and rounded down, as far as `most`.

    Raises:
        InputError: more sizes than anybody waits for.
    """
    sizes: list[int] = []
    size = least
    while size <= most:
        if len(sizes) == MOST_SIZES:
            raise InputError(
                f"bench.factor={factor} makes more than {MOST_SIZES:,} sizes from {least:,} to {most:,} "
                "bytes; take a larger one"
            )
        sizes.append(size)
        size = max(size + 1, int(size * Fraction(factor)))
    return sizes

"""The order of samples: it depends on (rows, seed, epoch) alone; and the steps that an epoch has."""

from __future__ import annotations

import numpy as np

from trainer.config import InputError


def random_words(seed: int, stream: int, block: int, count: int) -> np.ndarray:
    """`count` random uint64 from position 4 * `block` of the sequence that (seed, stream) names.

    Philox-4x64-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11), key
    (seed mod 2**64, stream): any part of the sequence can be had without the parts before it.
    """
    key = np.array([seed % 2**64, stream], np.uint64)
    return np.random.Philox(key=key, counter=block).random_raw(count)


def epoch_order(rows: int, seed: int, epoch: int) -> np.ndarray:
    """The order in which an epoch visits its rows, an int64 permutation of 0 .. rows - 1.

    Rows are sorted by random keys. The row number takes a key's low bits: keys are distinct, so the
    order is the same for every sorting algorithm, numpy version and machine.
    """
    bits = np.uint64((rows - 1).bit_length() if rows else 0)
    low = (np.uint64(1) << bits) - np.uint64(1)
    keys = random_words(seed, 0, epoch << 128, rows)
    keys &= ~low
    keys |= np.arange(rows, dtype=np.uint64)
    keys.sort()
    keys &= low
    return keys.view(np.int64)


def steps_per_epoch(rows: int, batch_size: int, drop_last: bool) -> int:
    """Global batches in one pass over the training rows; the last may be smaller unless dropped."""
    return rows // batch_size if drop_last else -(-rows // batch_size)


def require_steps(rows: int, batch_size: int, drop_last: bool) -> int:
    """`steps_per_epoch`, or InputError when it would be 0."""
    if batch_size < 1:
        raise InputError(f"data.batch_size={batch_size} is no number of rows; it must be at least 1")
    steps = steps_per_epoch(rows, batch_size, drop_last)
    if steps == 0:
        raise InputError(
            f"data.batch_size={batch_size} with data.drop_last={str(drop_last).lower()} leaves no step "
            f"of {rows} training rows; it must be at most {rows}"
        )
    return steps

"""What a data set is, how its values are checked, and how rows of it get into a batch's buffers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from trainer.config import InputError

SCAN_BYTES = 1 << 30  # of each float array, read before step 0 in search of a NaN
CHUNK_BYTES = 16 << 20
CLASSES_MAX = 1 << 20  # a label above is taken for a mistake: the last layer would have as many columns

_NUMPY_DTYPE = {
    torch.float32: np.dtype(np.float32),
    torch.float64: np.dtype(np.float64),
    torch.int64: np.dtype(np.int64),
}
_CAST_ELEMENTS = 1 << 14  # below torch's grain of 2**15: a cast stays on the thread that asked for it


@dataclass(frozen=True)
class DataSpec:
    """The sizes that a model and a plan need: `eval_rows` is 0 when nothing is held out."""

    input_shape: tuple[int, ...]  # of one row
    output_dim: int  # classes, or regression outputs
    task: str  # classification or regression
    train_rows: int
    eval_rows: int

    def new_targets(self, rows: int) -> np.ndarray:
        """Room for the targets of `rows` rows: int64 [rows], or float32 [rows, output_dim]."""
        if self.task == "classification":
            return np.empty(rows, np.int64)
        return np.empty((rows, self.output_dim), np.float32)


@dataclass(frozen=True, eq=False)
class Dataset:
    """Inputs are float [rows, *input_shape]; targets int [rows], or float [rows, output_dim].

    All four are C-contiguous arrays in memory, or memory-mapped files. `names` says how a message
    calls each of them, by field name.
    """

    spec: DataSpec
    train_inputs: np.ndarray
    train_targets: np.ndarray
    eval_inputs: np.ndarray
    eval_targets: np.ndarray
    names: Mapping[str, str] = field(default_factory=dict)

    def name_of(self, array: str) -> str:
        return self.names.get(array, array)


def place(row: int, column: tuple[int, ...]) -> str:
    """The words for one value of an array: its row, and its column where rows have any."""
    if not column:
        return f"row {row}"
    return f"row {row}, column {column[0] if len(column) == 1 else column}"


def first_not_finite(block: np.ndarray) -> tuple[int, ...] | None:
    """Index of the first NaN or infinity in a float array, None if all values are finite.

    A finite sum proves that every value is finite, so the usual price is one reduction. Where the
    sum overflows, the values themselves decide.
    """
    with np.errstate(all="ignore"):
        total = np.add.reduce(block.reshape(-1), dtype=np.float32 if block.dtype.itemsize < 4 else None)
    if np.isfinite(total):
        return None
    bad = np.flatnonzero(~np.isfinite(block))
    return tuple(int(i) for i in np.unravel_index(bad[0], block.shape)) if len(bad) else None


def check_finite(array: np.ndarray, name: str, limit_bytes: int | None = None) -> None:
    """Refuse a NaN or infinity in the first `limit_bytes` (SCAN_BYTES) of a float array [rows, ...].

    Later rows are checked when a batch reads them.
    """
    row_bytes = max(1, array.nbytes // len(array)) if len(array) else 1
    rows = min(len(array), math.ceil((SCAN_BYTES if limit_bytes is None else limit_bytes) / row_bytes))
    chunk = max(1, CHUNK_BYTES // row_bytes)
    for start in range(0, rows, chunk):
        block = array[start : min(rows, start + chunk)]
        found = first_not_finite(block)
        if found is not None:
            where = place(start + found[0], found[1:])
            raise InputError(f"{name}: {where} is {block[found]!s}; every value must be a finite number")


def check_labels(labels: np.ndarray, name: str, classes: int | None = None) -> int:
    """The largest label plus one; refuses labels outside 0 .. classes - 1 (None: CLASSES_MAX).

    Reads the whole of `labels`, int [rows].
    """
    low, high = int(labels.min()), int(labels.max())
    if low < 0:
        row = int(np.argmax(labels < 0))
        raise InputError(f"{name}: row {row} is {labels[row]}; labels must be 0 or more")
    limit = CLASSES_MAX if classes is None else classes
    if high >= limit:
        row = int(np.argmax(labels >= limit))
        why = (
            "more classes than any model here" if classes is None else "the training labels' largest plus one"
        )
        raise InputError(f"{name}: row {row} is {labels[row]}; labels must be below {limit} ({why})")
    return high + 1


@dataclass(frozen=True)
class View:
    """The first rows of a buffer, as torch and as numpy see them (bfloat16 as its bits)."""

    tensor: torch.Tensor
    array: np.ndarray
    casts: list[tuple[torch.Tensor, torch.Tensor]]  # bfloat16 only: (destination, source) pieces


class Column:
    """Copies chosen rows of one array into a buffer of the run's dtype and refuses what is no number."""

    def __init__(
        self, source: np.ndarray, name: str, dtype: torch.dtype, classes: int | None, rows: int
    ) -> None:
        assert source.flags.c_contiguous, f"{name}: gathering would copy the whole array for every batch"
        self.source, self.name, self.classes = np.asarray(source), name, classes
        self.dtype = torch.int64 if classes is not None else dtype
        self.shape = (rows, *source.shape[1:])
        direct = self.dtype in _NUMPY_DTYPE and _NUMPY_DTYPE[self.dtype] == source.dtype
        self.staging = None if direct else np.empty(self.shape, source.dtype)

    def views(self, sizes: set[int], pin_memory: bool) -> dict[int, View]:
        """One new buffer, seen at each of the row counts that batches have."""
        buffer = torch.empty(self.shape, dtype=self.dtype, pin_memory=pin_memory)
        return {rows: self._view(buffer[:rows]) for rows in sizes}

    def _view(self, tensor: torch.Tensor) -> View:
        if self.dtype != torch.bfloat16:
            return View(tensor, tensor.numpy(), [])
        assert self.staging is not None
        staged = torch.from_numpy(self.staging[: len(tensor)]).view(-1)
        pieces = zip(tensor.view(-1).split(_CAST_ELEMENTS), staged.split(_CAST_ELEMENTS), strict=True)
        return View(tensor, tensor.view(torch.int16).numpy().view(np.uint16), list(pieces))

    def fill(self, view: View, index: np.ndarray) -> torch.Tensor:
        """Gather rows `index` into `view`. Raises InputError for a value that the dtype can't hold."""
        # mode: the default checks indices through a copy of the output
        if self.staging is None:
            np.take(self.source, index, axis=0, out=view.array, mode="clip")
        else:
            staged = self.staging[: len(index)]
            np.take(self.source, index, axis=0, out=staged, mode="clip")
            for destination, source in view.casts:
                destination.copy_(source)
            if not view.casts:
                with np.errstate(over="ignore"):
                    np.copyto(view.array, staged, casting="same_kind")
        if len(index):
            self._check(view.array, index)
        return view.tensor

    def _check(self, array: np.ndarray, index: np.ndarray) -> None:
        found: tuple[int, ...] | None
        if self.classes is not None:
            if array.view(np.uint64).max() < self.classes:  # as unsigned, a negative label is a large one
                return
            found = (int(np.argmax(array.view(np.uint64) >= self.classes)),)
        elif array.dtype == np.uint16:
            bad = (array & 0x7FFF) >= 0x7F80  # bfloat16: exponent bits all set
            found = tuple(int(i) for i in np.argwhere(bad)[0]) if bad.any() else None
        else:
            found = first_not_finite(array)
        if found is None:
            return
        row, column = int(index[found[0]]), found[1:]
        value = self.source[(row, *column)]
        if self.classes is not None:
            right = f"labels must be 0 to {self.classes - 1}"
        elif np.isfinite(value):
            right = f"trainer.dtype={str(self.dtype).removeprefix('torch.')} can't hold it: rescale the data"
        else:
            right = "every value must be a finite number"
        raise InputError(f"{self.name}: {place(row, column)} is {value!s}; {right}")

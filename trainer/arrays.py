"""The user's own `.npy` and `.npz` files as a data set.

Nothing is unpickled. Whatever could end in a wrong number later (a file cut short, labels that are
no integers, a NaN) is refused here, in one sentence that names key, file, row and column.
"""

from __future__ import annotations

import math
import os
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO

import numpy as np

from trainer.config import DataConfig, InputError
from trainer.dataset import SCAN_BYTES, Dataset, DataSpec, check_finite, check_labels

FORMATS = (".npy", ".npz")


@dataclass(frozen=True)
class ArrayFile:
    """One array on disk, known by its header alone. `member` is its name within an `.npz`."""

    name: str  # "data.inputs=x.npy", as a message calls it
    path: str
    member: str | None
    shape: tuple[int, ...]
    dtype: np.dtype
    column_order: bool
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def load(self) -> np.ndarray:
        """The array, C-contiguous and in native byte order: mapped where it can be, else in memory.

        Raises InputError for an archive that is damaged, and for a large file in column or foreign
        byte order: gathering rows from either would read the whole file for every batch.
        """
        native = self.dtype.newbyteorder("=")
        with _refusing(self.name):
            if self.member is not None:
                with zipfile.ZipFile(self.path) as archive, archive.open(self.member) as stream:
                    array = np.lib.format.read_array(stream, allow_pickle=False)
                    stream.read(1)  # reaching the end is what makes zipfile compare the checksum
                return np.ascontiguousarray(array, dtype=native)
            order = "F" if self.column_order else "C"
            mapped = np.memmap(self.path, self.dtype, "r", self.offset, self.shape, order=order)  # type: ignore[call-overload]
            if mapped.flags.c_contiguous and self.dtype == native:
                return mapped
            if self.nbytes > SCAN_BYTES:
                raise InputError(
                    f"{self.name} is stored in column or foreign byte order and with {self.nbytes} bytes "
                    f"too large to convert; save it with numpy.ascontiguousarray(array, '{native.name}')"
                )
            return np.ascontiguousarray(mapped, dtype=native)


@contextmanager
def _refusing(name: str) -> Iterator[None]:
    """Turn what goes wrong in reading a file into one sentence."""
    try:
        yield
    except InputError:
        raise
    except MemoryError as error:
        raise InputError(f"{name} does not fit into memory; give .npy, which is memory-mapped") from error
    except Exception as error:  # damaged bytes fail in many ways, deep in numpy and zipfile
        reason = " ".join(str(error).split())[:160] or type(error).__name__
        raise InputError(
            f"{name} is damaged, cut short or not readable ({reason}); write it again"
        ) from error


def _read_header(stream: IO[bytes], name: str) -> tuple[tuple[int, ...], bool, np.dtype, int]:
    """Shape, column order, dtype and length in bytes of an `.npy` header."""
    version = np.lib.format.read_magic(stream)
    if version == (1, 0):
        shape, column_order, dtype = np.lib.format.read_array_header_1_0(stream)
    elif version == (2, 0):
        shape, column_order, dtype = np.lib.format.read_array_header_2_0(stream)
    else:
        raise InputError(f"{name} has .npy version {version}; save a plain float or integer array")
    if any(size < 0 for size in shape):
        raise InputError(f"{name} has a header with a negative size {shape}; write it again")
    return shape, column_order, dtype, stream.tell()


def _split(name: str, value: str) -> tuple[str, str | None]:
    """Path and `.npz` key of a value such as `rows.npz:inputs`; other formats are refused by name."""
    path, colon, member = value.rpartition(".npz:")
    if colon:
        return path + ".npz", member
    suffix = os.path.splitext(value)[1].lower()
    if ".npy:" in value:
        raise InputError(f"{name} gives a key within an .npy file; only .npz files have keys")
    if suffix not in FORMATS:
        what = f"a {suffix} file" if suffix else "a file without extension"
        raise InputError(f"{name} is {what}; give .npy or .npz")
    return value, None


def find_array(key: str, value: str, default_member: str) -> ArrayFile:
    """Read the header of the array that config key `key` names; `default_member` is the key in an `.npz`."""
    name = f"{key}={value}"
    path, member = _split(name, value)
    path = os.path.expanduser(path)
    if not os.path.exists(path):
        raise InputError(f"{name} does not exist; give the path of an .npy or .npz file")
    if os.path.isdir(path):
        raise InputError(f"{name} is a folder; give the path of an .npy or .npz file")
    size_bytes = os.path.getsize(path)
    if size_bytes == 0:
        raise InputError(f"{name} is an empty file; give an .npy or .npz file that holds rows")
    with _refusing(name):
        if not path.lower().endswith(".npz"):
            with open(path, "rb") as stream:
                shape, column_order, dtype, offset = _read_header(stream, name)
            found = ArrayFile(name, path, None, shape, dtype, column_order, offset)
        else:
            with zipfile.ZipFile(path) as archive:
                wanted = f"{member or default_member}.npy"
                entries = {entry.filename: entry for entry in archive.infolist()}
                if wanted not in entries:
                    keys = ", ".join(sorted(e.removesuffix(".npy") for e in entries)) or "none"
                    raise InputError(f"{name} has no key {wanted[:-4]!r}; its keys: {keys}")
                size_bytes = entries[wanted].file_size
                with archive.open(wanted) as stream:
                    shape, column_order, dtype, offset = _read_header(stream, name)
            found = ArrayFile(name, path, wanted, shape, dtype, column_order, offset)
    if dtype.hasobject:
        raise InputError(f"{name} holds Python objects, which are never unpickled; save plain numbers")
    if offset + found.nbytes != size_bytes:
        kind = "is cut short" if size_bytes < offset + found.nbytes else "holds more than one array"
        raise InputError(f"{name} {kind}: {size_bytes} bytes, where its header says {offset + found.nbytes}")
    return found


def _check_dtype(file: ArrayFile, kinds: str, what: str, advice: str) -> None:
    if file.dtype.kind not in kinds or file.dtype.itemsize > 8:
        raise InputError(f"{file.name} has dtype {file.dtype}; {what}: {advice}")


def _check_pair(inputs: ArrayFile, targets: ArrayFile, task: str) -> None:
    """Refuse inputs and targets whose dtype, dimensions or rows can't be what `task` needs."""
    _check_dtype(inputs, "f", "inputs must be floating point up to float64", "save array.astype('float32')")
    if len(inputs.shape) < 2:
        raise InputError(f"{inputs.name} has shape {inputs.shape}; inputs must be [rows, columns, ...]")
    if task == "classification":
        _check_dtype(
            targets, "iu", "labels must be integers", "save array.astype('int64') or set data.task=regression"
        )
        if len(targets.shape) != 1:
            raise InputError(f"{targets.name} has shape {targets.shape}; labels must be [rows], one per row")
    else:
        _check_dtype(
            targets,
            "f",
            "regression targets must be floating point up to float64",
            "save array.astype('float32')",
        )
        if len(targets.shape) not in (1, 2):
            raise InputError(
                f"{targets.name} has shape {targets.shape}; targets must be [rows] or [rows, outputs]"
            )
    for file in (inputs, targets):
        if 0 in file.shape:
            raise InputError(
                f"{file.name} has shape {file.shape}, which holds no value; give at least one row"
            )
    if inputs.shape[0] != targets.shape[0]:
        raise InputError(
            f"{targets.name} has {targets.shape[0]} rows, but {inputs.name} has {inputs.shape[0]}; "
            "give as many of both"
        )


def _find_pair(config: DataConfig, prefix: str) -> tuple[ArrayFile, ArrayFile] | None:
    """Headers of `data.<prefix>inputs` and `data.<prefix>targets`; None when neither is set."""
    values = {name: getattr(config, prefix + name) for name in ("inputs", "targets")}
    if values["inputs"] is None and values["targets"] is None:
        return None
    for name, value in values.items():
        if not value:
            raise InputError(f"data.{prefix}{name}=null is not set; give .npy or .npz, as its partner is")
    inputs, targets = (find_array(f"data.{prefix}{name}", value, name) for name, value in values.items())
    _check_pair(inputs, targets, config.task)
    return inputs, targets


def _output_dim(targets: ArrayFile, values: np.ndarray | None) -> int:
    if values is not None:
        return check_labels(values, targets.name)
    return targets.shape[1] if len(targets.shape) == 2 else 1


def describe_arrays(config: DataConfig) -> DataSpec:
    """Sizes from the headers, and from the labels, whose largest gives the number of classes."""
    train, held_out = _find_pair(config, ""), _find_pair(config, "eval_")
    if train is None:
        raise InputError("data.inputs=null is not set; data=arrays needs an .npy or .npz file")
    inputs, targets = train
    labels = targets.load() if config.task == "classification" else None
    input_shape, output_dim = inputs.shape[1:], _output_dim(targets, labels)
    if held_out is not None:
        if held_out[0].shape[1:] != input_shape:
            raise InputError(
                f"{held_out[0].name} has rows of shape {held_out[0].shape[1:]}; "
                f"they must be {input_shape}, as in {inputs.name}"
            )
        if labels is None and _output_dim(held_out[1], None) != output_dim:
            raise InputError(
                f"{held_out[1].name} has {_output_dim(held_out[1], None)} outputs; "
                f"it must have {output_dim}, as {targets.name} has"
            )
    eval_rows = held_out[0].shape[0] if held_out else 0
    return DataSpec(input_shape, output_dim, config.task, inputs.shape[0], eval_rows)


def load_arrays(config: DataConfig) -> Dataset:
    """The user's own arrays, checked: labels whole, float values up to SCAN_BYTES per array."""
    spec = describe_arrays(config)
    names: dict[str, str] = {}

    def load(part: str, pair: tuple[ArrayFile, ArrayFile] | None) -> tuple[np.ndarray, np.ndarray]:
        if pair is None:
            return np.empty((0, *spec.input_shape), np.float32), spec.new_targets(0)
        inputs, targets = (file.load() for file in pair)
        names.update({f"{part}_inputs": pair[0].name, f"{part}_targets": pair[1].name})
        check_finite(inputs, pair[0].name)
        if spec.task == "classification":
            check_labels(targets, pair[1].name, spec.output_dim)
            return inputs, targets
        check_finite(targets, pair[1].name)
        return inputs, targets.reshape(len(targets), spec.output_dim)

    train, held_out = load("train", _find_pair(config, "")), load("eval", _find_pair(config, "eval_"))
    return Dataset(spec, *train, *held_out, names=names)

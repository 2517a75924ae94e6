"""The data sets that a config can name: `digits`, `synthetic`, `arrays`.

Every rank holds, or maps, the whole set and reads its own rows of each batch (`trainer.loader`).
"""

from __future__ import annotations

import math

import numpy as np

from trainer.arrays import describe_arrays, load_arrays
from trainer.config import DataConfig, InputError
from trainer.dataset import Dataset, DataSpec
from trainer.loader import Batch, TrainLoader, eval_batches
from trainer.order import epoch_order, random_words, require_steps, steps_per_epoch

__all__ = [
    "Batch",
    "DataSpec",
    "Dataset",
    "TrainLoader",
    "describe",
    "epoch_order",
    "eval_batches",
    "load_dataset",
    "steps_per_epoch",
    "synthetic_inputs",
    "teacher",
]

NAMES = ("digits", "synthetic", "arrays")
TASKS = ("classification", "regression")
DIGITS = DataSpec((64,), 10, "classification", 1437, 360)
EVAL_ROW = 1 << 40  # number of the first held-out row of synthetic data
NOISE_MAX = 1e6
_INPUTS, _TEACHER, _NOISE = 1, 2, 3  # streams of random_words; 0 is the order of samples
_CHUNK_ROWS = 1024


def describe(config: DataConfig, *, seed: int, hidden_dim: int) -> DataSpec:
    """The sizes of the data set, from headers and config; of `arrays`, labels are read whole.

    `hidden_dim` is synthetic data's width when `data.dim` is null. Raises InputError.
    """
    _check(config)
    if config.name == "digits":
        spec = DIGITS
    elif config.name == "synthetic":
        spec = _describe_synthetic(config, hidden_dim)
    else:
        spec = describe_arrays(config)
    require_steps(spec.train_rows, config.batch_size, config.drop_last)
    return spec


def load_dataset(config: DataConfig, *, seed: int, hidden_dim: int) -> Dataset:
    """The data set itself, checked for NaN, infinities and labels out of range. Raises InputError."""
    spec = describe(config, seed=seed, hidden_dim=hidden_dim)
    if config.name == "digits":
        return _load_digits()
    if config.name == "synthetic":
        return _make_synthetic(config, spec, seed)
    return load_arrays(config)


def _check(config: DataConfig) -> None:
    if config.name not in NAMES:
        raise InputError(f"data={config.name} is unknown; give one of {', '.join(NAMES)}")
    if config.task not in TASKS:
        raise InputError(f"data.task={config.task} is unknown; give one of {', '.join(TASKS)}")
    if config.prefetch < 0:
        raise InputError(f"data.prefetch={config.prefetch} is no number of batches; it must be 0 or more")
    if config.name == "digits" and config.task != "classification":
        raise InputError(f"data.task={config.task} does not fit data=digits; it must be classification")
    for key in ("inputs", "targets", "eval_inputs", "eval_targets"):
        value = getattr(config, key)
        if config.name != "arrays" and value is not None:
            raise InputError(f"data.{key}={value} is not read by data={config.name}; set data=arrays")


def _load_digits() -> Dataset:
    """Handwritten digits of 8 x 8 pixels (Alpaydin and Kaynak, UCI repository, as scikit-learn ships them).

    Pixels 0 .. 16 are divided by 16; then each has its mean taken off and is divided by its standard
    deviation, both over the training rows, or by 0.1 where that is less: some pixels hardly vary.
    1,437 rows train and 360 are held out, by one permutation that no seed changes.
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise InputError(
            "data=digits needs scikit-learn, which is not installed; "
            "run `pip install scikit-learn` or install the `data` extra"
        ) from error
    pixels, labels = load_digits(return_X_y=True)
    order = epoch_order(len(pixels), seed=0, epoch=0)
    train, held_out = order[: DIGITS.train_rows], order[DIGITS.train_rows :]
    pixels = pixels / 16
    scale = np.maximum(pixels[train].std(0), 0.1)
    inputs = ((pixels - pixels[train].mean(0)) / scale).astype(np.float32)
    labels = labels.astype(np.int64)
    return Dataset(DIGITS, inputs[train], labels[train], inputs[held_out], labels[held_out])


def _describe_synthetic(config: DataConfig, hidden_dim: int) -> DataSpec:
    dim = hidden_dim if config.dim is None else config.dim
    for key, value, least in (
        ("num_samples", config.num_samples, 1),
        ("eval_samples", config.eval_samples, 0),
        ("dim", dim, 1),
    ):
        if not least <= value <= EVAL_ROW:
            raise InputError(f"data.{key}={value} is out of range; it must be {least} to {EVAL_ROW}")
    if not 0 <= config.noise <= NOISE_MAX:
        raise InputError(f"data.noise={config.noise} is out of range; it must be 0 to {NOISE_MAX:g}")
    return DataSpec((dim,), dim, config.task, config.num_samples, config.eval_samples)


def _uniform(seed: int, stream: int, block: int, count: int) -> np.ndarray:
    """`count` (a multiple of 16) float64, whole numbers uniform on -32768 .. 32767."""
    words = random_words(seed, stream, block, count // 4)
    return words.astype("<u8", copy=False).view("<u2").astype(np.float64) - 32768


def synthetic_inputs(seed: int, first_row: int, rows: int, dim: int) -> np.ndarray:
    """Rows first_row .. first_row + rows - 1 of the inputs, float64 [rows, dim].

    Uniform on [-2, 2) in steps of 2**-14 (variance 4/3). A row follows from (seed, row, dim) alone.
    """
    blocks = -(-dim // 16)  # Philox gives 16 numbers of 16 bits at a time
    values = _uniform(seed, _INPUTS, first_row * blocks, rows * blocks * 16)
    return values.reshape(rows, blocks * 16)[:, :dim] * 2.0**-14


def teacher(seed: int, dim: int) -> tuple[np.ndarray, np.ndarray]:
    """The two weights of the teacher, float64 [dim, dim] each: outputs are tanh(x W1) W2.

    Uniform with standard deviation 1/sqrt(dim), in steps of 2**-16.
    """
    count = -(-dim * dim // 16) * 16
    scale = math.sqrt(3 / dim) / 32768
    first, second = (
        np.rint(_uniform(seed, _TEACHER, layer << 128, count)[: dim * dim] * (scale * 2**16)) * 2.0**-16
        for layer in (0, 1)
    )
    return first.reshape(dim, dim), second.reshape(dim, dim)


def _normal(seed: int, first_row: int, rows: int, dim: int) -> np.ndarray:
    """Standard normal numbers, float64 [rows, dim], by Box and Muller's formula."""
    blocks = -(-dim // 2)
    words = random_words(seed, _NOISE, first_row * blocks, rows * blocks * 4).reshape(rows, -1)[:, : 2 * dim]
    uniform = (words >> np.uint64(11)) * 2.0**-53
    return np.sqrt(-2 * np.log1p(-uniform[:, ::2])) * np.cos(2 * np.pi * uniform[:, 1::2])


def _make_synthetic(config: DataConfig, spec: DataSpec, seed: int) -> Dataset:
    """Inputs by `synthetic_inputs`, targets by `teacher` plus noise; classes are the largest output.

    Inputs, weights and hidden values lie on grids coarse enough that float64 sums of their products
    are exact (dim up to 2**20). So targets don't depend on threads or on how rows are grouped.
    """
    dim = spec.output_dim
    first, second = teacher(seed, dim)

    def rows_from(row: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
        inputs, targets = np.empty((rows, dim), np.float32), spec.new_targets(rows)
        for start in range(0, rows, _CHUNK_ROWS):
            stop = min(rows, start + _CHUNK_ROWS)
            chunk = synthetic_inputs(seed, row + start, stop - start, dim)
            outputs = np.rint(np.tanh(chunk @ first) * 2**20) * 2.0**-20 @ second
            if config.noise:
                outputs += config.noise * _normal(seed, row + start, stop - start, dim)
            inputs[start:stop] = chunk
            targets[start:stop] = outputs.argmax(1) if spec.task == "classification" else outputs
        return inputs, targets

    return Dataset(spec, *rows_from(0, spec.train_rows), *rows_from(EVAL_ROW, spec.eval_rows))

"""The user's own arrays: what is read, and everything that is refused."""

import math
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import trainer.arrays
import trainer.dataset
from trainer.config import DataConfig, InputError
from trainer.data import Dataset, DataSpec, TrainLoader, describe, epoch_order, load_dataset

ROWS = 12
INPUTS = (np.arange(ROWS * 3, dtype=np.float32) / 8).reshape(ROWS, 3)
LABELS = np.arange(ROWS) % 4


def read(**options: Any) -> Dataset:
    config = DataConfig(name="arrays", **({"batch_size": 4} | options))
    dataset = load_dataset(config, seed=0, hidden_dim=8)
    assert dataset.spec == describe(config, seed=0, hidden_dim=8)
    return dataset


def save(path: Path, array: np.ndarray) -> str:
    np.save(path, array)
    return str(path)


def pair(folder: Path, inputs: np.ndarray = INPUTS, targets: np.ndarray = LABELS) -> dict[str, str]:
    return {"inputs": save(folder / "x.npy", inputs), "targets": save(folder / "y.npy", targets)}


def first_batch(dataset: Dataset, batch_size: int = ROWS) -> tuple[torch.Tensor, torch.Tensor]:
    batches = TrainLoader(
        dataset,
        batch_size=batch_size,
        drop_last=False,
        seed=0,
        slice_of=lambda rows: (0, rows),
        want_inputs=True,
        want_targets=True,
        dtype=torch.float32,
        prefetch=0,
    )
    batch = next(batches)
    assert batch.inputs is not None and batch.targets is not None
    return batch.inputs, batch.targets


def test_npy_is_mapped_and_gives_its_rows(tmp_path: Path) -> None:
    dataset = read(**pair(tmp_path))
    assert dataset.spec == DataSpec((3,), 4, "classification", ROWS, 0)
    assert isinstance(dataset.train_inputs, np.memmap) and not dataset.train_inputs.flags.writeable
    assert dataset.eval_inputs.shape == (0, 3) and dataset.eval_targets.shape == (0,)
    inputs, targets = first_batch(dataset)
    order = epoch_order(ROWS, 0, 0)
    assert inputs.tolist() == INPUTS[order].tolist() and targets.tolist() == LABELS[order].tolist()


@pytest.mark.parametrize("writer", [np.savez, np.savez_compressed])
def test_npz_with_and_without_keys(tmp_path: Path, writer: Callable[..., None]) -> None:
    path = tmp_path / "set.npz"
    writer(path, inputs=INPUTS, targets=LABELS, x=INPUTS[:5] + 1, y=LABELS[:5])
    dataset = read(inputs=str(path), targets=str(path), eval_inputs=f"{path}:x", eval_targets=f"{path}:y")
    assert dataset.spec == DataSpec((3,), 4, "classification", ROWS, 5)
    for found, expected in (
        (dataset.train_inputs, INPUTS),
        (dataset.train_targets, LABELS),
        (dataset.eval_inputs, INPUTS[:5] + 1),
        (dataset.eval_targets, LABELS[:5]),
    ):
        assert np.array_equal(found, expected)


@pytest.mark.parametrize("outputs", [(), (1,), (2,)])
def test_regression_targets(tmp_path: Path, outputs: tuple[int, ...]) -> None:
    targets = np.linspace(-1, 1, ROWS * math.prod(outputs)).reshape(ROWS, *outputs)
    files = pair(tmp_path, INPUTS.reshape(ROWS, 1, 3, 1), targets)
    dataset = read(**files, task="regression", eval_inputs=files["inputs"], eval_targets=files["targets"])
    assert dataset.spec == DataSpec((1, 3, 1), math.prod(outputs), "regression", ROWS, ROWS)
    inputs, found = first_batch(dataset)
    order = epoch_order(ROWS, 0, 0)
    assert inputs.shape == (ROWS, 1, 3, 1)
    assert torch.equal(found, torch.from_numpy(targets[order].reshape(ROWS, -1)).float())


@pytest.mark.parametrize("dtype", ["u1", "i2", ">i4", "u8"])
def test_labels_of_any_integer_type(tmp_path: Path, dtype: str) -> None:
    _, targets = first_batch(read(**pair(tmp_path, targets=LABELS.astype(dtype))))
    assert targets.dtype == torch.int64 and targets.tolist() == LABELS[epoch_order(ROWS, 0, 0)].tolist()


@pytest.mark.parametrize("array", [np.asfortranarray(INPUTS), INPUTS.astype(">f8"), INPUTS.astype("f2")])
def test_other_layouts_are_read_right(tmp_path: Path, array: np.ndarray) -> None:
    dataset = read(**pair(tmp_path, array))
    assert dataset.train_inputs.flags.c_contiguous and dataset.train_inputs.dtype.isnative
    assert first_batch(dataset)[0].tolist() == INPUTS[epoch_order(ROWS, 0, 0)].tolist()


def test_only_the_wanted_rows_of_a_large_file_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sparse file of 64 GiB: anything that read it whole would neither fit nor end in time."""
    monkeypatch.setattr(trainer.dataset, "SCAN_BYTES", 8 << 20)
    rows, columns = 1 << 14, 1 << 20
    path = tmp_path / "x.npy"
    try:
        mapped = np.lib.format.open_memmap(path, "w+", np.float32, (rows, columns))
    except OSError:
        pytest.skip("the file system has no sparse files of this size")
    wanted = epoch_order(rows, 0, 0)[:2]
    mapped[wanted, 5] = [1, math.nan]
    del mapped
    targets = save(tmp_path / "y.npy", np.arange(rows) % 2)
    dataset = read(inputs=str(path), targets=targets)
    assert first_batch(dataset, 1)[0][0, 4:7].tolist() == [0, 1, 0]
    with pytest.raises(InputError, match=rf"x\.npy: row {wanted[1]}, column 5 is nan"):
        first_batch(dataset, 2)


def raw(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    return str(path)


def with_value(array: np.ndarray, index: Any, value: float) -> np.ndarray:
    changed = array.copy()
    changed[index] = value
    return changed


def npz(folder: Path, **arrays: np.ndarray) -> str:
    np.savez(folder / "set.npz", **arrays)
    return str(folder / "set.npz")


OBJECTS = np.array([{"a": 1}] * ROWS, dtype=object)

REFUSALS: dict[str, tuple[Callable[[Path], dict[str, Any]], str]] = {
    "missing": (
        lambda d: {"inputs": "no.npy", "targets": "no.npy"},
        "data.inputs=no.npy does not exist; give",
    ),
    "folder": (
        lambda d: pair(d) | {"inputs": str((d / "f.npy").mkdir() or d / "f.npy")},
        "f.npy is a folder",
    ),
    "empty": (lambda d: pair(d) | {"targets": raw(d / "e.npy", b"")}, "e.npy is an empty file; give"),
    "csv": (lambda d: pair(d) | {"inputs": "a.csv"}, "data.inputs=a.csv is a .csv file; give .npy or .npz"),
    "parquet": (lambda d: pair(d) | {"targets": "a.parquet"}, "data.targets=a.parquet is a .parquet file"),
    "pt": (lambda d: pair(d) | {"inputs": "a.pt"}, "is a .pt file; give .npy or .npz"),
    "pkl": (lambda d: pair(d) | {"inputs": "a.pkl"}, "is a .pkl file; give .npy or .npz"),
    "h5": (lambda d: pair(d) | {"inputs": "a.h5"}, "is a .h5 file; give .npy or .npz"),
    "no extension": (
        lambda d: pair(d) | {"inputs": "data"},
        "is a file without extension; give .npy or .npz",
    ),
    "key in npy": (lambda d: pair(d) | {"inputs": "a.npy:x"}, "only .npz files have keys"),
    "other content": (
        lambda d: pair(d) | {"inputs": raw(d / "t.npy", b"a,b\n1,2\n")},
        "t.npy is damaged, cut short or not readable",
    ),
    "cut short": (
        lambda d: pair(d) | {"inputs": raw(d / "c.npy", (d / "x.npy").read_bytes()[:-1])},
        "c.npy is cut short: 271 bytes, where its header says 272",
    ),
    "cut in header": (
        lambda d: pair(d) | {"inputs": raw(d / "c.npy", (d / "x.npy").read_bytes()[:40])},
        "c.npy is damaged, cut short or not readable",
    ),
    "two arrays": (
        lambda d: pair(d) | {"inputs": raw(d / "c.npy", (d / "x.npy").read_bytes() * 2)},
        "c.npy holds more than one array: 544 bytes, where its header says 272",
    ),
    "version 3": (
        lambda d: (
            pair(d) | {"inputs": raw(d / "v.npy", b"\x93NUMPY\x03\x00" + (d / "x.npy").read_bytes()[8:])}
        ),
        "v.npy has .npy version (3, 0)",
    ),
    "not a zip": (
        lambda d: pair(d) | {"inputs": raw(d / "z.npz", (d / "x.npy").read_bytes())},
        "z.npz is damaged, cut short or not readable (File is not a zip file)",
    ),
    "unknown key": (
        lambda d: {"inputs": npz(d, a=INPUTS, b=LABELS) + ":c", "targets": str(d / "set.npz")},
        "set.npz:c has no key 'c'; its keys: a, b",
    ),
    "default key": (
        lambda d: {"inputs": npz(d, a=INPUTS), "targets": str(d / "set.npz")},
        "has no key 'inputs'; its keys: a",
    ),
    "objects": (lambda d: pair(d, targets=OBJECTS), "y.npy holds Python objects, which are never unpickled"),
    "objects in npz": (
        lambda d: {"inputs": npz(d, inputs=OBJECTS), "targets": str(d / "set.npz")},
        "set.npz holds Python objects, which are never unpickled",
    ),
    "complex": (lambda d: pair(d, INPUTS.astype("c8")), "x.npy has dtype complex64; inputs must be floating"),
    "strings": (lambda d: pair(d, INPUTS.astype("U")), "inputs must be floating point up to float64"),
    "integer inputs": (
        lambda d: pair(d, INPUTS.astype("u1")),
        "x.npy has dtype uint8; inputs must be floating",
    ),
    "wide inputs": (lambda d: pair(d, INPUTS.astype(np.longdouble)), "inputs must be floating point up to"),
    "float labels": (
        lambda d: pair(d, targets=LABELS / 1),
        "y.npy has dtype float64; labels must be integers: save array.astype('int64') or set data.task",
    ),
    "boolean labels": (
        lambda d: pair(d, targets=LABELS > 1),
        "y.npy has dtype bool; labels must be integers",
    ),
    "integer targets": (
        lambda d: pair(d) | {"task": "regression"},
        "y.npy has dtype int64; regression targets must be floating point",
    ),
    "inputs of one dimension": (lambda d: pair(d, INPUTS[:, 0]), "has shape (12,); inputs must be [rows,"),
    "label columns": (lambda d: pair(d, targets=LABELS[:, None]), "has shape (12, 1); labels must be [rows]"),
    "target dimensions": (
        lambda d: pair(d, targets=np.zeros((ROWS, 2, 2))) | {"task": "regression"},
        "has shape (12, 2, 2); targets must be [rows] or [rows, outputs]",
    ),
    "rows differ": (lambda d: pair(d, targets=LABELS[:-1]), "y.npy has 11 rows, but data.inputs="),
    "no rows": (lambda d: pair(d, INPUTS[:0], LABELS[:0]), "has shape (0, 3), which holds no value"),
    "no columns": (lambda d: pair(d, INPUTS[:, :0]), "has shape (12, 0), which holds no value"),
    "negative label": (
        lambda d: pair(d, targets=with_value(LABELS, 9, -2)),
        "y.npy: row 9 is -2; labels must be 0",
    ),
    "huge label": (
        lambda d: pair(d, targets=with_value(LABELS, 9, 1 << 20)),
        "y.npy: row 9 is 1048576; labels must be below 1048576",
    ),
    "held-out label": (
        lambda d: pair(d) | {"eval_inputs": str(d / "x.npy"), "eval_targets": save(d / "l.npy", LABELS + 1)},
        "l.npy: row 3 is 4; labels must be below 4 (the training labels' largest plus one)",
    ),
    "nan": (
        lambda d: pair(d, with_value(INPUTS, (8, 2), math.nan)),
        "x.npy: row 8, column 2 is nan; every value",
    ),
    "infinity": (
        lambda d: pair(d, with_value(INPUTS.reshape(ROWS, 1, 3), (8, 0, 1), math.inf)),
        "x.npy: row 8, column (0, 1) is inf; every value",
    ),
    "nan in targets": (
        lambda d: pair(d, targets=with_value(LABELS / 2, 7, math.nan)) | {"task": "regression"},
        "y.npy: row 7 is nan; every value must be a finite number",
    ),
    "nan in held-out rows": (
        lambda d: (
            pair(d)
            | {
                "eval_inputs": save(d / "n.npy", with_value(INPUTS, (0, 0), math.nan)),
                "eval_targets": str(d / "y.npy"),
            }
        ),
        "data.eval_inputs=",
    ),
    "held-out shape": (
        lambda d: (
            pair(d) | {"eval_inputs": save(d / "w.npy", INPUTS[:, :2]), "eval_targets": str(d / "y.npy")}
        ),
        "w.npy has rows of shape (2,); they must be (3,)",
    ),
    "held-out outputs": (
        lambda d: (
            pair(d, targets=INPUTS)
            | {
                "task": "regression",
                "eval_inputs": str(d / "x.npy"),
                "eval_targets": save(d / "w.npy", INPUTS[:, :2]),
            }
        ),
        "w.npy has 2 outputs; it must have 3",
    ),
    "half a pair": (
        lambda d: pair(d) | {"eval_inputs": str(d / "x.npy")},
        "data.eval_targets=null is not set",
    ),
    "no targets": (lambda d: pair(d) | {"targets": None}, "data.targets=null is not set; give .npy or .npz"),
    "no step": (
        lambda d: pair(d) | {"batch_size": 13, "drop_last": True},
        "data.batch_size=13 with data.drop_last=true leaves no step of 12 training rows; it must be at",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusal(case: str, tmp_path: Path) -> None:
    make, words = REFUSALS[case]
    options = make(tmp_path)
    with pytest.raises(InputError) as caught:
        read(**options)
    assert words in str(caught.value)
    assert str(caught.value).startswith("data.") and "\n" not in str(caught.value)


def test_a_large_file_in_column_order_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer.arrays, "SCAN_BYTES", 100)
    with pytest.raises(InputError, match=r"with 144 bytes too large to convert; save it with numpy\.asc"):
        read(**pair(tmp_path, np.asfortranarray(INPUTS)))


def test_the_scan_stops_at_its_limit_and_crosses_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = pair(tmp_path, with_value(INPUTS, (10, 1), math.nan))  # 12 bytes a row
    monkeypatch.setattr(trainer.dataset, "CHUNK_BYTES", 36)
    with pytest.raises(InputError, match="row 10, column 1 is nan"):
        read(**files)
    monkeypatch.setattr(trainer.dataset, "SCAN_BYTES", 120)
    with pytest.raises(InputError, match="row 10, column 1 is nan"):
        first_batch(read(**files))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["npy", "stored", "compressed"])
def test_damage_is_refused_or_harmless(tmp_path: Path, kind: str) -> None:
    """Every cut ends in one sentence; a changed byte in an archive is refused or changes no value."""
    files = pair(tmp_path)
    if kind == "npy":
        whole = (tmp_path / "x.npy").read_bytes()
        path = tmp_path / "damaged.npy"
    else:
        compression = zipfile.ZIP_STORED if kind == "stored" else zipfile.ZIP_DEFLATED
        with zipfile.ZipFile(tmp_path / "set.npz", "w", compression) as archive:
            archive.write(tmp_path / "x.npy", "inputs.npy")
        whole = (tmp_path / "set.npz").read_bytes()
        path = tmp_path / "damaged.npz"
    for length in range(0, len(whole), 3):
        path.write_bytes(whole[:length])
        with pytest.raises(InputError):
            read(**files | {"inputs": str(path)})
    end = whole.index(b"\n") if kind == "npy" else len(whole)  # an .npy has no checksum over its values
    for at in range(end):
        for flip in (0x01, 0xFF):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ flip]) + whole[at + 1 :])
            try:
                dataset = read(**files | {"inputs": str(path)})
            except InputError:
                continue
            if kind != "npy":
                assert np.array_equal(dataset.train_inputs, INPUTS)

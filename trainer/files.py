"""Files of a job: plain records, rows one a line, and texts that are there whole or not at all."""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

SCHEMA = 1

_to_json = json.JSONEncoder(allow_nan=False).encode  # made once: this is on every step's path

PLAIN = (int, str, bool, type(None))


def plain(value: Any, name: str, non_finite: list[str]) -> Any:
    """`value` as JSON can hold it: NaN and infinity become None and their names join `non_finite`.

    Scalars of numpy and torch are turned into Python's own.

    Raises:
        TypeError: for a type that has no plain form; names the key.
    """
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        non_finite.append(name)
        return None
    if isinstance(value, Mapping):
        # Most items are spared the call: this is on every step's path.
        return {
            str(key): item
            if (kind := type(item)) in PLAIN or (kind is float and math.isfinite(item))
            else plain(item, f"{name}.{key}" if name else str(key), non_finite)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [plain(item, f"{name}.{index}", non_finite) for index, item in enumerate(value)]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        return plain(value.item(), name, non_finite)
    raise TypeError(f"{name} is a {type(value).__name__}; a record holds numbers, texts, lists and mappings")


def as_record(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` in plain form, `schema` first; `non_finite`, where there is any, last."""
    non_finite: list[str] = []
    record = {"schema": SCHEMA, **plain(values, "", non_finite)}
    if non_finite:
        record["non_finite"] = non_finite
    return record


def set_aside(folder: Path, names: Sequence[str]) -> None:
    """Rename the files of an earlier job, all with one number: metrics.1.jsonl, summary.1.json, ...

    What belongs together stays so, also where the next job is killed before it has written all of its own.

    Raises:
        OSError: one cannot be renamed.
    """
    paths = [folder / name for name in names]
    number = 1
    while any(_numbered(path, number).exists() for path in paths):
        number += 1
    for path in paths:
        if path.is_file():
            path.rename(_numbered(path, number))


def _numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.stem}.{number}{path.suffix}")


class MetricsFile:
    """metrics.jsonl: one JSON object a line, one line a step, `schema` first.

    Every row is handed to the operating system at once, so the file is complete
    up to the last step however the process ends. Unmeasured values are null; so
    are NaN and infinity, whose keys are listed in the row's `non_finite`. Rows of
    an earlier run in the same folder are set aside first, see `set_aside`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path.open("wb", buffering=0)

    def write(self, row: dict[str, Any]) -> None:
        """Appends the row, which must be in plain form.

        Raises:
            OSError: one sentence with the path, for example when the disk is full.
        """
        data = memoryview(_to_json(row).encode() + b"\n")
        try:
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:
            raise OSError(f"cannot write step {row.get('step')} to {self.path}: {error.strerror}") from error

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a metrics.jsonl in order; a last line cut short by a crash is left out."""
    with path.open() as file:
        for line in file:
            if line.endswith("\n"):
                yield json.loads(line)


def write_atomically(path: Path, text: str) -> None:
    """Writes the file whole or not at all: a reader sees the old text or the new one, also after a crash.

    Of several that write it at the same time the last one has it.

    Raises:
        OSError: the file cannot be written.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)

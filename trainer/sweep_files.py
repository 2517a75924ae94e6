"""What a sweep keeps on record: sweep.json in its folder, and job.json in the folder of each of its jobs.

A folder whose name ends in ~1, ~2, ... is what an earlier try of a job left, and no job of the sweep.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from trainer.errors import InputError
from trainer.files import write_atomically
from trainer.reading import read_section

SCHEMA = 1
SWEEP_FILE, JOB_FILE = "sweep.json", "job.json"
REASON_FILE = "reason.txt"  # from the rank that tells of a failure to whoever writes job.json
LONGEST_REASON = 500
SWEEP_STATES = ("running", "complete", "failed", "stopped")
JOB_STATES = ("running", "complete", "failed", "skipped", "stopped")
_LEFT = re.compile(r".*~\d+")

Record = TypeVar("Record", "Job", "Sweep")


@dataclass(frozen=True)
class Job:
    """One job. Times are Unix seconds; `ended_at` and `exit_code` are null until it has ended.

    skipped: it makes no sense, as `reason` says. failed: it raised, diverged or was killed. stopped: by a
    signal. running, where no process runs it: whoever started it was killed.
    """

    folder: Path
    number: int
    overrides: tuple[str, ...]  # its own, those included that all jobs have
    swept: dict[str, str]  # by key, for those that take several values in the sweep
    state: str
    started_at: float
    config_sha256: str
    reason: str | None = None
    exit_code: int | None = None
    ended_at: float | None = None


@dataclass(frozen=True)
class Sweep:
    """A sweep and its jobs by number. `overrides` are the command line's, without sweep.resume.

    running, where no process runs it: whoever started it was killed.
    """

    folder: Path
    overrides: tuple[str, ...]
    state: str
    started_at: float
    ended_at: float | None = None
    jobs: tuple[Job, ...] = field(default=())


def read_sweep(folder: Path) -> Sweep:
    """The sweep in a folder; subfolders without a job.json are left out.

    Raises:
        InputError: there is no sweep, or one of its files is damaged.
    """
    if not (folder / SWEEP_FILE).is_file():
        raise InputError(f"SWEEP={folder} has no {SWEEP_FILE}; name the folder of a sweep")
    jobs = [
        read_job(path.parent)
        for path in sorted(folder.glob(f"*/{JOB_FILE}"))
        if not is_left_over(path.parent)
    ]
    jobs.sort(key=lambda job: (job.number, job.folder.name))
    return _read(Sweep, folder / SWEEP_FILE, SWEEP_STATES, jobs=tuple(jobs))


def read_job(folder: Path) -> Job:
    """The job in a folder.

    Raises:
        InputError: job.json is missing or damaged.
    """
    return _read(Job, folder / JOB_FILE, JOB_STATES)


def write_sweep(sweep: Sweep) -> None:
    """Write sweep.json into the sweep's folder, which must be there; the jobs have files of their own.

    Raises:
        OSError: the file cannot be written.
    """
    _write(sweep.folder / SWEEP_FILE, sweep)


def write_job(job: Job) -> None:
    """Write job.json into the job's folder, which must be there.

    Raises:
        OSError: the file cannot be written.
    """
    _write(job.folder / JOB_FILE, job)


def is_left_over(folder: Path) -> bool:
    """Whether a folder's name says that an earlier try of a job left it."""
    return _LEFT.fullmatch(folder.name) is not None


def left_over(folder: Path) -> Path:
    """The first free name for what an earlier try left: NAME~1, NAME~2, ..."""
    number = 1
    while (path := folder.with_name(f"{folder.name}~{number}")).exists():
        number += 1
    return path


def keep_reason(folder: Path, text: str, *, over: bool = False) -> None:
    """In a job's folder, keep why the job failed, unless that is known or `over` says that this is truer."""
    path = folder / REASON_FILE
    with suppress(OSError):
        if (folder / JOB_FILE).exists() and (over or not path.exists()):
            write_atomically(path, first_sentence(text) + "\n")


def take_reason(folder: Path) -> str | None:
    """What `keep_reason` has kept, which is then gone; None where nothing was."""
    path = folder / REASON_FILE
    try:
        text = path.read_text(encoding="utf-8").strip()
        path.unlink()
    except OSError:
        return None
    return text or None


def first_sentence(text: str) -> str:
    """On one line and cut to a length that a table can hold."""
    text = " ".join(text.split())
    return text if len(text) <= LONGEST_REASON else text[: LONGEST_REASON - 3] + "..."


def _write(path: Path, record: Job | Sweep) -> None:
    values = asdict(record)
    for name in ("folder", "jobs"):
        values.pop(name, None)
    text = json.dumps({"schema": SCHEMA, **values}, indent=2, allow_nan=False)
    write_atomically(path, text + "\n")


def _read(kind: type[Record], path: Path, states: tuple[str, ...], **given: Any) -> Record:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(values, Mapping):
            raise ValueError("it holds no mapping")
        if values.get("schema") != SCHEMA:
            raise ValueError(f"schema is {values.get('schema')} and must be {SCHEMA}")
        known = {name: value for name, value in values.items() if name != "schema"}
        record = read_section(kind, known, folder=path.parent, **given)
        if record.state not in states:
            raise ValueError(f"state={record.state} must be one of {', '.join(states)}")
        return record
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror})") from error
    except ValueError as error:  # InputError is one
        raise InputError(f"{path} is damaged: {error}") from error

"""The folder of a sweep in the process that started it: found or made, locked, and brought to its end."""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from trainer.errors import InputError
from trainer.occupied import is_occupied, wait_until_left
from trainer.sweep_files import JOB_FILE, SWEEP_FILE, Sweep, read_sweep, write_job, write_sweep
from trainer.sweep_plan import SweepPlan

LOCK_FILE = ".lock"
HYDRAS_FILE = "multirun.yaml"
_BESIDE = re.compile(r"\+*(sweep\.resume|sweep\.fail_fast|hydra\.sweep\.dir|hydra\.mode)=.*", re.DOTALL)


def find_folder(plan: SweepPlan) -> SweepPlan:
    """The plan with the folder of the sweep that it resumes; one without sweep.resume stays as it is.

    Raises:
        InputError: there is no sweep of the same overrides, or the folder that was named holds another one.
    """
    if not plan.settings.resume:
        return plan
    if plan.is_explicit:
        if _holds_sweep(plan.folder):
            _check_same(plan, read_sweep(plan.folder))
        return plan
    found = []
    for path in plan.root.glob("/".join(["*"] * plan.depth) + f"/{SWEEP_FILE}"):
        with suppress(InputError):  # a damaged one is none of those that can go on
            sweep = read_sweep(path.parent)
            if _same(sweep.overrides, plan.overrides):
                found.append((sweep.started_at, path.parent))
    if not found:
        raise InputError(
            f"sweep.resume=true finds no sweep of these overrides under {plan.root}; leave it out to start "
            "one, or name its folder with hydra.sweep.dir"
        )
    return replace(plan, folder=max(found)[1])


@contextmanager
def locked(plan: SweepPlan) -> Iterator[None]:
    """Make the sweep's folder where it is missing, and keep other processes out for the time of the block.

    Raises:
        InputError: the folder cannot be written, belongs to another process, or holds another sweep.
    """
    folder = plan.folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise InputError(
            f"hydra.sweep.dir={folder} cannot be written ({error.strerror}); "
            "name a folder that this user can write"
        ) from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(
                f"hydra.sweep.dir={folder} is a sweep that another process runs; wait for it, or end it"
            ) from None
        if not plan.settings.resume and _holds_sweep(folder):
            or_else = ", or complete that one with sweep.resume=true" if plan.can_resume else ""
            raise InputError(f"hydra.sweep.dir={folder} holds a sweep already; name another folder{or_else}")
        yield
    finally:
        os.close(lock)


def begin(plan: SweepPlan) -> None:
    """Write sweep.json, once no process of an earlier try is left.

    Raises:
        InputError: one is, or a file of the sweep is damaged.
    """
    sweep = Sweep(plan.folder, plan.overrides, "running", plan.begun_at)
    if (plan.folder / SWEEP_FILE).exists():
        before = read_sweep(plan.folder)
        for job in before.jobs:
            wait_until_left(job.folder)
        sweep = replace(sweep, started_at=before.started_at)
    write_sweep(sweep)


def end(plan: SweepPlan, code: int) -> int:
    """Write how the sweep ended; returns its exit code.

    `code` is that of the process so far: 0, or of a signal, of a refusal or of an error outside the jobs.
    A sweep that was refused before its first job leaves nothing. Jobs of a launcher that failed, not Hydra's
    basic one, may still run elsewhere, and then stay so.
    """
    sweep = read_sweep(plan.folder)
    interrupted = code > 128
    if not sweep.jobs and code == 2:
        _remove(plan.folder)
        return code
    may_run = interrupted or (code != 0 and not plan.runs_here)
    for job in sweep.jobs:
        if job.state == "running" and not may_run and not is_occupied(job.folder):
            reason = "it ended without a word: its process was killed, or never started"
            write_job(replace(job, state="failed", reason=reason, exit_code=1, ended_at=time.time()))
    states = [job.state for job in read_sweep(plan.folder).jobs]
    if not interrupted:
        if code != 0 or {"failed", "stopped", "running"} & set(states):
            code = 1
        elif states and set(states) == {"skipped"}:
            code = 2
    state = "stopped" if interrupted else "failed" if code else "complete"
    write_sweep(replace(sweep, overrides=plan.overrides, state=state, ended_at=time.time()))
    return code


def _check_same(plan: SweepPlan, sweep: Sweep) -> None:
    if not _same(sweep.overrides, plan.overrides):
        raise InputError(
            f"hydra.sweep.dir={plan.folder} holds the sweep of other overrides "
            f"({' '.join(_own(sweep.overrides))}); give the same ones, or another folder"
        )


def _same(overrides: tuple[str, ...], others: tuple[str, ...]) -> bool:
    return _own(overrides) == _own(others)


def _own(overrides: tuple[str, ...]) -> list[str]:
    """Without what says where and how, but not what, is swept."""
    return [override for override in overrides if not _BESIDE.fullmatch(override)]


def _holds_sweep(folder: Path) -> bool:
    names = (SWEEP_FILE, HYDRAS_FILE)
    return any((folder / name).exists() for name in names) or any(folder.glob(f"*/{JOB_FILE}"))


def _remove(folder: Path) -> None:
    """What a refused sweep has made, and the folder where that leaves it empty."""
    for name in (SWEEP_FILE, HYDRAS_FILE, LOCK_FILE):
        (folder / name).unlink(missing_ok=True)
    with suppress(OSError):
        folder.rmdir()

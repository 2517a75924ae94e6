"""One job of a sweep, in whichever process runs it: whether it is needed, its record, and what came of it."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from trainer.composed import clean_sweep_file, plain_config, traceback_of
from trainer.errors import InputError, Interrupted, Stopped
from trainer.job import JobConfig
from trainer.launch import dismiss, follow, launch
from trainer.place import Place
from trainer.rank import log_file, record, tell
from trainer.refusals import hide
from trainer.secrets import Redactor, keep_out_of_logs
from trainer.signals import name_of
from trainer.sweep_files import (
    JOB_FILE,
    Job,
    first_sentence,
    left_over,
    read_job,
    read_sweep,
    take_reason,
    write_job,
)
from trainer.sweep_plan import SweepPlan, values_of
from trainer.wandb_labels import label_sweep_job

BESIDE = ("sweep", "logger")  # sections that change no number of a run

_log = logging.getLogger(__name__)


class SweepEnded(BaseException):
    """A job failed and sweep.fail_fast is set: out of Hydra, which would go on."""


def run_job(plan: SweepPlan, kind: type[JobConfig], worker: str | None, composed: DictConfig) -> None:
    """Run what Hydra has composed for one job, unless an earlier try completed it.

    What goes wrong with it is told and recorded, not raised. Its ranks are processes of their own, so that
    one that is killed is not the end of the sweep, nor memory of one job that of the next. Where a launcher
    has started a task for each rank, all of them call this, and rank 0 has the record.

    Raises:
        InputError: the job's folder is not its own, or not right in the sweep's.
        Interrupted: SIGINT or SIGTERM ended it.
        SweepEnded: it failed, with sweep.fail_fast, in the process that started the sweep.
    """
    place = Place.from_environment(os.environ)
    if place is not None and place.rank > 0:
        follow(worker)
        return
    announced = False

    def run(config: JobConfig) -> int:
        nonlocal announced
        code = launch(config, worker, apart=True)
        announced = not config.dry_run
        return code

    try:
        _run_job(plan, kind, run, composed)
    finally:
        if place is not None and not announced:
            dismiss(0)


def _run_job(
    plan: SweepPlan, kind: type[JobConfig], run: Callable[[JobConfig], int], composed: DictConfig
) -> None:
    hydra = HydraConfig.get()
    given = tuple(hydra.overrides.task)
    folder = Path(hydra.runtime.output_dir)
    if folder.parent != plan.folder:
        raise InputError(
            f"hydra.sweep.subdir={hydra.sweep.subdir} is no folder right in that of the sweep; "
            "give a name without /, or leave it out"
        )
    log = log_file(kind.kind, str(folder))
    mapping, refusal = _resolved(composed, given, kind)
    label_sweep_job(mapping, plan.folder)
    redactor = Redactor(mapping)
    own = [one for one in given if not one.lstrip("+").startswith("sweep.")]
    overrides = tuple(redactor.text(hide(one, given)) for one in own)
    job = Job(
        folder=folder,
        number=int(hydra.job.num),
        overrides=overrides,
        swept=values_of(overrides, plan.swept),
        state="running",
        started_at=time.time(),
        config_sha256=config_sha256(mapping if refusal is None else {"overrides": list(overrides)}),
    )
    earlier = _earlier(plan, job)
    if _is_told_to_end(plan) or _is_done(plan, job, earlier):
        return
    kept = None if earlier is None else _set_aside(plan, job, earlier)
    keep_out_of_logs(mapping)
    clean_sweep_file(plan.folder, mapping, given)
    write_job(job)
    _log.info("%s", _title(plan, job))
    try:
        if refusal is not None:
            raise refusal
        code = run(kind.from_mapping(mapping, str(folder)))
        _end(job, code, take_reason(folder))
    except InputError as error:
        tell(str(error), log, redactor)
        _end(job, 2, redactor.text(str(error)))
    except Stopped as error:
        tell(str(error), log, redactor)
        _end(job, 1, first_sentence(redactor.text(str(error))))
    except KeyboardInterrupt as error:
        code = 128 + error.signum if isinstance(error, Interrupted) else 130
        _end(job, code, None)
        raise
    except Exception as error:
        text = redactor.text(traceback_of(error))
        record(text, log)
        print(text, file=sys.stderr, flush=True)
        _end(job, 1, first_sentence(redactor.text(f"{type(error).__name__}: {error}")))
    if earlier is not None and earlier.state == "skipped" and kept is not None:
        _settle_again(plan, earlier, kept)
    if plan.settings.fail_fast and read_job(folder).state == "failed" and plan.pid == os.getpid():
        tell(f"sweep.fail_fast=true ends the sweep: {_title(plan, job)} failed")
        raise SweepEnded


def config_sha256(mapping: Mapping[str, Any]) -> str:
    """Which run it is: a hash of the resolved configuration, but for what changes no number."""
    own = {name: section for name, section in mapping.items() if name not in BESIDE}
    text = json.dumps(Redactor(mapping).mapping(own), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _resolved(
    composed: DictConfig, overrides: tuple[str, ...], kind: type[JobConfig]
) -> tuple[dict[str, Any], InputError | None]:
    try:
        return plain_config(composed, overrides, kind), None
    except InputError as error:
        return {}, error


def _end(job: Job, code: int, reason: str | None) -> None:
    state = "complete" if code == 0 else "skipped" if code == 2 else "stopped" if code > 128 else "failed"
    if state == "complete":
        reason = None
    elif reason is None:
        reason = (
            f"{name_of(code - 128)} ended it" if state == "stopped" else f"it ended with exit code {code}"
        )
    write_job(replace(job, state=state, reason=reason, exit_code=code, ended_at=time.time()))


def _earlier(plan: SweepPlan, job: Job) -> Job | None:
    """What is on record of an earlier try of the job, be it in this sweep, where Slurm has requeued it.

    Raises:
        InputError: another job of this very sweep has the same folder.
    """
    if not (job.folder / JOB_FILE).exists():
        return None
    earlier = read_job(job.folder)
    if earlier.started_at >= plan.begun_at and earlier.number != job.number:
        raise InputError(
            f"hydra.sweep.subdir gives jobs {earlier.number} and {job.number} of the sweep the same folder "
            f"{job.folder.name}; put ${{hydra:job.num}} into it, or leave it out"
        )
    return earlier


def _is_done(plan: SweepPlan, job: Job, earlier: Job | None) -> bool:
    if earlier is None or earlier.state != "complete" or earlier.config_sha256 != job.config_sha256:
        return False
    print(f"{_title(plan, job)}: complete before", file=sys.stderr, flush=True)
    return True


def _set_aside(plan: SweepPlan, job: Job, earlier: Job) -> Path:
    """Move what an earlier try left out of the job's way; returns where it is."""
    kept = left_over(job.folder)
    _move(job.folder, kept)
    if earlier.state != "skipped":  # of that it is told when it is known whether it is skipped again
        why = {"complete": "its configuration has changed since", "running": "it was killed"}
        told = why.get(earlier.state, f"it was {earlier.state}")
        print(f"{_title(plan, job)}: runs again, {told}; {kept.name} keeps what was there", file=sys.stderr)
    return kept


def _settle_again(plan: SweepPlan, earlier: Job, kept: Path) -> None:
    """A job that was skipped has been tried again: where nothing has changed, its folder is as it was."""
    job = read_job(earlier.folder)
    if (job.state, job.reason, job.config_sha256) == ("skipped", earlier.reason, earlier.config_sha256):
        for path in job.folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != JOB_FILE:
                path.unlink(missing_ok=True)
        _move(kept, job.folder)
        kept.rmdir()
        print(f"{_title(plan, job)}: skipped, as before", file=sys.stderr, flush=True)
    else:
        print(f"{_title(plan, job)}: was skipped before; {kept.name} keeps what was there", file=sys.stderr)


def _move(folder: Path, other: Path) -> None:
    """Move what is in a folder, which stays: further tasks of the job may have it open.

    The job's record comes last, so that what is left of a move that was broken off still has it. Logs that
    Hydra has opened are those of the job's folder afterwards.
    """
    other.mkdir(exist_ok=True)
    for path in sorted(folder.iterdir(), key=lambda path: path.name == JOB_FILE):
        with suppress(FileNotFoundError):
            path.rename(other / path.name)
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.FileHandler) and Path(handler.baseFilename).parent in (folder, other):
            handler.close()  # it opens the file again with the next line


def _is_told_to_end(plan: SweepPlan) -> bool:
    """Whether a job that ran elsewhere has failed in this try, and that is to end the sweep."""
    if not plan.settings.fail_fast or plan.pid == os.getpid():
        return False
    jobs = read_sweep(plan.folder).jobs
    return any(job.state == "failed" and job.started_at >= plan.begun_at for job in jobs)


def _title(plan: SweepPlan, job: Job) -> str:
    total = f" of {plan.count}" if plan.count else ""
    swept = " ".join(f"{key}={value}" for key, value in job.swept.items())
    return f"job {job.number + 1}{total}: {swept or shlex.join(job.overrides)}".rstrip(": ")

"""One job of a sweep, in whichever process runs it: whether it is needed, its record, and what came of it."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from trainer.composed import clean_sweep_file, plain_config, traceback_of
from trainer.errors import InputError, Interrupted
from trainer.job import JobConfig
from trainer.launch import dismiss, follow, launch
from trainer.place import Place
from trainer.rank import log_file, record, tell
from trainer.refusals import hide
from trainer.secrets import Redactor, SecretFilter
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

    What goes wrong with it is told and recorded, not raised. Where a launcher has started a task for each
    rank, all of them call this, and rank 0 has the record.

    Raises:
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
        code = launch(config, worker)
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
    if _is_told_to_end(plan) or not _is_needed(plan, job):
        return
    for handler in logging.getLogger().handlers:
        handler.addFilter(SecretFilter(mapping))
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
    except KeyboardInterrupt as error:
        code = 128 + error.signum if isinstance(error, Interrupted) else 130
        _end(job, code, None)
        raise
    except Exception as error:
        text = redactor.text(traceback_of(error))
        record(text, log)
        print(text, file=sys.stderr, flush=True)
        _end(job, 1, first_sentence(redactor.text(f"{_who(mapping)}{type(error).__name__}: {error}")))
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


def _is_needed(plan: SweepPlan, job: Job) -> bool:
    """Whether the job is to run; what an earlier try left is then out of its way.

    Raises:
        InputError: another job of this very sweep has the same folder.
    """
    if not (job.folder / JOB_FILE).exists():
        return True
    earlier = read_job(job.folder)
    if earlier.started_at >= plan.begun_at:
        raise InputError(
            f"hydra.sweep.subdir gives jobs {earlier.number} and {job.number} of the sweep the same folder "
            f"{job.folder.name}; put ${{hydra:job.num}} into it, or leave it out"
        )
    if earlier.state in ("complete", "skipped"):
        if earlier.config_sha256 == job.config_sha256:
            print(f"{_title(plan, job)}: {earlier.state} before", file=sys.stderr, flush=True)
            return False
        why = "its configuration has changed since"
    else:
        why = f"it was {earlier.state}" if earlier.state != "running" else "it was killed"
    kept = left_over(job.folder)
    _move(job.folder, kept)
    print(f"{_title(plan, job)}: runs again, {why}; {kept.name} keeps what was there", file=sys.stderr)
    return True


def _move(folder: Path, kept: Path) -> None:
    """Rename a job's folder and make it anew; logs that Hydra has opened in it follow the new one."""
    folder.rename(kept)
    folder.mkdir()
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.FileHandler) and Path(handler.baseFilename).parent == folder:
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


def _who(mapping: Mapping[str, Any]) -> str:
    return "Rank 0 of 1 failed: " if mapping.get("world_size") in (None, 1) else ""

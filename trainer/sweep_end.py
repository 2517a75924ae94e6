"""The last lines of a sweep: its table and report, where they are, and its summary in W&B."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

from trainer.errors import InputError
from trainer.occupied import is_occupied
from trainer.sweep_files import Job, Sweep, read_sweep

REPORT_MODULE = "trainer.sweep_report"
WANDB_MODULE = "trainer.wandb_sweep"


def finish_sweep(folder: Path, *, elsewhere: bool = False) -> None:
    """Write the sweep's table and report, print the table and where things are, and log it to W&B.

    A sweep that was stopped has only its table: whoever stops it does not want to wait for a page. It tells,
    and does not raise, when anything goes wrong: the jobs' own folders are what counts. `elsewhere`: a job
    that no process here runs may still run on another machine.
    """
    told = False
    try:
        report = import_module(REPORT_MODULE)
        table = report.write_table(folder)
        path = None if table.sweep.state == "stopped" else report.write_sweep_page(table)
        report.print_table(table)
        if path is not None:
            print(f"report  {path}", flush=True)
        told = True
    except ImportError as error:
        print(f"the sweep's table and report are left out ({error})", file=sys.stderr)
    except (InputError, OSError, ValueError) as error:
        print(f"there is no table of the sweep ({type(error).__name__}: {error})", file=sys.stderr)
    try:
        _show(read_sweep(folder), elsewhere, with_reasons=not told)
    except InputError as error:
        print(error, file=sys.stderr)
        return
    wandb = import_module(WANDB_MODULE)
    if told and (logger := wandb.sweep_logger(folder)) is not None:
        wandb.log_sweep(folder, logger)


def _show(sweep: Sweep, elsewhere: bool, *, with_reasons: bool) -> None:
    counts: dict[str, int] = {}
    for job in sweep.jobs:
        word = _word(job, elsewhere)
        counts[word] = counts.get(word, 0) + 1
        if with_reasons and job.state != "complete":
            print(f"{word}  {job.folder.name}" + (f": {job.reason}" if job.reason else ""))
    told = ", ".join(f"{number} {word}" for word, number in counts.items())
    print(f"sweep  {sweep.folder}  ({told or 'no job has run'})", flush=True)


def _word(job: Job, elsewhere: bool) -> str:
    if job.state != "running":
        return job.state
    return "still running" if elsewhere or is_occupied(job.folder) else "killed"

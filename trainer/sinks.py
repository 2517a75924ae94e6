"""What a run leaves behind: config.yaml, metrics.jsonl and summary.json in its folder, and a W&B run.

Used on rank 0 only. The folder is the truth and W&B a copy of it: rows go to
metrics.jsonl, and `trainer.wandb_sink` follows that file from a process of its own.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import yaml

from trainer.config import InputError, LoggerConfig, RunConfig
from trainer.environment import host_environment
from trainer.files import MetricsFile, as_record, plain, set_aside, write_atomically
from trainer.job import JobConfig
from trainer.secrets import Redactor
from trainer.summary import SteadyState, run_status
from trainer.wandb_labels import wandb_config
from trainer.wandb_sink import open_wandb

OTHER_FILES = ("config.yaml", "summary.json", "verdict.json", "trace.json", "report.html")

_log = logging.getLogger(__name__)


class Sink(Protocol):
    """Takes one row per step, and at the end the summary and the exit code."""

    def write(self, row: dict[str, Any]) -> None: ...

    def close(self, summary: dict[str, Any], exit_code: int) -> None: ...


def tell_wandb(sink: Sink | None, method: str, *arguments: Any) -> Sink | None:
    """Calls a method of the sink; the sink, or None once it fails, which costs one warning."""
    if sink is None:
        return None
    try:
        getattr(sink, method)(*arguments)
    except Exception as error:
        _log.warning("W&B is dropped (%s: %s); the run's folder has every row", type(error).__name__, error)
        return None
    return sink


class Sinks:
    """All sinks of a training run. Trouble with W&B costs one warning; trouble with the folder is raised."""

    def __init__(
        self,
        run_dir: Path,
        metrics: MetricsFile,
        wandb: Sink | None,
        environment: dict[str, Any],
        redactor: Redactor,
    ) -> None:
        self._run_dir = run_dir
        self._metrics = metrics
        self._wandb = wandb
        self._environment = environment
        self._redactor = redactor
        self._steady = SteadyState()
        self._steps = 0
        self._last: dict[str, Any] = dict.fromkeys(("step", "loss", "eval_loss", "eval_accuracy"))
        self._open = (
            threading.Lock()
        )  # taken by the first to close, be it the loop or a thread in an emergency

    def write(self, row: dict[str, Any]) -> None:
        """One step's row; None is unmeasured. After `close` it does nothing.

        Raises:
            OSError: metrics.jsonl cannot be written.
        """
        if self._open.locked():
            return
        record = as_record(row)
        self._metrics.write(record)
        self._steady.add(record)
        self._steps += 1
        self._last.update(step=record.get("step"), loss=record.get("loss"))
        self._last.update((key, record[key]) for key in self._last if record.get(key) is not None)
        self._wandb = tell_wandb(self._wandb, "write", record)

    def close(
        self,
        summary: dict[str, Any],
        exit_code: int,
        media: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        """Writes summary.json and ends the W&B run. Called again, it does nothing.

        `summary` may hold anything plain; `error` (one sentence) and `status` are read. `media` is called
        once summary.json is there, for what W&B is to show besides (see `trainer.wandb_sink`).

        Raises:
            OSError: summary.json cannot be written.
        """
        if not self._open.acquire(blocking=False):
            return
        record = self._summary(summary, exit_code)
        try:
            self._metrics.close()
            text = json.dumps(record, indent=2, allow_nan=False) + "\n"
            write_atomically(self._run_dir / "summary.json", text)
            record = {**record, **({"media": shown} if (shown := dict(media())) else {})}
        finally:
            self._wandb = tell_wandb(self._wandb, "close", record, exit_code)

    def _summary(self, summary: Mapping[str, Any], exit_code: int) -> dict[str, Any]:
        values = {
            "status": run_status(summary, exit_code),
            "exit_code": exit_code,
            "steps": self._steps,
            "last_step": self._last["step"],
            **{key: self._last[key] for key in ("loss", "eval_loss", "eval_accuracy")},
            "steady": self._steady.result(),
            "environment": self._environment,
        }
        further = {key: value for key, value in summary.items() if key not in values}
        return self._redactor.mapping(as_record({**values, **further}), texts_only=True)


@dataclass(frozen=True)
class Folder:
    """A job's folder as it is opened: config.yaml is written, rows and the W&B run are ready."""

    path: Path
    rows: MetricsFile
    wandb: Sink | None
    environment: dict[str, Any]
    redactor: Redactor


def open_sinks(config: RunConfig, environment: dict[str, Any]) -> Sinks:
    """The sinks of a training run, in its new folder; arguments and errors as for `open_folder`."""
    folder = open_folder(config, config.logger, environment, "metrics.jsonl")
    return Sinks(folder.path, folder.rows, folder.wandb, folder.environment, folder.redactor)


def open_folder(
    config: JobConfig, logger: LoggerConfig, environment: dict[str, Any], rows_name: str
) -> Folder:
    """Makes the run's folder with config.yaml in it, then the file of rows, then the W&B run.

    What an earlier job left there of rows and of `OTHER_FILES` is set aside, so that no reader mixes the two.

    `environment` is what the caller knows (threads per rank, backend, device, ...);
    versions, processors and the commit of the working tree are added here.

    Raises:
        InputError: the folder cannot be written.
    """
    run_dir = Path(config.run_dir)
    mapping = asdict(config)
    redactor = Redactor(mapping)
    environment = redactor.mapping({**host_environment(), **environment}, texts_only=True)
    public = plain(redactor.mapping(mapping), "", [])
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        set_aside(run_dir, (rows_name, *OTHER_FILES))
        write_atomically(run_dir / "config.yaml", yaml.safe_dump(public, sort_keys=False, allow_unicode=True))
        rows = MetricsFile(run_dir / rows_name)
    except OSError as error:
        raise InputError(
            f"hydra.run.dir={run_dir} cannot be written ({error.strerror}); "
            "name a folder that this user can write"
        ) from error
    wandb: Sink | None = None
    try:
        labelled = wandb_config(public, environment, config.kind)
        wandb = open_wandb(logger, run_dir, rows.path, labelled, redactor)
    except Exception as error:
        _log.warning("W&B is off (%s: %s); the run's folder has every row", type(error).__name__, error)
    return Folder(run_dir, rows, wandb, environment, redactor)

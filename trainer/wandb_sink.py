"""The W&B run of a job, kept by a helper process that follows metrics.jsonl.

W&B must never stop, fail or slow down training. Its client starts threads and a
service, hooks into the interpreter's exit, waits for the network, and a row
costs it about half a millisecond. So rank 0 does not import it. The helper
(`trainer.wandb_process`) does, takes rows over from metrics.jsonl as they
appear, and is told in one line how the run ended. Whatever becomes of it,
rank 0 waits for it a bounded time:

- start: at most `logger.timeout_s`, then an offline run takes its place;
- a row: not at all; pending messages of the helper are read;
- end: as long as the helper takes rows over, then at most `logger.timeout_s`;
  after an interruption `INTERRUPTED_S` in all.

When rank 0 dies, the helper sees its input end, takes over the rows that are
there, marks the run failed and exits.

In W&B a row has the keys and values of metrics.jsonl; null is a key left out;
`step` is the step metric of every key. A summary may name `media` for W&B: `html`, a page to show, and
`table`, a name under which all rows are shown as one, or those of the file `rows`. No code, git state,
command line, package list or console output is uploaded.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import re
import shutil
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from trainer.config import LoggerConfig
from trainer.secrets import Redactor
from trainer.wandb_account import choose_mode

INTERRUPTED_S = 1.5
OFFLINE_START_S = 30.0  # nothing but this machine's speed delays an offline start
CHECK_S = 1.0  # how often a row looks for messages of the helper
IN_SUMMARY = ("status", "steps", "steady", "verdict", "bench", "sweep")  # of a summary's keys, what W&B gets

_log = logging.getLogger(__name__)


class Unavailable(Exception):
    """The helper could not start a run; the text says why."""


@dataclass(frozen=True)
class Series:
    """How W&B takes the rows: the step metric of each pattern of keys, and what becomes of an earlier run.

    `resume`, with the same run id: `allow` adds to the earlier run, null replaces it.
    """

    step_metrics: Mapping[str, str] = field(default_factory=lambda: {"*": "step"})
    resume: str | None = "allow"


BY_STEP = Series()


def open_wandb(
    logger: LoggerConfig,
    run_dir: Path,
    metrics: Path,
    config: dict[str, Any],
    redactor: Redactor,
    series: Series = BY_STEP,
) -> WandbSink | None:
    """Starts the W&B run, offline where online fails; None when W&B is switched off or cannot be had at all.

    `config` is the run's configuration in plain form, without secrets; its
    `logger` section gives project, entity, group, job type, tags and name.
    """
    if logger.name == "none":
        return None
    mode, remark = choose_mode(logger.mode, os.environ)
    if remark:
        _log.warning("%s", remark)
    if mode == "disabled":
        return None
    sink = WandbSink(logger, run_dir, metrics, config, redactor, series)
    try:
        sink.start(mode, logger.timeout_s if mode == "online" else OFFLINE_START_S)
    except Unavailable as error:
        if mode == "offline":
            _log.warning("W&B is off (%s); the run's folder has every row", error)
            return None
        _log.warning("W&B does not answer (%s); this run is written offline", error)
        try:
            sink.start("offline", OFFLINE_START_S)
        except Unavailable as again:
            _log.warning("W&B is off (%s); the run's folder has every row", again)
            return None
    return sink


class WandbSink:
    """One run of W&B. A second run in the same folder takes up the same run id (`wandb_run_id.txt`)."""

    def __init__(
        self,
        logger: LoggerConfig,
        run_dir: Path,
        metrics: Path,
        config: dict[str, Any],
        redactor: Redactor,
        series: Series = BY_STEP,
    ) -> None:
        self._timeout_s = logger.timeout_s
        self._run_dir = run_dir
        self._redactor = redactor
        self._header = {
            "dir": str(run_dir),
            "metrics": str(metrics),
            "config": config,
            "run_id": run_id(run_dir),
            "rank_0_pid": os.getpid(),
            "step_metrics": dict(series.step_metrics),
            "resume": series.resume,
        }
        self._process: subprocess.Popen[str] | None = None
        self._messages: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._sync = ""  # the command that uploads the run later
        self._next_check = 0.0

    def start(self, mode: str, timeout_s: float) -> None:
        """Starts the helper and waits until W&B has the run.

        Raises:
            Unavailable: not within `timeout_s` seconds; the helper is gone and its files are removed.
        """
        before = self._run_folders()
        header = {**self._header, "mode": mode, "timeout_s": timeout_s, "finish_s": self._timeout_s}
        self._process = _spawn()
        self._messages = queue.SimpleQueue()
        assert self._process.stdout is not None
        threading.Thread(target=_read, args=(self._process.stdout, self._messages), daemon=True).start()
        try:
            self._send(header)
            message = self._next(timeout_s)
        except BaseException:
            self._kill()
            raise
        if message is None or "ready" not in message:
            reason = (message or {}).get("failed") or f"no answer in {timeout_s:g} s"
            self._kill()
            for folder in self._run_folders() - before:
                shutil.rmtree(folder, ignore_errors=True)
            raise Unavailable(self._redactor.text(reason))
        # Without the flag an online run's folder is passed over.
        self._sync = f"wandb sync {'--include-online ' if mode == 'online' else ''}{message['folder']}"
        if mode == "online":
            _log.info("W&B: %s", message["ready"])
        else:
            _log.info("W&B: offline; upload with `%s`", self._sync)

    def write(self, row: dict[str, Any]) -> None:
        """Reads what the helper has to say; the row itself reaches it through metrics.jsonl."""
        now = time.monotonic()
        if self._process is None or now < self._next_check:
            return
        self._next_check = now + CHECK_S
        while (message := self._next(0.0)) is not None:
            self._report(message)

    def close(self, summary: dict[str, Any], exit_code: int) -> None:
        """Ends the run and waits for it as the module says; what is late can be uploaded by `wandb sync`."""
        if self._process is None:
            return
        wait_s = self._timeout_s
        interrupted = exit_code > 128
        deadline = time.monotonic() + INTERRUPTED_S
        taken = {key: summary[key] for key in IN_SUMMARY if key in summary}
        media = summary.get("media", {})
        self._send({"summary": taken, "exit_code": exit_code, "interrupted": interrupted, "media": media})
        while self._process is not None:
            message = self._next(deadline - time.monotonic() if interrupted else wait_s)
            if message is None:
                _log.warning("W&B did not end in time; upload with `%s`", self._sync)
            elif "finishing" in message:
                wait_s = self._timeout_s + 1.0  # the helper gives up first and says so
            elif "done" in message:
                if not message["done"]:
                    _log.warning("W&B did not take all rows in time; upload with `%s`", self._sync)
                self._await_exit()
                return
            elif "progress" not in message:
                self._report(message)
            if message is None:
                self._kill()

    def _report(self, message: dict[str, Any]) -> None:
        if "remark" in message:
            _log.warning("W&B: %s", self._redactor.text(message["remark"]))
        if "failed" in message:
            reason = self._redactor.text(message["failed"])
            _log.warning("W&B is dropped (%s); the run's folder has every row", reason)
            self._kill()

    def _next(self, timeout_s: float) -> dict[str, Any] | None:
        try:
            return self._messages.get(timeout=timeout_s) if timeout_s > 0 else self._messages.get_nowait()
        except queue.Empty:
            return None

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process is not None and self._process.stdin is not None
        with contextlib.suppress(OSError):  # the helper is gone: the reader says so
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()

    def _await_exit(self) -> None:
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=3.0)
        self._kill()

    def _kill(self) -> None:
        """Ends the helper; W&B's service watches it and goes too."""
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            try:
                process.wait(timeout=1.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdin is not None
            with contextlib.suppress(OSError):
                process.stdin.close()

    def _run_folders(self) -> set[Path]:
        return set((self._run_dir / "wandb").glob("*run-*"))


def _spawn() -> subprocess.Popen[str]:
    root = str(Path(__file__).resolve().parent.parent)
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH")))),
        "WANDB_ERROR_REPORTING": "false",  # its exporters wait for the network
        "WANDB_SILENT": "true",
    }
    environ.pop("WANDB_SERVICE", None)  # a service of its own, which ends with the helper
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "trainer.wandb_process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environ,
        start_new_session=True,  # Ctrl-C in the terminal is for the ranks; they tell the helper
    )


def _read(stream: IO[str], messages: queue.SimpleQueue[dict[str, Any] | None]) -> None:
    with stream:
        for line in stream:
            try:
                messages.put(json.loads(line))
            except ValueError:
                continue  # printed by the interpreter's start-up, before the channel was the helper's alone
    messages.put({"failed": "its process ended"})


def run_id(run_dir: Path) -> str:
    """The run id kept in the folder, made on first use, so that a restart continues the same W&B run."""
    path = run_dir / "wandb_run_id.txt"
    if path.is_file() and re.fullmatch(r"[\w-]{1,64}", kept := path.read_text().strip()):
        return kept
    made = uuid.uuid4().hex[:8]
    path.write_text(made + "\n")
    return made

"""One rank, from the environment that starts it to its exit code; and which of the ranks reports a failure.

When a run fails, one rank's failure is the cause and the others' are its echo. The first to claim the
report in the store prints it; the others leave quietly with the same exit code.
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime, timedelta
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.errors import InputError, Stopped, exit_code_of
from trainer.job import JobConfig
from trainer.occupied import occupied
from trainer.place import Place
from trainer.secrets import Redactor, keep_out_of_logs
from trainer.signals import StopFlag, heeding_signals, obey_signals

if TYPE_CHECKING:
    from torch.distributed import Store

ECHO_MARKS = ("gloo/", "Connection closed by peer", "Connection reset", "Broken pipe", "NCCL")
POLL_S = 0.05
ECHO_S = 2.0  # a lost connection gives its cause this long to speak first
AGREE_S = 1.0


def connect(place: Place, timeout_s: float) -> Store:
    """A store that all ranks share: the launcher's own, or one that rank 0 serves.

    Keys are kept apart by restart, and by run where rank 0 serves: a restarted group of ranks must not read
    what the last one wrote, nor that of another job which has the port.

    Raises:
        Stopped: rank 0 cannot serve there, or cannot be reached; another try may find the port free.
    """
    from torch.distributed import PrefixStore, TCPStore, rendezvous

    timeout = timedelta(seconds=timeout_s)
    if place.store is None:
        store, _, _ = next(rendezvous("env://", place.rank, place.world_size, timeout=timeout))
        return PrefixStore(f"splitmeter/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
    host, port, name = place.store
    try:
        served = TCPStore(host, port, place.world_size, place.rank == 0, timeout, wait_for_workers=False)
    except RuntimeError as error:
        raise Stopped(
            f"Rank {place.rank} cannot meet the others at {host}, port {port} ({_reason(error)}); "
            "set MASTER_ADDR to the address of the first node and MASTER_PORT to a free port there"
        ) from None
    return PrefixStore(f"splitmeter/{name}", served)


def _reason(error: Exception) -> str:
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__


def loopback() -> str | None:
    """The network device on which ranks of one machine meet; None where it is not known."""
    if sys.platform == "darwin":
        return "lo0"
    return "lo" if os.path.exists("/sys/class/net/lo") else None


def wait_for(store: Store, key: str, timeout_s: float) -> str | None:
    """The key's text as soon as it is there; None after `timeout_s`.

    Polled, since a wait inside the store cannot be interrupted by Ctrl-C.
    """
    deadline = time.monotonic() + timeout_s
    while not store.check([key]):
        if time.monotonic() > deadline:
            return None
        time.sleep(POLL_S)
    return store.get(key).decode()


def log_file(kind: str, run_dir: str) -> Path:
    """The log of a job of that kind; conf/hydra/job_logging names the same file."""
    return Path(run_dir, f"{kind}.log")


def tell(text: str, log: Path | None = None, redactor: Redactor | None = None) -> None:
    """Put a refusal or a failure on stderr and, where the run's log has been opened, into that too."""
    text = (redactor or Redactor()).text(text)
    print(text, file=sys.stderr, flush=True)
    if log is not None:
        record(text, log)


def record(text: str, log: Path) -> None:
    """Add `text` to a run's log, if there is one."""
    with suppress(OSError):
        if log.exists():
            with log.open("a", encoding="utf-8") as file:
                file.write(f"[{datetime.now():%Y-%m-%d %H:%M:%S}][trainer][ERROR] {text}\n")


def log_in_rank(place: Place, log: Path, level: int, secrets: Mapping[str, Any]) -> None:
    """Logging of a rank that Hydra has not set up: rank 0 as the launcher, the others warnings only."""
    root = logging.getLogger()
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stderr)]
    if place.rank == 0:
        handlers[0].setFormatter(logging.Formatter("%(message)s"))
        with suppress(OSError):
            file = logging.FileHandler(log, encoding="utf-8")
            file.setFormatter(logging.Formatter("[%(asctime)s][%(name)s][%(levelname)s] %(message)s"))
            handlers.append(file)
    else:
        handlers[0].setLevel(logging.WARNING)
        handlers[0].setFormatter(logging.Formatter(f"rank {place.rank}: %(message)s"))
    root.handlers[:] = handlers
    keep_out_of_logs(secrets)
    root.setLevel(level)


def log_level() -> int:
    """The level that a rank's own logging should have: that of this process."""
    return logging.getLogger().getEffectiveLevel()


def cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def node_cores(place: Place | None) -> int:
    """Cores that all ranks on this rank's node may use together.

    Where the launcher gives each rank cores of its own, this process may be kept to its own.
    """
    return cores() if place is None or place.cpus is None else place.cpus * place.local_world_size


def threads_per_rank(config: JobConfig, place: Place) -> int:
    """The job's own number, or the rank's own cores, or the machine's over its ranks, at least one."""
    return config.num_threads or place.cpus or max(1, cores() // place.local_world_size)


class Report:
    """What the ranks of a run know of a failure: who tells it, and the exit code of all."""

    def __init__(self, store: Store, place: Place, config: JobConfig) -> None:
        self._store = store
        self._place = place
        self._log = log_file(config.kind, config.run_dir)
        self._folder = Path(config.run_dir)
        self._redactor = Redactor(config.to_mapping())

    def settle(self, error: Exception) -> int:
        """Tell of `error` if no other rank has told of one; returns the exit code."""
        code = exit_code_of(error)
        if not self._claim(code):
            other = self.verdict(AGREE_S)
            return code if other is None else other
        tell(self._describe(error), self._log, self._redactor)
        self._keep(error)
        return code

    def verdict(self, timeout_s: float = 0.0) -> int | None:
        """The exit code of a failure that a rank has told of; None when there is none in `timeout_s`.

        Safe to call from a second thread.
        """
        with suppress(Exception):  # the launcher, and the store with it, may be gone
            store = self._store.clone()  # type: ignore[attr-defined]  # missing from torch's stubs
            text = wait_for(store, "exit_code", timeout_s)
            return None if text is None else int(text)
        return None

    def _claim(self, code: int) -> bool:
        try:
            if self._store.add("error_claims", 1) > 1:
                return False
            self._store.set("exit_code", str(code))
        except Exception:  # told twice is better than not at all
            return True
        return True

    def _keep(self, error: Exception) -> None:
        from trainer.sweep_files import keep_reason

        text = str(error)
        if not isinstance(error, InputError | Stopped):
            text = (
                f"Rank {self._place.rank} of {self._place.world_size} failed: {type(error).__name__}: {text}"
            )
        keep_reason(self._folder, self._redactor.text(text))

    def _describe(self, error: Exception) -> str:
        if isinstance(error, InputError | Stopped):
            return str(error)
        return f"Rank {self._place.rank} of {self._place.world_size} failed:\n" + "".join(
            traceback.format_exception(error)
        ).rstrip("\n")


def is_echo(error: Exception) -> bool:
    """Whether an error only says that a peer, or the way to it, is gone."""
    import torch.distributed

    text = str(error)
    return isinstance(error, torch.distributed.DistError | ConnectionError) or any(
        mark in text for mark in ECHO_MARKS
    )


def load_function(name: str) -> Callable[..., Any]:
    """The function behind `module:function`."""
    module, _, function = name.partition(":")
    loaded: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return loaded


@cache
def keep_torch() -> None:
    """Spare the garbage collector torch's 165,000 objects, which are here to stay; a look takes 0.09 s.

    Ranks that are started import torch with the collector off (scripts/train.py); here it is turned on. Once
    in a process: what a sweep leaves behind from job to job is to be collected.
    """
    gc.freeze()
    gc.enable()


def run_rank(
    config: JobConfig,
    place: Place,
    store: Store,
    worker: str,
    *,
    parent: int | None = None,
    alone: bool = False,
) -> int:
    """Run one rank's worker; returns its exit code (0, 1, 2, or 128 + signal).

    `alone` is a run in the caller's own process: an unexpected error is raised, so that a debugger
    stops where it happened. Otherwise nothing is raised, and when the code is not 0 SIGINT and SIGTERM
    are ignored from here on: the launcher ends all ranks once one has left, and each is to leave with its
    own code.
    """
    import torch

    keep_torch()
    torch.set_num_threads(threads_per_rank(config, place))
    stop = StopFlag()
    report = Report(store, place, config)
    verdict = None if alone else report.verdict
    with occupied(config.run_dir), heeding_signals(stop, parent=parent, verdict=verdict, last=not alone):
        try:
            code = load_function(worker)(
                config,
                place.rank,
                place.world_size,
                place.local_rank,
                place.local_world_size,
                store,
                stop=stop,
            )
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
        except Exception as error:
            if alone and not isinstance(error, InputError | Stopped):
                raise
            cause = report.verdict(ECHO_S) if is_echo(error) else None
            if cause is not None:
                code = cause
            elif is_echo(error) and stop.requested:
                code = 128 + stop.requested
            else:
                code = report.settle(error)
    if code == 0 and stop.requested:
        code = 128 + stop.requested
    if code == 0 and not alone:
        obey_signals()
    return code

"""Ranks in processes of their own on this machine, started by torch's elastic launcher."""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import signal
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.errors import Interrupted
from trainer.job import JobConfig
from trainer.jobs import JOBS
from trainer.place import Place
from trainer.rank import (
    connect,
    keep_torch,
    log_file,
    log_in_rank,
    log_level,
    loopback,
    run_rank,
    tell,
    threads_per_rank,
)
from trainer.signals import PARENT_POLL_S, leave, raising_signals
from trainer.sweep_files import keep_reason

if TYPE_CHECKING:
    from torch.distributed.launcher.api import LaunchConfig

CONNECT_S = 60.0
SHUTDOWN_S = 4  # from the launcher's signal to SIGKILL; the ranks' own clocks are shorter


def run_elastic(config: JobConfig, world_size: int, worker: str) -> int:
    """Run `config` on `world_size` ranks that are started here; returns the exit code.

    Raises:
        Interrupted: SIGINT or SIGTERM came, and all ranks have ended.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    keep_torch()
    environment = {"OMP_NUM_THREADS": str(threads_per_rank(config, Place(local_world_size=world_size)))}
    device = loopback()
    if device is not None and "GLOO_SOCKET_IFNAME" not in os.environ:
        environment["GLOO_SOCKET_IFNAME"] = device
    payload = {
        "kind": config.kind,
        "config": config.to_mapping(),
        "run_dir": config.run_dir,
        "level": log_level(),
        "worker": worker,
        "parent": os.getpid(),
    }
    with (
        tempfile.TemporaryDirectory(prefix="splitmeter-") as scratch,
        _environment(environment),
        raising_signals(),
        _silent("torch.distributed.elastic", "torch.distributed.launcher", "torch.multiprocessing"),
        _no_child_left(),
    ):
        settings = launch_config(world_size, logs_specs=DefaultLogsSpecs(log_dir=scratch))
        try:
            codes: dict[int, int] = elastic_launch(settings, _rank_entry)(payload)
        except SignalException as error:
            raise Interrupted(error.sigval) from None
        except ChildFailedError as error:
            return max(_exit_code(rank, failure.exitcode, config) for rank, failure in error.failures.items())
        return max(codes.values())


def launch_config(world_size: int, **more: Any) -> LaunchConfig:
    """The settings of torch's elastic launcher for ranks on this machine, and `more` of them."""
    from torch.distributed.launcher.api import LaunchConfig

    settings: dict[str, Any] = {
        "min_nodes": 1,
        "max_nodes": 1,
        "nproc_per_node": world_size,
        "run_id": uuid.uuid4().hex,
        "rdzv_backend": "c10d",
        "rdzv_endpoint": "127.0.0.1:0",  # a name that does not resolve would cost a minute
        "rdzv_configs": {"is_host": "true"},
        "local_addr": "127.0.0.1",
        "max_restarts": 0,
        "monitor_interval": 0.1,
        "start_method": "spawn",
        "shutdown_timeout": SHUTDOWN_S,
        **more,
    }
    # Older torch waits up to 30 s; the ranks leave in four anyway, by their own clocks.
    known = {field.name for field in fields(LaunchConfig)}
    return LaunchConfig(**{name: value for name, value in settings.items() if name in known})


def _rank_entry(payload: Mapping[str, Any]) -> int:
    """What each process runs that `run_elastic` starts."""
    place = Place.from_environment(os.environ)
    assert place is not None
    config = JOBS[payload["kind"]].from_mapping(payload["config"], payload["run_dir"])
    log_in_rank(place, log_file(config.kind, config.run_dir), payload["level"], payload["config"])
    try:
        store = connect(place, CONNECT_S)
    except Exception as error:
        tell(f"Rank {place.rank} could not reach the launcher's store: {error}")
        leave(1)
    code = run_rank(config, place, store, payload["worker"], parent=payload["parent"])
    if code != 0:
        leave(code)
    # Threads that come back from torch's C++ while the interpreter is taken down abort the process.
    atexit.register(leave, 0)
    # The elastic launcher holds a process that is done until all are; it may be gone by then.
    threading.Thread(target=_leave_after, args=(payload["parent"],), daemon=True).start()
    return code


def _leave_after(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(PARENT_POLL_S)
    leave(128 + signal.SIGTERM)


def _exit_code(rank: int, exit_code: int, config: JobConfig) -> int:
    if exit_code >= 0:
        return exit_code
    # Nothing in the rank could report this: SIGKILL, a crash in native code, the kernel out of memory.
    sentence = f"Rank {rank} of {config.world_size} was ended by {signal.Signals(-exit_code).name}"
    tell(sentence, log_file(config.kind, config.run_dir))
    keep_reason(Path(config.run_dir), sentence, over=True)
    return 1


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    old = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in old.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _silent(*prefixes: str) -> Iterator[None]:
    """Keep loggers quiet that would tell again, with a traceback of their own, what a rank has told."""
    loggers = [
        logger
        for name, logger in logging.root.manager.loggerDict.items()
        if isinstance(logger, logging.Logger) and name.startswith(prefixes) and not logger.disabled
    ]
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    finally:
        for logger in loggers:
            logger.disabled = False


@contextmanager
def _no_child_left() -> Iterator[None]:
    """End processes that the launcher lost sight of, such as one started just as a signal came."""
    before = set(multiprocessing.active_children())
    try:
        yield
    finally:
        left = [child for child in multiprocessing.active_children() if child not in before]
        for child in left:
            child.terminate()
        deadline = time.monotonic() + 1.0
        for child in left:
            child.join(max(0.0, deadline - time.monotonic()))
            if child.is_alive():
                child.kill()
                child.join()

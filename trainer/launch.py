"""Starting the ranks of a run: as torchrun's or Slurm's, by torch's elastic launcher, or as a plain call.

One process resolves the configuration. Under torchrun and in tasks of Slurm that is rank 0; the others wait
in `follow` for what it says in the store: the configuration as JSON, or the exit code with which all leave.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import time
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from trainer.config import RunConfig
from trainer.errors import InputError, Interrupted
from trainer.job import JobConfig
from trainer.jobs import JOBS
from trainer.place import Place
from trainer.rank import (
    ECHO_S,
    POLL_S,
    connect,
    cores,
    load_function,
    log_file,
    log_in_rank,
    log_level,
    loopback,
    run_rank,
    tell,
    wait_for,
)
from trainer.signals import SIGNALS, StopFlag, ignore_signals

if TYPE_CHECKING:
    from torch.distributed import Store

__all__ = ["Place", "StopFlag", "dismiss", "follow", "launch"]

PLAN_KEY = "plan"
LONGEST_START_S = 600.0  # ranks may start far apart on a busy cluster
DISMISS_S = 30.0
HOW_MANY = {
    "torchrun": "--nproc-per-node ",
    "srun": "--ntasks ",
    "submitit": "hydra.launcher.tasks_per_node=",
}
MOST_RANKS_PER_CORE = 32  # each is a process of its own, with torch in it

_log = logging.getLogger(__name__)


def launch(config: JobConfig, worker: str | None = None, *, apart: bool = False) -> int:
    """Run `config` on the ranks it asks for; returns the exit code.

    `worker` names the function that each rank calls, as `module:function`; None is that of the job. `apart`:
    no rank in this process, not even where there is one only.

    Raises:
        Stopped: the ranks that a launcher has started do not meet.
        InputError: the number of ranks contradicts torchrun's or the job, or is too much for this machine.
        Interrupted: SIGINT or SIGTERM ended the run.
    """
    place = Place.from_environment(os.environ)
    config = _with_world_size(config, place)
    assert config.world_size is not None
    worker = worker or config.worker
    if isinstance(config, RunConfig) and config.dry_run:
        from trainer.dryrun import print_plan

        print_plan(config)
        return 0
    local_ranks = place.local_world_size if place else config.world_size
    if place is None:
        _check_ranks(local_ranks)
    if config.preflight is not None:
        load_function(config.preflight)(config, local_ranks)
    if place is None or place.cpus is None:
        _warn(local_ranks)
    if place is not None:
        store = connect(place, LONGEST_START_S)
        message = {
            "kind": config.kind,
            "config": config.to_mapping(),
            "run_dir": config.run_dir,
            "level": log_level(),
        }
        store.set(PLAN_KEY, json.dumps(message))
        return _run_in_place(config, place, store, worker)
    if config.world_size == 1 and not apart:
        return _run_alone(config, worker)
    from trainer.elastic import run_elastic

    return run_elastic(config, config.world_size, worker)


def follow(worker: str | None = None) -> int:
    """A rank other than 0 under torchrun or Slurm: run what rank 0 says in the store; returns the exit code.

    `worker`: see `launch`.
    """
    place = Place.from_environment(os.environ)
    assert place is not None and place.rank > 0
    try:
        store = connect(place, LONGEST_START_S)
        text = wait_for(store, PLAN_KEY, LONGEST_START_S)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception as error:
        tell(f"Rank {place.rank} lost the store while it waited for rank 0's configuration: {error}")
        return 1
    if text is None:
        tell(
            f"Rank {place.rank} waited {LONGEST_START_S:.0f} s for rank 0's configuration, which did not come"
        )
        return 1
    message = json.loads(text)
    if "exit" in message:
        _meet(store, place)
        return int(message["exit"])
    config = JOBS[message["kind"]].from_mapping(message["config"], message["run_dir"])
    log = log_file(config.kind, config.run_dir)
    log_in_rank(place, log, int(message["level"]), config.to_mapping())
    return _run_in_place(config, place, store, worker or config.worker)


def dismiss(code: int) -> None:
    """Rank 0 under torchrun or Slurm: tell ranks that still wait for a configuration to leave with `code`.

    Does nothing when they have had one. Returns when all are about to leave, so that none is killed for
    being later than another.
    """
    place = Place.from_environment(os.environ)
    if place is None or place.world_size == 1:
        return
    with suppress(Exception):  # torchrun itself may be gone
        store = connect(place, DISMISS_S)
        message = json.dumps({"exit": code})
        if store.compare_set(PLAN_KEY, "", message).decode() == message:
            _meet(store, place)


def _run_in_place(config: JobConfig, place: Place, store: Store, worker: str) -> int:
    """This rank of a run whose ranks a launcher has started; returns the exit code."""
    device = loopback()
    if place.on_one_node and device is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", device)
    code = run_rank(config, place, store, worker, parent=os.getppid())
    if place.store is not None and code != 0:
        # rank 0 goes last: the others may still ask in its store whose failure they see
        _meet(store, place, ECHO_S + 1)
    return code


def _meet(store: Store, place: Place, timeout_s: float = DISMISS_S) -> None:
    """Return when every rank has called this, or after a while."""
    ignore_signals()  # torchrun ends all ranks as soon as it sees that one has failed
    deadline = time.monotonic() + timeout_s
    with suppress(Exception):
        store.add("leaving", 1)
        while store.add("leaving", 0) < place.world_size and time.monotonic() < deadline:
            time.sleep(POLL_S)


def _with_world_size(config: JobConfig, place: Place | None) -> JobConfig:
    if place is not None and config.world_size not in (None, place.world_size):
        raise InputError(
            f"world_size={config.world_size} contradicts {place.launcher}, which started {place.world_size}; "
            f"leave it out, or start {config.world_size} with {HOW_MANY[place.launcher]}{config.world_size}"
        )
    world_size = place.world_size if place is not None else config.world_size or config.default_world_size
    config.check_world(world_size)
    return replace(config, world_size=world_size)


def _check_ranks(local_ranks: int) -> None:
    """Refuse more ranks than can ever start here.

    Raises:
        InputError: fewer would do.
    """
    most = MOST_RANKS_PER_CORE * cores()
    if local_ranks > most:
        raise InputError(
            f"world_size={local_ranks} is more than the {most} ranks that {cores()} cores are given at most; "
            "take fewer, or start them on several machines with torchrun"
        )


def _warn(local_ranks: int) -> None:
    if local_ranks > cores():
        _log.warning(
            "%d ranks share %d cores: times say more about their turns than about the work",
            local_ranks,
            cores(),
        )


def _run_alone(config: JobConfig, worker: str) -> int:
    """One rank in this very process, where a debugger can follow it."""
    from torch.distributed import HashStore

    code = run_rank(config, Place(), HashStore(), worker, alone=True)
    if code - 128 in SIGNALS:
        raise Interrupted(code - 128)
    return code

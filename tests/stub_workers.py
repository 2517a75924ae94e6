"""Stand-ins for trainer.worker.run, each of which does one thing that a launcher must cope with."""

from __future__ import annotations

import gc
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from trainer.config import InputError, RunConfig, TrainingStopped
from trainer.signals import StopFlag


def describe(config: RunConfig, *place: Any, stop: StopFlag) -> int:
    """Leave a file that tells what the rank was given."""
    import torch

    rank, world_size, local_rank, local_world_size, store = place
    store.add("seen", 1)
    while store.add("seen", 0) < world_size:
        time.sleep(0.01)
    facts = {
        "rank": rank,
        "world_size": world_size,
        "local_rank": local_rank,
        "local_world_size": local_world_size,
        "config": config.to_mapping(),
        "run_dir": config.run_dir,
        "pid": os.getpid(),
        "collects_garbage": gc.isenabled(),
        "threads": torch.get_num_threads(),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"),
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME"),
    }
    Path(config.run_dir, f"rank{rank}.json").write_text(json.dumps(facts))
    return 0


def refuse(config: RunConfig, *place: Any, stop: StopFlag) -> int:
    """Every rank finds the same wrong input, rank 1 later than the others."""
    time.sleep(0.5 * place[0])
    raise InputError("data.inputs=none.npy does not exist; name a file")


def refuse_on_last_rank(config: RunConfig, *place: Any, stop: StopFlag) -> int:
    """One rank finds wrong input while the others wait for it where no Python runs."""
    rank, world_size, *_, store = place
    if rank == world_size - 1:
        raise InputError("data.inputs=x.npy holds NaN in row 7; remove the row")
    store.get("never")
    return 0


def diverge(config: RunConfig, *place: Any, stop: StopFlag) -> int:
    raise TrainingStopped("The loss is NaN at step 3, first on rank 1")


def crash_on_last_rank(config: RunConfig, *place: Any, stop: StopFlag) -> int:
    """One rank fails; another sees the connection close before the cause has spoken."""
    rank, world_size, *_, store = place
    if rank < world_size - 1:
        store.get("gone")
        store.set("echo", "1")
        raise RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer")
    store.set("gone", "1")
    store.get("echo")
    time.sleep(0.2)
    raise ZeroDivisionError("boom")


def killed_on_last_rank(config: RunConfig, *place: Any, stop: StopFlag) -> int:
    rank, world_size, *_, store = place
    if rank == world_size - 1:
        store.set("gone", "1")
        os.kill(os.getpid(), signal.SIGKILL)
    store.get("gone")  # however late that rank has started
    raise RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer")


def poll(config: RunConfig, *place: Any, stop: StopFlag) -> int:
    """A loop that looks at the flag, as training does."""
    _announce(config, place[0])
    while not stop.requested:
        time.sleep(0.02)
    Path(config.run_dir, f"stopped{place[0]}").write_text(str(stop.requested))
    return 0


def hang(config: RunConfig, *place: Any, stop: StopFlag) -> int:
    """A loop that never looks at the flag: it waits where no Python runs."""
    rank, *_, store = place
    stop.on_emergency.append(lambda: Path(config.run_dir, f"emergency{rank}").write_text(""))
    _announce(config, rank)
    store.get("never")
    return 0


def sweep_job(config: RunConfig, *place: Any, stop: StopFlag) -> int:
    """Seed 1 is wrong input, seed 2 fails; others succeed."""
    if config.seed == 1:
        raise InputError("data.inputs=1.npy does not exist; name a file")
    if config.seed == 2:
        raise ZeroDivisionError("boom")
    Path(config.run_dir, f"done{place[0]}of{place[1]}").write_text("")
    return 0


def stop_itself(config: RunConfig, *place: Any, stop: StopFlag) -> int:
    """SIGTERM comes while this runs."""
    os.kill(os.getpid(), signal.SIGTERM)
    while not stop.requested:
        time.sleep(0.02)
    return 0


def leave_early(config: RunConfig, *place: Any, stop: StopFlag) -> int:
    raise SystemExit(3)


def _announce(config: RunConfig, rank: int) -> None:
    """`rankR.pid`, written whole."""
    path = Path(config.run_dir, f"rank{rank}.tmp")
    path.write_text(str(os.getpid()))
    path.rename(path.with_suffix(".pid"))

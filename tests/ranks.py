"""Real gloo ranks for tests: one persistent pool of processes per world size, jobs sent to all of them.

A job is a module-level function `job(world, *arguments)`; its results come back rank by rank. The
process groups live as long as the pool, so a job costs milliseconds.
"""

from __future__ import annotations

import atexit
import multiprocessing as mp
import os
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

TIMEOUT_S = 60.0


class RankPool:
    """`size` processes with a gloo `World` each."""

    def __init__(self, size: int) -> None:
        self.size = size
        context = mp.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory(prefix="splitmeter-pool-")
        store = os.path.join(self._folder.name, "store")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, store, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        atexit.register(self.close)

    def run(self, job: Callable[..., Any], *arguments: Any, timeout_s: float = TIMEOUT_S) -> list[Any]:
        """Results of all ranks, rank 0 first. The first rank's failure is raised with its traceback."""
        for pipe in self._pipes:
            pipe.send((job, arguments))
        results: list[Any] = []
        errors: list[str] = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(timeout_s if not errors else 2.0):
                errors.append(f"rank {rank} did not answer in {timeout_s} s")
                continue
            succeeded, result = pipe.recv()
            (results if succeeded else errors).append(result)
        if errors:
            self.close()  # ranks may be stuck in a collective: a fresh pool is needed
            raise AssertionError("\n".join(errors))
        return results

    @property
    def alive(self) -> bool:
        return bool(self._processes) and all(process.is_alive() for process in self._processes)

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(timeout=2)
            if process.is_alive():
                process.kill()
                process.join()
        self._pipes, self._processes = [], []
        self._folder.cleanup()


class RankPools:
    """Pools by world size, started when first asked for and again after a failure."""

    def __init__(self) -> None:
        self._pools: dict[int, RankPool] = {}

    def __getitem__(self, size: int) -> RankPool:
        pool = self._pools.get(size)
        if pool is None or not pool.alive:
            self._pools[size] = pool = RankPool(size)
        return pool

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


def _serve(rank: int, size: int, store_path: str, pipe: Connection) -> None:
    import torch
    import torch.distributed as dist

    from collectives.group import World

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(store_path, size) if size > 1 else None
    world = World(rank, size, "gloo", TIMEOUT_S, store)
    try:
        while True:
            job, arguments = pipe.recv()
            try:
                pipe.send((True, job(world, *arguments)))
            except BaseException:
                pipe.send((False, f"rank {rank} of {size}:\n{traceback.format_exc()}"))
    except (EOFError, OSError):
        pass
    finally:
        world.close()

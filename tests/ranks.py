"""Real gloo ranks for tests: one persistent pool of processes per world size, jobs sent to all of them.

A job is a module-level function `job(world, *arguments)`; its results come back rank by rank. The
process groups live as long as the pool, so a job costs milliseconds.
"""

from __future__ import annotations

import atexit
import multiprocessing as mp
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

START_S = 120.0  # to start Python and torch on every rank; no part of a job's time
TIMEOUT_S = 60.0
ECHO_S = 2.0  # after one rank's failure the others get this long


class RankPool:
    """`size` processes with a gloo `World` each."""

    def __init__(self, size: int) -> None:
        self.size = size
        context = mp.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory(prefix="splitmeter-pool-")
        store = os.path.join(self._folder.name, "store")
        self._pipes: list[Connection] = []
        self._processes = []
        self._is_ready = False
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, store, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        atexit.register(self.close)

    def run(self, job: Callable[..., Any], *arguments: Any, timeout_s: float = TIMEOUT_S) -> list[Any]:
        """Results of all ranks, rank 0 first.

        Raises:
            AssertionError: ranks that failed, the first failure first, with tracebacks.
        """
        try:
            if not self._is_ready:
                self._answers(START_S)
                self._is_ready = True
            for pipe in self._pipes:
                pipe.send((job, arguments))
            return self._answers(timeout_s)
        except BaseException:  # ranks may be stuck, or answer later: a fresh pool is needed
            self.close(patience_s=ECHO_S)
            raise

    def _answers(self, timeout_s: float) -> list[Any]:
        answers: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + timeout_s
        while len(answers) < self.size:
            waiting = {self._pipes[rank]: rank for rank in range(self.size) if rank not in answers}
            ready: list[Any] = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = waiting[pipe]
                answers[rank] = _answer(pipe, rank)
                if not answers[rank][0]:  # the others may wait for it in a collective
                    deadline = min(deadline, time.monotonic() + ECHO_S)
        errors = [str(result) for succeeded, result in answers.values() if not succeeded]
        if errors or len(answers) < self.size:
            silent = [rank for rank in range(self.size) if rank not in answers]
            errors += [f"ranks {silent} did not answer"] if silent else []
            raise AssertionError("\n".join(errors))
        return [answers[rank][1] for rank in range(self.size)]

    @property
    def alive(self) -> bool:
        return bool(self._processes) and all(process.is_alive() for process in self._processes)

    def hang_up(self) -> None:
        """Ask the ranks to end; those that wait for a job do."""
        for pipe in self._pipes:
            pipe.close()

    def close(self, patience_s: float = 15.0) -> None:
        """End the ranks, by force those that have not ended after `patience_s`."""
        self.hang_up()
        deadline = time.monotonic() + patience_s
        for process in self._processes:
            process.join(timeout=max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        self._pipes, self._processes = [], []
        self._folder.cleanup()


def _answer(pipe: Connection, rank: int) -> tuple[bool, Any]:
    try:
        succeeded, result = pipe.recv()
    except (EOFError, OSError):
        return False, f"rank {rank} died"
    return succeeded, result


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
            pool.hang_up()
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
        pipe.send((True, None))
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
        os._exit(0)  # taking an interpreter with torch in it apart costs a second of every rank

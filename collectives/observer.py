"""When transfers complete, seen without stopping the thread that started them.

gloo's collectives have a future that calls back. Its point-to-point work has none, and does not even say
that it is complete before somebody waits for it: a thread waits, and whoever waits for the transfer then
waits for that thread. Both take time of the processor, so that only some steps are observed.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from collectives.transfer import Transfer

MOST_THREADS = 16  # transfers that are waited for at once; more are left unobserved
TAKEN_OVER_S = 3600.0  # longer than any timeout of a group, which ends the wait behind it


class Observed:
    """A work that a thread of the observer waits for."""

    def __init__(self, work: dist.Work) -> None:
        self.work = work
        self.under_way = threading.Lock()  # held until it is over; an Event has Python between
        self.under_way.acquire()
        self.error: BaseException | None = None

    def wait(self) -> None:
        """
        Raises:
            RuntimeError: what waiting for the work raised.
        """
        if self.under_way.acquire(timeout=TAKEN_OVER_S):
            self.under_way.release()  # for who waits again
        if self.error is not None:
            raise self.error


class Observer:
    """Stamps `completed_s` of the transfers that start while it is `active`, by `time.perf_counter`."""

    def __init__(self) -> None:
        self.active = False
        self._tasks: queue.SimpleQueue[tuple[Transfer, list[Observed]]] = queue.SimpleQueue()
        self._threads = 0
        self._waiting = 0
        self._lock = threading.Lock()

    def watch(self, transfer: Transfer, works: Sequence[dist.Work]) -> Sequence[dist.Work]:
        """Have the transfer stamped once all `works` are complete; what to wait for in their place."""
        transfer.completed_s = math.nan
        if not works:
            return works
        if len(works) == 1 and (future := _future(works[0])) is not None:
            future.add_done_callback(lambda _: _stamp(transfer))
            return works
        with self._lock:
            if self._waiting == MOST_THREADS:
                return works  # queueing behind others could wait for what only this rank's next call brings
            self._waiting += 1
        if self._threads < self._waiting:
            self._threads += 1
            threading.Thread(target=self._serve, name=f"observer {self._threads}", daemon=True).start()
        observed = [Observed(work) for work in works]
        self._tasks.put((transfer, observed))
        return observed  # type: ignore[return-value]  # all that is asked of a work is to wait

    def _serve(self) -> None:
        while True:
            transfer, observed = self._tasks.get()
            for own in observed:
                try:
                    own.work.wait()
                except Exception as error:
                    own.error = error
                if own is observed[-1]:
                    _stamp(transfer)
                    with self._lock:
                        self._waiting -= 1
                own.under_way.release()
            del transfer, observed, own


def _stamp(transfer: Transfer) -> None:
    transfer.completed_s = time.perf_counter()


def _future(work: dist.Work) -> Any:
    """The future of one of gloo's collectives; None for a message."""
    try:
        return work.get_future()
    except RuntimeError:
        return None

"""When the operations of a rank begin: on the host's clock, or on a GPU's stream.

On a CPU an operation has run when its call returns, and `time.perf_counter` says when. On a GPU the call only
queues it: an event on the stream stands for the moment, and is read once the step is over, so that nothing is
synchronized for it. The side of the GPU has not run on one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch


class Stopwatch(Protocol):
    """`now` marks a moment; `seconds` turns marks of a step that is over into seconds of the host's clock."""

    @property
    def now(self) -> Callable[[], Any]: ...

    def seconds(self, marks: Sequence[Any]) -> Sequence[float]: ...


class HostStopwatch:
    """Marks are seconds already."""

    now = staticmethod(time.perf_counter)

    def seconds(self, marks: Sequence[Any]) -> Sequence[float]:
        return marks


class CudaStopwatch:
    """Marks are events on the current stream. The first is synchronized: it ties both clocks together."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._first = self.now()
        self._first.synchronize()
        self._first_s = time.perf_counter()

    def now(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, marks: Sequence[Any]) -> Sequence[float]:
        if marks:
            marks[-1].synchronize()
        return [self._first_s + self._first.elapsed_time(mark) / 1e3 for mark in marks]


def make_stopwatch(device: torch.device) -> Stopwatch:
    return CudaStopwatch(device) if device.type == "cuda" else HostStopwatch()

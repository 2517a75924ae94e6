"""When the operations of a rank begin: on the host's clock, or on a GPU's stream.

On a CPU an operation has run when its call returns, and `time.perf_counter` says when. On a GPU the call only
queues it: an event on the stream stands for the moment, and is read once the step is over, so that nothing is
synchronized within it. The side of the GPU has not run on one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch


class Stopwatch(Protocol):
    """`now` marks a moment, `wait` returns when the last of them has come.

    `seconds` turns marks, the last of which is the latest, into seconds of the host's clock.
    """

    @property
    def now(self) -> Callable[[], Any]: ...

    def wait(self, marks: Sequence[Any]) -> None: ...

    def seconds(self, marks: Sequence[Any]) -> Sequence[float]: ...


class HostStopwatch:
    """Marks are seconds already."""

    now = staticmethod(time.perf_counter)

    def wait(self, marks: Sequence[Any]) -> None:
        """It has come already."""

    def seconds(self, marks: Sequence[Any]) -> Sequence[float]:
        return marks


class CudaStopwatch:
    """Marks are events on the current stream.

    Both clocks are tied together where a step ends, so that neither their drift nor the float32 of
    `elapsed_time` adds up over a run.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tied: Any = None
        self._tied_s = 0.0

    def now(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def wait(self, marks: Sequence[Any]) -> None:
        if marks and marks[-1] is not self._tied:
            marks[-1].synchronize()
            self._tied, self._tied_s = marks[-1], time.perf_counter()

    def seconds(self, marks: Sequence[Any]) -> Sequence[float]:
        self.wait(marks)
        return [self._tied_s - mark.elapsed_time(self._tied) / 1e3 for mark in marks]


def make_stopwatch(device: torch.device) -> Stopwatch:
    return CudaStopwatch(device) if device.type == "cuda" else HostStopwatch()

"""The clock of a GPU's stream, on a clock and events that are stood in for; nothing here has run on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trainer import stopwatch
from trainer.stopwatch import CudaStopwatch, HostStopwatch


class Device:
    """A host's clock, and a stream whose work is queued: events come when what is before them is done."""

    def __init__(self) -> None:
        self.host_s = self.done_s = 100.0

    def perf_counter(self) -> float:
        return self.host_s

    def queue(self, seconds: float) -> None:
        self.done_s = max(self.done_s, self.host_s) + seconds

    def event(self, enable_timing: bool) -> Event:
        return Event(self)


class Event:
    def __init__(self, device: Device) -> None:
        self.device, self.at_s = device, 0.0

    def record(self, stream: Any) -> None:
        self.at_s = max(self.device.done_s, self.device.host_s)

    def synchronize(self) -> None:
        self.device.host_s = max(self.device.host_s, self.at_s)

    def elapsed_time(self, end: Event) -> float:
        return (end.at_s - self.at_s) * 1e3


def test_a_step_ends_when_its_work_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of 1, 2 and 3 s are queued at second 100 and read after second 106; the next step 10 s later."""
    device = Device()
    monkeypatch.setattr(torch.cuda, "Event", device.event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(stopwatch, "time", device)
    watch = CudaStopwatch(torch.device("cpu"))
    for begin_s in (100.0, 116.0):
        marks = []
        for seconds in (1.0, 2.0, 3.0):
            marks.append(watch.now())
            device.queue(seconds)
        marks.append(watch.now())
        assert device.host_s == begin_s
        watch.wait(marks)
        assert device.host_s == begin_s + 6
        device.host_s += 10  # what the host does until it reads them moves nothing
        assert watch.seconds(marks) == pytest.approx([begin_s + s for s in (0, 1, 3, 6)])
    assert watch.seconds([]) == []


def test_the_hosts_marks_are_seconds() -> None:
    watch = HostStopwatch()
    marks = [watch.now(), watch.now()]
    watch.wait(marks)
    assert watch.seconds(marks) is marks

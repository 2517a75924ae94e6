"""torch.profiler over a range of steps, each operation named by its identity in the schedule."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

import torch
from torch.profiler import ProfilerActivity, profile

from trainer.config import RunConfig


class Profiler:
    """Records `trainer.profile` = (first, last) step into profile-rankR.json, a Chrome trace."""

    def __init__(self, config: RunConfig, rank: int) -> None:
        self.range = config.trainer.profile
        self.path = Path(config.run_dir) / f"profile-rank{rank}.json"
        self._steps = 0
        self._profile: profile | None = None

    def __enter__(self) -> Profiler:
        self._start_if_due()
        return self

    @property
    def running(self) -> bool:
        return self._profile is not None

    def step(self) -> None:
        """A step has ended."""
        self._steps += 1
        if self._profile is not None and self.range is not None and self._steps > self.range[1]:
            self._export()
        self._start_if_due()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._profile is not None:
            self._export()

    def _start_if_due(self) -> None:
        if self.range is not None and self._steps == self.range[0]:
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
            self._profile = profile(activities=activities)
            self._profile.start()

    def _export(self) -> None:
        assert self._profile is not None
        self._profile.stop()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._profile.export_chrome_trace(str(self.path))
        self._profile = None

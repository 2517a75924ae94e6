"""What the ranks run whose start-up is timed; nothing is imported here that they would not import anyway."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ENDED = "first_step"


def timed_run(config: Any, rank: int, *place: Any, stop: Any) -> int:
    """`trainer.worker.run`, which leaves the time of its first step in the run's folder."""
    from trainer import worker
    from trainer.loop import Loop

    class Timed(Loop):
        def steps(self, *arguments: Any) -> Iterator[int]:
            for step in super().steps(*arguments):
                if step == 0:
                    Path(config.run_dir, f"{ENDED}{rank}").write_text(str(time.time()))
                yield step

    worker.Loop = Timed  # type: ignore[misc]
    try:
        return worker.run(config, rank, *place, stop=stop)
    finally:
        worker.Loop = Loop  # type: ignore[misc]


def import_torch() -> float:
    """What each of the launcher's ranks runs; when it was done."""
    import torch.distributed

    assert torch.distributed.is_available()
    return time.time()

"""Steps kept for the verdict and the report: a sample over the whole run, in bounded memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trainer.recorder import Recorded

MOST_BYTES = 16 * 2**20
FEWEST, MOST = 8, 256
FEWEST_STEPS = 3  # that say something: fewer have no quartiles


@dataclass(frozen=True)
class Kept:
    """One step with its stamps."""

    step: int
    recorded: Recorded


class Sample:
    """Every step at first; once full every second is dropped, then only every second taken, and so on."""

    def __init__(self) -> None:
        self.steps: list[Kept] = []
        self._seen, self._every = 0, 1

    def add(self, kept: Kept) -> None:
        taken = self._seen % self._every == 0
        self._seen += 1
        if not taken:
            return
        self.steps.append(kept)
        size = sum(record.nbytes for record in kept.recorded.records)
        if len(self.steps) >= min(MOST, max(FEWEST, MOST_BYTES // max(1, size))):
            del self.steps[1::2]
            self._every *= 2


class History:
    """Steps after warm-up on batches of full size, observed ones apart; and two in a row, for drawing."""

    def __init__(self, rows: int, warmup_steps: int) -> None:
        self.rows, self.warmup_steps = rows, warmup_steps
        self.plain, self.observed = Sample(), Sample()
        # The last observed step (of all, where none was), and before it its neighbour if on as many rows.
        self.last: list[Kept] = []
        self._newest: Kept | None = None

    def add(self, step: int, recorded: Recorded) -> None:
        kept = Kept(step, recorded)
        if recorded.observed or not any(own.recorded.observed for own in self.last):
            before = self._newest
            self.last = [kept] if before is None or before.recorded.rows != recorded.rows else [before, kept]
        self._newest = kept
        if step >= self.warmup_steps and recorded.rows == self.rows:
            (self.observed if recorded.observed else self.plain).add(kept)

    def steady(self) -> list[Kept]:
        """By step; observed ones, since observing takes time, only where there are too few others."""
        if len(self.plain.steps) >= FEWEST_STEPS:
            return self.plain.steps
        return sorted([*self.plain.steps, *self.observed.steps], key=lambda kept: kept.step)


def stacked(steps: Sequence[Kept], rank: int, width: int) -> np.ndarray:
    """[steps, width]: the first `width` numbers of a rank's records."""
    return np.stack([kept.recorded.records[rank][:width] for kept in steps])

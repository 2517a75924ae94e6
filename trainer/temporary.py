"""What is there for the time of a `with` block."""

from __future__ import annotations

import abc
from types import TracebackType
from typing import Self


class Temporary(abc.ABC):
    """Made at the start of the block and removed at its end, and also where making it fails halfway."""

    def __enter__(self) -> Self:
        try:
            self.make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @abc.abstractmethod
    def make(self) -> None:
        """Make it, or raise."""

    @abc.abstractmethod
    def close(self) -> None:
        """Remove what there is of it."""

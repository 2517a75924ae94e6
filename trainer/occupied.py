"""Whether a process still writes to a folder: a lock on the folder itself, which ends with its process."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from trainer.errors import InputError

PATIENCE_S = 15.0  # ranks whose launcher was killed end by themselves, in about four seconds
POLL_S = 0.1


@contextmanager
def occupied(folder: str) -> Iterator[None]:
    """Tell others, for the time of the block, that this process writes to a run's folder."""
    descriptor = None
    with suppress(OSError):  # no folder, or a file system without locks
        descriptor = os.open(folder, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def is_occupied(folder: Path) -> bool:
    """Whether a process is `occupied` with the folder, as far as the file system can tell."""
    try:
        wait_until_left(folder, 0.0)
    except (InputError, OSError) as error:
        return isinstance(error, InputError)
    return False


def wait_until_left(folder: Path, patience_s: float = PATIENCE_S) -> None:
    """Return when no process is `occupied` with the folder.

    Raises:
        InputError: one still is after a while.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    deadline = time.monotonic() + patience_s
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise InputError(
                        f"{folder} is still written by a process of an earlier try; end it and try again"
                    ) from None
                time.sleep(POLL_S)
            except OSError:
                return  # this file system locks no folders
    finally:
        os.close(descriptor)

"""Ending a run on request: SIGINT or SIGTERM raises a flag, and a thread sees to it that time is kept.

A Python signal handler runs between two lines of the main thread, so a rank that waits inside a
collective would hear nothing until its peer answers. Here the signal's number also goes through a
pipe (`signal.set_wakeup_fd`) to a thread, which does not depend on where the main thread is.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from trainer.errors import Interrupted

GRACE_S = 3.0  # from the request to the end of a loop that does not return
EMERGENCY_S = 0.7  # for the callbacks after that; both together stay below the launcher's four seconds
SAME_REQUEST_S = 1.0  # a terminal and a launcher both pass on one Ctrl-C; later ones are a second request
PARENT_POLL_S = 0.5
ASK_POLL_S = 0.05

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopFlag:
    """Whether, and by which signal, the run was asked to stop. The training loop polls it.

    `on_emergency` holds callbacks without arguments for a loop that does not return in time: they
    run on another thread, less than a second before the process ends.
    """

    def __init__(self) -> None:
        self.on_emergency: list[Callable[[], object]] = []
        self._signum = 0

    @property
    def requested(self) -> int:
        """The number of the signal that asked first; 0 when none has."""
        return self._signum

    def request(self, signum: int) -> None:
        """Ask for a stop, as if `signum` had come."""
        self._signum = self._signum or signum


@contextmanager
def heeding_signals(
    stop: StopFlag,
    *,
    parent: int | None = None,
    verdict: Callable[[], int | None] | None = None,
    grace_s: float = GRACE_S,
    last: bool = False,
) -> Iterator[None]:
    """Let SIGINT and SIGTERM raise `stop` for the time of the block; a process that does not leave it ends.

    The exit code is then 128 + signal. A second signal ends the process at once.

    Args:
        parent: process id of the launcher; its death counts as SIGTERM.
        verdict: asked, on a thread, when a signal has come: an exit code when the run has failed
            elsewhere, so that this process ends with it at once, or None.
        grace_s: seconds from the request until the emergency callbacks are called.
        last: the process ends after the block; signals that come late change nothing, where otherwise
            the old handlers come back.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only a main thread may set handlers; its own handlers stay in force
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    watcher = _Watcher(stop, reader, parent, verdict, grace_s)
    old_writer = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    # The thread does the work, but without a Python handler there is no wake-up either.
    old_handlers = {signum: signal.signal(signum, _heard) for signum in SIGNALS}
    thread = threading.Thread(target=watcher.watch, name="signals", daemon=True)
    thread.start()
    try:
        yield
    finally:
        for signum, handler in old_handlers.items():
            signal.signal(signum, signal.SIG_IGN if last else handler)
        signal.set_wakeup_fd(old_writer)
        os.close(writer)
        thread.join()
        os.close(reader)


@contextmanager
def raising_signals() -> Iterator[None]:
    """SIGINT and SIGTERM raise Interrupted here; handlers that are set meanwhile go with the block."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(signum: int, frame: object) -> None:
        raise Interrupted(signum)

    old = {signum: signal.getsignal(signum) for signum in (*SIGNALS, signal.SIGHUP, signal.SIGQUIT)}
    for signum in SIGNALS:
        signal.signal(signum, interrupt)
    try:
        yield
    finally:
        for signum, handler in old.items():
            signal.signal(signum, handler)


def name_of(signum: int) -> str:
    """SIGTERM for 15."""
    with suppress(ValueError):
        return signal.Signals(signum).name
    return f"signal {signum}"


def ignore_signals() -> None:
    """From here on SIGINT and SIGTERM change nothing: the process is about to end with a code of its own."""
    if threading.current_thread() is threading.main_thread():
        for signum in SIGNALS:
            signal.signal(signum, signal.SIG_IGN)


def obey_signals() -> None:
    """From here on SIGINT and SIGTERM end the process at once."""
    if threading.current_thread() is threading.main_thread():
        for signum in SIGNALS:
            signal.signal(signum, signal.SIG_DFL)


def leave(code: int) -> None:
    """End the process now, without waiting for threads or groups that a failed peer may hold up."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(code)


def _heard(signum: int, frame: object) -> None:
    pass


class _Watcher:
    """The thread behind `heeding_signals`; it ends when the other end of the pipe is closed."""

    def __init__(
        self,
        stop: StopFlag,
        reader: int,
        parent: int | None,
        verdict: Callable[[], int | None] | None,
        grace_s: float,
    ) -> None:
        self._stop = stop
        self._reader = reader
        self._parent = parent
        self._verdict = verdict
        self._grace_s = grace_s
        self._asked_at: float | None = None
        self._answer: int | None = None

    def watch(self) -> None:
        while True:
            ready, _, _ = select.select([self._reader], [], [], self._patience())
            if ready:
                numbers = os.read(self._reader, 64)
                if not numbers:
                    return
                for number in numbers:
                    if number in SIGNALS:
                        self._heed(number)
            if self._asked_at is None and self._parent is not None and os.getppid() != self._parent:
                self._heed(signal.SIGTERM)
            if self._answer is not None:
                self._end(self._answer)
            elif self._asked_at is not None and time.monotonic() >= self._asked_at + self._grace_s:
                self._end(128 + self._stop.requested)

    def _patience(self) -> float | None:
        if self._asked_at is not None:
            left = max(0.0, self._asked_at + self._grace_s - time.monotonic())
            return min(left, ASK_POLL_S) if self._verdict else left
        return None if self._parent is None else PARENT_POLL_S

    def _heed(self, signum: int) -> None:
        now = time.monotonic()
        if self._asked_at is None:
            self._asked_at = now
            self._stop.request(signum)
            if self._verdict is not None:
                threading.Thread(target=self._ask, args=(self._verdict,), daemon=True).start()
        elif now - self._asked_at > SAME_REQUEST_S:
            leave(128 + signum)

    def _ask(self, verdict: Callable[[], int | None]) -> None:
        with suppress(Exception):  # a launcher that is gone cannot be asked
            self._answer = verdict()

    def _end(self, code: int) -> None:
        def complete() -> None:
            for callback in self._stop.on_emergency:
                with suppress(Exception):  # one that fails must not keep the others from their work
                    callback()

        thread = threading.Thread(target=complete, daemon=True)
        thread.start()
        thread.join(EMERGENCY_S)
        leave(code)

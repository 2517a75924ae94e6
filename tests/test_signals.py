"""Ending on request: the flag, the clock behind it, and what happens when nobody looks at the flag."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from trainer.signals import StopFlag, heeding_signals

PRELUDE = """
    import ctypes, os, signal, sys, threading, time
    from pathlib import Path
    from trainer.signals import SAME_REQUEST_S, StopFlag, heeding_signals
    libc = ctypes.CDLL(None)
    stop = StopFlag()
    def send(signum, after):
        threading.Timer(after, os.kill, (os.getpid(), signum)).start()
    def hang():
        # The main thread runs no Python for ten seconds, as in a collective that waits.
        for _ in range(10): libc.sleep(1)
    Path("begun").write_text(repr(time.monotonic()))
"""


def run(program: str, tmp_path: Path) -> tuple[int, float]:
    """Exit code and seconds of a program in a process of its own; Python's start does not count."""
    found = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PRELUDE) + textwrap.dedent(program)], cwd=tmp_path, timeout=60
    )
    return found.returncode, time.monotonic() - float((tmp_path / "begun").read_text())


def test_a_loop_that_looks_ends_by_itself_and_old_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    stop = StopFlag()
    with heeding_signals(stop):
        assert stop.requested == 0
        os.kill(os.getpid(), signal.SIGTERM)
        deadline = time.monotonic() + 5
        while not stop.requested and time.monotonic() < deadline:
            time.sleep(0.01)
        stop.request(signal.SIGINT)
    assert stop.requested == signal.SIGTERM  # the first one counts
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_loop_that_hangs_is_ended_after_the_callbacks(tmp_path: Path, signum: signal.Signals) -> None:
    code, seconds = run(
        f"""
        stop.on_emergency.append(lambda: 1 / 0)
        stop.on_emergency.append(lambda: open("done", "w").write("x"))
        with heeding_signals(stop, grace_s=0.5):
            send({int(signum)}, 0.1)
            hang()
        """,
        tmp_path,
    )
    assert code == 128 + signum
    assert (tmp_path / "done").read_text() == "x"
    assert seconds < 5


def test_a_callback_that_hangs_does_not_keep_the_process(tmp_path: Path) -> None:
    code, seconds = run(
        """
        stop.on_emergency.append(lambda: time.sleep(20))
        with heeding_signals(stop, grace_s=0.2):
            send(signal.SIGTERM, 0.1)
            hang()
        """,
        tmp_path,
    )
    assert code == 143
    assert seconds < 6


def test_the_same_signal_at_once_is_one_request_and_later_a_second_one(tmp_path: Path) -> None:
    code, seconds = run(
        """
        stop.on_emergency.append(lambda: open("done", "w"))
        def ask():
            os.kill(os.getpid(), signal.SIGINT)
            while not stop.requested: time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(SAME_REQUEST_S + 0.2)  # since the first was heeded, or longer
            os.kill(os.getpid(), signal.SIGTERM)
        with heeding_signals(stop, grace_s=9):
            threading.Thread(target=ask, daemon=True).start()
            hang()
        """,
        tmp_path,
    )
    assert code == 143  # at once, by the second request
    assert 1.2 < seconds < 6
    assert not (tmp_path / "done").exists()


def test_a_failure_elsewhere_gives_its_exit_code(tmp_path: Path) -> None:
    code, seconds = run(
        """
        with heeding_signals(stop, grace_s=9, verdict=lambda: 2):
            send(signal.SIGTERM, 0.1)
            hang()
        """,
        tmp_path,
    )
    assert code == 2
    assert seconds < 6


def test_a_verdict_that_cannot_be_had_changes_nothing(tmp_path: Path) -> None:
    code, _ = run(
        """
        with heeding_signals(stop, grace_s=0.5, verdict=lambda: 1 / 0):
            send(signal.SIGTERM, 0.1)
            hang()
        """,
        tmp_path,
    )
    assert code == 143


def test_a_launcher_that_is_gone_counts_as_a_signal(tmp_path: Path) -> None:
    code, seconds = run(
        """
        with heeding_signals(stop, parent=os.getppid() + 1, grace_s=0.2):
            hang()
        """,
        tmp_path,
    )
    assert code == 143
    assert seconds < 6


def test_outside_the_main_thread_nothing_is_changed(tmp_path: Path) -> None:
    code, _ = run(
        """
        def inside():
            with heeding_signals(stop):
                pass
        thread = threading.Thread(target=inside)
        thread.start()
        thread.join()
        os.kill(os.getpid(), signal.SIGTERM)
        """,
        tmp_path,
    )
    assert code == -signal.SIGTERM

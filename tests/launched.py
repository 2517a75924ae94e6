"""Scripts started as a user starts them, with the ranks that they start in turn."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


class Launched:
    """A launcher in a process group of its own, and the ranks that have told their process ids."""

    def __init__(self, folder: Path, *command: str, **environment: str) -> None:
        self.folder = folder
        clean = {name: value for name, value in os.environ.items() if name not in NAMES}
        self.process = subprocess.Popen(
            [sys.executable, *command],
            cwd=folder,
            env={**clean, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.pids: list[int] = []

    def result(self, timeout_s: float = 200) -> tuple[int, str]:
        """Exit code, and stdout and stderr together."""
        output, _ = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, output

    def wait_for_ranks(self, count: int) -> None:
        deadline = time.monotonic() + 200
        while len(found := list(self.folder.glob("run/*.pid"))) < count:
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.05)
        self.pids = [int(path.read_text()) for path in found]

    def ranks_alive(self, within_s: float) -> list[int]:
        """Ranks that are still there after `within_s`, waited for as long as that."""
        deadline = time.monotonic() + within_s
        while (alive := [pid for pid in self.pids if _alive(pid)]) and time.monotonic() < deadline:
            time.sleep(0.05)
        return alive

    def session_alive(self, within_s: float) -> list[int]:
        """Processes of its session that are still there after `within_s`, waited for as long as that."""
        deadline = time.monotonic() + within_s
        while (found := _in_session(self.process.pid)) and time.monotonic() < deadline:
            time.sleep(0.05)
        return found

    def clean_up(self) -> None:
        for pid in (*self.pids, *_in_session(self.process.pid)):
            if _alive(pid):
                os.kill(pid, signal.SIGKILL)
        self.process.communicate()


def _alive(pid: int) -> bool:
    try:
        # A process that has ended but has not been waited for is a zombie, not alive.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _in_session(session: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if fields[0] != "Z" and int(fields[3]) == session:
            found.append(int(path.parent.name))
    return found

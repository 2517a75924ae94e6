"""Scripts started as a user starts them, with the ranks that they start in turn."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
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


def run_launched(folder: Path, *command: str, timeout_s: float = 100, **environment: str) -> tuple[int, str]:
    """Exit code and output of a launcher, of which nothing is left then, however it ended."""
    started = Launched(folder, *command, **environment)
    try:
        return started.result(timeout_s)
    finally:
        started.clean_up()


def run_script(*arguments: str, launcher: tuple[str, ...] = (), timeout_s: float = 200) -> tuple[int, str]:
    """Exit code and output of scripts/train.py; torchrun's own notices are in the output."""
    command = (*launcher, "scripts/train.py", "logger=none", *arguments)
    return run_launched(ROOT, *command, timeout_s=timeout_s)


def torchrun_on_two_hosts(per_node: int = 1) -> tuple[str, ...]:
    """The arguments of scripts/two_hosts.py with which torchrun starts what follows on both hosts."""
    return (
        "--", sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--node-rank={rank}",
        f"--nproc-per-node={per_node}", "--master-addr={address}", "--master-port={port}",
    )  # fmt: skip


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run; one that is being written is left out."""
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


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

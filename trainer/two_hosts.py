"""Two hosts on one machine: network namespaces joined by a veth pair whose ends send no faster than asked.

Each end is shaped where it sends (tc-tbf(8)), so both directions have the rate, independently. Linux, as
root, with iproute2.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TextIO

from trainer.errors import InputError, shown
from trainer.temporary import Temporary

DEVICE = "wire0"
ADDRESSES = ("10.77.0.1", "10.77.0.2")  # seen inside the namespaces alone, so that pairs do not collide
NETWORK, PREFIX_LENGTH = "10.77.0.0", 30
RATE, BURST = "1gbit", "64000b"
LATENCY = "50ms"  # the longest that a packet may queue
AVAILABLE = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
LEAST_BURST_BYTES = 2000  # an Ethernet frame must fit, or nothing passes
GSO_BYTES, LEAST_GSO_BYTES = 65536, 4096  # the kernel's default, and what still holds two frames
PACKAGES = {"ip": "iproute2", "tc": "iproute2", "iperf3": "iperf3"}  # Debian's names
PEER_S = 30.0  # after one host's failure the other gets this long to end by itself
ENDING_S = 10.0  # from SIGTERM to SIGKILL
POLL_S = 0.05
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_RATE = re.compile(r"(\d+(?:\.\d+)?)([kmg]?)bit")
_BURST = re.compile(r"(\d+)(b|kb|mb)?")
_BURST_UNITS = {None: 1, "b": 1, "kb": 1024, "mb": 1024**2}  # tc(8): its kb is 1024 bytes


@dataclass(frozen=True)
class Shape:
    """What tc-tbf(8) lets through in each direction: `rate` in bits, `burst` in bytes, as tc writes them."""

    rate: str = RATE
    burst: str = BURST

    @property
    def burst_bytes(self) -> int:
        match = _BURST.fullmatch(self.burst)
        assert match is not None
        return int(match[1]) * _BURST_UNITS[match[2]]

    def check(self) -> None:
        """Refuse what tc would not take, or would take for a link on which nothing passes.

        Raises:
            InputError: one sentence.
        """
        rate = _RATE.fullmatch(self.rate)
        if rate is None or float(rate[1]) == 0:
            raise InputError(f"{shown('--rate', self.rate)} must be bits per second such as 1gbit or 100mbit")
        if _BURST.fullmatch(self.burst) is None or self.burst_bytes < LEAST_BURST_BYTES:
            raise InputError(
                f"{shown('--burst', self.burst)} must be bytes such as 64000b or 64kb, at least "
                f"{LEAST_BURST_BYTES}"
            )


def check_system(*programs: str) -> None:
    """Refuse a machine on which the hosts, or one of `programs`, cannot be had.

    Raises:
        InputError: one sentence.
    """
    if not sys.platform.startswith("linux"):
        raise InputError(f"Network namespaces are Linux's, and this system is {sys.platform}; run on Linux")
    if os.geteuid() != 0:
        raise InputError(f"Network namespaces need root, and this user has id {os.geteuid()}; run as root")
    for name in ("ip", "tc", *programs):
        if shutil.which(name) is None:
            raise InputError(f"{name} is not installed; install the package {PACKAGES.get(name, name)}")


def congestion_control() -> str:
    """TCP's between the hosts: Linux's default, whatever this machine has; reno where that is not built in.

    Once in ten seconds bbr sends nearly nothing for 0.2 s (its draft's ProbeRTT). Connections that last meet
    that, and those of an iperf3 of a second do not.
    """
    return "cubic" if AVAILABLE.exists() and "cubic" in AVAILABLE.read_text().split() else "reno"


class TwoHosts(Temporary):
    """The pair, for the time of a `with` block; whatever still runs in it then is ended.

    Raises:
        InputError: the shape is wrong, or this machine does not let namespaces be made.
    """

    def __init__(self, shape: Shape | None = None) -> None:
        self.shape = shape or Shape()
        self.shape.check()
        stem = f"splitmeter-{os.getpid()}-{secrets.token_hex(3)}"
        self.names = (f"{stem}-0", f"{stem}-1")

    def __enter__(self) -> Self:
        check_system()  # before there is anything to close
        return super().__enter__()

    def make(self) -> None:
        first, second = self.names
        # What the kernel hands over in one piece, if larger than the burst, would be cut packet by packet:
        # that takes more of a processor than a fast link leaves, and half the rate is gone.
        largest = min(GSO_BYTES, max(self.shape.burst_bytes // 2, LEAST_GSO_BYTES))
        for name in self.names:
            _tool("ip", "netns", "add", name)
        _tool(
            "ip", "link", "add", "name", DEVICE, "netns", first,
            "type", "veth", "peer", "name", DEVICE, "netns", second,
        )  # fmt: skip
        for name, address in zip(self.names, ADDRESSES, strict=True):
            _tool("ip", "-n", name, "address", "add", f"{address}/{PREFIX_LENGTH}", "dev", DEVICE)
            _tool("ip", "-n", name, "link", "set", "dev", "lo", "up")
            _tool("ip", "-n", name, "link", "set", "dev", DEVICE, "up", "gso_max_size", str(largest))
            _tool(
                "tc", "-n", name, "qdisc", "add", "dev", DEVICE, "root",
                "tbf", "rate", self.shape.rate, "burst", self.shape.burst, "latency", LATENCY,
            )  # fmt: skip
            _tool(
                "ip", "-n", name, "route", "replace", f"{NETWORK}/{PREFIX_LENGTH}", "dev", DEVICE,
                "proto", "kernel", "scope", "link", "src", address, "congctl", congestion_control(),
            )  # fmt: skip

    def close(self) -> None:
        """End what runs on the hosts and remove them; a second time does nothing."""
        with _ignoring_signals():  # one that comes now must not leave half of it behind
            self._remove()

    def _remove(self) -> None:
        deadline = time.monotonic() + ENDING_S
        _signal(self._pids(), signal.SIGTERM)
        while (left := self._pids()) and time.monotonic() < deadline:
            time.sleep(POLL_S)
        _signal(left, signal.SIGKILL)
        for name in self.names:
            with suppress(InputError):  # one that was never made
                _tool("ip", "netns", "delete", name)

    def _pids(self) -> list[int]:
        found: list[int] = []
        for name in self.names:
            with suppress(InputError):
                found += [int(pid) for pid in _tool("ip", "netns", "pids", name).split()]
        return found

    def start(
        self,
        host: int,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        stdout: int | None = None,
        stderr: int | None = None,
    ) -> subprocess.Popen[str]:
        """Start `command` on a host, 0 or 1, in a session of its own; its streams are text."""
        return subprocess.Popen(
            ["ip", "netns", "exec", self.names[host], *command],
            env={**os.environ, "GLOO_SOCKET_IFNAME": DEVICE, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl-C reaches this process, which ends the others in order
        )

    def run(self, command: Sequence[str]) -> int:
        """`command` on both hosts at once, each line of output behind its host's name.

        Returns the exit code of the one that failed first, 128 + signal where a signal ended it, or 0.
        `fill_in` says what is replaced in the command.
        """
        processes = [
            self.start(host, fill_in(command, host), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            for host in range(len(self.names))
        ]
        readers = [
            threading.Thread(target=_pass_on, args=(source, target, f"[host {host}] "), daemon=True)
            for host, process in enumerate(processes)
            for source, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr))
        ]
        for reader in readers:
            reader.start()
        code = _first_failure(processes)
        for reader in readers:
            reader.join(ENDING_S)  # a child that outlives its parent may hold the stream
        return code


def fill_in(command: Sequence[str], host: int, port: int = 29500) -> list[str]:
    """`command` with {rank}, {address} (of host 0), {port} and {device} replaced; other braces stay."""
    values = {"{rank}": str(host), "{address}": ADDRESSES[0], "{port}": str(port), "{device}": DEVICE}
    filled = []
    for word in command:
        for name, value in values.items():
            word = word.replace(name, value)
        filled.append(word)
    return filled


def _first_failure(processes: Sequence[subprocess.Popen[str]]) -> int:
    """Exit code of the first that fails, once all have ended; the others are then ended after a while."""
    code, deadline, ends = 0, float("inf"), [float("inf")] * len(processes)
    while None in [process.poll() for process in processes]:
        for process, end in zip(processes, ends, strict=True):
            if process.returncode and not code:
                code, deadline = exit_code(process.returncode), time.monotonic() + PEER_S
            if process.returncode is None and time.monotonic() > end:
                process.kill()
        if time.monotonic() > deadline:
            deadline = float("inf")
            for number, process in enumerate(processes):
                if process.returncode is None:
                    process.terminate()
                    ends[number] = time.monotonic() + ENDING_S
        time.sleep(POLL_S)
    return code or next((exit_code(process.returncode) for process in processes if process.returncode), 0)


def exit_code(returncode: int) -> int:
    """As a shell tells it: 128 + signal for a process that a signal ended."""
    return 128 - returncode if returncode < 0 else returncode


def _pass_on(source: TextIO, target: TextIO, prefix: str) -> None:
    for line in source:
        with suppress(BrokenPipeError):
            target.write(prefix + line.rstrip("\n") + "\n")
            target.flush()


@contextmanager
def _ignoring_signals() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # Python handlers run in the main thread
        return
    old = {signum: signal.signal(signum, signal.SIG_IGN) for signum in SIGNALS}
    try:
        yield
    finally:
        for signum, handler in old.items():
            signal.signal(signum, handler)


def _signal(pids: Sequence[int], signum: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signum)


def _tool(*command: str) -> str:
    """stdout of `ip` or `tc`.

    Raises:
        InputError: it failed, with what it said.
    """
    found = subprocess.run(command, capture_output=True, text=True, start_new_session=True, check=False)
    if found.returncode:
        said = " ".join(found.stderr.split()) or f"exit code {found.returncode}"
        raise InputError(
            f"{' '.join(command)} failed on this machine ({said}); run where root may make network namespaces"
        )
    return found.stdout

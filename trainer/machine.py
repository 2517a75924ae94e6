"""The memory ladder of the machine that this runs on: sizes from the kernel, memory bandwidth from copies."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from collectives.link import LinkCurve
from trainer.config import Tier

_CPUS = Path("/sys/devices/system/cpu")
MEMINFO = Path("/proc/meminfo")
_MIB = 2**20
_SMALLEST_BUFFER_BYTES, _LARGEST_BUFFER_BYTES = 64 * _MIB, 1024 * _MIB
_COPIES, _COPYING_S = (3, 9), 0.1  # at least and at most so many; no further one after so long
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


def available_memory_bytes(device: torch.device) -> int | None:
    """Memory that can be taken of the device without harm to others; None where the system does not tell.

    The side of the GPU has not run on one.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    return _meminfo(MEMINFO).get("MemAvailable")


def measure_machine(cpus: Path = _CPUS, meminfo: Path = MEMINFO) -> list[Tier]:
    """Tiers L1, L2, L3, memory and network of this machine, from the cores outward.

    Takes about 0.3 s and, for that time, memory of 1.5 times the outermost caches, at least 128 MiB and at
    most a quarter of what is available: call it once a machine, not once a rank.

    Cache sizes are those of CPU 0. The memory's bandwidth counts what a copy reads and what it writes, as
    STREAM's Copy does (J. McCalpin, 1995), with torch's threads, median of several copies; lines that the
    hardware fetches before they are overwritten are not counted. What cannot be measured is None: a size
    that the kernel does not tell, a bandwidth where the caches are unknown or there is no room for buffers
    that exceed them, and always the network's, which the link curve measures.
    """
    nearest = {cache.level: cache for cache in _caches(cpus / "cpu0")}
    sizes = _meminfo(meminfo)
    bandwidth, how = _copy_bandwidth(_outermost_bytes(cpus), sizes.get("MemAvailable", 0))
    memory = Tier(
        name="memory",
        scope="machine",
        size_bytes=sizes.get("MemTotal"),
        bandwidth_GBps_read_plus_write=bandwidth,
        source=f"MemTotal of {meminfo}; {how}",
    )
    network = Tier(name="network", scope="between machines", source="left to the link curve")
    return [*(_tier(level, nearest.get(level)) for level in (1, 2, 3)), memory, network]


def ladder_with_network(tiers: Sequence[Tier], curve: LinkCurve) -> list[Tier]:
    """The ladder with the network's rate from a link curve: the best bus bandwidth of any operation on it."""
    rates = {own.operation: own.bandwidth_GBps for own in curve.curves.values()}
    if not rates:
        return list(tiers)
    best = max(rates, key=lambda operation: rates[operation])
    source = f"link curve: {best} between {curve.measured['world_size']} ranks, {curve.measured['backend']}"
    return [
        replace(tier, bandwidth_GBps_per_direction=rates[best], source=source)
        if tier.name == "network"
        else tier
        for tier in tiers
    ]


@dataclass(frozen=True)
class _Cache:
    level: int
    shared_by: str  # a list of CPUs such as 0-7,64-71
    size_bytes: int
    entry: Path


def _caches(cpu: Path) -> list[_Cache]:
    """The caches of a CPU that hold data; empty where the kernel does not tell."""
    caches = []
    for entry in sorted((cpu / "cache").glob("index*")):
        try:
            level, kind, size, shared_by = (
                (entry / name).read_text().strip() for name in ("level", "type", "size", "shared_cpu_list")
            )
            if kind in ("Data", "Unified"):
                caches.append(_Cache(int(level), shared_by, _bytes(size), entry))
        except (OSError, ValueError):
            continue
    return caches


def _outermost_bytes(cpus: Path) -> int:
    """The outermost caches of all CPUs together: what threads on all of them can keep out of the memory."""
    distinct = {
        (cache.level, cache.shared_by): cache.size_bytes
        for cpu in cpus.glob("cpu[0-9]*")
        for cache in _caches(cpu)
    }
    outermost = max((level for level, _ in distinct), default=0)
    return sum(size for (level, _), size in distinct.items() if level == outermost)


def _tier(level: int, cache: _Cache | None) -> Tier:
    if cache is None:
        return Tier(f"L{level}", source="the kernel does not tell")
    return Tier(f"L{level}", f"CPUs {cache.shared_by}", size_bytes=cache.size_bytes, source=str(cache.entry))


def _bytes(text: str) -> int:
    """Bytes from the kernel's notation: 48K, 2M, or plain bytes."""
    return int(text[:-1]) * _UNITS[text[-1]] if text[-1:] in _UNITS else int(text)


def _meminfo(file: Path) -> dict[str, int]:
    """Bytes by name; empty where the kernel keeps no such file."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return {}
    parts = [line.replace(":", " ").split() for line in lines]
    # Its "kB" are 1024 bytes.
    return {part[0]: int(part[1]) * 1024 for part in parts if part[2:] == ["kB"]}


def _copy_bandwidth(cached_bytes: int, available_bytes: int) -> tuple[float | None, str]:
    """Decimal GB/s read plus written by copies between two buffers, and how it was got."""
    # Two buffers that together are 1.5 times the cache leave little of one copy there for the next.
    wanted = max(cached_bytes * 3 // 4, _SMALLEST_BUFFER_BYTES)
    size = min(wanted, _LARGEST_BUFFER_BYTES, available_bytes // 8)
    if cached_bytes == 0:
        return None, "bandwidth not measured: the caches, which buffers must exceed, are unknown"
    if 2 * size <= cached_bytes or size < _SMALLEST_BUFFER_BYTES:
        return None, "bandwidth not measured: no room for buffers that exceed the caches"
    source = torch.ones(size, dtype=torch.uint8)
    target = torch.empty_like(source)
    target.copy_(source)  # the first touch of a page is the kernel's work
    times: list[float] = []
    least, most = _COPIES
    while len(times) < least or (len(times) < most and sum(times) < _COPYING_S):
        start = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - start)
    return (
        2 * size / statistics.median(times) / 1e9,
        f"bandwidth: median of {len(times)} copies of {size} bytes by {torch.get_num_threads()} threads",
    )

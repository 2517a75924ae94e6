"""What left the devices themselves: NVLink bytes of a GPU and bytes of the InfiniBand ports of a machine.

Counters of the whole device: they also count what other processes send through it, and ranks that share a
port all read the same number. They run on from when the driver was loaded: difference two readings.

This code has not run on a GPU or an InfiniBand port, only against files that tests replay, written to the
layout that the documents named below give.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

KIB = 1024
OCTETS_PER_UNIT = 4
# Where a port has no 64-bit counters the kernel reads 32-bit ones, which stop at their largest value
# (InfiniBand Architecture Specification, PortCounters).
STUCK_COUNTER = 2**32 - 1
ACTIVE = "4: ACTIVE"  # drivers/infiniband/core/sysfs.c, state_show
LINK_LAYERS = ("InfiniBand", "Ethernet")


class ByteCounter(Protocol):
    """What counts bytes sent so far: over a group's sockets, a GPU's links, a machine's ports."""

    def bytes_sent(self) -> int | None:
        """None where it cannot be read. Two readings may be differenced if none between them was None."""


class Unreadable(Exception):
    """A counter cannot be read; the message is the reason."""


class DeviceCounter(abc.ABC):
    """Sums the counters of a device's parts (links or ports), as long as the sums can be compared.

    A part that starts again at zero, comes or goes would be hidden by the others in their sum. Such a reading
    is None, so that both differences with it are unknown; the next one counts from there on.
    """

    def __init__(self) -> None:
        self.reason: str | None = None  # why the last reading was None
        self._last: dict[str, int] | None = None

    def bytes_sent(self) -> int | None:
        """Bytes sent since the driver was loaded; None where that is not known, and `reason` says why."""
        try:
            parts = self._read()
        except Unreadable as error:
            self.reason = str(error)
            return None
        last, self._last = self._last, parts
        self.reason = None if last is None else _break(last, parts)
        return sum(parts.values()) if self.reason is None else None

    @abc.abstractmethod
    def _read(self) -> dict[str, int]:
        """Bytes sent by each part, by the part's name; raises Unreadable."""


class NvlinkCounter(DeviceCounter):
    """Bytes that a GPU sent over all its NVLinks, payload only: protocol overhead is not counted.

    index: NVML's index of the GPU, which does not follow CUDA_VISIBLE_DEVICES, or its UUID ("GPU-...").
    Reads NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX for each link (nvml.h: data without protocol overhead, in KiB,
    the link in scopeId), so a reading is low by up to 1 KiB a link. Needs nvidia-ml-py (extra `cluster`).
    """

    def __init__(self, index: int | str) -> None:
        super().__init__()
        self.index = index
        self._nvml: Any = None
        self._handle: Any = None

    def _read(self) -> dict[str, int]:
        if self._handle is None:
            self._open()
        nvml = self._nvml
        field = nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX
        asked = [(field, link) for link in range(nvml.NVML_NVLINK_MAX_LINKS)]
        try:
            answers = nvml.nvmlDeviceGetFieldValues(self._handle, asked)
        except nvml.NVMLError as error:
            raise Unreadable(f"NVML does not read the NVLinks of GPU {self.index}: {error}") from error
        parts = {}
        for (_, link), answer in zip(asked, answers, strict=True):
            # Inactive links, and numbers beyond the last link.
            if answer.nvmlReturn in (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_INVALID_ARGUMENT):
                continue
            # A sum without this link would be too low.
            if answer.nvmlReturn != nvml.NVML_SUCCESS:
                raise Unreadable(f"NVML answers {answer.nvmlReturn} for NVLink {link} of GPU {self.index}")
            parts[f"NVLink {link} of GPU {self.index}"] = self._value(answer) * KIB
        if not parts:
            raise Unreadable(f"GPU {self.index} has no active NVLink whose bytes the driver counts")
        return parts

    def _open(self) -> None:
        try:
            import pynvml
        except ImportError as error:
            raise Unreadable("nvidia-ml-py is not installed (extra `cluster`)") from error
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise Unreadable(f"NVML finds no NVIDIA driver: {error}") from error
        by_uuid = isinstance(self.index, str)
        find = pynvml.nvmlDeviceGetHandleByUUID if by_uuid else pynvml.nvmlDeviceGetHandleByIndex
        try:
            self._handle = find(self.index)
        except pynvml.NVMLError as error:
            pynvml.nvmlShutdown()
            raise Unreadable(f"NVML finds no GPU {self.index}: {error}") from error
        self._nvml = pynvml

    def _value(self, answer: Any) -> int:
        members = {
            self._nvml.NVML_VALUE_TYPE_UNSIGNED_INT: "uiVal",
            self._nvml.NVML_VALUE_TYPE_UNSIGNED_LONG: "ulVal",
            self._nvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG: "ullVal",
        }
        if answer.valueType not in members:
            raise Unreadable(f"NVML answers with value type {answer.valueType}, which is no unsigned integer")
        return int(getattr(answer.value, members[answer.valueType]))


class InfinibandCounter(DeviceCounter):
    """Bytes that a machine sent over its active InfiniBand and RoCE ports, headers included.

    devices: names under root, such as "mlx5_0"; None for all of them.
    Reads counters/port_xmit_data, in units of four octets (Linux, ABI/stable/sysfs-class-infiniband). On RoCE
    (link layer Ethernet) mlx5 counts RDMA traffic there and not the port's TCP. Drivers that keep bytes in
    hw_counters alone are not read: such an active port makes the sum None, and `devices` can leave it out.
    """

    def __init__(
        self, root: str | Path = "/sys/class/infiniband", devices: Sequence[str] | None = None
    ) -> None:
        super().__init__()
        self.root = Path(root)
        self.devices = devices

    def _read(self) -> dict[str, int]:
        parts = {}
        for port in self._ports():
            if _text(port / "state") != ACTIVE or _text(port / "link_layer") not in LINK_LAYERS:
                continue
            counter = port / "counters" / "port_xmit_data"
            units = _text(counter)
            if not units.isdecimal():
                raise Unreadable(f"{counter} says {units!r}, which is no number")
            if int(units) == STUCK_COUNTER:
                raise Unreadable(f"{counter} has 32 bits and stands at its largest value")
            parts[str(port)] = int(units) * OCTETS_PER_UNIT
        if not parts:
            raise Unreadable(f"no active InfiniBand or RoCE port under {self.root}")
        return parts

    def _ports(self) -> list[Path]:
        if self.devices is None:
            return sorted(self.root.glob("*/ports/*"))
        ports = []
        for name in self.devices:
            found = sorted((self.root / name / "ports").glob("*"))
            if not found:
                raise Unreadable(f"{self.root} has no device {name} with ports")
            ports += found
        return ports


def device_counters(device: torch.device) -> list[NvlinkCounter | InfinibandCounter]:
    """The counters of what a device sends through: empty but for GPUs, whose bytes no socket of ours sees."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return []
    # NVML numbers every GPU of the machine, torch those that CUDA_VISIBLE_DEVICES leaves: the UUID fits both.
    uuid = str(torch.cuda.get_device_properties(device).uuid).removeprefix("GPU-")
    return [NvlinkCounter(f"GPU-{uuid}"), InfinibandCounter()]


def _break(last: dict[str, int], parts: dict[str, int]) -> str | None:
    """Why two readings cannot be compared; None if they can."""
    changed = sorted(last.keys() ^ parts.keys())
    if changed:
        return f"{changed[0]} came up or went down since the last reading"
    for name, count in parts.items():
        if count < last[name]:
            return f"{name} went back from {last[name]} to {count} bytes: it was reset, or wrapped"
    return None


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise Unreadable(f"{file} cannot be read: {error}") from error

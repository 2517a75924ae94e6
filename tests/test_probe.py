"""What is probed at the end of a run leaves the machine room."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainer import machine, probe
from trainer.machine import available_memory_bytes


def test_ranks_of_one_machine_share_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of three ranks are on this node, and 100 bytes are free."""
    rank: Any = SimpleNamespace(device=torch.device("cpu"), world=SimpleNamespace(nodes=(0, 1, 1), rank=2))
    monkeypatch.setattr(probe, "available_memory_bytes", lambda device: 100)
    probe._check_room(rank, 50)
    with pytest.raises(MemoryError, match="2 x 51 B of activations, 100 B available"):
        probe._check_room(rank, 51)
    monkeypatch.setattr(probe, "available_memory_bytes", lambda device: None)
    probe._check_room(rank, 10**18)


def test_available_memory_is_the_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  9999 kB\nMemAvailable:   3906 kB\n")
    monkeypatch.setattr(machine, "MEMINFO", meminfo)
    assert available_memory_bytes(torch.device("cpu")) == 3906 * 1024
    meminfo.unlink()
    assert available_memory_bytes(torch.device("cpu")) is None

"""NVLink and InfiniBand counters against files in the layout of NVML and of Linux; sums made by hand."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from collectives.device_counters import InfinibandCounter, NvlinkCounter, device_counters

DATA = Path(__file__).parent / "data"
PORTS = DATA / "infiniband"
UUID = "1b5e0a10-7c1f-4a2e-9d3c-0123456789ab"
FIRST = "mlx5_0/ports/1"
ROCE = "mlx5_1/ports/1"


class RecordedNvml(ModuleType):
    """Plays pynvml: answers the calls of a recorded conversation, which have to come in its order."""

    NVMLError = type("NVMLError", (Exception,), {})
    NVML_SUCCESS = 0
    NVML_ERROR_INVALID_ARGUMENT = 2
    NVML_ERROR_NOT_SUPPORTED = 3
    NVML_VALUE_TYPE_UNSIGNED_INT = 1
    NVML_VALUE_TYPE_UNSIGNED_LONG = 2
    NVML_VALUE_TYPE_UNSIGNED_LONG_LONG = 3
    NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX = 138
    NVML_NVLINK_MAX_LINKS = 18

    def __init__(self, calls: list[dict[str, Any]]) -> None:
        super().__init__("pynvml")
        self.calls = calls

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if not name.startswith("nvml"):
            raise AttributeError(name)

        def answer(*args: Any) -> Any:
            call = self.calls.pop(0)
            assert [name, json.loads(json.dumps(args))] == [call["call"], call["args"]]
            if "raises" in call:
                raise self.NVMLError(call["raises"])
            if name != "nvmlDeviceGetFieldValues":
                return call["returns"]
            return [
                SimpleNamespace(**{**one, "value": SimpleNamespace(**one["value"])})
                for one in call["returns"]
            ]

        return answer


@pytest.fixture
def replay(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], RecordedNvml]:
    def start(name: str) -> RecordedNvml:
        nvml = RecordedNvml(json.loads((DATA / "nvml" / f"{name}.json").read_text())["calls"])
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        return nvml

    return start


@pytest.fixture
def ports(tmp_path: Path) -> Path:
    """A copy of the two devices that a test may change."""
    return shutil.copytree(PORTS, tmp_path / "infiniband")


def send(ports: Path, port: str, units: int | str) -> None:
    (ports / port / "counters" / "port_xmit_data").write_text(f"{units}\n")


def test_nvlink_bytes_are_the_sum_over_active_links(replay: Callable[[str], RecordedNvml]) -> None:
    nvml = replay("four_links")
    counter = NvlinkCounter(0)
    before = counter.bytes_sent()
    # 5,000,000,000 + 1,000 + 24 KiB; link 2 is inactive
    assert before == 5_120_001_048_576
    after = counter.bytes_sent()
    # 1,048,576 + 1,000 + 24 KiB more
    assert after is not None and after - before == 1_074_790_400
    assert counter.reason is None
    # Link 1 starts again at zero, while link 0 moves the sum up by more than it lost.
    assert counter.bytes_sent() is None
    assert (
        counter.reason == "NVLink 1 of GPU 0 went back from 2048000 to 5120 bytes: it was reset, or wrapped"
    )
    # 5,002,000,000 + 105 + 48 KiB
    assert counter.bytes_sent() == 5_122_048_156_672
    assert counter.reason is None
    assert nvml.calls == []


def test_nvlink_that_goes_down_makes_one_reading_unknown(replay: Callable[[str], RecordedNvml]) -> None:
    replay("link_lost")
    counter = NvlinkCounter(0)
    assert counter.bytes_sent() == 3400 * 1024
    # 5,400 KiB on three links look like 2,000 KiB sent; it was 3,000 KiB and what link 3 sent before it went.
    assert counter.bytes_sent() is None
    assert counter.reason == "NVLink 3 of GPU 0 came up or went down since the last reading"
    assert counter.bytes_sent() == 5401 * 1024


@pytest.mark.parametrize(
    ("conversation", "index", "reason"),
    [
        ("no_driver", 0, "NVML finds no NVIDIA driver: NVML Shared Library Not Found"),
        ("no_gpu", 3, "NVML finds no GPU 3: Invalid Argument"),
        ("no_nvlink", 0, "GPU 0 has no active NVLink whose bytes the driver counts"),
        ("no_permission", 0, "NVML answers 4 for NVLink 1 of GPU 0"),
    ],
)
def test_nvlink_that_cannot_be_read_is_none_with_the_reason(
    conversation: str, index: int, reason: str, replay: Callable[[str], RecordedNvml]
) -> None:
    nvml = replay(conversation)
    counter = NvlinkCounter(index)
    assert counter.bytes_sent() is None
    assert counter.reason == reason
    assert nvml.calls == []


def test_gpu_lost_between_two_readings(replay: Callable[[str], RecordedNvml]) -> None:
    nvml = replay("by_uuid")
    nvml.calls.append({**nvml.calls[-1], "raises": "GPU is lost"})
    counter = NvlinkCounter(f"GPU-{UUID}")
    assert counter.bytes_sent() == 7 * 1024
    assert counter.bytes_sent() is None
    assert counter.reason == f"NVML does not read the NVLinks of GPU GPU-{UUID}: GPU is lost"


@pytest.mark.parametrize(
    ("kind", "member", "value"), [(1, "uiVal", 9), (2, "ulVal", 2**40), (0, "dVal", 9.0), (4, "sllVal", 9)]
)
def test_value_is_read_as_the_type_that_nvml_names(
    kind: int, member: str, value: float, replay: Callable[[str], RecordedNvml]
) -> None:
    nvml = replay("by_uuid")
    nvml.calls[-1]["returns"][0] = {"nvmlReturn": 0, "valueType": kind, "value": {member: value}}
    counter = NvlinkCounter(f"GPU-{UUID}")
    if kind in (1, 2):
        assert counter.bytes_sent() == (value + 4) * 1024
    else:
        assert counter.bytes_sent() is None
        assert counter.reason == f"NVML answers with value type {kind}, which is no unsigned integer"


def test_missing_library_is_none_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    counter = NvlinkCounter(0)
    assert counter.bytes_sent() is None
    assert counter.reason == "nvidia-ml-py is not installed (extra `cluster`)"


def test_infiniband_bytes_are_the_sum_over_active_ports() -> None:
    # 4 * 2,500,000,000,001 octets of InfiniBand and 4 * 30,000,000 of RoCE.
    # The port that is down has sent 777 units in its time.
    assert InfinibandCounter(PORTS).bytes_sent() == 10_000_120_000_004
    assert InfinibandCounter(PORTS, ["mlx5_1"]).bytes_sent() == 120_000_000
    assert InfinibandCounter(PORTS, ["mlx5_0", "mlx5_1"]).bytes_sent() == 10_000_120_000_004


def test_infiniband_readings_are_differenced(ports: Path) -> None:
    counter = InfinibandCounter(ports)
    before = counter.bytes_sent()
    send(ports, FIRST, 2_500_000_250_001)
    after = counter.bytes_sent()
    assert before is not None and after is not None and after - before == 1_000_000
    # The other port's bytes would hide that this one started again.
    send(ports, FIRST, 3)
    send(ports, ROCE, 3_000_000_000_000)
    assert counter.bytes_sent() is None
    assert counter.reason == (
        f"{ports / FIRST} went back from 10000001000004 to 12 bytes: it was reset, or wrapped"
    )
    assert counter.bytes_sent() == 12_000_000_000_012


@pytest.mark.parametrize("state", ["1: DOWN", "2: INIT", "3: ARMED", "5: ACTIVE_DEFER"])
def test_port_that_is_not_active_does_not_count(state: str, ports: Path) -> None:
    (ports / ROCE / "state").write_text(f"{state}\n")
    assert InfinibandCounter(ports).bytes_sent() == 10_000_000_000_004


def test_port_of_another_link_layer_does_not_count(ports: Path) -> None:
    (ports / ROCE / "link_layer").write_text("Unknown\n")
    assert InfinibandCounter(ports).bytes_sent() == 10_000_000_000_004


def test_port_that_comes_up_makes_one_reading_unknown(ports: Path) -> None:
    counter = InfinibandCounter(ports)
    assert counter.bytes_sent() == 10_000_120_000_004
    down = ports / "mlx5_0/ports/2"
    (down / "state").write_text("4: ACTIVE\n")
    assert counter.bytes_sent() is None
    assert counter.reason == f"{down} came up or went down since the last reading"
    assert counter.bytes_sent() == 10_000_120_003_112


@pytest.mark.parametrize(
    ("units", "reason"),
    [
        ("N/A (no PMA)", "says 'N/A (no PMA)', which is no number"),
        ("-1", "says '-1', which is no number"),
        ("4294967295", "has 32 bits and stands at its largest value"),
    ],
)
def test_active_port_without_a_count_makes_the_sum_unknown(units: str, reason: str, ports: Path) -> None:
    send(ports, ROCE, units)
    counter = InfinibandCounter(ports)
    assert counter.bytes_sent() is None
    assert counter.reason == f"{ports / ROCE}/counters/port_xmit_data {reason}"


def test_active_port_without_the_file_can_be_left_out(ports: Path) -> None:
    shutil.rmtree(ports / ROCE / "counters")
    counter = InfinibandCounter(ports)
    assert counter.bytes_sent() is None
    assert counter.reason is not None
    assert counter.reason.startswith(f"{ports / ROCE}/counters/port_xmit_data cannot be read: ")
    assert InfinibandCounter(ports, ["mlx5_0"]).bytes_sent() == 10_000_000_000_004


def test_machine_without_infiniband(tmp_path: Path, ports: Path) -> None:
    counter = InfinibandCounter(tmp_path / "none")
    assert counter.bytes_sent() is None
    assert counter.reason == f"no active InfiniBand or RoCE port under {tmp_path / 'none'}"
    absent = InfinibandCounter(ports, ["mlx5_0", "mlx5_7"])
    assert absent.bytes_sent() is None
    assert absent.reason == f"{ports} has no device mlx5_7 with ports"


def test_gpu_is_found_by_the_uuid_that_torch_and_nvml_share(
    monkeypatch: pytest.MonkeyPatch, replay: Callable[[str], RecordedNvml]
) -> None:
    replay("by_uuid")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=UUID))
    nvlink, infiniband = device_counters(torch.device("cuda", 0))
    assert isinstance(nvlink, NvlinkCounter) and isinstance(infiniband, InfinibandCounter)
    assert nvlink.bytes_sent() == 7 * 1024


def test_cpu_has_no_device_counters() -> None:
    assert device_counters(torch.device("cpu")) == []

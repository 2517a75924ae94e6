"""The memory ladders of conf/cluster against the data sheets, and the local machine's own."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from collectives.link import Curve, LinkCurve, Point
from tests.composing import CONF, composed
from trainer.config import ClusterConfig, InputError, RunConfig, Tier
from trainer.machine import ladder_with_network, measure_machine

GPU_CLUSTERS = ("a100", "h100", "h200", "b200", "gb200_nvl72")


def cluster(name: str, *overrides: str) -> ClusterConfig:
    return RunConfig.from_mapping(composed(f"cluster={name}", *overrides), "/run").cluster


def tiers(name: str) -> dict[str, Tier]:
    return {tier.name: tier for tier in cluster(name).tiers}


def rate(tier: Tier) -> float | None:
    return tier.bandwidth_GBps_per_direction or tier.bandwidth_GBps_read_plus_write


def test_every_cluster_has_a_file_and_says_which_it_is() -> None:
    assert {file.stem for file in (CONF / "cluster").glob("*.yaml")} == {"local", *GPU_CLUSTERS}
    for name in ("local", *GPU_CLUSTERS):
        run = RunConfig.from_mapping(composed(f"cluster={name}"), "/run")
        assert run.cluster.name == name
        assert RunConfig.from_mapping(json.loads(json.dumps(run.to_mapping())), "/run") == run


@pytest.mark.parametrize("name", GPU_CLUSTERS)
def test_every_number_has_a_source_and_every_tier_a_scope(name: str) -> None:
    found = cluster(name)
    assert found.peak_TFLOPS.source
    assert all(tier.source and tier.scope for tier in found.tiers)
    assert [tier.name for tier in found.tiers] == [
        "L1 and shared memory",
        "L2",
        "HBM",
        "NVLink",
        "NVSwitch",
        "NVLink-C2C" if name == "gb200_nvl72" else "PCIe",
        "network",
    ]


# NVLink: links per GPU x GB/s of one link in one direction (generations 3, 4 and 5).
# PCI Express: 16 lanes x GT/s x 128/130 / 8 bits, 31.508 and 63.015. Network: Gb/s of a GPU's port / 8.
LINKS = {
    "a100": (12 * 25, 31.5, 200 / 8),
    "h100": (18 * 25, 63.0, 400 / 8),
    "h200": (18 * 25, 63.0, 400 / 8),
    "b200": (18 * 50, 63.0, 400 / 8),
    "gb200_nvl72": (18 * 50, 900 / 2, 400 / 8),
}
# HBM: GB and GB/s read plus written, as the data sheets print them.
HBM = {
    "a100": (80, 2039),
    "h100": (80, 3350),
    "h200": (141, 4800),
    "b200": (1440 / 8, 64_000 / 8),
    "gb200_nvl72": (186, 576_000 / 72),
}
# KiB of L1 and shared memory per SM, MiB of L2, bfloat16 TFLOPS without sparsity.
CHIP = {
    "a100": (192, 40, 312),
    "h100": (256, 50, 989),
    "h200": (256, 50, 989),
    "b200": (256, 126, 2250),
    "gb200_nvl72": (256, 126, 2500),
}


@pytest.mark.parametrize("name", GPU_CLUSTERS)
def test_the_ladder_is_that_of_the_data_sheets(name: str) -> None:
    found, ladder = cluster(name), tiers(name)
    nvlink, host, network = LINKS[name]
    host_tier = ladder["NVLink-C2C" if name == "gb200_nvl72" else "PCIe"]
    assert ladder["NVLink"].bandwidth_GBps_per_direction == nvlink
    assert ladder["NVSwitch"].bandwidth_GBps_per_direction == nvlink
    assert host_tier.bandwidth_GBps_per_direction == host
    assert ladder["network"].bandwidth_GBps_per_direction == network

    size_GB, both_ways = HBM[name]
    assert ladder["HBM"].size_bytes == size_GB * 10**9
    assert ladder["HBM"].bandwidth_GBps_read_plus_write == both_ways
    l1_kib, l2_mib, bfloat16 = CHIP[name]
    assert ladder["L1 and shared memory"].size_bytes == l1_kib * 1024
    assert ladder["L2"].size_bytes == l2_mib * 1024 * 1024
    assert found.peak_TFLOPS.bfloat16 == found.peak_TFLOPS.float16 == bfloat16


def test_pci_express_is_its_lanes_less_the_coding() -> None:
    for name, giga_transfers in (("a100", 16), ("h100", 32), ("h200", 32), ("b200", 32)):
        assert tiers(name)["PCIe"].bandwidth_GBps_per_direction == pytest.approx(
            16 * giga_transfers * 128 / 130 / 8, rel=1e-3
        )


def test_caches_are_their_width_times_the_clock() -> None:
    """A100 at 1.41 GHz: 32 banks x 4 B for each SM, 5120 B of L2 for the GPU; H100 at 1.98 GHz."""
    a100, h100 = tiers("a100"), tiers("h100")
    assert a100["L1 and shared memory"].bandwidth_GBps_read_plus_write == pytest.approx(128 * 1.41)
    assert a100["L2"].bandwidth_GBps_per_direction == pytest.approx(5120 * 1.41)
    assert h100["L1 and shared memory"].bandwidth_GBps_read_plus_write == pytest.approx(128 * 1.98)


def test_sparsity_is_left_out() -> None:
    """NVIDIA prints 1979 for bfloat16 and 3958 for float8 on an H100, with sparsity, which doubles them."""
    peak = cluster("h100").peak_TFLOPS
    assert peak.bfloat16 is not None and peak.float8 is not None
    assert round(2 * peak.bfloat16) in (1978, 1979)
    assert 2 * peak.float8 == 3958
    assert peak.tf32 == peak.bfloat16 / 2


def test_a_rack_adds_up_to_its_data_sheet() -> None:
    """GB200 NVL72: 130 TB/s of NVLink in both directions, 13.4 TB of HBM, for 72 GPUs."""
    ladder, found = tiers("gb200_nvl72"), cluster("gb200_nvl72")
    nvlink, hbm = ladder["NVSwitch"].bandwidth_GBps_per_direction, ladder["HBM"].size_bytes
    assert nvlink is not None and hbm is not None
    assert 72 * 2 * nvlink == pytest.approx(130e3, rel=5e-3)  # 129.6 TB/s
    assert 72 * hbm == pytest.approx(13.4e12, rel=5e-3)
    # 18 trays of four GPUs: the fast domain is not the host.
    assert (found.gpus_per_node, found.gpus_per_fast_domain) == (4, 72)


@pytest.mark.parametrize("name", GPU_CLUSTERS)
def test_the_switch_joins_the_fast_domain(name: str) -> None:
    found, ladder = cluster(name), tiers(name)
    assert ladder["NVSwitch"].ranks == found.gpus_per_fast_domain == (72 if name == "gb200_nvl72" else 8)
    assert ladder["NVLink"].ranks == 2
    assert ladder["network"].ranks is None  # as many as the cluster has


@pytest.mark.parametrize("name", GPU_CLUSTERS)
def test_bandwidth_never_rises_outward_of_the_memory(name: str) -> None:
    """From HBM on without exception: NVSwitch equals NVLink, as it passes every link on at full rate.

    Before HBM the scopes differ, one SM's L1 and a GPU's L2, so all SMs together are what is compared.
    """
    ladder = cluster(name).tiers
    place = [tier.name for tier in ladder].index("HBM")
    outward = [rate(tier) for tier in ladder[place:]]
    assert None not in outward
    assert outward == sorted(outward, key=lambda value: -(value or 0))

    inner = [rate(tier) for tier in ladder[: place + 1]]
    multiprocessors = {"a100": 108, "h100": 132, "h200": 132, "b200": 148, "gb200_nvl72": 148}[name]
    known = [value for value in ((inner[0] or 0) * multiprocessors, *inner[1:]) if value]
    assert known == sorted(known, reverse=True)


def test_a_link_is_given_per_direction_and_a_memory_in_all() -> None:
    for name in GPU_CLUSTERS:
        for tier in cluster(name).tiers:
            carries_only = tier.size_bytes is None
            assert carries_only == (tier.name in ("NVLink", "NVSwitch", "NVLink-C2C", "PCIe", "network"))
            if carries_only:
                assert tier.bandwidth_GBps_read_plus_write is None


def test_one_tier_can_be_set_on_the_command_line() -> None:
    found = cluster("h100", "cluster.tiers.6.bandwidth_GBps_per_direction=12.5")
    assert (found.tiers[6].name, found.tiers[6].bandwidth_GBps_per_direction) == ("network", 12.5)
    assert found.tiers[4].bandwidth_GBps_per_direction == 450


def test_the_local_file_leaves_open_what_is_measured() -> None:
    found = cluster("local")
    assert [tier.name for tier in found.tiers] == ["L1", "L2", "L3", "memory", "network"]
    assert all(tier.size_bytes is None and rate(tier) is None for tier in found.tiers)
    assert found.peak_TFLOPS.bfloat16 is None
    assert [tier.name for tier in measure_machine(Path("/none"), Path("/none"))] == [
        tier.name for tier in found.tiers
    ]


BOTH = {"name": "a", "bandwidth_GBps_per_direction": 450, "bandwidth_GBps_read_plus_write": 900}
WRONG: list[tuple[dict[str, Any], str]] = [
    (
        {"tiers": [{"name": "HBM", "size_bytes": 0}]},
        "cluster.tiers[0].size_bytes=0 must be above 0; leave it null where it is unknown",
    ),
    (
        {"tiers": [{"name": "HBM"}, {"name": "NVLink", "bandwidth_GBps_per_direction": -450}]},
        "cluster.tiers[1].bandwidth_GBps_per_direction=-450.0 must be above 0; "
        "leave it null where it is unknown",
    ),
    (
        {"tiers": [{"name": "HBM", "bandwidth_GBps_read_plus_write": 0}]},
        "cluster.tiers[0].bandwidth_GBps_read_plus_write=0.0 must be above 0; "
        "leave it null where it is unknown",
    ),
    (
        {"tiers": [{"name": "NVSwitch", "ranks": 0}]},
        "cluster.tiers[0].ranks=0 must be above 0; leave it null where it is unknown",
    ),
    ({"tiers": [{"name": "NVSwitch", "ranks": 7.5}]}, "cluster.tiers[0].ranks=7.5 must be a whole number"),
    (
        {"tiers": [{"name": "PCIe", "bandwidth_GBps_per_direction": "fast"}]},
        "cluster.tiers[0].bandwidth_GBps_per_direction=fast must be a finite number",
    ),
    (
        {"tiers": [{"name": "NVLink", "bandwidth_GBps": 900}]},
        "cluster.tiers[0].bandwidth_GBps is not a key of the configuration; the keys there are name, scope, "
        "ranks, size_bytes, bandwidth_GBps_per_direction, bandwidth_GBps_read_plus_write, source",
    ),
    (
        {"tiers": [BOTH]},
        "cluster.tiers[0] has both bandwidth_GBps_per_direction=450.0 and "
        "bandwidth_GBps_read_plus_write=900.0; give the first for a link, the second for a memory, "
        "and leave the other null",
    ),
    ({"tiers": [{"scope": "GPU"}]}, "cluster.tiers[0] needs the key name"),
    ({"tiers": [{"name": " "}]}, "cluster.tiers[0].name=' ' must not be empty"),
    (
        {"tiers": [{"name": "L2"}, {"name": "HBM"}, {"name": "L2"}]},
        "cluster.tiers[2].name=L2 is also the name of cluster.tiers[0]; each tier needs a name of its own",
    ),
    ({"tiers": ["HBM"]}, "cluster.tiers[0]=HBM must be a section of keys and values"),
    ({"tiers": "HBM"}, "cluster.tiers=HBM must be a list such as [1, 2]"),
    (
        {"peak_TFLOPS": {"bfloat16": 0}},
        "cluster.peak_TFLOPS.bfloat16=0.0 must be above 0; leave it null where it is unknown",
    ),
    (
        {"peak_TFLOPS": {"bfloat61": 989}},
        "cluster.peak_TFLOPS.bfloat61 is not a key of the configuration; did you mean "
        "cluster.peak_TFLOPS.bfloat16?",
    ),
    ({"gpus_per_node": 0}, "cluster.gpus_per_node=0 must be above 0; leave it null where it is unknown"),
    (
        {"gpus_per_fast_domain": -8},
        "cluster.gpus_per_fast_domain=-8 must be above 0; leave it null where it is unknown",
    ),
]


@pytest.mark.parametrize(("section", "sentence"), WRONG, ids=[sentence[:50] for _, sentence in WRONG])
def test_a_ladder_that_no_machine_has_is_refused(section: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError) as refusal:
        RunConfig.from_mapping({"cluster": section}, "/run")
    assert str(refusal.value) == sentence


# The local machine.


def kernel_tree(folder: Path, meminfo: str) -> tuple[Path, Path]:
    """A sysfs and a meminfo of a machine that is not this one: two CPUs, each with an L3 of its own."""
    for cpu in (0, 1):
        for index, level, kind, size in (
            (0, 1, "Data", "32K"),
            (1, 1, "Instruction", "64K"),
            (2, 2, "Unified", "1M"),
            (3, 3, "Unified", "409600K"),
        ):
            entry = folder / f"cpu{cpu}" / "cache" / f"index{index}"
            entry.mkdir(parents=True)
            for name, text in (("level", level), ("type", kind), ("size", size), ("shared_cpu_list", cpu)):
                (entry / name).write_text(f"{text}\n")
    (folder / "meminfo").write_text(meminfo)
    return folder, folder / "meminfo"


def test_the_kernel_files_are_read_to_the_byte(tmp_path: Path) -> None:
    """With 512 MB free a buffer may have 64 MB, and two of them do not exceed 800 MiB of cache."""
    meminfo = "MemTotal:       1000 kB\nMemFree:  10 kB\nMemAvailable:  540000 kB\nHugePages_Total: 3\n"
    l1, l2, l3, memory, network = measure_machine(*kernel_tree(tmp_path, meminfo))
    assert (l1.size_bytes, l1.scope) == (32_768, "CPUs 0")
    assert l2.size_bytes == 1_048_576
    assert (l3.size_bytes, l3.scope) == (419_430_400, "CPUs 0")
    assert memory.size_bytes == 1_024_000
    assert memory.bandwidth_GBps_read_plus_write is None
    assert "no room" in (memory.source or "")
    assert (network.size_bytes, rate(network)) == (None, None)


def test_buffers_exceed_the_caches_of_all_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two CPUs of 400 MiB: three quarters of 800 MiB in each of two buffers."""
    asked: list[int] = []

    def ones(size: int, dtype: torch.dtype) -> torch.Tensor:
        asked.append(size)
        return torch.zeros(1000, dtype=dtype)

    monkeypatch.setattr(torch, "ones", ones)
    measure_machine(*kernel_tree(tmp_path, "MemAvailable: 64000000 kB\n"))
    assert asked == [600 * 1024 * 1024]


def test_a_kernel_that_tells_nothing_gives_null() -> None:
    measured = measure_machine(Path("/none"), Path("/none"))
    assert all(tier.size_bytes is None and rate(tier) is None for tier in measured)


def test_this_machine_is_measured() -> None:
    """Sizes beside the C library's, which asks the processor itself or the kernel's system calls."""
    l1, l2, l3, memory, _ = measure_machine()
    for tier, name in ((l1, "LEVEL1_DCACHE_SIZE"), (l2, "LEVEL2_CACHE_SIZE"), (l3, "LEVEL3_CACHE_SIZE")):
        found = subprocess.run(["getconf", name], capture_output=True, text=True, check=False)
        # getconf says 0, or nothing, where it does not know.
        if found.returncode == 0 and found.stdout.strip() not in ("", "0", "undefined"):
            assert tier.size_bytes == int(found.stdout), name
    if memory.size_bytes is not None:
        assert memory.size_bytes == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if memory.bandwidth_GBps_read_plus_write is not None:
        # Between an old laptop under heavy load and the fastest socket there is.
        assert 0.1 < memory.bandwidth_GBps_read_plus_write < 2000


def test_the_networks_rate_comes_from_the_link_curve() -> None:
    """1 MB among 2 ranks in 1 ms: each sends half of a gathered S, and S of a message."""
    tiers = [Tier("memory", size_bytes=8), Tier("network")]
    point = Point(10**6, "direct", 1e-3, 1e-3, 1e-3, 3)
    curve = LinkCurve(
        [Curve("all_gather", 2, (point,)), Curve("send", 2, (point,))], {"world_size": 2, "backend": "gloo"}
    )
    memory, network = ladder_with_network(tiers, curve)
    assert memory == tiers[0]
    assert network.bandwidth_GBps_per_direction == pytest.approx(1.0)
    assert network.source == "link curve: send between 2 ranks, gloo"
    assert ladder_with_network(tiers, LinkCurve([], {})) == tiers

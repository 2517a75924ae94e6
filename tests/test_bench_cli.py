"""scripts/bench.py: what is refused, what is measured, how it ends, and what is left on disk."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from collectives import subject
from collectives.subject import Case
from collectives.traffic import ALGORITHMS, ITEMSIZE
from tests import composing
from tests.bench_rows import measured
from tests.launched import NAMES, Launched
from tests.ranks import RankPools
from tests.wandb_case import the_run
from trainer import bench_cases, bench_config, bench_output, bench_worker, cli, launch, machine
from trainer.bench_cases import cases
from trainer.bench_config import BenchRun, BenchSection
from trainer.bench_output import BenchOutput, command_line
from trainer.bench_rows import make_row
from trainer.errors import InputError
from trainer.place import Place
from trainer.signals import StopFlag
from trainer.sizes import read_size, sweep

ROOT = Path(__file__).parents[1]
BENCH = str(ROOT / "scripts" / "bench.py")
OPTIONS = sorted(file.stem for file in (ROOT / "conf" / "bench").glob("*.yaml"))

composed = functools.partial(composing.composed, root="bench")


def config(folder: Path | str = "/nowhere", **sections: Any) -> BenchRun:
    return BenchRun.from_mapping({"logger": {"name": "none"}, **sections}, str(folder))


# Configuration


def test_the_files_hold_every_key_and_its_default() -> None:
    assert BenchRun.from_mapping(composed(), "/run") == BenchRun("/run", cluster=_cluster())
    assert set(composed()["bench"]) == {field.name for field in dataclasses.fields(BenchSection)}
    assert OPTIONS == ["against_native", "all_reduce_400mb", "default", "quick"]


def _cluster() -> Any:
    return BenchRun.from_mapping({"cluster": composed()["cluster"]}, "/run").cluster


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_composes_and_survives_json(option: str) -> None:
    run = BenchRun.from_mapping(composed(f"bench={option}"), "/run")
    assert BenchRun.from_mapping(json.loads(json.dumps(run.to_mapping())), "/run") == run
    for key, value in yaml.safe_load((ROOT / "conf" / "bench" / f"{option}.yaml").read_text()).items():
        if key != "defaults":
            found = getattr(run.bench, key)
            assert (list(found) if isinstance(found, tuple) else found) == value, key


def test_the_classic_is_100_million_floats_on_four_ranks_unless_told_otherwise() -> None:
    run = BenchRun.from_mapping(composed("bench=all_reduce_400mb"), "/run")
    (case,) = cases(run.bench)
    assert (case.operation, case.size_bytes, case.dtype) == ("all_reduce", 400_000_000, "float32")
    assert launch._with_world_size(run, None).world_size == 4
    assert launch._with_world_size(run, Place(0, 2, 0, 2)).world_size == 2
    assert launch._with_world_size(dataclasses.replace(run, world_size=3), None).world_size == 3


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("4096", 4096),
        ("1e3", None),
        ("1000.0", 1000),
        ("7 B", 7),
        ("1KiB", 1024),
        ("1.5KiB", 1536),
        ("16MiB", 16777216),
        ("2GiB", 2147483648),
        ("64kB", 64000),
        ("0.5MB", 500000),
        ("1GB", 1000000000),
        ("0.3B", None),
        ("1KB", None),
        ("-1", None),
        ("MiB", None),
    ],
)
def test_sizes_are_read_in_binary_and_decimal_units(text: str, size: int | None) -> None:
    if size is not None:
        assert read_size(text, "bench.min_size") == size
        return
    with pytest.raises(InputError) as refusal:
        read_size(text, "bench.min_size")
    assert str(refusal.value) == (
        f"bench.min_size={text} must be a whole number of bytes, or a number with one of "
        "B, kB, MB, GB, KiB, MiB, GiB, such as 16MiB"
    )


def test_a_sweep_multiplies_and_stays_within_its_ends() -> None:
    assert sweep(1024, 70000, 4) == [1024, 4096, 16384, 65536]
    assert sweep(1, 8, 1.5) == [1, 2, 3, 4, 6]
    assert sweep(100, 100, 2) == [100]
    assert config(bench={"sizes": ["1MiB", 8, "1KiB", "8"]}).bench.sizes_bytes() == [8, 1024, 1048576]


def test_cases_are_every_combination_that_has_a_meaning() -> None:
    section = config(
        bench={
            "operations": ["reduce", "all_gather", "barrier"],
            "sizes": [8, 16],
            "dtypes": ["int32", "uint8"],
            "reductions": ["sum", "max"],
            "algorithms": ["auto", "fan"],
            "root": 1,
        }
    ).bench
    found = cases(section)
    # fan is an algorithm of reduce alone; only reduce has reductions and a root here.
    assert [case for case in found if case.operation == "reduce"] == [
        Case("reduce", size, dtype, reduction, 1, algorithm)
        for algorithm in ("auto", "fan")
        for dtype in ("int32", "uint8")
        for reduction in ("sum", "max")
        for size in (8, 16)
    ]
    assert [case for case in found if case.operation == "all_gather"] == [
        Case("all_gather", size, dtype) for dtype in ("int32", "uint8") for size in (8, 16)
    ]
    assert [case for case in found if case.operation == "barrier"] == [Case("barrier", 0)]


def test_help_lists_the_groups_of_a_bench() -> None:
    text = (ROOT / "conf" / "bench.yaml").read_text()
    for group in ("bench", "cluster", "logger"):
        options = sorted(file.stem for file in (ROOT / "conf" / group).glob("*.yaml"))
        assert f"{group}: {', '.join(options)}\n" in text


def test_names_are_those_of_the_measuring() -> None:
    """The configuration has lists of its own, since it is read before torch is imported."""
    assert set(bench_config.OPERATIONS) == set(ALGORITHMS)
    assert bench_config.PLACEMENTS == subject.PLACEMENTS
    assert set(bench_config.REDUCING) == set(subject.REDUCING)
    assert set(bench_config.ROOTED) == set(subject.ROOTED)
    assert set(bench_config.ONE_PLACEMENT) == set(subject.ONLY_OUT_OF_PLACE)
    assert {*bench_config.FLOATING, *bench_config.INTEGER} <= set(ITEMSIZE)


# Wrong input


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., int]]:
    """`run(*arguments)`: the command line in this process, from an empty folder, with a stub worker."""
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")  # so that it is restored
    monkeypatch.chdir(tmp_path)
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level

    def call(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["scripts/bench.py", *arguments])
        return cli.main("tests.stub_workers:describe", BenchRun)

    yield call
    root.handlers[:] = handlers
    root.setLevel(level)


WRONG: list[tuple[list[str], str]] = [
    (
        ["bench=foo"],
        "bench=foo does not exist; the valid ones are against_native, all_reduce_400mb, default, quick",
    ),
    (
        ["bench.operatons=[all_reduce]"],
        "bench.operatons is not a key of the configuration; did you mean bench.operations?",
    ),
    (
        ["strategy=ddp"],
        "strategy is not a key of the configuration; the keys there are world_size, device, bench, "
        "collectives, logger, cluster",
    ),
    (["bench.operations=[]"], "bench.operations=[] leaves nothing to measure; name at least one"),
    (["bench.sizes=[]"], "bench.sizes=[] leaves nothing to measure; name at least one"),
    (
        ["bench.operations=[all_reduce,all_redoce]"],
        "bench.operations[1]=all_redoce must be one of all_reduce, all_gather, reduce_scatter, all_to_all, "
        "broadcast, reduce, scatter, gather, send_recv, barrier",
    ),
    (
        ["bench.dtypes=[float8]"],
        "bench.dtypes[0]=float8 must be one of float64, float32, bfloat16, float16, int64, int32, uint8",
    ),
    (["bench.reductions=[prod]"], "bench.reductions[0]=prod must be one of sum, min, max, mean"),
    (
        ["bench.dtypes=[float32,int64]", "bench.reductions=[mean]"],
        "bench.reductions has mean, which int64 in bench.dtypes cannot hold; take sum, min or max, or one of "
        "float64, float32, bfloat16, float16",
    ),
    (
        ["bench.placements=[inplace]"],
        "bench.placements[0]=inplace must be one of out_of_place, in_place",
    ),
    (
        ["bench.placements=[in_place]", "bench.operations=[send_recv,barrier]"],
        "bench.placements=['in_place'] leaves nothing to measure: send_recv and barrier is out_of_place only",
    ),
    (["bench.against=nccl"], "bench.against=nccl must be one of native"),
    (
        ["bench.against=native", "world_size=1"],
        "bench.against=native needs world_size of 2 or more: on one rank there is nothing to compare",
    ),
    (["bench.factor=1"], "bench.factor=1.0 must be above 1"),
    (["bench.iterations=0"], "bench.iterations=0 must be at least 1"),
    (["bench.sizes=[0]"], "bench.sizes[0]=0 must be at least 1 byte"),
    (["bench.min_size=0"], "bench.min_size=0 must be at least 1 byte"),
    (["collectives.timeout_s=1e300"], "collectives.timeout_s=1e+300 must be at most 10,000,000"),
    (
        ["world_size=1", "bench.operations=[send_recv]"],
        "world_size=1 leaves nothing to measure: send_recv needs a peer; take 2 ranks",
    ),
    (
        ["bench.min_size=1MiB", "bench.max_size=1MB"],
        "bench.min_size=1MiB is more than bench.max_size=1MB",
    ),
    (
        ["bench.sizes=[1KiB,1KB]"],
        "bench.sizes[1]=1KB must be a whole number of bytes, or a number with one of "
        "B, kB, MB, GB, KiB, MiB, GiB, such as 16MiB",
    ),
    (["bench.root=2"], "bench.root=2 must be one of the 2 ranks, 0 to 1"),
    (
        ["bench.operations=[all_reduce]", "bench.algorithms=[auto,best]"],
        "bench.algorithms[1]=best must be one of auto, native, ring",
    ),
    (
        ["bench.operations=[all_gather,all_reduce]", "bench.algorithms=[direct]"],
        "bench.algorithms=['direct'] has none of those of all_reduce: auto, native, ring",
    ),
    (["bench.min_busbw=fast"], "bench.min_busbw=fast must be a finite number"),
    (["bench.min_busbw=0"], "bench.min_busbw=0.0 must be a number of GB/s above 0"),
    (
        ["bench.min_busbw={all_reduce:true}"],
        "bench.min_busbw.all_reduce=true must be a number of GB/s above 0",
    ),
    (
        ["bench.min_busbw={barrier:1}", "bench.operations=[all_reduce,barrier]"],
        "bench.min_busbw.barrier=1 must name an operation of this bench that has a bandwidth: all_reduce",
    ),
    (
        ["bench.min_busbw=1", "bench.operations=[barrier]"],
        "bench.min_busbw=1.0 must name an operation of this bench that has a bandwidth: there is none",
    ),
    (
        ["bench.min_busbw=1", "world_size=1"],
        "bench.min_busbw=1.0 needs world_size of 2 or more: one rank sends nothing and has no bus bandwidth",
    ),
    (
        ["collectives.backend=nccl", "device=cpu"],
        "collectives.backend=nccl needs GPUs; with device=cpu take gloo or auto",
    ),
    (["logger.mode=on"], "logger.mode=on must be one of auto, online, offline"),
]


@pytest.mark.parametrize(
    ("arguments", "sentence"), WRONG, ids=[" ".join(arguments) for arguments, _ in WRONG]
)
def test_wrong_input_ends_in_one_sentence(
    run: Callable[..., int],
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    arguments: list[str],
    sentence: str,
) -> None:
    assert run(*arguments) == 2
    captured = capfd.readouterr()
    assert (captured.err, captured.out) == (sentence + "\n", "")
    assert {file.name for file in tmp_path.rglob("*") if file.is_file()} <= {"bench.log"}


def test_sizes_beyond_memory_name_what_is_needed_and_what_there_is(
    run: Callable[..., int],
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bench_cases, "bytes_needed", lambda case, n: 2 * case.size_bytes)
    monkeypatch.setattr(machine, "MEMINFO", tmp_path / "meminfo")
    (tmp_path / "meminfo").write_text("MemTotal:  9999 kB\nMemAvailable:   3906 kB\n")
    # Three ranks with two buffers each of 700,000 bytes: 4,200,000, and there are 3906 * 1024.
    sizes = ["bench.operations=[all_reduce]", "bench.sizes=[1KiB,700kB]", "world_size=3"]
    assert run(*sizes) == 2
    assert capfd.readouterr().err == (
        "bench.sizes=['1KiB', '700kB'] is beyond memory: all_reduce of 700,000 bytes needs 4,200,000 bytes "
        "for the 3 ranks of this machine, which has 3,999,744 available\n"
    )
    bench_cases.check(config(world_size=2, bench={"sizes": ["700kB"]}), 2)  # 2,800,000
    (tmp_path / "meminfo").unlink()
    bench_cases.check(config(world_size=3, bench={"sizes": ["700kB"]}), 3)  # nobody knows


def test_a_bench_has_a_folder_a_log_and_a_config_of_its_own(run: Callable[..., int], tmp_path: Path) -> None:
    assert run("world_size=1", "bench.sizes=[8]") == 0
    (facts,) = tmp_path.glob("runs/*/*-bench/rank0.json")
    assert json.loads(facts.read_text())["config"]["bench"]["sizes"] == ["8"]
    assert sorted(file.name for file in facts.parent.iterdir()) == ["bench.log", "rank0.json"]


# What a rank does, on real ranks with measurements made by hand


def bench_on_rank(world: Any, folder: str, keys: dict[str, Any], rows: dict[str, Any], stopping: int) -> Any:
    """Run the cases with `rows` (operation -> what is measured); rank `stopping` is asked to stop after one.

    Returns the exit code, or the sentence with which it failed.
    """
    run = config(folder, world_size=world.size, bench=keys)
    stop = StopFlag()

    def measure(world: Any, case: Case, placement: str, *_: Any) -> dict[str, Any] | None:
        if world.rank == stopping:
            stop.request(signal.SIGINT)
        found = rows[case.operation]
        if "refused" in found:
            raise ValueError(found["refused"])
        return measured(size_bytes=case.size_bytes, **found) if placement == "out_of_place" else None

    planned = cases(run.bench)
    output = None
    if world.rank == 0:
        output = BenchOutput(run, world.size, world.size, "gloo", "cpu", len(planned))
    original, bench_worker.measure = bench_worker.measure, measure
    try:
        return bench_worker.run_cases(run, world, planned, output, None, stop)
    except (bench_worker.BenchFailed, InputError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        bench_worker.measure = original


def kept(folder: Path) -> Any:
    return json.loads((folder / "bench.json").read_text())


def test_wrong_values_fail_on_every_rank_and_name_the_row(ranks: RankPools, tmp_path: Path) -> None:
    keys = {"operations": ["all_gather", "gather"], "sizes": [400, 800]}
    rows = {"all_gather": {"wrong": 0}, "gather": {"wrong": 7}}
    sentence = (
        "BenchFailed: gather of 400 bytes (float32, root 0, ring, out of place) gave 7 wrong values; "
        "bench.json names 1 further"
    )
    assert ranks[2].run(bench_on_rank, str(tmp_path), keys, rows, -1) == [sentence, sentence]
    assert kept(tmp_path)["totals"]["wrong"] == 14
    assert kept(tmp_path)["status"] == "finished"
    assert len(kept(tmp_path)["failures"]) == 2
    assert len((tmp_path / "bench.jsonl").read_text().splitlines()) == 4


def test_a_gate_that_is_not_met_names_the_row(ranks: RankPools, tmp_path: Path) -> None:
    keys = {"operations": ["all_reduce"], "sizes": [400, 800], "min_busbw": 2.5}
    rows = {"all_reduce": {"busbw_GBps": 2.25}}
    sentence = (
        "BenchFailed: all_reduce of 800 bytes (float32, sum, ring, out of place) has a bus bandwidth of "
        "2.25 GB/s, below bench.min_busbw=2.5"
    )
    assert ranks[2].run(bench_on_rank, str(tmp_path), keys, rows, -1) == [sentence, sentence]
    assert ranks[2].run(bench_on_rank, str(tmp_path), {**keys, "min_busbw": 2.25}, rows, -1) == [0, 0]


def test_a_request_to_stop_one_rank_ends_all_before_the_next_case(ranks: RankPools, tmp_path: Path) -> None:
    keys = {"operations": ["all_reduce"], "sizes": [400, 800, 1200]}
    codes = ranks[2].run(bench_on_rank, str(tmp_path), keys, {"all_reduce": {}}, 1)
    assert codes == [128 + signal.SIGINT] * 2
    assert kept(tmp_path)["status"] == "interrupted"
    assert [row["size_bytes"] for row in kept(tmp_path)["rows"]] == [400]
    assert kept(tmp_path)["cases"] == 3
    assert "interrupted: 1 of 3 cases are here" in (tmp_path / "bench.md").read_text()


def test_what_the_backend_refuses_is_wrong_input(ranks: RankPools, tmp_path: Path) -> None:
    keys = {"operations": ["all_reduce", "reduce"], "sizes": [400]}
    rows = {"all_reduce": {}, "reduce": {"refused": "gloo cannot do this; take another"}}
    sentence = "InputError: gloo cannot do this; take another"
    assert ranks[2].run(bench_on_rank, str(tmp_path), keys, rows, -1) == [sentence, sentence]
    assert kept(tmp_path)["status"] == "failed"
    assert len(kept(tmp_path)["rows"]) == 1


# Output of rank 0


def write_one(run: BenchRun) -> BenchOutput:
    output = BenchOutput(run, 2, 2, "gloo", "cpu", 1)
    row = make_row(Case("all_reduce", 4000), {"out_of_place": measured(), "in_place": None}, None)
    assert row is not None
    output.write(row)
    output.close([], "finished", 0)
    return output


def test_a_missing_plotly_costs_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    output = write_one(config(tmp_path))
    assert [record.getMessage() for record in caplog.records] == [
        f"{tmp_path}/bandwidth.html is left out: plotly is not installed (pip install 'splitmeter[report]')"
    ]
    assert kept(tmp_path)["status"] == "finished"
    output.write({})  # after the end, as in an emergency: nothing happens
    output.close(["too late"], "failed", 1)
    assert kept(tmp_path)["failures"] == []


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_wandb_gets_rows_table_and_plot_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("plotly")
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    write_one(config(tmp_path, logger={"mode": "offline", "timeout_s": 30.0}))
    records = the_run(tmp_path)
    items = [record["history"]["item"] for record in records if record["type"] == "history"]
    assert items[0]["operation"] == "all_reduce"
    assert (items[0]["size_bytes"], items[0]["busbw_GBps"]) == (4000, 2.0)
    assert any("bandwidth" in item or "bandwidth._type" in item for item in items)
    (page,) = tmp_path.glob("wandb/offline-run-*/files/media/html/*.html")
    assert "plotly" in page.read_text()
    (table,) = tmp_path.glob("wandb/offline-run-*/files/media/table/*.json")
    assert "all_reduce" in table.read_text()


def test_the_command_is_what_was_typed_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["scripts/bench.py", "world_size=2", "+logger.api_key=hunter2hunter2"])
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert shlex.split(command_line(2, 2)) == [
        "python",
        "scripts/bench.py",
        "world_size=2",
        "+logger.api_key=<removed>",
    ]
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setattr(bench_output.multiprocessing, "parent_process", lambda: None)
    monkeypatch.setattr(sys, "argv", ["scripts/bench.py"])
    assert command_line(2, 2) == "torchrun --nproc-per-node 2 scripts/bench.py"
    assert command_line(8, 4) == "torchrun --nproc-per-node 4 --nnodes 2 scripts/bench.py"


# The script itself, measuring


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    """`start(*overrides, torchrun=ranks)`: scripts/bench.py in a process of its own."""
    launched: list[Launched] = []

    def call(*overrides: str, torchrun: int = 0) -> Launched:
        command = [BENCH, "logger=none", "hydra.run.dir=run", *overrides]
        if torchrun:
            command = ["-m", "torch.distributed.run", f"--nproc-per-node={torchrun}", *command]
        launched.append(Launched(tmp_path, *command))
        return launched[-1]

    yield call
    for one in launched:
        one.clean_up()


@pytest.mark.timeout(240)
def test_two_ranks_of_its_own_measure_and_a_gate_that_is_not_met_ends_in_one(
    start: Any, tmp_path: Path
) -> None:
    code, output = start(
        "bench=quick",
        "bench.operations=[all_reduce,all_gather,send_recv]",
        "bench.sizes=[4KiB]",
        "bench.min_busbw={all_gather:1e6}",
    ).result()
    assert code == 1, output
    report = kept(tmp_path / "run")
    assert report["status"] == "finished"
    assert [row["operation"] for row in report["rows"]] == ["all_reduce", "all_gather", "send_recv"]
    assert report["totals"]["wrong"] == 0
    for row in report["rows"]:
        assert (row["size_bytes"], row["count"]) == (4096, 1024)
        assert row["out_of_place"]["time_s"] > 0
        assert row["out_of_place"]["algbw_GBps"] == pytest.approx(4096 / row["out_of_place"]["time_s"] / 1e9)
    assert output.count("all_gather of 4,096 bytes (float32, ") == 1
    assert output.count("below bench.min_busbw=1e+06; bench.json names 1 further\n") == 1
    assert "wrong values: 0 in 5 measurements OK" in output
    names = {file.name for file in (tmp_path / "run").iterdir()}
    assert names >= {"bench.json", "bench.csv", "bench.md", "bench.jsonl", "bench.log", "config.yaml"}
    assert "below bench.min_busbw" in (tmp_path / "run" / "bench.log").read_text()


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_torchrun_measures_and_compares_with_the_backends_own(start: Any, tmp_path: Path) -> None:
    code, output = start(
        "bench=against_native",
        "bench.operations=[reduce_scatter]",
        "bench.sizes=[64KiB]",
        "bench.iterations=5",
        torchrun=2,
    ).result()
    assert code == 0, output
    report = kept(tmp_path / "run")
    assert report["command"].startswith("torchrun --nproc-per-node 2 ")
    (row,) = report["rows"]
    assert row["in_place"] is None
    assert row["against"]["ratio_low"] <= row["against"]["ratio"] <= row["against"]["ratio_high"]
    assert report["bench"]["rounds"] == row["against"]["rounds"] == 20
    assert "against native" in output


@pytest.mark.timeout(240)
def test_ctrl_c_keeps_the_rows_so_far_and_leaves_no_process(start: Any, tmp_path: Path) -> None:
    sizes = ",".join(str(size) for size in range(1024, 1024 + 4 * 2000, 4))
    launched = start("bench.operations=[all_reduce]", f"bench.sizes=[{sizes}]", "bench.iterations=5")
    rows = tmp_path / "run" / "bench.jsonl"
    deadline = time.monotonic() + 100
    while not rows.exists() or not rows.stat().st_size:
        assert launched.process.poll() is None, launched.process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.killpg(launched.process.pid, signal.SIGINT)
    code, output = launched.result()
    assert code == 128 + signal.SIGINT, output
    assert "Traceback" not in output
    assert launched.session_alive(2) == []
    report = kept(tmp_path / "run")
    assert report["status"] == "interrupted"
    assert 0 < len(report["rows"]) < report["cases"] == 2000

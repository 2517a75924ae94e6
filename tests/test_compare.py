"""The comparison with torch's own: that it compares equals, counts right, and says what it found."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from importlib import metadata
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from collectives.group import World
from strategies.strategy import Options
from tests.ranks import RankPools
from trainer import comparison_cli
from trainer.comparison import (
    ComparisonStopped,
    check_gradients,
    compare,
    count_allocations,
    make_contenders,
    order_of_turn,
    take_turns,
)
from trainer.comparison_report import failures, markdown, summarise_setting
from trainer.contenders import Contender, OurSplit, Problem, Request, Setting

ROOT = Path(__file__).parents[1]
SMALL = Setting(layers=5, width=12, batch=8, microbatches=4)


class Scripted(Contender):
    """Takes no part in anything: sleeps, allocates and answers as told."""

    family, name = "ddp", "scripted"

    def __init__(self, sleep_s: float = 0.0, allocations: int = 0, gradient: float = 1.0) -> None:
        self.sleep_s, self.allocations, self.gradient = sleep_s, allocations, gradient
        self.slept_s: list[float] = []

    def step(self) -> None:
        begun = time.perf_counter()
        time.sleep(self.sleep_s)
        self.slept_s.append(time.perf_counter() - begun)
        for _ in range(self.allocations):
            torch.empty(100)

    def gradients(self) -> dict[int, Tensor]:
        return {0: torch.full((2, 2), self.gradient)}


def test_every_round_starts_elsewhere_and_turns_round() -> None:
    assert [order_of_turn(3, turn) for turn in range(4)] == [[0, 1, 2], [0, 2, 1], [2, 0, 1], [2, 1, 0]]


def _true_gradients(setting: Setting, seed: int) -> dict[int, Tensor]:
    """By autograd in one process on the whole batch."""
    problem = Problem(setting, World(0, 1, "gloo", 10.0), seed)
    weights = []
    for layer in range(setting.layers):
        weight = torch.empty(setting.width, setting.width)
        problem.model.initialize(layer, {"weight": weight}, None, seed)
        weights.append(weight.requires_grad_())
    value = problem.inputs
    for weight in weights[:-1]:
        value = torch.relu(value @ weight.t())
    loss = nn.functional.mse_loss(value @ weights[-1].t(), problem.targets)
    return dict(enumerate(torch.autograd.grad(loss, weights)))


def _differences(world: World, family: str) -> dict[str, float]:
    """Job: of every candidate's gradients after a step to the true ones, with the layers it holds."""
    problem, true = Problem(SMALL, world, 3), _true_gradients(SMALL, 3)
    worst = {}
    for contender in make_contenders(Request(), problem, family):
        contender.step()
        own = contender.gradients()
        worst[f"{contender.name} {contender.tuning} {sorted(own)}"] = max(
            float((own[layer] - true[layer]).abs().max() / true[layer].abs().max()) for layer in own
        )
    return worst


@pytest.mark.parametrize("family", ["ddp", "tensor", "pipeline"])
def test_all_contenders_compute_the_gradients_of_one_process(ranks: RankPools, family: str) -> None:
    for rank, worst in enumerate(ranks[2].run(_differences, family)):
        layers = [0, 1, 2, 3, 4] if family != "pipeline" else [[0, 1, 2], [3, 4]][rank]
        # Of torch's data parallel each number of buckets, and once more where it can batch its copies.
        theirs = 6 if "batched_grad_copy" in signature(DistributedDataParallel.__init__).parameters else 3
        assert len(worst) == {"ddp": 6 + theirs, "tensor": 3, "pipeline": 3}[family]
        assert all(name.endswith(str(layers)) for name in worst)
        assert max(worst.values()) < 1e-5


def _stopped(world: World, gradient: float) -> str:
    """Job: rank 1's second contender has another gradient."""
    other = Scripted(gradient=gradient if world.rank == 1 else 1.0)
    try:
        return str(check_gradients(world, [Scripted(), other]))
    except ComparisonStopped as error:
        return str(error)


def test_different_gradients_on_one_rank_stop_all(ranks: RankPools) -> None:
    sentences = ranks[2].run(_stopped, 1.25)
    assert sentences[0] == sentences[1]
    assert sentences[0].startswith("gradients of scripted differ from ours by 2.0e-01 of their largest")
    assert ranks[2].run(_stopped, float("nan"))[0].startswith("gradients of scripted differ")
    assert ranks[2].run(_stopped, 1.0) == ["{('ddp', 'scripted'): 0.0}"] * 2


def _timed(world: World) -> tuple[list[list[float]], float, list[float]]:
    """Job: contenders that take 0 and, on rank 1 alone, 100 ms; and one that allocates on rank 1 alone.

    Last what the steps of the second took on this rank, two in each of three rounds.
    """
    slow = Scripted(sleep_s=0.1 * world.rank)
    times = take_turns(world, [Scripted(), slow], 3, 2)
    return times.tolist(), count_allocations(Scripted(allocations=3 * world.rank)), slow.slept_s


def test_a_step_takes_what_its_slowest_rank_takes(ranks: RankPools) -> None:
    results = ranks[2].run(_timed)
    assert results[0][:2] == results[1][:2]
    times, allocations, _ = results[0]
    slept = [statistics.mean(results[1][2][2 * turn : 2 * turn + 2]) for turn in range(3)]
    assert len(times) == len(slept) == 3
    added = [slow - own for (_, slow), own in zip(times, slept, strict=True)]
    assert min(slept) >= 0.1 and min(added) >= -1e-6
    assert statistics.median(added) < 0.05  # where the second step also counted, it would be 0.1
    assert statistics.median(quick for quick, _ in times) < 0.1
    assert allocations == 3


def _allocations(world: World, family: str) -> float:
    setting = Setting(layers=5, width=128, batch=128, microbatches=4)  # from some size on, copies buffer
    ours = OurSplit(Problem(setting, world, 0), family, Options())
    for _ in range(3):
        ours.step()
    return count_allocations(ours)


@pytest.mark.parametrize("family", ["ddp", "tensor", "pipeline"])
def test_no_step_of_ours_allocates(ranks: RankPools, family: str) -> None:
    assert ranks[2].run(_allocations, family) == [0, 0]


def _row(family: str, name: str, times_ms: list[float], is_ours: bool = False) -> dict[str, Any]:
    return {
        "family": family,
        "name": name,
        "is_ours": is_ours,
        "tuning": "",
        "gradient_difference": None if is_ours else 0.0,
        "allocations_per_step": 2.0 if family == "tensor" else 0.0,
        "times_s": [time / 1e3 for time in times_ms],
    }


ROWS = [
    _row("tensor", "ours", [10, 10, 30, 10], is_ours=True),
    _row("tensor", "DTensor columns", [10, 20, 40, 8]),
    _row("tensor", "DTensor pairs", [5, 5, 5, 5]),
    _row("pipeline", "ours, 1f1b", [8, 8, 8, 8], is_ours=True),
    _row("pipeline", "torch GPipe", [16, 16, 16, 16]),
    _row("pipeline", "torch 1F1B", [10, 10, 10, 10]),
]


def test_ratios_are_taken_round_by_round() -> None:
    ours, columns, pairs, _, gpipe, one_f_one_b = summarise_setting(ROWS)
    assert ours["median_s"] == 0.010 and columns["min_s"] == 0.008
    # Ratios 1, 0.5, 0.75, 1.25: sorted 0.5, 0.75, 1, 1.25.
    assert columns["ratio"] == {"median": 0.875, "q1": 0.6875, "q3": 1.0625}
    assert "ratio" not in ours
    assert (columns["bar"], one_f_one_b["bar"]) == (0.9, 0.9)  # not the pairs, not the slower pipeline
    assert "bar" not in pairs and "bar" not in gpipe


def _outcome() -> dict[str, Any]:
    return {"settings": [{"setting": vars(SMALL), "contenders": ROWS}], "load_average": 0.25}


def test_failures_name_setting_and_contender() -> None:
    slower = [{**ROWS[0], "times_s": [1.0] * 4}, *ROWS[1:]]
    report = {"settings": [{"setting": vars(SMALL), "contenders": summarise_setting(slower)}]}
    assert failures(report) == [
        "5,12,8,4: a step of tensor, ours, allocates 2 times",
        "5,12,8,4: ours takes 75.000 of the time of DTensor columns, more than 0.9",
    ]


def test_command_writes_table_json_and_markdown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    requests: list[Request] = []

    def canned(request: Request) -> dict[str, Any]:
        requests.append(request)
        return _outcome()

    monkeypatch.setattr(comparison_cli, "run_comparison", canned)
    command = ["--setting", "5,12,8,4", "--only", "pipeline,tensor", "--run-dir", str(tmp_path)]
    assert comparison_cli.main(command) == 0
    assert comparison_cli.main([*command, "--check"]) == 1  # a step allocates
    assert requests[0] == replace(Request(), settings=(SMALL,), families=("tensor", "pipeline"))
    captured = capsys.readouterr()
    assert "5 layers of 12, batch 8, 4 microbatches" in captured.out
    assert "a step of tensor, ours, allocates 2 times" in captured.err
    report = json.loads((tmp_path / "compare.json").read_text())
    assert report["settings"][0]["contenders"][1]["times_s"] == [0.010, 0.020, 0.040, 0.008]
    assert report["environment"]["torch"] == metadata.version("torch")
    assert (tmp_path / "compare.md").read_text() == markdown(report)
    assert "| pipeline: torch 1F1B | 10.00 | 10.00 | 0 | 0.800 | 0.800 to 0.800 | 0.9 met |" in markdown(
        report
    )


def test_unequal_gradients_end_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(request: Request) -> dict[str, Any]:
        raise ComparisonStopped("gradients of torch DDP differ")

    monkeypatch.setattr(comparison_cli, "run_comparison", stopped)
    assert comparison_cli.main(["--run-dir", str(tmp_path)]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "gradients of torch DDP differ"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("command", "part"),
    [
        ("--rounds 2", "'2' must be a whole number of at least 3"),
        ("--rounds many", "'many' must be a whole number"),
        ("--ranks 1", "'1' must be a whole number of at least 2"),
        ("--only ddp,zero", "'zero' is unknown; valid are ddp, tensor, pipeline"),
        ("--setting 8,512", "'8,512' must be four whole numbers above 0"),
        ("--setting 8,512,0,4", "must be four whole numbers above 0"),
        ("--setting 8,511,256,4 --only tensor", "--setting=8,511,256,4 has a width of 511"),
        ("--setting 8,512,255,5 --only ddp", "has a batch of 255"),
        ("--setting 2,8,8,4 --ranks 3 --only pipeline", "has too few layers; give each of 3 ranks one"),
        ("--setting 8,512,256,1", "has 1 microbatches; torch's pipelines need at least 2"),
        ("--setting 8,512,256,3", "and that divide the batch of 256"),
        ("--schedule naive", "invalid choice: 'naive'"),
        ("--fast", "unrecognized arguments: --fast"),
        ("--run-dir /proc/here", "--run-dir=/proc/here cannot be written"),
    ],
)
def test_wrong_input_is_one_sentence(command: str, part: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert comparison_cli.main(command.split()) == 2
    said = capsys.readouterr()
    assert part in said.err and said.err.count("\n") == 1 and said.out == ""


def _compared(world: World) -> dict[str, Any]:
    """Job: the whole comparison of a small setting."""
    return compare(Request(ranks=2, rounds=3), SMALL, world, lambda text: None)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_whole_comparison(ranks: RankPools) -> None:
    first, second = ranks[2].run(_compared, timeout_s=110.0)
    names = [f"{row['family']}: {row['name']}" for row in first["contenders"]]
    assert names == [
        "ddp: ours",
        "ddp: torch DDP",
        "tensor: ours",
        "tensor: DTensor columns",
        "tensor: DTensor pairs",
        "pipeline: ours, 1f1b",
        "pipeline: torch GPipe",
        "pipeline: torch 1F1B",
    ]
    assert first == second
    for row in first["contenders"]:
        assert len(row["times_s"]) == 3 and min(row["times_s"]) > 0
        assert row["is_ours"] or row["gradient_difference"] < 1e-5


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_no_process(tmp_path: Path, signum: signal.Signals) -> None:
    command = [sys.executable, "scripts/compare.py", "--setting", "4,64,32,4", "--rounds", "100000"]
    process = subprocess.Popen(
        [*command, "--run-dir", str(tmp_path)],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if "tuned" in line:
                break
        children = _children(process.pid)
        assert len(children) >= 2
        process.send_signal(signum)  # to the parent alone: it ends its ranks itself
        assert process.wait(10) == 128 + signum
        deadline = time.monotonic() + 5
        while (left := [child for child in children if _is_alive(child)]) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert left == []
        assert list(tmp_path.iterdir()) == []
    finally:
        process.stderr.close()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _children(parent: int) -> list[int]:
    text = Path(f"/proc/{parent}/task/{parent}/children").read_text()
    return [int(child) for child in text.split()]


def _is_alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"

"""The loop on real ranks: rows, evaluation, and everything that ends training early."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from collectives.group import World
from tests import training
from tests.ranks import RankPools
from trainer.config import (
    DataConfig,
    OptimizerConfig,
    RunConfig,
    StrategyConfig,
    TrainerConfig,
    TrainingStopped,
)
from trainer.control import FIELDS, Control, Gathered
from trainer.data import load_dataset
from trainer.loop import Loop

STRATEGIES = ("ddp", "tensor", "pipeline")


@dataclasses.dataclass(frozen=True)
class Fault:
    """What happens to one rank before a step."""

    kind: str  # nan, drift, signal
    rank: int
    step: int


class FaultyLoop(Loop):
    fault: Fault | None = None

    def _train(self, step: int, batch: Any) -> Any:
        fault = self.fault
        if fault is not None and (self.world.rank, step) == (fault.rank, fault.step):
            if fault.kind == "nan":
                self.rank.parameters.fill_(math.nan)
            elif fault.kind == "drift":
                self.rank.parameters[0] += 1e-3
            else:
                self.stop.requested = 15  # type: ignore[misc]
        return super()._train(step, batch)


def config(strategy: str = "ddp", **changes: Any) -> RunConfig:
    own = {"trainer": TrainerConfig(max_steps=6, warmup_steps=2), **changes}
    return training.config(StrategyConfig(strategy, microbatches=2), **own)


def train(world: World, run: RunConfig, fault: Fault | None = None) -> dict[str, Any]:
    """Job: the loop of one rank; rows of rank 0, and how it ended."""
    rows: list[dict[str, Any]] = []
    loop = training.make_loop(world, run, rows.append, kind=FaultyLoop)
    loop.fault = fault
    rank = loop.rank
    error = None
    try:
        loop.run()
    except TrainingStopped as reason:
        error = str(reason)
    return {
        "rows": rows,
        "error": error,
        "stopped_by": loop.stopped_by,
        "steps_of": loop.steps_of,
        "counted": rank.ledger.by_label(),
        "parts": [
            (part.name, part.columns, rank.parameter_views[part.layer][part.place].clone().numpy())
            for part in rank.held
        ],
    }


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_rows_of_every_split_tell_the_same_training(ranks: RankPools, strategy: str, size: int) -> None:
    run = config(strategy, trainer=TrainerConfig(max_steps=16, warmup_steps=2, eval_every=5, dtype="float64"))
    rows = ranks[size].run(train, run)[0]["rows"]
    alone = ranks[1].run(train, dataclasses.replace(run, strategy=StrategyConfig("single")))[0]["rows"]
    assert [row["step"] for row in rows] == list(range(16))
    # 1,437 rows in batches of 100: the fifteenth batch has 37.
    assert [row["samples_seen"] for row in rows] == [*range(100, 1500, 100), 1437, 1537]
    assert [row["epoch"] for row in rows] == [0] * 15 + [1]
    assert [row["is_warmup"] for row in rows] == [True] * 2 + [False] * 14
    assert [row["step"] for row in rows if row["phase"] == "train+eval"] == [4, 9, 14, 15]
    for row, expected in zip(rows, alone, strict=True):
        assert row["loss"] == pytest.approx(expected["loss"], rel=1e-10)
        assert row["eval_accuracy"] == expected["eval_accuracy"]
        assert row["bytes_sent"] == row["bytes_predicted"]
        assert row["bytes_sent"] >= row["bytes_least"] - 8
        assert row["step_time_s"] > 0
        assert row["grad_norm"] is None
    if size == 1:
        assert all(row["bytes_sent"] == 0 and row["effective_bandwidth_GBps"] is None for row in rows)
    else:
        row = rows[3]
        own = [row[f"rank/{r}/bytes_sent"] for r in range(size)]
        assert row["bytes_sent"] == max(own) and row["bytes_sent_total"] == sum(own)
        assert row["step_time_s"] == max(row[f"rank/{r}/step_time_s"] for r in range(size))
        assert row["effective_bandwidth_GBps"] == pytest.approx(row["bytes_sent"] / row["step_time_s"] / 1e9)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_evaluation_agrees_with_a_plain_forward_in_float64(ranks: RankPools, strategy: str) -> None:
    run = config(strategy, trainer=TrainerConfig(max_steps=8, dtype="float64"))
    results = ranks[2].run(train, run)
    row = results[0]["rows"][-1]
    widths = [64, 24, 24, 24, 10]
    network = nn.Sequential()
    for i in range(4):
        network.append(nn.Linear(widths[i], widths[i + 1], dtype=torch.float64))
        if i < 3:
            network.append(nn.ReLU())
    linears = [module for module in network if isinstance(module, nn.Linear)]
    for result in results:
        for name, columns, value in result["parts"]:
            _, layer, which = name.split(".")
            rows = slice(*columns) if columns else slice(None)
            getattr(linears[int(layer)], which).data[rows] = torch.from_numpy(value)
    dataset = load_dataset(run.data, seed=0, hidden_dim=24)
    inputs = torch.tensor(dataset.eval_inputs, dtype=torch.float64)
    targets = torch.tensor(dataset.eval_targets)
    with torch.no_grad():
        outputs = network(inputs)
    assert row["eval_loss"] == pytest.approx(float(nn.functional.cross_entropy(outputs, targets)), rel=1e-9)
    assert row["eval_accuracy"] == pytest.approx(float((outputs.argmax(1) == targets).double().mean()))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_loss_that_becomes_nan_stops_all_ranks_and_names_step_and_rank(
    ranks: RankPools, strategy: str
) -> None:
    # A pipeline's loss is known on its last stage alone; the other splits' on the rank that went wrong.
    broken = 1
    results = ranks[2].run(train, config(strategy), Fault("nan", broken, 3))
    errors = {result["error"] for result in results}
    assert len(errors) == 1
    error = errors.pop()
    assert error is not None and "step 3" in error and "nan" in error
    if strategy != "tensor":
        assert "rank 1" in error
    assert [row["step"] for row in results[0]["rows"]] == [0, 1, 2, 3]


def test_a_replica_that_drifts_is_found_and_named(ranks: RankPools) -> None:
    run = config("ddp", trainer=TrainerConfig(max_steps=6, checksum_every=2))
    results = ranks[3].run(train, run, Fault("drift", 2, 2))
    for result in results:
        assert result["error"] is not None
        assert "rank 2" in result["error"] and "step 3" in result["error"]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_signal_on_one_rank_stops_all_after_the_same_step(ranks: RankPools, strategy: str) -> None:
    run = config(strategy, trainer=TrainerConfig(max_steps=50))
    results = ranks[2].run(train, run, Fault("signal", 1, 4))
    assert {result["stopped_by"] for result in results} == {15}
    steps = {sum(result["steps_of"].values()) for result in results}
    assert len(steps) == 1
    assert [row["step"] for row in results[0]["rows"]] == list(range(steps.pop()))


def test_clipping_logs_the_norm_of_the_whole_gradient(ranks: RankPools) -> None:
    def norms(strategy: str, size: int) -> list[float]:
        run = config(strategy, trainer=TrainerConfig(max_steps=4, clip_grad_norm=0.5, dtype="float64"))
        return [row["grad_norm"] for row in ranks[size].run(train, run)[0]["rows"]]

    alone = norms("single", 1)
    assert all(norm > 0.5 for norm in alone)
    for strategy in STRATEGIES:
        assert norms(strategy, 2) == pytest.approx(alone, rel=1e-10)


def test_regression_evaluates_the_loss_alone(ranks: RankPools) -> None:
    data = DataConfig(name="synthetic", task="regression", batch_size=32, num_samples=100, eval_samples=50)
    for strategy in STRATEGIES:
        rows = ranks[2].run(train, config(strategy, data=data))[0]["rows"]
        assert rows[-1]["eval_accuracy"] is None and rows[-1]["eval_loss"] > 0


def test_a_run_that_diverges_in_its_last_step_does_not_end_well(ranks: RankPools) -> None:
    """The training loss of the only step is that of the initial weights; the evaluation's is not finite."""
    run = dataclasses.replace(
        training.config(StrategyConfig("ddp"), trainer=TrainerConfig(max_steps=1)),
        optimizer=OptimizerConfig("sgd", lr=1e300),
    )
    with pytest.raises(
        AssertionError, match=r"loss of the held-out rows is (nan|inf) after step 0; all ranks"
    ):
        ranks[2].run(training.train, run)


def test_a_norm_that_is_nan_under_a_finite_loss_is_called_by_its_name() -> None:
    loop = object.__new__(Loop)
    loop.recorder = SimpleNamespace(is_due=lambda _: False, receive=list, send=lambda: None)  # type: ignore[assignment]
    loop.rows = SimpleNamespace(stamped=lambda _: None)  # type: ignore[assignment]
    loop.world, loop.control = World(0, 1, "gloo", 1.0), Control(World(0, 1, "gloo", 1.0))
    loop.world.rank = 1  # rows are rank 0's
    values = np.zeros((2, len(FIELDS)))
    values[1, FIELDS.index("gradient_norm")] = math.nan
    values[1, FIELDS.index("is_bad")] = 1
    values[0, FIELDS.index("loss_share")] = 2.5
    with pytest.raises(TrainingStopped, match=r"^gradient norm is nan at step 7, first on rank 1;"):
        loop._settle(Gathered(7, values))

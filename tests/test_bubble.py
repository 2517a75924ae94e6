"""Bubble and overlap measured on layers that sleep, beside what they must be."""

from __future__ import annotations

import dataclasses
import statistics
import time
from typing import Any

import pytest

from collectives import native
from collectives.group import Group, World
from tests.ranks import RankPools
from tests.training import config, train
from trainer.config import DataConfig, ModelConfig, RunConfig, StrategyConfig, TrainerConfig

SHORTEST_S, STEP_S = 0.02, 0.5  # of a forward, and of a step where that leaves longer ones
ROWS = 4  # of a microbatch
TRIES = 3  # four steps of a machine that is busy for a moment are off by more than a bubble may be


def sleeping_run(strategy: StrategyConfig, layers: int, steps: int, **options: Any) -> RunConfig:
    return dataclasses.replace(
        config(strategy),
        plugins=("tests.sleeping",),
        model=ModelConfig(name="sleeping", options={"num_layers": layers, **options}),
        data=DataConfig(
            name="synthetic", dim=4, batch_size=ROWS * strategy.microbatches, num_samples=64, eval_samples=0
        ),
        trainer=TrainerConfig(max_steps=steps, warmup_steps=1, wire_every=2),
    )


QUICK = {(2, 2, "1f1b"), (3, 1, "gpipe")}
CASES = [
    pytest.param(p, m, schedule, marks=() if (p, m, schedule) in QUICK else pytest.mark.slow)
    for p in (2, 3, 4)
    for m in (1, 2, 4, 8)
    for schedule in ("gpipe", "1f1b")
]


@pytest.mark.parametrize(("stages", "microbatches", "schedule"), CASES)
def test_a_measured_bubble_is_that_of_the_closed_form(
    ranks: RankPools, stages: int, microbatches: int, schedule: str
) -> None:
    """Equal stages, forward and backward 20 ms and more each: (p-1)/(m+p-1), to 2 points on every rank."""
    strategy = StrategyConfig("pipeline", microbatches=microbatches, schedule=schedule)
    forward_s = max(SHORTEST_S, STEP_S / 2 / (microbatches + stages - 1))
    run = sleeping_run(strategy, stages, 5, per_row_s=forward_s / ROWS)
    expected = (stages - 1) / (microbatches + stages - 1)
    for _ in range(TRIES):
        rows = [row for row in ranks[stages].run(train, run)[0]["rows"] if not row["is_warmup"]]
        assert rows[0]["bubble_expected"] == pytest.approx(expected)
        measured = [
            statistics.median(row[f"rank/{rank}/bubble_fraction"] for row in rows) for rank in range(stages)
        ]
        if measured == pytest.approx([expected] * stages, abs=0.02):
            return
    pytest.fail(f"{measured} on the ranks, {expected} expected")


class Slept:
    """A transfer that takes a known time, whatever else goes on."""

    def __init__(self, seconds: float) -> None:
        self.until = time.perf_counter() + seconds

    def wait(self) -> None:
        time.sleep(max(0.0, self.until - time.perf_counter()))

    def get_future(self) -> Any:
        raise RuntimeError("as gloo's messages")


def overlapping(world: World, run: RunConfig, transfer_s: float) -> list[dict[str, Any]]:
    """Job: rows of a run whose reductions take `transfer_s` from the last rank's arrival and do nothing."""
    saved = native.all_reduce

    def started(group: Group, *arguments: Any) -> Any:
        native.barrier(group).wait()  # else nothing keeps the ranks together, and their steps drift apart
        return Slept(transfer_s)

    native.all_reduce = started
    try:
        rows: list[dict[str, Any]] = train(world, run)["rows"]
        return rows
    finally:
        native.all_reduce = saved


@pytest.mark.parametrize(("transfer_ms", "expected"), [(50, 0.5), (160, 0.25)])
def test_a_measured_overlap_is_the_artificial_one(
    ranks: RankPools, transfer_ms: int, expected: float
) -> None:
    """Two layers whose backward sleeps 80 ms, reduced one by one: the first transfer runs under the second's.

    Of both transfers min(transfer, 80) ms lie under computing.
    """
    run = sleeping_run(StrategyConfig("ddp", bucket_mb=0), 2, 6, per_row_s=0.08 / (ROWS / 2))
    rows = ranks[2].run(overlapping, run, transfer_ms / 1e3)[0]
    seen = [row for row in rows if row["overlap"] is not None]
    assert len(seen) == 3
    for rank in (0, 1):
        measured = statistics.median(row[f"rank/{rank}/overlap"] for row in seen)
        assert measured == pytest.approx(expected, abs=0.05)

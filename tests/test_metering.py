"""Rows of real runs: four byte counts, the time split, and what observed steps show."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from collectives.group import World
from tests.ranks import RankPools
from tests.system import needs_resident_bytes, resident_bytes
from tests.training import config, make_loop, train
from trainer import overhead
from trainer.config import DataConfig, ModelConfig, RunConfig, StrategyConfig, TrainerConfig
from trainer.judging import run_probes
from trainer.loop import Loop
from trainer.timeline import SPLIT


def random_run(generator: np.random.Generator, strategy: str, size: int) -> RunConfig:
    def one_of(*values: Any) -> Any:
        return values[generator.integers(len(values))]

    layers = int(generator.integers(size, size + 4))
    own = StrategyConfig(
        strategy,
        microbatches=int(generator.integers(1, 5)),
        schedule=one_of("gpipe", "1f1b", "naive"),
        overlap=bool(generator.integers(2)),
        bucket_mb=one_of(0.0, 0.01, 25.0),
        backward=one_of("reduce_scatter", "all_reduce"),
    )
    widths = tuple(int(width) for width in generator.integers(size, 200, layers - 1))
    steps = int(generator.integers(3, 6))
    trainer = TrainerConfig(
        max_steps=steps,
        wire_every=int(generator.integers(1, steps + 1)),
        eval_every=one_of(0, 2),
        clip_grad_norm=one_of(None, 1.0),
        dtype=one_of("float32", "float64"),
    )
    return config(
        own,
        model=ModelConfig(num_layers=layers, widths=widths, bias=bool(generator.integers(2))),
        data=DataConfig(name="digits", batch_size=int(generator.integers(16, 200))),
        trainer=trainer,
    )


@pytest.mark.timeout(180)
@pytest.mark.parametrize("size", [2, *(pytest.param(size, marks=pytest.mark.slow) for size in (3, 4))])
def test_predicted_is_sent_and_the_wire_has_that_and_its_framing(ranks: RankPools, size: int) -> None:
    """Seventeen random runs of every strategy over the three sizes; the kernel's count is asked to 0.5 %."""
    generator = np.random.default_rng(400 + size)
    for strategy in ("ddp", "tensor", "pipeline"):
        for _ in range(6 if size == 2 and strategy != "ddp" else 5 if size > 2 else 6):
            run = random_run(generator, strategy, size)
            results = ranks[size].run(train, run, True)
            for row in results[0]["rows"]:
                assert row["bytes_sent"] == row["bytes_predicted"], run
            for result in results:
                wire = result["wire"]
                payload = wire["bytes_wire"] - wire["bytes_framing"]
                assert wire["steps"] == run.trainer.max_steps
                assert abs(payload - wire["bytes_sent"]) <= 0.005 * wire["bytes_sent"], (run, wire)


@pytest.mark.parametrize("strategy", ["ddp", "tensor", "pipeline"])
def test_rows_hold_the_split_of_every_rank(ranks: RankPools, strategy: str) -> None:
    """The parts add up on every rank, and only observed steps show what needs completions."""
    results = ranks[2].run(train, config(StrategyConfig(strategy, microbatches=2)))
    rows = results[0]["rows"]
    assert [row["wire_steps"] for row in rows] == [None, None, 3, None, None, 3]
    for row in rows:
        for prefix in ("", "rank/0/", "rank/1/"):
            total = math.fsum(row[prefix + key] for key in SPLIT if key != "data_s")
            assert total == pytest.approx(row[prefix + "step_time_s"], rel=0.02) or prefix == ""
            assert 0 <= row[prefix + "data_s"] <= row[prefix + "host_s"]
            assert all(row[prefix + key] >= 0 for key in SPLIT)
            seen = row["step"] in (2, 5)
            assert (row[prefix + "bytes_wire"] is not None) == seen
            assert (row[prefix + "overlap"] is not None) == seen
            if seen:
                assert 0 <= row[prefix + "overlap"] <= 1 + 1e-9  # a quotient of sums
                assert row[prefix + "achieved_bandwidth_GBps"] >= row[prefix + "effective_bandwidth_GBps"]
            bubble = row[prefix + "bubble_fraction"]
            if strategy != "pipeline":
                assert bubble is None and row[prefix + "idle_s"] == 0
        if strategy == "pipeline":
            for rank in (0, 1):
                own = row[f"rank/{rank}/idle_s"] / row[f"rank/{rank}/step_time_s"]
                assert row[f"rank/{rank}/bubble_fraction"] == pytest.approx(own)


def test_operations_add_up_to_the_headline(ranks: RankPools) -> None:
    """Four layers 64-24-24-24-10 in tensor: what a rank sends of one shape the other receives."""
    results = ranks[2].run(train, config(StrategyConfig("tensor")))
    for result in results:
        assert sum(row["bytes_sent"] for row in result["operations"]) == result["wire"]["bytes_sent"]
    gathered = [row for row in results[0]["operations"] if row["operation"] == "all_gather output"]
    # 100 rows a step: 12 of 24 features to the other rank, three times in each of six steps.
    assert [(row["shape"], row["calls"]) for row in gathered] == [("24 x 100", 18)]
    assert gathered[0]["bytes_sent"] == gathered[0]["bytes_received"] == 18 * 12 * 100 * 4
    for own, other in zip(*(result["operations"] for result in results), strict=True):
        assert own["bytes_received"] == other["bytes_sent"]


def judged(world: World, run: RunConfig) -> list[tuple[float, float | None]]:
    """Job: losses of a run in which every `verdict_every` steps all is probed."""
    torch.manual_seed(0)
    rows: list[dict[str, Any]] = []

    def on_verdict(loop: Loop) -> None:
        run_probes(loop.plan, world, loop.rank, 0.01)

    make_loop(world, run, rows.append, on_verdict).run()
    return [(row["loss"], row["eval_loss"]) for row in rows]


def test_a_verdict_on_the_way_changes_nothing(ranks: RankPools) -> None:
    """Batch statistics, and numbers drawn by the modules themselves, are as if nothing had been probed."""

    def losses(every: int) -> list[tuple[float, float | None]]:
        trainer = TrainerConfig(max_steps=6, eval_every=2, verdict_every=every)
        model = ModelConfig(name="normalized")
        run = config(StrategyConfig("pipeline"), plugins=("tests.normalized",), model=model, trainer=trainer)
        found: list[tuple[float, float | None]] = ranks[2].run(judged, run)[0]
        return found

    assert losses(2) == losses(0)


def test_nothing_is_read_when_that_is_asked(ranks: RankPools) -> None:
    run = config(StrategyConfig("ddp"), trainer=TrainerConfig(max_steps=4, warmup_steps=1, wire_every=0))
    results = ranks[2].run(train, run)
    for row in results[0]["rows"]:
        assert row["bytes_wire"] is row["overlap"] is row["link_fraction"] is None
        assert row["compute_s"] > 0
    assert results[0]["wire"]["steps"] == 0


def growth(world: World, run: RunConfig, early: int) -> int:
    """Job: bytes by which this rank has grown between step `early` and the last."""
    loop = make_loop(world, run)
    loader = loop.loader()
    sizes = []
    with torch.no_grad():
        for step in loop.steps(loader, run.trainer.max_steps):
            if step in (early, run.trainer.max_steps - 2):
                sizes.append(resident_bytes())
    loader.close()
    return sizes[1] - sizes[0]


@pytest.mark.slow
@pytest.mark.timeout(400)
@needs_resident_bytes
def test_memory_does_not_grow_in_ten_thousand_steps(ranks: RankPools) -> None:
    """Stamps of 10,000 steps would be 6 MB: what is kept is a sample, which is full by step 3,000."""
    small = ModelConfig(num_layers=2, hidden_dim=8)
    trainer = TrainerConfig(max_steps=10_000, warmup_steps=2, wire_every=10)
    data = DataConfig(name="digits", batch_size=16, drop_last=True)
    run = config(StrategyConfig("ddp"), model=small, trainer=trainer, data=data)
    grown = ranks[2].run(growth, run, 3000, timeout_s=360)
    assert max(grown) <= 512 * 1024


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--setting ddp,2", "--setting=ddp,2 must be strategy,layers,width,batch, such as ddp,6,512,256"),
        ("--rounds 0", "--rounds=0 must be at least 1"),
        ("--ranks x", "argument --ranks: invalid int value: 'x'; --help lists what there is"),
        ("--setting foo,2,8,8", "strategy=foo is unknown; valid are single, ddp, tensor, pipeline"),
        ("--setting pipeline,2,8,8 --ranks 3", "world_size=3 makes more stages than the 2 layers"),
    ],
)
def test_wrong_input_of_the_comparison_is_told(
    arguments: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert overhead.main(arguments.split()) == 2
    assert capsys.readouterr().err.startswith(sentence)

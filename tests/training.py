"""Small trainings on real ranks: their configuration, and the loop of one rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

from collectives.group import World
from collectives.operations import barrier
from trainer.config import (
    DataConfig,
    LoggerConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    StrategyConfig,
    TrainerConfig,
)
from trainer.data import load_dataset
from trainer.loop import Loop
from trainer.nodes import find_peers
from trainer.plan import make_plan
from trainer.worker import make_rank

AnyLoop = TypeVar("AnyLoop", bound=Loop)


class NotStopped:
    requested = 0


def config(strategy: StrategyConfig, **changes: Any) -> RunConfig:
    base = RunConfig(
        run_dir="/nonexistent",
        model=ModelConfig(num_layers=4, hidden_dim=24),
        strategy=strategy,
        data=DataConfig(name="digits", batch_size=100),
        optimizer=OptimizerConfig("sgd", lr=0.1),
        trainer=TrainerConfig(max_steps=6, warmup_steps=2, wire_every=3),
        logger=LoggerConfig(name="none"),
    )
    return dataclasses.replace(base, **changes)


def ignore(row: dict[str, Any]) -> None:
    """Rows are not what is looked at."""


def make_loop(
    world: World,
    run: RunConfig,
    on_row: Callable[[dict[str, Any]], None] = ignore,
    on_verdict: Callable[[Loop], None] | None = None,
    kind: type[AnyLoop] = Loop,  # type: ignore[assignment]
) -> AnyLoop:
    """The loop of a rank as a run has it, ready for its first step; nothing is measured before."""
    plan = make_plan(run, world.size)
    rank = make_rank(plan, world)
    find_peers(world)
    dataset = load_dataset(run.data, seed=run.seed, hidden_dim=run.model.hidden_dim)
    return kind(plan, world, rank, dataset, NotStopped(), on_row, None, on_verdict)


def settle(loop: Loop) -> None:
    """Have the kernel asked only when all ranks have taken in what was sent to them.

    A run waits for nobody: what leaves late belongs to its next reading, and the last one has none.
    """
    recorder, read = loop.recorder, loop.recorder.wire

    def settled() -> tuple[float, float]:
        barrier(loop.world.control)
        return read()

    recorder.wire = settled  # type: ignore[method-assign]
    recorder._wire = settled()


def train(world: World, run: RunConfig, settles: bool = False) -> dict[str, Any]:
    """Job: rows of rank 0, what left each rank, and what the ledger has by operation."""
    rows: list[dict[str, Any]] = []
    loop = make_loop(world, run, rows.append)
    if settles:
        settle(loop)
    loop.run()
    operations = loop.rank.ledger.by_operation()
    return {"rows": rows, "wire": loop.recorder.totals, "operations": operations}

"""One rank of a training under torchrun, with its network interface's own counters around the steps.

    torchrun ... tests/interface_worker.py STRATEGY FOLDER DEVICE

writes FOLDER/RANK.json.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

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
from trainer.nodes import find_peers, spread_over_nodes
from trainer.place import Place
from trainer.plan import make_plan
from trainer.rank import connect
from trainer.worker import make_rank

STEPS = 16


class NotStopped:
    requested = 0


def interface(device: str) -> dict[str, int]:
    folder = Path("/sys/class/net", device, "statistics")
    return {name: int((folder / name).read_text()) for name in ("tx_bytes", "tx_packets")}


def main() -> None:
    strategy, folder, device = sys.argv[1:]
    place = Place.from_environment(os.environ)
    assert place is not None
    run = RunConfig(
        run_dir="/nonexistent",
        model=ModelConfig(num_layers=4, hidden_dim=640),
        strategy=StrategyConfig(strategy),
        data=DataConfig(name="synthetic", task="regression", batch_size=1024, eval_samples=0),
        optimizer=OptimizerConfig("sgd", lr=0.1),
        trainer=TrainerConfig(max_steps=STEPS, warmup_steps=1, wire_every=4),
        logger=LoggerConfig(name="none"),
    )
    world = World(place.rank, place.world_size, "gloo", 60.0, connect(place, 60.0))
    nodes = spread_over_nodes(world)
    plan = make_plan(run, world.size)
    rank = make_rank(plan, world)
    find_peers(world)
    dataset = load_dataset(run.data, seed=run.seed, hidden_dim=run.model.hidden_dim)
    loop = Loop(plan, world, rank, dataset, NotStopped(), lambda row: None)
    barrier(world.control)
    before, wire_before = interface(device), world.wire_bytes_between_nodes()
    barrier(world.control)  # all have read
    loop.run()
    barrier(world.control)
    after, wire_after = interface(device), world.wire_bytes_between_nodes()
    barrier(world.control)
    assert wire_before is not None and wire_after is not None
    found = {
        "nodes": nodes,
        **{name: after[name] - before[name] for name in before},
        **loop.recorder.totals,
        # Over the interface's time: late bytes of the last step belong to a reading that never comes.
        "bytes_wire_between_nodes": wire_after - wire_before,
    }
    Path(folder, f"{place.rank}.json").write_text(json.dumps(found))
    world.close()


if __name__ == "__main__":
    main()

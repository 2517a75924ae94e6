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
from tests.training import config, make_loop
from trainer.config import DataConfig, ModelConfig, StrategyConfig, TrainerConfig
from trainer.nodes import spread_over_nodes
from trainer.place import Place
from trainer.rank import connect

STEPS = 16


def interface(device: str) -> dict[str, int]:
    folder = Path("/sys/class/net", device, "statistics")
    return {name: int((folder / name).read_text()) for name in ("tx_bytes", "tx_packets")}


def main() -> None:
    strategy, folder, device = sys.argv[1:]
    place = Place.from_environment(os.environ)
    assert place is not None
    run = config(
        StrategyConfig(strategy),
        model=ModelConfig(num_layers=4, hidden_dim=640),
        data=DataConfig(name="synthetic", task="regression", batch_size=1024, eval_samples=0),
        trainer=TrainerConfig(max_steps=STEPS, warmup_steps=1, wire_every=4),
    )
    world = World(place.rank, place.world_size, "gloo", 60.0, connect(place, 60.0))
    nodes = spread_over_nodes(world)
    loop = make_loop(world, run)
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

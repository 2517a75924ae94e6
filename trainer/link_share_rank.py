"""One of the two ranks of scripts/link_share.py, started as a module on its host."""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from collectives.group import World
from collectives.link_share import RANKS
from trainer.errors import Stopped
from trainer.link_share import Request, measure
from trainer.rank import tell

TIMEOUT_S = 60.0


def main(rank: int, address: str, port: int, request: Request, output: Path) -> int:
    """Measure; rank 0 writes what it found. Returns the exit code."""
    torch.set_num_threads(1)
    store = dist.TCPStore(address, port, RANKS, rank == 0, timedelta(seconds=TIMEOUT_S))
    world = World(rank, RANKS, "gloo", TIMEOUT_S, store)
    try:
        measured = measure(world, request)
    except Stopped as error:
        tell(str(error))
        return 1
    finally:
        world.close()
    if rank == 0:
        output.write_text(json.dumps(measured), encoding="utf-8")
    return 0


if __name__ == "__main__":
    rank, address, port, request, output = sys.argv[1:]
    sys.exit(main(int(rank), address, int(port), Request(**json.loads(request)), Path(output)))

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.launched import NAMES
from tests.ranks import RankPools
from trainer import cli, elastic
from trainer.errors import Interrupted
from trainer.job import JobConfig
from trainer.place import Place
from trainer.rank import run_rank

Run = Callable[..., int]


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPools]:
    """Pools of real gloo ranks: `ranks[n].run(job, ...)`."""
    pools = RankPools()
    yield pools
    pools.close()


def run_here(config: JobConfig, world_size: int, worker: str) -> int:
    """One rank as `trainer.elastic` runs it, but without the seconds that a process of its own takes."""
    from torch.distributed import HashStore

    assert world_size == 1
    code = run_rank(config, Place(), HashStore(), worker)
    if code > 128:
        raise Interrupted(code - 128)
    return code


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Run]:
    """`run(*arguments, worker=...)`: the command line and its one rank in this process, in a new folder."""
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")  # so that it is restored
    monkeypatch.setattr(elastic, "run_elastic", run_here)
    monkeypatch.chdir(tmp_path)
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level

    def call(*arguments: str, worker: str = "describe") -> int:
        monkeypatch.setattr(sys, "argv", ["scripts/train.py", *arguments])
        return cli.main(f"tests.stub_workers:{worker}")

    yield call
    root.handlers[:] = handlers
    root.setLevel(level)

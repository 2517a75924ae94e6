from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.ranks import RankPools
from trainer import cli

Run = Callable[..., int]


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPools]:
    """Pools of real gloo ranks: `ranks[n].run(job, ...)`."""
    pools = RankPools()
    yield pools
    pools.close()


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Run]:
    """`run(*arguments, worker=...)`: the command line in this process, from an empty folder."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")  # so that it is restored
    monkeypatch.chdir(tmp_path)
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level

    def call(*arguments: str, worker: str = "describe") -> int:
        monkeypatch.setattr(sys, "argv", ["scripts/train.py", *arguments])
        return cli.main(f"tests.stub_workers:{worker}")

    yield call
    root.handlers[:] = handlers
    root.setLevel(level)

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks import RankPools


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPools]:
    """Pools of real gloo ranks: `ranks[n].run(job, ...)`."""
    pools = RankPools()
    yield pools
    pools.close()

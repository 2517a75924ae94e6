"""Which rank runs on which node, and what goes from one to another: by hand, and by the kernel's count."""

from __future__ import annotations

import html
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from collectives.group import World
from collectives.nodes import bytes_between, peers_of_connections, sent_by_place
from tests.ranks import RankPools
from tests.training import config, make_loop, settle
from trainer.config import CollectivesConfig, DataConfig, RunConfig, StrategyConfig, TrainerConfig
from trainer.nodes import node_map, number_nodes
from trainer.recorder import Recorder
from trainer.report import Run
from trainer.report_nodes import nodes_table
from trainer.report_text import NONE

TWO_AND_TWO = (0, 0, 1, 1)


def test_the_launchers_numbers_count_and_else_host_names() -> None:
    assert number_nodes([(0, "vm"), (0, "vm"), (1, "vm")]) == [0, 0, 1]  # namespaces share a name
    assert number_nodes([(None, "b"), (None, "a"), (None, "b")]) == [0, 1, 0]
    assert number_nodes([(0, "b"), (None, "a"), (None, "b")]) == [0, 1, 0]  # not all have a number
    assert node_map([0, 1, 0], ["b", "a", "b"]) == [
        {"node": 0, "host": "b", "ranks": [0, 2]},
        {"node": 1, "host": "a", "ranks": [1]},
    ]


def test_bytes_between_nodes_by_hand() -> None:
    everyone = range(4)
    assert bytes_between(TWO_AND_TWO, 1, everyone, 90, {0: 30, 2: 40, 3: 20}) == 60
    assert bytes_between(TWO_AND_TWO, 1, (0, 1), 90, None) == 0  # the group is on one node
    assert bytes_between(TWO_AND_TWO, 1, (1, 3), 90, None) == 90  # all of its peers are elsewhere
    assert bytes_between(TWO_AND_TWO, 1, everyone, 90, None) is None
    assert bytes_between(TWO_AND_TWO, 1, everyone, 0, None) == 0
    assert sent_by_place("all_reduce", "ring", 5, 4, 0) == {3: 5}
    assert sent_by_place("all_gather", "ring", 5, 4, 3) == {0: 5}
    assert sent_by_place("broadcast", "tree", 5, 4, 3) is None


def test_a_connection_leads_to_the_rank_that_has_its_other_end() -> None:
    ends = [
        [("10.0.0.1 4000", "10.0.0.2 5000"), ("127.0.0.1 4001", "127.0.0.1 5001")],
        [("127.0.0.1 5001", "127.0.0.1 4001")],
        [("10.0.0.2 5000", "10.0.0.1 4000")],
    ]
    assert [peers_of_connections(rank, ends) for rank in range(3)] == [[2, 1], [0], [0]]
    # Another node has the same ports on its loopback, and an address was rewritten on the way.
    ends.append([("127.0.0.1 5001", "127.0.0.1 4001"), ("10.0.0.9 1", "10.0.0.1 2")])
    assert peers_of_connections(0, ends) == [2, None]
    assert peers_of_connections(3, ends) == [None, None]
    # One connection of each of two ranks could not be read.
    assert peers_of_connections(0, [[("", "")], [("", "")]]) == [None]
    assert peers_of_connections(0, [[("", "")], []]) == [None]


def test_nodes_are_one_for_each_rank() -> None:
    with pytest.raises(ValueError, match=r"^nodes \[0, 1\] must be one for each of 1 ranks$"):
        World(0, 1, "gloo", 1.0).spread((0, 1))


def train_on(world: World, run: RunConfig, nodes: tuple[int, ...]) -> dict[str, Any]:
    """Job: rows of rank 0, and what the kernel counted of this rank, as if ranks were on these nodes."""
    world.spread(nodes)
    try:
        rows: list[dict[str, Any]] = []
        loop = make_loop(world, run, rows.append)
        settle(loop)
        loop.run()
        return {"rows": rows, "wire": loop.recorder.totals}
    finally:
        world.spread((0,) * world.size)


STEPS = TrainerConfig(max_steps=4, warmup_steps=1, wire_every=2, loss="mse")


def run_of(strategy: str, algorithm: str = "auto") -> RunConfig:
    """Four layers of width 24 on 96 rows; mean squares need no sums over the ranks."""
    return config(
        StrategyConfig(strategy),
        trainer=STEPS,
        data=DataConfig(name="synthetic", task="regression", batch_size=96),
        collectives=CollectivesConfig(algorithm=algorithm),
    )


# strategy, algorithm -> of each of four ranks, the share of its bytes that goes to the other node
SHARES = {
    ("ddp", "auto"): (1, 0, 1, 0),  # a ring downward: 0 to 3, 1 to 0, 2 to 1, 3 to 2
    ("tensor", "auto"): (2 / 3,) * 4,  # each peer is sent as much, and two of three are elsewhere
    ("pipeline", "auto"): (0, 0.5, 0.5, 0),  # as much forward as backward
}


@pytest.mark.parametrize(("strategy", "algorithm"), SHARES)
def test_four_ranks_on_two_nodes(ranks: RankPools, strategy: str, algorithm: str) -> None:
    """Shares by hand; the kernel's count of each connection, framing included, agrees within 2 %."""
    results = ranks[4].run(train_on, run_of(strategy, algorithm), TWO_AND_TWO)
    for row in results[0]["rows"]:
        for rank, share in enumerate(SHARES[strategy, algorithm]):
            own = {
                key: row[f"rank/{rank}/bytes_sent{key}"] for key in ("", "_within_nodes", "_between_nodes")
            }
            assert own["_within_nodes"] + own["_between_nodes"] == own[""] > 0
            assert own["_between_nodes"] == pytest.approx(share * own[""], abs=1)
        assert (row["bytes_wire_between_nodes"] is None) == (row["step"] % 2 == 0)
    for result, share in zip(results, SHARES[strategy, algorithm], strict=True):
        wire = result["wire"]
        assert wire["bytes_sent_between_nodes"] == pytest.approx(share * wire["bytes_sent"], abs=4)
        # a receiver's notices also cross: 48 bytes for each message
        assert (
            abs(wire["bytes_wire_between_nodes"] - wire["bytes_sent_between_nodes"]) <= wire["bytes_framing"]
        )


def test_gloos_own_collectives_go_where_their_rings_go(ranks: RankPools) -> None:
    """algorithm=native in tensor: all_gather sends upward (1 to 2, 3 to 0), all_reduce downward."""
    results = ranks[4].run(train_on, run_of("tensor", "native"), TWO_AND_TWO)
    for result in results:
        wire = result["wire"]
        assert 0 < wire["bytes_sent_between_nodes"] < wire["bytes_sent"]
        assert (
            abs(wire["bytes_wire_between_nodes"] - wire["bytes_sent_between_nodes"]) <= wire["bytes_framing"]
        )


def test_on_one_node_nothing_goes_to_another(ranks: RankPools) -> None:
    results = ranks[2].run(train_on, run_of("ddp"), (3, 3))
    for row in results[0]["rows"]:
        assert row["bytes_sent_between_nodes"] == 0
        assert row["bytes_sent_within_nodes"] == row["bytes_sent"] > 0
        assert row["bytes_wire_between_nodes"] == (None if row["step"] % 2 == 0 else 0)


def test_a_total_stays_unknown_once_a_reading_was() -> None:
    recorder = object.__new__(Recorder)
    recorder.rank = SimpleNamespace(ledger=SimpleNamespace(total_bytes=9, between_bytes=4.0))  # type: ignore
    recorder._count, recorder._framing_bytes, recorder._wire = 1, 0, (0.0, 0.0)
    recorder.totals = {"bytes_wire": 0, "bytes_wire_between_nodes": 0}
    found = []
    for reading in [(10.0, 4.0), (20.0, math.nan), (30.0, 8.0), (40.0, 9.0)]:
        recorder.wire = lambda reading=reading: reading  # type: ignore
        recorder._read_totals()
        found.append((recorder.totals["bytes_wire"], recorder.totals["bytes_wire_between_nodes"]))
    assert found == [(10, 4), (20, None), (30, None), (40, None)]


def row_of(step: int, within: tuple[int | None, ...], between: tuple[int | None, ...]) -> dict[str, Any]:
    own: dict[str, Any] = {"step": step, "is_warmup": step == 0}
    for rank, (inside, outside) in enumerate(zip(within, between, strict=True)):
        own[f"rank/{rank}/bytes_sent_within_nodes"] = inside
        own[f"rank/{rank}/bytes_sent_between_nodes"] = outside
    return own


def cells(markup: str) -> list[list[str]]:
    rows = re.findall(r"<tr>(.*?)</tr>", markup)
    return [[html.unescape(cell) for cell in re.findall(r"<td[^>]*>(.*?)</td>", row)] for row in rows][1:]


def test_the_report_says_which_ranks_are_where_and_what_they_send() -> None:
    nodes = [{"node": 0, "host": "a<b", "ranks": [0, 1]}, {"node": 1, "host": "c", "ranks": [2]}]
    summary = {"nodes": nodes, "environment": {"world_size": 3}}
    rows = [row_of(k, (10 * k, 1000, 0), (5, 6, 2000 * k)) for k in range(3)]  # the first is warm-up
    # means of steps 1 and 2: 15 and 1000 on node 0, 3000 from node 1 to the other
    assert cells(nodes_table(Run(Path("run"), rows, summary=summary))) == [
        ["0", "0, 1", "1,015", "11"],
        ["1", "2", "0", "3,000"],
        ["all", "", "1,015", "3,011"],
    ]
    rows[2]["rank/2/bytes_sent_between_nodes"] = None
    assert [row[-1] for row in cells(nodes_table(Run(Path("run"), rows, summary=summary)))] == [
        "11",
        NONE,
        NONE,
    ]
    assert nodes_table(Run(Path("run"), rows)) == ""
    damaged = Run(Path("run"), rows, summary={"nodes": [{"ranks": 3}, {"node": "x", "ranks": ["y"]}]})
    assert [row[:2] for row in cells(nodes_table(damaged))][:2] == [[NONE] * 2] * 2

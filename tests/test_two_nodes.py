"""Two nodes under torchrun, in two network namespaces: they train as one process does, and count rightly."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.cluster_doc import PATH, command, commands
from tests.digits import DIGITS
from tests.interface_worker import STEPS
from tests.launched import ROOT, rows_of, run_launched, torchrun_on_two_hosts
from tests.system import need_two_hosts
from tests.truth import reference

SCRIPT = str(ROOT / "scripts" / "two_hosts.py")

# What the interface counts of a packet beside its TCP payload: Ethernet 14, IPv4 20, TCP 20 with 12 of
# timestamps. It counts what TCP hands over in one piece as one packet (segmentation is left to the device),
# so that a packet may have far more than 1,448 bytes of payload: its own counter says how many there were.
HEADER_BYTES = 14 + 20 + 20 + 12
FOUR_MIB = 4 * 640 * (640 + 1) * 4  # parameters of four layers of 640 x 640 with biases, float32

# strategy, ranks on each node -> bytes that all ranks of node 0 send to node 1 in a step, by hand
BETWEEN = {
    # ring over 2: each sends half of the gradients twice
    ("ddp", 1): FOUR_MIB,
    # two ranks of node 0 send half of their 160 columns of 1024 rows to each of two ranks of node 1,
    # forward for three layers (the last needs no gather of its own) and backward as much
    ("tensor", 2): 2 * 2 * 160 * 1024 * 4 * 3 * 2,
    # 640 x 1024 forward; node 1 sends as much backward
    ("pipeline", 1): 640 * 1024 * 4,
}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("strategy", "local_ranks"), BETWEEN)
def test_bytes_between_nodes_are_those_of_the_interface(
    strategy: str, local_ranks: int, tmp_path: Path
) -> None:
    need_two_hosts()
    code, output = run_launched(
        ROOT, SCRIPT, *torchrun_on_two_hosts(local_ranks), "-m", "tests.interface_worker", strategy,
        str(tmp_path), "{device}", timeout_s=250,
    )  # fmt: skip
    assert code == 0, output
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2 * local_ranks)]
    ranks = [list(range(local_ranks)), list(range(local_ranks, 2 * local_ranks))]
    assert [(node["node"], node["ranks"]) for node in found[0]["nodes"]] == [(0, ranks[0]), (1, ranks[1])]
    for own in ranks:
        compare([found[rank] for rank in own], STEPS * BETWEEN[strategy, local_ranks])


def compare(ranks: list[dict[str, Any]], expected: int) -> None:
    """The ranks of one node against their interface: 20 to 160 MB, of which control is some kilobytes."""
    sent = sum(rank["bytes_sent_between_nodes"] for rank in ranks)
    wire = sum(rank["bytes_wire_between_nodes"] for rank in ranks)
    payload = ranks[0]["tx_bytes"] - HEADER_BYTES * ranks[0]["tx_packets"]
    assert sent == expected
    assert payload == pytest.approx(wire, rel=0.02)
    assert payload == pytest.approx(sent, rel=0.02)
    # Large packets make headers small, so the raw counter is as near.
    assert ranks[0]["tx_bytes"] == pytest.approx(sent, rel=0.02)


def on_both(tmp_path: Path, text: str) -> None:
    """Run a block of the page on both hosts, with what it asks the user to fill in."""
    code, output = run_launched(
        tmp_path, SCRIPT, "--", "sh", "-c", f"NODE={{rank}}; ADDRESS={{address}}\n{text}",
        timeout_s=300, PATH=PATH + os.environ["PATH"],
    )  # fmt: skip
    assert code == 0, output


def check_run(folder: Path, ranks: list[list[int]]) -> None:
    rows = rows_of(folder)
    assert [row["loss"] for row in rows] == pytest.approx(reference(DIGITS).losses, rel=1e-5)
    assert all(row["bytes_sent_between_nodes"] > 0 for row in rows)
    nodes = json.loads((folder / "summary.json").read_text())["nodes"]
    assert [node["ranks"] for node in nodes] == ranks
    assert "Ranks on nodes" in (folder / "report.html").read_text()


SETTINGS = "data=digits trainer.max_steps=3 trainer.warmup_steps=1 logger=none collectives.link_budget_s=0"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_loop_over_strategies_trains_on_two_nodes_what_one_process_trains(tmp_path: Path) -> None:
    need_two_hosts()
    on_both(tmp_path, command("port=29500", SETTINGS, tmp_path))
    for strategy in ("ddp", "tensor", "pipeline"):
        check_run(tmp_path / "nodes" / strategy, [[0], [1]])


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_two_nodes_of_two_ranks_train_what_one_process_trains(tmp_path: Path) -> None:
    need_two_hosts()
    on_both(tmp_path, command("torchrun", SETTINGS, tmp_path))
    check_run(tmp_path / "two-nodes", [[0, 1], [2, 3]])


def test_every_command_of_the_page_is_one_that_a_test_runs() -> None:
    """Here the first two, the others in test_slurm.py."""
    first_words = [own.split("scripts/train.py")[0].split() for own in commands()]
    beginnings = [" ".join(words[:2]) for words in first_words]
    assert beginnings == [
        "torchrun --nnodes",
        "port=29500 for",
        "srun --nodes=2",
        "srun --ntasks=1",
        "python",
        "python",
    ]

"""The printed plan: exact bytes and memory, without any rank."""

from __future__ import annotations

import re
from typing import Any

import pytest

from trainer.config import InputError, RunConfig
from trainer.dryrun import listing, memory_bytes, print_plan
from trainer.plan import make_plan

LARGE: dict[str, Any] = {
    "data": {
        "name": "synthetic",
        "task": "regression",
        "num_samples": 512,
        "eval_samples": 256,
        "batch_size": 256,
    },
    "model": {"num_layers": 8, "hidden_dim": 1024, "bias": False},
    "optimizer": {"name": "sgd", "momentum": 0.9},
}


def config(**sections: Any) -> RunConfig:
    return RunConfig.from_mapping(sections, "/nowhere")


def printed(capsys: pytest.CaptureFixture[str], world_size: int, **sections: Any) -> str:
    print_plan(config(world_size=world_size, **sections))
    return capsys.readouterr().out


def rank_rows(text: str) -> list[list[str]]:
    """Whole numbers of each of the table's rows: rank, bytes sent, and bytes held by role."""
    rows = []
    for line in text.splitlines():
        numbers = re.findall(r"(?<![\w.])\d[\d,]*(?![\w.…])", line)
        if re.match(r"\W*\d", line) and len(numbers) >= 7:
            rows.append(numbers)
    return rows


@pytest.mark.parametrize(
    ("strategy", "sent"),
    [
        ({"name": "ddp"}, ["50,331,648"] * 4),
        ({"name": "pipeline", "microbatches": 4}, ["1,048,576", "2,097,152", "2,097,152", "1,048,576"]),
        ({"name": "tensor"}, ["11,010,048"] * 4),
        ({"name": "tensor", "backward": "all_reduce"}, ["16,515,072"] * 4),
    ],
    ids=["ddp", "pipeline", "tensor", "tensor by all_reduce"],
)
def test_bytes_of_eight_layers_of_1024(
    capsys: pytest.CaptureFixture[str], strategy: dict[str, Any], sent: list[str]
) -> None:
    text = printed(capsys, 4, strategy=strategy, **LARGE)
    rows = rank_rows(text)
    assert [row[0] for row in rows] == ["0", "1", "2", "3"]
    assert [row[1] for row in rows] == sent
    parameters = "33,554,432" if strategy["name"] == "ddp" else "8,388,608"
    for row in rows:
        assert row.count(parameters) == 3  # parameters, gradients, and momentum: one value per parameter


def test_the_whole_table_can_be_read_in_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = printed(capsys, 4, strategy={"name": "tensor"}, **LARGE)
    assert "…" not in text
    assert "activations" in text and "11,010,048" in text


def test_memory_of_a_case_worked_out_by_hand() -> None:
    """4 x 4 and 4 x 4 with biases, 8 rows, float32, AdamW, one rank.

    Parameters 2 * 20 * 4; AdamW twice that and a counter of 4. Values have 128 bytes: input, hidden
    output, output and its gradient live at the loss; the hidden gradient takes the output's place.
    """
    made = make_plan(
        config(
            data={"name": "synthetic", "num_samples": 8, "eval_samples": 8, "batch_size": 8},
            model={"num_layers": 2, "hidden_dim": 4},
        ),
        1,
    )
    assert memory_bytes(made, made.schedules(8)[0], 0) == {
        "parameter": 160,
        "gradient": 160,
        "optimizer state": 324,
        "activation": 4 * 128,
    }


def test_ddp_counts_an_optimizer_for_each_bucket_that_updates_by_itself() -> None:
    made = make_plan(
        config(
            data={"name": "synthetic", "num_samples": 8, "eval_samples": 8, "batch_size": 8},
            model={"num_layers": 2, "hidden_dim": 4},
            strategy={"name": "ddp", "bucket_mb": 0},
        ),
        2,
    )
    memory = memory_bytes(made, made.schedules(8)[0], 0)
    assert memory["optimizer state"] == 2 * 160 + 2 * 4
    assert memory["activation"] == 4 * 64  # half the rows on each rank


def test_a_table_row_by_hand(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(
        capsys,
        1,
        data={"name": "synthetic", "num_samples": 8, "eval_samples": 8, "batch_size": 8},
        model={"num_layers": 2, "hidden_dim": 4},
    )
    assert rank_rows(text) == [["0", "0", "160", "160", "324", "512", "1,156"]]
    assert "strategy single on 1 ranks, 2 layers, batch of 8 rows" in text
    assert "bubble" not in text


def test_a_pipelines_plan_shows_bubble_order_and_operations(capsys: pytest.CaptureFixture[str]) -> None:
    strategy = {"name": "pipeline", "microbatches": 4, "schedule": "1f1b"}
    text = printed(capsys, 2, strategy=strategy, model={"hidden_dim": 64})
    assert "bubble expected with equal stages: 0.2000 of the step" in text
    assert "rank 0 | layers 0-1 | F0 F1 B0 F2 B1 F3 B2 B3" in text
    assert "rank 1 | layers 2-3 | F0 B0 F1 B1 F2 B2 F3 B3" in text
    assert re.search(r"communication +send output of layer 1, microbatch 3 to rank 1", text)
    # 128 rows of 64 float32 cross the boundary each way.
    assert [row[1] for row in rank_rows(text)] == ["32,768", "32,768"]


def test_ranks_that_do_the_same_are_listed_once_and_long_lists_are_cut() -> None:
    made = make_plan(config(strategy={"name": "ddp", "bucket_mb": 0, "microbatches": 40}), 4)
    lines = listing(made.schedules(128))
    assert lines[0] == "operations of rank 0 (4 ranks do the same)"
    # Each of 32 microbatches: 4 forwards, loss, 4 dX, 4 dW; 8 reductions and waits, 4 updates.
    assert lines[-1] == f"  and {32 * 13 + 8 + 8 + 4 - 400} more"
    assert len(lines) == 402


def test_more_than_four_kinds_of_rank_are_counted() -> None:
    made = make_plan(config(strategy={"name": "pipeline"}, model={"num_layers": 6}), 6)
    lines = listing(made.schedules(128))
    assert sum(line.startswith("operations of rank") for line in lines) == 4
    assert lines[-1] == "and the schedules of 2 more ranks"


def test_more_than_64_ranks_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    text = printed(capsys, 70, strategy={"name": "ddp"}, data={"batch_size": 140})
    assert len(rank_rows(text)) == 64
    assert "and 6 more ranks" in text


def test_a_plan_that_cannot_run_is_not_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match="makes more stages than the 4 layers"):
        printed(capsys, 5, strategy={"name": "pipeline"})
    assert capsys.readouterr().out == ""


def test_what_a_run_would_refuse_its_dry_run_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    """Blocks that differ are for the direct exchange only; evaluation alone gathers the ten classes."""
    for hidden_dim in (10, 8):
        with pytest.raises(InputError, match="native cannot all_gather blocks of unequal sizes"):
            printed(
                capsys,
                4,
                strategy={"name": "tensor"},
                model={"hidden_dim": hidden_dim},
                collectives={"algorithm": "native"},
            )

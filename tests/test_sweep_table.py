"""The table of a sweep: its numbers by hand, its order, its sentence, and what damaged folders end in."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.sweep_folder import scaling_sweep, write_job, write_sweep_file
from trainer.errors import InputError
from trainer.sweep_advice import plan_text
from trainer.sweep_columns import COLUMNS
from trainer.sweep_table import csv_text, json_text, read_table, to_json

ROOT = Path(__file__).parents[1]


def by_number(folder: Path) -> dict[int, dict[str, Any]]:
    return {row["number"]: row for row in read_table(folder).rows}


def test_a_row_has_medians_and_quartiles_of_the_steps_after_warm_up(tmp_path: Path) -> None:
    row = by_number(scaling_sweep(tmp_path))[1]
    assert (row["state"], row["reason"], row["note"], row["steps"], row["steady_steps"]) == (
        "complete",
        None,
        None,
        4,
        3,
    )
    assert (row["strategy"], row["world_size"], row["microbatches"], row["schedule"]) == ("ddp", 2, 1, None)
    assert row["swept"] == {"strategy": "ddp", "world_size": "2"}
    # of 0.08, 0.1 and 0.125 s, and of 1250, 1000 and 800 rows a second
    assert [row[f"step_time{part}_s"] for part in ("_low", "", "_high")] == pytest.approx([0.09, 0.1, 0.1125])
    assert [row[f"samples_per_s{part}"] for part in ("_low", "", "_high")] == pytest.approx([900, 1000, 1125])
    assert (row["speedup"], row["efficiency"]) == (pytest.approx(2.0), pytest.approx(1.0))
    assert (row["loss"], row["eval_loss"], row["batch_size"]) == (1.0, None, 100)
    assert (row["wall"], row["cause"], row["verdict"]) == ("compute", "none", "Job 1.")


def test_bytes_and_parts_are_medians_and_what_was_not_measured_is_null(tmp_path: Path) -> None:
    write_sweep_file(tmp_path)
    write_job(
        tmp_path,
        0,
        "pipeline",
        2,
        (1.0, 1.0, 1.0),
        microbatches=3,
        bytes_sent=[100, 300, 200],
        bytes_least=90,
        bytes_wire=[None, 800, 660],
        wire_steps=[None, 2, 3],
        idle_s=[0.1, 0.2, 0.6],
        bubble_fraction=[0.1, 0.2, 0.6],
        bubble_expected=0.25,
        eval_loss=[7.0, None, 5.0],
        compute_s=None,
    )
    row = by_number(tmp_path)[0]
    assert (row["bytes_sent"], type(row["bytes_sent"])) == (200, int)
    assert row["bytes_wire"] == 310  # median of 800 B in 2 steps and 660 B in 3
    assert (row["bytes_least"], row["bytes_predicted"], row["compute_s"]) == (90, None, None)
    assert (row["idle_s"], row["bubble_fraction"], row["bubble_expected"]) == (0.2, 0.2, 0.25)
    assert (row["eval_loss"], row["eval_accuracy"], row["schedule"]) == (5.0, None, "1f1b")


def test_speedup_is_against_the_best_one_rank_job_whatever_its_plan_and_batch(tmp_path: Path) -> None:
    write_sweep_file(tmp_path)
    write_job(tmp_path, 0, "single", 1, (0.25, 0.25))
    write_job(tmp_path, 1, "ddp", 1, (0.2, 0.2), microbatches=2)
    write_job(tmp_path, 2, "ddp", 4, (0.2, 0.2), batch=400)  # four times the work in the same time
    rows = by_number(tmp_path)
    assert [rows[number]["speedup"] for number in range(3)] == pytest.approx([0.8, 1.0, 4.0])
    assert rows[2]["efficiency"] == pytest.approx(1.0)
    assert [row["number"] for row in read_table(tmp_path).rows] == [2, 1, 0]
    assert [rows[number]["place"] for number in range(3)] == [3, 2, 1]


def test_without_a_one_rank_job_there_is_no_speedup_and_it_says_why(tmp_path: Path) -> None:
    write_sweep_file(tmp_path)
    write_job(tmp_path, 0, "ddp", 2, (0.1, 0.1))
    write_job(tmp_path, 1, "single", 1, (0.2, 0.2), state="stopped", reason="SIGINT")
    table = read_table(tmp_path)
    assert (table.rows[0]["speedup"], table.rows[0]["efficiency"]) == (None, None)
    assert "no complete one-rank job" in table.rows[0]["note"]
    assert "no complete one-rank job" in " ".join(table.remarks)
    assert table.sentences == (
        "Use 2 ranks with ddp, microbatches=1, 1,000 samples a second; no more ranks were tried.",
    )
    stopped = table.rows[1]
    assert (stopped["state"], stopped["place"], stopped["samples_per_s"]) == ("stopped", None, 500)


def test_plans_whose_quartiles_overlap_are_ties(tmp_path: Path) -> None:
    write_sweep_file(tmp_path)
    write_job(tmp_path, 0, "single", 1, (0.2, 0.2, 0.2))
    write_job(tmp_path, 1, "ddp", 2, (0.08, 0.1, 0.125))  # 900 to 1125
    write_job(tmp_path, 2, "tensor", 2, (0.1, 100 / 1120, 0.08))  # 1060 to 1185
    write_job(tmp_path, 3, "pipeline", 2, (0.08, 0.08, 0.08))  # 1250
    table = read_table(tmp_path)
    assert {row["number"]: row["tied_with"] for row in table.rows} == {3: [], 2: [1], 1: [2], 0: []}
    assert table.remarks == ()
    write_job(tmp_path, 4, "pipeline", 2, (0.08, 0.08, 0.08), microbatches=2)
    assert read_table(tmp_path).remarks == (
        "The order is not sure: the quartiles of job 4 overlap with those of job 3.",
    )


TWICE = "Use 2 ranks with ddp, microbatches=1: 2.00 times one rank (1.00 efficiency);"
BEST = f"{TWICE} with 4 ranks the best plan (ddp, microbatches=1)"
FASTER = {"times_s": (0.05, 0.05, 0.05)}
IDLE = {"cause": "idle_bubble"}


@pytest.mark.parametrize(
    ("four", "sentence"),
    [
        (
            FASTER,
            "Use 4 ranks with ddp, microbatches=1: 4.00 times one rank (1.00 efficiency); no more ranks were "
            "tried.",
        ),
        (
            {"times_s": (0.2, 0.2, 0.2), "verdict": IDLE},
            f"{BEST} is slower, and its verdict is idle_bubble.",
        ),
        (
            {"times_s": (0.09, 0.09, 0.09)},  # 1111 rows a second, within 900 to 1125
            f"{BEST} is not faster beyond the spread, and its verdict names no cause, its wall is compute.",
        ),
        (
            {"times_s": (), "state": "skipped", "reason": "ddp makes no sense here."},
            f"{TWICE} with 4 ranks no job is complete (job 2: ddp makes no sense here).",
        ),
        (
            {"times_s": (0.2, 0.2, 0.2), "verdict": {"too_noisy": True}},
            f"{BEST} is slower, and its verdict is that the step "
            "is too noisy to name a cause.",
        ),
    ],
    ids=["all", "slower", "spread", "skipped", "noisy"],
)  # fmt: skip
def test_the_sentence_names_the_largest_world_size_worth_using(
    tmp_path: Path, four: dict[str, Any], sentence: str
) -> None:
    table = read_table(scaling_sweep(tmp_path, **four))
    assert table.sentences == (sentence,)
    assert table.advice[0].job == (2 if four is FASTER else 1)


@pytest.mark.parametrize(("time_s", "used"), [(0.2 / 1.049, 1), (0.2 / 1.051, 2)])
def test_more_ranks_are_worth_using_from_five_per_cent_on(tmp_path: Path, time_s: float, used: int) -> None:
    write_sweep_file(tmp_path)
    write_job(tmp_path, 0, "single", 1, (0.2, 0.2))
    write_job(tmp_path, 1, "ddp", 2, (time_s, time_s), verdict={"cause": "no_overlap"})
    table = read_table(tmp_path)
    assert table.advice[0].world_size == used
    if used == 1:
        assert table.sentences[0] == (
            "Use 1 rank with single, microbatches=1; with 2 ranks the best plan (ddp, microbatches=1) gives "
            "only 4.9 % more samples a second, and its verdict is no_overlap."
        )


def test_a_slow_world_size_below_does_not_hide_a_larger_one_that_pays(tmp_path: Path) -> None:
    write_sweep_file(tmp_path)
    write_job(tmp_path, 0, "single", 1, (0.2, 0.2))
    write_job(tmp_path, 1, "ddp", 2, (0.25, 0.25))
    write_job(tmp_path, 2, "ddp", 4, (0.1, 0.1))
    write_job(tmp_path, 3, "ddp", 8, (0.1, 0.1))
    assert read_table(tmp_path).sentences[0].startswith("Use 4 ranks with ddp, microbatches=1: 2.00 times")


def test_ranks_that_share_cores_are_told(tmp_path: Path) -> None:
    table = read_table(scaling_sweep(tmp_path, cores=2))
    assert table.remarks == (
        "Jobs with 4 ranks shared 2 cores: their times tell about taking turns, not about so many "
        "processors.",
    )


def test_as_many_ranks_as_cores_share_none(tmp_path: Path) -> None:
    assert read_table(scaling_sweep(tmp_path, cores=4)).remarks == ()


def test_each_problem_has_its_own_sentence_places_and_speedup(tmp_path: Path) -> None:
    write_sweep_file(tmp_path, "running")
    for number, (dim, ranks, time_s) in enumerate([(64, 1, 0.2), (64, 2, 0.1), (128, 1, 0.4), (128, 2, 0.5)]):
        write_job(
            tmp_path,
            number,
            "ddp",
            ranks,
            (time_s, time_s),
            swept={"model.hidden_dim": str(dim), "strategy.bucket_mb": "1"},
            config={"model": {"name": "mlp", "hidden_dim": dim}},
        )
    lost = {"model.hidden_dim": "128", "strategy.bucket_mb": "2"}
    write_job(tmp_path, 4, "ddp", 4, state="failed", reason="boom", swept=lost)
    table = read_table(tmp_path)
    rows = by_number(tmp_path)
    assert [rows[number]["place"] for number in range(5)] == [2, 1, 1, 2, None]
    assert [rows[number]["problem"] for number in range(5)] == [0, 0, 1, 1, 1]
    assert rows[3]["speedup"] == pytest.approx(0.8)
    assert table.sentences == (
        "So far: model.hidden_dim=64: Use 2 ranks with ddp, microbatches=1, bucket_mb=1: 2.00 times one rank "
        "(1.00 efficiency); no more ranks were tried.",
        "So far: model.hidden_dim=128: Use 1 rank with ddp, microbatches=1, bucket_mb=1; with 2 ranks the "
        "best plan (ddp, microbatches=1, bucket_mb=1) is slower, and its verdict names no cause, its wall is "
        "compute.",
    )


def test_what_a_naive_pipeline_runs_is_one_microbatch(tmp_path: Path) -> None:
    write_sweep_file(tmp_path)
    strategy = {"name": "pipeline", "microbatches": 4, "schedule": "naive"}
    swept = {"strategy.schedule": "naive"}
    write_job(tmp_path, 0, "pipeline", 2, (0.1,), config={"strategy": strategy}, swept=swept)
    row = by_number(tmp_path)[0]
    assert (row["microbatches"], row["schedule"]) == (1, "naive")
    assert plan_text(row) == "pipeline, microbatches=1, schedule=naive"


def test_a_job_that_never_started_has_its_plan_from_its_overrides(tmp_path: Path) -> None:
    write_sweep_file(tmp_path, "failed")
    swept = {"strategy.microbatches": "8"}
    write_job(tmp_path, 0, "pipeline", 4, state="skipped", reason="No.", swept=swept)
    table = read_table(tmp_path)
    row = table.rows[0]
    assert (row["strategy"], row["world_size"], row["microbatches"]) == ("pipeline", 4, 8)
    assert (row["place"], row["problem"], row["steps"], row["note"]) == (None, None, 0, None)
    assert table.sentences == ("No job got as far as its configuration: there is nothing to compare.",)


@pytest.mark.parametrize("damage", ["cut", "garbage", "short", "gone"])
def test_a_job_whose_rows_are_damaged_is_not_ranked(tmp_path: Path, damage: str) -> None:
    path = next(scaling_sweep(tmp_path).glob("1-*")) / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    if damage == "gone":
        path.unlink()
    else:
        last = {"cut": lines[3][:20], "garbage": "{,\n", "short": ""}[damage]
        path.write_text("".join(lines[:3]) + last)
    row = by_number(tmp_path)[1]
    assert row["place"] is None and row["speedup"] is None
    assert row["samples_per_s"] == (None if damage == "gone" else 1125)  # of 1250 and 1000
    assert row["note"].startswith("metrics.jsonl")
    assert read_table(tmp_path).sentences[0].startswith("Use 4 ranks")


@pytest.mark.parametrize("name", ["summary.json", "verdict.json", "config.yaml"])
def test_a_missing_file_is_noted_and_costs_what_it_would_have_said(tmp_path: Path, name: str) -> None:
    (next(scaling_sweep(tmp_path).glob("1-*")) / name).unlink()
    row = by_number(tmp_path)[1]
    assert row["note"].startswith(f"{name} is missing: ")
    assert row["samples_per_s"] == 1000
    assert (row["cause"] is None) == (name == "verdict.json")
    assert (row["batch_size"] is None) == (name == "config.yaml")
    assert row["place"] == 2


def test_a_job_that_runs_has_the_numbers_that_it_got_to(tmp_path: Path) -> None:
    scaling_sweep(tmp_path)
    path = write_job(tmp_path, 3, "ddp", 2, (0.1, 0.1), state="running") / "metrics.jsonl"
    with path.open("a") as file:
        file.write('{"step": 3, "is_w')
    row = by_number(tmp_path)[3]
    assert (row["steps"], row["samples_per_s"], row["place"], row["note"]) == (3, 1000, None, None)


def test_values_that_are_no_numbers_are_null(tmp_path: Path) -> None:
    scaling_sweep(tmp_path)
    nan = float("nan")
    write_job(tmp_path, 3, "ddp", 2, (0.1, 0.1), state="failed", reason="loss is nan at step 2", loss=nan)
    verdict = {"cause": 3, "sentence": None, "predicted_step_time_s": nan, "too_noisy": "yes"}
    write_job(tmp_path, 4, "ddp", 2, (0.1, 0.1), bytes_sent=nan, compute_s="1", verdict=verdict)
    rows = by_number(tmp_path)
    assert (rows[3]["loss"], rows[3]["reason"], rows[3]["place"]) == (None, "loss is nan at step 2", None)
    for key in ("bytes_sent", "compute_s", "cause", "verdict", "predicted_step_time_s", "too_noisy"):
        assert rows[4][key] is None, key
    json.loads(json_text(read_table(tmp_path)), parse_constant=pytest.fail)


def test_what_a_try_left_behind_is_no_job_and_a_damaged_record_is_named(tmp_path: Path) -> None:
    scaling_sweep(tmp_path)
    job = next(tmp_path.glob("1-*"))
    job.rename(job.with_name(job.name + "~1"))
    assert sorted(by_number(tmp_path)) == [0, 2]
    (next(tmp_path.glob("2-*")) / "job.json").write_text("{")
    with pytest.raises(InputError, match=r"job\.json is damaged"):
        read_table(tmp_path)


def test_a_sweep_without_jobs_says_so(tmp_path: Path) -> None:
    write_sweep_file(tmp_path, "running")
    assert read_table(tmp_path).sentences == ("The sweep has no job yet.",)


def test_csv_and_json_hold_the_same(tmp_path: Path) -> None:
    table = read_table(scaling_sweep(tmp_path))
    lines = list(csv.DictReader(io.StringIO(csv_text(table))))
    record = json.loads(json_text(table))
    assert record == json.loads(json.dumps(to_json(table)))
    assert (
        [line["number"] for line in lines]
        == [str(row["number"]) for row in record["rows"]]
        == ["2", "1", "0"]
    )
    assert (lines[1]["swept/world_size"], lines[1]["samples_per_s"], lines[1]["bytes_sent"]) == (
        "2",
        "1000.0",
        "",
    )
    assert record["problems"][0] == {
        "number": 0,
        "label": "",
        "sentence": record["sentences"][0],
        "world_size": 4,
        "job": 2,
        "one_rank_job": 0,
    }


def test_the_page_of_sweeps_defines_every_column_as_the_code_does(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "sweeps.md").read_text(encoding="utf-8")
    lines = re.findall(r"^\| `(\w+)` \| (.*?) ?\| (.*?) ?\| (.*) \|$", page, re.MULTILINE)
    assert lines == [tuple(column) for column in COLUMNS]
    row = by_number(scaling_sweep(tmp_path))[0]
    assert list(row) == [column.key for column in COLUMNS]
    keys = set(to_json(read_table(tmp_path))) - {"schema"}
    keys |= set(to_json(read_table(tmp_path))["problems"][0]) - {"number"}
    assert keys <= set(re.findall(r"`(\w+)`", page[page.index("## table.json") :]))

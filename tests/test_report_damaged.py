"""Whatever is missing or damaged in a run's folder is named in its report, which is made all the same."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.report_run import FILES, SUMMARY, TRACE, VERDICT, row, words, write_run
from trainer.report import read_run
from trainer.report_figures import figures
from trainer.report_page import write_report


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages without the five megabytes of plotly.js, which no test here runs."""
    monkeypatch.setattr("trainer.report_page._plotly_script", lambda: "0;")


@pytest.mark.parametrize("name", [*FILES])
def test_a_missing_file_is_named_and_the_rest_is_there(tmp_path: Path, name: str) -> None:
    told = words(write_report(write_run(tmp_path, **{name.replace(".", "_"): None})))
    assert f"{name} is missing: " in told
    assert "could not be made" not in told
    assert ("The wall is" in told) == (name != "verdict.json")
    assert ("all_reduce weight gradient" in told) == (name != "summary.json")


@pytest.mark.parametrize("name", [*FILES])
@pytest.mark.parametrize("damage", ["cut", "other"])
def test_a_damaged_file_is_named(tmp_path: Path, name: str, damage: str) -> None:
    write_run(tmp_path)
    text = FILES[name]
    cut = text[: len(text) // 2].replace("overlap: false", "overlap: [")
    (tmp_path / name).write_bytes(cut.encode() if damage == "cut" else b"[\xff\xfe 1, 2")
    told = words(write_report(tmp_path))
    if name == "metrics.jsonl" and damage == "cut":
        assert "metrics.jsonl is cut within its last line" in told
    else:
        assert re.search(rf"{re.escape(name)} (is damaged|has no whole row)", told), told
    assert "could not be made" not in told


def test_rows_after_a_damaged_line_are_left_out(tmp_path: Path) -> None:
    lines = FILES["metrics.jsonl"].splitlines(keepends=True)
    write_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text(lines[0] + lines[1] + "{,\n" + lines[3])
    assert [one["step"] for one in read_run(tmp_path).rows] == [0, 1]
    assert "metrics.jsonl is damaged after row 2" in words(write_report(tmp_path))


STRANGE: list[Any] = [
    None,
    True,
    -1,
    1e400,
    10**400,
    "text",
    "\ud800",
    [],
    {},
    [None, 3, {}],
    {"a": {"b": []}},
]


@pytest.mark.parametrize("value", STRANGE, ids=lambda value: ascii(value)[:12])
def test_values_of_any_shape_are_survived(tmp_path: Path, value: Any) -> None:
    def spoiled(record: dict[str, Any]) -> str:
        return json.dumps({**dict.fromkeys(record, value), "schema": 1})

    changes = {
        "summary_json": spoiled(SUMMARY),
        "verdict_json": spoiled(VERDICT),
        "trace_json": spoiled(TRACE),
        "link_curve_json": json.dumps({"schema": 1, "measured": value, "curves": value}),
    }
    write_run(tmp_path, **changes)
    (tmp_path / "metrics.jsonl").write_text((spoiled(row(0)) + "\n") * 2)
    told = words(write_report(tmp_path))
    assert "could not be made" not in told
    summary = {
        **SUMMARY,
        "bytes_by_operation": [value, {"rank": 0, "bytes_sent": value}],
        "wire": [{"rank": 0}],
    }
    verdict = {
        **VERDICT,
        "evidence": [{"value": value, "name": value, "unit": value}],
        "causes": [{"cause": value}],
    }
    trace = {"traceEvents": [value, {**TRACE["traceEvents"][2], "args": value}, {"ph": "X", "pid": value}]}
    write_run(
        tmp_path,
        summary_json=json.dumps(summary),
        verdict_json=json.dumps(verdict),
        trace_json=json.dumps(trace),
    )
    assert "could not be made" not in words(write_report(tmp_path))


def test_a_run_of_one_step_says_that_medians_are_missing(tmp_path: Path) -> None:
    write_run(tmp_path, summary_json=None, verdict_json=None, trace_json=None)
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row(0)) + "\n")
    told = words(write_report(tmp_path))
    assert "no step after warm-up: medians are missing" in told
    assert "1 step · did not end in order, or is still running" in told
    assert "summary.json is missing: the run did not end in order" in told
    assert "steps" in figures(read_run(tmp_path))


def test_an_interrupted_run_has_medians_of_its_rows(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path, summary_json=None))
    assert run.median("step_time_s") == pytest.approx(0.012)
    assert run.quartiles("step_time_s") == pytest.approx((0.011, 0.013))

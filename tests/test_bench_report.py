"""What a bench says of its rows: files, table, footer, gate and plot, from measurements made by hand."""

from __future__ import annotations

import csv
import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from collectives.subject import Case
from tests.bench_rows import AGAINST, measured
from trainer.bench_config import BenchRun
from trainer.bench_plot import make_figure, series, write_plot
from trainer.bench_report import BenchTable, footer, make_report, markdown, write
from trainer.bench_rows import Row, failures, make_row, totals

FACTS: Row = {
    "command": "python scripts/bench.py",
    "environment": {
        "torch": "2.13.0",
        "python": "3.11.7",
        "git_commit": "abc",
        "processor": "a processor",
        "cpu_count": 2,
    },
    "git_commit": "abc",
    "load_average": 0.25,
    "backend": "gloo",
    "device": "cpu",
    "world_size": 2,
    "cluster": "local",
    "bench": {"warmup": 5, "iterations": 20, "against": "native", "rounds": 20},
    "cases": 3,
}


def row(case: Case, against: Row | None = None, **sides: Row | None) -> Row:
    found = make_row(case, sides, against)
    assert found is not None
    return found


def rows() -> list[Row]:
    small = Case("all_reduce", 4000)
    large = Case("all_reduce", 16000)
    slow = {"size_bytes": 16000, "count": 4000, "time_s": 16e-6, "algbw_GBps": 1.0, "busbw_GBps": 1.0}
    barrier = {"size_bytes": 0, "count": 0, "algbw_GBps": None, "busbw_GBps": None, "wire_over_least": None}
    return [
        row(small, AGAINST, out_of_place=measured(), in_place=measured(time_s=1e-6, busbw_GBps=4.0)),
        row(large, out_of_place=measured(**slow), in_place=measured(**slow)),
        row(Case("barrier", 0), out_of_place=measured(**barrier), in_place=None),
    ]


def bench(**keys: Any) -> Any:
    return BenchRun.from_mapping({"bench": keys}, "/nowhere").bench


def test_a_row_holds_both_placements_and_null_for_what_has_no_meaning() -> None:
    first, _, barrier = rows()
    assert first["in_place"]["busbw_GBps"] == 4.0
    assert (first["dtype"], first["reduction"], first["root"]) == ("float32", "sum", None)
    assert (first["algorithm_asked"], first["algorithm"]) == ("auto", "ring")
    assert (barrier["dtype"], barrier["reduction"], barrier["in_place"]) == (None, None, None)
    scatter = row(Case("scatter", 4000, root=1), out_of_place=measured())
    assert (scatter["reduction"], scatter["root"]) == (None, 1)
    assert make_row(Case("send_recv", 4000), {"in_place": None}, None) is None


def test_totals_are_over_rows_and_placements() -> None:
    # Bus bandwidths 2, 4, 1 and 1; the barrier has none.
    assert totals(rows()) == {
        "measurements": 5,
        "checked": 5,
        "wrong": 0,
        "averaged": 4,
        "average_busbw_GBps": 2.0,
    }
    unchecked = [row(Case("barrier", 0), out_of_place=measured(wrong=None, busbw_GBps=None))]
    assert totals(unchecked) == {
        "measurements": 1,
        "checked": 0,
        "wrong": None,
        "averaged": 0,
        "average_busbw_GBps": None,
    }


def test_wrong_values_and_a_missed_gate_name_the_row() -> None:
    wrong = row(Case("reduce", 4000, "int32", "max", 1), in_place=measured(wrong=1234, busbw_GBps=0.1))
    assert failures([wrong], bench(operations=["all_reduce"])) == [
        "reduce of 4,000 bytes (int32, max, root 1, ring, in place) gave 1,234 wrong values"
    ]
    # Only the largest size counts: at 4,000 bytes there are 2 GB/s, at 16,000 one.
    assert failures(rows(), bench(min_busbw=1.0)) == []
    assert failures(rows(), bench(min_busbw={"all_reduce": 1.5})) == [
        "all_reduce of 16,000 bytes (float32, sum, ring, out of place) has a bus bandwidth of 1 GB/s, "
        "below bench.min_busbw=1.5",
        "all_reduce of 16,000 bytes (float32, sum, ring, in place) has a bus bandwidth of 1 GB/s, "
        "below bench.min_busbw=1.5",
    ]
    assert failures(rows(), bench(min_busbw={"all_gather": 1.5})) == []


def test_files_hold_what_was_measured(tmp_path: Path) -> None:
    report = make_report(FACTS, rows(), [], "finished")
    write(report, tmp_path)
    kept = json.loads((tmp_path / "bench.json").read_text())
    assert kept["schema"] == 1
    assert kept["environment"]["git_commit"] == "abc"
    assert kept["rows"][0]["out_of_place"]["wire_over_least"] == 1.025
    assert kept["rows"][0]["against"]["ratio"] == 0.5
    assert kept["totals"]["average_busbw_GBps"] == 2.0

    lines = list(csv.DictReader(io.StringIO((tmp_path / "bench.csv").read_text())))
    assert [line["placement"] for line in lines] == [*["out_of_place", "in_place"] * 2, "out_of_place"]
    assert {key: lines[1][key] for key in ("operation", "time_s", "busbw_GBps", "ratio")} == {
        "operation": "all_reduce",
        "time_s": "1e-06",
        "busbw_GBps": "4.0",
        "ratio": "0.5",
    }
    assert (lines[4]["dtype"], lines[4]["busbw_GBps"], lines[4]["ratio"]) == ("", "", "")

    page = (tmp_path / "bench.md").read_text()
    assert (
        "| 4000 | 1000 | float32 | sum | -1 | 2.0 | 2.000 | 2.000 | 0 | 1.0 | 2.000 | 4.000 | 0 | ring "
        "| 1.025 | 2.0 | 3.0 | 4.0 | 1.0 |"
    ) in page
    assert "| 4000 | float32 | sum | ring | 2.0 | 4.0 | 0.500 | 0.400 to 0.600 | 0.1 |" in page
    assert "| 0 | 0 | none | none | -1 | 2.0 | - | - | 0 | - | - | - | - | ring | - |" in page


def test_the_footer_states_conventions_and_closes_as_nccl_tests_does() -> None:
    lines = footer(make_report(FACTS, rows(), [], "finished"))
    assert "decimal GB/s per direction" in " ".join(lines)
    assert "nccl-tests" in " ".join(lines)
    assert lines[-2:] == [
        "wrong values: 0 in 5 measurements OK",
        "average bus bandwidth: 2 GB/s over 4 measurements",
    ]
    wrong = [row(Case("reduce", 4000), out_of_place=measured(wrong=3))]
    lines = footer(make_report(FACTS, wrong, ["a sentence"], "interrupted"))
    assert "interrupted: 1 of 3 cases are here" in lines
    assert "wrong values: 3 in 1 measurements FAILED" in lines
    assert "- failed: a sentence" in markdown(make_report(FACTS, wrong, ["a sentence"], "finished"))


def test_the_table_prints_nccl_tests_columns_and_then_more() -> None:
    text = io.StringIO()
    table = BenchTable(Console(file=text, width=80))
    for one in rows():
        table.show(one)
    lines = text.getvalue().splitlines()
    assert lines[1] == "all_reduce"
    assert lines[2].split() == ["out-of-place", "in-place"]
    assert (
        lines[3].split()
        == (
            "size count type redop root time algbw busbw #wrong time algbw busbw #wrong "
            "algorithm wire/least p50 p95 p99 min rank"
        ).split()
    )
    assert (
        lines[4].split()
        == ("(B) (elements) (us) (GB/s) (GB/s) (us) (GB/s) (GB/s) (us) (us) (us) (us)").split()
    )
    assert (
        lines[5].split()
        == ("4000 1000 float32 sum -1 2.0 2.000 2.000 0 1.0 2.000 4.000 0 ring 1.025 2.0 3.0 4.0 1.0").split()
    )
    assert "ratio 0.500" in lines[6]
    assert lines[7].split()[0] == "16000"
    assert [line for line in lines if line.strip() in ("all_reduce", "barrier")] == ["all_reduce", "barrier"]
    # One under the other, however narrow the terminal.
    assert len({len(lines[number]) for number in (3, 5, 7)}) == 1


def test_the_plot_has_a_line_for_each_operation_and_algorithm(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    direct = row(
        Case("all_reduce", 16000, algorithm="native"),
        in_place=measured(size_bytes=16000, busbw_GBps=3.0, time_s=5e-6),
    )
    report = make_report(FACTS, [*rows(), direct], [], "finished")
    figure = make_figure(report).to_dict()
    drawn = {(line["name"], line["yaxis"]): line for line in figure["data"]}
    assert list(drawn) == [
        ("all_reduce auto", "y"),
        ("all_reduce auto", "y2"),
        ("all_reduce native", "y"),
        ("all_reduce native", "y2"),
    ]
    assert list(drawn["all_reduce auto", "y"]["x"]) == [4000, 16000]
    assert list(drawn["all_reduce auto", "y"]["y"]) == [2.0, 1.0]
    assert list(drawn["all_reduce auto", "y2"]["y"]) == [2e-6, 16e-6]
    assert list(drawn["all_reduce native", "y"]["y"]) == [3.0]  # in place, where there is no other
    assert figure["layout"]["xaxis"]["type"] == figure["layout"]["xaxis2"]["type"] == "log"
    write_plot(report, tmp_path / "bandwidth.html")
    page = (tmp_path / "bandwidth.html").read_text()
    assert '<script src="http' not in page and "all_reduce native" in page


def test_dtypes_join_a_lines_name_where_there_are_several() -> None:
    both = [row(Case("all_reduce", 4000, dtype), out_of_place=measured()) for dtype in ("float32", "int32")]
    assert [name for _, name in series(both)] == ["all_reduce auto float32", "all_reduce auto int32"]


def test_a_missing_plotly_is_an_import_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    with pytest.raises(ImportError):
        write_plot(make_report(FACTS, rows(), [], "finished"), tmp_path / "bandwidth.html")
    assert not list(tmp_path.iterdir())

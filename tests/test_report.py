"""A report says what a folder holds, to the number, and what it lacks, in words."""

from __future__ import annotations

import json
import re
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from tests.report_run import FILES, SUMMARY, VERDICT, event, markup, table_rows, words, write_run
from trainer.report import read_run
from trainer.report_cli import main
from trainer.report_compare import MEDIANS, write_comparison
from trainer.report_figures import figures
from trainer.report_page import write_report
from trainer.report_summary import NUMBERS
from trainer.report_text import NONE, seconds, size
from trainer.report_timeline import timeline
from trainer.report_trace import Bar, StepTrace, read_trace, thinned


def test_a_whole_run_is_told_from_its_verdict_to_its_environment(tmp_path: Path) -> None:
    path = write_report(write_run(tmp_path / "whole"))
    told = words(path)
    assert path == tmp_path / "whole" / "report.html"
    for sentence in (
        "strategy ddp · model mlp · 2 ranks · gloo on cpu · 4 steps · finished",
        "The wall is the link ; its cause is no overlap",
        "Half of the step waits for the link & <b>nothing</b> hides it.",
        "The change to make: strategy.overlap=true",
        "a step takes 12 ms quartiles 11 ms to 13 ms, 3 steps",
        "without the cause it would take 8.4 ms",
        "that gives back 3.6 ms 30.0 % of the step",
        "12.3 ms +2.5 % of the measured one",
        "no bytes of the wire in step 1",
        "overlap and bubble are those of rank 0, which sends most.",
        "Step 2: its timeline 10 operations on 2 ranks in 9 ms",
        "add up to those of all 4 rows of metrics.jsonl: 4,000 B",
        "The longest step of the warm-up, 90 ms, is cut off at the top.",
        "Not measured in this run:",
        "world_size: 2",
    ):
        assert sentence in told, sentence
    assert (
        told.index("The wall is")
        < told.index("In numbers")
        < told.index("Step 2")
        < told.index("Bytes, four")
    )
    assert "What is missing" not in told and "Too noisy" not in told
    assert ["exposed_comm_s", "2.4 ms", "seen by the main thread"] in table_rows(path)
    assert [
        "no overlap",
        "3.6 ms (30.0 %)",
        "8.4 ms",
        "strategy.overlap=true",
        "transfers under compute",
    ] in table_rows(path)
    assert ["slow rank, rank 1", "1 ms", NONE, NONE, NONE] in table_rows(path)


def test_the_bytes_are_shown_four_ways_and_the_table_sums_to_the_headline(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path))
    path = write_report(tmp_path)
    # rank 0: least (2360 + 1560) / 4; wire less framing (4400 - 388) / 4; 4012 / 4000 is 0.3 % above
    assert ["0", "980", "1,000", "1,000", "1,003", "388", "4", "+0.300 %"] in table_rows(path)
    assert ["1", "890", "900", "900", "900", "388", "4", "+0.000 %"] in table_rows(path)
    assert ["sum", "", "8", "3,920", "4,000", "4,000", "4,000"] in table_rows(path)
    assert ["sum", "", "4", "3,560", "3,600", "3,600", "3,600"] in table_rows(path)
    drawn = {trace.name: list(trace.y) for trace in figures(run)["bytes"].data}
    assert drawn == {
        "least": [980, 890],
        "predicted": [1000, 900],
        "sent": [1000, 900],
        "wire less framing": [1003, 900],
    }


def test_a_table_that_does_not_sum_to_the_rows_says_by_how_much(tmp_path: Path) -> None:
    table = [{**entry, "bytes_sent": entry["bytes_sent"] + 5} for entry in SUMMARY["bytes_by_operation"]]
    path = write_report(
        write_run(tmp_path, summary_json=json.dumps({**SUMMARY, "bytes_by_operation": table}))
    )
    assert "4,010 B, but the 4 rows of metrics.jsonl to 4,000 B: they differ by 10 B" in words(path)


def test_the_timeline_draws_the_last_whole_step_with_a_trace_for_each_kind(tmp_path: Path) -> None:
    figure = figures(read_run(write_run(tmp_path)))["timeline"]
    traces = {trace.name: trace for trace in figure.data}
    assert list(traces) == [
        "forward",
        "dW",
        "transfer that compute waits for",
        "waiting for a late peer",
        "transfer",
    ]
    # milliseconds from the step's first instant; both ranks in one trace, transfers a lane lower
    assert list(traces["dW"].base) == [4.0, 4.0] and list(traces["dW"].x) == [2.0, 2.0]
    assert list(traces["forward"].y) == [0.0, 2.45] and list(traces["transfer"].y) == [1.0, 3.45]
    assert list(traces["forward"].text) == ["3", "3"]
    assert traces["waiting for a late peer"].marker.pattern.shape == "/"
    assert traces["transfer"].hovertext[1] == (
        "all_reduce &lt;i&gt;<br>rank 1 · transfer<br>2.5 ms from 6 ms<br>1,000 B (1 kB) · ring · world"
    )


def test_the_step_s_messages_stand_on_the_link_curve(tmp_path: Path) -> None:
    curve, messages = figures(read_run(write_run(tmp_path)))["link"].data
    assert (curve.name, list(curve.x), list(curve.y)) == ("all_reduce on 2", [100, 10_000], [1.0, 4.0])
    assert (list(messages.x), list(messages.y)) == ([1000, 1000], [2.5, 2.5])


def test_a_report_looks_for_no_number_that_a_run_cannot_have(tmp_path: Path) -> None:
    table = (Path(__file__).parents[1] / "docs/metrics.md").read_text(encoding="utf-8")
    known = set(re.findall(r"^\| `(\w+)` \|", table, re.M))
    assert {key for key, *_ in (*NUMBERS, *MEDIANS)} <= known
    assert "mfu" not in words(write_report(write_run(tmp_path)))


def test_the_time_split_is_the_median_of_the_steady_rows(tmp_path: Path) -> None:
    split = read_run(write_run(tmp_path)).time_split()
    expected = {
        "compute_s": 0.006,
        "exposed_comm_s": 0.0024,
        "wait_s": 0.0012,
        "idle_s": 0.0,
        "host_s": 0.0024,
        "data_s": 0.0006,
    }
    assert split == {0: pytest.approx(expected), 1: pytest.approx(expected)}


def test_the_parts_of_a_step_stack_up_to_the_step_and_data_stands_once(tmp_path: Path) -> None:
    """A step of 12 ms of which the host has 2.4, with 0.6 of waiting for data in them."""
    bars = {trace.name: list(trace.x) for trace in figures(read_run(write_run(tmp_path)))["time_split"].data}
    expected = {"compute": 6, "exposed comm": 2.4, "wait": 1.2, "idle": 0, "host": 1.8, "data": 0.6}
    assert bars == {name: pytest.approx([value] * 2) for name, value in expected.items()}
    assert sum(values[0] for values in bars.values()) == pytest.approx(12)
    # without the wait for data there is nothing to take off
    rows = [json.loads(line) for line in FILES["metrics.jsonl"].splitlines()]
    lines = [{key: value for key, value in own.items() if not key.endswith("data_s")} for own in rows]
    text = "".join(json.dumps(own) + "\n" for own in lines)
    run = read_run(write_run(tmp_path / "no_data", metrics_jsonl=text))
    bars = {trace.name: list(trace.x) for trace in figures(run)["time_split"].data}
    assert bars["host"] == pytest.approx([2.4, 2.4]) and "data" not in bars


def test_texts_of_the_files_stay_texts(tmp_path: Path) -> None:
    page = write_report(write_run(tmp_path)).read_text(encoding="utf-8")
    assert "<script>alert" not in page and "<b>nothing</b>" not in page
    assert "all_reduce &lt;script&gt;alert(1)&lt;/script&gt;" in page
    assert "note: &lt;script&gt;alert(2)&lt;/script&gt;" in page
    assert "<i>" not in page[page.index('id="figures"') : page.index("</script>", page.index('id="figures"'))]


def test_the_page_names_no_address_and_forbids_every_request(tmp_path: Path) -> None:
    page = markup(write_report(write_run(tmp_path)))
    assert "default-src 'none'" in page
    assert not re.findall(r'(?:src|href)=(?!"data:)', page)
    assert "http:" not in page and "https:" not in page


def test_a_verdict_that_noise_forbids_says_so(tmp_path: Path) -> None:
    noisy = {**VERDICT, "too_noisy": True, "cause": "none", "override": None, "missing": []}
    told = words(write_report(write_run(tmp_path, verdict_json=json.dumps(noisy))))
    assert "Too noisy to tell. The median is sure to 500 µs." in told
    assert "The wall is the link ; too noisy to name a cause" in told
    assert "no cause to remove" not in told and "The change to make" not in told
    quiet = {**noisy, "too_noisy": False}
    told = words(write_report(write_run(tmp_path, verdict_json=json.dumps(quiet))))
    assert "The wall is the link ; there is no cause to remove" in told and "Too noisy" not in told


def test_a_verdict_that_could_not_judge_all_does_not_say_that_all_is_well(tmp_path: Path) -> None:
    partly = {
        **VERDICT,
        "cause": "none",
        "override": None,
        "missing": ["strategy.microbatches=8: not measured"],
    }
    told = words(write_report(write_run(tmp_path, verdict_json=json.dumps(partly))))
    assert "The wall is the link ; no cause was found" in told and "strategy.microbatches=8" in told


def test_a_verdict_that_judged_nothing_says_so(tmp_path: Path) -> None:
    unjudged = {**VERDICT, "cause": None, "override": None, "missing": ["2 steps after warm-up"]}
    told = words(write_report(write_run(tmp_path, verdict_json=json.dumps(unjudged))))
    assert "The wall is the link ; no cause could be looked for" in told and "2 steps after warm-up" in told


def test_one_rank_has_no_link_and_nothing_is_missing_for_it(tmp_path: Path) -> None:
    alone = {**SUMMARY, "environment": {"world_size": 1}, "bytes_by_operation": [], "wire": []}
    path = write_report(write_run(tmp_path, summary_json=json.dumps(alone), link_curve_json=None))
    assert "One rank sends nothing." in words(path) and "One rank has no link." in words(path)
    assert "What is missing" not in words(path)


def test_without_plotly_the_page_has_all_but_its_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("plotly", "plotly.graph_objects", "plotly.offline", "plotly.subplots"):
        monkeypatch.setitem(sys.modules, name, None)
    path = write_report(write_run(tmp_path))
    assert "plotly is not installed" in words(path) and "The wall is the link" in words(path)
    assert path.stat().st_size < 100_000


def test_two_runs_stand_side_by_side_with_their_ratio(tmp_path: Path) -> None:
    other = {
        **SUMMARY,
        "steady": {
            "step_time_s": {"median": 0.009},
            "bytes_sent": {"median": 2500},
            "overlap": {"median": 0.5},
        },
    }
    config = FILES["config.yaml"].replace("overlap: false", "overlap: true")
    verdict = {**VERDICT, "wall": "compute", "cause": "none", "override": None}
    first = write_run(tmp_path / "slow")
    second = write_run(
        tmp_path / "fast",
        summary_json=json.dumps(other),
        config_yaml=config,
        verdict_json=json.dumps(verdict),
    )
    path = write_comparison(first, second)
    assert path == first / "report.html" and not (second / "report.html").exists()
    assert ["median", "slow", "fast", "ratio"] in table_rows(path)
    assert ["step time", "12 ms", "9 ms", "0.750"] in table_rows(path)
    assert ["bytes, sent", "1 kB", "2.5 kB", "2.500"] in table_rows(path)
    assert ["overlap", NONE, "50.0 %", NONE] in table_rows(path)
    assert ["wall", "link", "compute"] in table_rows(path)
    assert ["strategy.overlap", "False", "True"] in table_rows(path)
    assert "The ratio is fast / slow." in words(path)
    assert words(path).index("Side by side") < words(path).index("The wall is the link")
    page = path.read_text(encoding="utf-8")
    specs = json.loads(re.search(r'id="figures">(.*?)</script>', page)[1])  # type: ignore[index]
    assert [trace["name"] for trace in specs["step_times"]["data"]] == ["slow", "fast"]


def test_bytes_on_the_wire_stand_side_by_side_by_the_step(tmp_path: Path) -> None:
    """4800 bytes in four steps are 1200 a step, whatever other runs read at once; warm-up is left out."""
    rows = [json.loads(line) for line in FILES["metrics.jsonl"].splitlines()]

    def text(*readings: tuple[int | None, int | None]) -> str:
        found = zip(rows, readings, strict=True)
        every = ({**row, "bytes_wire": sent, "wire_steps": steps} for row, (sent, steps) in found)
        return "".join(json.dumps(row) + "\n" for row in every)

    steady = {**SUMMARY["steady"], "bytes_wire": {"median": 4800}}
    first = write_run(
        tmp_path / "rarely",
        metrics_jsonl=text((None, None), (None, None), (None, None), (4800, 4)),
        summary_json=json.dumps({**SUMMARY, "steady": steady}),
    )
    second = write_run(
        tmp_path / "often",
        metrics_jsonl=text((9999, 1), (1800, 1), (None, 1), (3600, 2)),
    )
    cells = ["bytes, wire with framing", "1.2 kB", "1.8 kB", "1.500"]
    assert cells in table_rows(write_comparison(first, second))


def test_bars_narrower_than_a_pixel_are_joined_and_no_time_is_lost() -> None:
    # of every 10 µs, 8 are compute and 2 launch
    bars = []
    for k in range(4_000):
        bars += [
            Bar(0, 0, f"compute {k}", "compute", None, k * 1e-5, 8e-6, bytes=1),
            Bar(0, 0, f"launch {k}", "launch", None, k * 1e-5 + 8e-6, 2e-6),
        ]
    joined, window_s = thinned(bars, 0.04)
    assert len(joined) <= 6000 and 0 < window_s < 0.04 / 500
    assert sum(bar.count for bar in joined) == 8_000 and sum(bar.bytes or 0 for bar in joined) == 4_000
    for kind, time_s in (("compute", 0.032), ("launch", 0.008)):
        assert sum(bar.duration_s for bar in joined if bar.kind == kind) == pytest.approx(time_s)
    assert all(after.start_s >= bar.end_s - 1e-12 for bar, after in pairwise(joined))
    assert thinned(bars[:5000], 0.04) == (bars[:5000], 0.0)
    assert [len(trace.x) for trace in timeline(StepTrace(0, (0,), tuple(bars), None)).data] == [
        sum(bar.kind == kind for bar in joined) for kind in ("compute", "launch")
    ]


def test_a_trace_without_a_step_of_all_ranks_has_no_timeline() -> None:
    ranks = [{"ph": "M", "pid": rank, "name": "process_name"} for rank in (0, 1)]
    assert read_trace({"traceEvents": [*ranks, event(0, "a", "compute", 0, 1, 5)]}) is None
    # a step that the trace does not count among those it recorded is not drawn
    recorded = {"steps": [4]}
    events = [event(rank, "a", "compute", 10.0 * step, 1, step) for rank in (0, 1) for step in (4, 5)]
    found = read_trace({"traceEvents": events, "otherData": recorded})
    assert found is not None and found.step == 4


def test_transfers_that_overlap_are_drawn_among_transfers() -> None:
    """Each has a tid of its own in trace.json, from 1 on; all of them are the rank's second lane."""
    events = [event(0, "forward", "compute", 0, 9, 5)]
    for tid, start in ((1, 1), (2, 2), (3, 3)):
        events.append({**event(0, f"send {tid}", "transfer", start, 4, 5, bytes=8), "tid": tid})
    events.append({**event(0, "of another tool", "host", 9, 1, 5), "tid": "main"})
    found = read_trace({"traceEvents": events})
    assert found is not None
    assert {bar.name: bar.lane for bar in found.bars} == {
        "forward": 0,
        "of another tool": 0,
        "send 1": 1,
        "send 2": 1,
        "send 3": 1,
    }
    heights = {trace.name: list(trace.y) for trace in timeline(found).data}
    assert heights == {"compute": [0.0], "host": [0.0], "transfer": [1.0, 1.0, 1.0]}


def test_numbers_read_well() -> None:
    assert [seconds(value) for value in (1.5, 0.0123456, 45e-6, 0.0, None)] == [
        "1.5 s",
        "12.3 ms",
        "45 µs",
        "0 µs",
        NONE,
    ]
    assert [size(value) for value in (999, 1500, 2_500_000, 3e9)] == ["999 B", "1.5 kB", "2.5 MB", "3 GB"]


def test_the_command_line_writes_a_report_or_refuses_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run")
    assert main([str(run)]) == 0
    assert capsys.readouterr().out == f"report  {run / 'report.html'}\n"
    (tmp_path / "empty").mkdir()
    for arguments, sentence in (
        (
            [str(tmp_path / "none")],
            f"RUN={tmp_path / 'none'} is no folder; name the folder of a training run",
        ),
        ([str(tmp_path / "empty")], f"RUN={tmp_path / 'empty'} has no metrics.jsonl; name the folder"),
        ([str(run), str(tmp_path / "none")], f"OTHER={tmp_path / 'none'} is no folder; name the folder"),
        ([], "the following arguments are required: RUN; --help lists what there is"),
    ):
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert error.startswith(sentence) and error.count("\n") == 1

"""A sweep's report: the page's numbers are those of the jobs' rows, and it opens anywhere."""

from __future__ import annotations

import io
import json
import re
import statistics
import sys
from pathlib import Path

import pytest
from rich.console import Console

from tests.browser import check_readable, look_at
from tests.launched import rows_of, run_script
from tests.recompute_sweep import differences
from tests.report_run import markup, table_rows, words, write_run
from tests.sweep_folder import scaling_sweep, write_job, write_sweep_file
from tests.system import need_program
from trainer.report_cli import main
from trainer.report_text import NONE
from trainer.sweep_bars import bytes_figure, split_figure
from trainer.sweep_figures import bubble_figure, heat_figures, throughput_figure
from trainer.sweep_html import losses, split_table, unranked, verdicts
from trainer.sweep_report import print_table, write_sweep_report
from trainer.sweep_table import read_table

SENTENCE = (
    "Use 2 ranks with ddp, microbatches=1: 2.00 times one rank (1.00 efficiency); with 4 ranks the best plan "
    "(pipeline, microbatches=8) is slower, and its verdict is idle_bubble."
)


@pytest.fixture
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages without the five megabytes of plotly.js."""
    monkeypatch.setattr("trainer.report_page._plotly_script", lambda: "0;")


def whole_sweep(folder: Path) -> Path:
    """Complete jobs of four strategies, one that failed, one that was skipped and one that still runs."""
    write_sweep_file(folder, "failed", overrides=["strategy=single,<b>"])
    split = {"compute_s": [0.06, 0.07, 0.05], "host_s": 0.01, "exposed_comm_s": 0.003, "wait_s": 0.0}
    sent = {"bytes_least": 900, "bytes_predicted": 1000, "bytes_sent": [1000, 1000, 1000], "idle_s": 0.0}
    wire = {"bytes_wire": [None, None, 3600], "wire_steps": [None, None, 3]}
    sent |= {"effective_bandwidth_GBps": [1e-5, 2e-5, 3e-5], **wire}
    none = {"bytes_sent": 0, "bytes_least": 0, "bytes_predicted": 0}
    idle = {"cause": "idle_bubble", "predicted_step_time_s": 0.1, "sentence": "Stages <i>idle</i>."}
    write_job(folder, 0, "single", 1, (0.19, 0.2, 0.22), **split, **none)
    write_job(folder, 1, "ddp", 2, (0.08, 0.1, 0.125), **split, **sent)
    bubble = {"bubble_expected": 0.5, "bubble_fraction": [0.5, 0.6, 0.55]}
    write_job(folder, 2, "pipeline", 2, (0.2, 0.25, 0.3), **split, **sent, **bubble, verdict=idle)
    bubble = {"bubble_expected": 3 / 11, "bubble_fraction": [0.3, 0.35, 0.25]}
    write_job(
        folder, 3, "pipeline", 4, (0.12, 0.13, 0.14), microbatches=8, **split, **sent, **bubble, verdict=idle
    )
    write_job(folder, 4, "tensor", 2, (0.3, 0.3), state="failed", reason="Rank 1 <failed>: boom")
    write_job(folder, 5, "single", 2, state="skipped", reason="single has one rank.")
    write_job(folder, 6, "ddp", 4, (0.1, 0.1), state="running")
    return folder


def recomputed(folder: Path, key: str) -> list[float]:
    """The values of a key in the steps after warm-up, as they stand in the file."""
    return [row[key] for row in rows_of(folder) if not row["is_warmup"] and row.get(key) is not None]


def page_rows(path: Path) -> dict[str, dict[str, list[float]]]:
    """job number -> heading -> the numbers in the cell, of the table of plans."""
    section = re.search(r"<h2>Plans.*?</section>", markup(path), re.DOTALL)[0]  # type: ignore[index]
    found = {}
    for line in re.findall(r"<tr><td.*?</tr>", section, re.DOTALL):
        cells = dict(re.findall(r'data-label="(.*?)">(.*?)</td>', line, re.DOTALL))
        numbers = {
            name: [float(value) for value in re.findall(r'<data value="(.*?)"', cell)]
            for name, cell in cells.items()
        }
        found[re.sub(r"<.*?>", "", cells["job"])] = numbers
    return found


@pytest.mark.usefixtures("small_pages")
def test_every_number_of_the_page_s_table_follows_from_the_rows(tmp_path: Path) -> None:
    shown = page_rows(write_sweep_report(whole_sweep(tmp_path)))
    assert list(shown) == ["1", "3", "0", "2"]
    one_rank = statistics.median(recomputed(next(tmp_path.glob("0-*")), "samples_per_s"))
    ranks = {"0": 1, "1": 2, "2": 2, "3": 4}
    keys = {
        "samples/s": "samples_per_s",
        "bytes sent": "bytes_sent",
        "GB/s": "effective_bandwidth_GBps",
        "bubble": "bubble_fraction",
        "expected": "bubble_expected",
    }
    for number, numbers in shown.items():
        folder = next(tmp_path.glob(f"{number}-*"))
        times = sorted(recomputed(folder, "step_time_s"))
        spread = [times[1], (times[0] + times[1]) / 2, (times[1] + times[2]) / 2]
        assert numbers["step time"] == pytest.approx(spread, rel=1e-12)
        speedup = statistics.median(recomputed(folder, "samples_per_s")) / one_rank
        assert numbers["speed-up"] == pytest.approx([speedup], rel=1e-12)
        assert numbers["efficiency"] == pytest.approx([speedup / ranks[number]], rel=1e-12)
        for heading, key in keys.items():
            values = recomputed(folder, key)
            assert numbers[heading] == ([pytest.approx(statistics.median(values))] if values else []), heading
    assert differences(tmp_path) == []


@pytest.mark.usefixtures("small_pages")
def test_the_page_begins_with_the_sentence_and_tells_of_every_job(tmp_path: Path) -> None:
    path = write_sweep_report(whole_sweep(tmp_path))
    told = words(path)
    assert path == tmp_path / "report.html"
    order = [
        "sweep of 7 jobs · 4 complete · 1 failed · 1 skipped · 1 running · failed",
        SENTENCE,
        "Plans, the best first",
        "Not compared",
        "Throughput over ranks",
        "World size and microbatches",
        "Bubble over microbatches",
        "Where each job's step goes",
        "Bytes, four ways",
        "What each run says",
    ]
    places = [told.index(text) for text in order]
    assert places == sorted(places)
    assert "could not be made" not in told
    rows = table_rows(path)
    assert ["4", "failed", "tensor, microbatches=1", "2", "3", "300 ms 300 ms to 300 ms", "333"] in [
        row[:7] for row in rows
    ]
    assert ["5", "skipped", "single", "2", "0", NONE, NONE, "single has one rank"] in rows
    assert ["6", "running"] in [row[:2] for row in rows]
    assert ["1", "ddp, microbatches=1", "2", "900", "1,000", "1,000", "1,200"] in rows
    assert ["1", "ddp, microbatches=1", "2", "60 ms", "3 ms", "0 µs", "0 µs", "10 ms"] in rows
    assert "Rank 1 &lt;failed&gt;: boom" in path.read_text() and "<i>idle" not in markup(path)


@pytest.mark.usefixtures("small_pages")
def test_links_lead_to_the_jobs_reports_and_to_nothing_else(tmp_path: Path) -> None:
    page = markup(write_sweep_report(whole_sweep(tmp_path)))
    links = set(re.findall(r'(?:src|href)="(.*?)"', page)) - {"data:,"}
    names = {f"{path.parent.name}/report.html" for path in tmp_path.glob("*/report.html")}
    assert {link.replace("%3D", "=").replace("%2C", ",") for link in links} == names | {
        "table.csv",
        "table.json",
    }
    assert "default-src 'none'" in page and "http:" not in page and "https:" not in page


def test_the_figures_draw_the_table(tmp_path: Path) -> None:
    (problem,) = read_table(whole_sweep(tmp_path)).problems
    throughput = {trace.name: trace for trace in throughput_figure(problem).data}
    assert (list(throughput["ideal"].x), list(throughput["ideal"].y)) == ([1, 2, 4], [500, 1000, 2000])
    assert list(throughput["pipeline"].x) == [2, 4]
    assert list(throughput["ddp"].error_y.array) == pytest.approx([125])
    bubble = {trace.name: trace for trace in bubble_figure(problem).data}
    assert (list(bubble["4 ranks, measured"].x), list(bubble["4 ranks, measured"].y)) == ([8], [30.0])
    closed = bubble["2 ranks, closed form"]
    assert (closed.x[0], closed.y[0]) == (1, 50) and (closed.x[-1], closed.y[-1]) == pytest.approx(
        (8, 100 / 9)
    )
    ((name, heat),) = heat_figures(problem).items()  # of the others, one field each
    assert (name, list(heat.data[0].x), list(heat.data[0].y)) == ("pipeline", ["2", "4"], ["1", "8"])
    assert heat.data[0].z[0] == pytest.approx((400, None)) and heat.data[0].z[1][0] is None
    assert heat.data[0].z[1][1] == pytest.approx(100 / 0.13)
    split = {trace.name: trace for trace in split_figure(problem.ranked).data}
    assert list(split["compute"].x) == pytest.approx([60] * 4)
    assert split["compute"].y[0] == "1 · ddp \N{MULTIPLICATION SIGN}2, m 1"
    four = {trace.name: list(trace.x) for trace in bytes_figure(problem.ranked).data}
    assert four == {
        "least": [900] * 3,
        "predicted": [1000] * 3,
        "sent": [1000] * 3,
        "on the wire, with framing": [1200] * 3,
    }


@pytest.mark.usefixtures("small_pages")
def test_figures_without_data_say_what_they_need(tmp_path: Path) -> None:
    write_sweep_file(tmp_path)
    write_job(tmp_path, 0, "single", 1, (0.2, 0.2))
    told = words(write_sweep_report(tmp_path))
    for sentence in (
        "A line needs complete jobs with two numbers of ranks or more.",
        "A map needs two complete jobs of a strategy.",
        "No complete pipeline with two ranks or more has a measured bubble.",
        "No part of a step was measured.",
        "No complete job sends bytes.",
    ):
        assert sentence in told
    assert 'id="figure' not in (tmp_path / "report.html").read_text()


@pytest.mark.usefixtures("small_pages")
def test_a_sweep_that_has_just_begun_has_a_page(tmp_path: Path) -> None:
    write_sweep_file(tmp_path, "running")
    assert "The sweep has no job yet." in words(write_sweep_report(tmp_path))
    assert "No job is complete." in words(tmp_path / "report.html")


def test_without_plotly_there_is_a_page_without_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "plotly"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "plotly", None)
    told = words(write_sweep_report(whole_sweep(tmp_path)))
    assert "plotly is not installed" in told and SENTENCE in told and "This figure needs plotly." in told
    assert "could not be made" not in told


@pytest.mark.parametrize("width", [80, 140])
def test_the_terminal_has_the_best_plan_first_within_its_width(tmp_path: Path, width: int) -> None:
    console = Console(width=width, record=True, force_terminal=False, file=io.StringIO())
    print_table(whole_sweep(tmp_path), console)
    lines = console.export_text().splitlines()
    assert max(len(line) for line in lines) <= width
    assert [re.split(r"\s+", line.strip())[:3] for line in lines[2:6]] == [
        ["1", "1", "ddp,"],
        ["2", "3", "pipeline,"],
        ["3", "0", "single,"],
        ["4", "2", "pipeline,"],
    ]
    assert re.search(r"ddp, m=1 +2 +100 ms +90-112 ms +2.00 +1.00", lines[2])
    text = " ".join(" ".join(lines).split())
    assert SENTENCE in text
    assert "job 4 failed tensor, microbatches=1, 2 ranks: Rank 1 <failed>: boom" in text
    assert ("55.0 %" in text) == (width == 140)


@pytest.mark.usefixtures("small_pages")
def test_the_command_knows_a_sweep_from_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep, run, multirun = tmp_path / "sweep", write_run(tmp_path / "run"), tmp_path / "multirun"
    scaling_sweep(sweep)
    multirun.mkdir()
    (multirun / "multirun.yaml").write_text("{}")
    assert main([str(sweep)]) == 0
    told = capsys.readouterr().out
    assert "plans, the best first" in told and told.endswith(f"report  {sweep}/report.html\n")
    assert (sweep / "table.csv").is_file() and (sweep / "table.json").is_file()
    for arguments, sentence in (
        (
            [sweep, run],
            f"OTHER={run} cannot be set beside RUN={sweep}, which is a sweep; name the folders of two runs",
        ),
        ([run, sweep], f"OTHER={sweep} is a sweep; name the folder of one of its jobs"),
        ([multirun], f"RUN={multirun} is a multirun without sweep.json"),
    ):
        assert main([str(one) for one in arguments]) == 2
        assert sentence in capsys.readouterr().err
    (sweep / "sweep.json").write_text("{")
    assert main([str(sweep)]) == 2
    assert "sweep.json is damaged" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize(("width", "height"), [(1280, 900), (390, 844)])
def test_a_browser_opens_it_without_a_network_and_without_an_error(
    tmp_path: Path, width: int, height: int, dark: bool
) -> None:
    need_program("chromium")
    found, console = look_at(write_sweep_report(whole_sweep(tmp_path)), width, height, dark, ".figure")
    assert console == []
    check_readable(found, width, dark)
    assert found["drawn"] == [True] * 5


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_real_sweep_s_table_follows_from_its_rows(tmp_path: Path) -> None:
    code, output = run_script(
        "strategy=ddp,pipeline",
        "world_size=1,2",
        "trainer.max_steps=12",
        "trainer.verdict_budget_s=0",
        "collectives.link_budget_s=0",
        f"hydra.sweep.dir={tmp_path}/sweep",
        "-m",
        timeout_s=280,
    )
    assert code == 0, output
    sweep = tmp_path / "sweep"
    path = write_sweep_report(sweep)
    table = json.loads((sweep / "table.json").read_text())
    assert {(row["strategy"], row["world_size"]): row["state"] for row in table["rows"]} == {
        (strategy, size): "complete" for strategy in ("ddp", "pipeline") for size in (1, 2)
    }
    assert differences(sweep) == []
    assert [row["steps"] for row in table["rows"]] == [12] * 4
    sent = {(row["strategy"], row["world_size"]): row["bytes_sent"] for row in table["rows"]}
    # 64 to 128 to 128 to 128 to 10 with biases: 42,634 parameters of 4 bytes, each sent 2 (n-1)/n times
    assert sent["ddp", 2] == 4 * 42_634
    assert sent["ddp", 1] == sent["pipeline", 1] == 0
    told = words(path)
    assert table["sentences"][0] in told and "could not be made" not in told


def test_jobs_without_ranks_or_losses_are_not_none(tmp_path: Path) -> None:
    write_sweep_file(tmp_path)
    write_job(tmp_path, 0, "ddp", 2, (0.1, 0.1))
    write_job(tmp_path, 1, "tensor", 2, state="skipped", reason="it makes no sense")
    rows = [{**row, "world_size": None} for row in read_table(tmp_path).rows]
    told = [losses(rows), verdicts(rows, tmp_path), split_table(rows), unranked(rows, tmp_path)]
    assert not any("None" in markup for markup in told)
    assert "ddp" in told[0] and "tensor" not in told[0] and "tensor" in told[3]

"""The W&B workspace in which runs and sweeps are read: its sections and panels as code.

Built with wandb-workspaces (extra `dashboard`), which needs neither account nor network for it. Panels name
only keys that runs and a sweep's summary run log; docs/metrics.md and docs/wandb.md define them. The same
input gives the same spec: ids are made from what a panel shows, where the library would draw them.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Sequence
from typing import Any

import wandb_workspaces.reports.v2 as wr
import wandb_workspaces.workspaces as ws

from trainer.wandb_sweep import TABLE, WORLD_SIZE

NAME = "Splitmeter"
STEP = "step"
MOST_RUNS = 50  # in a panel; W&B shows 10 unless told
SPLIT = ("compute_s", "exposed_comm_s", "wait_s", "idle_s", "host_s")
PER_RANK = (
    "step_time_s",
    *SPLIT,
    "bytes_sent",
    "effective_bandwidth_GBps",
    "bubble_fraction",
    "peak_memory_bytes",
)
COLUMNS = (
    *(f"config:{key}.value" for key in ("strategy", "world_size", "microbatches", "schedule", "batch_size")),
    *(f"summary:steady.{key}.median" for key in ("step_time_s", "samples_per_s", "bubble_fraction")),
    *(f"summary:verdict.{key}" for key in ("wall", "cause", "sentence")),
    "summary:sweep.sentence",
)


def make_workspace(entity: str, project: str, group: str | None = None, ranks: int | None = None) -> Any:
    """The workspace as wandb-workspaces has it.

    Args:
        group: show the runs of this group alone, such as a sweep's.
        ranks: name the lines of so many ranks one by one; None finds them by a pattern, which servers
            older than such patterns do not know.
    """
    workspace: Any = ws.Workspace(
        entity=entity,
        project=project,
        name=NAME if group is None else f"{NAME} {_without_symbols(group)}",
        sections=[
            _section("Verdicts", _verdicts()),
            _section("Step time", _step_time()),
            _section("Bytes, four ways", _bytes()),
            _section("Bandwidth against the link", _bandwidth()),
            _section("Time split", _time_split()),
            _section("Bubble", _bubble()),
            _section("Scaling", _scaling(), x_axis=WORLD_SIZE),
            _section("Ranks", _ranks(ranks), is_open=False),
        ],
        settings=ws.WorkspaceSettings(x_axis=STEP, max_runs=MOST_RUNS),
        runset_settings=ws.RunsetSettings(pinned_columns=list(COLUMNS)),
    )
    if group is not None:
        # Not as a filter's text, in which the library would double equals signs.
        key = {"section": "run", "name": "group"}
        rule = {"key": key, "op": "=", "value": group, "disabled": False}
        workspace._stashed_filters_v2 = {"filterFormat": "filterV2", "filters": [rule]}
        workspace._stashed_filter_string = workspace.runset_settings.filters
    for section in workspace.sections:
        for number, panel in enumerate(section.panels):
            text = f"{section.name}/{number}/{panel.title if hasattr(panel, 'title') else ''}"
            panel._id = hashlib.sha256(text.encode()).hexdigest()[:12]
    return workspace


def workspace_spec(workspace: Any) -> dict[str, Any]:
    """What `--push` would send: entity, project, the view's name, and its spec, as plain data."""
    spec: dict[str, Any] = workspace._to_model().model_dump(mode="json", by_alias=True, exclude_none=True)
    return spec


def _without_symbols(text: str) -> str:
    """The library takes every symbol in a view's name for an emoji, the equals sign too."""
    return "".join("-" if unicodedata.category(one).startswith("S") else one for one in text)


def _section(name: str, panels: list[Any], x_axis: str = STEP, is_open: bool = True) -> Any:
    return ws.Section(
        name=name,
        panels=panels,
        is_open=is_open,
        layout_settings=ws.SectionLayoutSettings(columns=2, rows=2),
        panel_settings=ws.SectionPanelSettings(x_axis=x_axis),
    )


def _line(title: str, keys: Sequence[str], unit: str, **further: Any) -> Any:
    return wr.LinePlot(
        title=title, y=list(keys), title_y=unit, **{"x": STEP, "smoothing_type": "none", **further}
    )


def _scatter(title: str, config_key: str, summary_key: str) -> Any:
    return wr.ScatterPlot(title=title, x=wr.Config(config_key), y=wr.SummaryMetric(summary_key))


def _verdicts() -> list[Any]:
    """Causes and sentences stand as columns in the table of runs."""
    return [
        wr.MediaBrowser(title="Report of the run, of the sweep", media_keys=["report"], num_columns=1),
        wr.BarPlot(
            title="Step time, and what the verdict's change would make of it (s)",
            metrics=["steady.step_time_s.median", "verdict.predicted_step_time_s"],
        ),
        wr.RunComparer(diff_only="split"),
    ]


def _step_time() -> list[Any]:
    return [
        _line("Step time of the slowest rank", ["step_time_s"], "s"),
        _line("Throughput", ["samples_per_s"], "samples/s"),
        _line("Loss", ["loss", "eval_loss"], "loss"),
    ]


def _bytes() -> list[Any]:
    return [
        _line("Sent, predicted, least", ["bytes_sent", "bytes_predicted", "bytes_least"], "B a step"),
        _line(
            "On the wire, framing included",
            ["bytes_wire"],
            "B a step",
            custom_expressions=["${bytes_wire} / ${wire_steps}"],  # a reading is over several steps
        ),
        _line("All ranks together", ["bytes_sent_total"], "B a step"),
        _line("Control messages", ["bytes_control"], "B a step"),
    ]


def _bandwidth() -> list[Any]:
    both = ["effective_bandwidth_GBps", "achieved_bandwidth_GBps"]
    return [
        _line("Effective, and achieved while transfers are in progress", both, "GB/s"),
        _line("Share of the link's bandwidth", ["link_fraction"], "link curve's time / time taken"),
        _line("Transfers hidden under compute", ["overlap"], "share"),
    ]


def _time_split() -> list[Any]:
    return [
        _line("Where the step goes (the rank that sends most)", SPLIT, "s", plot_type="stacked-area"),
        _line("Of the step, in shares", SPLIT, "share", plot_type="pct-area"),
        _line("Waiting for data", ["data_s"], "s"),
    ]


def _bubble() -> list[Any]:
    return [
        _line("Bubble, measured and expected", ["bubble_fraction", "bubble_expected"], "share of the step"),
        _scatter("Bubble measured, by microbatches", "microbatches", "steady.bubble_fraction.median"),
        _scatter("Bubble expected, by microbatches", "microbatches", "steady.bubble_expected.median"),
    ]


def _scaling() -> list[Any]:
    """Lines are of a sweep's summary run: the best plan of each world size. Dots are its jobs."""

    def line(title: str, keys: Sequence[str], unit: str) -> Any:
        return _line(title, [f"scaling/{key}" for key in keys], unit, x=WORLD_SIZE, title_x="ranks")

    axes = ("config:strategy", "config:world_size", "config:microbatches", "steady.samples_per_s.median")
    return [
        line("Throughput of the best plan", ["samples_per_s", "ideal_samples_per_s"], "samples/s"),
        line("Speed-up against one rank", ["speedup", "ideal_speedup"], "times"),
        line("Efficiency", ["efficiency"], "speed-up / ranks"),
        line("Step time of the best plan", ["step_time_s"], "s"),
        _scatter("Throughput of every job", "world_size", "steady.samples_per_s.median"),
        wr.ParallelCoordinatesPlot(
            title="Which split, how many ranks, how many microbatches",
            columns=[wr.ParallelCoordinatesPlotColumn(metric=_axis(name)) for name in axes],
        ),
        _line(
            "Throughput in the sweep's further problems",
            [],
            "samples/s",
            x=WORLD_SIZE,
            title_x="ranks",
            metric_regex="^scaling/problem-[0-9]+/samples_per_s$",
        ),
        wr.WeavePanelSummaryTable(table_name=TABLE),
    ]


def _axis(name: str) -> Any:
    section, _, key = name.rpartition(":")
    return wr.Config(key) if section else wr.SummaryMetric(key)


def _ranks(ranks: int | None) -> list[Any]:
    panels = []
    for key in PER_RANK:
        if ranks is None:
            panels.append(_line(key, [], key, metric_regex=f"^rank/[0-9]+/{key}$"))
        else:
            panels.append(_line(key, [f"rank/{rank}/{key}" for rank in range(ranks)], key))
    return panels

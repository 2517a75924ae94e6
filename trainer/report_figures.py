"""The figures of a report, as plotly's own objects: the page shows them, and a logger may take them too.

Backgrounds are transparent and colours hold on white and on near-black; the page sets the colour of texts
and grids for its scheme. `layout.meta.page` is what the page sets otherwise.
"""

from __future__ import annotations

import html
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from trainer.report import PARTS, Run
from trainer.report_bytes import four_counts
from trainer.report_look import LINES, legend_above, styled
from trainer.report_steps import steps_figure
from trainer.report_timeline import COLORS, timeline

if TYPE_CHECKING:
    import plotly.graph_objects as go

PART_COLORS = {
    "compute_s": COLORS["compute"],
    "exposed_comm_s": COLORS["exposed"],
    "wait_s": COLORS["wait"],
    "idle_s": COLORS["idle"],
    "host_s": COLORS["host"],
    "data_s": COLORS["data"],
}
BYTE_COLORS = {"least": "#8fa3b8", "predicted": "#7d6bc9", "sent": "#2f7fd0", "wire less framing": "#1f9e77"}
MOST_MESSAGES = 3000


def figures(run: Run) -> dict[str, go.Figure]:
    """The figures for which the folder has data, by the names of `MAKERS`.

    Raises:
        ImportError: plotly is not installed.
    """
    made = {name: make(run) for name, make in MAKERS.items()}
    return {name: figure for name, figure in made.items() if figure is not None}


def timeline_figure(run: Run) -> go.Figure | None:
    """The last whole step of the trace, all ranks."""
    return None if run.trace is None else styled(timeline(run.trace))


def bytes_figure(run: Run) -> go.Figure | None:
    """Bytes that a rank sends in a step, four ways beside each other."""
    import plotly.graph_objects as go

    counts = four_counts(run)
    if not counts:
        return None
    figure = go.Figure()
    for name, color in BYTE_COLORS.items():
        values = [count.per_step[name] for count in counts]
        if any(value is not None for value in values):
            figure.add_trace(
                go.Bar(
                    name=name,
                    x=[f"rank {count.rank}" for count in counts],
                    y=values,
                    marker={"color": color},
                    hovertemplate="%{x}, " + name + "<br>%{y:,.0f} B a step<extra></extra>",
                )
            )
    figure.update_layout(barmode="group", bargap=0.3, height=340, legend=legend_above())
    figure.update_xaxes(showgrid=False)
    figure.update_yaxes(title="a step, mean", exponentformat="SI", ticksuffix="B", rangemode="tozero")
    return styled(figure)


def split_figure(run: Run) -> go.Figure | None:
    """The parts of a step of each rank, in ms, one bar a rank; host is what of host_s is not data_s."""
    import plotly.graph_objects as go

    split = run.time_split()
    if not split:
        return None
    figure = go.Figure()
    ranks = sorted(split)
    for part in PARTS:
        values = [_stacked_s(split[rank], part) for rank in ranks]
        if any(value is not None for value in values):
            words = "host_s - data_s" if part == "host_s" else part
            figure.add_trace(
                go.Bar(
                    name=part.removesuffix("_s").replace("_", " "),
                    orientation="h",
                    y=[f"rank {rank}" for rank in ranks],
                    x=[None if value is None else 1e3 * value for value in values],
                    marker={"color": PART_COLORS[part], "line": {"width": 0}},
                    hovertemplate="%{y}, " + words + "<br>%{x:.4g} ms<extra></extra>",
                )
            )
    figure.update_layout(
        barmode="stack",
        bargap=0.35,
        height=130 + 34 * max(2, len(ranks)),
        legend={**legend_above(), "traceorder": "normal"},
    )
    figure.update_xaxes(title="median time (ms)", rangemode="tozero")
    figure.update_yaxes(autorange="reversed", showgrid=False)
    return styled(figure)


def _stacked_s(split: dict[str, float], part: str) -> float | None:
    """A part as its bar is long: data_s is drawn beside host_s, of which it is a part."""
    value = split.get(part)
    if part != "host_s" or value is None:
        return value
    return max(0.0, value - split.get("data_s", 0.0))


def link_figure(run: Run) -> go.Figure | None:
    """Time over size: the measured curves with their quartiles, and the messages of the step drawn."""
    import plotly.graph_objects as go

    if run.link is None or not run.link.curves:
        return None
    figure = go.Figure()
    for place, curve in enumerate(run.link.curves.values()):
        points, color = curve.points, LINES[place % len(LINES)]
        figure.add_trace(
            go.Scatter(
                name=html.escape(f"{curve.operation} on {curve.group_size}", quote=False),
                x=[point.size_bytes for point in points],
                y=[1e3 * point.time_s for point in points],
                error_y={
                    "array": [1e3 * (point.q3_s - point.time_s) for point in points],
                    "arrayminus": [1e3 * (point.time_s - point.q1_s) for point in points],
                    "thickness": 1,
                    "width": 3,
                },
                mode="lines+markers",
                line={"color": color, "width": 2},
                marker={"size": 6},
                hovertemplate="%{x:,} B: %{y:.4g} ms<extra>%{fullData.name}</extra>",
            )
        )
    messages = run.trace.transfers() if run.trace is not None else []
    messages = messages[:: 1 + len(messages) // MOST_MESSAGES]
    if messages:
        figure.add_trace(
            go.Scatter(
                name="this step's messages",
                x=[bar.bytes for bar in messages],
                y=[1e3 * bar.duration_s for bar in messages],
                text=[f"rank {bar.rank}, {html.escape(bar.name, quote=False)}" for bar in messages],
                mode="markers",
                marker={"color": COLORS["exposed"], "size": 9, "symbol": "x-thin", "line": _cross()},
                hovertemplate="%{text}<br>%{x:,} B: %{y:.4g} ms<extra></extra>",
            )
        )
    figure.update_layout(height=400, showlegend=True, legend=legend_above(), hovermode="closest")
    figure.update_xaxes(title="size", type="log", exponentformat="SI", ticksuffix="B", dtick=1)
    figure.update_yaxes(title="time (ms)", type="log", exponentformat="none", dtick="D2")
    return styled(figure)


def _cross() -> dict[str, Any]:
    return {"width": 2, "color": COLORS["exposed"]}


MAKERS: dict[str, Callable[[Run], go.Figure | None]] = {
    "timeline": timeline_figure,
    "bytes": bytes_figure,
    "time_split": split_figure,
    "link": link_figure,
    "steps": steps_figure,
}

"""The figures of a sweep with bars for each job: where a step goes, and bytes four ways."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from trainer.report import PARTS, Row
from trainer.report_figures import BYTE_COLORS, PART_COLORS
from trainer.report_look import legend_above, styled
from trainer.sweep_advice import tuned

if TYPE_CHECKING:
    import plotly.graph_objects as go

MOST_JOBS = 40  # in a figure; beyond it the best are drawn
SPLIT = tuple(part for part in PARTS if part != "data_s")  # data_s is a part of host_s
BYTES = {  # column -> what it is called in the figure, and its colour in a run's report
    "bytes_least": ("least", BYTE_COLORS["least"]),
    "bytes_predicted": ("predicted", BYTE_COLORS["predicted"]),
    "bytes_sent": ("sent", BYTE_COLORS["sent"]),
    "bytes_wire": ("on the wire, with framing", BYTE_COLORS["wire less framing"]),
}


def job_label(row: Row) -> str:
    """A job on an axis, short: 7 · ddp ×2, m 4."""
    text = f"{row['number']} · {row['strategy']} \N{MULTIPLICATION SIGN}{row['world_size']}"
    if row["microbatches"] is not None:
        text += f", m {row['microbatches']}"
    extra = ", ".join(f"{key} {value}" for key, value in tuned(row["swept"]).items())
    return html.escape(f"{text}, {extra}" if extra else text, quote=False)


def split_figure(rows: Sequence[Row]) -> go.Figure | None:
    """Parts of a step in ms, one bar a job, the best first."""
    rows = [row for row in rows if any(row[part] is not None for part in SPLIT)]
    names = {part: (part.removesuffix("_s").replace("_", " "), PART_COLORS[part]) for part in SPLIT}
    figure = _bars(rows[:MOST_JOBS], names, 1e3, "%{y}<br>%{fullData.name} %{x:.4g} ms<extra></extra>")
    if figure is None:
        return None
    figure.update_layout(barmode="stack", height=130 + 30 * min(len(rows), MOST_JOBS))
    figure.update_xaxes(title="median time (ms)", rangemode="tozero")
    return figure


def bytes_figure(rows: Sequence[Row]) -> go.Figure | None:
    """Bytes that the rank which sends most sends in a step, four ways, for each job that sends any."""
    rows = [row for row in rows if any(row[key] for key in BYTES)]
    template = "%{y}<br>%{fullData.name} %{x:,.0f} B<extra></extra>"
    figure = _bars(rows[:MOST_JOBS], BYTES, 1, template)
    if figure is None:
        return None
    figure.update_layout(barmode="group", height=130 + 62 * min(len(rows), MOST_JOBS))
    figure.update_xaxes(title="a step, median", exponentformat="SI", ticksuffix="B", rangemode="tozero")
    return figure


def _bars(
    rows: Sequence[Row], names: Mapping[str, tuple[str, str]], factor: float, hover: str
) -> go.Figure | None:
    """None where no row has any of the columns."""
    import plotly.graph_objects as go

    figure = go.Figure()
    for key, (name, color) in names.items():
        if any(row[key] is not None for row in rows):
            figure.add_trace(
                go.Bar(
                    name=name,
                    orientation="h",
                    y=[job_label(row) for row in rows],
                    x=[None if row[key] is None else factor * row[key] for row in rows],
                    marker={"color": color, "line": {"width": 0}},
                    hovertemplate=hover,
                )
            )
    if not figure.data:
        return None
    figure.update_layout(bargap=0.3, legend={**legend_above(), "traceorder": "normal"}, showlegend=True)
    figure.update_yaxes(autorange="reversed", showgrid=False, type="category")
    return styled(figure)

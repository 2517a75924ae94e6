"""Step time and loss over a run, and the step times of two runs in one figure."""

from __future__ import annotations

import html
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from trainer.report import Row, Run, series
from trainer.report_look import LINES, MID, legend_above, styled

if TYPE_CHECKING:
    import plotly.graph_objects as go

SHADE = "rgba(128,128,128,0.16)"
MOST_POINTS = 2000  # of a line; above it, neighbours are drawn as their median


def steps_figure(run: Run) -> go.Figure | None:
    """Step time over the run, warm-up shaded, and the loss below."""
    import plotly.graph_objects as go
    from plotly.subplots import make_subplots

    if not series(run.rows, "step_time_s")[0]:
        return None
    losses = [(key, *series(run.rows, key)) for key in ("loss", "eval_loss")]
    losses = [(key, steps, values) for key, steps, values in losses if steps]
    figure = make_subplots(rows=2 if losses else 1, cols=1, shared_xaxes=True, vertical_spacing=0.09)
    figure.add_trace(step_line(run, "step time", LINES[0]), row=1, col=1)
    for place, (key, steps, values) in enumerate(losses):
        few = len(steps) < 2 or key == "eval_loss"
        steps, values = _thin(steps, values)
        figure.add_trace(
            go.Scatter(
                name=key.replace("_", " "),
                x=steps,
                y=values,
                mode="lines+markers" if few else "lines",
                line={"color": LINES[2 + place], "width": 1.8},
                marker={"size": 8},
            ),
            row=2,
            col=1,
        )
    _shade_warm_up(figure, run.rows)
    median_s = run.median("step_time_s")
    if median_s is not None:
        figure.add_hline(y=1e3 * median_s, line={"color": MID, "width": 1, "dash": "dot"}, row=1, col=1)
    figure.update_layout(height=460 if losses else 280, legend=legend_above(), hovermode="x")
    figure.update_yaxes(title="step time (ms)", rangemode="tozero", row=1, col=1)
    longest_s = longest_drawn_s(run)
    if longest_s is not None:
        figure.update_yaxes(range=[0, 1e3 * longest_s], row=1, col=1)
    if losses:
        figure.update_yaxes(title="loss", row=2, col=1)
    figure.update_xaxes(title="step", row=2 if losses else 1, col=1)
    if len(run.rows) < 10:
        figure.update_xaxes(dtick=1)  # there is no step 0.5
    return styled(figure)


def step_times_figure(runs: Sequence[tuple[str, Run]]) -> go.Figure:
    """Step time over the run, a line for each run."""
    import plotly.graph_objects as go

    figure = go.Figure()
    for place, (name, run) in enumerate(runs):
        figure.add_trace(step_line(run, name, LINES[place % len(LINES)]))
    figure.update_layout(height=340, legend=legend_above(), hovermode="x", showlegend=True)
    figure.update_yaxes(title="step time (ms)", rangemode="tozero")
    tops = [longest_drawn_s(run) for _, run in runs]
    if any(top is not None for top in tops):
        longest = [max(series(run.rows, "step_time_s")[1], default=0.0) for _, run in runs]
        top_s = max(every if top is None else top for top, every in zip(tops, longest, strict=True))
        figure.update_yaxes(range=[0, 1e3 * top_s])
    figure.update_xaxes(title="step")
    return styled(figure)


def longest_drawn_s(run: Run) -> float | None:
    """Where the step times are cut off: far above the steady ones; None where nothing is that far.

    A first step takes many times as long as those that follow, which would be drawn as a line at zero.
    """
    steady = series(run.steady_rows, "step_time_s")[1]
    every = series(run.rows, "step_time_s")[1]
    if not steady or max(every) <= 2 * max(steady):
        return None
    return 1.2 * max(steady)


def step_line(run: Run, name: str, color: str) -> go.Scatter:
    import plotly.graph_objects as go

    steps, values = _thin(*series(run.rows, "step_time_s"))
    return go.Scatter(
        name=html.escape(name, quote=False),
        x=steps,
        y=[1e3 * value for value in values],
        mode="lines" if len(steps) > 1 else "markers",
        line={"color": color, "width": 1.6},
        marker={"color": color, "size": 9},
        hovertemplate="%{y:.4g} ms",
    )


def _thin(steps: list[float], values: list[float]) -> tuple[list[float], list[float]]:
    """Neighbours as their median, where there are more points than a screen has pixels."""
    width = 1 + len(steps) // MOST_POINTS
    if width == 1:
        return steps, values
    starts = range(0, len(steps), width)
    return (
        [steps[start] for start in starts],
        [statistics.median(values[start : start + width]) for start in starts],
    )


def _shade_warm_up(figure: go.Figure, rows: Sequence[Row]) -> None:
    steps = [row["step"] for row in rows if row.get("is_warmup") and type(row.get("step")) is int]
    if not steps:
        return
    figure.add_vrect(x0=min(steps) - 0.5, x1=max(steps) + 0.5, fillcolor=SHADE, line_width=0, layer="below")
    figure.add_annotation(
        text="warm-up",
        x=min(steps) - 0.5,
        y=0,
        yref="y domain",
        xanchor="left",
        yanchor="bottom",
        showarrow=False,
        font={"size": 11},
    )

"""The figures of a sweep that compare plans over world sizes and microbatches, one problem in each."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trainer.report import Row
from trainer.report_look import LINES, MID, legend_above, styled
from trainer.sweep_advice import plan_text
from trainer.sweep_ranking import Problem, best_plans

if TYPE_CHECKING:
    import plotly.graph_objects as go

FIXED = {"ddp": LINES[0], "pipeline": LINES[1], "tensor": LINES[2], "single": LINES[3]}
MOST_LINEAR_RANKS = 16  # on an axis of ranks; beyond it, doublings are drawn as equal steps
HEAT = ((0.0, "#e3edf7"), (0.5, "#6aa3d8"), (1.0, "#134a80"))
CLOSED_FORM_POINTS = 40


def strategies_of(rows: Sequence[Row]) -> list[str]:
    return sorted({row["strategy"] for row in rows if row["strategy"]})


def color_of(strategy: str, strategies: Sequence[str]) -> str:
    """The same colour for a strategy in every figure."""
    others = [name for name in strategies if name not in FIXED]
    return FIXED.get(strategy) or LINES[(len(FIXED) + others.index(strategy)) % len(LINES)]


def throughput_figure(problem: Problem) -> go.Figure | None:
    """Samples a second of each strategy's best plan over ranks, and the ideal line through one rank."""
    import plotly.graph_objects as go

    rows = problem.ranked
    sizes = [row["world_size"] for row in best_plans(problem.ranked)]
    if len(sizes) < 2:
        return None
    figure = go.Figure()
    strategies = strategies_of(rows)
    if problem.one_rank is not None:
        one = problem.one_rank["samples_per_s"]
        figure.add_trace(
            go.Scatter(
                name="ideal",
                x=sizes,
                y=[size * one for size in sizes],
                mode="lines",
                line={"color": MID, "width": 1.5, "dash": "dot"},
                hovertemplate="%{x} ranks, ideal: %{y:,.4g} samples/s<extra></extra>",
            )
        )
    for strategy in strategies:
        color = color_of(strategy, strategies)
        line = best_plans(row for row in rows if row["strategy"] == strategy)
        beaten = [row for row in rows if row["strategy"] == strategy and row not in line]
        figure.add_trace(_best_plans(strategy, line, color))
        if beaten:
            figure.add_trace(
                go.Scatter(
                    name=f"{html.escape(strategy, quote=False)}, other plans",
                    x=[row["world_size"] for row in beaten],
                    y=[row["samples_per_s"] for row in beaten],
                    text=[_hover(row) for row in beaten],
                    mode="markers",
                    showlegend=False,
                    marker={"color": color, "size": 7, "opacity": 0.45, "symbol": "circle-open"},
                    hovertemplate="%{text}<extra></extra>",
                )
            )
    figure.update_layout(height=420, legend=legend_above(), hovermode="closest", showlegend=True)
    many = sizes[-1] > MOST_LINEAR_RANKS
    ticks = {"tickmode": "array", "tickvals": sizes, "ticktext": [str(size) for size in sizes]}
    figure.update_xaxes(title="ranks", type="log" if many else "linear", **ticks)
    figure.update_yaxes(title="samples a second", exponentformat="SI")
    if many:
        figure.update_yaxes(type="log", dtick="D2")
    else:
        figure.update_yaxes(rangemode="tozero")
    return styled(figure)


def bubble_figure(problem: Problem) -> go.Figure | None:
    """Bubble measured over microbatches, with the closed form (p-1)/(m+p-1) for each number of ranks p."""
    import plotly.graph_objects as go

    rows = [row for row in problem.ranked if None not in (row["bubble_fraction"], row["microbatches"])]
    rows = [row for row in rows if row["world_size"] > 1]
    if not rows:
        return None
    counts = sorted({row["microbatches"] for row in rows})
    figure = go.Figure()
    for place, size in enumerate(sorted({row["world_size"] for row in rows})):
        color = LINES[place % len(LINES)]
        own = sorted((row for row in rows if row["world_size"] == size), key=lambda row: row["microbatches"])
        figure.add_trace(
            go.Scatter(
                name=f"{size} ranks, measured",
                legendgroup=str(size),
                x=[row["microbatches"] for row in own],
                y=[100 * row["bubble_fraction"] for row in own],
                text=[html.escape(plan_text(row), quote=False) for row in own],
                mode="markers",
                marker={"color": color, "size": 10},
                hovertemplate="%{text}<br>bubble %{y:.1f} %<extra></extra>",
            )
        )
        steps = _between(counts[0], counts[-1])
        figure.add_trace(
            go.Scatter(
                name=f"{size} ranks, closed form",
                legendgroup=str(size),
                x=steps,
                y=[100 * (size - 1) / (m + size - 1) for m in steps],
                mode="lines" if len(steps) > 1 else "markers",
                line={"color": color, "width": 1.5, "dash": "dot"},
                marker={"color": color, "size": 14, "symbol": "line-ew-open"},
                hovertemplate="m=%{x:.3g}: %{y:.1f} %<extra></extra>",
            )
        )
    figure.update_layout(height=400, legend=legend_above(), hovermode="closest", showlegend=True)
    ticks = {"tickmode": "array", "tickvals": counts, "ticktext": [str(count) for count in counts]}
    figure.update_xaxes(title="microbatches", type="log", **ticks)
    figure.update_yaxes(title="bubble (% of the step)", rangemode="tozero")
    return styled(figure)


def heat_figures(problem: Problem) -> dict[str, go.Figure]:
    """strategy -> heat map of world size x microbatches, the best plan's samples a second in each field.

    One scale for all of a problem. A strategy with a single field has no map.
    """
    import plotly.graph_objects as go

    cells: dict[str, dict[tuple[int, int], Row]] = {}
    for row in problem.ranked:
        if row["strategy"] and row["microbatches"] is not None:
            own = cells.setdefault(row["strategy"], {})
            own.setdefault((row["world_size"], row["microbatches"]), row)
    cells = {strategy: own for strategy, own in cells.items() if len(own) > 1}
    values = [row["samples_per_s"] for own in cells.values() for row in own.values()]
    figures = {}
    for strategy in sorted(cells):
        own = cells[strategy]
        sizes = sorted({size for size, _ in own})
        counts = sorted({count for _, count in own})
        grid = [[own.get((size, count)) for size in sizes] for count in counts]
        figure = go.Figure(
            go.Heatmap(
                x=[str(size) for size in sizes],
                y=[str(count) for count in counts],
                z=[[None if row is None else row["samples_per_s"] for row in line] for line in grid],
                text=[["" if row is None else _short(row["samples_per_s"]) for row in line] for line in grid],
                hovertext=[["" if row is None else _hover(row) for row in line] for line in grid],
                hovertemplate="%{hovertext}<extra></extra>",
                hoverongaps=False,
                texttemplate="%{text}",
                colorscale=[list(stop) for stop in HEAT],
                zmin=min(values),
                zmax=max(values),
                showscale=False,
                xgap=2,
                ygap=2,
            )
        )
        figure.update_layout(height=120 + 46 * len(counts))
        figure.update_xaxes(title="ranks", type="category", showgrid=False)
        figure.update_yaxes(title="microbatches", type="category", showgrid=False)
        figures[strategy] = styled(figure)
    return figures


def _best_plans(strategy: str, line: Sequence[Row], color: str) -> Any:
    import plotly.graph_objects as go

    return go.Scatter(
        name=html.escape(strategy, quote=False),
        x=[row["world_size"] for row in line],
        y=[row["samples_per_s"] for row in line],
        error_y={
            "array": [row["samples_per_s_high"] - row["samples_per_s"] for row in line],
            "arrayminus": [row["samples_per_s"] - row["samples_per_s_low"] for row in line],
            "thickness": 1,
            "width": 4,
        },
        text=[_hover(row) for row in line],
        mode="lines+markers",
        line={"color": color, "width": 2},
        marker={"color": color, "size": 9},
        hovertemplate="%{text}<extra></extra>",
    )


def _hover(row: Row) -> str:
    plan = html.escape(plan_text(row), quote=False)
    return f"job {row['number']}: {plan}<br>{row['world_size']} ranks, {row['samples_per_s']:,.4g} samples/s"


def _short(value: float) -> str:
    """Three digits: 12.3k."""
    for factor, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.3g}{unit}"
    return f"{value:.3g}"


def _between(low: float, high: float) -> list[float]:
    """Steps of equal ratio from low to high."""
    if low == high:
        return [low]
    count = CLOSED_FORM_POINTS
    return [low * (high / low) ** (place / (count - 1)) for place in range(count)]

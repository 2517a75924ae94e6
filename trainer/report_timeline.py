"""A step's timeline of all ranks: a lane of the main thread and one of transfers for each."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Any

from trainer.report_text import Markup, escape, seconds, size
from trainer.report_trace import COMMUNICATION, Bar, StepTrace, thinned

if TYPE_CHECKING:
    import plotly.graph_objects as go

# Readable on white and on near-black, and told apart by eyes that see red and green alike.
COLORS = {
    "forward": "#5aa2dd",
    "backward": "#2f6fb5",
    "dX": "#2f6fb5",
    "dW": "#7d6bc9",
    "loss": "#2aa1a8",
    "update": "#5f7fa3",
    "compute": "#4187c9",
    "launch": "#8fa3b8",
    "exposed": "#d9662b",
    "wait": "#c77db0",
    "idle": "#9a9a9a",
    "host": "#a08c6a",
    "data": "#c9a227",
    "transfer": "#1f9e77",
}
PALE = frozenset({"wait", "idle"})  # nothing is done there
WORDS = {
    "launch": "starting a transfer",
    "exposed": "transfer that compute waits for",
    "wait": "waiting for a late peer",
    "idle": "idle: nothing ready",
    "transfer": "transfer",
}
SMALLEST_LABEL = 0.006  # of the step: a bar below has no room for a number on any screen
MOST_LABELS = 1000
LANE_PX = 26
GAP = 0.45  # between ranks, in lanes


def timeline(trace: StepTrace) -> go.Figure:
    """One trace of horizontal bars for each kind, so that thousands of bars stay light; time in ms."""
    import plotly.graph_objects as go

    bars, _ = thinned(trace.bars, trace.span_s)
    kinds: dict[str, list[Bar]] = {}
    for bar in bars:
        kinds.setdefault(kind_of(bar), []).append(bar)
    places = {rank: place for place, rank in enumerate(trace.ranks)}
    label_s = _shortest_with_label(bars, trace.span_s)
    figure = go.Figure()
    for kind in sorted(kinds, key=_order):
        own = kinds[kind]
        figure.add_trace(
            go.Bar(
                name=html.escape(WORDS.get(kind, kind), quote=False),
                orientation="h",
                y=[_height(places[bar.rank], bar.lane) for bar in own],
                base=[round(1e3 * bar.start_s, 4) for bar in own],
                x=[round(1e3 * bar.duration_s, 4) for bar in own],
                width=0.9,
                text=[_label(bar, label_s) for bar in own],
                textposition="inside",
                insidetextanchor="middle",
                textangle=0,
                insidetextfont={"color": "#ffffff"},
                hovertext=[_hover(bar) for bar in own],
                hoverinfo="text",
                marker=_marker(kind),
            )
        )
    figure.update_layout(
        barmode="overlay",
        uniformtext={"mode": "hide", "minsize": 9},
        height=110 + round(LANE_PX * (2 + GAP) * max(2, len(trace.ranks))),
        legend={"orientation": "h", "y": 1.0, "yanchor": "bottom", "x": 0},
        hovermode="closest",
        meta={"page": {"showlegend": False}},  # the page has `legend`, which wraps on a narrow screen
    )
    heights = [_height(place, lane) for place in range(len(trace.ranks)) for lane in (0, COMMUNICATION)]
    figure.update_yaxes(
        tickvals=heights,
        ticktext=[name for rank in trace.ranks for name in (f"rank {rank}", "transfers")],
        range=[heights[-1] + 0.6, heights[0] - 0.6],
        fixedrange=True,
        showgrid=False,
        zeroline=False,
    )
    figure.update_xaxes(title="time in the step (ms)", rangemode="tozero", zeroline=False)
    return figure


def legend(trace: StepTrace) -> Markup:
    """The kinds of the step's bars with their colours, as HTML."""
    chips = []
    for kind in sorted({kind_of(bar) for bar in trace.bars}, key=_order):
        color = _color(kind)
        fill = (
            f"repeating-linear-gradient(-45deg,{color} 0 1px,transparent 1px 4px)" if kind in PALE else color
        )
        patch = f'<i style="background:{fill};border-color:{color}"></i>'
        chips.append(f"<span>{patch}{escape(WORDS.get(kind, kind))}</span>")
    return Markup(f'<div class="legend">{"".join(chips)}</div>\n')


def kind_of(bar: Bar) -> str:
    """What colours a bar: compute by what is computed, all else by kind."""
    return bar.what if bar.kind == "compute" and bar.what in COLORS else bar.kind


def _height(place: int, lane: int) -> float:
    return round(place * (2 + GAP) + lane, 3)


def _order(kind: str) -> tuple[int, str]:
    names = list(COLORS)
    return (names.index(kind) if kind in names else len(names), kind)


def _color(kind: str) -> str:
    return COLORS.get(kind, COLORS["host"])


def _marker(kind: str) -> dict[str, Any]:
    color = _color(kind)
    if kind not in PALE:
        return {"color": color, "line": {"width": 0}}
    return {
        "color": "rgba(0,0,0,0)",
        "line": {"width": 0.5, "color": color},
        "pattern": {"shape": "/", "fgcolor": color, "bgcolor": "rgba(0,0,0,0)", "size": 6, "solidity": 0.18},
    }


def _shortest_with_label(bars: list[Bar], span_s: float) -> float:
    longest = sorted((bar.duration_s for bar in bars if bar.microbatch is not None), reverse=True)
    return max(SMALLEST_LABEL * span_s, longest[MOST_LABELS] if len(longest) > MOST_LABELS else 0.0)


def _label(bar: Bar, label_s: float) -> str:
    if bar.microbatch is None or bar.kind in PALE or bar.duration_s < label_s:
        return ""
    return str(bar.microbatch)


def _hover(bar: Bar) -> str:
    lines = [html.escape(bar.name, quote=False)]
    if bar.count > 1:
        lines[0] += f" and {bar.count - 1} more of its kind, too short to draw apart"
    kind = bar.kind if bar.what in (None, bar.kind) else f"{bar.kind}, {bar.what}"
    lines.append(f"rank {bar.rank} · {html.escape(WORDS.get(kind, kind), quote=False)}")
    lines.append(f"{seconds(bar.duration_s)} from {seconds(bar.start_s)}")
    if bar.bytes is not None:
        facts = [f"{bar.bytes:,} B ({size(bar.bytes)})"]
        facts += [html.escape(fact, quote=False) for fact in (bar.algorithm, bar.group) if fact]
        lines.append(" · ".join(facts))
    return "<br>".join(lines)

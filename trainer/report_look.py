"""What all figures of a report share: they hold on white and on near-black, and a page sets their texts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import plotly.graph_objects as go

MID = "#808080"  # of texts and lines where no page sets them
GRID = "rgba(128,128,128,0.25)"
LINES = ("#2f7fd0", "#d9662b", "#1f9e77", "#9b6fc9", "#c9a227", "#5f7fa3")


def styled(figure: go.Figure) -> go.Figure:
    """What all figures share."""
    figure.update_layout(
        template="none",
        font={"color": MID, "size": 13, "family": "system-ui, -apple-system, 'Segoe UI', sans-serif"},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        margin={"l": 70, "r": 12, "t": 16, "b": 48},
        hoverlabel={"align": "left"},
    )
    figure.update_xaxes(gridcolor=GRID, automargin=True, title_font={"size": 13})
    figure.update_yaxes(gridcolor=GRID, automargin=True, title_font={"size": 13})
    return figure


def legend_above() -> dict[str, Any]:
    """A legend in rows above the figure, which costs no width."""
    return {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0}

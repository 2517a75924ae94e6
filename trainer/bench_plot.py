"""bandwidth.html: bus bandwidth and time against message size, in one file that needs no network."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.bench_rows import Row, measurements
from trainer.files import write_atomically

HEIGHT_PX = 840
LEGEND_PX = 8  # a line of the legend holds three or four names at 900 pixels
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "star")


def write_plot(report: Row, path: Path) -> None:
    """Writes the page.

    Raises:
        ImportError: plotly is not installed.
        OSError: the file cannot be written.
    """
    figure = make_figure(report)
    page: str = figure.to_html(include_plotlyjs=True, full_html=True, config={"responsive": True})
    write_atomically(path, page)


def make_figure(report: Row) -> Any:
    """A plotly figure: a line for each operation and algorithm, bus bandwidth above, time below.

    Raises:
        ImportError: plotly is not installed.
    """
    import plotly.graph_objects as go
    from plotly.colors import qualitative
    from plotly.subplots import make_subplots

    figure = make_subplots(
        rows=2,
        cols=1,
        shared_xaxes=True,
        vertical_spacing=0.06,
        row_heights=[0.58, 0.42],
    )
    found = series(report["rows"])
    operations = list(dict.fromkeys(operation for operation, _ in found))
    for number, ((operation, name), points) in enumerate(found.items()):
        color = qualitative.Dark24[operations.index(operation) % len(qualitative.Dark24)]
        before = sum(other == operation for other, _ in list(found)[:number])
        symbol = SYMBOLS[before % len(SYMBOLS)]
        for panel, key, unit in ((1, "busbw_GBps", "GB/s"), (2, "time_s", "s")):
            figure.add_trace(
                go.Scatter(
                    x=[size for size, _ in points],
                    y=[measured[key] for _, measured in points],
                    name=name,
                    legendgroup=name,
                    showlegend=panel == 1,
                    mode="lines+markers",
                    line={"color": color, "dash": "solid" if before == 0 else "dot"},
                    marker={"symbol": symbol, "size": 7},
                    hovertemplate=f"{name}<br>%{{x:,}} B<br>%{{y:.4g}} {unit}<extra></extra>",
                ),
                row=panel,
                col=1,
            )
    title = (
        f"{report['world_size']} ranks, {report['backend']} on {report['device']}, "
        f"cluster {report['cluster']}"
    )
    figure.update_layout(
        title={"text": title, "x": 0.02},
        height=HEIGHT_PX + LEGEND_PX * len(found),
        template="plotly_white",
        font={"size": 14},
        margin={"l": 80, "r": 24, "t": 56, "b": 40},
        legend={"orientation": "h", "yanchor": "top", "y": -0.1, "x": 0},
        hovermode="closest",
    )
    figure.update_xaxes(type="log", exponentformat="SI", showticklabels=True)
    figure.update_xaxes(title="message size (B)", row=2, col=1)
    figure.update_yaxes(title="bus bandwidth per direction (GB/s)", rangemode="tozero", row=1, col=1)
    figure.update_yaxes(title="time (s)", type="log", exponentformat="SI", row=2, col=1)
    return figure


def series(rows: Sequence[Row]) -> dict[tuple[str, str], list[tuple[int, Row]]]:
    """(operation, line's name) -> [(size in bytes, what was measured)], out of place where that is there.

    A line is an operation and the algorithm that was asked for; dtype and reduction join the name where
    there are several. What has no size, such as a barrier, has no line.
    """
    varied = [key for key in ("dtype", "reduction") if len({row[key] for row in rows} - {None}) > 1]
    found: dict[tuple[str, str], list[tuple[int, Row]]] = {}
    for row in rows:
        if row["size_bytes"] == 0:
            continue
        parts = [row["operation"], row["algorithm_asked"], *(row[key] for key in varied)]
        name = " ".join(part for part in parts if part is not None)
        _, measured = next(measurements(row))
        found.setdefault((row["operation"], name), []).append((row["size_bytes"], measured))
    return found

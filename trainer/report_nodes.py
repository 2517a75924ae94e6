"""Which ranks run on which node, and what they send to their own node and to others."""

from __future__ import annotations

from typing import Any

from trainer.report import Run, entries, present
from trainer.report_text import NONE, Markup, escape, plain, table

HEADINGS = ("node", "ranks", "to the same node (B)", "to other nodes (B)")

KEYS = ("bytes_sent_within_nodes", "bytes_sent_between_nodes")


def nodes_table(run: Run) -> Markup:
    """A row for each node, bytes being means a step of all its ranks; nothing where no map is on record.

    The names of hosts are in summary.json alone: this page goes to W&B.
    """
    nodes = entries(run.summary.get("nodes"))
    if not nodes:
        return Markup("")
    rows = [
        (
            plain(own.get("node")) if type(own.get("node")) is int else NONE,
            ", ".join(map(str, ranks)) or NONE,
            *(_sent(run, ranks, key) for key in KEYS),
        )
        for own in nodes
        for ranks in [_ranks(own)]
    ]
    words = (
        "Nodes as torchrun or Slurm numbers them; summary.json has the names of their hosts. What the ranks "
        "of each send in a step, to ranks of the same node and of others; a dash: it is not known to whom "
        "the backend's own collectives send."
    )
    total = ("all", "", *(_sent(run, None, key) for key in KEYS))
    return Markup(
        f'<h3>Ranks on nodes</h3>\n<p class="note">{escape(words)}</p>\n'
        f"{table(HEADINGS, rows, numbers=(0, 2, 3), total=total)}"
    )


def _ranks(node: dict[str, Any]) -> list[int]:
    ranks = node.get("ranks")
    return [rank for rank in ranks if type(rank) is int] if isinstance(ranks, list) else []


def _sent(run: Run, ranks: list[int] | None, key: str) -> str:
    """Mean over the steps after warm-up of the ranks' sum; a dash where a step or a rank lacks it."""
    if ranks is None:
        ranks = [rank for node in entries(run.summary.get("nodes")) for rank in _ranks(node)]
    names = [key] if run.world_size == 1 else [f"rank/{rank}/{key}" for rank in ranks]
    values = [present(row.get(name) for name in names) for row in run.steady_rows]
    if not values or any(len(own) != len(names) for own in values):
        return NONE
    return f"{sum(map(sum, values)) / len(values):,.0f}"

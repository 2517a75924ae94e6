"""A row of a sweep's table in words, the same on a terminal and in the report."""

from __future__ import annotations

from trainer.report import Row
from trainer.report_text import NONE


def ratio(value: float | None) -> str:
    return NONE if value is None else f"{value:.2f}"


def cause_text(row: Row) -> str:
    """The cause in words; too noisy, where that is why there is none."""
    return "too noisy" if row["too_noisy"] else str(row["cause"] or NONE).replace("_", " ")


def why_text(row: Row) -> str:
    """Why a job is not compared: its reason and what its folder lacks; empty where nothing is known."""
    return ". ".join(one.rstrip(".") for one in (row["reason"], row["note"]) if one)

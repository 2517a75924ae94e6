"""What summary.json says about a run: how it ended and how it went once it was warm."""

from __future__ import annotations

import statistics
from array import array
from collections.abc import Iterable, Mapping
from typing import Any

# Positions and learning curves have no steady state.
_NOT_STEADY = frozenset(
    "schema step epoch samples_seen loss eval_loss eval_accuracy learning_rate grad_norm".split()
)


class SteadyState:
    """Median and quartiles of the numeric keys over the rows that are no warm-up, in bounded memory.

    Exact up to `capacity` such rows. Beyond it every second kept row is dropped
    and from then on every second is taken, and so on: `every` says which share
    of the steady rows the figures rest on. `rank/R/...` keys are left to metrics.jsonl.
    """

    def __init__(self, capacity: int = 65536) -> None:
        self._capacity = capacity
        self._values: dict[str, array[float]] = {}
        self._fractional: set[str] = set()
        self._rows = 0
        self._kept = 0
        self._every = 1

    def add(self, row: Mapping[str, Any]) -> None:
        """Takes in a row in plain form."""
        if row.get("is_warmup"):
            return
        taken = self._rows % self._every == 0
        self._rows += 1
        if not taken:
            return
        for key, value in row.items():
            kind = type(value)
            if (kind is not int and kind is not float) or key in _NOT_STEADY or key.startswith("rank/"):
                continue
            if key not in self._values:
                self._values[key] = array("d")
            self._values[key].append(value)
            if kind is float:
                self._fractional.add(key)
        self._kept += 1
        if self._kept >= self._capacity:
            for values in self._values.values():
                del values[1::2]
            self._kept = (self._kept + 1) // 2
            self._every *= 2

    def result(self) -> dict[str, Any]:
        """`rows` (steady ones seen), `every`, and per key {median, q1, q3}, linearly interpolated."""
        quantities = {key: self._quartiles(key, values) for key, values in self._values.items() if values}
        return {"rows": self._rows, "every": self._every, **quantities}

    def _quartiles(self, key: str, values: array[float]) -> dict[str, float]:
        if len(values) == 1:
            q1 = median = q3 = values[0]
        else:
            q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
        figures = {"median": median, "q1": q1, "q3": q3}
        if key in self._fractional:
            return figures
        return {name: int(figure) if figure.is_integer() else figure for name, figure in figures.items()}


def summarise(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The steady state of finished rows, as it stands under `steady` in summary.json."""
    steady = SteadyState()
    for row in rows:
        steady.add(row)
    return steady.result()


def run_status(summary: Mapping[str, Any], exit_code: int) -> str:
    """`finished`, `interrupted` (exit code 128 + signal) or `failed: ` and the sentence in summary["error"].

    summary["status"] has the last word.
    """
    if "status" in summary:
        return str(summary["status"])
    if exit_code == 0:
        return "finished"
    if exit_code > 128:
        return "interrupted"
    return f"failed: {summary['error']}" if summary.get("error") else "failed"

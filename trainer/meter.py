"""From what the ranks measured in a step to its row: headline, totals, and every rank's own."""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trainer.control import Gathered, as_count
from trainer.plan import Plan
from trainer.timeline import SPLIT, Observation

OBSERVED_KEYS = ("overlap", "achieved_bandwidth_GBps", "link_fraction")

COUNTED = ("bytes_sent", "bytes_received", "bytes_least")

GIGA = 1e9
RSS_UNIT_BYTES = 1 if sys.platform == "darwin" else 1024  # getrusage(2)


@dataclass(frozen=True)
class StepInfo:
    """What rank 0 knows of a step without asking."""

    step: int
    epoch: int
    rows: int
    samples_seen: int
    learning_rate: float


@dataclass(frozen=True)
class Measured:
    """What the stamps of a step show, by rank; all but the split only of an observed step."""

    split: Sequence[Mapping[str, float]]
    observed: Sequence[Observation] | None
    wire_bytes: Sequence[int | None]
    wire_between: Sequence[int | None]
    wire_steps: int | None


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory held so far: allocated by torch on a GPU, resident in the process on a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT_BYTES


def bandwidth_GBps(sent_bytes: float, time_s: float) -> float | None:
    """Decimal GB/s, or None where nothing was sent."""
    return sent_bytes / time_s / GIGA if sent_bytes and time_s else None


class Meter:
    """Makes rows; keys are defined in docs/metrics.md."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.is_pipeline = plan.is_pipeline
        self._predicted: dict[tuple[int, int], int] = {}

    def predicted(self, rows: int, rank: int) -> int:
        """Closed form of the bytes that `rank` sends on a batch of `rows`."""
        key = (rows, rank)
        if key not in self._predicted:
            plan = self.plan
            table = plan.strategy.bytes_predicted(plan.model, plan.world_size, rank, rows, plan.task)
            self._predicted[key] = sum(table.values())
        return self._predicted[key]

    def row(self, info: StepInfo, gathered: Gathered, measured: Measured | None) -> dict[str, Any]:
        """The row of a step. Time is the slowest rank's, bytes and split those of the rank that sends most.

        Without `measured`, a step whose stamps were lost with the run, what they show is null.
        """
        plan = self.plan
        step_time_s = max(gathered["step_time_s"])
        sent = gathered["bytes_sent"]
        headline = sent.index(max(sent))
        row: dict[str, Any] = {
            "step": info.step,
            "epoch": info.epoch,
            "phase": "train",
            "is_warmup": info.step < plan.config.trainer.warmup_steps,
            "samples_seen": info.samples_seen,
            "loss": sum(gathered["loss_share"]),
            "eval_loss": None,
            "eval_accuracy": None,
            "learning_rate": info.learning_rate,
            "grad_norm": gathered["gradient_norm"][0] if plan.task.clips else None,
            "step_time_s": step_time_s,
            "samples_per_s": info.rows / step_time_s,
            "flops_per_s": plan.model.step_flops(info.rows) / step_time_s,
            **self._split(headline, measured),
            "bytes_sent": int(sent[headline]),
            "bytes_sent_total": int(sum(sent)),
            **self._by_node(headline, gathered, measured),
            "bytes_predicted": self.predicted(info.rows, headline),
            "bytes_least": int(gathered["bytes_least"][headline]),
            "bytes_wire": None if measured is None else measured.wire_bytes[headline],
            "wire_steps": None if measured is None else measured.wire_steps,
            "bytes_control": int(gathered["bytes_control"][headline]),
            "effective_bandwidth_GBps": bandwidth_GBps(sent[headline], step_time_s),
            **self._observed(headline, int(sent[headline]), measured),
            "bubble_fraction": self._bubble(headline, gathered, measured),
            "bubble_expected": plan.strategy.bubble_expected(plan.world_size, info.rows),
            "peak_memory_bytes": int(max(gathered["peak_memory_bytes"])),
        }
        if plan.world_size > 1:
            for rank in range(plan.world_size):
                row |= self._rank_row(rank, gathered, measured)
        return row

    def _rank_row(self, rank: int, gathered: Gathered, measured: Measured | None) -> dict[str, Any]:
        time_s, sent = gathered["step_time_s"][rank], int(gathered["bytes_sent"][rank])
        own = {
            "step_time_s": time_s,
            **self._split(rank, measured),
            "bytes_sent": sent,
            "bytes_wire": None if measured is None else measured.wire_bytes[rank],
            **self._by_node(rank, gathered, measured),
            "effective_bandwidth_GBps": bandwidth_GBps(sent, time_s),
            **self._observed(rank, sent, measured),
            "bubble_fraction": self._bubble(rank, gathered, measured),
            "peak_memory_bytes": int(gathered["peak_memory_bytes"][rank]),
        }
        return {f"rank/{rank}/{key}": value for key, value in own.items()}

    def _by_node(self, rank: int, gathered: Gathered, measured: Measured | None) -> dict[str, int | None]:
        sent, between = int(gathered["bytes_sent"][rank]), as_count(gathered["bytes_between"][rank])
        return {
            "bytes_sent_within_nodes": None if between is None else sent - between,
            "bytes_sent_between_nodes": between,
            "bytes_wire_between_nodes": None if measured is None else measured.wire_between[rank],
        }

    def _split(self, rank: int, measured: Measured | None) -> Mapping[str, float | None]:
        return dict.fromkeys(SPLIT) if measured is None else measured.split[rank]

    def _observed(self, rank: int, sent: int, measured: Measured | None) -> dict[str, float | None]:
        if measured is None or measured.observed is None:
            return dict.fromkeys(OBSERVED_KEYS)
        own = measured.observed[rank]
        known = own.curve_s is not None and own.sending_s
        return {
            "overlap": own.overlap,
            "achieved_bandwidth_GBps": bandwidth_GBps(sent, own.busy_s) if own.busy_s else None,
            "link_fraction": own.curve_s / own.sending_s if known else None,  # type: ignore[operator]
        }

    def _bubble(self, rank: int, gathered: Gathered, measured: Measured | None) -> float | None:
        if measured is None or not self.is_pipeline:
            return None
        return measured.split[rank]["idle_s"] / gathered["step_time_s"][rank]


def byte_table(
    plan: Plan, steps_of: dict[int, int], counted: Sequence[Sequence[Mapping[str, Any]]]
) -> list[dict[str, Any]]:
    """Predicted against counted bytes over a run, a row per operation and rank that takes part in it.

    Args:
        steps_of: global rows -> steps that ran on that many.
        counted: of every rank, its ledger's rows by operation.
    """
    rows_of_table = []
    for rank, own in enumerate(counted):
        predicted: dict[str, int] = {}
        for rows, steps in steps_of.items():
            table = plan.strategy.bytes_predicted(plan.model, plan.world_size, rank, rows, plan.task)
            for name, sent in table.items():
                predicted[name] = predicted.get(name, 0) + steps * sent
        for name in sorted({row["operation"] for row in own} | predicted.keys()):
            parts = [row for row in own if row["operation"] == name]
            shapes = list(dict.fromkeys(row["shape"] for row in parts))
            rows_of_table.append(
                {
                    "operation": name,
                    "shape": shapes[0] if len(shapes) == 1 else f"{len(shapes)} shapes",
                    "rank": rank,
                    "calls": sum(row["calls"] for row in parts),
                    "bytes_predicted": predicted.get(name, 0),
                    **{key: sum(row[key] for row in parts) for key in COUNTED},
                }
            )
    return rows_of_table


def wire_table(totals: Sequence[Mapping[str, int | None]]) -> list[dict[str, Any]]:
    """What left each rank over the steps up to its last reading of the kernel's count; null without one."""
    unread = {"bytes_wire": None, "bytes_wire_between_nodes": None}
    return [{"rank": rank, **own, **({} if own["bytes_wire"] else unread)} for rank, own in enumerate(totals)]

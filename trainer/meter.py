"""From what the ranks measured in a step to its row: headline, totals, and every rank's own."""

from __future__ import annotations

import resource
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trainer.control import Gathered
from trainer.plan import Plan

Counted = Mapping[str, Sequence[int]]

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
        self._predicted: dict[tuple[int, int], int] = {}

    def predicted(self, rows: int, rank: int) -> int:
        """Closed form of the bytes that `rank` sends on a batch of `rows`."""
        key = (rows, rank)
        if key not in self._predicted:
            plan = self.plan
            table = plan.strategy.bytes_predicted(plan.model, plan.world_size, rank, rows, plan.task)
            self._predicted[key] = sum(table.values())
        return self._predicted[key]

    def row(self, info: StepInfo, gathered: Gathered) -> dict[str, Any]:
        """The row of a step. Time is the slowest rank's, bytes those of the rank that sends most."""
        plan = self.plan
        step_time_s = float(gathered["step_time_s"].max())
        sent = gathered["bytes_sent"]
        headline = int(sent.argmax())
        norm = float(gathered["gradient_norm"][0])
        row: dict[str, Any] = {
            "step": info.step,
            "epoch": info.epoch,
            "phase": "train",
            "is_warmup": info.step < plan.config.trainer.warmup_steps,
            "samples_seen": info.samples_seen,
            "loss": float(gathered["loss_share"].sum()),
            "eval_loss": None,
            "eval_accuracy": None,
            "learning_rate": info.learning_rate,
            "grad_norm": norm if plan.task.clips else None,
            "step_time_s": step_time_s,
            "samples_per_s": info.rows / step_time_s,
            "flops_per_s": plan.model.step_flops(info.rows) / step_time_s,
            "bytes_sent": int(sent[headline]),
            "bytes_sent_total": int(sent.sum()),
            "bytes_predicted": self.predicted(info.rows, headline),
            "bytes_least": int(gathered["bytes_least"][headline]),
            "bytes_control": int(gathered["bytes_control"][headline]),
            "effective_bandwidth_GBps": bandwidth_GBps(float(sent[headline]), step_time_s),
            "bubble_expected": plan.strategy.bubble_expected(plan.world_size, info.rows),
            "peak_memory_bytes": int(gathered["peak_memory_bytes"].max()),
        }
        if plan.world_size > 1:
            for rank in range(plan.world_size):
                row |= self._rank_row(rank, gathered)
        return row

    def _rank_row(self, rank: int, gathered: Gathered) -> dict[str, Any]:
        time_s, sent = float(gathered["step_time_s"][rank]), int(gathered["bytes_sent"][rank])
        return {
            f"rank/{rank}/step_time_s": time_s,
            f"rank/{rank}/bytes_sent": sent,
            f"rank/{rank}/effective_bandwidth_GBps": bandwidth_GBps(sent, time_s),
            f"rank/{rank}/peak_memory_bytes": int(gathered["peak_memory_bytes"][rank]),
        }


def byte_table(plan: Plan, steps_of: dict[int, int], counted: Sequence[Counted]) -> list[dict[str, Any]]:
    """Predicted against counted bytes over a run, a row per operation and rank that sends in it.

    Args:
        steps_of: global rows -> steps that ran on that many.
        counted: of every rank, operation -> (calls, bytes) from its ledger.
    """
    rows_of_table = []
    for rank, own in enumerate(counted):
        predicted: dict[str, int] = {}
        for rows, steps in steps_of.items():
            table = plan.strategy.bytes_predicted(plan.model, plan.world_size, rank, rows, plan.task)
            for name, sent in table.items():
                predicted[name] = predicted.get(name, 0) + steps * sent
        for name in sorted(own.keys() | predicted.keys()):
            calls, sent = own.get(name, (0, 0))
            if name in predicted or sent:
                rows_of_table.append(
                    {
                        "operation": name,
                        "rank": rank,
                        "calls": calls,
                        "bytes_predicted": predicted.get(name, 0),
                        "bytes_sent": sent,
                    }
                )
    return rows_of_table

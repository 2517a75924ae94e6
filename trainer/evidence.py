"""The numbers behind a verdict, as entries of verdict.json: name, value, unit, and what it says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from collectives.traffic import ITEMSIZE, algorithms_of
from strategies.communication import Communication
from strategies.schedule import Schedule
from trainer.costs import Measurements, transfer_key
from trainer.plan import Plan
from trainer.timeline import SPLIT
from trainer.whatif import microbatches_of

Entry = dict[str, object]

SPLIT_TEXTS = {
    "compute_s": "computing",
    "exposed_comm_s": "waiting for transfers whose parties had all come",
    "wait_s": "waiting for a rank that was late",
    "idle_s": "a stage with nothing ready",
    "host_s": "data, starting transfers, control, logging",
    "data_s": "of that, waiting for the next batch",
}


def time_split(
    splits: Sequence[Mapping[str, float]], launch_s: Sequence[float], simulation_error: float | None
) -> list[Entry]:
    """Where a typical step went, and how well the simulator tells it; `launch_s` by rank."""
    entries = [
        _entry(
            key,
            float(np.mean([split[key] for split in splits])),
            "s",
            f"{SPLIT_TEXTS[key]}: in a typical step, mean of the ranks",
        )
        for key in SPLIT
    ]
    text = (
        "starting transfers, in which gloo sends; the wall counts it as the link's: in a typical step, mean"
    )
    entries.append(_entry("launch_s", float(np.mean(launch_s)), "s", f"of host_s, {text} of the ranks"))
    if simulation_error is not None:
        text = "simulated over measured step time, less 1"
        entries.append(_entry("simulation_error", simulation_error, "", text))
    return entries


def plan_numbers(
    plan: Plan,
    schedules: Sequence[Schedule],
    samples: Sequence[Measurements],
    splits: Sequence[Mapping[str, float]],
    step_s: float,
) -> list[Entry]:
    """What the plan sends, what its messages take, how equal the ranks' work is, how it fills the bubble."""
    if plan.world_size == 1:
        return []
    return [
        *_messages(schedules, samples),
        *_bytes(plan),
        *_balance(splits),
        *(_bubble(plan, splits, step_s) if plan.is_pipeline else ()),
    ]


def _entry(name: str, value: float, unit: str, text: str) -> Entry:
    return {"name": name, "value": value, "unit": unit, "text": text}


def _messages(schedules: Sequence[Schedule], samples: Sequence[Measurements]) -> Iterator[Entry]:
    """Of the rank that starts most; a message that is received is the sender's."""
    own = max(
        ([o for o in s.operations if isinstance(o, Communication) and o.verb != "recv"] for s in schedules),
        key=len,
    )
    if not own:
        return
    size = sum(operation.numel * ITEMSIZE[operation.dtype] for operation in own) / len(own)
    keys = [transfer_key(operation) for operation in own]
    known = [sample.transfers[key] for sample in samples for key in keys if key in sample.transfers]
    yield _entry("messages", len(own), "", "transfers that a rank starts in a step, the most of all ranks")
    yield _entry("message_bytes", size, "B", "mean size of what they carry")
    if known:
        yield _entry("message_s", float(np.mean(known)), "s", "mean time of one, all parties having come")


def _bytes(plan: Plan) -> Iterator[Entry]:
    rows, n = plan.batch_rows[0], plan.world_size
    best = replace(plan.task, algorithms=algorithms_of(plan.backend, "auto"))
    now, auto = (
        max(sum(plan.strategy.bytes_predicted(plan.model, n, r, rows, task).values()) for r in range(n))
        for task in (plan.task, best)
    )
    yield _entry("bytes_predicted", now, "B", "sent in a step by the rank that sends most")
    if auto != now:
        yield _entry("bytes_predicted_auto", auto, "B", "the same with collectives.algorithm=auto")


def _balance(splits: Sequence[Mapping[str, float]]) -> Iterator[Entry]:
    computing = [split["compute_s"] for split in splits]
    if (mean := float(np.mean(computing))) > 0:
        text = f"most computing over its mean: rank {int(np.argmax(computing))} computes most"
        yield _entry("compute_imbalance", max(computing) / mean, "", text)


def _bubble(plan: Plan, splits: Sequence[Mapping[str, float]], step_s: float) -> Iterator[Entry]:
    rows, n = plan.batch_rows[0], plan.world_size
    expected = plan.strategy.bubble_expected(n, rows)
    idle_s = float(np.mean([split["idle_s"] for split in splits]))
    count = min(microbatches_of(plan.strategy), rows)
    yield _entry("bubble_fraction", idle_s / step_s, "", "idle_s over the step, mean of the stages")
    if expected is not None:
        yield _entry("bubble_expected", expected, "", "closed form for equal stages: (p-1) / (m+p-1)")
    yield _entry("microbatches", count, "", "of a batch")
    yield _entry("microbatch_rows", rows / count, "rows", "in each, on average")

"""The end of a run, on all ranks: probes, gathered on rank 0, where the verdict is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from collectives.group import World
from strategies.compute import Update
from strategies.schedule import Schedule
from trainer.control import gather_json
from trainer.costs import ComputeKey, elements
from trainer.executor import Rank
from trainer.files import write_atomically
from trainer.plan import Plan
from trainer.probe import Probes, probe, probe_updates
from trainer.verdict import Verdict
from trainer.whatif import microbatches_of

VERDICT_FILE = "verdict.json"
SCHEMA = 1


def run_probes(plan: Plan, world: World, rank: Rank, budget_s: float) -> Probes:
    """What the changes of the plan would have computing take, and this run did not have, of every rank.

    All ranks call it; about `budget_s` seconds, and two passes over each number of microbatches at least.
    """
    if budget_s == 0:
        return Probes()
    now, rows = microbatches_of(plan.strategy), plan.batch_rows[0]
    strategies = {}
    update_sizes = _update_sizes(plan.strategy.schedule(plan.model, world.size, world.rank, rows, plan.task))
    other_sizes: set[int] = set()
    for change in plan.changes:
        if change.cause in ("idle_bubble", "small_microbatches"):
            strategies[microbatches_of(change.strategy)] = change.strategy
        else:
            schedule = change.strategy.schedule(plan.model, world.size, world.rank, rows, change.task)
            other_sizes |= _update_sizes(schedule) - update_sizes
    if strategies or other_sizes:
        strategies[now] = plan.strategy
    microbatches: dict[str, Any] = {}
    loads: dict[str, float] = {}
    for count, strategy in strategies.items():
        found = probe(rank, strategy, rows, budget_s / len(strategies))
        microbatches[str(count)] = None
        if found is not None:
            microbatches[str(count)] = [[*key, s] for key, s in found.computes.items()]
            loads[str(count)] = found.load_s
    updates: dict[int, float] = {}
    if other_sizes:
        updates = probe_updates(rank, other_sizes | update_sizes, plan.config.optimizer)
    found_here = {"microbatches": microbatches, "loads": loads, "updates": list(updates.items())}
    ranks = gather_json(world, found_here)
    return Probes(
        {count: [_costs_of(own["microbatches"][str(count)]) for own in ranks] for count in strategies},
        {(r, int(count)): s for r, own in enumerate(ranks) for count, s in own["loads"].items()},
        {(r, count): seconds for r, own in enumerate(ranks) for count, seconds in own["updates"]},
    )


def _update_sizes(schedule: Schedule) -> set[int]:
    return {elements(own.layers) for own in schedule.operations if isinstance(own, Update) and own.layers}


def _costs_of(found: list[list[Any]] | None) -> dict[ComputeKey, float] | None:
    return None if found is None else {(kind, layer, rows): s for kind, layer, rows, s in found}


def sentence(verdict: Verdict) -> str:
    """In words a reader can repeat."""
    if verdict.step_time_s is None or verdict.wall is None:
        return "There is no verdict: " + "; ".join(verdict.missing) + "."
    step = f"A step takes {milliseconds(verdict.step_time_s)}, most of it {WALL_TEXTS[verdict.wall]}."
    finding = verdict.finding
    if finding is None:
        if verdict.too_noisy and verdict.noise_s is not None:
            sure = milliseconds(verdict.noise_s)
            why = f"The measurement is too noisy to tell: its median is sure to {sure}"
        elif verdict.noise_s is None:
            why = "No cause could be looked for: " + "; ".join(verdict.missing)
        elif verdict.missing:
            why = "No change that could be judged would give back 5 % of it; not judged: "
            why += "; ".join(verdict.missing)
        else:
            why = "No single change of the configuration would give back 5 % of it"
        return f"{step} {why}."
    share = finding.gain_s / verdict.step_time_s
    cure = f"Without that it would take {milliseconds(finding.predicted_step_time_s)} ({share:.0%} less)"
    change = f": set {finding.override}" if finding.override else ""
    return f"{step} The cause is {finding.cause}: {finding.text}. {cure}{change}."


WALL_TEXTS = {
    "compute": "computing",
    "link": "waiting for the link",
    "bubble": "idle in the pipeline's bubble",
    "memory": "reading and writing parameters",
    "input": "waiting for data",
    "host": "on the host, between operations",
}


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def to_json(verdict: Verdict) -> dict[str, Any]:
    """verdict.json; docs/verdict.md says what each key means."""
    finding = verdict.finding
    step_s = verdict.step_time_s
    return {
        "schema": SCHEMA,
        "wall": verdict.wall,
        "cause": verdict.cause,
        "rank": None if finding is None else finding.rank,
        "sentence": sentence(verdict),
        "step_time_s": step_s,
        "step_time_q1_s": None if verdict.quartiles_s is None else verdict.quartiles_s[0],
        "step_time_q3_s": None if verdict.quartiles_s is None else verdict.quartiles_s[1],
        "steps": verdict.steps,
        "noise_s": verdict.noise_s,
        "simulated_step_time_s": verdict.simulated_step_time_s,
        "predicted_step_time_s": None if finding is None else finding.predicted_step_time_s,
        "gain_s": None if finding is None else finding.gain_s,
        "gain_share": None if finding is None or not step_s else finding.gain_s / step_s,
        "override": None if finding is None else finding.override,
        "too_noisy": verdict.too_noisy,
        "missing": list(verdict.missing),
        "time_split": [{"rank": rank, **split} for rank, split in enumerate(verdict.splits)],
        "evidence": list(verdict.evidence),
        "causes": [
            {
                "cause": own.cause,
                "rank": own.rank,
                "gain_s": own.gain_s,
                "gain_share": own.gain_s / step_s if step_s else None,
                "predicted_step_time_s": own.predicted_step_time_s,
                "override": own.override,
                "text": own.text,
            }
            for own in verdict.findings
        ],
    }


def write_verdict(verdict: Verdict, run_dir: Path) -> dict[str, Any]:
    """Write verdict.json, whole or not at all; returns what it holds."""
    record = to_json(verdict)
    write_atomically(run_dir / VERDICT_FILE, json.dumps(record, indent=2) + "\n")
    return record

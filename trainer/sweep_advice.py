"""The sentence of a sweep: the largest world size worth using, and the cause that stops the next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trainer.report import Row
from trainer.report_text import many, plain
from trainer.sweep_ranking import NO_ONE_RANK, Problem, best_plans, overlapping
from trainer.sweep_rows import PLAN_KEYS, within

LEAST_GAIN = 0.05  # of the samples per second, that more ranks must give to be worth using
NAMED = ("strategy", "world_size", "strategy.microbatches")  # what a plan's name says anyway


@dataclass(frozen=True)
class Advice:
    """`job` is the number of the job with the plan to use; None where nothing could be ranked."""

    sentence: str
    remarks: tuple[str, ...] = ()
    world_size: int | None = None
    job: int | None = None


def advice(problem: Problem) -> Advice:
    """What the jobs of a problem say about the number of ranks.

    Going up world sizes, each is worth using whose best plan gives at least `LEAST_GAIN` more samples per
    second than that of the largest one worth using below it, and more than the spread: the interquartile
    ranges do not overlap. The smallest is worth using.
    """
    best = {row["world_size"]: row for row in best_plans(problem.ranked)}
    if not best:
        return Advice(_labelled(problem, "no job is complete, so that there is nothing to compare."))
    sizes = sorted(best)
    used = sizes[0]
    for size in sizes[1:]:
        if _gain(best[used], best[size]) >= LEAST_GAIN and not overlapping(best[used], best[size]):
            used = size
    chosen = best[used]
    above = [size for size in sizes if size > used]
    clause = _stops(chosen, best[above[0]]) if above else _nothing_above(problem, used)
    sentence = f"Use {many(used, 'rank')} with {plan_text(chosen)}{_speed(chosen, problem)}; {clause}."
    return Advice(_labelled(problem, sentence), tuple(_remarks(problem, chosen)), used, chosen["number"])


def plan_text(row: Row) -> str:
    """A plan's name: strategy, microbatches, and what else of it was swept."""
    parts = [row["strategy"] or "an unknown strategy"]
    if row["microbatches"] is not None:
        parts.append(f"microbatches={row['microbatches']}")
    return ", ".join([*parts, *(f"{key}={value}" for key, value in tuned(row["swept"]).items())])


def tuned(swept: Mapping[str, str]) -> dict[str, str]:
    """The swept keys that tune a plan and that its name does not say anyway, without their section."""
    own = {key: value for key, value in swept.items() if within(key, PLAN_KEYS) and key not in NAMED}
    return {key.rpartition(".")[2]: value for key, value in own.items()}


def _speed(row: Row, problem: Problem) -> str:
    if problem.one_rank is None:
        return f", {plain(row['samples_per_s'])} samples a second"
    if row is problem.one_rank:
        return ""
    return f": {row['speedup']:.2f} times one rank ({row['efficiency']:.2f} efficiency)"


def _gain(row: Row, other: Row) -> float:
    return float(other["samples_per_s"] / row["samples_per_s"] - 1)


def _stops(chosen: Row, stopped: Row) -> str:
    """Why the next world size is not worth using."""
    gain = _gain(chosen, stopped)
    if gain < 0 and not overlapping(chosen, stopped):
        how = "is slower"
    elif gain < LEAST_GAIN and not overlapping(chosen, stopped):
        how = f"gives only {100 * gain:.1f} % more samples a second"
    else:
        how = "is not faster beyond the spread"
    cause, wall = stopped["cause"], stopped["wall"]
    if cause is None:
        said = "it has no verdict"
    elif stopped["too_noisy"]:
        said = "its verdict is that the step is too noisy to name a cause"
    elif cause == "none":
        said = "its verdict names no cause" + ("" if wall is None else f", its wall is {wall}")
    else:
        said = f"its verdict is {cause}"
    size = stopped["world_size"]
    return f"with {many(size, 'rank')} the best plan ({plan_text(stopped)}) {how}, and {said}"


def _nothing_above(problem: Problem, used: int) -> str:
    above = [row for row in problem.others if (row["world_size"] or 0) > used]
    if not above:
        return "no more ranks were tried"
    size = min(row["world_size"] for row in above)
    first = next(row for row in above if row["world_size"] == size)
    why = str(first["reason"] or first["note"] or first["state"]).rstrip(".")
    return f"with {many(size, 'rank')} no job is complete (job {first['number']}: {why})"


def _remarks(problem: Problem, chosen: Row) -> list[str]:
    remarks = []
    if chosen["tied_with"]:
        jobs = ", ".join(str(number) for number in chosen["tied_with"])
        noun = "job" if len(chosen["tied_with"]) == 1 else "jobs"
        remarks.append(
            f"The order is not sure: the quartiles of {noun} {jobs} overlap with those of job "
            f"{chosen['number']}."
        )
    if problem.cores is not None:
        shared = {row["world_size"] for row in problem.ranked if row["world_size"] > problem.cores}
        sizes = " and ".join(str(size) for size in sorted(shared)) or "some"
        remarks.append(
            f"Jobs with {sizes} ranks shared {many(problem.cores, 'core')}: their times tell about taking "
            "turns, not about so many processors."
        )
    if problem.one_rank is None:
        remarks.append(f"There is no speed-up or efficiency: {NO_ONE_RANK}.")
    return remarks


def _labelled(problem: Problem, sentence: str) -> str:
    if problem.label:
        return f"{problem.label}: {sentence}"
    return sentence[0].upper() + sentence[1:]

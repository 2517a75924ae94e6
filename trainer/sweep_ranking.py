"""The order of a sweep's plans: problems, places, ties, and speed-up over one rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from trainer.report import Row
from trainer.sweep_rows import PLAN_KEYS, within

NO_ONE_RANK = "the sweep has no complete one-rank job of this problem to compare with"
MOST_LABEL_KEYS = 3

AnyRow = TypeVar("AnyRow", bound=Mapping[str, Any])


@dataclass(frozen=True)
class Problem:
    """Jobs that do the same work under different plans.

    `label` tells it from the sweep's other problems, and is empty where there is one. `ranked` are its rows
    that may be compared, the best first; `others` those that may not, in the order of the sweep. `one_rank`
    is the best of `ranked` with one rank. `cores` are those of a machine whose ranks had to share them.
    """

    number: int
    label: str
    ranked: tuple[Row, ...]
    others: tuple[Row, ...]
    one_rank: Row | None
    cores: int | None


def ranked_problems(jobs: Sequence[tuple[Row, Row]]) -> tuple[Problem, ...]:
    """The problems in the order of their first job; fills in the rows' columns that compare jobs.

    `jobs` are those of `sweep_rows.job_row`. A job that left no config.yaml belongs to the problem of those
    with its values of the swept keys that make a problem; where there are none, to none.
    """
    groups: list[dict[str, str]] = []
    members: list[list[tuple[Row, Row]]] = []
    homeless = []
    for row, known in jobs:
        keys = known["problem_keys"]
        if keys is None:
            homeless.append((row, known))
        elif keys in groups:
            members[groups.index(keys)].append((row, known))
        else:
            groups.append(keys)
            members.append([(row, known)])
    for row, known in homeless:
        own = swept_problem(row)
        for group in members:
            if swept_problem(group[0][0]) == own:
                group.append((row, known))
                break
    labels = problem_labels(groups, [swept_problem(group[0][0]) for group in members])
    return tuple(
        _problem(number, label, group)
        for number, (label, group) in enumerate(zip(labels, members, strict=True))
    )


def swept_problem(row: Row) -> dict[str, str]:
    """The swept keys of a row that tell problems apart."""
    return {key: value for key, value in row["swept"].items() if not within(key, PLAN_KEYS)}


def problem_labels(groups: Sequence[Mapping[str, str]], swept: Sequence[Mapping[str, str]]) -> list[str]:
    """What tells each problem from the others: as it was swept, or else by the configuration's keys."""
    if len(groups) < 2:
        return ["" for _ in groups]
    texts = [", ".join(f"{key}={value}" for key, value in own.items()) for own in swept]
    if len(set(texts)) == len(texts) and all(texts):
        return texts
    keys = [key for key in groups[0] if len({own.get(key) for own in groups}) > 1]
    keys += [key for own in groups[1:] for key in own if key not in groups[0] and key not in keys]
    return [", ".join(f"{key}={own.get(key, 'null')}" for key in keys[:MOST_LABEL_KEYS]) for own in groups]


def _problem(number: int, label: str, jobs: Sequence[tuple[Row, Row]]) -> Problem:
    ranked = sorted((row for row, known in jobs if known["whole"]), key=lambda row: -row["samples_per_s"])
    one_rank = next((row for row in ranked if row["world_size"] == 1), None)
    for place, row in enumerate(ranked, 1):
        row["place"] = place
        row["tied_with"] = sorted(
            other["number"] for other in ranked if other is not row and overlapping(row, other)
        )
        if one_rank is not None:
            row["speedup"] = row["samples_per_s"] / one_rank["samples_per_s"]
            row["efficiency"] = row["speedup"] / row["world_size"]
        else:
            row["note"] = "; ".join(one for one in (row["note"], NO_ONE_RANK) if one)
    for row, _ in jobs:
        row["problem"] = number
    others = sorted((row for row, known in jobs if not known["whole"]), key=lambda row: row["number"])
    cores = [known["cores"] for _, known in jobs if known["whole"] and known["cores"] is not None]
    return Problem(number, label, tuple(ranked), tuple(others), one_rank, min(cores, default=None))


def best_plans(rows: Iterable[AnyRow]) -> list[AnyRow]:
    """Of the ranked rows of each problem and world size the one with the first place, in that order."""
    best: dict[tuple[int, int], AnyRow] = {}
    for row in rows:
        if row["place"] is None:  # not complete, or not whole
            continue
        plan = (row["problem"], row["world_size"])
        if plan not in best or row["place"] < best[plan]["place"]:
            best[plan] = row
    return [best[plan] for plan in sorted(best)]


def overlapping(row: Row, other: Row) -> bool:
    """Whether the interquartile ranges of the samples per second have a value in common."""
    return bool(
        row["samples_per_s_low"] <= other["samples_per_s_high"]
        and other["samples_per_s_low"] <= row["samples_per_s_high"]
    )

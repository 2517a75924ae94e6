"""Slow-downs put into stamps by hand, and what a plan takes under them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from strategies.compute import LayerOperation
from strategies.simulator import simulate
from tests.test_verdict import MS, history_of, plan_of, stamps, timeline_of
from trainer.config import DataConfig, StrategyConfig
from trainer.contention import Contention, measured_contention, neighbours
from trainer.costs import Measurements, PlanCosts, measure
from trainer.history import History
from trainer.plan import Plan
from trainer.spans import COMPUTE

MICROBATCHED = StrategyConfig("ddp", microbatches=4)


def disturbed(plan: Plan, slowdown: float, noise: float = 0.0) -> History:
    """Rank 0 computes 1 ms an operation; while rank 1 computes, which is for half of it, 1 + slowdown ms.

    Rank 1 is in its first operation all that time, and in no time through the others.
    """
    random = np.random.default_rng(0)
    tracks = timeline_of(plan).tracks
    count = len(tracks[0].spans)
    records = []
    for _ in range(4):
        marks = [1 * MS]
        for place, kind in enumerate(tracks[0].kinds):
            seconds = MS if place >= count // 2 else (1 + slowdown) * MS
            marks.append(
                marks[-1] + (seconds * (1 + noise * random.standard_normal()) if kind == COMPUTE else 0.0)
            )
        together = marks[count // 2]
        other = [1 * MS] + [together] * count
        end = marks[-1] + 1 * MS
        records.append([np.array([0.0, 0.0, 0.0, *own, end]) for own in (marks, other)])
    return history_of(plan, records)


@pytest.mark.parametrize("slowdown", [0.0, 0.25, 0.6])
def test_the_slowdown_is_that_of_the_stamps(slowdown: float) -> None:
    plan = plan_of(MICROBATCHED)
    steps = disturbed(plan, slowdown).steady()
    found = measured_contention(timeline_of(plan), plan.schedules(16), steps, (0, 0))
    assert found.lost == pytest.approx(slowdown / (1 + slowdown), abs=1e-6)


def test_noise_hardly_moves_it() -> None:
    plan = plan_of(MICROBATCHED)
    steps = disturbed(plan, 0.5, noise=0.1).steady()
    found = measured_contention(timeline_of(plan), plan.schedules(16), steps, (0, 0))
    assert found.lost == pytest.approx(0.5 / 1.5, abs=0.05)


def test_ranks_of_other_nodes_do_not_disturb() -> None:
    plan = plan_of(MICROBATCHED)
    steps = disturbed(plan, 0.6).steady()
    assert measured_contention(timeline_of(plan), plan.schedules(16), steps, (0, 1)).lost == 0
    assert neighbours((0, 0, 1, 0), 0) == [1, 3]


def test_ranks_that_always_compute_together_tell_nothing() -> None:
    plan = plan_of(MICROBATCHED)
    steps = history_of(plan, stamps(plan, {0: MS, 1: MS}, MS)).steady()
    assert measured_contention(timeline_of(plan), plan.schedules(16), steps, (0, 0)).lost == 0


def costs_of(plan: Plan, computing_s: dict[int, float]) -> Measurements:
    """Computing as said, by rank; all else takes no time."""
    stamped = plan_of(StrategyConfig("ddp", microbatches=4), plan.world_size)
    history = history_of(stamped, stamps(stamped, dict.fromkeys(computing_s, MS), 0.0, launch_s=0.0))
    measured = measure(timeline_of(stamped), stamped.schedules(16), history)[0]
    nothing = dict.fromkeys(computing_s, (0.0, 0.0))
    rows = [schedule.rows for schedule in plan.schedules(plan.batch_rows[0])]
    computes = {
        (rank, (type(own).__name__, own.layer.index, rows[rank][own.microbatch])): computing_s[rank]
        for rank, schedule in enumerate(plan.schedules(plan.batch_rows[0]))
        for own in schedule.operations
        if isinstance(own, LayerOperation)
    }
    return dataclasses.replace(
        measured,
        computes=computes,
        updates={},
        launches={(rank, verb): 0.0 for rank in computing_s for verb in ("send", "recv", "all_reduce")},
        waits={},
        transfers={},
        scaled=lambda operation: 0.0,
        before=nothing,
        after=dict.fromkeys(computing_s, 0.0),
    )


def test_a_plan_that_stays_takes_what_it_took() -> None:
    """Whatever the slow-down: it is in the costs already."""
    plan = plan_of(StrategyConfig("pipeline", microbatches=4, partition=(3, 1)))
    schedules, costs = plan.schedules(16), costs_of(plan, {0: MS, 1: 2 * MS})
    took = simulate(schedules, PlanCosts(costs, schedules), pipeline=True).step_time_s
    for lost in (0.0, 0.375):
        found = Contention(lost, (0, 0)).step_s(schedules, schedules, costs, pipeline=True)
        assert found == pytest.approx(took, rel=1e-6)


def test_stages_that_compute_in_turns_do_not_disturb_each_other() -> None:
    """One microbatch: never two ranks at once, under either partition."""
    plan, even = (
        plan_of(StrategyConfig("pipeline", microbatches=1, partition=partition))
        for partition in ((3, 1), None)
    )
    before, after, costs = plan.schedules(16), even.schedules(16), costs_of(plan, {0: MS, 1: MS})
    alone = Contention(0.0, (0, 0)).step_s(before, after, costs, pipeline=True)
    assert Contention(0.375, (0, 0)).step_s(before, after, costs, pipeline=True) == pytest.approx(
        alone, rel=0.01
    )


def test_even_stages_pay_for_computing_at_once() -> None:
    """From 3-1 layers to 2-2 in many microbatches; an operation takes 1 ms alone, 1.6 ms in company.

    The highest layer has a loss besides. Under 3-1 a microbatch is 9 operations and 4: the small stage always
    has company, 6.4 ms; the large one loses 0.375 of those, and takes 9 + 2.4 ms. Under 2-2 it is 6 and 7:
    the lower stage always has company, 9.6 ms, and the upper one, for which it waits, takes 7 + 3.6 ms. Less
    at both ends of the step, where one computes alone.
    """
    before, after = (
        plan_of(
            StrategyConfig("pipeline", microbatches=64, partition=partition),
            data=DataConfig(name="synthetic", batch_size=64, num_samples=64, eval_samples=0),
        )
        for partition in ((3, 1), None)
    )
    counts = [[_operations(plan, rank) for rank in (0, 1)] for plan in (before, after)]
    assert counts == [[9 * 64, 4 * 64], [6 * 64, 7 * 64]]
    costs = costs_of(before, {0: 11.4 / 9 * MS, 1: 1.6 * MS})
    contention = Contention(0.375, (0, 0))
    found = contention.step_s(before.schedules(64), after.schedules(64), costs, pipeline=True)
    assert found == pytest.approx(64 * 10.6 * MS, rel=0.03)


def _operations(plan: Plan, rank: int) -> int:
    return sum(isinstance(own, LayerOperation) for own in plan.schedules(64)[rank].operations)


def test_company_is_counted_once_however_many_others_compute() -> None:
    """Three ranks that do the same in step: each is in company all the time, nothing changes."""
    plan = plan_of(StrategyConfig("ddp", microbatches=2), 3)
    schedules, costs = plan.schedules(16), costs_of(plan, {0: MS, 1: MS, 2: MS})
    took = simulate(schedules, PlanCosts(costs, schedules), pipeline=False).step_time_s
    found = Contention(0.8, (0, 0, 0)).step_s(schedules, schedules, costs, pipeline=False)
    assert found == pytest.approx(took, rel=1e-6)

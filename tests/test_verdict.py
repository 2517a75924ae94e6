"""Costs, changes and the verdict, from stamps chosen by hand; test_planted.py plants causes in real runs."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from collectives.link import Curve, LinkCurve, Point
from models.block import Model
from strategies.communication import Communication
from strategies.compute import GradientNorm, Update
from strategies.ddp import DataParallel
from strategies.schedule import Schedule
from strategies.simulator import simulate
from strategies.strategy import Options, Task
from trainer.config import (
    CollectivesConfig,
    DataConfig,
    LoggerConfig,
    ModelConfig,
    RunConfig,
    StrategyConfig,
    TrainerConfig,
)
from trainer.costs import PlanCosts, UnknownCost, measure
from trainer.history import History, Kept
from trainer.judging import sentence, write_verdict
from trainer.link import Links
from trainer.matching import Matching
from trainer.plan import Plan, make_plan
from trainer.probe import Probes
from trainer.recorder import Recorded
from trainer.remedies import Remedies
from trainer.slowness import slow_rank
from trainer.spans import COMPUTE, LAUNCH, MEET, WAIT
from trainer.timeline import HEAD, Timeline
from trainer.trace import write_trace
from trainer.verdict import Judge
from trainer.whatif import changes, rebalanced

MS = 1e-3


def plan_of(strategy: StrategyConfig, size: int = 2, **changed: Any) -> Plan:
    run = RunConfig(
        run_dir="/nonexistent",
        model=ModelConfig(num_layers=4, hidden_dim=8),
        strategy=strategy,
        data=DataConfig(name="synthetic", batch_size=16, num_samples=64, eval_samples=0),
        trainer=TrainerConfig(warmup_steps=0),
        logger=LoggerConfig(name="none"),
    )
    return make_plan(dataclasses.replace(run, **changed), size)


def stamps(
    plan: Plan, compute_s: dict[int, float], transfer_s: float, launch_s: float = 0.1 * MS, steps: int = 4
) -> list[list[np.ndarray]]:
    """[steps][ranks] records of a collective plan: all ranks start a step together, every wait ends when the
    transfer, which starts with the last rank and has the channel to itself, is over."""
    schedules = plan.schedules(plan.batch_rows[0])
    tracks = Matching(schedules, False).tracks
    found = []
    begin = 0.0
    for _ in range(steps):
        clocks = [begin + 1 * MS] * plan.world_size
        marks: list[list[float]] = [[] for _ in clocks]
        arrived: dict[int, float] = {}
        free, done = 0.0, {}
        for places in itertools.zip_longest(*(track.spans for track in tracks)):
            for rank, span in enumerate(places):
                marks[rank].append(clocks[rank])
                if span.kind == COMPUTE:
                    clocks[rank] += compute_s[rank]
                elif span.kind == LAUNCH:
                    number = dict(tracks[rank].starts)[len(marks[rank]) - 1]
                    arrived[number] = max(arrived.get(number, 0.0), clocks[rank])
                    clocks[rank] += launch_s
            waits = [dict(track.waits).get(len(marks[0]) - 1) for track in tracks]
            if places[0].kind == WAIT:
                number = waits[0]
                if number not in done:
                    free = done[number] = max(arrived[number], free) + transfer_s  # type: ignore[index]
                clocks = [max(clock, done[number]) for clock in clocks]  # type: ignore[index]
        end = max(clocks) + 1 * MS
        found.append(
            [np.array([begin, begin, begin, *marks[r], clocks[r], end]) for r in range(plan.world_size)]
        )
        begin = end
    return found


def history_of(plan: Plan, records: list[list[np.ndarray]]) -> History:
    history = History(plan.batch_rows[0], 0)
    for step, own in enumerate(records):
        history.add(step, Recorded(plan.batch_rows[0], False, own, [None] * plan.world_size))
    return history


def timeline_of(plan: Plan) -> Timeline:
    return Timeline(plan.schedules(plan.batch_rows[0]), False, plan.is_pipeline)


NOT_OVERLAPPED = StrategyConfig("ddp", overlap=False, bucket_mb=0)


def test_costs_are_those_that_the_stamps_were_made_of() -> None:
    """Computing 2 ms an operation on rank 0, 1 ms on rank 1; transfers of 3 ms; launches of 0.1 ms."""
    plan = plan_of(NOT_OVERLAPPED)
    history = history_of(plan, stamps(plan, {0: 2 * MS, 1: 1 * MS}, 3 * MS))
    schedules = plan.schedules(16)
    for costs in measure(timeline_of(plan), schedules, history):
        for (rank, _), seconds in costs.computes.items():
            assert seconds == pytest.approx((2 - rank) * MS)
        assert all(seconds == pytest.approx(0.1 * MS) for seconds in costs.launches.values())
        assert all(seconds == pytest.approx(3 * MS) for seconds in costs.transfers.values())
        assert costs.before[0] == pytest.approx((0, 1 * MS)) and costs.norm_s == 0


def test_the_simulator_gives_the_step_that_was_stamped() -> None:
    plan = plan_of(NOT_OVERLAPPED)
    records = stamps(plan, {0: 2 * MS, 1: 2 * MS}, 3 * MS)
    schedules = plan.schedules(16)
    costs = measure(timeline_of(plan), schedules, history_of(plan, records))[0]
    expected = records[0][0][-1] - records[0][0][0]
    found = simulate(schedules, PlanCosts(costs, schedules), pipeline=False)
    assert found.step_time_s == pytest.approx(expected, rel=1e-6)


def test_too_few_steps_say_nothing() -> None:
    plan = plan_of(NOT_OVERLAPPED)
    history = history_of(plan, stamps(plan, {0: MS, 1: MS}, MS, steps=2))
    with pytest.raises(UnknownCost, match="a verdict needs 3 steps after warm-up, and has 2"):
        measure(timeline_of(plan), plan.schedules(16), history)
    verdict = Judge(plan, timeline_of(plan), history, Remedies(plan, Links(), False)).verdict()
    assert verdict.cause is None and verdict.missing == ("a verdict needs 3 steps after warm-up, and has 2",)
    assert sentence(verdict).endswith("needs 3 steps after warm-up, and has 2.")


@pytest.mark.parametrize("steps", [3, 4, 5, 6, 7, 8])
def test_three_steps_and_more_have_costs(steps: int) -> None:
    """Steps of 1, 2, ... ms an operation: of six, only two lie between the quartiles, 2.25 and 4.75."""
    plan = plan_of(NOT_OVERLAPPED)
    records = [stamps(plan, {0: k * MS, 1: k * MS}, MS, steps=1)[0] for k in range(1, steps + 1)]
    costs = measure(timeline_of(plan), plan.schedules(16), history_of(plan, records))
    first, last = {3: (1, 3), 4: (1, 4), 5: (2, 4), 6: (1, 6), 7: (3, 5), 8: (3, 6)}[steps]
    taken = [own.computes[0, ("Loss", 3, 8)] for own in costs]
    assert taken == pytest.approx([k * MS for k in range(first, last + 1)])


def test_observed_steps_count_where_there_are_too_few_others() -> None:
    """Two plain steps and two observed ones, whose records go on with eight completions, none seen."""
    plan = plan_of(NOT_OVERLAPPED)
    history = History(16, 0)
    for step, own in enumerate(stamps(plan, {0: MS, 1: MS}, 3 * MS)):
        observed = step % 2 == 0
        records = [np.append(record, np.full(8, np.nan)) for record in own] if observed else own
        history.add(step, Recorded(16, observed, records, [None, None]))
    assert [kept.step for kept in history.steady()] == [0, 1, 2, 3]
    verdict = Judge(plan, timeline_of(plan), history, Remedies(plan, Links(), False)).verdict()
    assert (verdict.steps, verdict.cause) == (4, "no_overlap")
    for step, own in enumerate(stamps(plan, {0: MS, 1: MS}, 3 * MS, steps=3), start=4):
        history.add(step, Recorded(16, False, own, [None, None]))
    assert [kept.step for kept in history.steady()] == [1, 3, 4, 5, 6]


def test_no_step_gives_no_verdict() -> None:
    plan = plan_of(NOT_OVERLAPPED)
    judge = Judge(plan, timeline_of(plan), History(16, 0), Remedies(plan, Links(), False))
    assert sentence(judge.verdict()) == "There is no verdict: no step after warm-up."


def test_sending_within_the_call_that_starts_is_the_links_wall() -> None:
    """Eight calls of 5 ms, of 42 ms of host; 13 operations and 8 updates of 1 ms; next to no waiting."""
    plan = plan_of(NOT_OVERLAPPED)
    history = history_of(plan, stamps(plan, {0: MS, 1: MS}, 0.1 * MS, launch_s=5 * MS))
    verdict = Judge(plan, timeline_of(plan), history, Remedies(plan, Links(), False)).verdict()
    assert verdict.wall == "link"
    numbers = {entry["name"]: entry["value"] for entry in verdict.evidence}
    assert numbers["launch_s"] == pytest.approx(40 * MS)
    assert numbers["host_s"] == pytest.approx(42 * MS)
    assert numbers["exposed_comm_s"] < 1 * MS


def test_waiting_in_the_norms_exchange_is_no_memory() -> None:
    """Rank 3's first operation takes 41 ms, all others of 13 take 1 ms: 3 x 13 + 53 = 92 ms of computing.

    The others wait 40 ms for it in the exchange, 120 ms together.
    """
    trainer = TrainerConfig(warmup_steps=0, clip_grad_norm=1.0)
    plan = plan_of(StrategyConfig("ddp"), size=4, trainer=trainer)
    timeline = Timeline(plan.schedules(16), True, False)
    records = []
    for rank, track in enumerate(timeline.tracks):
        computes = [
            s.kind == COMPUTE and not isinstance(s.operation, Update | GradientNorm) for s in track.spans
        ]
        taken = np.where(computes, MS, 0.0)
        taken[0 if rank == 3 else [s.kind for s in track.spans].index(MEET)] += 40 * MS
        assert sum(computes) == 13
        marks = np.cumsum([0.0, *taken])
        records.append(np.array([0.0, 0.0, 0.0, *marks, marks[-1]]))
    history = history_of(plan, [records] * 4)
    verdict = Judge(plan, timeline, history, Remedies(plan, Links(), False)).verdict()
    assert sum(split["compute_s"] for split in verdict.splits) == pytest.approx(92 * MS)
    assert sum(split["wait_s"] for split in verdict.splits) == pytest.approx(120 * MS)
    assert verdict.wall == "compute"


# What a change gives back


def test_overlap_off_is_named_with_what_it_costs(tmp_path: Path) -> None:
    """Four layers with weight and bias, eight reductions of 3 ms at the end, one after the other.

    A step: 1 ms of host, 4 forwards, a loss and 8 backwards of 1 ms, eight launches, 24 ms of transfers, 8
    updates of which the last comes after all, 1 ms. Launched under backward, the first transfer starts 2
    backward operations after the loss and the last cannot be over before 24 ms later: 6 ms of backward are
    hidden, and what the launches take.
    """
    plan = plan_of(NOT_OVERLAPPED)
    records = stamps(plan, {0: MS, 1: MS}, 3 * MS)
    judge = Judge(plan, timeline_of(plan), history_of(plan, records), Remedies(plan, Links(), False))
    verdict = judge.verdict()
    assert verdict.cause == "no_overlap" and verdict.finding is not None
    assert verdict.finding.override == "strategy.overlap=true"
    assert 6 * MS <= verdict.finding.gain_s <= 7 * MS
    assert verdict.wall == "link"
    record = write_verdict(verdict, tmp_path)
    assert json.loads((tmp_path / "verdict.json").read_text()) == record
    assert record["gain_s"] == pytest.approx(record["step_time_s"] - record["predicted_step_time_s"])
    assert "set strategy.overlap=true" in record["sentence"]
    numbers = {entry["name"]: entry["value"] for entry in record["evidence"]}
    assert numbers["messages"] == 8
    assert numbers["message_bytes"] == 4 * (8 * 8 + 8) / 2  # weight and bias in turn
    assert numbers["message_s"] == pytest.approx(3 * MS)
    assert numbers["compute_imbalance"] == pytest.approx(1)
    assert "bubble_fraction" not in numbers and "bytes_predicted_auto" not in numbers


def curve(verb: str, times: dict[int, float], algorithm: str = "ring") -> LinkCurve:
    points = tuple(Point(size, algorithm, s, s, s, 3, 0.0) for size, s in sorted(times.items()))
    return LinkCurve([Curve(verb, 2, points)], {})


def test_one_bucket_without_overlap_needs_smaller_ones_and_overlap() -> None:
    """Four layers of 1 MiB in one bucket, reduced in 12 ms after backward: 1 + 13 + 12 + 1 + 1 = 28 ms.

    Overlap alone changes nothing. A bucket a layer takes 3 ms: launched 7, 9.1, 11.2 and 13.3 ms after the
    first forward, they are complete after 10, 13, 16 and 19; an update of a quarter, 0.25 ms, follows.
    1 + 19.25 + 1 ms are 6.75 less.
    """
    sizes = ModelConfig(num_layers=4, hidden_dim=512)
    plan = plan_of(StrategyConfig("ddp", overlap=False), model=sizes)
    layer_bytes = 4 * (512 * 512 + 512)
    link = curve("all_reduce", {layer_bytes: 3 * MS, 4 * layer_bytes: 12 * MS})
    history = history_of(plan, stamps(plan, {0: MS, 1: MS}, 12 * MS))
    verdict = Judge(plan, timeline_of(plan), history, Remedies(plan, Links(link, link), False)).verdict()
    assert verdict.cause == "no_overlap" and verdict.finding is not None
    assert verdict.step_time_s == pytest.approx(28 * MS)
    assert verdict.finding.override == "strategy.overlap=true strategy.bucket_mb=1"
    assert verdict.finding.gain_s == pytest.approx(6.75 * MS)


def test_small_messages_are_named_by_the_link_curve() -> None:
    """Eight reductions of 3 ms would be one of 3 ms: the curve is flat."""
    plan = plan_of(StrategyConfig("ddp", bucket_mb=0))
    records = stamps(plan, {0: 0.1 * MS, 1: 0.1 * MS}, 3 * MS)
    flat = curve("all_reduce", {16: 3 * MS, 2**20: 3 * MS})
    verdict = Judge(
        plan, timeline_of(plan), history_of(plan, records), Remedies(plan, Links(flat, flat), False)
    ).verdict()
    assert verdict.cause == "small_messages" and verdict.finding is not None
    assert 20 * MS <= verdict.finding.gain_s <= 22 * MS


def test_a_message_that_is_sent_once_does_not_speak_for_all() -> None:
    """Of eight of 1 ms on the curve one takes 9 ms: together they are (9 + 7) / 8 times slower."""
    data = DataConfig(name="synthetic", dim=16, batch_size=16, num_samples=64, eval_samples=0)
    plan = plan_of(StrategyConfig("ddp", bucket_mb=0), data=data)
    flat = curve("all_reduce", {16: MS, 2**20: MS})
    own = measure(timeline_of(plan), plan.schedules(16), history_of(plan, stamps(plan, {0: MS, 1: MS}, MS)))[
        0
    ]
    times = {key: (9 if key[1] == 16 else 1) * MS for key in own.transfers}  # the bias of the last layer
    scaled = Remedies(plan, Links(flat, flat), False).scale(own.changed(transfers=times))
    operations = plan_of(StrategyConfig("ddp"), data=data).schedules(16)[0].operations
    (whole,) = (own for own in operations if isinstance(own, Communication))
    assert scaled is not None and scaled(whole) == pytest.approx(2 * MS)


def test_a_link_slower_than_planned_is_named() -> None:
    """The plan counts on 0.1 ms where the run measures 3 ms.

    2.8 ms shorter: starting it takes 0.1 ms already, and the wait for what is complete then as long.
    """
    plan = plan_of(StrategyConfig("ddp", bucket_mb=25))
    records = stamps(plan, {0: 0.1 * MS, 1: 0.1 * MS}, 3 * MS)
    planned, here = (curve("all_reduce", {16: s * MS, 2**20: s * MS}) for s in (0.1, 3))
    judge = Judge(
        plan, timeline_of(plan), history_of(plan, records), Remedies(plan, Links(planned, here), False)
    )
    verdict = judge.verdict()
    assert verdict.cause == "wrong_link" and verdict.finding is not None
    assert verdict.finding.gain_s == pytest.approx(2.8 * MS, rel=0.01)


@pytest.mark.parametrize("budget_s", [0.0, 2.0])
def test_a_link_that_was_not_measured_is_not_judged(budget_s: float) -> None:
    """A curve is given, and no other measured; with time for it there was nothing to measure it for."""
    measuring = CollectivesConfig(link_budget_s=budget_s)
    plan = plan_of(StrategyConfig("ddp"), collectives=measuring)
    given = curve("all_reduce", {16: 3 * MS, 2**20: 3 * MS})
    history = history_of(plan, stamps(plan, {0: MS, 1: MS}, 3 * MS))
    verdict = Judge(plan, timeline_of(plan), history, Remedies(plan, Links(given), False)).verdict()
    why = "wrong_link: with collectives.link_budget_s=0 this run has not measured its link"
    assert verdict.missing == (() if budget_s else (why,))


def test_a_slow_rank_is_named() -> None:
    """Rank 1 takes 1.5 ms where rank 0 takes 1: 13 operations of 0.5 ms until the first reduction."""
    plan = plan_of(StrategyConfig("ddp"))
    history = history_of(plan, stamps(plan, {0: 1 * MS, 1: 1.5 * MS}, 1 * MS))
    found = slow_rank(timeline_of(plan), plan.schedules(16), history)
    assert found is not None and found.rank == 1
    assert all(factor == pytest.approx(2 / 3) for factor in found.factors.values())
    verdict = Judge(plan, timeline_of(plan), history, Remedies(plan, Links(), False)).verdict()
    assert (verdict.cause, verdict.finding and verdict.finding.rank) == ("slow_rank", 1)
    assert verdict.finding is not None and verdict.finding.gain_s == pytest.approx(13 * 0.5 * MS, rel=0.01)
    assert "rank 1 takes longer" in sentence(verdict)
    # 21 operations of a step, 1 ms and 1.5 ms each.
    imbalance = next(e["value"] for e in verdict.evidence if e["name"] == "compute_imbalance")
    assert imbalance == pytest.approx(1.5 / 1.25)


def test_ranks_that_are_late_in_turns_are_not_slow() -> None:
    plan = plan_of(StrategyConfig("ddp"))
    records = [stamps(plan, {0: (1 + k % 2) * MS, 1: (2 - k % 2) * MS}, MS, steps=1)[0] for k in range(8)]
    assert slow_rank(timeline_of(plan), plan.schedules(16), history_of(plan, records)) is None


def test_healthy_is_what_no_change_makes_faster() -> None:
    plan = plan_of(StrategyConfig("ddp"))
    cheap = curve("all_reduce", {16: 0.1 * MS, 2**20: 0.1 * MS})
    history = history_of(plan, stamps(plan, {0: 5 * MS, 1: 5 * MS}, 0.1 * MS))
    verdict = Judge(plan, timeline_of(plan), history, Remedies(plan, Links(cheap, cheap), False)).verdict()
    assert (verdict.wall, verdict.cause, verdict.too_noisy) == ("compute", "none", False)
    assert "No single change of the configuration" in sentence(verdict)


def test_noise_above_the_gain_is_said() -> None:
    """Steps between 20 and 60 ms: nothing of 5 % can be told apart."""
    plan = plan_of(StrategyConfig("ddp"))
    records = [stamps(plan, {0: s * MS, 1: s * MS}, 0.1 * MS, steps=1)[0] for s in (1, 2, 3, 4, 1, 3)]
    judge = Judge(plan, timeline_of(plan), history_of(plan, records), Remedies(plan, Links(), False))
    verdict = judge.verdict()
    assert verdict.cause == "none" and verdict.too_noisy
    assert "too noisy to tell" in sentence(verdict)


def test_other_microbatches_take_what_their_probe_says_and_the_run_makes_of_it() -> None:
    """Two microbatches of 13 operations of 1 ms, probed at 0.5 ms; one of twice the rows is probed at 0.6 ms.

    In the run an operation takes twice its probe: one microbatch would be 13 operations of 1.2 ms. Copying
    the batch to its buffers is probed at 0.4 ms, and at 0.1 ms to one.
    """
    plan = plan_of(StrategyConfig("single", microbatches=2), size=1)
    keys = {
        rows: [
            *[
                (kind, layer, rows)
                for kind in ("Forward", "BackwardInput", "BackwardWeight")
                for layer in range(4)
            ],
            ("Loss", 3, rows),
        ]
        for rows in (8, 16)
    }
    probes = Probes(
        {2: [dict.fromkeys(keys[8], 0.5 * MS)], 1: [dict.fromkeys(keys[16], 0.6 * MS)]},
        loads={(0, 2): 0.4 * MS, (0, 1): 0.1 * MS},
    )
    history = history_of(plan, stamps(plan, {0: MS}, 0.0))
    verdict = Judge(plan, timeline_of(plan), history, Remedies(plan, Links(), True, probes)).verdict()
    assert verdict.cause == "small_microbatches" and verdict.finding is not None
    assert verdict.finding.override == "strategy.microbatches=1"
    assert verdict.finding.gain_s == pytest.approx((26 - 13 * 1.2 + 0.3) * MS, rel=1e-6)


def test_without_probes_other_microbatches_are_not_judged() -> None:
    plan = plan_of(StrategyConfig("single", microbatches=2), size=1)
    history = history_of(plan, stamps(plan, {0: MS}, 0.0))
    verdict = Judge(plan, timeline_of(plan), history, Remedies(plan, Links(), True)).verdict()
    assert verdict.missing == (
        "strategy.microbatches=1: computing on microbatches of this size was not measured",
    )


def test_an_algorithm_is_weighed_by_both_curves() -> None:
    """Three reduce_scatters of 0.1 ms to start and 3 ms to move; by the curves the other takes half as long.

    Half of 3.1 ms less the start: 1.55 ms saved three times. all_gather is as fast by both.
    """
    plan = plan_of(StrategyConfig("tensor"), collectives=CollectivesConfig(algorithm="native"))
    history = history_of(plan, stamps(plan, {0: 0.01 * MS, 1: 0.01 * MS}, 3 * MS))

    def curves(reduce_scatter_s: float) -> LinkCurve:
        own = {"all_reduce": 3 * MS, "all_gather": 3 * MS, "reduce_scatter": reduce_scatter_s}
        return LinkCurve(
            [c for verb, s in own.items() for c in curve(verb, {16: s, 2**20: s}).curves.values()], {}
        )

    links = Links(curves(4 * MS), curves(4 * MS), curves(2 * MS))
    verdict = Judge(plan, timeline_of(plan), history, Remedies(plan, replace_here(links), False)).verdict()
    assert verdict.cause == "bad_algorithm" and verdict.finding is not None
    assert verdict.finding.override == "collectives.algorithm=auto"
    assert verdict.finding.gain_s == pytest.approx(3 * 1.55 * MS, rel=0.01)


@pytest.mark.parametrize("has_curve", [True, False])
def test_a_reduction_that_gives_every_rank_all_is_a_bad_algorithm(has_curve: bool) -> None:
    """Three all_reduces of 3 ms backward, where a reduce_scatter takes half as long for half the bytes.

    Half of 3.1 ms less the start of 0.1 ms: 1.55 ms saved three times. The loss's two all_reduces stay.
    """
    sizes = DataConfig(name="digits", batch_size=16)
    plan = plan_of(StrategyConfig("tensor", backward="all_reduce"), data=sizes)
    assert plan.task.loss == "cross_entropy"
    history = history_of(plan, stamps(plan, {0: 0.01 * MS, 1: 0.01 * MS}, 3 * MS))
    own = {"all_reduce": 4 * MS, "all_gather": 3 * MS, "reduce_scatter": 2 * MS}
    curves = [c for verb, s in own.items() for c in curve(verb, {16: s, 2**20: s}).curves.values()]
    link = LinkCurve(curves, {}) if has_curve else None
    verdict = Judge(plan, timeline_of(plan), history, Remedies(plan, Links(link, link), False)).verdict()
    assert (verdict.cause, verdict.missing) == ("bad_algorithm", ())
    assert verdict.finding is not None
    assert verdict.finding.override == "strategy.backward=reduce_scatter"
    assert verdict.finding.gain_s == pytest.approx(3 * 1.55 * MS, rel=0.01)


def replace_here(links: Links) -> Links:
    """As a run without a curve of its own has them: the plan counts on what was measured."""
    return dataclasses.replace(links, plan=links.here)


def test_fewer_transfers_disturb_computing_less() -> None:
    """Operations of 1 ms are probed at 0.4 ms: 0.6 ms are the transfers', which take 8 x 0.5 ms of the cores.

    One reduction takes 0.5 ms of them: an eighth of the disturbance stays, 0.475 ms an operation.
    """
    plan = plan_of(StrategyConfig("ddp", bucket_mb=0))
    points = tuple(Point(size, "ring", 3 * MS, 3 * MS, 3 * MS, 3, 0.5 * MS) for size in (16, 2**20))
    flat = LinkCurve([Curve("all_reduce", 2, points)], {})
    history = history_of(plan, stamps(plan, {0: MS, 1: MS}, 3 * MS))
    remedies = Remedies(plan, Links(flat, flat), True)
    own = measure(timeline_of(plan), plan.schedules(16), history)[0]
    probes = {key: 0.4 * MS for (rank, key) in own.computes if rank == 0}
    remedies = dataclasses.replace(remedies, probes=Probes({1: [probes, probes]}))
    larger = next(change for change in changes(plan) if change.override == "strategy.bucket_mb=25")
    calmed = remedies.costs(larger, own).computes
    assert all(seconds == pytest.approx(0.475 * MS) for seconds in calmed.values())


# Changes


def test_what_can_be_changed() -> None:
    def causes(strategy: StrategyConfig, **changed: Any) -> set[str]:
        return {change.cause for change in changes(plan_of(strategy, **changed))}

    assert causes(StrategyConfig("ddp", overlap=False)) == {"no_overlap", "small_messages"}
    assert causes(StrategyConfig("tensor")) == set()
    assert causes(StrategyConfig("tensor", backward="all_reduce")) == {"bad_algorithm"}
    assert causes(StrategyConfig("pipeline", microbatches=4)) == {"idle_bubble", "small_microbatches"}
    assert causes(StrategyConfig("pipeline", partition=(3, 1))) == {"uneven_shards", "idle_bubble"}
    assert causes(StrategyConfig("single", microbatches=2), size=1) == {"small_microbatches"}
    buckets = [c.override for c in changes(plan_of(StrategyConfig("ddp", overlap=False, bucket_mb=5)))]
    both = "strategy.overlap=true strategy.bucket_mb=1"
    assert buckets == ["strategy.overlap=true", both, "strategy.bucket_mb=25", "strategy.bucket_mb=100"]
    counts = [c.override for c in changes(plan_of(StrategyConfig("pipeline", microbatches=4)))]
    assert counts == [f"strategy.microbatches={m}" for m in (8, 16, 2, 1)]
    naive = [c.override for c in changes(plan_of(StrategyConfig("pipeline", schedule="naive")))]
    assert naive[0] == "strategy.schedule=1f1b strategy.microbatches=2"


class EvenOnly(DataParallel):
    """A plug-in's split that refuses odd microbatches where it makes the schedule of the last rank."""

    def schedule(self, model: Model, world_size: int, rank: int, rows: int, task: Task) -> Schedule:
        if rank == world_size - 1 and self.options.microbatches % 2:
            raise RuntimeError("an odd number of microbatches")
        return super().schedule(model, world_size, rank, rows, task)


class NamedToo(DataParallel):
    """A plug-in's split that options alone do not make."""

    def __init__(self, options: Options, color: str) -> None:
        super().__init__(options)


def test_a_change_that_a_plug_in_refuses_is_left_out() -> None:
    """Of 4 microbatches fewer are 2 and 1; larger buckets are 100 MiB, smaller ones 5 and 1."""
    plan = plan_of(StrategyConfig("ddp", microbatches=4))
    options = plan.strategy.options
    buckets = [f"strategy.bucket_mb={size}" for size in (1, 5, 100)]
    even = changes(dataclasses.replace(plan, strategy=EvenOnly(options)))
    assert [change.override for change in even] == [*buckets, "strategy.microbatches=2"]
    assert [change.override for change in changes(plan)] == [
        *buckets,
        "strategy.microbatches=2",
        "strategy.microbatches=1",
    ]
    assert changes(dataclasses.replace(plan, strategy=NamedToo(options, "red"))) == []


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_layers_are_dealt_so_that_the_slowest_stage_is_as_fast_as_can_be(stages: int) -> None:
    """Against every possible partition."""
    generator = np.random.default_rng(stages)
    for _ in range(40):
        layer_s = generator.integers(1, 9, int(generator.integers(stages, 9))).astype(float).tolist()
        plan: Any = SimpleNamespace(world_size=stages)
        found = rebalanced(plan, layer_s)
        assert sum(found) == len(layer_s) and min(found) >= 1 and len(found) == stages

        def slowest(counts: tuple[int, ...], costs: list[float] = layer_s) -> float:
            edges = [0, *itertools.accumulate(counts)]
            return max(sum(costs[a:b]) for a, b in itertools.pairwise(edges))

        every = [
            tuple(b - a for a, b in itertools.pairwise([0, *cuts, len(layer_s)]))
            for cuts in itertools.combinations(range(1, len(layer_s)), stages - 1)
        ]
        assert slowest(found) == min(slowest(counts) for counts in every)


# The trace


def test_the_trace_holds_the_step_as_it_was(tmp_path: Path) -> None:
    """Complete events and metadata; a rank's thread does one thing at a time, and always something."""
    plan = plan_of(StrategyConfig("ddp"))
    records = stamps(plan, {0: 1 * MS, 1: 2 * MS}, 3 * MS, steps=2)
    kept = [Kept(step, Recorded(16, False, own, [None, None])) for step, own in enumerate(records)]
    write_trace(timeline_of(plan), kept, tmp_path, 0.0, plan.task.algorithms)
    trace = json.loads((tmp_path / "trace.json").read_text())
    events = trace["traceEvents"]
    assert trace["otherData"]["steps"] == [0, 1]
    names = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {"rank 0", "rank 1"}
    for rank in (0, 1):
        own = [e for e in events if e["ph"] == "X" and e["pid"] == rank and e["tid"] == 0]
        assert all({"name", "cat", "ts", "dur", "args"} <= e.keys() and e["dur"] >= 0 for e in own)
        for before, after in itertools.pairwise(sorted(own, key=lambda e: (e["ts"], e["ts"] + e["dur"]))):
            assert before["ts"] + before["dur"] <= after["ts"] + 0.01
        total = sum(e["dur"] for e in own) / 1e6
        assert total == pytest.approx(records[-1][rank][-1] - records[0][rank][0], rel=1e-3)
        waited = sum(e["dur"] for e in own if e["cat"] == "wait") / 1e6
        # Rank 1 comes 13 operations of 1 ms after rank 0, in each of two steps; its launch follows.
        assert waited == pytest.approx(0 if rank else 2 * 13 * MS - 2 * 0.1 * MS, abs=1e-4)
    assert HEAD == 3

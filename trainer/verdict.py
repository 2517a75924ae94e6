"""Which wall a run hit, why, and the one change to make: from its stamps, through the simulator.

A cause is a change that gives time back: the plan is replayed with the measured costs as it is, and again
with the change. The cause is the one that gives back most, if that is at least `LEAST_SHARE` of the step and
more than the noise of its median. Nothing here knows of a case; healthy is what no change makes faster.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from collectives.rivals import median_bounds
from strategies.checker import ScheduleError
from strategies.compute import GradientNorm, LayerOperation, Update
from strategies.schedule import Schedule
from strategies.simulator import simulate
from trainer.contention import ROUNDS, Contention, measured_contention
from trainer.costs import Measurements, PlanCosts, UnknownCost, measure, step_time_s, typical
from trainer.evidence import plan_numbers, time_split
from trainer.history import History, stacked
from trainer.plan import Plan
from trainer.remedies import Remedies
from trainer.slowness import slow_rank
from trainer.spans import COMPUTE, LAUNCH, Span
from trainer.timeline import SPLIT, Timeline
from trainer.whatif import LEAST_SHARE

LONGEST_S = 4.0  # for all replays: fewer samples where one takes long
WALLS = {  # parts of the time split, by the wall that they are
    "compute_s": "compute",
    "exposed_comm_s": "link",
    "idle_s": "bubble",
    "data_s": "input",
    "host_s": "host",
}


@dataclass(frozen=True)
class Finding:
    """A cause, and what the step would take without it."""

    cause: str
    gain_s: float
    predicted_step_time_s: float
    override: str | None
    text: str
    rank: int | None = None


@dataclass(frozen=True)
class Verdict:
    """`findings` are ranked, also those too small to be the cause; `missing`: what could not be judged.

    `cause` is "none" where no change is worth it, and None where none could be judged.
    """

    wall: str | None
    cause: str | None
    step_time_s: float | None
    quartiles_s: tuple[float, float] | None
    steps: int
    noise_s: float | None
    simulated_step_time_s: float | None
    splits: tuple[Mapping[str, float], ...]
    findings: tuple[Finding, ...] = ()
    too_noisy: bool = False
    missing: tuple[str, ...] = ()
    evidence: tuple[Mapping[str, object], ...] = ()

    @property
    def finding(self) -> Finding | None:
        return None if self.cause in (None, "none") else self.findings[0]


@dataclass
class Judge:
    """What is known of a run, on rank 0."""

    plan: Plan
    timeline: Timeline
    history: History
    remedies: Remedies
    nodes: Sequence[int] | None = None  # of each rank; all on one where left out

    def verdict(self) -> Verdict:
        steps = self.history.steady()
        if not steps:
            return Verdict(None, None, None, None, 0, None, None, (), missing=("no step after warm-up",))
        times = [step_time_s(self.timeline, kept) for kept in steps]
        low, middle, high = median_bounds(times)
        q1, q3 = (float(value) for value in np.quantile(times, (0.25, 0.75)))
        noise_s = max(high - middle, middle - low)
        splits = self._splits()
        launch_s = self._launch_s()
        wall = self._wall(splits, launch_s)
        schedules = self.plan.schedules(self.plan.batch_rows[0])
        try:
            samples = measure(self.timeline, schedules, self.history)
        except UnknownCost as error:
            why = (str(error),)
            parts = tuple(time_split(splits, launch_s, None))
            return Verdict(
                wall, None, middle, (q1, q3), len(steps), None, None, splits, missing=why, evidence=parts
            )
        samples = [self.remedies.completed(own) for own in samples]
        begun = time.perf_counter()
        self._step_s(schedules, samples[0])
        replays = LONGEST_S / (time.perf_counter() - begun)
        crowded = ROUNDS if self.plan.is_pipeline else 0  # a partition is replayed as often
        samples = samples[: max(1, int(replays / (len(self.plan.changes) + 3 + 2 * crowded)))]
        base_s = [self._step_s(schedules, own) for own in samples]
        found, missing = self._findings(schedules, samples, base_s, middle)
        worth = [finding for finding in found if finding.gain_s >= LEAST_SHARE * middle]
        sure = [finding for finding in worth if finding.gain_s > noise_s]
        simulated_s = float(np.mean(base_s))
        return Verdict(
            wall,
            sure[0].cause if sure else "none",
            middle,
            (q1, q3),
            len(steps),
            noise_s,
            simulated_s,
            splits,
            tuple(found),
            too_noisy=not sure and (bool(worth) or noise_s > LEAST_SHARE * middle),
            missing=missing,
            evidence=(
                *time_split(splits, launch_s, simulated_s / middle - 1),
                *plan_numbers(self.plan, schedules, samples, splits, middle),
            ),
        )

    # Measured

    def _splits(self) -> tuple[dict[str, float], ...]:
        """Mean parts of the step over typical steps, by rank."""
        steps = typical(self.timeline, self.history.steady())
        records = [
            stacked(steps, rank, self.timeline.length(rank, False)) for rank in range(self.plan.world_size)
        ]
        parts = self.timeline.splits(records)
        return tuple(
            {key: float(parts[key][:, rank].mean()) for key in SPLIT} for rank in range(self.plan.world_size)
        )

    def _launch_s(self) -> list[float]:
        """Seconds of starting transfers, a part of host_s, by rank."""
        found = [0.0] * self.plan.world_size
        for rank, span, seconds in self._spans():
            found[rank] += seconds if span.kind == LAUNCH else 0.0
        return found

    def _wall(self, splits: Sequence[Mapping[str, float]], launch_s: Sequence[float]) -> str:
        """The largest part, all ranks together; waiting for a late rank is left to what that one does.

        Starting transfers counts as the link's: gloo sends within the call.
        """
        total = {key: sum(split[key] for split in splits) for key in WALLS}
        total["host_s"] -= total["data_s"] + sum(launch_s)
        total["exposed_comm_s"] += sum(launch_s)
        largest = WALLS[max(total, key=lambda key: total[key])]
        return "memory" if largest == "compute" and self._is_memory() else largest

    def _is_memory(self) -> bool:
        """Whether more than half of computing reads and writes parameters and multiplies nothing."""
        moved = multiplied = 0.0
        for _, span, seconds in self._spans():
            if span.kind != COMPUTE:  # the norm's exchange waits for the other ranks
                continue
            if isinstance(span.operation, Update | GradientNorm):
                moved += seconds
            elif isinstance(span.operation, LayerOperation):
                multiplied += seconds
        return moved > multiplied

    def _spans(self) -> Iterator[tuple[int, Span, float]]:
        """Rank, span and its mean seconds in typical steps."""
        steps = typical(self.timeline, self.history.steady())
        for rank, track in enumerate(self.timeline.tracks):
            marks = self.timeline.marks(rank, stacked(steps, rank, self.timeline.length(rank, False)))
            spent = np.diff(marks, axis=-1).mean(axis=0).tolist()
            yield from ((rank, span, seconds) for span, seconds in zip(track.spans, spent, strict=True))

    def _contention(self, schedules: Sequence[Schedule]) -> Contention:
        nodes = self.nodes if self.nodes is not None else [0] * self.plan.world_size
        return measured_contention(
            self.timeline, schedules, typical(self.timeline, self.history.steady()), nodes
        )

    # What if

    def _step_s(self, schedules: Sequence[Schedule], costs: Measurements) -> float:
        planned = PlanCosts(costs, schedules)
        return simulate(schedules, planned, pipeline=self.plan.is_pipeline).step_time_s

    def _findings(
        self,
        schedules: Sequence[Schedule],
        samples: Sequence[Measurements],
        base_s: Sequence[float],
        middle_s: float,
    ) -> tuple[list[Finding], tuple[str, ...]]:
        """The best change for each cause, by what it gives back; and what could not be judged."""
        best: dict[str, Finding] = {}
        missing: list[str] = []

        def weigh(cause: str, override: str | None, changed_s: Sequence[float], rank: int | None) -> None:
            ratio = sum(changed_s) / sum(base_s)
            text = TEXTS[cause].format(rank=rank)
            finding = Finding(cause, middle_s * (1 - ratio), middle_s * ratio, override, text, rank)
            if finding.gain_s > 0 and (cause not in best or finding.gain_s > best[cause].gain_s):
                best[cause] = finding

        rows, remedies = self.plan.batch_rows[0], self.remedies
        contention: Contention | None = None
        for change in [*self.plan.changes, *remedies.partitions(schedules, samples)]:
            try:
                changed = change.schedules(self.plan, rows)
                if change.cause == "uneven_shards":
                    contention = contention or self._contention(schedules)
                    times = [contention.step_s(schedules, changed, own, pipeline=True) for own in samples]
                else:
                    times = [self._step_s(changed, remedies.costs(change, own)) for own in samples]
            except (UnknownCost, ScheduleError, ValueError) as error:
                missing.append(f"{change.override}: {error}")
                continue
            weigh(change.cause, change.override, times, None)
        slow = slow_rank(self.timeline, schedules, self.history)
        if slow is not None:
            times = [self._step_s(schedules, slow.healed(own, schedules)) for own in samples]
            weigh("slow_rank", None, times, slow.rank)
        if remedies.knows_two_links:
            times = [self._step_s(schedules, remedies.assumed_link(own)) for own in samples]
            weigh("wrong_link", None, times, None)
        elif remedies.lacks_own_link:
            missing.append("wrong_link: with collectives.link_budget_s=0 this run has not measured its link")
        return sorted(best.values(), key=lambda own: -own.gain_s), tuple(missing)


TEXTS = {
    "small_messages": "many small messages: each costs its latency, whatever it carries",
    "bad_algorithm": "an algorithm that sends more bytes, or waits longer, than another for the same result",
    "no_overlap": "transfers that wait for computing to end, although it could go on under them",
    "idle_bubble": "stages that idle while the pipeline fills and drains: too few microbatches",
    "uneven_shards": "stages of unequal work: all wait for the largest",
    "slow_rank": "rank {rank} takes longer than the others for the same work",
    "small_microbatches": "microbatches so small that each costs more to start than to compute",
    "wrong_link": "a link slower than the one that the plan counted on; run on that one, or plan with this "
    "run's link_curve.json",
}

"""What the costs of a run would be after a change of its plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from collectives.traffic import ITEMSIZE, bytes_sent
from strategies.communication import Communication
from strategies.compute import LayerOperation
from strategies.schedule import Schedule
from strategies.strategy import Strategy, Task
from trainer.costs import (
    ComputeKey,
    Measurements,
    PlanCosts,
    ScaleTransfer,
    TransferKey,
    UnknownCost,
    transfer_key,
)
from trainer.link import Links
from trainer.plan import Plan
from trainer.probe import Probes
from trainer.rows import curve_time_s
from trainer.whatif import Change, microbatches_of, possible, rebalanced


@dataclass(frozen=True)
class Remedies:
    """`cpu_is_shared`: the ranks have all cores busy, so that what a transfer takes of them cannot hide."""

    plan: Plan
    links: Links
    cpu_is_shared: bool
    probes: Probes = field(default_factory=Probes)

    def completed(self, measured: Measurements) -> Measurements:
        """With what the run did not have: messages and updates of other sizes."""
        return measured.changed(scaled=self.scale(measured), update_probes=self.probes.updates)

    def costs(self, change: Change, measured: Measurements) -> Measurements:
        if change.cause in ("idle_bubble", "small_microbatches"):
            return measured.changed(
                computes=self._probed(change, measured), before=self._loaded(change, measured)
            )
        if change.cause == "bad_algorithm":
            return self._faster(change, measured)
        if change.cause == "small_messages" and self.cpu_is_shared:
            return self._undisturbed(change, measured)
        if change.cause == "no_overlap" and self.cpu_is_shared:
            # What a transfer takes of a core that computes cannot hide under computing.
            return measured.changed(cpu_share=self._cpu_share)
        return measured

    def _probed(self, change: Change, measured: Measurements) -> dict[tuple[int, ComputeKey], float]:
        """Costs of other microbatches, as much longer than their probe as the run's own are.

        What disturbs computing does so by the second: other ranks, transfers, the host.
        """
        own = self.probes.microbatches.get(microbatches_of(self.plan.strategy))
        new = self.probes.microbatches.get(microbatches_of(change.strategy))
        if own is None or new is None:
            raise UnknownCost("computing on microbatches of this size was not measured")
        computes = dict(measured.computes)
        for rank, (before, after) in enumerate(zip(own, new, strict=True)):
            if before is None or after is None:
                raise UnknownCost(f"rank {rank} has no memory to measure microbatches of this size")
            known = [key for key in before if (rank, key) in measured.computes]
            probed = sum(before[key] for key in known)
            factor = sum(measured.computes[rank, key] for key in known) / probed if probed else 1.0
            for key, seconds in after.items():
                computes.setdefault((rank, key), seconds * factor)
        return computes

    def _loaded(self, change: Change, measured: Measurements) -> dict[int, tuple[float, float]]:
        """What comes before the operations, with the copies of a batch to other microbatches' buffers."""
        loads = self.probes.loads
        old, new = microbatches_of(self.plan.strategy), microbatches_of(change.strategy)
        return {
            rank: (data_s, max(0.0, host_s + loads.get((rank, new), 0.0) - loads.get((rank, old), 0.0)))
            for rank, (data_s, host_s) in measured.before.items()
        }

    def _faster(self, change: Change, measured: Measurements) -> Measurements:
        """Other algorithms: a call, its start and its transfer together, as their curves are to each other.

        Without curves, as the bytes are that they send. An all_reduce whose place a reduce_scatter takes is
        such another algorithm.
        """
        plan = self.plan
        now = self.links.here or self.links.plan
        then = now if change.task.algorithms == plan.task.algorithms else self.links.best
        instead = _replaced(plan.strategy, change.strategy)
        transfers, launches = dict(measured.transfers), dict(measured.launches)
        factors: dict[str, list[float]] = {}
        for key, seconds in measured.transfers.items():
            verb, numel, dtype, n = key
            new_verb = instead.get(verb, verb)
            old = getattr(plan.task.algorithms, verb, None)
            new = getattr(change.task.algorithms, new_verb, None)
            if verb == "send" or (verb, old) == (new_verb, new) or not numel:
                continue
            own = [s for (_, other), s in measured.launches.items() if other == verb]
            launch_s, size = sum(own) / len(own), numel * ITEMSIZE[dtype]
            if now and then and (verb, n) in now.curves and (new_verb, n) in then.curves:
                before, after = now.curve(verb, n), then.curve(new_verb, n)
                ratio = after.time_s(size) / before.time_s(size)
                launches_s = before.launch_s(size), after.launch_s(size)
                factor = launches_s[1] / launches_s[0] if launches_s[0] and launches_s[1] else 1.0
            else:
                sent = [
                    bytes_sent(called, str(name), [numel // n] * n, dtype, n, 0)
                    for called, name in ((verb, old), (new_verb, new))
                ]
                ratio, factor = sent[1] / sent[0] if sent[0] else 1.0, 1.0
            transfers[new_verb, numel, dtype, n] = max(0.0, (launch_s + seconds) * ratio - launch_s * factor)
            factors.setdefault(verb, []).append(factor)
        for (rank, verb), seconds in measured.launches.items():
            if verb in factors:
                factor = sum(factors[verb]) / len(factors[verb])
                launches[rank, instead.get(verb, verb)] = seconds * factor
        return measured.changed(transfers=transfers, launches=launches)

    def _undisturbed(self, change: Change, measured: Measurements) -> Measurements:
        """Computing that fewer transfers disturb.

        What computing took beyond its probe, while nothing was sent, the transfers took of the cores: it goes
        with the processor time of all transfers of a step.
        """
        probes = self.probes.microbatches.get(microbatches_of(self.plan.strategy))
        now, then = (
            self._cpu_s(strategy, task)
            for strategy, task in ((self.plan.strategy, self.plan.task), (change.strategy, change.task))
        )
        if probes is None or not now:
            return measured
        ratio = min(1.0, then / now)

        def calmer(seconds: float, probe: float | None) -> float:
            return seconds if probe is None or probe >= seconds else probe + (seconds - probe) * ratio

        computes = {
            (rank, key): calmer(seconds, (probes[rank] or {}).get(key))
            for (rank, key), seconds in measured.computes.items()
        }
        updates = {
            key: calmer(seconds, self.probes.updates.get(key)) for key, seconds in measured.updates.items()
        }
        return measured.changed(computes=computes, updates=updates)

    def _cpu_s(self, strategy: Strategy, task: Task) -> float:
        """Processor time that the transfers of a step take of rank 0, by the link curve."""
        plan, curve = self.plan, self.links.here or self.links.plan
        schedule = strategy.schedule(plan.model, plan.world_size, 0, plan.batch_rows[0], task)
        total = 0.0
        for operation in schedule.operations:
            if isinstance(operation, Communication):
                total += self._cpu_share(operation) * (curve_time_s(curve, operation, plan.world_size) or 0.0)
        return total

    def _cpu_share(self, operation: Communication) -> float:
        """Seconds of a processor in a second of the transfer, by the link curve; 0 where it does not say."""
        curve, n = self.links.here or self.links.plan, self.plan.world_size
        if curve is None or (operation.verb, n) not in curve.curves:
            return 0.0
        share = curve.curve(operation.verb, n).cpu_share(operation.numel * ITEMSIZE[operation.dtype])
        return min(1.0, share or 0.0)

    @property
    def knows_two_links(self) -> bool:
        """Whether the plan counted on a link curve, and the run has measured one besides."""
        plan, here = self.links.plan, self.links.here
        return plan is not None and here is not None and plan is not here

    @property
    def lacks_own_link(self) -> bool:
        """Whether the plan counted on a link curve, and the run was told to measure none."""
        given = self.links.plan is not None and self.links.here is None
        return given and self.plan.config.collectives.link_budget_s == 0

    def assumed_link(self, measured: Measurements) -> Measurements:
        """Transfers as fast as the plan's link curve says, where the run found its link slower than that."""
        plan, here = self.links.plan, self.links.here
        assert plan is not None and here is not None
        transfers = dict(measured.transfers)
        n = self.plan.world_size
        for key, seconds in measured.transfers.items():
            verb, numel, dtype, _ = key
            if numel and (verb, n) in plan.curves and (verb, n) in here.curves:
                size = numel * ITEMSIZE[dtype]
                transfers[key] = seconds * min(1.0, plan.time_s(verb, n, size) / here.time_s(verb, n, size))
        return measured.changed(transfers=transfers)

    def partitions(self, schedules: Sequence[Schedule], samples: Sequence[Measurements]) -> list[Change]:
        """A partition by what layers took; those of one shape count alike, or a slow rank would show here."""
        plan = self.plan
        if plan.strategy.name != "pipeline" or plan.world_size == 1:
            return []
        layer_s = np.mean([layer_seconds(schedules, own) for own in samples], axis=0).tolist()
        partition = rebalanced(plan, layer_s)
        counts = [len(schedule.layers) for schedule in schedules]
        if list(partition) == counts:
            return []
        options = replace(plan.strategy.options, partition=partition)
        text = f"strategy.partition=[{','.join(map(str, partition))}]"
        change = possible(plan, "uneven_shards", text, options, plan.task)
        return [] if change is None else [change]

    @cached_property
    def _messages(self) -> Counter[TransferKey]:
        """How many of each kind are in a step, once for every rank that takes part."""
        return Counter(
            transfer_key(operation)
            for schedule in self.plan.schedules(self.plan.batch_rows[0])
            for operation in schedule.operations
            if isinstance(operation, Communication)
        )

    def scale(self, measured: Measurements) -> ScaleTransfer | None:
        """Seconds of messages of other sizes: the curve's, and slower where the run's own were slower.

        All messages of a step together: a few that differ are not to speak for the many.
        """
        curve = self.links.here or self.links.plan
        if curve is None:
            return None
        n = self.plan.world_size
        took: dict[str, list[float]] = {}  # by verb: measured, expected
        for key, seconds in measured.transfers.items():
            verb, numel, dtype, _ = key
            if (verb, n) in curve.curves:
                both = took.setdefault(verb, [0.0, 0.0])
                both[0] += self._messages[key] * seconds
                both[1] += self._messages[key] * curve.time_s(verb, n, numel * ITEMSIZE[dtype])
        factors = {verb: max(1.0, own / expected) for verb, (own, expected) in took.items() if expected}

        def scaled(operation: Communication) -> float:
            seconds = curve_time_s(curve, operation, n)
            if seconds is None:
                raise UnknownCost(f"the link curve has no {operation.verb}")
            return seconds * factors.get(operation.verb, 1.0)

        return scaled


def _replaced(old: Strategy, new: Strategy) -> dict[str, str]:
    """Verb -> the verb that takes its place for the same result."""
    before, after = old.options.backward, new.options.backward
    return {} if old.name != "tensor" or before == after else {before: after}


def layer_seconds(schedules: Sequence[Schedule], measured: Measurements) -> list[float]:
    """Seconds of each layer in a step: the mean of the layers of its shape."""
    totals: dict[int, float] = {}
    shapes: dict[int, tuple[object, ...]] = {}
    costs = PlanCosts(measured, schedules)
    for rank, schedule in enumerate(schedules):
        for operation in schedule.operations:
            if isinstance(operation, LayerOperation):
                index, spec = operation.layer.index, operation.layer.spec
                totals[index] = totals.get(index, 0.0) + costs.compute_s(rank, operation)
                shapes[index] = (*spec.work, operation.layer.has_below)
    means: dict[tuple[object, ...], float] = {}
    for shape in set(shapes.values()):
        own = [totals[index] for index in totals if shapes[index] == shape]
        means[shape] = sum(own) / len(own)
    return [means[shapes[index]] for index in sorted(totals)]

"""The simulator, against steps worked out by hand, the closed form of the bubble, and times by relaxation."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from models.mlp import DeepMLP
from strategies.checker import ScheduleError
from strategies.communication import AllReduce, Collective, Communication, Recv, Send, Wait
from strategies.compute import BackwardInput, BackwardWeight, Forward, GradientNorm, Loss, Update
from strategies.ddp import DataParallel
from strategies.pipeline import Pipeline
from strategies.schedule import Schedule
from strategies.simulator import Costs, Simulation, simulate
from strategies.single import Single
from strategies.strategy import Options, Strategy, Task, make_schedule, whole_layers, world
from strategies.tensor import TensorParallel
from strategies.values import Operation, Value
from tests.problems import random_problem


@dataclass
class Table:
    """Costs by kind of operation. `slow` is added to every forward of a rank, `transfers` is by label."""

    forward: float = 0.0
    loss: float = 0.0
    dx: float = 0.0
    dw: float = 0.0
    update: float = 0.0
    norm: float = 0.0
    transfer: float = 0.0
    launch: float = 0.0
    wait: float = 0.0
    data: float = 0.0
    before: float = 0.0
    after: float = 0.0
    exchange: float = 0.0
    slow: dict[int, float] = field(default_factory=dict)
    transfers: dict[str, float] = field(default_factory=dict)

    def compute_s(self, rank: int, operation: Operation) -> float:
        if isinstance(operation, Forward):
            return self.forward + self.slow.get(rank, 0.0)
        kinds: dict[type[Operation], float] = {
            Loss: self.loss,
            BackwardInput: self.dx,
            BackwardWeight: self.dw,
            Update: self.update,
            GradientNorm: self.norm,
        }
        return kinds[type(operation)]

    def launch_s(self, rank: int, operation: Communication) -> float:
        return self.launch

    def transfer_s(self, operation: Communication) -> float:
        return self.transfers.get(operation.label, self.transfer)

    def wait_s(self, rank: int, operation: Wait) -> float:
        return self.wait

    def before_s(self, rank: int) -> tuple[float, float]:
        return self.data, self.before

    def after_s(self, rank: int) -> float:
        return self.after

    def norm_s(self) -> float:
        return self.exchange


def plan(
    strategy: type[Strategy], layers: int, ranks: int, rows: int = 8, clips: bool = False, **options: object
) -> list[Schedule]:
    made = strategy(Options(**options))  # type: ignore[arg-type]
    model = DeepMLP(4, 4, layers, 4, bias=False)
    made.check(model, ranks, rows)
    return [made.schedule(model, ranks, rank, rows, Task("mse", clips=clips)) for rank in range(ranks)]


def parts(simulation: Simulation, name: str) -> list[float]:
    return [getattr(split, name) for split in simulation.splits]


def drawn(simulation: Simulation, rank: int, lane: str) -> list[tuple[float, float, str, str]]:
    return [
        (piece.start_s, piece.stop_s, piece.kind, piece.identity)
        for piece in simulation.intervals
        if piece.rank == rank and piece.lane == lane
    ]


# Pipelines


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize("microbatches", [1, 2, 4, 8])
def test_a_pipeline_of_equal_stages_idles_as_the_closed_form_says(
    schedule: str, stages: int, microbatches: int
) -> None:
    """Huang et al. 2019, section 2.3: the step has m+p-1 slots of F+B, of which p-1 are idle.

    The whole backward stands in dX, since the stage below is sent its gradient before dW.
    """
    plans = plan(Pipeline, stages, stages, microbatches=microbatches, schedule=schedule)
    simulation = simulate(plans, Table(forward=2.0, dx=2.0), pipeline=True)
    slots = microbatches + stages - 1
    assert simulation.step_time_s == slots * 4.0
    assert simulation.bubble_fraction == (stages - 1) / slots
    assert parts(simulation, "step_time_s") == [slots * 4.0] * stages
    assert parts(simulation, "compute_s") == [microbatches * 4.0] * stages
    assert parts(simulation, "idle_s") == [(stages - 1) * 4.0] * stages
    assert parts(simulation, "overlap") == [None] * stages


def test_the_stage_below_does_not_wait_for_dw() -> None:
    """Rank 0: F, idle during F and dX of rank 1, dX, dW. Rank 1 idles as long between its own steps."""
    simulation = simulate(plan(Pipeline, 2, 2), Table(forward=2.0, dx=1.0, dw=4.0), pipeline=True)
    assert parts(simulation, "idle_s") == [3.0, 3.0]
    assert parts(simulation, "step_time_s") == [10.0, 10.0]
    assert simulation.bubble_fraction == 0.3


TWO_STAGES = Table(
    forward=2.0,
    loss=1.0,
    dx=3.0,
    dw=4.0,
    update=5.0,
    launch=0.25,
    wait=0.125,
    transfers={"send output": 1.5, "send gradient": 2.5},
)


def test_two_stages_with_transfers_of_known_time() -> None:
    """One microbatch. Rank 0 posts a receive, runs F until 2.25, sends (arrives 2.25) and waits from 2.5.
    Rank 1 waits from 0.25: idle to 2.25, transfer to 3.75, then F to 5.75, loss to 6.75, dX to 9.75, send
    until 10, dW to 14 while the gradient is under way (9.75 to 12.25), a wait that costs 0.125, update to
    19.125. Rank 0 idles to 9.75, the transfer ends at 12.25, another wait to 12.375, dX, dW, update: 24.375.
    """
    simulation = simulate(plan(Pipeline, 2, 2), TWO_STAGES, pipeline=True, steps=1, keep_intervals=True)
    assert simulation.step_time_s == 24.375
    assert parts(simulation, "step_time_s") == [24.375, 19.125]
    assert parts(simulation, "compute_s") == [14.0, 15.0]
    assert parts(simulation, "idle_s") == [7.25, 2.0]
    assert parts(simulation, "exposed_comm_s") == [2.625, 1.625]
    assert parts(simulation, "host_s") == [0.5, 0.5]
    assert parts(simulation, "wait_s") == parts(simulation, "data_s") == [0.0, 0.0]
    assert parts(simulation, "overlap") == [0.0, 2.25 / 4.0]
    assert simulation.bubble_fraction == 9.25 / 43.5

    output, gradient = "output of layer 0, microbatch 0", "gradient of layer 0, microbatch 0"
    assert drawn(simulation, 1, "compute") == [
        (0.0, 0.25, "launch", f"recv {output} from rank 0"),
        (0.25, 2.25, "idle", f"wait for {output}"),
        (2.25, 3.75, "exposed", f"wait for {output}"),
        (3.75, 5.75, "compute", "layer 1, microbatch 0, forward"),
        (5.75, 6.75, "compute", "microbatch 0, loss"),
        (6.75, 9.75, "compute", "layer 1, microbatch 0, dX"),
        (9.75, 10.0, "launch", f"send {gradient} to rank 0"),
        (10.0, 14.0, "compute", "layer 1, microbatch 0, dW"),
        (14.0, 14.125, "exposed", f"wait for {gradient}"),
        (14.125, 19.125, "compute", "update of layer 1"),
    ]
    assert drawn(simulation, 1, "communication") == [
        (2.25, 3.75, "transfer", f"recv {output} from rank 0"),
        (9.75, 12.25, "transfer", f"send {gradient} to rank 0"),
    ]
    assert drawn(simulation, 0, "communication") == [
        (9.75, 12.25, "transfer", f"recv {gradient} from rank 1"),
        (2.25, 3.75, "transfer", f"send {output} to rank 1"),
    ]


def test_steps_follow_each_other_without_a_barrier() -> None:
    """Rank 1 begins its second step at 19.125 and waits for rank 0's forward, which ends at 26.625."""
    simulation = simulate(plan(Pipeline, 2, 2), TWO_STAGES, pipeline=True, steps=2, keep_intervals=True)
    assert parts(simulation, "step_time_s") == [24.375, 24.375]
    assert parts(simulation, "idle_s") == [7.25, 7.25]
    # Second 0 of the drawing is when rank 1 begins; rank 0 follows 5.25 later.
    assert drawn(simulation, 1, "compute")[0][:2] == (0.0, 0.25)
    assert drawn(simulation, 0, "compute")[0][:2] == (5.25, 5.5)


def test_a_late_peer_of_a_message_is_no_idleness_outside_pipelines() -> None:
    simulation = simulate(plan(Pipeline, 2, 2), TWO_STAGES, pipeline=False, steps=1)
    assert parts(simulation, "wait_s") == [7.25, 2.0]
    assert parts(simulation, "idle_s") == [0.0, 0.0]
    assert simulation.bubble_fraction == 0.0


# Data parallel: F0 F1 loss dX1 dW1 [all_reduce 1] dX0 dW0 [all_reduce 0], then per layer wait and update

TWO_LAYERS = Table(forward=1.0, dx=1.0, dw=2.0, update=0.5, transfer=3.0)


def test_data_parallel_reduces_under_backward() -> None:
    """The first reduction runs from 5 to 8, under dX0 and dW0; the second from 8 to 11, under an update."""
    simulation = simulate(plan(DataParallel, 2, 2, bucket_mb=0), TWO_LAYERS, pipeline=False)
    assert parts(simulation, "step_time_s") == [11.5, 11.5]
    assert parts(simulation, "compute_s") == [9.0, 9.0]
    assert parts(simulation, "exposed_comm_s") == [2.5, 2.5]
    assert parts(simulation, "overlap") == [3.5 / 6.0] * 2


def test_data_parallel_without_overlap_reduces_after_backward() -> None:
    """The reductions run from 8 to 11 and from 11 to 14; only the update of half a second hides any of it."""
    plans = plan(DataParallel, 2, 2, bucket_mb=0, overlap=False)
    simulation = simulate(plans, TWO_LAYERS, pipeline=False)
    assert parts(simulation, "step_time_s") == [14.5, 14.5]
    assert parts(simulation, "exposed_comm_s") == [5.5, 5.5]
    assert parts(simulation, "overlap") == [0.5 / 6.0] * 2


def test_a_reduction_waits_until_the_one_before_it_has_left_the_channel() -> None:
    """Reductions of 6 s: the first from 5 to 11; the second, started at 8, from 11 to 17."""
    costs = replace(TWO_LAYERS, transfer=6.0)
    plans = plan(DataParallel, 2, 2, bucket_mb=0)
    simulation = simulate(plans, costs, pipeline=False, steps=1, keep_intervals=True)
    assert [piece[:2] for piece in drawn(simulation, 1, "communication")] == [(5.0, 11.0), (11.0, 17.0)]
    assert simulation.step_time_s == 17.5
    assert parts(simulation, "exposed_comm_s") == [8.5, 8.5]
    assert parts(simulation, "wait_s") == [0.0, 0.0]


@pytest.mark.parametrize("pipeline", [False, True])
def test_waiting_for_a_late_peer_of_a_collective_is_not_transfer(pipeline: bool) -> None:
    """Forward takes rank 1 three seconds more: rank 0 arrives at 4, rank 1 at 7, the transfer ends at 10."""
    plans = plan(DataParallel, 1, 2, bucket_mb=0)
    assert plans[0] is plans[1]
    simulation = simulate(plans, replace(TWO_LAYERS, slow={1: 3.0}), pipeline=pipeline)
    assert parts(simulation, "step_time_s") == [10.5, 10.5]
    assert parts(simulation, "compute_s") == [4.5, 7.5]
    assert parts(simulation, "wait_s") == [3.0, 0.0]
    assert parts(simulation, "exposed_comm_s") == [3.0, 3.0]
    assert parts(simulation, "idle_s") == [0.0, 0.0]


# Tensor parallel


def test_tensor_parallel_gathers_in_the_open_and_reduces_under_dw() -> None:
    """F0 to 1, gather to 1.5, F1 to 2.5, loss to 2.75, dX1 to 3.75, reduction to 6.75 while dW1 ends at 5.75,
    dX0 to 7.75, dW0 to 9.75, update to 10.25."""
    costs = replace(
        TWO_LAYERS,
        loss=0.25,
        transfers={"all_gather output": 0.5, "reduce_scatter partial gradient": 3.0},
    )
    simulation = simulate(plan(TensorParallel, 2, 2), costs, pipeline=False)
    assert parts(simulation, "step_time_s") == [10.25, 10.25]
    assert parts(simulation, "exposed_comm_s") == [1.5, 1.5]
    assert parts(simulation, "overlap") == [2.0 / 3.5] * 2


# What one rank has besides its operations


def test_data_and_host_time_are_told_apart() -> None:
    costs = Table(forward=1.0, update=2.0, data=0.5, before=0.25, after=0.125)
    simulation = simulate(plan(Single, 1, 1), costs, pipeline=False, keep_intervals=True)
    (split,) = simulation.splits
    assert (split.step_time_s, split.compute_s, split.host_s, split.data_s) == (3.875, 3.0, 0.875, 0.5)
    assert (split.overlap, simulation.bubble_fraction) == (None, 0.0)
    assert drawn(simulation, 0, "compute") == [
        (0.0, 0.5, "host", "waiting for data"),
        (0.5, 0.75, "host", "before the operations"),
        (0.75, 1.75, "compute", "layer 0, microbatch 0, forward"),
        (1.75, 3.75, "compute", "update of layer 0"),
        (3.75, 3.875, "host", "after the operations"),
    ]


def test_launches_are_host_time_and_waits_cost_even_when_complete() -> None:
    """Two reductions of no length: two launches of 0.25, two waits of 0.5."""
    costs = Table(forward=1.0, launch=0.25, wait=0.5)
    simulation = simulate(plan(DataParallel, 2, 2, bucket_mb=0), costs, pipeline=False)
    assert parts(simulation, "host_s") == [0.5, 0.5]
    assert parts(simulation, "exposed_comm_s") == [1.0, 1.0]
    assert parts(simulation, "step_time_s") == [3.5, 3.5]


# Schedules written by hand

LAYER = whole_layers(DeepMLP(4, 4, 1, 4, bias=False).layers)[0]
FORWARD = Forward(LAYER, 0)


def written(*operations: Operation) -> Schedule:
    return make_schedule(operations, [LAYER], (8,), 8, "float32")


def message(kind: type[Send] | type[Recv], microbatch: int, peer: int) -> Send | Recv:
    return kind(Value("output", 0, microbatch), (4, 8), "float32", peer)


def wait(microbatch: int) -> Wait:
    return Wait(Value("output", 0, microbatch))


@pytest.mark.parametrize(("pipeline", "late"), [(False, "wait_s"), (True, "idle_s")])
def test_the_norm_waits_for_the_last_rank_and_then_crosses(pipeline: bool, late: str) -> None:
    """Own part to 1.5 and 3.5; rank 0 waits two seconds; the exchange ends at 5.5, the update at 6.5."""
    step = written(FORWARD, GradientNorm((LAYER,), world(2)), Update((LAYER,), clips=True))
    costs = Table(forward=1.0, slow={1: 2.0}, norm=0.5, update=1.0, exchange=2.0)
    simulation = simulate([step, step], costs, pipeline=pipeline, keep_intervals=True)
    assert parts(simulation, "step_time_s") == [6.5, 6.5]
    assert parts(simulation, "compute_s") == [2.5, 4.5]
    assert parts(simulation, late) == [2.0, 0.0]
    assert parts(simulation, "exposed_comm_s") == [2.0, 2.0]
    assert parts(simulation, "overlap") == [None, None]
    assert drawn(simulation, 0, "communication") == []


def test_a_norm_that_crosses_nothing_holds_nobody_up() -> None:
    step = written(FORWARD, GradientNorm((LAYER,), world(2)), Update((LAYER,), clips=True))
    costs = Table(forward=1.0, slow={1: 2.0}, norm=0.5, update=1.0)
    simulation = simulate([step, step], costs, pipeline=True)
    assert parts(simulation, "step_time_s") == parts(simulation, "compute_s") == [2.5, 4.5]


def test_the_norm_does_not_queue_behind_data() -> None:
    """A reduction runs from 0 to 10; the exchange on the control group from 0 to 2 beside it."""
    gradient = LAYER.weight_gradients()[0]
    reduction = AllReduce(gradient, (16,), "float32", world(2))
    step = written(reduction, GradientNorm((LAYER,), world(2)), Wait(gradient))
    simulation = simulate([step, step], Table(transfer=10.0, exchange=2.0), pipeline=False)
    assert parts(simulation, "step_time_s") == parts(simulation, "exposed_comm_s") == [10.0, 10.0]


def test_a_send_idles_until_its_receive_is_posted() -> None:
    """Rank 1 computes until 3 before it posts; the transfer runs from 3 to 5."""
    plans = [
        written(message(Send, 0, 1), wait(0)),
        written(FORWARD, message(Recv, 0, 0), wait(0)),
    ]
    simulation = simulate(plans, Table(forward=3.0, transfer=2.0), pipeline=True, steps=1)
    assert parts(simulation, "idle_s") == [3.0, 0.0]
    assert parts(simulation, "exposed_comm_s") == [2.0, 2.0]
    assert parts(simulation, "step_time_s") == [5.0, 5.0]


def test_the_two_directions_between_ranks_are_channels_of_their_own() -> None:
    """Two messages there, one back, of 2 s each, all started at 0."""
    there = (message(Send, 0, 1), message(Send, 1, 1), message(Recv, 2, 1))
    back = (message(Recv, 0, 0), message(Recv, 1, 0), message(Send, 2, 0))
    waits = (wait(0), wait(1), wait(2))
    plans = [written(*there, *waits), written(*back, *waits)]
    simulation = simulate(plans, Table(transfer=2.0), pipeline=True, steps=1, keep_intervals=True)
    for rank in (0, 1):
        times = [piece[:2] for piece in drawn(simulation, rank, "communication")]
        assert times == [(0.0, 2.0), (2.0, 4.0), (0.0, 2.0)]
    assert parts(simulation, "exposed_comm_s") == [4.0, 4.0]


def test_a_wait_that_costs_more_than_the_transfer_still_takes_its_time() -> None:
    """The transfer ends at 2, the wait at 3; none of it is idle."""
    plans = [written(message(kind, 0, peer), wait(0)) for kind, peer in ((Send, 1), (Recv, 0))]
    simulation = simulate(plans, Table(transfer=2.0, wait=3.0), pipeline=True, steps=1)
    assert parts(simulation, "exposed_comm_s") == [3.0, 3.0]


# Refusals


def test_ranks_that_wait_for_each_other_are_named() -> None:
    plans = [
        written(message(Recv, 0, 1), wait(0), message(Send, 1, 1), wait(1)),
        written(message(Recv, 1, 0), wait(1), message(Send, 0, 0), wait(0)),
    ]
    with pytest.raises(ScheduleError) as refusal:
        simulate(plans, Table(), pipeline=True)
    assert str(refusal.value) == (
        "ranks wait for transfers that never start: rank 0 at wait for output of layer 0, microbatch 0; "
        "rank 1 at wait for output of layer 0, microbatch 1"
    )


def test_of_many_stuck_ranks_four_are_named() -> None:
    plans = [written(message(Recv, 0, (rank + 1) % 6), wait(0)) for rank in range(6)]
    with pytest.raises(ScheduleError, match=r"rank 3 at [^;]*; and 2 more$"):
        simulate(plans, Table(), pipeline=True)


def test_a_collective_that_a_rank_skips_is_a_deadlock() -> None:
    plans = plan(DataParallel, 2, 2)
    skips = [op for op in plans[1].operations if not isinstance(op, Communication | Wait)]
    with pytest.raises(ScheduleError, match="rank 0 at wait for weight gradient 0 of layer 0"):
        simulate([plans[0], replace(plans[1], operations=tuple(skips))], Table(), pipeline=False)


def test_a_wait_for_nothing_is_refused() -> None:
    with pytest.raises(ScheduleError, match=r"rank 0: wait for output .* has nothing in flight"):
        simulate([written(wait(0))], Table(), pipeline=False)


@pytest.mark.parametrize(
    ("costs", "named"),
    [
        (Table(forward=-1.0), "rank 0: layer 0, microbatch 0, forward costs -1.0 s"),
        (Table(data=float("nan")), "rank 0: waiting for data costs nan s"),
        (Table(transfer=float("inf")), "the transfer of all_reduce .* costs inf s"),
        (Table(exchange=-1.0), "the gradient norm's exchange costs -1.0 s"),
    ],
)
def test_a_cost_that_is_no_time_is_refused(costs: Table, named: str) -> None:
    with pytest.raises(ValueError, match=f"^{named}; use a finite time of at least 0$"):
        simulate(plan(DataParallel, 2, 2), costs, pipeline=False)


def test_no_step_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^steps=0 simulates nothing; use at least 1$"):
        simulate(plan(Single, 1, 1), Table(), pipeline=False, steps=0)


# Any plan, any costs


class Drawn:
    """A cost between 0 and 1 for every operation of every rank, equal each time it is asked for."""

    def __init__(self, seed: int, transfers: bool = True) -> None:
        self.seed, self.transfers = seed, transfers
        self.drawn: dict[tuple[object, ...], float] = {}

    def draw(self, *what: object) -> float:
        if what not in self.drawn:
            rng = random.Random(f"{self.seed} {what}")
            self.drawn[what] = rng.choice((0.0, 0.1, 1.0)) * rng.random()
        return self.drawn[what]

    def compute_s(self, rank: int, operation: Operation) -> float:
        return self.draw("compute", rank, operation.identity)

    def launch_s(self, rank: int, operation: Communication) -> float:
        return self.draw("launch", rank, operation.identity)

    def transfer_s(self, operation: Communication) -> float:
        return self.draw("transfer", operation.identity) if self.transfers else 0.0

    def wait_s(self, rank: int, operation: Wait) -> float:
        return self.draw("wait", rank, operation.identity)

    def before_s(self, rank: int) -> tuple[float, float]:
        return self.draw("data", rank), self.draw("before", rank)

    def after_s(self, rank: int) -> float:
        return self.draw("after", rank)

    def norm_s(self) -> float:
        return self.draw("norm") if self.transfers else 0.0


Key = tuple[object, int]  # a channel, and the how-manieth of its transfers
Line = tuple[str, Key | None, float]  # "arrive", "wait", "run" or "end"; the transfer; seconds


def relaxed_ends_s(schedules: Sequence[Schedule], costs: Costs, steps: int) -> list[list[float]]:
    """End of each step of each rank, by another way: guess that every transfer is complete at 0, run all
    ranks by that, take the completions that follow from their arrivals, and again until none changes."""
    durations_s: dict[Key, float] = {}
    lines = [list(unrolled(rank, schedules, costs, steps, durations_s)) for rank in range(len(schedules))]
    done_s = dict.fromkeys(durations_s, 0.0)
    while True:
        last_s = dict.fromkeys(durations_s, 0.0)
        ends_s = []
        for own in lines:
            clock, ends = 0.0, []
            for what, key, seconds in own:
                if what == "wait":
                    assert key is not None
                    clock = max(clock + seconds, done_s[key])
                    continue
                if what == "arrive":
                    assert key is not None
                    last_s[key] = max(last_s[key], clock)
                elif what == "end":
                    ends.append(clock)
                clock += seconds
            ends_s.append(ends)
        new_s: dict[Key, float] = {}
        for channel, number in sorted(last_s, key=lambda key: key[1]):
            free_s = new_s.get((channel, number - 1), 0.0)
            key = (channel, number)
            new_s[key] = max(last_s[key], free_s) + durations_s[key]
        if new_s == done_s:
            return ends_s
        done_s = new_s


def unrolled(
    rank: int, schedules: Sequence[Schedule], costs: Costs, steps: int, durations_s: dict[Key, float]
) -> Iterator[Line]:
    """What the rank does in all steps; what it is the first rank of, it notes the duration of."""
    counts: dict[object, int] = {}

    def key_of(channel: object, is_first: bool, duration_s: float) -> Key:
        key = (channel, counts.get(channel, 0))
        counts[channel] = key[1] + 1
        if is_first:
            durations_s[key] = duration_s
        return key

    keys: dict[Value, Key] = {}
    for _ in range(steps):
        yield "run", None, sum(costs.before_s(rank))
        for operation in schedules[rank].operations:
            if isinstance(operation, Wait):
                yield "wait", keys[operation.value], costs.wait_s(rank, operation)
            elif isinstance(operation, Communication):
                channel: object = "world"
                if isinstance(operation, Send | Recv):
                    pair = (rank, operation.peer)
                    channel = pair if isinstance(operation, Send) else pair[::-1]
                is_first = isinstance(operation, Send) or (channel == "world" and rank == 0)
                keys[operation.value] = key_of(channel, is_first, costs.transfer_s(operation))
                yield "arrive", keys[operation.value], costs.launch_s(rank, operation)
            else:
                yield "run", None, costs.compute_s(rank, operation)
                if isinstance(operation, GradientNorm) and len(schedules) > 1 and costs.norm_s() > 0:
                    key = key_of("norm", rank == 0, costs.norm_s())
                    yield "arrive", key, 0.0
                    yield "wait", key, 0.0
        yield "run", None, costs.after_s(rank)
        yield "end", None, 0.0


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 10**9), pipeline=st.booleans())
def test_any_plan_with_any_costs(seed: int, pipeline: bool) -> None:
    schedules = random_problem(random.Random(seed)).schedules()
    costs = Drawn(seed)
    ends = relaxed_ends_s(schedules, costs, steps=2)
    simulation = simulate(schedules, costs, pipeline=pipeline, steps=2, keep_intervals=True)
    assert simulation.step_time_s == max(parts(simulation, "step_time_s"))
    for rank, (split, (first, second)) in enumerate(zip(simulation.splits, ends, strict=True)):
        assert split.step_time_s == pytest.approx(second - first)
        added = split.compute_s + split.exposed_comm_s + split.wait_s + split.idle_s + split.host_s
        assert added == pytest.approx(split.step_time_s, rel=1e-12)
        computing = [op for op in schedules[rank].operations if not isinstance(op, Communication | Wait)]
        assert split.compute_s == pytest.approx(sum(costs.compute_s(rank, op) for op in computing))
        assert split.compute_s <= simulation.step_time_s * (1 + 1e-12)
        assert 0 <= split.data_s <= split.host_s
        assert split.overlap is None or 0 <= split.overlap <= 1 + 1e-12
        kinds = {type(op) for op in schedules[rank].operations}
        if not pipeline or (kinds & set(get_args(Collective)) and GradientNorm not in kinds):
            assert split.idle_s == 0
        thread = drawn(simulation, rank, "compute")
        assert all(one[1] == other[0] for one, other in pairwise(thread))
        if thread:
            assert thread[-1][1] - thread[0][0] == pytest.approx(split.step_time_s)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 10**9))
def test_a_step_is_never_slower_without_its_transfers(seed: int) -> None:
    """From a common start: later steps also hold what the ranks were apart when they began them."""
    schedules = random_problem(random.Random(seed), least_ranks=2).schedules()
    slower, faster = (
        simulate(schedules, Drawn(seed, transfers), pipeline=True, steps=1) for transfers in (True, False)
    )
    assert faster.step_time_s <= slower.step_time_s * (1 + 1e-12)


# Speed


# The counting of covered lines makes Python several times slower.
SLOWDOWN = 1 if sys.gettrace() is None else 10


def best_process_time_s(call: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return min(times)


def test_64_stages_with_64_microbatches_are_simulated_within_3_seconds() -> None:
    plans = plan(Pipeline, 64, 64, rows=64, microbatches=64)
    assert best_process_time_s(lambda: simulate(plans, TWO_STAGES, pipeline=True), 1) < 3 * SLOWDOWN


def test_a_small_plan_is_simulated_within_30_milliseconds() -> None:
    plans = plan(Pipeline, 8, 4, rows=32, microbatches=32)
    assert len(plans[1].operations) > 300
    best_s = best_process_time_s(lambda: simulate(plans, TWO_STAGES, pipeline=True, steps=4), 20)
    assert best_s < 0.03 * SLOWDOWN


def test_256_ranks_of_one_schedule_take_as_long_as_each_alone() -> None:
    """Eight layers: F 8, dX 8, dW 16, one reduction of all gradients in the open, 3, and its update, 0.5."""
    plans = plan(DataParallel, 8, 256, rows=256)
    assert len({id(schedule) for schedule in plans}) == 1
    simulation = simulate(plans, TWO_LAYERS, pipeline=False)
    assert parts(simulation, "step_time_s") == [35.5] * 256

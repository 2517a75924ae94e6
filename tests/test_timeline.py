"""Where the time of a step went: schedules drawn by hand, stamps chosen, parts worked out on paper."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from models.mlp import DeepMLP
from strategies.communication import AllReduce, Recv, Send, Wait
from strategies.compute import Forward, GradientNorm
from strategies.ddp import DataParallel
from strategies.pipeline import Pipeline
from strategies.schedule import Schedule
from strategies.strategy import Options, Task, whole_layers
from strategies.tensor import TensorParallel
from strategies.values import Group, Operation, Value
from trainer.matching import Matching
from trainer.spans import COMPUTE, LAUNCH, MEET, WAIT, spans_of
from trainer.timeline import HEAD, SPLIT, Timeline, union_s

MODEL = DeepMLP(4, 4, 4, 4, activation="identity")
LAYERS = whole_layers(MODEL.layers)
PAIR = Group("world", (0, 1))
GRADIENT = Value("weight gradient", 0, 0)
OUTPUT = Value("output", 0, 0)
REDUCE = AllReduce(GRADIENT, (16,), "float32", PAIR)


def schedule(*operations: Operation) -> Schedule:
    return Schedule(operations, (4,), 4, LAYERS, (), "float32")


def compute(layer: int = 0) -> Forward:
    return Forward(LAYERS[layer], 0)


def record(
    begin: float, asked: float, taken: float, marks: list[float], end: float, *seen: float
) -> np.ndarray:
    return np.array([begin, asked, taken, *marks, end, *seen])


def parts(timeline: Timeline, *records: np.ndarray) -> list[dict[str, float]]:
    """Of one step, by rank."""
    found = timeline.splits([own[None] for own in records])
    return [{key: float(found[key][0, rank]) for key in SPLIT} for rank in range(len(records))]


# compute, start, compute, wait
OVERLAPPED = schedule(compute(0), REDUCE, compute(1), Wait(GRADIENT))


def test_a_late_peer_is_waited_for_and_then_the_transfer_is_exposed() -> None:
    """Rank 1 starts its part at 8, when rank 0 has waited since 5; the transfer ends at 10 for both.

    Rank 0: 1 s of data and 1 s of filling, computing 2 to 3 and 3.5 to 5, launching 3 to 3.5, waiting 5 to 8,
    exposed 8 to 10, host 10 to 11. Rank 1: computing 2 to 8 and 8.5 to 9, waiting for nobody, then exposed.
    """
    timeline = Timeline([OVERLAPPED] * 2, norm_crosses=False, is_pipeline=False)
    first = record(0, 0, 1, [2, 3, 3.5, 5, 10], 11)
    second = record(0, 0, 0.5, [2, 8, 8.5, 9, 10], 10.5)
    assert parts(timeline, first, second) == [
        {"compute_s": 2.5, "exposed_comm_s": 2, "wait_s": 3, "idle_s": 0, "host_s": 3.5, "data_s": 1},
        {"compute_s": 6.5, "exposed_comm_s": 1, "wait_s": 0, "idle_s": 0, "host_s": 3, "data_s": 0.5},
    ]


def test_what_completions_show() -> None:
    """The same step observed: the transfer runs 8 to 9.8 on rank 0, 8 to 8.9 on rank 1.

    Rank 0 computes nothing in that time. Rank 1 computes from 8.5 to 9: 0.4 of 0.9 s are hidden.
    """
    timeline = Timeline([OVERLAPPED] * 2, norm_crosses=False, is_pipeline=False)
    records = [
        record(0, 0, 1, [2, 3, 3.5, 5, 10], 11, 9.8),
        record(0, 0, 0.5, [2, 8, 8.5, 9, 10], 10.5, 8.9),
    ]
    arrivals = timeline.arrivals(records)
    assert arrivals.tolist() == [8]
    first, second = (timeline.observe(rank, records[rank], arrivals, lambda _: 0.45) for rank in (0, 1))
    assert first.overlap == 0 and first.busy_s == pytest.approx(1.8) and first.curve_s == 0.45
    assert second.overlap == pytest.approx(0.4 / 0.9) and second.sending_s == pytest.approx(0.9)
    assert timeline.observe(0, records[0], arrivals, lambda _: None).curve_s is None


def test_a_completion_that_was_not_seen_leaves_all_that_needs_it_unknown() -> None:
    timeline = Timeline([OVERLAPPED] * 2, norm_crosses=False, is_pipeline=False)
    own = record(0, 0, 1, [2, 3, 3.5, 5, 10], 11, math.nan)
    shown = timeline.observe(0, own, timeline.arrivals([own, own]), None)
    assert (shown.overlap, shown.busy_s, shown.sending_s, shown.curve_s) == (None,) * 4


def test_a_stamp_that_comes_late_ends_with_the_wait() -> None:
    """The wait was over at 10, whatever the thread that stamps says."""
    timeline = Timeline([OVERLAPPED] * 2, norm_crosses=False, is_pipeline=False)
    records = [record(0, 0, 1, [2, 3, 3.5, 5, 10], 11, 10.4)] * 2
    assert timeline.ends(0, records[0]).tolist() == [10]


SENDER = schedule(compute(0), Send(OUTPUT, (4, 4), "float32", 1), Wait(OUTPUT))
RECEIVER = schedule(Recv(OUTPUT, (4, 4), "float32", 0), Wait(OUTPUT), compute(1))


@pytest.mark.parametrize(("is_pipeline", "late"), [(True, "idle_s"), (False, "wait_s")])
def test_a_stage_with_nothing_ready_is_idle(is_pipeline: bool, late: str) -> None:
    """The message is sent at 5 and waited for from 1.5 to 6; the sender waits from 5.25 to 5.5."""
    timeline = Timeline([SENDER, RECEIVER], norm_crosses=False, is_pipeline=is_pipeline)
    sender = record(0, 0, 0, [1, 5, 5.25, 5.5], 6)
    receiver = record(0, 0, 0, [1, 1.5, 6, 8], 8)
    first, second = parts(timeline, sender, receiver)
    assert first == {**dict.fromkeys(SPLIT, 0), "compute_s": 4, "exposed_comm_s": 0.25, "host_s": 1.75}
    expected = {"compute_s": 2, "exposed_comm_s": 1, late: 3.5, "host_s": 1.5}
    assert second == {**dict.fromkeys(SPLIT, 0), **expected}


def test_a_norm_that_crosses_ranks_is_three_spans() -> None:
    """Own part 1 to 2, exchange 2 to 6 where the other comes at 5, scaling 6 to 7."""
    norm = schedule(GradientNorm(LAYERS, PAIR))
    assert [span.kind for span in spans_of(norm, True)] == [COMPUTE, MEET, COMPUTE]
    assert [span.kind for span in spans_of(norm, False)] == [COMPUTE]
    timeline = Timeline([norm] * 2, norm_crosses=True, is_pipeline=False)
    found = parts(timeline, record(0, 0, 0, [1, 2, 6, 7], 7), record(0, 0, 0, [1, 5, 6, 7], 7))
    assert found[0] == {
        **dict.fromkeys(SPLIT, 0),
        "compute_s": 2,
        "wait_s": 3,
        "exposed_comm_s": 1,
        "host_s": 1,
    }
    assert found[1] == {**dict.fromkeys(SPLIT, 0), "compute_s": 5, "exposed_comm_s": 1, "host_s": 1}


def test_one_rank_only_computes() -> None:
    timeline = Timeline([schedule(compute(0), compute(1))], norm_crosses=False, is_pipeline=False)
    own = record(0, 1, 3, [4, 6, 9], 10)
    assert parts(timeline, own)[0] == {**dict.fromkeys(SPLIT, 0), "compute_s": 5, "host_s": 5, "data_s": 2}
    assert timeline.observe(0, own, timeline.arrivals([own]), None).overlap is None


def test_seconds_in_at_least_one_interval() -> None:
    """0 to 2, 1 to 3, 5 to 9 and 6 to 7: 3 and 4 seconds."""
    assert union_s(np.array([5.0, 0, 1, 6]), np.array([9.0, 2, 3, 7])) == 7


def test_transfers_of_one_pair_meet_in_order() -> None:
    """Two messages one way and one back: three meetings of two parties, each with its own start."""
    one, two, back = Value("output", 0, 0), Value("output", 0, 1), Value("gradient", 0, 0)
    shape, dtype = (4, 4), "float32"
    first = schedule(Send(one, shape, dtype, 1), Recv(back, shape, dtype, 1), Send(two, shape, dtype, 1))
    second = schedule(Recv(one, shape, dtype, 0), Recv(two, shape, dtype, 0), Send(back, shape, dtype, 0))
    meetings = Matching([first, second], False).meetings
    assert [own.parties for own in meetings] == [[(0, 0), (1, 0)], [(0, 1), (1, 2)], [(0, 2), (1, 1)]]
    assert isinstance(meetings[1].operation, Send) and meetings[1].operation.peer == 0


STRATEGIES = (
    DataParallel(Options(bucket_mb=0)),
    TensorParallel(Options(microbatches=2)),
    Pipeline(Options(microbatches=4, schedule="1f1b")),
    Pipeline(Options(microbatches=2, schedule="gpipe")),
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from(STRATEGIES),
    st.integers(1, 4),
    st.booleans(),
    st.integers(0, 2**32 - 1),
    st.integers(1, 3),
)
def test_parts_add_up(strategy: object, size: int, clips: bool, seed: int, steps: int) -> None:
    """Whatever the stamps are, as long as they ascend: host and waits by kind of span."""
    task = Task(clips=clips)
    schedules = [strategy.schedule(MODEL, size, rank, 12, task) for rank in range(size)]  # type: ignore[attr-defined]
    timeline = Timeline(schedules, clips and size > 1, isinstance(strategy, Pipeline))
    random = np.random.default_rng(seed)
    lengths = [timeline.length(rank, False) for rank in range(size)]
    records = [np.cumsum(random.exponential(1e-3, (steps, length)), axis=1) for length in lengths]
    found = timeline.splits(records)
    for rank, own in enumerate(records):
        kinds = timeline.tracks[rank].kinds
        spent = np.diff(timeline.marks(rank, own))
        host = own[:, HEAD] - own[:, 0] + own[:, -1] - own[:, -2] + spent[:, kinds == LAUNCH].sum(axis=1)
        waits = spent[:, (kinds == WAIT) | (kinds == MEET)].sum(axis=1)
        assert np.allclose(found["host_s"][:, rank], host, rtol=1e-9)
        waited = sum(found[key][:, rank] for key in ("exposed_comm_s", "wait_s", "idle_s"))
        assert np.allclose(waited, waits, rtol=1e-9, atol=1e-15)
    assert all((found[key] >= -1e-15).all() for key in SPLIT)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_wait_has_its_meeting(size: int) -> None:
    """All ranks of a collective, both ends of a message; a wait belongs to a start of the same rank."""
    for strategy in STRATEGIES:
        schedules = [strategy.schedule(MODEL, size, rank, 12, Task()) for rank in range(size)]
        matching = Matching(schedules, False)
        for meeting in matching.meetings:
            expected = 2 if meeting.is_message else size
            assert len({rank for rank, _ in meeting.parties}) == expected
        for track in matching.tracks:
            kinds = track.kinds.tolist()
            assert kinds.count(LAUNCH) == len(track.starts) and kinds.count(WAIT) == len(track.waits)
            starts = {number: place for place, number in track.starts}
            assert all(starts[number] < place for place, number in track.waits)

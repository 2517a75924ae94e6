"""trace.json by the trace event format: its schema, and the nesting that no schema can say."""

from __future__ import annotations

import copy
import itertools
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch

from collectives.group import World
from tests.ranks import RankPools
from tests.training import config, make_loop
from trainer.config import CollectivesConfig, RunConfig, StrategyConfig, TrainerConfig
from trainer.history import History
from trainer.recorder import Recorded
from trainer.report_trace import read_trace
from trainer.trace import write_trace

SCHEMA = json.loads((Path(__file__).parent / "trace_event.schema.json").read_text())
SLACK_US = 0.002  # times are written to the nanosecond


def overlapping(trace: dict[str, Any]) -> list[tuple[str, str]]:
    """Names of neighbours in one lane of which neither ends before the other begins nor holds it.

    Perfetto drops the second of such a pair.
    """
    lanes: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            lanes[event["pid"], event["tid"]].append(event)
    found = []
    for events in lanes.values():
        open_until: list[tuple[float, str]] = []
        for event in sorted(events, key=lambda own: (own["ts"], -own["dur"])):
            while open_until and open_until[-1][0] <= event["ts"] + SLACK_US:
                open_until.pop()
            stop = event["ts"] + event["dur"]
            if open_until and stop > open_until[-1][0] + SLACK_US:
                found.append((open_until[-1][1], event["name"]))
            open_until.append((stop, event["name"]))
    return found


def traced(world: World, run: RunConfig) -> None:
    """Job: train, and write the trace as a run does at its end."""
    loop = make_loop(world, run)
    loop.run()
    if world.rank == 0:
        last = loop.history.last
        timeline = loop.timeline(last[0].recorded.rows)
        write_trace(timeline, last, Path(run.run_dir), 0.0, loop.plan.task.algorithms)


TENSOR = StrategyConfig("tensor", microbatches=2)


@pytest.mark.parametrize(
    ("strategy", "choice", "algorithms"),
    [
        (StrategyConfig("ddp", bucket_mb=0, microbatches=2), "auto", {"all_reduce": "ring"}),
        (TENSOR, "auto", {"all_gather": "direct", "reduce_scatter": "direct", "all_reduce": "ring"}),
        (TENSOR, "native", {"all_gather": "ring", "reduce_scatter": "reduce_all", "all_reduce": "ring"}),
        (StrategyConfig("pipeline", microbatches=4), "auto", {"send": "direct"}),
    ],
    ids=("ddp", "tensor", "tensor, native", "pipeline"),
)
def test_a_run_writes_a_trace_of_the_format(
    strategy: StrategyConfig, choice: str, algorithms: dict[str, str], ranks: RankPools, tmp_path: Path
) -> None:
    trainer = TrainerConfig(max_steps=6, warmup_steps=2, wire_every=2)
    own = CollectivesConfig(algorithm=choice)
    ranks[2].run(traced, config(strategy, run_dir=str(tmp_path), trainer=trainer, collectives=own))
    trace = json.loads((tmp_path / "trace.json").read_text())
    jsonschema.validate(trace, SCHEMA)
    assert trace["otherData"]["steps"] == [4, 5]
    assert overlapping(trace) == []
    lanes = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in trace["traceEvents"]
        if event["name"] == "thread_name"
    }
    assert {name for name in lanes.values() if name[-1].isalpha()} == {"compute", "communication"}
    used = {(event["pid"], event["tid"]) for event in trace["traceEvents"] if event["ph"] == "X"}
    assert used <= lanes.keys()
    transfers = [event for event in trace["traceEvents"] if event.get("cat") == "transfer"]
    assert transfers and all(event["args"]["bytes"] > 0 for event in transfers)
    told = {(event["args"]["operation"], event["args"]["algorithm"]) for event in transfers}
    assert told == set(algorithms.items())
    found = read_trace(trace)
    assert found is not None and found.step == 5
    assert found.transfers() and all(bar.algorithm for bar in found.transfers())


@pytest.mark.parametrize(
    ("observed", "short", "expected"),
    [
        ({9, 19}, set(), [18, 19]),
        ({9}, set(), [8, 9]),  # a run that was stopped after it
        ({0}, set(), [0]),
        (set(), set(), [19, 20]),
        ({9, 19}, {18}, [19]),  # the end of an epoch: other stamps
        ({9, 19}, {18, 19}, [18, 19]),
    ],
)
def test_the_steps_drawn_are_neighbours(observed: set[int], short: set[int], expected: list[int]) -> None:
    """Of the steps 0 to 20 the last observed one, and the one before it if its batch was as large."""
    history = History(16, warmup_steps=2)
    for step in range(21):
        history.add(step, Recorded(8 if step in short else 16, step in observed, [np.zeros(4)], [None]))
    assert [kept.step for kept in history.last] == expected


def test_the_schema_takes_what_torch_writes_for_the_same_viewers(tmp_path: Path) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        torch.ones(4) + 1
    profiler.export_chrome_trace(str(tmp_path / "torch.json"))
    jsonschema.validate(json.loads((tmp_path / "torch.json").read_text()), SCHEMA)


GOOD = {
    "traceEvents": [
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "rank 0"}},
        {"ph": "X", "name": "a", "pid": 0, "tid": 0, "ts": 0, "dur": 2},
        {"ph": "X", "name": "b", "pid": 0, "tid": 0, "ts": 3, "dur": 2},
    ]
}


@pytest.mark.parametrize(
    ("place", "change"),
    [
        (1, {"dur": -1}),
        (1, {"ts": None}),
        (1, {"ts": "0"}),
        (1, {"ph": "complete"}),
        (1, {"pid": None}),
        (0, {"args": {}}),
        (0, {"name": "process"}),
    ],
)
def test_the_schema_refuses_what_the_format_does(place: int, change: dict[str, Any]) -> None:
    jsonschema.validate(GOOD, SCHEMA)
    bad = copy.deepcopy(GOOD)
    bad["traceEvents"][place] |= change  # type: ignore[operator]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(bad, SCHEMA)


@pytest.mark.parametrize(
    ("second", "overlaps"), [((3, 2), False), ((1, 1), False), ((0, 1), False), ((1, 2), True)]
)
def test_overlapping_is_told_from_nesting(second: tuple[float, float], overlaps: bool) -> None:
    trace = copy.deepcopy(GOOD)
    trace["traceEvents"][2] |= dict(zip(("ts", "dur"), second, strict=True))  # type: ignore[operator]
    assert bool(overlapping(trace)) is overlaps
    assert list(itertools.chain(*overlapping(trace))) == (["a", "b"] if overlaps else [])

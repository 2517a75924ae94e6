"""Ours beside torch's own, all alive in one process set and taken in turn.

The order of events: every contender takes one step and its gradients are checked; all warm up; candidates
of one contender are tuned down to the fastest; then come the rounds, in which each takes its turn between
two barriers, the order changing from round to round; last, allocations are counted.
"""

from __future__ import annotations

import gc
import json
import math
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from collectives.group import World
from strategies.strategy import Options
from trainer.contenders import Contender, OurSplit, Problem, Request, Setting
from trainer.torch_baselines import (
    MIB,
    PIPELINE_SCHEDULES,
    TorchColumns,
    TorchPairs,
    TorchPipeline,
    ddp_candidates,
)

TOLERANCE = 1e-5  # of float32 gradients that are summed in different orders
BUCKET_COUNTS = (1, 2, 4)
TUNING_ROUNDS = 7
PROFILED_STEPS = 3
TIMEOUT_S = 120.0
POLL_S = 0.5
QUIET = {"KINETO_LOG_LEVEL": "6", "TORCH_CPP_LOG_LEVEL": "ERROR"}  # the profiler tells of itself otherwise

Row = dict[str, Any]
Tell = Callable[[str], None]


class ComparisonStopped(RuntimeError):
    """The comparison would not be fair or not be right: one sentence."""


def run_comparison(request: Request) -> Row:
    """Raw measurements of all settings, taken on `ranks` processes that are started and ended here.

    `load_average` is the machine's over the minute before.

    Raises:
        ComparisonStopped: two implementations of one split do not compute the same gradients.
    """
    load_average = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="splitmeter-compare-") as folder:
        results = Path(folder, "results.json")
        arguments = (request, str(Path(folder, "store")), str(results))
        os.environ.update(QUIET)
        # Inherited: Ctrl-C is heard here, not by ranks that are still importing.
        heard = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            processes = mp.start_processes(
                run_rank, arguments, request.ranks, join=False, daemon=True, start_method="spawn"
            )
        finally:
            signal.signal(signal.SIGINT, heard)
        assert processes is not None
        try:
            while not processes.join(timeout=POLL_S):
                pass
        finally:
            for process in processes.processes:
                if process.is_alive():
                    process.kill()
                process.join()
        outcome: Row = json.loads(results.read_text(encoding="utf-8"))
    if "error" in outcome:
        raise ComparisonStopped(outcome["error"])
    return {**outcome, "load_average": load_average}


def run_rank(rank: int, request: Request, store: str, results: str) -> None:
    """One rank of a comparison, in a process of its own; rank 0 writes the outcome to `results`, as JSON."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # ends a rank also inside a collective
    torch.set_num_threads(1)
    if os.path.exists("/sys/class/net/lo"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    world = World(rank, request.ranks, "gloo", TIMEOUT_S, dist.FileStore(store, request.ranks))
    outcome: Row = {"settings": []}
    try:
        for setting in request.settings:
            outcome["settings"].append(compare(request, setting, world, _teller(setting, rank)))
    except ComparisonStopped as error:
        outcome = {"error": str(error)}
    if rank == 0:
        Path(results).write_text(json.dumps(outcome), encoding="utf-8")
    world.close()


def compare(request: Request, setting: Setting, world: World, tell: Tell) -> Row:
    """Raw measurements of one setting, equal on all ranks.

    Raises:
        ComparisonStopped: two implementations of one split do not compute the same gradients.
    """
    problem = Problem(setting, world, request.seed)
    contenders = [c for family in request.families for c in make_contenders(request, problem, family)]
    for contender in contenders:
        contender.step()
    differences = check_gradients(world, contenders)
    worst = max(differences.values())
    tell(f"gradients of {len(contenders)} candidates agree (largest relative difference {worst:.1e})")
    for _ in range(request.warmup - 1):
        for contender in contenders:
            contender.step()
    contenders = tune(world, contenders)
    tell("tuned: " + "; ".join(f"{c.name}: {c.tuning}" for c in contenders if c.tuning))
    times_s = take_turns(world, contenders, request.rounds, request.burst, tell)
    return {
        "setting": vars(setting),
        "contenders": [
            {
                "family": contender.family,
                "name": contender.name,
                "is_ours": contender.is_ours,
                "tuning": contender.tuning,
                "gradient_difference": differences.get((contender.family, contender.name)),
                "allocations_per_step": count_allocations(contender),
                "times_s": times,
            }
            for contender, times in zip(contenders, times_s.T.tolist(), strict=True)
        ],
    }


def make_contenders(request: Request, problem: Problem, family: str) -> list[Contender]:
    """Ours first, then torch's. Both sides of data parallel choose among the same bucket sizes."""
    if family == "tensor":
        return [OurSplit(problem, "tensor", Options()), TorchColumns(problem), TorchPairs(problem)]
    if family == "pipeline":
        ours = OurSplit(problem, "pipeline", Options(schedule=request.schedule))
        return [ours, *(TorchPipeline(problem, schedule) for schedule in PIPELINE_SCHEDULES)]
    contenders: list[Contender] = []
    total_bytes = problem.setting.layers * problem.setting.width**2 * 4
    for buckets in BUCKET_COUNTS:
        for overlap in (True, False):
            options = Options(bucket_mb=total_bytes / buckets / MIB, overlap=overlap)
            tuning = f"buckets: {buckets}, overlap {str(overlap).lower()}"
            contenders.append(OurSplit(problem, "ddp", options, tuning))
    return [*contenders, *ddp_candidates(problem, BUCKET_COUNTS)]


def check_gradients(world: World, contenders: Sequence[Contender]) -> dict[tuple[str, str], float]:
    """Largest max|a-b| / max|b| over tensors and ranks, of each contender and the first of its family, ours.

    Raises:
        ComparisonStopped: one is above the tolerance.
    """
    worst: dict[tuple[str, str], float] = {}
    for family in dict.fromkeys(contender.family for contender in contenders):
        ours, *others = [contender for contender in contenders if contender.family == family]
        own = ours.gradients()
        for other in others:
            theirs = other.gradients()
            assert theirs.keys() == own.keys()
            difference = torch.tensor(max(_difference(own[layer], theirs[layer]) for layer in own))
            dist.all_reduce(difference, dist.ReduceOp.MAX)
            if not difference <= TOLERANCE:
                raise ComparisonStopped(
                    f"gradients of {other.name} differ from ours by {float(difference):.1e} of their largest "
                    f"after one step, more than {TOLERANCE:.0e}; nothing was timed"
                )
            key = (family, other.name)
            worst[key] = max(worst.get(key, 0.0), float(difference))
    return worst


def _difference(ours: Tensor, theirs: Tensor) -> float:
    difference = float((ours - theirs).abs().max() / theirs.abs().max())
    return difference if math.isfinite(difference) else math.inf  # a maximum would lose a NaN


def tune(world: World, contenders: Sequence[Contender]) -> list[Contender]:
    """Of candidates for the same contender, the one of the smallest median."""
    groups: dict[tuple[str, str], list[Contender]] = {}
    for contender in contenders:
        groups.setdefault((contender.family, contender.name), []).append(contender)
    candidates = [contender for group in groups.values() if len(group) > 1 for contender in group]
    times_s = take_turns(world, candidates, TUNING_ROUNDS, 1)
    median_s = {
        id(c): statistics.median(times) for c, times in zip(candidates, times_s.T.tolist(), strict=True)
    }
    return [min(group, key=lambda c: median_s.get(id(c), 0.0)) for group in groups.values()]


def take_turns(
    world: World, contenders: Sequence[Contender], rounds: int, burst: int, tell: Tell | None = None
) -> Tensor:
    """Seconds a step of the slowest rank, [rounds, contenders].

    A round starts one contender later than the last and goes the other way round, so that none
    always follows the same one.
    """
    times_s = torch.zeros(rounds, len(contenders), dtype=torch.float64)
    gc.collect()
    gc.freeze()  # a collection that falls into somebody's step then walks little
    for turn in range(rounds):
        for place in order_of_turn(len(contenders), turn):
            step = contenders[place].step
            dist.barrier()
            start = time.perf_counter()
            for _ in range(burst):
                step()
            times_s[turn, place] = (time.perf_counter() - start) / burst
            dist.barrier()
        if tell is not None and (turn + 1) % 10 == 0:
            tell(f"round {turn + 1} of {rounds}")
    gc.unfreeze()
    if contenders:
        dist.all_reduce(times_s, dist.ReduceOp.MAX)
    return times_s


def order_of_turn(count: int, turn: int) -> list[int]:
    """Places of `count` contenders in one round."""
    order = [(turn + place) % count for place in range(count)]
    return order[::-1] if turn % 2 else order


def count_allocations(contender: Contender) -> float:
    """Allocations of tensor memory in a step by torch's profiler, on the own thread of the rank with most."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        for _ in range(PROFILED_STEPS):
            contender.step()
    with tempfile.TemporaryDirectory(prefix="splitmeter-compare-") as folder:
        trace = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    count = sum(e.get("name") == "[memory]" and e["args"]["Bytes"] > 0 for e in events)
    largest = torch.tensor(count)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return int(largest) / PROFILED_STEPS


def _teller(setting: Setting, rank: int) -> Tell:
    def tell(text: str) -> None:
        if rank == 0:
            print(f"{setting}: {text}", file=sys.stderr, flush=True)

    return tell

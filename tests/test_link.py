"""The link curve: interpolation by hand, files that are refused, and a real measurement."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from collectives import link_measuring as link_module
from collectives.group import World
from collectives.link import Curve, LinkCurve, Point, load
from collectives.link_measuring import curve_sizes, measure_link
from collectives.subject import Case, Subject
from tests.ranks import RankPools
from trainer.config import InputError, RunConfig
from trainer.link import check_link_file, obtain_links
from trainer.plan import make_plan


def point(size_bytes: int, time_s: float) -> Point:
    return Point(size_bytes, "ring", time_s, time_s * 0.9, time_s * 1.1, 5)


CURVE = Curve("all_reduce", 4, (point(1000, 1e-3), point(100_000, 1e-2), point(10**7, 0.1)))
HERE = {"backend": "gloo", "device": "cpu"}


@pytest.mark.parametrize(
    ("size_bytes", "expected_s"),
    [
        (0, 0.0),
        (1, 1e-3),  # a message costs its latency
        (1000, 1e-3),
        (10_000, math.sqrt(1e-3 * 1e-2)),  # half-way in log(size), half-way in log(time)
        (31_622.7766, 1e-3 * 10**0.75),
        (100_000, 1e-2),
        (10**7, 0.1),
        (3 * 10**7, 0.3),  # the largest one's bandwidth
    ],
)
def test_time_is_interpolated_in_log_size(size_bytes: float, expected_s: float) -> None:
    assert CURVE.time_s(size_bytes) == pytest.approx(expected_s, rel=1e-9)


def test_bandwidth_and_latency() -> None:
    """10 MB among 4 ranks: each sends 15 MB in 0.1 s."""
    assert CURVE.bandwidth_GBps == pytest.approx(0.15)
    assert CURVE.latency_s == 1e-3
    send = Curve("send", 4, (point(10**6, 1e-3),))
    assert send.bandwidth_GBps == pytest.approx(1.0)


def test_what_was_not_measured_is_said() -> None:
    link = LinkCurve([CURVE], {})
    assert link.time_s("all_reduce", 1, 1000) == 0.0
    assert link.time_s("all_reduce", 4, 1000) == 1e-3
    with pytest.raises(ValueError, match=r"no all_gather on 4 ranks; it has all_reduce on 4"):
        link.time_s("all_gather", 4, 1000)


def test_a_file_gives_the_same_curve(tmp_path: Path) -> None:
    path = tmp_path / "link_curve.json"
    LinkCurve([CURVE], {"host": "here"}).save(path)
    read = load(path)
    assert read.curves == {("all_reduce", 4): CURVE}
    assert read.measured == {"host": "here"}
    assert [entry.name for entry in tmp_path.iterdir()] == ["link_curve.json"]


def damaged(**changes: Any) -> str:
    data = LinkCurve([CURVE], {}).to_json()
    for key, value in changes.items():
        if key in data:
            data[key] = value
        else:
            data["curves"][0]["points"][1][key] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not JSON"),
        (damaged()[:-40], "is not JSON"),
        ("[]", "no link curve"),
        ('{"schema": 1}', "it has no curves"),
        (damaged(schema=2), "schema 2 and must have 1"),
        (damaged(time_s=0), "all_reduce on 4 ranks: the times of 100000 bytes must be above 0"),
        (damaged(time_s=float("nan")), "must be above 0"),
        (damaged(q1_s=None), "must be above 0"),
        (damaged(size_bytes=10), "sizes must ascend"),
        (damaged(size_bytes=1e5), "sizes must ascend"),
        (damaged(curves=[{"operation": "all_reduce"}]), "'points' is missing"),
        (damaged(curves=[{"operation": "x", "group_size": 2, "points": []}]), "x on 2 ranks has no points"),
        (damaged(colour=3), "colour"),
        (damaged(q1_s=0.5), "quartiles in order"),
        (damaged(samples=-4), "samples=-4"),
        (damaged(algorithm=7), "algorithm=7"),
        (damaged(curves=3), "curves must be a list"),
        (damaged(measured=[]), "measured a mapping"),
        (json.dumps(LinkCurve([CURVE], {}).to_json()).replace("4,", "1,"), "group_size=1 must be"),
        (damaged(curves=LinkCurve([CURVE], {}).to_json()["curves"] * 2), "stands there twice"),
    ],
)
def test_files_that_are_no_curve_are_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "link_curve.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"link_curve\.json") as refused:
        load(path)
    assert said in str(refused.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        load(tmp_path / "none.json")


def test_sizes_reach_the_largest_message() -> None:
    assert curve_sizes(1) == [1024]
    assert curve_sizes(70_000) == [1024, 4096, 16384, 65536, 262144]


def measured(world: World) -> dict[str, Any]:
    """Job: a short curve, and how many calls were made."""
    calls = 0
    run = Subject.run

    def counting(subject: Subject, asynchronous: bool = False) -> Any:
        nonlocal calls
        calls += 1
        return run(subject, asynchronous)

    Subject.run = counting  # type: ignore[method-assign]
    try:
        link = measure_link(
            world, ["all_reduce", "all_gather", "send"], [1024, 5000], longest_s=60, most_rounds=4
        )
    finally:
        Subject.run = run  # type: ignore[method-assign]
    return {"json": link.to_json(), "calls": calls}


@pytest.mark.parametrize("size", [2, 3])
def test_a_measured_curve_is_the_same_on_all_ranks(ranks: RankPools, size: int) -> None:
    results = ranks[size].run(measured)
    assert all(result["json"]["curves"] == results[0]["json"]["curves"] for result in results)
    data = results[0]["json"]
    found = {
        (c["operation"], c["group_size"], *(p["algorithm"] for p in c["points"])) for c in data["curves"]
    }
    gathered_by = "ring" if size == 2 else "direct"  # what auto takes for a few kilobytes
    assert found == {
        ("all_reduce", size, "ring", "ring"),
        ("all_gather", size, gathered_by, gathered_by),
        ("send", size, "direct", "direct"),
    }
    for curve in data["curves"]:
        points = curve["points"]
        blocks = size if curve["operation"] == "all_gather" else 1  # whole elements of every rank's block
        assert [p["size_bytes"] for p in points] == [
            1024 // 4 // blocks * blocks * 4,
            5000 // 4 // blocks * blocks * 4,
        ]
        for p in points:
            assert 0 < p["q1_s"] <= p["time_s"] <= p["q3_s"] < 1
            assert p["samples"] == 4
    assert data["measured"]["world_size"] == size
    assert data["measured"]["backend"] == "gloo"
    # Two operations of Subject at two sizes, three warm-ups and four samples of 1 to 10 calls.
    assert 2 * 2 * 7 <= results[0]["calls"] <= 2 * 2 * 70


def slow(world: World) -> list[int]:
    """Job: sizes that were measured where a call takes longer the larger it is."""
    sample = link_module._Turn.sample

    def slower(turn: link_module._Turn, warming: bool = False) -> float:
        sample(turn, warming)
        return turn.size_bytes * 2e-6

    link_module._Turn.sample = slower  # type: ignore[method-assign]
    try:
        link = measure_link(world, ["all_reduce"], [400, 1600, 6400, 25_600, 102_400], longest_s=2.0)
    finally:
        link_module._Turn.sample = sample  # type: ignore[method-assign]
    return [p.size_bytes for p in link.curve("all_reduce", world.size).points]


def test_sizes_stop_growing_where_the_link_is_slow(ranks: RankPools) -> None:
    """6,400 bytes take 13 ms, 25,600 51, and 102,400 would take 205, over 3 % of 2 s."""
    assert ranks[2].run(slow) == [[400, 1600, 6400, 25_600]] * 2


def test_one_rank_has_no_link(ranks: RankPools) -> None:
    assert ranks[1].run(alone) == [0]


def alone(world: World) -> int:
    return len(measure_link(world, ["all_reduce"], [1024]).curves)


def test_a_case_of_a_curve_is_cut_to_whole_elements() -> None:
    assert Case("all_gather", 5000).elements(3) == 1248
    assert Case("all_reduce", 5003).elements(3) == 1250


# In a run


def run_config(strategy: str, **collectives: Any) -> RunConfig:
    # Time enough that a disturbed call does not end the sizes.
    sections = {"strategy": {"name": strategy}, "collectives": {"link_budget_s": 60, **collectives}}
    return RunConfig.from_mapping({**sections, "data": {"batch_size": 128}}, "/nonexistent")


def obtained(world: World, run: RunConfig) -> list[tuple[str, str, list[int]]] | None:
    """Job: what a run would measure."""
    link = obtain_links(make_plan(run, world.size), world).plan
    if link is None:
        return None
    return [
        (curve.operation, *{p.algorithm for p in curve.points}, [p.size_bytes for p in curve.points])
        for curve in link.curves.values()
    ]


@pytest.mark.parametrize(
    ("strategy", "algorithm", "expected"),
    [
        # Digits: 64 to 128, twice 128 to 128, 128 to 10, with biases: 42,634 parameters, 170,536 bytes.
        ("ddp", "auto", [("all_reduce", "ring", [1024, 4096, 16384, 65536, 262144])]),
        (
            "tensor",
            "auto",
            [
                ("all_reduce", "ring", [1024, 4096, 16384, 65536]),
                ("all_gather", "direct", [1024, 4096, 16384, 65536]),
                ("reduce_scatter", "direct", [1024, 4096, 16384, 65536]),
            ],
        ),
        (
            "tensor",
            "native",
            [
                ("all_reduce", "ring", [1024, 4096, 16384, 65536]),
                ("all_gather", "ring", [1024, 4096, 16384, 65536]),
                ("reduce_scatter", "reduce_all", [1024, 4096, 16384, 65536]),
            ],
        ),
        ("pipeline", "auto", [("send", "direct", [1024, 4096, 16384, 65536])]),
    ],
)
def test_a_run_measures_what_its_step_sends(
    ranks: RankPools, strategy: str, algorithm: str, expected: list[tuple[str, str, list[int]]]
) -> None:
    """Up to its largest message, by the algorithms that will move it."""
    found = ranks[2].run(obtained, run_config(strategy, algorithm=algorithm))
    assert found == [expected] * 2


def test_measuring_can_be_switched_off(ranks: RankPools) -> None:
    assert ranks[2].run(obtained, run_config("ddp", link_budget_s=0)) == [None, None]
    assert ranks[1].run(obtained, run_config("single")) == [None]


def test_a_run_takes_the_curve_that_it_is_given(ranks: RankPools, tmp_path: Path) -> None:
    path = tmp_path / "link_curve.json"
    LinkCurve([replace(CURVE, group_size=2)], HERE).save(path)
    expected = [("all_reduce", "ring", [1000, 100_000, 10**7])]
    assert ranks[2].run(obtained, run_config("ddp", link_curve=str(path))) == [expected] * 2


@pytest.mark.parametrize(
    ("strategy", "text", "said"),
    [
        ("ddp", None, "cannot be read"),
        ("ddp", "{", "is not JSON"),
        (
            "ddp",
            json.dumps(LinkCurve([CURVE], HERE).to_json()),
            "no all_reduce on 2 ranks; it has all_reduce on 4",
        ),
        (
            "pipeline",
            json.dumps(LinkCurve([replace(CURVE, group_size=2)], HERE).to_json()),
            "no send on 2 ranks",
        ),
        (
            "ddp",
            json.dumps(LinkCurve([CURVE], {"backend": "nccl", "device": "cuda"}).to_json()),
            "measured with backend=nccl, and this run has gloo",
        ),
    ],
)
def test_a_curve_that_does_not_serve_is_refused(
    tmp_path: Path, strategy: str, text: str | None, said: str
) -> None:
    path = tmp_path / "link_curve.json"
    if text is not None:
        path.write_text(text)
    plan = make_plan(run_config(strategy, link_curve=str(path)), 2)
    with pytest.raises(InputError, match=r"^collectives\.link_curve=") as refused:
        check_link_file(plan)
    assert said in str(refused.value) and "\n" not in str(refused.value)

"""Each cause planted and named, with fresh magnitudes every day; scripts/planted.py runs all of it."""

from __future__ import annotations

import datetime
from pathlib import Path
from random import Random

import pytest

from tests.planted import CASES, HEALTHY, PLANTED, Case
from tests.planted_matrix import run_case
from tests.system import need_two_hosts

SEED = datetime.date.today().isoformat()
WELL = tuple(Random(SEED).sample(HEALTHY, 3))


def test_there_are_enough_cases() -> None:
    assert len(HEALTHY) >= 20
    assert {case.cause for case in PLANTED} == {
        "small_messages", "bad_algorithm", "no_overlap", "idle_bubble", "uneven_shards", "slow_rank",
        "small_microbatches", "wrong_link", "none",
    }  # fmt: skip
    assert {case.wall for case in PLANTED} == {None, "link", "input", "compute"}
    assert len(CASES) == len(PLANTED) + len(HEALTHY)


@pytest.mark.parametrize(
    "case",
    [case for case in CASES.values() if case.name != "input"],  # which writes its data
    ids=lambda case: case.name,
)
def test_a_seed_draws_the_same_again(case: Case, tmp_path: Path) -> None:
    assert case.draw(Random("7"), tmp_path) == case.draw(Random("7"), tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", [*PLANTED, *WELL], ids=lambda case: case.name)
def test_the_verdict_names_what_was_planted(case: Case, tmp_path: Path) -> None:
    if case.draw(Random(0), tmp_path).two_hosts:
        need_two_hosts()
    said = []
    for seed in (SEED, f"{SEED} again"):  # a machine busy with other things for a moment hides a cause
        outcome = run_case(case, seed, tmp_path / seed, cure=False)
        if not outcome.wrong:
            return
        said.append(f"seed {seed}: {outcome.wrong}: {outcome.verdict['sentence']}")
    pytest.fail("; ".join(said))

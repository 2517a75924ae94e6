"""Each cause planted and named, with fresh magnitudes every day; scripts/planted.py runs all of it."""

from __future__ import annotations

import datetime
from pathlib import Path
from random import Random

import pytest

from tests.planted import HEALTHY, PLANTED, Case, Plant
from tests.planted_matrix import CASES, Outcome, main, report, run_case
from tests.spanning import SPANNING
from tests.system import need_two_hosts

SEED = datetime.date.today().isoformat()
WELL = tuple(Random(SEED).sample(HEALTHY, 3))
ACROSS = tuple(Random(SEED).sample(SPANNING, 2))


def test_there_are_enough_cases() -> None:
    assert len(HEALTHY) >= 20
    assert {case.cause for case in PLANTED} == {
        "small_messages", "bad_algorithm", "no_overlap", "idle_bubble", "uneven_shards", "slow_rank",
        "small_microbatches", "wrong_link", "none",
    }  # fmt: skip
    assert {case.wall for case in PLANTED} == {None, "link", "input", "compute"}
    assert {case.cause for case in SPANNING} == {case.cause for case in PLANTED} - {"none"}
    assert len(CASES) == len(PLANTED) + len(SPANNING) + len(HEALTHY)


def _outcome(case: Case, cause: str, step_s: float, **measured: float) -> Outcome:
    verdict = {"cause": cause, "wall": "compute", "rank": None, "step_time_s": step_s}
    return Outcome(case, "0", Plant(()), verdict, **measured)


@pytest.mark.parametrize(
    ("cause", "free_s", "right"),
    [
        ("no_overlap", 0.80, True),  # takes 20 %
        ("none", 0.80, False),
        ("small_messages", 0.80, False),
        ("no_overlap", 0.94, True),  # takes 6 %: both
        ("none", 0.94, True),
        ("small_messages", 0.94, False),
        ("no_overlap", 0.99, False),  # takes 1 %
        ("none", 0.99, True),
        ("none", 1.01, True),
    ],
)
def test_what_a_plant_takes_says_what_must_be_named(cause: str, free_s: float, right: bool) -> None:
    case = next(case for case in SPANNING if case.cause == "no_overlap")
    assert (not _outcome(case, cause, 1.0, free_s=free_s).wrong) is right


def test_a_cause_in_a_healthy_run_is_right_where_its_change_helps() -> None:
    case = HEALTHY[0]
    assert not _outcome(case, "none", 1.0).wrong
    assert _outcome(case, "idle_bubble", 1.0).wrong
    assert _outcome(case, "idle_bubble", 1.0, after_s=0.97).wrong
    assert not _outcome(case, "idle_bubble", 1.0, after_s=0.9).wrong


def test_a_saved_table_names_the_runs_that_failed() -> None:
    right = _outcome(HEALTHY[0], "none", 1.0)
    assert "All were named right." in report([right], "0")
    told = report([right], "0", ["ddp, run 1: exit code 1 of train.py\nTraceback"])
    assert "All were named right." not in told and "Traceback" not in told
    assert told.endswith("Failed:\n\n- ddp, run 1: exit code 1 of train.py\n")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("no_such", "CASE=no_such is unknown; valid are small_messages, "),
        ("--runs 0", "--runs=0 must be at least 1"),
        ("--seeds 3", "unrecognized arguments: --seeds; --help lists what there is"),
    ],
)
def test_wrong_input_is_told_in_one_sentence(
    arguments: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments.split()) == 2
    told = capsys.readouterr().err
    assert told.startswith(sentence) and told.count("\n") == 1


@pytest.mark.parametrize(
    "case",
    [case for case in CASES.values() if case.name != "input"],  # which writes its data
    ids=lambda case: case.name,
)
def test_a_seed_draws_the_same_again(case: Case, tmp_path: Path) -> None:
    assert case.draw(Random("7"), tmp_path) == case.draw(Random("7"), tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("case", [*PLANTED, *ACROSS, *WELL], ids=lambda case: case.name)
def test_the_verdict_names_what_was_planted(case: Case, tmp_path: Path) -> None:
    if case.draw(Random(0), tmp_path).two_hosts:
        need_two_hosts()
    said = []
    for seed in (SEED, f"{SEED} again", f"{SEED} still"):  # a machine that is busy for a moment hides a cause
        outcome = run_case(case, seed, tmp_path / seed, cure=False)
        if not outcome.wrong:
            return
        said.append(f"seed {seed}: {outcome.wrong}: {outcome.verdict['sentence']}")
    pytest.fail("; ".join(said))

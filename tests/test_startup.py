"""scripts/startup.py: medians, their ratio and the bar; and one real measurement on one rank."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainer import startup
from trainer.startup import BARE, Cost, job_cost, main


@pytest.mark.parametrize(("start_s", "code"), [(2.6, 0), (2.7, 1)])
def test_the_bar_is_a_ratio_of_medians(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    start_s: float,
    code: int,
) -> None:
    jobs = iter([Cost(50.0, 60.0), Cost(9.0, 9.5), Cost(start_s, 3.0), Cost(1.0, 1.5)])
    monkeypatch.setattr(startup, "launcher_cost", lambda world_size: Cost(2.0, 2.5))
    monkeypatch.setattr(startup, "job_cost", lambda world_size, settings: next(jobs))
    assert main(["--ranks", "2", "--rounds", "3", "--json", str(tmp_path / "all.json")]) == code
    lines = [line for line in capsys.readouterr().out.splitlines() if "job, bare" in line]
    cells = [cell.strip() for cell in lines[0].split("│")]
    assert cells[3:6] == [f"{start_s:.2f}", f"{start_s / 2:.2f}", "3.00"]  # the first, of 50 s, is left out
    assert len(json.loads((tmp_path / "all.json").read_text())) == 6


def test_wrong_numbers_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--rounds", "0"]) == 2
    assert capsys.readouterr().err == "--rounds=0 must be at least 1\n"
    assert main(["--ranks", "2", "-1"]) == 2
    assert capsys.readouterr().err == "--ranks=-1 must be at least 1\n"


@pytest.mark.slow
def test_a_job_is_timed_from_the_end_of_the_one_before_it() -> None:
    cost = job_cost(1, BARE)
    assert 0 < cost.start_s < cost.total_s

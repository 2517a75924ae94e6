"""sweep.json and job.json: written, read back, and refused by name when they are damaged."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from trainer.errors import InputError
from trainer.sweep_files import Job, Sweep, left_over, read_job, read_sweep, write_job, write_sweep

SWEEP = {
    "schema": 1,
    "overrides": ["strategy=ddp,tensor", "world_size=1,2"],
    "state": "running",
    "started_at": 1796000000.5,
    "ended_at": None,
}
JOB = {
    "schema": 1,
    "number": 1,
    "overrides": ["strategy=ddp", "world_size=2", "trainer.max_steps=3"],
    "swept": {"strategy": "ddp", "world_size": "2"},
    "state": "failed",
    "started_at": 1796000001.0,
    "config_sha256": "ab" * 32,
    "reason": "loss is nan at step 3",
    "exit_code": 1,
    "ended_at": 1796000009.25,
}


def put(folder: Path, name: str, values: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(values if isinstance(values, str) else json.dumps(values))


def test_a_folder_is_read_with_its_jobs_by_number(tmp_path: Path) -> None:
    put(tmp_path, "sweep.json", SWEEP)
    put(tmp_path / "10-b", "job.json", {**JOB, "number": 10, "state": "running", "ended_at": None})
    put(tmp_path / "9-a", "job.json", {**JOB, "number": 9})
    put(tmp_path / "9-a~1", "job.json", JOB)
    (tmp_path / "11-c").mkdir()
    sweep = read_sweep(tmp_path)
    assert (sweep.overrides, sweep.state, sweep.started_at, sweep.ended_at) == (
        ("strategy=ddp,tensor", "world_size=1,2"),
        "running",
        1796000000.5,
        None,
    )
    assert [job.folder.name for job in sweep.jobs] == ["9-a", "10-b"]
    first, second = sweep.jobs
    assert (first.swept, first.reason, first.exit_code, first.ended_at) == (
        {"strategy": "ddp", "world_size": "2"},
        "loss is nan at step 3",
        1,
        1796000009.25,
    )
    assert (second.state, second.ended_at) == ("running", None)


def test_what_is_written_is_what_the_contract_says(tmp_path: Path) -> None:
    folder = tmp_path / "1-strategy=ddp,world_size=2"
    folder.mkdir()
    write_sweep(Sweep(tmp_path, tuple(SWEEP["overrides"]), "running", 1796000000.5))  # type: ignore[arg-type]
    job = Job(folder, 1, tuple(JOB["overrides"]), JOB["swept"], "running", 1796000001.0, "ab" * 32)  # type: ignore[arg-type]
    write_job(job)
    write_job(replace(job, state="failed", reason=str(JOB["reason"]), exit_code=1, ended_at=1796000009.25))
    assert json.loads((tmp_path / "sweep.json").read_text()) == SWEEP
    assert json.loads((folder / "job.json").read_text()) == JOB
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == ["job.json", "sweep.json"]


def test_earlier_tries_are_numbered(tmp_path: Path) -> None:
    assert left_over(tmp_path / "3-a").name == "3-a~1"
    (tmp_path / "3-a~1").mkdir()
    assert left_over(tmp_path / "3-a").name == "3-a~2"


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ('{"schema": 1, "num', "Unterminated string"),
        ("[]", "it holds no mapping"),
        ({**JOB, "schema": 2}, "schema is 2 and must be 1"),
        ({**JOB, "number": "seven"}, "number=seven must be a whole number"),
        (
            {**JOB, "state": "asleep"},
            "state=asleep must be one of running, complete, failed, skipped, stopped",
        ),
        ({name: value for name, value in JOB.items() if name != "state"}, "needs the key state"),
        ({**JOB, "colour": 1}, "colour is not a key"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, values: object, reason: str) -> None:
    put(tmp_path, "sweep.json", SWEEP)
    put(tmp_path / "1-a", "job.json", values)
    with pytest.raises(InputError) as refusal:
        read_sweep(tmp_path)
    assert str(refusal.value).startswith(f"{tmp_path}/1-a/job.json is damaged: ")
    assert reason in str(refusal.value)


def test_a_folder_without_a_sweep_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"has no sweep\.json; name the folder of a sweep"):
        read_sweep(tmp_path)
    with pytest.raises(InputError, match=r"job\.json cannot be read"):
        read_job(tmp_path)

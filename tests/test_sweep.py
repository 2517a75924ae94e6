"""Sweeps: folders and their names, what each job's record says, exit codes, and going on after an end."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from dataclasses import replace
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Run
from trainer import cli, sweep_job
from trainer.composed import clean_sweep_file
from trainer.config import RunConfig, SweepConfig
from trainer.errors import InputError, Stopped
from trainer.occupied import occupied, wait_until_left
from trainer.place import Place
from trainer.rank import connect
from trainer.sweep_end import finish_sweep
from trainer.sweep_files import Job, first_sentence, keep_reason, read_sweep, take_reason, write_job
from trainer.sweep_folder import begin, end
from trainer.sweep_job import _earlier, _move, config_sha256
from trainer.sweep_plan import SweepPlan, hydra_overrides, job_name

STUBS = "sweep_job"  # seed 1 is wrong input, seed 2 raises, others succeed


def plan_of(folder: Path, begun_at: float = 0.0) -> SweepPlan:
    return SweepPlan(folder, ("a=1,2",), ("a",), 2, SweepConfig(), True, folder, 1, True, begun_at, 1)


def sweep_of(folder: Path) -> dict[str, dict[str, Any]]:
    """Folder name -> what its job.json holds, in order of names."""
    return {path.parent.name: json.loads(path.read_text()) for path in sorted(folder.glob("*/job.json"))}


def test_each_job_says_what_became_of_it_and_why(run: Run, tmp_path: Path) -> None:
    before = time.time()
    assert run("-m", "seed=0,1,2,3", "hydra.sweep.dir=s", "trainer.max_steps=7", worker=STUBS) == 1
    jobs = sweep_of(tmp_path / "s")
    assert list(jobs) == ["0-seed=0", "1-seed=1", "2-seed=2", "3-seed=3"]
    assert [(job["number"], job["state"], job["exit_code"]) for job in jobs.values()] == [
        (0, "complete", 0),
        (1, "skipped", 2),
        (2, "failed", 1),
        (3, "complete", 0),
    ]
    assert [job["reason"] for job in jobs.values()] == [
        None,
        "data.inputs=1.npy does not exist; name a file",
        "Rank 0 of 1 failed: ZeroDivisionError: boom",
        None,
    ]
    third = jobs["2-seed=2"]
    assert third["overrides"] == ["seed=2", "trainer.max_steps=7"]
    assert third["swept"] == {"seed": "2"}
    assert before <= third["started_at"] <= third["ended_at"] <= time.time()
    assert len({job["config_sha256"] for job in jobs.values()}) == 4
    assert "Traceback" in (tmp_path / "s" / "2-seed=2" / "train.log").read_text()
    sweep = json.loads((tmp_path / "s" / "sweep.json").read_text())
    assert sweep["overrides"] == ["seed=0,1,2,3", "hydra.sweep.dir=s", "trainer.max_steps=7"]
    assert (sweep["state"], sweep["schema"]) == ("failed", 1)
    assert not list(tmp_path.rglob("reason.txt"))


@pytest.mark.slow
def test_exit_code_0_when_some_are_skipped_and_2_when_all_are(run: Run, tmp_path: Path) -> None:
    assert run("-m", "seed=0,1", "hydra.sweep.dir=some", worker=STUBS) == 0
    assert read_sweep(tmp_path / "some").state == "complete"
    assert run("-m", "seed=1", "hydra.sweep.dir=all", worker=STUBS) == 2
    assert run("-m", "strategy=single", "world_size=2,3", "hydra.sweep.dir=alone", worker=STUBS) == 2
    (first, _) = read_sweep(tmp_path / "alone").jobs
    assert first.reason == (
        "strategy=single cannot use world_size=2; take 1 rank, or ddp, tensor or pipeline"
    )


def test_ranks_that_do_not_meet_fail_their_job(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        place = Place(0, 2, store=("127.0.0.1", busy.getsockname()[1], "slurm-1.0"))
        with pytest.raises(Stopped, match="Rank 0 cannot meet the others at") as caught:
            connect(place, 1.0)

    def launch(*arguments: Any, **more: Any) -> int:
        raise caught.value

    monkeypatch.setattr(sweep_job, "launch", launch)
    assert run("-m", "seed=3", "hydra.sweep.dir=s") == 1
    (job,) = read_sweep(tmp_path / "s").jobs
    assert (job.state, job.exit_code, job.reason) == ("failed", 1, str(caught.value))


def test_fail_fast_ends_the_sweep_with_the_first_failure(
    run: Run, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code = run("-m", "seed=1,2,3", "sweep.fail_fast=true", "hydra.sweep.dir=s", worker=STUBS)
    assert code == 1
    assert list(sweep_of(tmp_path / "s")) == ["0-seed=1", "1-seed=2"]
    assert read_sweep(tmp_path / "s").state == "failed"
    assert "sweep.fail_fast=true ends the sweep: job 2 of 3: seed=2 failed" in capfd.readouterr().err


@pytest.mark.slow
def test_names_and_progress_say_the_swept_overrides_alone(
    run: Run, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = ["strategy=ddp,tensor", "strategy.microbatches=1,2", "trainer.max_steps=2"]
    assert run("-m", *arguments, "hydra.sweep.dir=s", worker=STUBS) == 0
    names = list(sweep_of(tmp_path / "s"))
    assert names == [
        "0-strategy=ddp,strategy.microbatches=1",
        "1-strategy=ddp,strategy.microbatches=2",
        "2-strategy=tensor,strategy.microbatches=1",
        "3-strategy=tensor,strategy.microbatches=2",
    ]
    lines = [line for line in capfd.readouterr().err.splitlines() if line.startswith("job ")]
    assert lines[2] == "job 3 of 4: strategy=tensor strategy.microbatches=1"
    assert len(lines) == 4


def test_names_are_fit_for_a_file_system() -> None:
    assert job_name(7, 2, {"world_size": "4", "data.inputs": "/a b/c.npz:x"}) == (
        "07-world_size=4,data.inputs=_a_b_c.npz_x"
    )
    assert job_name(3, 1, {}) == "3"
    assert job_name(3, 1, {"model.widths": "[8,8]", "x": "~1"}) == "3-model.widths=_8,8_,x=_1"
    assert job_name(3, 1, {"data.inputs": "größe"}) == "3-data.inputs=gr_e"
    assert len(job_name(12, 3, {f"key{i}": "1" * 20 for i in range(20)})) == 120


def test_a_sweep_that_a_file_asks_for(run: Run, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine" / "experiment").mkdir(parents=True)
    (tmp_path / "mine" / "experiment" / "seeds.yaml").write_text(
        "# @package _global_\nhydra:\n  mode: MULTIRUN\n  sweeper:\n    params:\n      seed: 5,6\n"
    )
    assert run("experiment=seeds", "hydra.sweep.dir=s", "--config-dir", "mine", worker=STUBS) == 0
    assert list(sweep_of(tmp_path / "s")) == ["0-seed=5", "1-seed=6"]
    assert "job 2 of 2: seed=6" in capfd.readouterr().err
    secret = ["experiment=seeds", "+strategy.options.token=abcdef", "hydra.sweep.dir=t"]
    assert run(*secret, "--config-dir", "mine", worker=STUBS) == 2
    assert "strategy.options.token reads like a secret" in capfd.readouterr().err
    assert not (tmp_path / "t").exists()


def test_a_folder_that_holds_a_sweep_is_refused(
    run: Run, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run("-m", "seed=3", "hydra.sweep.dir=s", worker=STUBS) == 0
    before = (tmp_path / "s" / "sweep.json").read_text()
    capfd.readouterr()
    assert run("-m", "seed=4", "hydra.sweep.dir=s", worker=STUBS) == 2
    assert capfd.readouterr().err == (
        f"hydra.sweep.dir={tmp_path}/s holds a sweep already; name another folder, or complete that one with "
        "sweep.resume=true\n"
    )
    assert (tmp_path / "s" / "sweep.json").read_text() == before


@pytest.mark.slow
@pytest.mark.parametrize("argument", ["seed=3,4", "sweep.resume=true"])
def test_a_sweep_that_runs_is_left_alone(
    run: Run, tmp_path: Path, capfd: pytest.CaptureFixture[str], argument: str
) -> None:
    assert run("-m", "seed=3", "hydra.sweep.dir=s", worker=STUBS) == 0
    capfd.readouterr()
    with (tmp_path / "s" / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert run("-m", "seed=3", argument, "hydra.sweep.dir=s", worker=STUBS) == 2
    assert capfd.readouterr().err == (
        f"hydra.sweep.dir={tmp_path}/s is a sweep that another process runs; wait for it, or end it\n"
    )


@pytest.mark.slow
def test_what_concerns_the_whole_command_leaves_nothing(
    run: Run, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run("-m", "seed=3,4", "trainer.max_step=1", "hydra.sweep.dir=s", worker=STUBS) == 2
    assert "did you mean trainer.max_steps?" in capfd.readouterr().err
    assert run("-m", "strategy=ddp,foo", "hydra.sweep.dir=s", worker=STUBS) == 2
    assert "strategy=foo does not exist" in capfd.readouterr().err
    assert run("-m", "seed=3", "sweep.resume=maybe", "hydra.sweep.dir=s", worker=STUBS) == 2
    assert capfd.readouterr().err == "sweep.resume=maybe must be true or false\n"
    assert not (tmp_path / "s").exists()
    (tmp_path / "file").write_text("")
    assert run("-m", "seed=3", "hydra.sweep.dir=file/s", worker=STUBS) == 2
    assert capfd.readouterr().err == (
        f"hydra.sweep.dir={tmp_path}/file/s cannot be written (Not a directory); "
        "name a folder that this user can write\n"
    )


@pytest.mark.slow
def test_two_jobs_in_one_folder_are_refused(
    run: Run, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run("-m", "seed=3,4", "hydra.sweep.subdir=same", "hydra.sweep.dir=s", worker=STUBS) == 1
    assert "hydra.sweep.subdir gives jobs 0 and 1 of the sweep the same folder same" in capfd.readouterr().err
    assert [job["number"] for job in sweep_of(tmp_path / "s").values()] == [0]


def test_resume_runs_what_is_missing_and_nothing_else(
    run: Run, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = ["-m", "seed=0,2,3,4", "hydra.sweep.dir=s"]
    assert run(*arguments, worker=STUBS) == 1
    sweep = tmp_path / "s"
    first = json.loads((sweep / "sweep.json").read_text())
    # As after SIGKILL in the middle: one job never begun, one in the middle of its run.
    for path in (sweep / "3-seed=4").iterdir():
        path.unlink()
    (sweep / "3-seed=4").rmdir()
    running = read_sweep(sweep).jobs[2]
    write_job(Job(**{**vars(running), "state": "running", "exit_code": None, "ended_at": None}))
    before = {path: path.stat().st_mtime_ns for path in sweep.glob("0-*/*")}
    capfd.readouterr()
    assert run(*arguments, "sweep.resume=true", worker="describe") == 0
    err = capfd.readouterr().err
    assert "job 1 of 4: seed=0: complete before" in err
    assert "job 2 of 4: seed=2: runs again, it was failed; 1-seed=2~1 keeps what was there" in err
    assert "job 3 of 4: seed=3: runs again, it was killed; 2-seed=3~1 keeps what was there" in err
    assert {path: path.stat().st_mtime_ns for path in sweep.glob("0-*/*")} == before
    states = [(job.folder.name, job.state) for job in read_sweep(sweep).jobs]
    assert states == [
        ("0-seed=0", "complete"),
        ("1-seed=2", "complete"),
        ("2-seed=3", "complete"),
        ("3-seed=4", "complete"),
    ]
    assert "boom" in (sweep / "1-seed=2~1" / "train.log").read_text()
    assert "job 2 of 4" in (sweep / "1-seed=2" / "train.log").read_text()
    assert "boom" not in (sweep / "1-seed=2" / "train.log").read_text()
    assert (sweep / "2-seed=3~1" / "done0of1").exists()
    assert sorted(path.name for path in (sweep / "2-seed=3").iterdir()) == [
        "job.json",
        "rank0.json",
        "train.log",
    ]
    last = json.loads((sweep / "sweep.json").read_text())
    assert last == {**first, "state": "complete", "ended_at": last["ended_at"]}


def test_resume_tries_skipped_jobs_again(run: Run, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["-m", "seed=1", "hydra.sweep.dir=s"]
    job = tmp_path / "s" / "0"
    assert run(*arguments, worker=STUBS) == 2
    before = {path: (path.stat().st_mtime_ns, path.read_text()) for path in job.iterdir()}
    capfd.readouterr()
    assert run(*arguments, "sweep.resume=true", worker=STUBS) == 2
    err = capfd.readouterr().err
    assert "data.inputs=1.npy does not exist; name a file\njob 1 of 1: seed=1: skipped, as before\n" in err
    assert {path: (path.stat().st_mtime_ns, path.read_text()) for path in job.iterdir()} == before
    assert not (tmp_path / "s" / "0~1").exists()
    # What was missing is there.
    assert run(*arguments, "sweep.resume=true", worker="describe") == 0
    assert "seed=1: was skipped before; 0~1 keeps what was there" in capfd.readouterr().err
    assert [one.state for one in read_sweep(tmp_path / "s").jobs] == ["complete"]
    assert (tmp_path / "s" / "0~1" / "job.json").read_text() == before[job / "job.json"][1]


def test_a_job_that_slurm_requeues_runs_again(run: Run, tmp_path: Path) -> None:
    assert run("-m", "seed=3", "hydra.sweep.dir=s", worker=STUBS) == 0
    (job,) = read_sweep(tmp_path / "s").jobs
    plan = plan_of(tmp_path / "s", begun_at=job.started_at - 1)
    assert _earlier(plan, job) == job  # no error, though both are of one try
    with pytest.raises(InputError, match="jobs 0 and 1 of the sweep the same folder 0"):
        _earlier(plan, replace(job, number=1))


def test_a_folder_s_content_is_moved_and_the_folder_stays(tmp_path: Path) -> None:
    job, kept = tmp_path / "0", tmp_path / "0~1"
    (job / "wandb").mkdir(parents=True)
    for name in ("job.json", "train.log", "wandb/run"):
        (job / name).write_text(name)
    number = job.stat().st_ino
    with (job / "train.log").open("a"):  # of another task of the job
        _move(job, kept)
    assert (job.stat().st_ino, list(job.iterdir())) == (number, [])
    assert sorted(path.name for path in kept.iterdir()) == ["job.json", "train.log", "wandb"]
    assert (kept / "wandb" / "run").read_text() == "wandb/run"


@pytest.mark.parametrize(
    "subdir", ["a/b", *(pytest.param(one, marks=pytest.mark.slow) for one in (".", "../x"))]
)
def test_a_folder_that_is_not_right_in_the_sweep_s_is_refused(
    run: Run, tmp_path: Path, capfd: pytest.CaptureFixture[str], subdir: str
) -> None:
    assert run("-m", "seed=3", f"hydra.sweep.subdir={subdir}", "hydra.sweep.dir=s", worker=STUBS) == 2
    assert capfd.readouterr().err == (
        f"hydra.sweep.subdir={subdir} is no folder right in that of the sweep; "
        "give a name without /, or leave it out\n"
    )
    assert not list(tmp_path.rglob("job.json"))


def test_jobs_of_a_launcher_that_failed_may_still_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    here = plan_of(tmp_path)
    job = Job(tmp_path / "0", 0, (), {}, "running", 1.0, "0")
    job.folder.mkdir()
    begin(here)
    write_job(job)
    assert end(replace(here, runs_here=False), 1) == 1
    assert read_sweep(tmp_path).jobs[0].state == "running"
    finish_sweep(tmp_path, elsewhere=True)
    assert capfd.readouterr().out.endswith("(1 still running)\n")
    with occupied(str(job.folder)):
        assert end(here, 1) == 1
    assert read_sweep(tmp_path).jobs[0].state == "running"
    finish_sweep(tmp_path)
    assert capfd.readouterr().out.endswith("(1 killed)\n")
    assert end(here, 0) == 1
    assert read_sweep(tmp_path).jobs[0].state == "failed"


def test_what_hydra_writes_of_a_sweep_is_cleaned_and_costs_no_job(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "multirun.yaml"
    clean_sweep_file(tmp_path, {}, [])
    path.write_text("")  # as another job may find it
    clean_sweep_file(tmp_path, {}, [])
    assert not caplog.records
    path.write_text("a: {api_key: planted}")
    clean_sweep_file(tmp_path, {}, [])
    assert "planted" not in path.read_text()
    path.write_text("a: [")
    clean_sweep_file(tmp_path, {}, [])
    assert "is not searched for secrets" in caplog.text


@pytest.mark.slow
def test_resume_finds_the_newest_sweep_of_the_same_overrides(run: Run, tmp_path: Path) -> None:
    assert run("-m", "seed=3,4", worker=STUBS) == 0
    assert run("-m", "seed=3,4", worker=STUBS) == 0
    assert run("-m", "seed=5,6", worker=STUBS) == 0
    sweeps = sorted(tmp_path.glob("runs/*/*-sweep"))
    assert len(sweeps) == 3
    target = sweeps[1] / "1-seed=4"
    for path in target.iterdir():
        path.unlink()
    target.rmdir()
    assert run("-m", "sweep.fail_fast=true", "seed=3,4", "sweep.resume=true", worker=STUBS) == 0
    assert sorted(tmp_path.glob("runs/*/*-sweep")) == sweeps
    assert (target / "job.json").exists()


@pytest.mark.slow
def test_resume_of_nothing_is_refused_and_of_a_named_folder_begins(
    run: Run, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run("-m", "seed=3", "sweep.resume=true", worker=STUBS) == 2
    assert capfd.readouterr().err == (
        f"sweep.resume=true finds no sweep of these overrides under {tmp_path}/runs; leave it out to start "
        "one, or name its folder with hydra.sweep.dir\n"
    )
    assert not (tmp_path / "runs").exists()
    # The command of a batch script is the same, be it the first try or a later one.
    assert run("-m", "seed=3", "sweep.resume=true", "hydra.sweep.dir=s", worker=STUBS) == 0
    assert list(sweep_of(tmp_path / "s")) == ["0"]  # nothing is swept
    capfd.readouterr()
    assert run("-m", "seed=4", "sweep.resume=true", "hydra.sweep.dir=s", worker=STUBS) == 2
    assert capfd.readouterr().err == (
        f"hydra.sweep.dir={tmp_path}/s holds the sweep of other overrides (seed=3); "
        "give the same ones, or another folder\n"
    )
    assert run("seed=4", "sweep.resume=true", worker=STUBS) == 2
    assert capfd.readouterr().err == "sweep.resume=true is for a sweep; add -m, or leave it out\n"


@pytest.mark.slow
def test_a_complete_job_whose_configuration_changed_runs_again(
    run: Run, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    preset = tmp_path / "mine" / "debug" / "own.yaml"
    preset.parent.mkdir(parents=True)
    arguments = ["-m", "debug=own", "seed=3", "hydra.sweep.dir=s", "--config-dir", "mine"]
    preset.write_text("# @package _global_\ntrainer:\n  max_steps: 2\nlogger:\n  tags: [a]\n")
    assert run(*arguments, worker=STUBS) == 0
    resumed = [*arguments[:3], "sweep.resume=true", *arguments[3:]]
    preset.write_text("# @package _global_\ntrainer:\n  max_steps: 2\nlogger:\n  tags: [b]\n")
    assert run(*resumed, worker=STUBS) == 0  # tags change no number
    assert not (tmp_path / "s" / "0~1").exists()
    preset.write_text("# @package _global_\ntrainer:\n  max_steps: 3\n")
    capfd.readouterr()
    assert run(*resumed, worker=STUBS) == 0
    assert "runs again, its configuration has changed since; 0~1 keeps what was there" in (
        capfd.readouterr().err
    )
    assert (tmp_path / "s" / "0~1" / "done0of1").exists()
    assert (tmp_path / "s" / "0" / "done0of1").exists()


def test_the_hash_is_that_of_what_changes_numbers() -> None:
    base = RunConfig.from_mapping({"seed": 1}, "/a").to_mapping()
    assert base["sweep"] == {"resume": False, "fail_fast": False}
    other = {**base, "sweep": {"resume": True, "fail_fast": True}, "logger": {"name": "none"}}
    assert config_sha256(other) == config_sha256(base)
    assert config_sha256({**base, "seed": 2}) != config_sha256(base)


def test_a_signal_leaves_a_record_and_a_table(
    run: Run, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run("-m", "seed=0,1,2", "hydra.sweep.dir=s", worker="stop_itself") == 143
    assert read_sweep(tmp_path / "s").state == "stopped"
    (job,) = read_sweep(tmp_path / "s").jobs
    assert (job.state, job.exit_code, job.reason) == ("stopped", 143, "SIGTERM ended it")
    assert f"sweep  {tmp_path}/s  (1 stopped)" in capfd.readouterr().out


def test_the_reason_is_one_line_and_the_first_one_told(tmp_path: Path) -> None:
    keep_reason(tmp_path, "no job has this folder")
    assert take_reason(tmp_path) is None
    (tmp_path / "job.json").write_text("{}")
    keep_reason(tmp_path, "loss is nan\nat step 3")
    keep_reason(tmp_path, "an echo")
    assert take_reason(tmp_path) == "loss is nan at step 3"
    assert take_reason(tmp_path) is None
    keep_reason(tmp_path, "an echo")
    keep_reason(tmp_path, "the cause", over=True)
    assert take_reason(tmp_path) == "the cause"
    assert len(first_sentence("x" * 1000)) == 500


def test_a_folder_is_left_when_its_last_writer_ends(tmp_path: Path) -> None:
    with occupied(str(tmp_path)), occupied(str(tmp_path)):  # noqa: SIM117
        with pytest.raises(InputError, match="is still written by a process of an earlier try"):
            wait_until_left(tmp_path, 0.2)
    wait_until_left(tmp_path, 0.0)
    with occupied(str(tmp_path / "none")):
        pass
    assert os.listdir(tmp_path) == []


def test_what_a_remote_launcher_carries_can_be_carried(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    app = cli._App(RunConfig, None, None)
    app._sweep = plan
    assert ForkingPickler.dumps(app._task)
    assert hydra_overrides(plan)[1] == "hydra.sweep.subdir='${splitmeter_job:1,[a]}'"
    many = replace(plan, folder=Path("/it's"), count=101)
    assert hydra_overrides(many) == [
        r"hydra.sweep.dir='/it\'s'",
        "hydra.sweep.subdir='${splitmeter_job:3,[a]}'",
    ]

"""Sweeps of real ranks: ended in the middle and resumed, and one that holds all that can go wrong."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.launched import ROOT, Launched, rows_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

QUICK = (
    "data=synthetic data.batch_size=16 data.num_samples=64 data.eval_samples=16 model.num_layers=3 "
    "model.hidden_dim=8 optimizer=sgd logger=none trainer.report=false trainer.verdict_budget_s=0 "
    "collectives.link_budget_s=0 trainer.num_threads=1"
).split()
# So many that a job is still at it when its first rows have been seen and what ends it has arrived.
STEPS, STEPS_ALONE = 800, 2500
THREE = ["-m", "strategy=ddp,tensor,pipeline", "world_size=2", f"trainer.max_steps={STEPS}", *QUICK]
ENDS_WITHIN_S = 5.0  # from the signal to the last process


class Sweeps:
    """Sweeps that are started in one folder, and ended with the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[Launched] = []

    def start(self, *overrides: str) -> Launched:
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        script = str(ROOT / "scripts" / "train.py")
        sweep = Launched(self.folder, script, *overrides, "hydra.sweep.dir=s", PYTHONPATH=path)
        self.started.append(sweep)
        return sweep

    def run(self, *overrides: str) -> tuple[int, str]:
        return self.start(*overrides).result(250)

    @property
    def jobs(self) -> dict[str, dict[str, Any]]:
        """Folder name -> job.json, by number; what earlier tries left not among them."""
        paths = sorted((self.folder / "s").glob("*/job.json"))
        return {path.parent.name: json.loads(path.read_text()) for path in paths if "~" not in str(path)}

    @property
    def losses(self) -> dict[str, list[tuple[int, float]]]:
        """Folder name -> (step, loss) of every row."""
        return {
            name: [(row["step"], row["loss"]) for row in rows_of(self.folder / "s" / name)]
            for name in self.jobs
        }


@pytest.fixture
def sweeps(tmp_path: Path) -> Iterator[Sweeps]:
    own = Sweeps(tmp_path)
    yield own
    for sweep in own.started:
        sweep.clean_up()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, list[tuple[int, float]]]]:
    own = Sweeps(tmp_path_factory.mktemp("undisturbed"))
    code, output = own.run(*THREE)
    assert code == 0, output
    yield own.losses
    own.started[0].clean_up()


@pytest.mark.parametrize("kind", ["SIGINT to the group", "SIGTERM", "SIGKILL"])
def test_a_sweep_ended_in_the_middle_is_resumed(
    sweeps: Sweeps, undisturbed: dict[str, list[tuple[int, float]]], kind: str
) -> None:
    names = ["0-strategy=ddp", "1-strategy=tensor", "2-strategy=pipeline"]
    assert list(undisturbed) == names
    assert [len(rows) for rows in undisturbed.values()] == [STEPS] * 3
    sweep = sweeps.start(*THREE)
    wait_for_rows(sweep, sweeps.folder / "s" / names[1])
    asked = time.monotonic()
    if kind == "SIGINT to the group":
        os.killpg(sweep.process.pid, signal.SIGINT)
    else:
        sweep.process.send_signal(signal.SIGTERM if kind == "SIGTERM" else signal.SIGKILL)
    code, output = sweep.result(30)
    assert code == {"SIGINT to the group": 130, "SIGTERM": 143, "SIGKILL": -9}[kind], output
    assert not sweep.session_alive(within_s=ENDS_WITHIN_S - (time.monotonic() - asked))
    first, second = (sweeps.jobs[name] for name in names[:2])
    assert list(sweeps.jobs) == names[:2]
    state = "running" if kind == "SIGKILL" else "stopped"
    assert (first["state"], second["state"]) == ("complete", state)
    assert json.loads((sweeps.folder / "s" / "sweep.json").read_text())["state"] == state
    if kind != "SIGKILL":
        assert f"sweep  {sweeps.folder}/s  (1 complete, 1 stopped)" in output
    steps_before = len(rows_of(sweeps.folder / "s" / names[1]))
    assert 0 < steps_before < STEPS
    untouched = {path: path.stat().st_mtime_ns for path in (sweeps.folder / "s" / names[0]).iterdir()}

    code, output = sweeps.run(*THREE, "sweep.resume=true")
    assert code == 0, output
    assert {path: path.stat().st_mtime_ns for path in untouched} == untouched
    assert sweeps.jobs[names[0]]["started_at"] == first["started_at"]
    assert [job["state"] for job in sweeps.jobs.values()] == ["complete"] * 3
    assert sweeps.losses == undisturbed
    assert len(rows_of(sweeps.folder / "s" / f"{names[1]}~1")) == steps_before
    assert not list((sweeps.folder / "s").glob("*/metrics.1.jsonl"))
    summary = json.loads((sweeps.folder / "s" / names[1] / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("finished", STEPS)


def test_a_sweep_of_what_can_go_wrong_says_why(sweeps: Sweeps) -> None:
    presets = {
        "a_works": "strategy: {microbatches: 2}",
        "b_raises": "plugins: [tests.raising]\nmodel: {name: raising}",
        "c_diverges": "optimizer: {lr: 1.0e+30}",
        "d_impossible": "strategy: {microbatches: 32}",
        "e_works": "strategy: {microbatches: 4}",
    }
    folder = sweeps.folder / "mine" / "debug"
    folder.mkdir(parents=True)
    for name, text in presets.items():
        (folder / f"{name}.yaml").write_text(f"# @package _global_\n{text}\n")
    swept = f"debug={','.join(presets)}"
    search = "hydra.searchpath=[file://mine]"
    code, output = sweeps.run(
        "-m", search, swept, "strategy=pipeline", "world_size=2", "trainer.max_steps=20", *QUICK
    )
    assert code == 1, output
    jobs = sweeps.jobs
    assert [job["state"] for job in jobs.values()] == [
        "complete",
        "failed",
        "failed",
        "skipped",
        "complete",
    ], output
    works, raises, diverges, impossible, works_too = jobs.values()
    assert works["reason"] is None and works_too["reason"] is None
    assert raises["reason"] == "Rank 1 of 2 failed: RuntimeError: boom"
    assert diverges["reason"].startswith("loss is ") and " at step " in diverges["reason"]
    assert impossible["reason"].startswith("strategy.microbatches=32 is more than data.batch_size=16; ")
    assert [job["exit_code"] for job in jobs.values()] == [0, 1, 1, 2, 0]
    log = (sweeps.folder / "s" / "1-debug=b_raises" / "train.log").read_text()
    assert "Traceback" in log and "RuntimeError: boom" in log
    for name in ("0-debug=a_works", "4-debug=e_works"):
        assert len(rows_of(sweeps.folder / "s" / name)) == 20
    for job in (raises, diverges, impossible):
        assert job["reason"] in " ".join(output.split())  # the table folds lines


@pytest.mark.parametrize(("size", "name"), [(2, "0-strategy=ddp"), (1, "0-strategy=single")])
def test_a_rank_that_is_killed_fails_its_job_alone(sweeps: Sweeps, size: int, name: str) -> None:
    alone = ["-m", "strategy=single,ddp", "world_size=1", f"trainer.max_steps={STEPS_ALONE}", *QUICK]
    sweep = sweeps.start(*(THREE if size == 2 else alone))
    wait_for_rows(sweep, sweeps.folder / "s" / name)
    ranks = [pid for pid in sweep.session_alive(0) if "spawn_main" in command_line(pid)]
    assert len(ranks) == size
    os.kill(ranks[-1], signal.SIGKILL)
    code, output = sweep.result(200)
    assert code == 1, output
    first, *others = sweeps.jobs.values()
    assert (first["state"], first["exit_code"]) == ("failed", 1)
    assert first["reason"] in [f"Rank {rank} of {size} was ended by SIGKILL" for rank in range(size)]
    assert [job["state"] for job in others] == ["complete"] * (len(sweeps.jobs) - 1)
    assert len(others) == size


def wait_for_rows(sweep: Launched, folder: Path) -> None:
    deadline = time.monotonic() + 100
    while not (folder / "metrics.jsonl").exists() or not rows_of(folder):
        assert sweep.process.poll() is None, sweep.process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except FileNotFoundError:
        return ""

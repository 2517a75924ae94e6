"""Against a real Slurm of two nodes on this machine, and against submitit's local mode."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster_doc import PATH, TRAIN, command
from tests.launched import rows_of, run_launched
from tests.slurm_cluster import SlurmCluster
from tests.system import leave_out
from trainer.errors import InputError

SMALL = (
    "data=digits trainer.warmup_steps=1 logger=none trainer.verdict_budget_s=0 trainer.report=false "
    "collectives.link_budget_s=0"
)
SWEEP = ("strategy=ddp,tensor", "trainer.max_steps=5,6")
EXACT = ("step", "epoch", "samples_seen", "bytes_sent", "bytes_sent_total", "bytes_predicted", "bytes_least")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    own = SlurmCluster()
    try:
        own.__enter__()
    except InputError as error:
        leave_out(str(error))
    try:
        yield own
    finally:
        own.close()


def on(cluster: SlurmCluster, folder: Path, text: str, **environment: str) -> tuple[int, str]:
    """Run a line of shell: exit code, and stdout and stderr together."""
    environment["PATH"] = PATH + os.environ["PATH"]
    found = cluster.run(["bash", "-c", text], cwd=folder, env=environment, timeout=400)
    return found.returncode, found.stdout + found.stderr


def check_same_jobs(sweep: Path, other: Path) -> None:
    """The same rows in every job, up to timing."""
    names = sorted(path.parent.name for path in sweep.glob("*/job.json"))
    assert names == sorted(path.parent.name for path in other.glob("*/job.json")) and len(names) == 4
    for name in names:
        job = json.loads((sweep / name / "job.json").read_text())
        assert (job["state"], job["exit_code"], job["reason"]) == ("complete", 0, None)
        steps = int(job["swept"]["trainer.max_steps"])
        first, second = rows_of(sweep / name), rows_of(other / name)
        assert len(first) == len(second) == steps
        for row, same in zip(first, second, strict=True):
            assert [row[key] for key in EXACT] == [same[key] for key in EXACT]
            assert row["bytes_sent"] > 0
            assert row["loss"] == pytest.approx(same["loss"], rel=1e-6)


@pytest.fixture(scope="module")
def local_sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same sweep on this machine, each job with two ranks that it starts itself."""
    folder: Path = tmp_path_factory.mktemp("local")
    code, output = run_launched(
        folder, TRAIN, "-m", *SWEEP, *SMALL.split(), "world_size=2", f"hydra.sweep.dir={folder}/sweep",
        timeout_s=400,
    )  # fmt: skip
    assert code == 0, output
    return folder / "sweep"


def test_an_array_of_jobs_has_the_rows_of_the_local_sweep(
    cluster: SlurmCluster, local_sweep: Path, tmp_path: Path
) -> None:
    own = f"{SMALL} hydra.launcher.array_parallelism=2 hydra.sweep.dir={tmp_path}/sweep"
    code, output = on(
        cluster, tmp_path, command("python scripts/train.py -m hydra/launcher=slurm", own, tmp_path)
    )
    assert code == 0, output
    check_same_jobs(tmp_path / "sweep", local_sweep)
    assert json.loads((tmp_path / "sweep" / "sweep.json").read_text())["state"] == "complete"
    assert len(list((tmp_path / "sweep" / ".submitit").glob("*/*_submitted.pkl"))) == 4


def test_submitits_local_mode_has_the_rows_of_the_local_sweep(local_sweep: Path, tmp_path: Path) -> None:
    own = f"{SMALL} hydra.sweep.dir={tmp_path}/sweep"
    text = command("python scripts/train.py -m hydra/launcher=submitit_local", own, tmp_path)
    found = subprocess.run(
        ["bash", "-c", text],
        cwd=tmp_path,
        env={**os.environ, "PATH": PATH + os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    check_same_jobs(tmp_path / "sweep", local_sweep)


def test_srun_on_two_nodes(cluster: SlurmCluster, tmp_path: Path) -> None:
    """The nodes' names lead nowhere here, so the address is given, as docs/cluster.md says."""
    own = f"{SMALL} trainer.max_steps=4 hydra.run.dir={tmp_path}/run"
    text = command("srun --nodes=2", own, tmp_path)
    code, output = on(cluster, tmp_path, text, MASTER_ADDR="127.0.0.1", GLOO_SOCKET_IFNAME="lo")
    assert code == 0, output
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert [(node["node"], node["ranks"]) for node in summary["nodes"]] == [(0, [0, 1]), (1, [2, 3])]
    for row in rows_of(tmp_path / "run"):
        assert 0 < row["bytes_sent_within_nodes"] < row["bytes_sent_between_nodes"]


def test_one_task_starts_ranks_of_its_own(cluster: SlurmCluster, tmp_path: Path) -> None:
    own = f"{SMALL} trainer.max_steps=3 hydra.run.dir={tmp_path}/run"
    code, output = on(cluster, tmp_path, command("srun --ntasks=1", own, tmp_path))
    assert code == 0, output
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["environment"]["world_size"] == 2 and summary["steps"] == 3


def test_a_batch_script_is_one_process(cluster: SlurmCluster, tmp_path: Path) -> None:
    """It has SLURM_NTASKS=3 and SLURM_PROCID=0, and is no rank."""
    own = f"strategy=single trainer.max_steps=2 {SMALL} hydra.run.dir={tmp_path}/run"
    text = f"sbatch --wait --ntasks=3 --output=batch.txt --wrap='python {TRAIN} {own}'"
    code, output = on(cluster, tmp_path, text)
    assert code == 0, output + (tmp_path / "batch.txt").read_text()
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["environment"]["world_size"] == 1


def test_what_contradicts_slurm_is_a_sentence(cluster: SlurmCluster, tmp_path: Path) -> None:
    code, output = on(cluster, tmp_path, f"srun --ntasks=2 python {TRAIN} strategy=ddp world_size=3")
    sentence = "world_size=3 contradicts srun, which started 2; leave it out, or start 3 with --ntasks 3"
    assert code == 2 and output.count(sentence) == 1
    code, output = on(cluster, tmp_path, f"srun --ntasks=2 python {TRAIN} -m strategy=ddp,tensor")
    assert code == 2 and output.count("a sweep cannot run under srun, which fixes the number of ranks") == 1


def test_what_fails_or_makes_no_sense_in_a_job_of_two_tasks_is_on_record(tmp_path: Path) -> None:
    """One task alone writes job.json; the other is told to leave, or tells the reason."""
    code, output = run_launched(
        tmp_path, TRAIN, "-m", "hydra/launcher=submitit_local", "hydra.launcher.tasks_per_node=2",
        "strategy=single,ddp", "trainer.max_steps=3", *SMALL.split(), "optimizer=sgd", "optimizer.lr=1e30",
        f"hydra.sweep.dir={tmp_path}/sweep", timeout_s=400,
    )  # fmt: skip
    assert code == 1, output
    jobs = [json.loads(path.read_text()) for path in sorted((tmp_path / "sweep").glob("*/job.json"))]
    assert [(job["swept"]["strategy"], job["state"], job["exit_code"]) for job in jobs] == [
        ("single", "skipped", 2), ("ddp", "failed", 1),
    ]  # fmt: skip
    assert jobs[0]["reason"].startswith("strategy=single cannot use world_size=2; take 1 rank")
    assert jobs[1]["reason"].startswith("loss is nan at step 1, first on rank 0; all ranks stopped")

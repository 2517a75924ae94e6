"""The command line: what is wrong ends in one sentence and exit code 2; sweeps; what is left on disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import Run
from trainer.refusals import hide


def files(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.rglob("*") if file.is_file())


WRONG: list[tuple[list[str], str]] = [
    (["strategy=foo"], "strategy=foo does not exist; the valid ones are ddp, pipeline, single, tensor"),
    (
        ["experiment=foo"],
        "experiment=foo does not exist; the valid ones are builder_test, digits_cosine, microbatches, scale, "
        "strong_scaling, three_splits, weak_scaling",
    ),
    (
        ["trainer.max_step=1"],
        "trainer.max_step is not a key of the configuration; did you mean trainer.max_steps?",
    ),
    (
        ["+trainer.max_step=1"],
        "trainer.max_step is not a key of the configuration; did you mean trainer.max_steps?",
    ),
    (["sede=1"], "sede is not a key of the configuration; did you mean seed?"),
    (
        ["strategy.schedule=gpipe"],
        "strategy.schedule is not a key of the strategy that was chosen; --cfg job prints the keys there are",
    ),
    (
        ["trainer.max_steps"],
        "the override 'trainer.max_steps' cannot be read; write section.key=value, "
        "with quotes around a value that has special characters",
    ),
    (
        ["trainer.max_steps=[1"],
        "the override 'trainer.max_steps=[1' cannot be read; write section.key=value, "
        "with quotes around a value that has special characters",
    ),
    (
        ["world_size=1,2"],
        "world_size=1,2 holds several values; add -m for a sweep, or write a list as key=[1,2]",
    ),
    (["+seed=1"], "seed is a key already; leave out the + before it"),
    (["+strategy=ddp"], "strategy has a choice already; leave out the + before it"),
    (
        ["strategy=[ddp,tensor]"],
        "strategy=[ddp,tensor] is a list, and strategy takes one choice; for a sweep use -m and commas",
    ),
    (["trainer.max_steps=???"], "trainer.max_steps=??? must be given a value"),
    (["trainer.max_steps=${nope}"], "trainer.max_steps: Interpolation key 'nope' not found"),
    (
        ["experiment=weak_scaling", "world_size=null"],
        "data.batch_size=${times:256,null} multiplies whole numbers, and null is none; set what it refers to",
    ),
    (["hydra.run.dir=${nope}"], "hydra.run.dir: Interpolation key 'nope' not found"),
    (
        ["logger=null"],
        "a group was given no choice (GROUP=null); leave it out, or name one of those that --help lists",
    ),
    (["~logger"], "logger=null leaves nothing to run; choose one that --help lists under logger"),
    (
        ["--steps", "5"],
        "--steps is not a flag; settings are written section.key=value, and --hydra-help lists the flags",
    ),
    (
        ["--experimental-rerun", "x"],
        "--experimental-rerun unpickles a file, which can run code from it; give the overrides again",
    ),
    (
        ["+hydra.callbacks.own._target_=os.system"],
        "hydra.callbacks.own names code to run; choose a plug-in by its name, as in hydra/launcher=slurm",
    ),
    (
        ["hydra.searchpath=[file:///nope]"],
        "hydra.searchpath: /nope does not exist; name a folder as file:///FOLDER",
    ),
    (["strategy.microbatches=-1"], "strategy.microbatches=-1 must be at least 1"),
    (["world_size=2"], "strategy=single cannot use world_size=2; take 1 rank, or ddp, tensor or pipeline"),
    (["resume=x"], "resume=x is reserved for a later version; leave it null"),
    (
        ["-m", "seed=0,1", "+strategy.options.token=abcdef"],
        "strategy.options.token reads like a secret, and a sweep's overrides are written to its folder; "
        "keep the value in an environment variable and pass strategy.options.token='${oc.env:VARIABLE}'",
    ),
]


@pytest.mark.parametrize(
    ("arguments", "sentence"), WRONG, ids=[" ".join(arguments) for arguments, _ in WRONG]
)
def test_wrong_input_ends_in_one_sentence(
    run: Run, capfd: pytest.CaptureFixture[str], tmp_path: Path, arguments: list[str], sentence: str
) -> None:
    assert run(*arguments) == 2
    captured = capfd.readouterr()
    assert captured.err == sentence + "\n"
    assert captured.out == ""
    assert set(files(tmp_path)) <= {"train.log"}


def test_a_folder_that_cannot_be_made_is_refused(
    run: Run, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    assert run(f"hydra.run.dir={tmp_path}/file/run") == 2
    assert capfd.readouterr().err == (
        f"hydra.run.dir: {tmp_path}/file/run cannot be written (Not a directory); "
        "name a folder that this user can write\n"
    )
    # A folder that is there, but whose log cannot be opened.
    (tmp_path / "run" / "train.log").mkdir(parents=True)
    assert run(f"hydra.run.dir={tmp_path}/run") == 2
    assert capfd.readouterr().err == (
        f"hydra.run.dir: {tmp_path}/run/train.log cannot be written (Is a directory); "
        "name a folder that this user can write\n"
    )


def test_what_a_worker_refuses_is_told_once_and_logged(
    run: Run, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(f"hydra.run.dir={tmp_path}/run", worker="refuse") == 2
    assert capfd.readouterr().err == "data.inputs=none.npy does not exist; name a file\n"
    assert (tmp_path / "run" / "train.log").read_text().count("none.npy does not exist") == 1
    assert run(worker="diverge") == 1
    assert capfd.readouterr().err == "The loss is NaN at step 3, first on rank 1\n"
    assert run(worker="leave_early") == 3


def test_an_unexpected_error_keeps_its_traceback(run: Run, tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError, match="boom"):
        run("seed=2", f"hydra.run.dir={tmp_path}/run", worker="sweep_job")
    log = (tmp_path / "run" / "train.log").read_text()
    assert log.count("ZeroDivisionError: boom") == 1
    assert "sweep_job" in log


def test_each_run_has_a_folder_of_its_own(run: Run, tmp_path: Path) -> None:
    assert run() == 0
    assert run() == 0
    assert run("strategy=ddp") == 0
    folders = [file.parent for file in tmp_path.glob("runs/*/*/rank0.json")]
    assert len(folders) == 3
    assert sorted(folder.name.rpartition("-")[2] for folder in folders) == ["ddp", "single", "single"]
    facts = json.loads((folders[0] / "rank0.json").read_text())
    assert facts["run_dir"] == str(folders[0])
    assert facts["world_size"] == facts["config"]["world_size"] == 1
    assert files(folders[0]) == ["rank0.json", "train.log"]


@pytest.mark.slow
def test_a_failing_job_does_not_stop_a_sweep(
    run: Run, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code = run("-m", "seed=0,1,2,3", f"hydra.sweep.dir={tmp_path}/sweep", worker="sweep_job")
    assert code == 1
    captured = capfd.readouterr()
    assert captured.err.count("data.inputs=1.npy does not exist; name a file") == 1
    assert captured.err.count("ZeroDivisionError: boom") == 1
    assert (tmp_path / "sweep" / "3-seed=3" / "done0of1").exists()
    assert "boom" in (tmp_path / "sweep" / "2-seed=2" / "train.log").read_text()


@pytest.mark.slow
def test_a_signal_ends_the_whole_sweep(run: Run, tmp_path: Path) -> None:
    assert run("-m", "seed=0,1,2", f"hydra.sweep.dir={tmp_path}/sweep", worker="stop_itself") == 143
    assert [folder.name for folder in (tmp_path / "sweep").iterdir() if folder.is_dir()] == ["0-seed=0"]


def test_a_plug_in_is_found_through_the_search_path(run: Run, tmp_path: Path) -> None:
    (tmp_path / "mine" / "strategy").mkdir(parents=True)
    (tmp_path / "mine" / "strategy" / "halves.yaml").write_text("name: halves\noptions:\n  depth: 3\n")
    search = f"hydra.searchpath=[file://{tmp_path}/mine]"
    assert (
        run(search, "strategy=halves", "strategy.options.depth=4", "plugins=[json]", "hydra.run.dir=run") == 0
    )
    facts = json.loads((tmp_path / "run" / "rank0.json").read_text())
    assert facts["config"]["strategy"]["name"] == "halves"
    assert facts["config"]["strategy"]["options"] == {"depth": 4}
    assert facts["config"]["plugins"] == ["json"]


def test_a_secret_in_a_file_is_not_copied_into_a_sweeps_folder(run: Run, tmp_path: Path) -> None:
    (tmp_path / "mine" / "strategy").mkdir(parents=True)
    (tmp_path / "mine" / "strategy" / "halves.yaml").write_text(
        "name: halves\noptions:\n  api_key: planted-secret\n  pin: 1\n"
    )
    assert (
        run(
            "-m",
            "--config-dir",
            "mine",
            "strategy=halves",
            "seed=0,1",
            "hydra.sweep.dir=sweep",
            worker="sweep_job",
        )
        == 0
    )
    texts = [file.read_text() for file in (tmp_path / "sweep").rglob("*") if file.is_file()]
    assert any("api_key" in text for text in texts)
    assert not any("planted-secret" in text for text in texts)


def test_secrets_in_overrides_are_hidden() -> None:
    overrides = ["+logger.api_key=abc", "seed=1", "a.token='longer value'", "b.key=${oc.env:KEY}"]
    assert hide("bad: +logger.api_key=abc and abc, seed=1", overrides) == (
        "bad: +logger.api_key=<removed> and abc, seed=1"
    )
    assert hide("it says 'longer value' here", overrides) == "it says <removed> here"
    assert hide("b.key=${oc.env:KEY}", overrides) == "b.key=${oc.env:KEY}"


@pytest.mark.parametrize("arguments", [["--help"], ["--cfg", "job", "--resolve", "strategy=pipeline"]])
def test_help_and_cfg_import_nothing_heavy(tmp_path: Path, arguments: list[str]) -> None:
    program = (
        "import atexit, sys\nfrom trainer.cli import main\n"
        f"sys.argv = ['train.py', *{arguments}]\ncode = main()\n"
        "print([name for name in ('torch', 'numpy', 'wandb') if name in sys.modules], file=sys.stderr)\n"
        "sys.exit(code)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, env=environment
    )
    assert found.returncode == 0, found.stderr
    assert found.stderr.strip() == "[]"
    assert "hidden_dim: 128" in found.stdout
    if "--help" in arguments:
        assert "strategy: ddp, pipeline, single, tensor" in found.stdout
        assert "torchrun --nproc-per-node 2" in found.stdout
    assert not list(tmp_path.iterdir())

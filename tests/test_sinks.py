"""The run's folder: rows, summary and configuration as they are on disk."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from trainer.config import DataConfig, InputError, LoggerConfig, ModelConfig, RunConfig
from trainer.environment import git_commit, host_environment
from trainer.files import MetricsFile, read_metrics, write_atomically
from trainer.secrets import Redactor
from trainer.sinks import Sinks, open_sinks
from trainer.summary import SteadyState, run_status, summarise

ROOT = Path(__file__).resolve().parent.parent


def config(run_dir: Path, **sections: Any) -> RunConfig:
    return RunConfig(run_dir=str(run_dir), logger=LoggerConfig(name="none"), **sections)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_are_on_disk_as_soon_as_they_are_written(tmp_path: Path) -> None:
    sinks = open_sinks(config(tmp_path), {})
    path = tmp_path / "metrics.jsonl"
    sinks.write({"step": 0, "loss": 0.1, "eval_loss": None, "is_warmup": True, "phase": "train"})
    assert path.read_text() == (
        '{"schema": 1, "step": 0, "loss": 0.1, "eval_loss": null, "is_warmup": true, "phase": "train"}\n'
    )
    sinks.write(
        {"step": 1, "bytes_sent": np.int64(2**40), "loss": np.float32(0.5), "rank/0/loss": np.float64(0.1)}
    )
    assert lines(path)[1] == {
        "schema": 1,
        "step": 1,
        "bytes_sent": 1099511627776,
        "loss": 0.5,
        "rank/0/loss": 0.1,
    }
    sinks.close({}, 0)
    assert len(lines(path)) == 2


def test_not_finite_is_null_and_named(tmp_path: Path) -> None:
    sinks = open_sinks(config(tmp_path), {})
    sinks.write(
        {
            "step": 0,
            "loss": float("nan"),
            "grad_norm": np.float64("inf"),
            "rank/1/loss": -float("inf"),
            "a": 1.0,
        }
    )
    sinks.close({}, 0)
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert "NaN" not in line and "Infinity" not in line
    assert json.loads(line) == {
        "schema": 1,
        "step": 0,
        "loss": None,
        "grad_norm": None,
        "rank/1/loss": None,
        "a": 1.0,
        "non_finite": ["loss", "grad_norm", "rank/1/loss"],
    }
    assert json.loads((tmp_path / "summary.json").read_text())["loss"] is None


def test_row_with_an_object_is_refused_by_key(tmp_path: Path) -> None:
    sinks = open_sinks(config(tmp_path), {})
    with pytest.raises(TypeError, match=r"^loss is a ndarray;"):
        sinks.write({"step": 0, "loss": np.zeros(2)})


def test_rows_survive_the_death_of_the_process(tmp_path: Path) -> None:
    code = (
        "import os\n"
        "from trainer.config import LoggerConfig, RunConfig\n"
        "from trainer.sinks import open_sinks\n"
        f"sinks = open_sinks(RunConfig(run_dir={str(tmp_path)!r}, logger=LoggerConfig(name='none')), {{}})\n"
        "for step in range(100): sinks.write({'step': step})\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=30)
    assert done.returncode == -signal.SIGKILL
    assert [row["step"] for row in lines(tmp_path / "metrics.jsonl")] == list(range(100))


def test_a_last_line_cut_short_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"step": 1}\n{"ste')
    assert [row["step"] for row in read_metrics(path)] == [0, 1]


def test_rows_of_an_earlier_run_are_kept(tmp_path: Path) -> None:
    for attempt in range(3):
        sinks = open_sinks(config(tmp_path), {})
        sinks.write({"step": attempt})
        sinks.close({}, 0)
    found = {path.name: lines(path)[0]["step"] for path in tmp_path.glob("metrics*")}
    assert found == {"metrics.1.jsonl": 0, "metrics.2.jsonl": 1, "metrics.jsonl": 2}


def test_an_earlier_run_is_set_aside_whole(tmp_path: Path) -> None:
    """The second ends before its verdict, the third before its summary."""
    later = ("summary.json", "verdict.json", "trace.json", "report.html")
    for attempt, written in enumerate((later, later[:1], ())):
        sinks = open_sinks(config(tmp_path), {})
        sinks.write({"step": attempt})
        for name in written:
            (tmp_path / name).write_text(str(attempt))
    kept = {path.name: path.read_text() for path in tmp_path.iterdir() if "config" not in path.name}
    rows = {name: lines(tmp_path / name)[0]["step"] for name in kept if name.startswith("metrics")}
    assert rows == {"metrics.1.jsonl": 0, "metrics.2.jsonl": 1, "metrics.jsonl": 2}
    assert {path.name for path in tmp_path.glob("config*")} == {
        "config.yaml",
        "config.1.yaml",
        "config.2.yaml",
    }
    assert {name: text for name, text in kept.items() if name not in rows} == {
        "summary.1.json": "0",
        "verdict.1.json": "0",
        "trace.1.json": "0",
        "report.1.html": "0",
        "summary.2.json": "1",
    }


def test_full_disk_is_raised_with_the_path() -> None:
    metrics = MetricsFile(Path("/dev/full"))
    with pytest.raises(OSError, match=r"^cannot write step 7 to /dev/full: No space left on device$"):
        metrics.write({"step": 7})
    metrics.close()


def test_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        InputError, match=rf"^hydra.run.dir={tmp_path}/file/run cannot be written \(Not a directory\)"
    ):
        open_sinks(config(tmp_path / "file" / "run"), {})


def test_config_is_written_before_anything_runs(tmp_path: Path) -> None:
    run = config(
        tmp_path / "a" / "b",
        model=ModelConfig(hidden_dim=64, widths=(8, 4), options={"api_key": "planted-in-options"}),
        data=DataConfig(name="arrays", inputs="planted-in-options.npy"),
    )
    open_sinks(run, {})
    text = (tmp_path / "a" / "b" / "config.yaml").read_text()
    loaded = yaml.safe_load(text)
    assert "planted" not in text
    assert loaded["run_dir"] == str(tmp_path / "a" / "b")
    assert loaded["model"] == {
        "name": "mlp",
        "num_layers": 4,
        "hidden_dim": 64,
        "widths": [8, 4],
        "activation": "relu",
        "bias": True,
        "options": {"api_key": "<removed>"},
    }
    assert loaded["optimizer"]["eps"] == 1e-8
    assert loaded["data"]["inputs"] == "<removed>.npy"


def test_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SERVICE_SECRET", "s3cr3t-value")
    sinks = open_sinks(config(tmp_path), {"threads_per_rank": 2, "backend": "gloo"})
    sinks.write({"step": 0, "is_warmup": True, "loss": 9.0, "step_time_s": 100.0, "bytes_sent": 7})
    for step, time_s in enumerate((4.0, 1.0, 3.0, 2.0), start=1):
        measured = {"step_time_s": time_s, "bytes_sent": 1000, "effective_bandwidth_GBps": None}
        evaluated = {"eval_loss": 0.25, "eval_accuracy": 0.5} if step == 3 else {"eval_loss": None}
        sinks.write(
            {"step": step, "is_warmup": False, "loss": 8.0 - step, "rank/0/x": 1.0, **measured, **evaluated}
        )
    sinks.close({"operations": {"layer 0 key": {"bytes": 12}}, "note": "s3cr3t-value", "steps": -1}, 0)
    summary = json.loads((tmp_path / "summary.json").read_text())
    environment = summary.pop("environment")
    assert summary == {
        "schema": 1,
        "status": "finished",
        "exit_code": 0,
        "steps": 5,
        "last_step": 4,
        "loss": 4.0,
        "eval_loss": 0.25,
        "eval_accuracy": 0.5,
        "steady": {
            "rows": 4,
            "every": 1,
            # 1, 2, 3, 4: the quartiles lie three quarters of the way from 1 to 2 and a quarter from 3 to 4
            "step_time_s": {"median": 2.5, "q1": 1.75, "q3": 3.25},
            "bytes_sent": {"median": 1000, "q1": 1000, "q3": 1000},
        },
        "operations": {"layer 0 key": {"bytes": 12}},
        "note": "<removed>",
    }
    assert environment["threads_per_rank"] == 2 and environment["backend"] == "gloo"
    assert environment["python"] == ".".join(map(str, sys.version_info[:3]))
    assert environment["cpu_count"] == os.cpu_count()
    assert set(environment) >= {"torch", "splitmeter", "wandb", "platform", "git_commit"}
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize(
    ("summary", "exit_code", "status"),
    [
        ({}, 0, "finished"),
        ({}, 130, "interrupted"),
        ({}, 143, "interrupted"),
        ({"error": "loss is NaN at step 3 on rank 1"}, 1, "failed: loss is NaN at step 3 on rank 1"),
        ({}, 1, "failed"),
        ({"status": "interrupted"}, 1, "interrupted"),
    ],
)
def test_status(summary: dict[str, Any], exit_code: int, status: str) -> None:
    assert run_status(summary, exit_code) == status


def test_run_without_steady_rows_has_no_figures(tmp_path: Path) -> None:
    sinks = open_sinks(config(tmp_path), {})
    sinks.close({}, 1)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["steady"] == {"rows": 0, "every": 1}
    assert summary["steps"] == 0 and summary["loss"] is None and summary["last_step"] is None


def test_summarise_rows() -> None:
    rows: list[dict[str, Any]] = [
        {"is_warmup": True, "bytes_sent": 1},
        {"is_warmup": False, "bytes_sent": 5, "phase": "train"},
    ]
    assert summarise(rows) == {"rows": 1, "every": 1, "bytes_sent": {"median": 5, "q1": 5, "q3": 5}}
    assert summarise([{"n": 1}, {"n": 2}]) == {
        "rows": 2,
        "every": 1,
        "n": {"median": 1.5, "q1": 1.25, "q3": 1.75},
    }


def test_steady_state_of_a_long_run_is_thinned_evenly() -> None:
    # Full at rows 0..7, then every 2nd, 4th, 8th, 16th: of 100 rows 0, 16, 32, 48, 64, 80, 96 remain.
    steady = SteadyState(capacity=8)
    for row in range(100):
        steady.add({"is_warmup": False, "n": row})
    assert steady.result() == {"rows": 100, "every": 16, "n": {"median": 48, "q1": 24, "q3": 72}}


def test_summary_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "summary.json"
    write_atomically(path, "old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert [found.name for found in tmp_path.iterdir()] == ["summary.json"]


class Broken:
    """A sink whose `fails` method raises."""

    def __init__(self, fails: str) -> None:
        self.fails = fails
        self.calls: list[str] = []

    def write(self, row: dict[str, Any]) -> None:
        self._call("write")

    def close(self, summary: dict[str, Any], exit_code: int) -> None:
        self._call("close")

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name == self.fails:
            raise RuntimeError("no luck")


@pytest.mark.parametrize(("fails", "calls"), [("write", ["write"]), ("close", ["write", "write", "close"])])
def test_failing_wandb_costs_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, fails: str, calls: list[str]
) -> None:
    broken = Broken(fails)
    sinks = Sinks(tmp_path, MetricsFile(tmp_path / "metrics.jsonl"), broken, {}, Redactor())
    with caplog.at_level(logging.WARNING):
        for step in range(2):
            sinks.write({"step": step})
        sinks.close({}, 0)
        sinks.close({}, 1)
        sinks.write({"step": 2})
    assert broken.calls == calls
    assert [record.getMessage() for record in caplog.records] == [
        "W&B is dropped (RuntimeError: no luck); the run's folder has every row"
    ]
    assert [row["step"] for row in lines(tmp_path / "metrics.jsonl")] == [0, 1]
    assert json.loads((tmp_path / "summary.json").read_text())["exit_code"] == 0


def test_sinks_import_neither_torch_nor_wandb() -> None:
    code = "import sys, trainer.sinks; sys.exit(not {'torch', 'wandb', 'numpy'}.isdisjoint(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=30).returncode == 0


def test_commit_of_the_working_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the code that runs, wherever the user stands."""
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.chdir(tmp_path)
    assert git_commit(tmp_path) is None
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@t", "-c", "commit.gpgsign=false"]
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "m"]):
        subprocess.run([*git, *command], check=True, timeout=30)
    (head,) = (tmp_path / ".git" / "refs" / "heads").iterdir()
    own = head.read_text().strip()
    assert git_commit(tmp_path) == own
    assert host_environment()["git_commit"] != own

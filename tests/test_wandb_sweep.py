"""Jobs of a sweep are found together in W&B, and its summary run holds the scaling table."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.sweep_folder import scaling_sweep
from tests.sweep_table import ROWS, SENTENCE, row, write_sweep
from tests.wandb_case import history, no_account, online, the_run, warnings
from tests.wandb_stub import API_KEY, WandbStub, closed_port
from trainer.config import DataConfig, LoggerConfig, ModelConfig, RunConfig, StrategyConfig
from trainer.sinks import open_sinks
from trainer.wandb_labels import group_name, label_sweep_job, wandb_config
from trainer.wandb_sweep import log_sweep, scaling_rows, sweep_logger, sweep_summary

__all__ = ["no_account", "warnings"]  # fixtures

PATIENT = LoggerConfig(timeout_s=30.0)
GROUP = "2026-11-30_10-00-00-sweep"
SCALING = [
    (1, 100.0, 1.0, 1.0, 0.16, "ddp", 100.0),
    (2, 160.0, 1.6, 0.8, 0.1, "ddp", 200.0),
    (4, 200.0, 2.0, 0.5, 0.08, "pipeline", 400.0),
]  # ranks, samples/s, speed-up, efficiency, step time, strategy, samples/s of ideal scaling


def shown(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    keys = ("world_size", "samples_per_s", "speedup", "efficiency", "step_time_s", "strategy")
    return [tuple(row[f"scaling/{key}"] for key in (*keys, "ideal_samples_per_s")) for row in rows]


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    return write_sweep(tmp_path / "2026-11-30" / "10-00-00-sweep")


@pytest.mark.parametrize(
    ("folder", "group"),
    [
        ("runs/2026-11-30/10-00-00-123456-sweep", "2026-11-30_10-00-00-123456-sweep"),
        ("/data/my-sweep", "my-sweep"),
        (f"/data/{'x' * 200}", "x" * 128),
    ],
)
def test_a_group_is_named_after_the_folder(folder: str, group: str) -> None:
    assert group_name(Path(folder)) == group


def test_a_sweeps_job_gets_group_and_job_type_where_the_user_gave_none() -> None:
    mapping: dict[str, Any] = {"logger": {"group": None, "job_type": "mine"}}
    label_sweep_job(mapping, Path("/data/s"))
    assert mapping == {"logger": {"group": "s", "job_type": "mine"}}
    label_sweep_job(bare := {"logger": {"name": "none"}}, Path("/data/s"))
    assert bare == {"logger": {"name": "none", "group": "s", "job_type": "sweep-job"}}
    label_sweep_job(none := {"logger": None}, Path("/data/s"))
    assert none == {"logger": None}


@pytest.mark.parametrize(
    ("strategy", "model", "expected"),
    [
        ("pipeline", ModelConfig(num_layers=7, hidden_dim=96), (2, "gpipe", 7, 96)),
        ("ddp", ModelConfig(widths=(64, 32)), (2, None, 3, None)),
        ("ddp", ModelConfig(name="residual"), (2, None, None, None)),
    ],
)
def test_the_keys_one_filters_by(strategy: str, model: ModelConfig, expected: tuple[Any, ...]) -> None:
    own = StrategyConfig(name=strategy, microbatches=2, schedule="gpipe")
    logger = LoggerConfig(tags=("mine", "ddp"))
    config = RunConfig("/run", strategy=own, model=model, data=DataConfig(batch_size=48), logger=logger)
    made = wandb_config(config.to_mapping(), {"world_size": 4}, "train")
    assert tuple(made[key] for key in ("microbatches", "schedule", "num_layers", "hidden_dim")) == expected
    assert (made["strategy"], made["world_size"], made["batch_size"]) == (strategy, 4, 48)
    assert made["strategy_options"]["bucket_mb"] == 25.0
    assert made["logger"]["job_type"] == "train"
    tags = [strategy, "world_size=4", "mine", "ddp"]
    assert made["logger"]["tags"] == (tags if strategy == "pipeline" else tags[:-1])


def test_the_best_plan_of_each_world_size_is_plotted() -> None:
    assert shown(scaling_rows(ROWS)) == SCALING


def test_further_problems_have_lines_of_their_own() -> None:
    further = row(6, "ddp", 2, 80.0, place=1, problem=1, speedup=None, efficiency=None)
    *first, last = scaling_rows([further, *ROWS])
    assert shown(first) == SCALING
    assert last == {
        "scaling/world_size": 2,
        "scaling/problem-1/samples_per_s": 80.0,
        "scaling/problem-1/speedup": None,
        "scaling/problem-1/efficiency": None,
        "scaling/problem-1/step_time_s": 0.2,
        "scaling/problem-1/strategy": "ddp",
        "scaling/problem-1/microbatches": 1,
    }


def test_a_sweep_in_which_nothing_is_complete_has_no_best_plan() -> None:
    rows = [one for one in ROWS if one["place"] is None]
    assert scaling_rows(rows) == []
    summary = sweep_summary({"rows": rows, "sentences": []}, {"state": "failed"})
    assert summary["sentence"] is None and summary["jobs"] == {"failed": 1, "skipped": 1}
    assert set(summary["best"].values()) == {None}


def check_arrived(stub: WandbStub) -> None:
    """What a summary run of the sweep written by hand is, whichever way it came."""
    run = stub.variables("UpsertBucket")
    assert (run["groupName"], run["jobType"], run["displayName"]) == (
        GROUP,
        "sweep-summary",
        f"{GROUP} summary",
    )
    config = json.loads(run["config"])
    assert config["overrides"]["value"] == ["strategy=ddp,pipeline,single", "world_size=1,2,4"]
    assert config["world_sizes"]["value"] == [1, 2, 4]
    assert shown([line for line in stub.history() if "scaling/world_size" in line]) == SCALING
    (table,) = (json.loads(text) for text in stub.uploaded("media/table/jobs"))
    rows = [dict(zip(table["columns"], data, strict=True)) for data in table["data"]]
    assert [line["number"] for line in rows] == [3, 1, 2, 0, 4, 5]
    assert rows[4]["reason"] == "Rank 1 of 4 failed: ValueError: boom"
    assert json.loads(rows[5]["swept"]) == {"strategy": "single", "world_size": "2"}
    assert stub.uploaded("media/html/report") == ["<p>the report</p>"]
    summary = json.loads(stub.uploaded("wandb-summary.json")[-1])
    assert summary["sweep"]["sentence"] == SENTENCE
    assert summary["sweep"]["jobs"] == {"complete": 4, "failed": 1, "skipped": 1}
    assert (summary["sweep"]["best"]["strategy"], summary["sweep"]["best"]["world_size"]) == ("pipeline", 4)
    assert summary["jobs"]["_type"] == "table-file"
    assert stub.exit_code() == 0


def test_the_summary_run_arrives(
    sweep: Path, monkeypatch: pytest.MonkeyPatch, warnings: pytest.LogCaptureFixture
) -> None:
    with WandbStub() as stub:
        online(monkeypatch, stub.url)
        log_sweep(sweep, PATIENT)
        check_arrived(stub)
    assert warnings.messages == []


def sync(stub: WandbStub, *folders: Path) -> None:
    environ = {**os.environ, "WANDB_BASE_URL": stub.url, "WANDB_API_KEY": API_KEY}
    command = [sys.executable, "-m", "wandb", "sync", *map(str, folders)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_an_offline_summary_syncs_to_the_same_picture(
    sweep: Path, warnings: pytest.LogCaptureFixture
) -> None:
    log_sweep(sweep, PATIENT)
    log_sweep(sweep, PATIENT)  # a resumed sweep's takes the place of the first
    own = sweep / "wandb-summary"
    records = the_run(own)
    assert len(history(records)) == 3 + 2
    metrics = [record["metric"] for record in records if record["type"] == "metric"]
    steps = {one["glob_name"]: one["step_metric"] for one in metrics if "glob_name" in one}
    assert steps == {"scaling/*": "scaling/world_size"}
    with WandbStub() as stub:
        sync(stub, *own.glob("wandb/offline-run-*"))
        check_arrived(stub)
    assert warnings.messages == []


@pytest.mark.slow
def test_an_offline_job_syncs_to_the_same_picture(tmp_path: Path) -> None:
    mapping: dict[str, Any] = {"logger": {"tags": ["mine"]}, "strategy": {"name": "ddp", "microbatches": 2}}
    label_sweep_job(mapping, Path("/data/2026-11-30/10-00-00-sweep"))
    sinks = open_sinks(RunConfig.from_mapping(mapping, str(tmp_path)), {"world_size": 2})
    for step in range(7):
        sinks.write(
            {"step": step, "is_warmup": step < 2, "step_time_s": (step + 1) / 8, "rank/1/wait_s": 0.5}
        )
    sinks.close({"verdict": {"wall": "link", "cause": "none", "sentence": "A step takes 6 ms."}}, 0)
    with WandbStub() as stub:
        sync(stub, *tmp_path.glob("wandb/offline-run-*"))
        run = stub.variables("UpsertBucket")
        assert (run["groupName"], run["jobType"]) == (GROUP, "sweep-job")
        assert run["tags"] == ["ddp", "world_size=2", "mine"]
        assert run["displayName"] == "ddp mlp-4x128 world_size=2 microbatches=2"
        config = {key: entry.get("value") for key, entry in json.loads(run["config"]).items()}
        assert (config["strategy"], config["world_size"], config["microbatches"]) == ("ddp", 2, 2)
        assert (config["num_layers"], config["hidden_dim"], config["batch_size"]) == (4, 128, 128)
        assert [line["step_time_s"] for line in stub.history()] == [step / 8 for step in range(1, 8)]
        assert [line["rank/1/wait_s"] for line in stub.history()] == 7 * [0.5]
        summary = json.loads(stub.uploaded("wandb-summary.json")[-1])
    assert summary["verdict"] == {"wall": "link", "cause": "none", "sentence": "A step takes 6 ms."}
    assert summary["steady"]["step_time_s"] == {"median": 0.625, "q1": 0.5, "q3": 0.75}


@pytest.mark.slow
def test_a_server_that_knows_no_tables_still_gets_the_rest(
    sweep: Path, monkeypatch: pytest.MonkeyPatch, warnings: pytest.LogCaptureFixture
) -> None:
    with WandbStub() as stub:
        stub.unknown.add("ArtifactType")
        online(monkeypatch, stub.url)
        log_sweep(sweep, PATIENT)
        assert shown([line for line in stub.history() if "scaling/world_size" in line])[2][0] == 4
        assert json.loads(stub.uploaded("wandb-summary.json")[-1])["sweep"]["sentence"] == SENTENCE
    (message,) = warnings.messages
    assert message.startswith("W&B: jobs is left out (ValidationError: ")


@pytest.mark.slow
def test_a_server_that_is_down_costs_a_warning(
    sweep: Path, monkeypatch: pytest.MonkeyPatch, warnings: pytest.LogCaptureFixture
) -> None:
    online(monkeypatch, f"http://127.0.0.1:{closed_port()}")
    log_sweep(sweep, PATIENT)
    assert len(history(the_run(sweep / "wandb-summary"))) == 5
    (message,) = warnings.messages
    assert message.endswith("Connection refused); this run is written offline")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["hang", "hang_after_init"])
def test_a_server_that_hangs_does_not_hold_up_the_sweep(
    sweep: Path, monkeypatch: pytest.MonkeyPatch, warnings: pytest.LogCaptureFixture, mode: str
) -> None:
    with WandbStub(mode) as stub:
        online(monkeypatch, stub.url)
        begun = time.monotonic()
        log_sweep(sweep, LoggerConfig(timeout_s=6.0))
        took_s = time.monotonic() - begun
    assert took_s < 3 * 6.0 + 30.0  # waits at start, at the end and in between; two starts on a busy machine
    assert len(warnings.messages) == 1


def test_no_secret_leaves_with_the_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SERVICE_SECRET", "planted-secret-1")
    sweep = write_sweep(tmp_path / "s", [{**ROWS[0], "reason": "cannot log in with planted-secret-1"}])
    with WandbStub() as stub:
        online(monkeypatch, stub.url)
        log_sweep(sweep, LoggerConfig(timeout_s=30.0, group="planted-secret-1", tags=(API_KEY,)))
        bodies = "\n".join(body for path, body in stub.bodies)
    assert "planted-secret-1" not in bodies and API_KEY not in bodies
    assert "<removed>" in json.loads(stub.uploaded("media/table/jobs")[0])["data"][0][3]
    assert str(sweep) not in bodies and sys.executable not in bodies
    for path in (path for path in (sweep / "wandb-summary").rglob("*") if path.is_file()):
        assert b"planted-secret-1" not in path.read_bytes()


def test_the_page_of_a_sweep_says_neither_host_nor_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = pytest.importorskip("trainer.sweep_report", reason="needs the extra report")
    sweep = scaling_sweep(tmp_path / "planted-user" / "sweep")
    for path in sweep.glob("*/summary.json"):
        nodes = [{"node": 0, "host": "planted-host", "ranks": [0]}]
        path.write_text(json.dumps({**json.loads(path.read_text()), "nodes": nodes}))
    report.write_sweep_report(sweep)
    with WandbStub() as stub:
        online(monkeypatch, stub.url)
        log_sweep(sweep, PATIENT)
        (page,) = stub.uploaded("media/html/report")
        bodies = "\n".join(body for _, body in stub.bodies)
    assert "ddp, microbatches=1" in page
    for name in ("planted-host", "planted-user", f'"{socket.gethostname()}"'):
        assert name not in bodies


@pytest.mark.parametrize("text", ["{", "[]", '{"schema": 1}', '{"rows": [{"place": 1}]}'])
def test_a_damaged_table_costs_a_warning(sweep: Path, warnings: pytest.LogCaptureFixture, text: str) -> None:
    (sweep / "table.json").write_text(text)
    log_sweep(sweep, PATIENT)
    (message,) = warnings.messages
    assert message.startswith("W&B has no summary of the sweep (")
    assert not list(sweep.glob("wandb-summary/wandb/*"))


def test_the_logger_is_that_of_the_first_job_with_a_readable_config(sweep: Path) -> None:
    whole = "logger: {project: p, group: g, tags: [t]}"
    for name, text in (("0-a", "{"), ("1-b", whole), ("2-c", "logger: {}")):
        (sweep / name).mkdir()
        (sweep / name / "config.yaml").write_text(text)
    (sweep / "1-a~1").mkdir()  # what an earlier try left, before the one that is read
    (sweep / "1-a~1" / "config.yaml").write_text("logger: {project: earlier}")
    assert sweep_logger(sweep) == LoggerConfig(project="p", group="g", tags=("t",))
    assert sweep_logger(sweep / "0-a") is None


def test_no_summary_is_logged_where_none_is_wanted(tmp_path: Path) -> None:
    stopped = write_sweep(tmp_path / "stopped", state="stopped")
    log_sweep(stopped, PATIENT)
    unlogged = write_sweep(tmp_path / "none")
    log_sweep(unlogged, LoggerConfig(name="none"))
    for folder in (stopped, unlogged):
        assert sorted(path.name for path in folder.iterdir()) == ["report.html", "sweep.json", "table.json"]

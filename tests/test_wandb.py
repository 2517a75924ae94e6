"""W&B gets every row, learns no secret, and cannot stop, fail or delay a run.

The rows that arrived are read back with `wandb leet inspect`, from what a run
wrote offline, and from the bodies of requests to a stub server on loopback.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.wandb_case import history, inspect, no_account, online, the_run, warnings
from tests.wandb_stub import API_KEY, WandbStub, closed_port
from trainer import wandb_sink
from trainer.config import LoggerConfig, ModelConfig, RunConfig
from trainer.files import MetricsFile, read_metrics
from trainer.report_page import write_report
from trainer.secrets import Redactor, redact
from trainer.sinks import Sinks, open_sinks
from trainer.wandb_sink import WandbSink, run_id

__all__ = ["no_account", "warnings"]  # fixtures

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 6.0  # waited out where a server hangs; what W&B does by itself must take less
PATIENT_S = 30.0  # for all that comes to an end: never waited out
START_S = 15.0  # room for the start of Python and of W&B's service on a busy machine


def run_config(run_dir: Path, **logger: Any) -> RunConfig:
    return RunConfig(run_dir=str(run_dir), logger=LoggerConfig(**{"timeout_s": PATIENT_S, **logger}))


def row(step: int) -> dict[str, Any]:
    return {
        "step": step,
        "epoch": step // 3,
        "phase": "train",
        "is_warmup": step < 2,
        "loss": 1 / (step + 1) if step != 3 else float("nan"),
        "eval_loss": 0.1 * step if step % 2 else None,
        "step_time_s": 1e-5 + step / 3,
        "bytes_sent": 2**40 + step,
        "rank/0/step_time_s": 1e-300,
        "rank/1/step_time_s": step / 7,
    }


def train(config: RunConfig, steps: int = 7, exit_code: int = 0) -> tuple[float, float]:
    """Opens, writes and closes; the seconds that opening and closing took."""
    begun = time.monotonic()
    sinks = open_sinks(config, {"threads_per_rank": 1})
    opened = time.monotonic()
    for step in range(steps):
        sinks.write(row(step))
    ending = time.monotonic()
    sinks.close({}, exit_code)
    return opened - begun, time.monotonic() - ending


def expected(run_dir: Path) -> list[dict[str, Any]]:
    """The rows of metrics.jsonl as W&B has them: null is a key left out."""
    return [
        {k: v for k, v in row.items() if v is not None} for row in read_metrics(run_dir / "metrics.jsonl")
    ]


def wait_for_rows(run_dir: Path, count: int) -> None:
    """Until W&B's own file has that many: the helper follows with the lowest claim to the processors."""
    deadline = time.monotonic() + 60
    while sum(path.read_bytes().count(b"rank/1/step_time_s") for path in own_files(run_dir)) < count:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def own_files(run_dir: Path) -> list[Path]:
    return [path for path in run_dir.glob("wandb/*/*.wandb") if not path.parent.is_symlink()]


def gone(pid: int, within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        status = Path(f"/proc/{pid}/status")
        if not status.exists() or "State:\tZ" in status.read_text():
            return True
        time.sleep(0.05)
    return False


def test_offline_run_holds_every_row(tmp_path: Path, warnings: pytest.LogCaptureFixture) -> None:
    config = run_config(tmp_path, run_name="a name", group="g", job_type="j", tags=("t1", "t2"), project="p")
    train(config)
    records = the_run(tmp_path)
    assert len(expected(tmp_path)) == 7
    assert history(records) == expected(tmp_path)
    (run,) = (record["run"] for record in records if record["type"] == "run")
    assert (run["display_name"], run["project"], run["tags"]) == ("a name", "p", ["single", "t1", "t2"])
    assert (run["run_group"], run["job_type"], run["run_id"]) == ("g", "j", run_id(tmp_path))
    assert run["config"]["update"]["optimizer"]["lr"] == 0.001
    assert run["config"]["update"]["environment"]["threads_per_rank"] == 1
    metrics = [record["metric"] for record in records if record["type"] == "metric"]
    assert {m["glob_name"]: m["step_metric"] for m in metrics if "glob_name" in m} == {"*": "step"}
    (end,) = (record for record in records if record["type"] == "exit")
    assert end["exit"].get("exit_code", 0) == 0
    assert warnings.messages == []


@pytest.mark.slow
def test_second_run_in_the_folder_keeps_the_id(tmp_path: Path) -> None:
    train(run_config(tmp_path), steps=2)
    train(run_config(tmp_path), steps=3)
    found = list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert [path.name for path in found] == 2 * [f"run-{run_id(tmp_path)}.wandb"]
    assert sorted(len(history(inspect(path))) for path in found) == [2, 3]


def test_online_run_gets_every_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: pytest.LogCaptureFixture
) -> None:
    with WandbStub() as stub:
        online(monkeypatch, stub.url)
        config = run_config(tmp_path, run_name="a name", group="g", job_type="j", tags=("t",))
        train(config, exit_code=1)
        assert stub.history() == expected(tmp_path)
        assert len(stub.history()) == 7
        assert stub.exit_code() == 1
        run = stub.variables("UpsertBucket")
        assert (run["project"], run["name"], run["displayName"]) == ("splitmeter", run_id(tmp_path), "a name")
        assert (run["groupName"], run["jobType"], run["tags"]) == ("g", "j", ["single", "t"])
        assert json.loads(run["config"])["optimizer"]["value"]["lr"] == 0.001
    assert history(the_run(tmp_path, "run-")) == expected(tmp_path)
    assert warnings.messages == []


def test_server_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: pytest.LogCaptureFixture
) -> None:
    url = f"http://127.0.0.1:{closed_port()}"
    online(monkeypatch, url)
    opening_s, _ = train(run_config(tmp_path))
    assert opening_s < 2 * START_S
    assert history(the_run(tmp_path)) == expected(tmp_path)
    assert warnings.messages == [
        f"W&B does not answer (OSError: {url}: Connection refused); this run is written offline"
    ]


@pytest.mark.parametrize(
    ("status", "timeout_s"), [(401, PATIENT_S), pytest.param(500, TIMEOUT_S, marks=pytest.mark.slow)]
)
def test_server_refuses(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    warnings: pytest.LogCaptureFixture,
    status: int,
    timeout_s: float,
) -> None:
    """An error of the server is tried again until time is up, a refusal is not."""
    with WandbStub("refuse", status) as stub:
        online(monkeypatch, stub.url)
        opening_s, _ = train(run_config(tmp_path, timeout_s=timeout_s))
    assert opening_s < (2 * START_S if status == 401 else TIMEOUT_S + START_S)
    assert history(the_run(tmp_path)) == expected(tmp_path)
    (message,) = warnings.messages
    assert message.startswith("W&B does not answer (") and message.endswith("this run is written offline")


@pytest.mark.slow
def test_server_hangs_and_the_process_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import logging, sys, time\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "from pathlib import Path\n"
        "from tests.test_wandb import TIMEOUT_S, run_config, train\n"
        "logging.basicConfig(format='%(message)s')\n"
        "begun = time.monotonic()\n"
        f"train(run_config(Path({str(tmp_path)!r}), timeout_s=TIMEOUT_S))\n"
        "Path('begun').write_text(repr(begun))\n"
    )
    with WandbStub("hang") as stub:
        online(monkeypatch, stub.url)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
        ended = time.monotonic()
    assert done.returncode == 0
    assert ended - float(Path("begun").read_text()) < TIMEOUT_S + START_S
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("W&B does not answer (") and line.endswith("); this run is written offline")
    assert history(the_run(tmp_path)) == expected(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("exit_code", "limit_s"), [(0, TIMEOUT_S + 4.0), (143, 4.0)])
def test_server_hangs_once_the_run_exists(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    warnings: pytest.LogCaptureFixture,
    exit_code: int,
    limit_s: float,
) -> None:
    metrics = MetricsFile(tmp_path / "metrics.jsonl")
    with WandbStub("hang_after_init") as stub:
        online(monkeypatch, stub.url)
        public = redact(asdict(run_config(tmp_path, timeout_s=TIMEOUT_S)))
        helper = WandbSink(LoggerConfig(timeout_s=TIMEOUT_S), tmp_path, metrics.path, public, Redactor())
        helper.start("online", PATIENT_S)
        sinks = Sinks(tmp_path, metrics, helper, {}, Redactor())
        for step in range(40):
            sinks.write(row(step))
        wait_for_rows(tmp_path, 40)
        begun = time.monotonic()
        sinks.close({}, exit_code)
        closing_s = time.monotonic() - begun
    assert closing_s < limit_s
    assert history(the_run(tmp_path, "run-")) == expected(tmp_path)
    (message,) = warnings.messages
    folder = next(tmp_path.glob("wandb/run-*"))
    assert message.endswith(f"in time; upload with `wandb sync --include-online {folder}`")


def test_rank_0_is_killed(tmp_path: Path) -> None:
    code = (
        "import os, sys\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "from pathlib import Path\n"
        "from tests.test_wandb import open_sinks, row, run_config\n"
        f"sinks = open_sinks(run_config(Path({str(tmp_path)!r})), {{}})\n"
        "for step in range(50): sinks.write(row(step))\n"
        "print(sinks._wandb._process.pid, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert gone(int(done.stdout), within_s=5.0)
    records = the_run(tmp_path)
    assert len(expected(tmp_path)) == 50
    assert history(records) == expected(tmp_path)
    assert [record["exit"]["exit_code"] for record in records if record["type"] == "exit"] == [1]


def test_helper_dies_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(wandb_sink, "CHECK_S", 0.0)
    sinks = open_sinks(run_config(tmp_path), {})
    sinks.write(row(0))
    helper = sinks._wandb
    assert isinstance(helper, WandbSink) and helper._process is not None
    pid = helper._process.pid
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 10.0
    while not warnings.messages and time.monotonic() < deadline:
        sinks.write(row(1))
        time.sleep(0.05)
    sinks.write(row(2))
    sinks.close({}, 0)
    assert warnings.messages == ["W&B is dropped (its process ended); the run's folder has every row"]
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")][-1] == 2
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "finished"
    assert gone(pid, within_s=1.0)


def test_wandb_that_cannot_be_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "wandb.py").write_text("raise ImportError('broken installation')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    train(run_config(tmp_path / "run"))
    assert warnings.messages == [
        "W&B is off (ImportError: broken installation); the run's folder has every row"
    ]
    assert len(list(read_metrics(tmp_path / "run" / "metrics.jsonl"))) == 7


def test_no_secret_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planted = ["planted-api-key-1", "planted-password-2", "planted-token-3", API_KEY, "planted-service-5"]
    monkeypatch.setenv("MY_SERVICE_SECRET", planted[4])
    options = {"api_key": planted[0], "db_password": planted[1], "auth_token": planted[2], "width": 3}
    with WandbStub() as stub:
        online(monkeypatch, stub.url)
        logger = LoggerConfig(
            timeout_s=PATIENT_S, run_name=f"run-{planted[4]}", tags=(planted[0],), group=API_KEY
        )
        config = RunConfig(run_dir=str(tmp_path), model=ModelConfig(options=options), logger=logger)
        sinks = open_sinks(config, {"remark": planted[1]})
        sinks.write(row(0))
        sinks.close({"error": f"cannot log in with {planted[2]}"}, 1)
        bodies = "\n".join(body for _, body in stub.bodies)
    assert '"displayName":"run-<removed>"' in bodies.replace("\\u003c", "<").replace("\\u003e", ">")
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"config.yaml", "metrics.jsonl", "summary.json"} <= {path.name for path in files}
    for secret in planted:
        assert secret not in bodies
        assert [path for path in files if secret.encode() in path.read_bytes()] == []


def test_nothing_of_the_machine_or_the_code_is_uploaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with WandbStub() as stub:
        online(monkeypatch, stub.url)
        train(run_config(tmp_path))
        paths = {path for path, _ in stub.bodies}
        bodies = "\n".join(body for _, body in stub.bodies)
    uploaded = {path for path in paths if path.startswith("/upload/")}
    assert uploaded <= {"/upload/config.yaml", "/upload/wandb-summary.json"}
    assert not [path for path in paths if "otel" in path]
    assert "trainer.wandb_process" not in bodies and sys.executable not in bodies
    assert f'"{socket.gethostname()}"' not in bodies


def test_a_report_says_neither_host_nor_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("plotly", reason="needs the extra report")
    folder = tmp_path / "planted-user" / "run"
    nodes = [{"node": node, "host": f"planted-host-{node}", "ranks": [node]} for node in range(2)]
    with WandbStub() as stub:
        online(monkeypatch, stub.url)
        sinks = open_sinks(run_config(folder), {"world_size": 2, "backend": "gloo"})
        for step in range(4):
            sinks.write(row(step))
        curve = {"measured": {"host": "planted-host-0", "backend": "gloo", "world_size": 2}, "curves": []}
        (folder / "link_curve.json").write_text(json.dumps({"schema": 1, **curve}))
        sent = [{"rank": rank, "bytes_sent": 8, "bytes_least": 8, "bytes_predicted": 8} for rank in range(2)]
        summary = {"nodes": nodes, "bytes_by_operation": sent}
        sinks.close(summary, 0, lambda: {"html": str(write_report(folder))})
        (page,) = stub.uploaded("media/html/report")
        bodies = "\n".join(body for _, body in stub.bodies)
    assert "planted-host-1" in (folder / "summary.json").read_text()
    assert "Ranks on nodes" in page and "hidden_dim: 128" in page and "backend: gloo" in page
    for name in ("planted-host", "planted-user", f'"{socket.gethostname()}"'):
        assert name not in bodies


def use_helper(monkeypatch: pytest.MonkeyPatch, script: str) -> list[subprocess.Popen[str]]:
    """Puts a script in the helper's place; the processes that were started."""
    started: list[subprocess.Popen[str]] = []
    prelude = "import signal, sys, time\ndef say(text): print(text, flush=True)\n"

    def spawn() -> subprocess.Popen[str]:
        command = [sys.executable, "-S", "-c", prelude + script]
        started.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        return started[-1]

    monkeypatch.setattr(wandb_sink, "_spawn", spawn)
    return started


READY = """sys.stdin.readline(); say('{"ready": "page", "folder": "folder"}')\n"""


@pytest.mark.slow
def test_helper_has_all_the_time_it_needs_to_take_rows_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: pytest.LogCaptureFixture
) -> None:
    ending = (
        "sys.stdin.readline()\n"
        "for n in range(6): time.sleep(0.5); say('{\"progress\": 1}')\n"
        "say('{\"finishing\": true}'); say('{\"done\": true}')"
    )
    helpers = use_helper(monkeypatch, READY + ending)
    _, closing_s = train(run_config(tmp_path, timeout_s=2.0))
    assert closing_s >= 3.0
    assert warnings.messages == []
    assert [process.returncode for process in helpers] == [0]


def test_what_the_helper_says_is_passed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MY_SERVICE_SECRET", "s3cr3t-value")
    talk = """say('no JSON'); say('{"remark": "s3cr3t-value"}')\n"""
    use_helper(monkeypatch, READY + talk + """sys.stdin.readline(); say('{"failed": "a b"}')""")
    train(run_config(tmp_path))
    assert warnings.messages == [
        "W&B: <removed>",
        "W&B is dropped (a b); the run's folder has every row",
    ]


@pytest.mark.slow
def test_helper_that_neither_answers_nor_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(wandb_sink, "OFFLINE_START_S", 0.5)
    online(monkeypatch, "http://127.0.0.1:9")
    helpers = use_helper(monkeypatch, "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)")
    opening_s, _ = train(run_config(tmp_path, timeout_s=0.5))
    assert opening_s < 2 * 0.5 + 2 * 1.0 + START_S
    assert warnings.messages == [
        "W&B does not answer (no answer in 0.5 s); this run is written offline",
        "W&B is off (no answer in 0.5 s); the run's folder has every row",
    ]
    assert len(helpers) == 2 and all(process.returncode is not None for process in helpers)


def test_helper_does_not_outlive_an_interrupted_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(self: WandbSink, timeout_s: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(WandbSink, "_next", interrupt)
    helpers = use_helper(monkeypatch, "time.sleep(60)")
    with pytest.raises(KeyboardInterrupt):
        open_sinks(run_config(tmp_path), {})
    assert [process.returncode for process in helpers] == [-signal.SIGTERM]


def test_helper_that_cannot_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: pytest.LogCaptureFixture
) -> None:
    def spawn() -> None:
        raise OSError("no processes left")

    monkeypatch.setattr(wandb_sink, "_spawn", spawn)
    train(run_config(tmp_path))
    assert warnings.messages == ["W&B is off (OSError: no processes left); the run's folder has every row"]


def test_disabled_and_none_write_no_wandb_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train(run_config(tmp_path / "none", name="none"))
    monkeypatch.setenv("WANDB_MODE", "disabled")
    train(run_config(tmp_path / "disabled"))
    for name in ("none", "disabled"):
        found = {path.name for path in (tmp_path / name).iterdir()}
        assert found == {"config.yaml", "metrics.jsonl", "summary.json"}


def test_run_id_that_makes_no_sense_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "wandb_run_id.txt").write_text("../../x\n")
    made = run_id(tmp_path)
    assert made != "../../x" and made == run_id(tmp_path)

"""Every command in docs/wandb.md runs, in the order in which it stands there, and does what the page says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.wandb_case import no_account
from tests.wandb_stub import API_KEY, WandbStub
from trainer.wandb_sweep import PLOTTED

__all__ = ["no_account"]  # a fixture

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "wandb.md").read_text()
COMMANDS = [line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]


def test_the_page_names_what_the_summary_run_logs() -> None:
    named = set(re.findall(r"`scaling/(\w+)`", PAGE))
    assert named == {"world_size", *PLOTTED, "ideal_samples_per_s", "ideal_speedup"}


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_every_command_runs(tmp_path: Path) -> None:
    pytest.importorskip("wandb_workspaces", reason="needs the extra dashboard")
    for name in ("scripts", "conf"):
        (tmp_path / name).symlink_to(ROOT / name)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environ = {**os.environ, "PATH": path}
    told: dict[str, str] = {}
    with WandbStub() as stub:
        for command in COMMANDS:
            if command == "export WANDB_API_KEY=YOUR_KEY":
                environ |= {"WANDB_API_KEY": API_KEY, "WANDB_BASE_URL": stub.url}
                continue
            done = subprocess.run(
                ["bash", "-c", command],
                cwd=tmp_path,
                env=environ,
                capture_output=True,
                text=True,
                timeout=300,
            )
            assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
            told[command] = done.stdout
        bodies = [json.loads(body) for path, body in stub.bodies if path == "/graphql"]
    runs = [body["variables"] for body in bodies if "jobType" in body.get("variables", {})]
    found = {(run["groupName"], run["jobType"], tuple(run["tags"] or ())) for run in runs if run["jobType"]}
    assert found >= {
        (None, "train", ("pipeline", "world_size=2")),
        ("splits", "sweep-job", ("ddp", "world_size=2")),
        ("splits", "sweep-job", ("pipeline", "world_size=2")),
        ("try", "train", ("ddp", "world_size=2", "laptop")),
    }
    assert told["python scripts/dashboard.py --push"].startswith(
        f"workspace  {stub.url}/tester/splitmeter?nw="
    )
    assert (tmp_path / "dashboard.json").is_file() and (tmp_path / "splits.json").is_file()
    assert len(list((tmp_path / "runs" / "first" / "wandb").glob("offline-run-*/*.synced"))) == 1

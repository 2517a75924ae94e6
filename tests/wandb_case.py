"""What tests of W&B share: no account of whoever runs them, a stub server's, and offline runs read back."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.wandb_stub import API_KEY


@pytest.fixture(autouse=True)
def no_account(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No key, server or settings of whoever runs the tests."""
    for name in list(os.environ):
        if name.startswith("WANDB_") or name == "NETRC":
            monkeypatch.delenv(name)
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(home)
    yield


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.WARNING, logger="trainer")
    return caplog


def online(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", url)
    monkeypatch.setenv("WANDB_API_KEY", API_KEY)


def inspect(path: Path) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def history(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    items = [record["history"]["item"] for record in records if record["type"] == "history"]
    return [{key: value for key, value in item.items() if not key.startswith("_")} for item in items]


def the_run(run_dir: Path, prefix: str = "offline-run-") -> list[dict[str, Any]]:
    """Records of the only W&B run in the folder."""
    (path,) = (path for path in run_dir.glob("wandb/*/*.wandb") if not path.parent.is_symlink())
    assert path.parent.name.startswith(prefix)
    return inspect(path)

"""Where a job runs: versions, processors, and the commit of the working tree."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any


def host_environment() -> dict[str, Any]:
    """Versions, processors, and the commit of the working tree (null where there is none)."""
    versions: dict[str, Any] = {}
    for package in ("splitmeter", "torch", "wandb"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    return {
        **versions,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "git_commit": git_commit(Path(__file__).parent),
    }


def git_commit(folder: Path) -> str | None:
    """The commit of the working tree that a folder lies in; None where there is none."""
    try:
        command = ["git", "-C", str(folder), "rev-parse", "HEAD"]
        found = subprocess.run(command, capture_output=True, text=True, timeout=2, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()

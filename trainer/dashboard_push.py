"""Sends the workspace to W&B from a process of its own, whose end does not wait for W&B's.

Run as `python -P -m trainer.dashboard_push`: in comes {entity, project, group, ranks} as JSON, out goes
{url} or {failed: reason}.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

PUSH_S = 60.0  # longest that sending takes, the start of Python and of W&B's service included


class NotSent(Exception):
    """W&B did not take the workspace; the text says why."""


def push(entity: str | None, project: str, group: str | None, ranks: int | None) -> str:
    """Save the workspace as a new view of the project; its address.

    Raises:
        NotSent: the server does not answer, refuses, or takes longer than `PUSH_S`.
    """
    root = str(Path(__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    environ = {**os.environ, "PYTHONPATH": path, "WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true"}
    environ.pop("WANDB_SERVICE", None)  # a service of its own, which ends with the process
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "trainer.dashboard_push"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environ,
    )
    wanted = json.dumps({"entity": entity, "project": project, "group": group, "ranks": ranks})
    try:
        said, _ = process.communicate(wanted, timeout=PUSH_S)
    except subprocess.TimeoutExpired:
        raise NotSent(f"no answer in {PUSH_S:g} s") from None
    finally:
        process.kill()  # W&B's service watches it and goes too
        process.wait()
    answer: dict[str, Any] = json.loads(said) if said.startswith("{") else {}
    if "url" not in answer:
        raise NotSent(answer.get("failed", "its process ended"))
    return str(answer["url"])


def main() -> None:
    from trainer.wandb_process import Channel, end_service

    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    channel = Channel(out)
    try:
        channel.send(url=_save(json.loads(sys.stdin.read())))
    except Exception as error:
        channel.send(failed=" ".join(f"{type(error).__name__}: {error}".split())[:300])
    end_service()
    os._exit(0)


def _save(wanted: dict[str, Any]) -> str:
    from trainer.wandb_account import base_url
    from trainer.wandb_process import check_reachable

    check_reachable(base_url(os.environ))
    import wandb

    from trainer.dashboard import make_workspace

    entity = wanted["entity"] or wandb.Api().default_entity
    if not entity:
        raise ValueError("the key has no entity of its own; name one with --entity")
    workspace = make_workspace(entity, wanted["project"], wanted["group"], wanted["ranks"])
    workspace.save()
    return str(workspace.url)


if __name__ == "__main__":
    main()

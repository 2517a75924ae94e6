"""The command line behind scripts/dashboard.py. Exit codes: 0 success; 1 not taken by W&B; 2 wrong input."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from trainer.config import LoggerConfig
from trainer.dashboard_push import NotSent, push
from trainer.errors import InputError
from trainer.files import write_atomically
from trainer.rank import tell
from trainer.secrets import Redactor
from trainer.two_hosts_cli import Parser
from trainer.wandb_account import base_url, has_key

MOST_RANKS = 256  # lines that a panel could still tell apart


def main(arguments: Sequence[str] | None = None) -> int:
    """Print, save or send the workspace as the command line says; returns the exit code."""
    try:
        options = _parser().parse_args(arguments)
        _check(options)
        if options.push:
            _check_account()
        _build(options)
    except InputError as error:
        tell(str(error))
        return 2
    except NotSent as error:
        tell(Redactor().text(f"W&B did not take the workspace ({error})"))
        return 1
    return 0


def _build(options: argparse.Namespace) -> None:
    try:
        from trainer.dashboard import make_workspace, workspace_spec
    except ImportError as error:
        raise InputError(
            f"wandb-workspaces is needed and cannot be imported ({error}); "
            "run pip install 'splitmeter[dashboard]'"
        ) from error
    wanted = (options.project, options.group, options.ranks)
    workspace = make_workspace(options.entity or "", *wanted)
    text = json.dumps(workspace_spec(workspace), indent=2, ensure_ascii=False) + "\n"
    if options.json is not None:
        try:
            write_atomically(options.json, text)
        except OSError as error:
            raise InputError(
                f"--json={options.json} cannot be written ({error.strerror}); name a file in a folder that "
                "this user can write"
            ) from error
        print(f"spec  {options.json}")
    elif not options.push:
        print(text, end="")
    if options.push:
        print(f"workspace  {push(options.entity, *wanted)}")


def _check(options: argparse.Namespace) -> None:
    for name in ("entity", "project", "group"):
        value = getattr(options, name)
        if value is not None and not (value.strip() and value.isprintable()):
            raise InputError(f"--{name}={value!r} is not a name; give the one that W&B shows")
    if options.ranks is not None and not 1 <= options.ranks <= MOST_RANKS:
        raise InputError(f"--ranks={options.ranks} is out of range; give 1 to {MOST_RANKS}")


def _check_account() -> None:
    if not has_key(os.environ):
        host = urlsplit(base_url(os.environ)).netloc
        raise InputError(
            f"--push needs a key for {host}, and there is none; set WANDB_API_KEY or run wandb login, or "
            "leave out --push for the spec alone"
        )


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="dashboard.py",
        description="The W&B workspace for runs and sweeps. Prints its spec, which needs neither account nor "
        "network; --push saves it as a new view of the project.",
    )
    parser.add_argument("--entity", help="user or team, as logger.entity; the key's own")
    parser.add_argument(
        "--project", default=LoggerConfig.project, help="as logger.project (%(default)s)", metavar="NAME"
    )
    parser.add_argument("--group", metavar="NAME", help="show only the runs of this group, such as a sweep's")
    parser.add_argument(
        "--ranks", type=int, metavar="N", help="name so many ranks' lines one by one instead of by a pattern"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="save the spec instead of printing it")
    parser.add_argument("--push", action="store_true", help="send it to W&B, with a key")
    return parser

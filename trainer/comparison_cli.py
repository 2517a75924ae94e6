"""The command line behind scripts/compare.py.

Exit codes: 0 success; 1 gradients differ or, with --check, a bar is missed; 2 wrong input; 128 + signal.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import NoReturn

from rich.console import Console

from trainer.comparison import ComparisonStopped, run_comparison
from trainer.comparison_report import failures, show, summarise, write
from trainer.contenders import FAMILIES, Request, Setting
from trainer.errors import InputError, Interrupted
from trainer.rank import tell

LOAD = 0.5  # above it, something else has been running
WIDTH = 110  # of a table that goes to a file


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; --help lists what there is")


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare as the command line says; returns the exit code."""
    # Also SIGINT: a shell that starts it in the background has Python ignore Ctrl-C.
    heard = {signum: signal.signal(signum, _interrupt) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        options = _parser().parse_args(arguments)
        request = _request(options)
        folder = _folder(options.run_dir)
        _warn(request)
        report = summarise(run_comparison(request), request, shlex.join(["python", *sys.argv]))
    except InputError as error:
        tell(str(error))
        return 2
    except ComparisonStopped as error:
        tell(str(error))
        return 1
    except Interrupted as error:
        return 128 + error.signum
    finally:
        for signum, handler in heard.items():
            signal.signal(signum, handler)
    write(report, folder)
    show(report, _console())
    print(f"run folder  {folder}")
    missed = failures(report) if options.check else []
    for sentence in missed:
        tell(sentence)
    return 1 if missed else 0


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=WIDTH)


def _parser() -> argparse.ArgumentParser:
    defaults = Request()
    settings = " and ".join(str(setting) for setting in defaults.settings)
    parser = _Parser(
        prog="compare.py",
        description="Time our splits beside torch's own: same model, batch, weights and optimizer, all alive "
        "in one process set and taken in turn, gradients checked equal first.",
    )
    parser.add_argument(
        "--setting",
        type=_setting,
        action="append",
        metavar="L,W,B,M",
        help=f"layers, width, global batch, microbatches of the pipelines; may be repeated ({settings})",
    )
    parser.add_argument(
        "--only",
        type=_families,
        default=FAMILIES,
        metavar="A,B",
        help=f"of {', '.join(FAMILIES)}; all if not given",
    )
    for name, least, meaning in (
        ("ranks", 2, "processes, one thread each"),
        ("rounds", 3, "turns of every contender"),
        ("warmup", 5, "steps before anything is timed: DDP rebuilds its buckets, pipelines vote"),
        ("burst", 1, "steps that a contender takes in its turn"),
        ("seed", 0, "of weights and batch"),
    ):
        default = getattr(defaults, name)
        parser.add_argument(
            f"--{name}", type=_whole(least), default=default, metavar="N", help=f"{meaning} ({default})"
        )
    parser.add_argument(
        "--schedule", choices=("1f1b", "gpipe"), default=defaults.schedule, help="of our pipeline (1f1b)"
    )
    parser.add_argument(
        "--check", action="store_true", help="exit 1 when a bar is missed or a step of ours allocates"
    )
    parser.add_argument(
        "--run-dir", metavar="FOLDER", help="for compare.json and compare.md (a new one under runs/)"
    )
    return parser


def _request(options: argparse.Namespace) -> Request:
    request = Request(
        settings=tuple(options.setting or Request.settings),
        families=options.only,
        ranks=options.ranks,
        rounds=options.rounds,
        warmup=options.warmup,
        burst=options.burst,
        schedule=options.schedule,
        seed=options.seed,
    )
    request.check()
    return request


def _setting(text: str) -> Setting:
    parts = text.split(",")
    if len(parts) != 4 or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(
            f"{text!r} must be four whole numbers above 0, layers,width,batch,microbatches, such as "
            "8,512,256,8"
        )
    return Setting(*(int(part) for part in parts))


def _families(text: str) -> tuple[str, ...]:
    names = text.split(",")
    for name in names:
        if name not in FAMILIES:
            raise argparse.ArgumentTypeError(f"{name!r} is unknown; valid are {', '.join(FAMILIES)}")
    return tuple(family for family in FAMILIES if family in names)


def _whole(least: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least {least}")
        return int(text)

    return read


def _warn(request: Request) -> None:
    """Say what will make the ratios scatter."""
    cores, load = os.cpu_count() or 1, os.getloadavg()[0]
    if request.ranks > cores:
        tell(f"--ranks={request.ranks} is more than the {cores} processors: times say little")
    if load > LOAD:
        tell(f"The load average is {load:.1f}: other work runs on this machine, and ratios will scatter")


def _folder(name: str | None) -> Path:
    """The run's folder, made before the measuring that it is for."""
    folder = Path(name or f"runs/{datetime.now():%Y-%m-%d/%H-%M-%S-%f}-compare").absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"--run-dir={folder} cannot be written ({error.strerror}); name a folder that this user can write"
        ) from error
    return folder


def _interrupt(signum: int, frame: object) -> None:
    raise Interrupted(signum)

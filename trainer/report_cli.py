"""The command line behind scripts/report.py. Exit codes: 0 success; 2 wrong input."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trainer.errors import InputError
from trainer.rank import tell
from trainer.report import check_folder
from trainer.report_compare import write_comparison
from trainer.report_page import NAME, write_report
from trainer.two_hosts_cli import Parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the report as the command line says; returns the exit code."""
    parser = Parser(
        prog="report.py",
        description=f"Rebuild {NAME} of a run from its folder: verdict, timeline, bytes, time split, link "
        "curve, step times. With two runs, a page that compares them.",
    )
    parser.add_argument("run", metavar="RUN", type=Path, help=f"the run's folder, which takes {NAME}")
    parser.add_argument("other", metavar="OTHER", type=Path, nargs="?", help="a run to set beside it")
    try:
        options = parser.parse_args(arguments)
        for name, folder in (("RUN", options.run), ("OTHER", options.other)):
            if folder is not None:
                check_folder(folder, name)
        path = _write(options.run, options.other)
    except InputError as error:
        tell(str(error))
        return 2
    print(f"report  {path}")
    return 0


def _write(run: Path, other: Path | None) -> Path:
    try:
        return write_report(run) if other is None else write_comparison(run, other)
    except OSError as error:
        raise InputError(
            f"RUN={run} cannot be written ({error.strerror}); name a folder that this user can write"
        ) from error

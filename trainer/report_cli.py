"""The command line behind scripts/report.py. Exit codes: 0 success; 2 wrong input."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from trainer.errors import InputError
from trainer.rank import tell
from trainer.report import check_folder
from trainer.report_compare import write_comparison
from trainer.report_page import NAME, write_report
from trainer.sweep_files import SWEEP_FILE
from trainer.sweep_report import print_table, write_sweep_report
from trainer.two_hosts_cli import Parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the report as the command line says; returns the exit code."""
    parser = Parser(
        prog="report.py",
        description=f"Rebuild {NAME} of a run from its folder: verdict, timeline, bytes, time split, link "
        "curve, step times. With two runs, a page that compares them. Of a sweep's folder, also while it "
        "runs: its table, the best plan first, on the terminal and as table.json and table.csv.",
    )
    parser.add_argument(
        "run", metavar="RUN", type=Path, help=f"the folder of a run or sweep, which takes {NAME}"
    )
    parser.add_argument("other", metavar="OTHER", type=Path, nargs="?", help="a run to set beside it")
    try:
        options = parser.parse_args(arguments)
        if is_sweep(options.run):
            refuse_other(options.run, options.other)
            path = _written(options.run, lambda: write_sweep_report(options.run))
            print_table(options.run)
        else:
            for name, folder in (("RUN", options.run), ("OTHER", options.other)):
                if folder is not None:
                    check_run(folder, name)
            path = _written(options.run, lambda: _write(options.run, options.other))
    except InputError as error:
        tell(str(error))
        return 2
    print(f"report  {path}")
    return 0


def is_sweep(folder: Path) -> bool:
    return (folder / SWEEP_FILE).is_file()


def refuse_other(folder: Path, other: Path | None) -> None:
    """
    Raises:
        InputError: a second folder is given.
    """
    if other is not None:
        raise InputError(
            f"OTHER={other} cannot be set beside RUN={folder}, which is a sweep; name the folders of two runs"
        )


def check_run(folder: Path, name: str) -> None:
    """
    Raises:
        InputError: it is no folder of a run; a sweep's is told from others.
    """
    if is_sweep(folder):
        raise InputError(f"{name}={folder} is a sweep; name the folder of one of its jobs")
    if (folder / "multirun.yaml").is_file() and not (folder / "metrics.jsonl").is_file():
        raise InputError(
            f"{name}={folder} is a multirun without {SWEEP_FILE}, which scripts/train.py -m writes; name the "
            "folder of one of its jobs"
        )
    check_folder(folder, name)


def _write(run: Path, other: Path | None) -> Path:
    return write_report(run) if other is None else write_comparison(run, other)


def _written(folder: Path, write: Callable[[], Path]) -> Path:
    try:
        return write()
    except OSError as error:
        raise InputError(
            f"RUN={folder} cannot be written ({error.strerror}); name a folder that this user can write"
        ) from error

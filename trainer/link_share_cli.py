"""The command line behind scripts/link_share.py.

Exit codes: 0 success; 1 the ranks failed, a result is wrong or, with --check, a bar is missed; 2 wrong input;
128 + signal.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from trainer.errors import InputError, Interrupted, Stopped
from trainer.files import write_atomically
from trainer.link_share import Request, failures, make_report
from trainer.rank import tell
from trainer.sizes import read_size
from trainer.two_hosts import Shape, TwoHosts, check_system
from trainer.two_hosts_cli import Parser, add_shape, interruptible

Row = dict[str, Any]

WIDTH = 110  # of a table that goes to a file
LOAD = 3.0  # above it, shares and ratios say more about turns on the processors than about the link


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure as the command line says; returns the exit code."""
    try:
        options = _parser().parse_args(arguments)
        request, shape = _request(options), Shape(options.rate, options.burst)
        shape.check()
        check_system("iperf3")
        with interruptible():
            report = run(request, shape)
    except InputError as error:
        tell(str(error))
        return 2
    except Stopped as error:
        tell(str(error))
        return 1
    except Interrupted as error:
        return 128 + error.signum
    if options.json is not None:
        write_atomically(Path(options.json), json.dumps(report, indent=1) + "\n")
    show(report)
    missed = failures(report)
    if not options.check:
        missed = [sentence for sentence in missed if "wrong" in sentence]
    for sentence in missed:
        tell(sentence)
    return 1 if missed else 0


def run(request: Request, shape: Shape) -> Row:
    """The report of a measurement on two hosts that are made for it.

    Raises:
        InputError: this machine does not let namespaces be made.
        Stopped: the ranks failed.
    """
    with tempfile.TemporaryDirectory(prefix="splitmeter-") as folder, TwoHosts(shape) as hosts:
        output = Path(folder, "measured.json")
        hosts.start(1, ["iperf3", "--server"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        command = [sys.executable, "-m", "trainer.link_share_rank", "{rank}", "{address}", "{port}"]
        code = hosts.run([*command, json.dumps(asdict(request)), str(output)])
        if code:
            raise Stopped(f"The ranks on the two hosts ended with exit code {code}")
        measured = json.loads(output.read_text(encoding="utf-8"))
    return make_report(measured, request, shape.rate, shape.burst)


def show(report: Row) -> None:
    """The tables, for a person."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    request = report["request"]
    table = Table(
        title=f"{request['total_bytes']:,} bytes each way over {report['rate']}, burst {report['burst']}"
    )
    headings = ("operation", "algorithm", "message B", "time s", "GB/s per direction", "iperf3 GB/s", "share")
    for number, heading in enumerate((*headings, "#wrong")):
        table.add_column(heading, justify="left" if number < 2 else "right", no_wrap=True)
    for row in report["operations"]:
        table.add_row(
            row["operation"],
            row["algorithm"],
            f"{row['message_bytes']:,}",
            f"{row['time_s']:.3f}",
            f"{row['GBps']:.4f}",
            f"{row['iperf3_GBps']:.4f}",
            f"{row['share']:.3f}",
            str(row["wrong"]),
        )
    console.print(table)
    if report["ratios"]:
        table = Table(title=f"Ours over gloo's own, shards of {request['shard_bytes']:,} bytes")
        for number, heading in enumerate(("operation", "ours ms", "gloo ms", "ratio", "95 %", "at most")):
            table.add_column(heading, justify="left" if number == 0 else "right", no_wrap=True)
        for row in report["ratios"]:
            table.add_row(
                row["operation"],
                f"{row['ours_s'] * 1e3:.1f}",
                f"{row['native_s'] * 1e3:.1f}",
                f"{row['ratio']:.3f}",
                f"{row['ratio_low']:.3f} to {row['ratio_high']:.3f}",
                f"{row['most_ratio']}",
            )
        console.print(table)
    if report["load_average"] > LOAD:
        console.print(f"The load average is {report['load_average']:.1f}: shares and ratios will scatter")


def _request(options: argparse.Namespace) -> Request:
    sizes = {}
    for name in ("message", "total", "shard"):
        sizes[f"{name}_bytes"] = read_size(getattr(options, name), f"--{name}")
        if sizes[f"{name}_bytes"] < 8 or sizes[f"{name}_bytes"] % 8:
            raise InputError(f"--{name}={getattr(options, name)} must be a multiple of 8 bytes, such as 4MB")
    counts = {}
    for name, least in (("turns", 1), ("in_flight", 1), ("rounds", 0)):
        text = getattr(options, name)
        if not text.isdecimal() or int(text) < least:
            raise InputError(f"--{name.replace('_', '-')}={text} must be a whole number of at least {least}")
        counts[name] = int(text)
    return Request(**sizes, **counts)


def _parser() -> argparse.ArgumentParser:
    defaults = Request()
    parser = Parser(
        prog="link_share.py",
        description="What each collective uses of a link of known speed between two hosts in network "
        "namespaces, beside what iperf3 reads on it in the same run, and beside gloo's own.",
    )
    add_shape(parser)
    for name, default, meaning in (
        ("message", "4MiB", "what a rank sends in one call"),
        ("total", "64MB", "what a rank sends back to back"),
        ("turns", str(defaults.turns), "of iperf3 and each operation; the median counts"),
        ("in-flight", str(defaults.in_flight), "calls that are under way at once"),
        ("shard", "16MB", "a rank's block in the comparison with gloo's own"),
        ("rounds", str(defaults.rounds), "of that comparison; 0 leaves it out"),
    ):
        parser.add_argument(f"--{name}", default=default, metavar="N", help=f"{meaning} ({default})")
    parser.add_argument("--json", metavar="FILE", help="also write the report there")
    parser.add_argument("--check", action="store_true", help="exit 1 when a bar is missed")
    return parser

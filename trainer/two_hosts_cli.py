"""The command line behind scripts/two_hosts.py.

Exit codes: that of the command that failed first; 2 wrong input; 128 + signal.
"""

from __future__ import annotations

import argparse
import shutil
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

from trainer.errors import InputError, Interrupted
from trainer.rank import tell
from trainer.two_hosts import BURST, RATE, SIGNALS, Shape, TwoHosts, check_system


class Parser(argparse.ArgumentParser):
    """Refuses in one sentence."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; --help lists what there is")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command on two hosts as the command line says; returns the exit code."""
    try:
        options = _parser().parse_args(arguments)
        shape, command = Shape(options.rate, options.burst), options.command
        shape.check()
        if not command:
            raise InputError("No command is given; put -- and then what both hosts shall run at the end")
        check_system()
        if shutil.which(command[0]) is None:
            raise InputError(f"{command[0]} is not a program that can be found; give its path")
        with interruptible(), TwoHosts(shape) as hosts:
            return hosts.run(command)
    except InputError as error:
        tell(str(error))
        return 2
    except Interrupted as error:
        return 128 + error.signum


@contextmanager
def interruptible() -> Iterator[None]:
    """The first signal raises Interrupted, so that all is torn down; later ones must not disturb that."""

    def interrupt(signum: int, frame: object) -> None:
        for each in SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        raise Interrupted(signum)

    old = {signum: signal.signal(signum, interrupt) for signum in SIGNALS}
    try:
        yield
    finally:
        for signum, handler in old.items():
            signal.signal(signum, handler)


def add_shape(parser: argparse.ArgumentParser) -> None:
    """Options for the link."""
    parser.add_argument("--rate", default=RATE, help=f"of each direction, as tc writes it ({RATE})")
    parser.add_argument(
        "--burst", default=BURST, help=f"bytes that may leave at once, as tc writes them ({BURST})"
    )


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="two_hosts.py",
        usage="%(prog)s [--rate RATE] [--burst BURST] -- COMMAND ...",
        description="Run a command on two hosts in network namespaces, joined by a link of known speed. "
        "{rank}, {address}, {port} and {device} in it become 0 or 1, the address of host 0, a port, and the "
        "network device; GLOO_SOCKET_IFNAME is set.",
        epilog="two_hosts.py --rate 1gbit -- torchrun --nnodes 2 --node-rank {rank} --master-addr {address} "
        "--master-port {port} --nproc-per-node 1 scripts/train.py strategy=ddp",
    )
    add_shape(parser)
    parser.add_argument("command", nargs="*", metavar="COMMAND", help="what both hosts run")
    return parser

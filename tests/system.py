"""What a test needs of the machine: without it the test is skipped, or fails where nothing may be skipped."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import NoReturn

import pytest

from trainer.errors import InputError
from trainer.two_hosts import TwoHosts, check_system

STATM = Path("/proc/self/statm")
needs_resident_bytes = pytest.mark.skipif(not STATM.exists(), reason="resident memory is read from /proc")


def resident_bytes() -> int:
    """Physical memory of this process."""
    return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def need_two_hosts(*programs: str) -> None:
    """Skip unless network namespaces can be made here and `programs` are installed.

    With SPLITMETER_REQUIRE_SYSTEM=1, as in CI, fail instead.
    """
    try:
        check_system(*programs)
        with TwoHosts():
            pass
    except InputError as error:
        leave_out(str(error))


def need_program(name: str) -> None:
    """Skip, or in CI fail, unless a program of that name is installed."""
    if shutil.which(name) is None:
        leave_out(f"{name} is not installed; install the package that has it")


def leave_out(sentence: str) -> NoReturn:
    """Skip the test, or in CI fail it, with the reason."""
    if os.environ.get("SPLITMETER_REQUIRE_SYSTEM") == "1":
        pytest.fail(sentence)
    pytest.skip(sentence)

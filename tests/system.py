"""What a test needs of the machine: without it the test is skipped, or fails where nothing may be skipped."""

from __future__ import annotations

import os

import pytest

from trainer.errors import InputError
from trainer.two_hosts import TwoHosts, check_system


def need_two_hosts(*programs: str) -> None:
    """Skip unless network namespaces can be made here and `programs` are installed.

    With SPLITMETER_REQUIRE_SYSTEM=1, as in CI, fail instead.
    """
    try:
        check_system(*programs)
        with TwoHosts():
            pass
    except InputError as error:
        if os.environ.get("SPLITMETER_REQUIRE_SYSTEM") == "1":
            pytest.fail(str(error))
        pytest.skip(str(error))

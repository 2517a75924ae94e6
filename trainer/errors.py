"""What a run may end in besides success, and how wrong input is put into words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.secrets import REMOVED, is_secret_name, redact

LONGEST_VALUE = 60


class InputError(ValueError):
    """Wrong input: one sentence with the key, the value and what would be right. Exit code 2."""


class Stopped(RuntimeError):
    """A job cannot go on, or has not shown what was asked of it: one sentence, on any rank. Exit code 1."""


class TrainingStopped(Stopped):
    """Training cannot go on: the sentence names step and rank."""


class Interrupted(KeyboardInterrupt):
    """SIGINT or SIGTERM ended the run, and with it, as a KeyboardInterrupt, a whole sweep.

    Exit code 128 + `signum`.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


def exit_code_of(error: BaseException) -> int:
    """2 for wrong input, 1 for any other failure."""
    return 2 if isinstance(error, InputError) else 1


def shown(key: str, value: Any) -> str:
    """`key=value` for a sentence: as typed, cut to a readable length, hidden under a secret-like key."""
    if is_secret_name(key):
        return f"{key}={REMOVED}"
    value = redact({key: value})[key]
    if value is None:
        text = "null"
    elif isinstance(value, bool):
        text = str(value).lower()
    elif isinstance(value, Mapping | list):
        text = str(value)
    else:
        # Quotes show that a value is text, or that there is nothing in it.
        text = repr(value) if isinstance(value, str) and value != " ".join(value.split()) else str(value)
        text = text or "''"
    return f"{key}={text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 3] + '...'}"

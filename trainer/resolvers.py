"""Arithmetic that configuration files may use, besides Hydra's own resolvers."""

from __future__ import annotations

import math

from omegaconf import OmegaConf

from trainer.errors import InputError


def register_resolvers() -> None:
    """Make `${times:a,b,...}` known: the product of whole numbers.

    What it refuses is an InputError, to which `trainer.refusals` adds the key.
    """
    OmegaConf.register_new_resolver("times", _times, replace=True)


def _times(*factors: object) -> int:
    for factor in factors:
        if not isinstance(factor, int) or isinstance(factor, bool):
            own = f"${{times:{','.join(map(_as_written, factors))}}}"
            wrong = _as_written(factor)
            raise InputError(f"{own} multiplies whole numbers, and {wrong} is none; set what it refers to")
    return math.prod(factors)  # type: ignore[arg-type]


def _as_written(value: object) -> str:
    """As YAML has it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)

"""Arithmetic that configuration files may use, besides Hydra's own resolvers."""

from __future__ import annotations

import math

from omegaconf import OmegaConf


def register_resolvers() -> None:
    """Make `${times:a,b,...}` known: the product of whole numbers."""
    OmegaConf.register_new_resolver("times", _times, replace=True)


def _times(*factors: object) -> int:
    if not all(isinstance(factor, int) for factor in factors):
        text = ",".join(str(factor) for factor in factors)
        raise ValueError(f"times:{text} multiplies whole numbers; set those that it refers to")
    return math.prod(factors)  # type: ignore[arg-type]

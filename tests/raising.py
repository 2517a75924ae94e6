"""A plug-in model that fails on the second rank: plugins=[tests.raising] model.name=raising."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from models.block import Model
from tests.sleeping import sleeping


def raising(input_shape: tuple[int, ...], output_dim: int, options: Mapping[str, Any]) -> Model:
    if os.environ.get("RANK") == "1":
        raise RuntimeError("boom")
    return sleeping(input_shape, output_dim, options)


MODELS = {"raising": raising}

"""What Hydra composes from conf/, as plain data."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

from trainer.resolvers import register_resolvers

CONF = Path(__file__).parents[1] / "conf"

register_resolvers()


@functools.cache
def composed(*overrides: str, root: str = "config") -> dict[str, Any]:
    with initialize_config_module("conf", version_base="1.3"):
        mapping = OmegaConf.to_container(compose(root, list(overrides)), resolve=True)
    assert isinstance(mapping, dict)
    return {str(key): value for key, value in mapping.items()}

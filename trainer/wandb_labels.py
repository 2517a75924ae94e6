"""Under what names a job's run is found in W&B: group, job type, tags, and the config keys to filter by."""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

SWEEP_JOB = "sweep-job"
LONGEST_NAME = 128  # that W&B takes for a group
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}")


def group_name(sweep_dir: Path) -> str:
    """The group of a sweep's runs: its folder's name, and the date where the folder above is one.

    `runs/2026-11-30/10-00-00-123456-sweep` gives `2026-11-30_10-00-00-123456-sweep`.
    """
    folder = sweep_dir.absolute()
    date = f"{folder.parent.name}_" if _DATE.fullmatch(folder.parent.name) else ""
    return f"{date}{folder.name}"[:LONGEST_NAME]


def label_sweep_job(mapping: Mapping[str, Any], sweep_dir: Path) -> None:
    """Fill the `logger` section's group and job type where they are null, for a job of this sweep."""
    logger = mapping.get("logger")
    if isinstance(logger, MutableMapping):
        for key, value in (("group", group_name(sweep_dir)), ("job_type", SWEEP_JOB)):
            if logger.get(key) is None:
                logger[key] = value


def wandb_config(config: Mapping[str, Any], environment: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """What W&B gets as a run's config: that of config.yaml, with the keys one filters by at its top.

    `config` is a job's in plain form. `strategy` and `world_size` become the strategy's name and the number
    of ranks that run; the strategy's own section is `strategy_options`. What says nothing about the run is
    null: a schedule outside pipelines, sizes of a model that is not made from them. The folder is left out:
    its path may hold the user's name. The `logger` section
    gets the job type `kind` and, for training, a name where it has none, and tags for strategy and world
    size before the user's.
    """
    world_size = environment.get("world_size", config.get("world_size"))
    logger = dict(config["logger"])
    keys = {"world_size": world_size}
    if isinstance(config.get("strategy"), Mapping):
        keys |= _plan_keys(config)
        logger["run_name"] = logger.get("run_name") or _run_name(config["model"]["name"], keys)
    tags = [keys.get("strategy"), None if world_size is None else f"world_size={world_size}"]
    logger["tags"] = list(dict.fromkeys([*filter(None, tags), *(logger.get("tags") or ())]))
    logger["job_type"] = logger.get("job_type") or kind
    sections = {key: value for key, value in config.items() if key != "run_dir"}
    return {**sections, **keys, "logger": logger, "environment": environment}


def _plan_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    strategy, model = config["strategy"], config["model"]
    widths = model["widths"]
    by_sizes = model["name"] == "mlp"
    pipeline = strategy["name"] == "pipeline"
    naive = pipeline and strategy["schedule"] == "naive"  # which runs one microbatch, whatever is set
    return {
        "strategy": strategy["name"],
        "strategy_options": strategy,
        "microbatches": 1 if naive else strategy["microbatches"],
        "schedule": strategy["schedule"] if pipeline else None,
        "batch_size": config["data"]["batch_size"],
        "num_layers": (model["num_layers"] if widths is None else len(widths) + 1) if by_sizes else None,
        "hidden_dim": model["hidden_dim"] if by_sizes and widths is None else None,
    }


def _run_name(model: str, keys: Mapping[str, Any]) -> str:
    """Such as `pipeline mlp-4x128 world_size=2 microbatches=4`."""
    sizes = "" if keys["hidden_dim"] is None else f"-{keys['num_layers']}x{keys['hidden_dim']}"
    ranks = f"world_size={keys['world_size']}"
    return f"{keys['strategy']} {model}{sizes} {ranks} microbatches={keys['microbatches']}"

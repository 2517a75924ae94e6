"""Code that a configuration names to Hydra, which would import and call it: callbacks, launchers, loggers.

A guard against a file from somewhere else, not a sandbox: whoever chooses modules in `plugins`, or sets
PYTHONPATH, runs code anyway. Composed once more for it only where a file of the user's, or a key of Hydra's,
takes part. Not seen: the loggers that one of several swept files sets for its own jobs.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainer.errors import InputError

# A class and not what its module has imported: Hydra would also find ...submitit_launcher.os.system.
_PLUG_IN = re.compile(r"(hydra\._internal\.core_plugins|hydra_plugins)(\.[a-z_][a-z0-9_]*)+\.[A-Z]\w*")
_LOGGING = re.compile(r"logging(\.handlers)?\.[A-Z]\w*|colorlog\.[A-Z]\w*")
_STREAM = re.compile(r"ext://sys\.(stdout|stderr)")
_HARMLESS = re.compile(r"hydra\.(run|sweep|job|mode|verbose|output_subdir)(\..*)?")
_FILES = ("experiment", "debug")
_TARGET = "_target_"
_LOGGING_NAMES = ("class", "()", "queue", "listener")  # logging.config.dictConfig imports what they say
_DEEPEST = 20


def may_name_code(flags: argparse.Namespace, overrides: Sequence[str]) -> bool:
    """Whether the command line sets keys of Hydra's or chooses a file that may, and something is to run."""
    if flags.cfg or flags.info or flags.shell_completion:  # which import nothing that is named
        return False
    if flags.config_dir or flags.config_name or flags.config_path:
        return True
    keys = [override.partition("=")[0].strip("+~ ") for override in overrides]
    return any(
        key.partition("@")[0] in _FILES or ("hydra" in key and not _HARMLESS.fullmatch(key)) for key in keys
    )


def refuse_named_code(composed: DictConfig) -> None:
    """Let nothing through that Hydra would import and call, but plug-ins for it and Python's own loggers.

    Raises:
        InputError: the key that names code.
    """
    hydra = composed.hydra
    for key in OmegaConf.select(hydra, "callbacks") or {}:
        raise _refusal(f"hydra.callbacks.{key}")
    for section in ("launcher", "sweeper"):
        for key, name, value in _leaves(hydra.get(section), f"hydra.{section}"):
            if name == _TARGET and not _PLUG_IN.fullmatch(str(value)):
                raise _refusal(key)
    for section in ("hydra_logging", "job_logging"):
        for key, name, value in _leaves(hydra.get(section), f"hydra.{section}"):
            if name in _LOGGING_NAMES and not _LOGGING.fullmatch(str(value)):
                raise _refusal(key)
            if str(value).startswith("ext://") and not _STREAM.fullmatch(str(value)):
                raise _refusal(key)


def _refusal(key: str) -> InputError:
    return InputError(f"{key} names code to run; choose a plug-in by its name, as in hydra/launcher=slurm")


def _leaves(node: Any, at: str, depth: int = 0) -> Iterator[tuple[str, str, Any]]:
    """(dotted key, last part of it, value) of all that is no section; what cannot be resolved yet is None."""
    if isinstance(node, DictConfig):
        names = [str(name) for name in node]
    elif isinstance(node, ListConfig):
        names = [str(place) for place in range(len(node))]
    else:
        return
    if depth > _DEEPEST:
        raise _refusal(at)
    for name in names:
        key = f"{at}.{name}"
        try:
            value = node[name] if isinstance(node, DictConfig) else node[int(name)]
        except OmegaConfBaseException:
            value = None
        if isinstance(value, DictConfig | ListConfig):
            yield from _leaves(value, key, depth + 1)
        else:
            yield key, name, value

"""What Hydra has composed, as plain data; and its traces in files and logs, without secrets."""

from __future__ import annotations

import dataclasses
import logging
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

import yaml
from omegaconf import DictConfig, OmegaConf

from trainer.errors import InputError
from trainer.files import write_atomically
from trainer.job import JobConfig
from trainer.refusals import hide, sentence_of
from trainer.secrets import Redactor

_log = logging.getLogger(__name__)

# libyaml's, where PyYAML was built with it: ten times as fast, for every job of a sweep.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


def plain_config(composed: DictConfig, overrides: Sequence[str], job: type[JobConfig]) -> dict[str, Any]:
    """The composed configuration as plain data, every interpolation resolved.

    Raises:
        InputError: a group without a choice or with several, a missing value, or an interpolation that
            leads nowhere.
    """
    groups = [name for name, hint in get_type_hints(job).items() if dataclasses.is_dataclass(hint)]
    for override in overrides:
        group, _, choice = override.partition("=")
        if group in groups and choice.startswith("["):
            raise InputError(
                f"{override} is a list, and {group} takes one choice; for a sweep use -m and commas"
            )
    try:
        mapping = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except Exception as error:
        sentence = sentence_of(error, overrides, job)
        if sentence is None:
            raise
        raise InputError(sentence) from None
    assert isinstance(mapping, dict)
    for name in groups:
        if mapping.get(name) is None:
            raise InputError(f"{name}=null leaves nothing to run; choose one that --help lists under {name}")
    return {str(key): value for key, value in mapping.items()}


def clean_sweep_file(folder: Path, mapping: Mapping[str, Any], overrides: Sequence[str]) -> None:
    """Take secrets out of what Hydra's sweeper has written about the sweep.

    Jobs that run at the same time all do it. What goes wrong costs a warning, and no job.
    """
    path = folder / "multirun.yaml"
    redactor = Redactor(mapping)
    try:
        before = path.read_text(encoding="utf-8")
        text = hide(redactor.text(before), overrides)
        read = yaml.load(text, Loader=_LOADER) or {}  # noqa: S506  # it is a safe one
        cleaned = yaml.dump(redactor.mapping(read), Dumper=_DUMPER, sort_keys=False)
        if cleaned != before:
            write_atomically(path, cleaned)
    except FileNotFoundError:
        return
    except Exception as error:
        _log.warning("%s is not searched for secrets (%s: %s)", path, type(error).__name__, error)


def traceback_of(error: BaseException) -> str:
    return "".join(traceback.format_exception(error)).rstrip("\n")

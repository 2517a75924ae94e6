"""What Hydra and OmegaConf raise while they compose a configuration, in one sentence each."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import get_type_hints

import yaml
from hydra.errors import (
    ConfigCompositionException,
    HydraException,
    MissingConfigException,
    OverrideParseException,
)
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from trainer.job import JobConfig
from trainer.reading import unknown_key
from trainer.secrets import REMOVED, is_secret_name

_OVERRIDE = re.compile(r"[+~]*([\w./@\[\]-]+)=(.*)", re.DOTALL)
_BY_RESOLVER = "InputError raised while resolving interpolation: "  # OmegaConf's words before those of ours

# Says where a value is, or is none that could be a secret.
_NO_SECRET = re.compile(
    r"[\"']?(\$\{[^}]*\}|[\d.]+|null|true|false)[\"']?"
)  # says where a value is, or holds none


def sentence_of(error: BaseException, overrides: Sequence[str], job: type[JobConfig]) -> str | None:
    """The sentence for an error of composition or of the output folder; None for any other error.

    `overrides` are the command line's; values that they give to secret-like keys are left out. `job` is
    the kind of configuration that was composed, whose keys a misspelt one is compared with.
    """
    words = _words(error, job)
    return None if words is None else hide(" ".join(words.split()), overrides)


def hide(text: str, overrides: Sequence[str]) -> str:
    """`text` without the values that `overrides` give to keys with secret-like names."""
    for override in overrides:
        match = _OVERRIDE.fullmatch(override)
        if match and is_secret_name(match[1]) and match[2] and not _NO_SECRET.fullmatch(match[2]):
            text = text.replace(override, override[: match.start(2)] + REMOVED)
            if len(match[2]) > 3:  # shorter ones would be found in unrelated words
                text = text.replace(match[2], REMOVED)
    return text


def _words(error: BaseException, job: type[JobConfig]) -> str | None:
    if isinstance(error, MissingConfigException):
        return _missing_option(error)
    if isinstance(error, OverrideParseException):
        return (
            f"the override {error.override!r} cannot be read; write section.key=value, "
            f"with quotes around a value that has special characters"
        )
    if isinstance(error, ConfigCompositionException):
        return _composition(error, job)
    if isinstance(error, OmegaConfBaseException):
        return _omegaconf(error)
    if isinstance(error, HydraException):
        return _joined(error)
    if str(error).startswith("Config group override must be"):
        return (
            "a group was given no choice (GROUP=null); leave it out, or name one of those that --help lists"
        )
    if isinstance(error, UserWarning):
        path = re.search(r"path=(.*) is not available", str(error))
        return (
            f"hydra.searchpath: {path[1] if path else error} does not exist; name a folder as file:///FOLDER"
        )
    if isinstance(error, yaml.YAMLError):
        return f"a configuration file cannot be read: {_joined(error)}"
    folder_error = _os_error(error)
    if folder_error is not None:
        return (
            f"hydra.run.dir: {folder_error.filename} cannot be written ({folder_error.strerror}); "
            f"name a folder that this user can write"
        )
    return None


def _missing_option(error: MissingConfigException) -> str:
    group, _, option = (error.missing_cfg_file or "").rpartition("/")
    if group == "hydra/launcher" and option.startswith("submitit_"):
        return f"{group}={option} comes with a plug-in that is not installed; pip install 'splitmeter[slurm]'"
    if group and error.options:
        return f"{group}={option} does not exist; the valid ones are {', '.join(sorted(error.options))}"
    return f"there is no configuration {error.missing_cfg_file}; {_joined(error)}"


def _composition(error: ConfigCompositionException, job: type[JobConfig]) -> str:
    text = str(error)
    if match := re.match(r"Could not override '([^']+)'", text):
        key, known = match[1], _keys(job)
        if key in known:
            section = key.partition(".")[0]
            return f"{key} is not a key of the {section} that was chosen; --cfg job prints the keys there are"
        return unknown_key(key, known)
    if match := re.match(r"Ambiguous value for argument '([^']+)'", text):
        return f"{match[1]} holds several values; add -m for a sweep, or write a list as key=[1,2]"
    if match := re.match(r"Multiple values for (\S+)\. To override", text):
        return f"{match[1]} has a choice already; leave out the + before it"
    if match := re.match(r"Could not append to config\. An item is already at '([^']+)'", text):
        return f"{match[1]} is a key already; leave out the + before it"
    if isinstance(error.__cause__, OmegaConfBaseException):
        return f"{_joined(error)}: {_omegaconf(error.__cause__)}"
    return _joined(error)


def _omegaconf(error: OmegaConfBaseException) -> str:
    if isinstance(error, MissingMandatoryValue):
        return f"{error.full_key}=??? must be given a value"
    reason = str(error).splitlines()[0]
    if reason.startswith(_BY_RESOLVER):
        return f"{error.full_key}={reason.removeprefix(_BY_RESOLVER)}"
    return f"{error.full_key}: {reason}" if error.full_key and error.full_key not in reason else reason


def _joined(error: BaseException) -> str:
    return "; ".join(line.strip() for line in str(error).splitlines() if line.strip())


def _os_error(error: BaseException | None) -> OSError | None:
    """The OSError about a file behind `error`; logging's set-up wraps it in a ValueError."""
    while error is not None:
        if isinstance(error, OSError) and error.filename is not None:
            return error
        error = error.__cause__
    return None


def _keys(kind: type, prefix: str = "", depth: int = 2) -> list[str]:
    """Dotted keys of a dataclass of dataclasses, the folder left out."""
    keys = []
    hints = get_type_hints(kind)
    for name in (field.name for field in dataclasses.fields(kind) if field.name != "run_dir"):  # type: ignore[arg-type]
        hint = hints[name]
        keys.append(prefix + name)
        if depth > 1 and isinstance(hint, type) and dataclasses.is_dataclass(hint):
            keys += _keys(hint, f"{prefix}{name}.", depth - 1)
    return keys

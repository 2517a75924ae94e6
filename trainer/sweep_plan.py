"""What a sweep is before any of its jobs runs: its folder, the keys that take several values, its settings.

Composed here once more than Hydra does, since the folder must be known, and refused or found again, before
Hydra makes it.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import setup_globals
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from trainer.config import SweepConfig
from trainer.job import JobConfig
from trainer.named_code import refuse_named_code
from trainer.reading import read_section
from trainer.refusals import hide
from trainer.secrets import Redactor

MULTIRUN = re.compile(r"\+*hydra\.mode=.*MULTIRUN.*", re.IGNORECASE)
_RESUME = re.compile(r"\+*sweep\.resume=.*")
_HYDRAS_OWN_SUBDIR = "${hydra.job.num}"
_LONGEST_NAME = 120  # characters, all ASCII; file systems take 255 bytes


@dataclass(frozen=True)
class SweepPlan:
    """One try of a sweep, in plain data that a remote launcher can carry.

    `count` is the number of jobs where it is known beforehand. `is_explicit` says that the folder was named,
    not made from the time. `root` and `depth`: sweeps of the same command stand `depth` levels below `root`.
    `runs_here`: by Hydra's basic launcher, all jobs in the process that starts the sweep.
    """

    folder: Path
    overrides: tuple[str, ...]  # as given, secrets hidden, without sweep.resume
    swept: tuple[str, ...]
    count: int | None
    settings: SweepConfig
    is_explicit: bool
    root: Path
    depth: int
    names_jobs: bool  # the job folders' names are ours, not the user's hydra.sweep.subdir
    begun_at: float
    pid: int
    can_resume: bool = True
    runs_here: bool = True


def asks_for_sweep(flags: argparse.Namespace, overrides: Sequence[str]) -> bool:
    """Whether the command line itself says that it is a sweep."""
    if flags.cfg or flags.help or flags.info or flags.hydra_help or flags.shell_completion:
        return False
    return bool(flags.multirun) or any(MULTIRUN.fullmatch(override) for override in overrides)


def may_be_sweep(flags: argparse.Namespace, overrides: Sequence[str]) -> bool:
    """Whether a file that the command line chooses may say that it is a sweep, with hydra.mode."""
    if flags.cfg or flags.help or flags.info or flags.hydra_help or flags.shell_completion:
        return False
    places = ("experiment=", "+experiment=", "debug=", "hydra.searchpath=")
    return bool(flags.config_dir or flags.config_name or flags.config_path) or any(
        override.startswith(places) for override in overrides
    )


def plan_sweep(
    job: type[JobConfig], conf: str, flags: argparse.Namespace, begun_at: float
) -> SweepPlan | None:
    """The sweep that the command line asks for; None where it turns out to be a single run.

    Raises:
        InputError: a setting of the section sweep that is not right, or code named to Hydra.
        Exception: whatever Hydra raises where it cannot compose.
    """
    config, loader = compose(job, conf, flags)
    if not flags.multirun and config.hydra.mode != RunMode.MULTIRUN:
        return None
    before, HydraConfig.instance().cfg = HydraConfig.instance().cfg, None
    try:
        HydraConfig.instance().set_config(config)
        folder = Path(os.path.abspath(str(config.hydra.sweep.dir)))
    finally:
        HydraConfig.instance().cfg = before
    section = OmegaConf.to_container(config.sweep, resolve=True) if "sweep" in config else {}
    settings = read_section(SweepConfig, section, "sweep")
    raw = cast("dict[str, Any]", OmegaConf.to_container(config.hydra.sweep, resolve=False))
    named, depth, root = _place(str(raw["dir"]), folder)
    swept, count = _swept(config, loader)
    redactor = Redactor()
    given = [redactor.text(hide(own, flags.overrides)) for own in flags.overrides if not _RESUME.match(own)]
    return SweepPlan(
        folder=folder,
        overrides=tuple(given),
        swept=swept,
        count=count,
        settings=settings,
        is_explicit=named,
        root=root,
        depth=depth,
        names_jobs=raw["subdir"] == _HYDRAS_OWN_SUBDIR,
        begun_at=begun_at,
        pid=os.getpid(),
        can_resume="sweep" in config,
        runs_here=config.hydra.runtime.choices.get("hydra/launcher") == "basic",
    )


def compose(
    job: type[JobConfig], conf: str, flags: argparse.Namespace
) -> tuple[DictConfig, ConfigLoaderImpl]:
    """What the command line composes, Hydra's own section included, and the loader that did.

    Raises:
        InputError: code named to Hydra.
        Exception: whatever Hydra raises where it cannot compose.
    """
    loader = _loader(conf, flags)
    config = loader.load_configuration(flags.config_name or job.root, flags.overrides, RunMode.MULTIRUN)
    refuse_named_code(config)
    return config, loader


def hydra_overrides(plan: SweepPlan) -> list[str]:
    """What the command line must say besides, so that Hydra uses the plan's folder and names."""
    added = [f"hydra.sweep.dir={_quoted(str(plan.folder))}"]
    if plan.names_jobs:
        keys = ",".join(plan.swept)  # as it stands: quotes would not survive Hydra's record of overrides
        digits = len(str(plan.count - 1)) if plan.count else 2
        added.append("hydra.sweep.subdir=" + _quoted(f"${{splitmeter_job:{digits},[{keys}]}}"))
    return added


def values_of(overrides: Sequence[str], swept: Sequence[str]) -> dict[str, str]:
    """The values that a job's overrides give to the swept keys, as text."""
    pairs = (override.partition("=") for override in overrides)
    values = {key.lstrip("+"): value for key, _, value in pairs}
    return {key: values[key] for key in swept if key in values}


def job_name(number: int, digits: int, values: Mapping[str, str]) -> str:
    """A folder's name that says number and swept values, in characters that file systems and shells take."""
    text = ",".join(f"{key}={value}" for key, value in values.items())
    text = re.sub(r"[^\w.,=+@-]+", "_", text, flags=re.ASCII)
    return f"{number:0{digits}d}-{text}".rstrip("-_")[:_LONGEST_NAME]


def register_resolver() -> None:
    """Teach OmegaConf the name of a job's folder; called in every process that composes."""
    OmegaConf.register_new_resolver("splitmeter_job", _job_name, replace=True)


def _job_name(digits: int, swept: Sequence[str]) -> str:
    hydra = HydraConfig.get()
    overrides = [hide(own, [own]) for own in hydra.overrides.task]
    return job_name(int(hydra.job.num), digits, values_of(overrides, swept))


def _loader(conf: str, flags: argparse.Namespace) -> ConfigLoaderImpl:
    """As hydra.main makes it."""
    setup_globals()
    register_resolver()
    path = conf
    if flags.config_path is not None:
        path = str(Path(__file__).parent / flags.config_path)
    search_path = create_config_search_path(path)
    if flags.config_dir is not None:
        search_path.prepend(
            provider="command-line",
            path=f"file://{os.path.abspath(flags.config_dir)}",
            anchor=SearchPathQuery(provider="schema"),
        )
    return ConfigLoaderImpl(config_search_path=search_path)


def _place(raw: str, folder: Path) -> tuple[bool, int, Path]:
    """Whether the folder was named, and how many levels below which folder the time makes its name."""
    before, now, rest = raw.partition("${now:")
    if not now:
        return True, 1, folder.parent
    own = before.rpartition("/")[2] + now + rest
    depth = own.count("/") + 1
    return False, depth, folder.parents[depth - 1]


def _swept(config: DictConfig, loader: ConfigLoaderImpl) -> tuple[tuple[str, ...], int | None]:
    """Keys that take several values, and the number of jobs where they are all combinations."""
    params = OmegaConf.select(config, "hydra.sweeper.params") or {}
    lines = [f"{key}={value}" for key, value in params.items()]
    lines += list(config.hydra.overrides.task)
    parsed = OverridesParser.create(config_loader=loader).parse_overrides(lines)
    basic = config.hydra.runtime.choices.get("hydra/sweeper") == "basic"
    swept, count = [], 1 if basic else None
    for override in {own.get_key_element(): own for own in parsed}.values():
        if not override.is_sweep_override():
            continue
        values = list(override.sweep_string_iterator()) if override.is_discrete_sweep() else None
        if values is None or len(values) > 1:
            swept.append(override.get_key_element().lstrip("+"))
        count = None if count is None or values is None else count * len(values)
    return tuple(swept), count


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"

"""The command line behind scripts/train.py and bench.py: Hydra composes, all that is wrong is a sentence.

Exit codes: 0 success, 1 failure, 2 wrong input, 130 and 143 for SIGINT and SIGTERM.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import shlex
import signal
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

import hydra
import yaml
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from trainer.config import RunConfig
from trainer.errors import InputError, Interrupted
from trainer.job import JobConfig
from trainer.launch import dismiss, follow, launch
from trainer.place import Place
from trainer.rank import log_file, record, tell
from trainer.refusals import hide, sentence_of
from trainer.secrets import Redactor, SecretFilter
from trainer.signals import leave

# Not pkg://conf: a folder named conf on the user's own path would hide it.
CONF = str(Path(__file__).resolve().parents[1] / "conf")
_SWEEP = re.compile(r"\+*hydra\.mode=.*MULTIRUN.*", re.IGNORECASE)


class JobFailed(Exception):
    """One job of a sweep failed and has said so; the sweep goes on with the next."""

    def __init__(self, code: int) -> None:
        super().__init__(f"exit code {code}")
        self.code = code


class _Leave(BaseException):
    """Out of Hydra, past its own report of errors."""


def main(worker: str | None = None, job: type[JobConfig] = RunConfig) -> int:
    """Run the command line in sys.argv for a kind of job; returns the exit code.

    `worker`: see trainer.launch.launch.
    """
    try:
        place = Place.from_environment(os.environ)
    except InputError as error:
        tell(str(error))
        return 2
    if place is None:
        return _App(job, worker, None).run()
    if place.rank > 0:
        code = follow(worker)
    else:
        app, code = _App(job, worker, place), 1
        try:
            code = app.run()
        finally:
            if not app.announced:
                dismiss(code)
    if code != 0:
        leave(code)  # a group with a failed peer may hold up an orderly end
    return code


class _App:
    """One call of the command line in the process that resolves the configuration."""

    def __init__(self, job: type[JobConfig], worker: str | None, place: Place | None) -> None:
        self.announced = False
        self._job = job
        self._worker = worker
        self._place = place
        self._overrides = sys.argv[1:]
        self._error: Exception | None = None

    def run(self) -> int:
        # Hydra then raises what it would otherwise print in several lines.
        os.environ["HYDRA_FULL_ERROR"] = "1"
        start = hydra.main(version_base="1.3", config_path=CONF, config_name=self._job.root)
        code = 0
        try:
            self._refuse_flags()
            with warnings.catch_warnings():
                warnings.filterwarnings(
                    "error", r"provider=hydra\.searchpath.* is not available", UserWarning
                )
                start(self._task)()
        except InputError as error:
            tell(str(error))
            code = 2
        except Interrupted as error:
            code = 128 + error.signum
        except KeyboardInterrupt:
            code = 128 + signal.SIGINT
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
        except JobFailed as error:
            code = error.code
        except _Leave:
            assert self._error is not None
            raise self._error from None
        except Exception as error:
            sentence = sentence_of(error, self._overrides, self._job)
            if sentence is None:
                raise
            tell(sentence)
            code = 2
        return code

    def _refuse_flags(self) -> None:
        """Refuse what must not even be composed.

        Raises:
            InputError: a sweep under torchrun, or a flag that would unpickle a file.
        """
        flags, unknown = get_args_parser().parse_known_args()
        self._overrides = flags.overrides
        if unknown:
            raise InputError(
                f"{unknown[0]} is not a flag; settings are written section.key=value, and --hydra-help "
                f"lists the flags"
            )
        if flags.experimental_rerun is not None:
            raise InputError(
                "--experimental-rerun unpickles a file, which can run code from it; give the overrides again"
            )
        sweeping = flags.multirun or any(_SWEEP.fullmatch(override) for override in self._overrides)
        if not sweeping:
            return
        if self._place is not None:
            raise self._sweep_under_torchrun()
        for override in self._overrides:
            if hide(override, [override]) != override:
                key = override.partition("=")[0].lstrip("+")
                raise InputError(
                    f"{key} reads like a secret, and a sweep's overrides are written to its folder; "
                    f"keep the value in an environment variable and pass {key}='${{oc.env:VARIABLE}}'"
                )

    def _sweep_under_torchrun(self) -> InputError:
        assert self._place is not None
        overrides = [
            hide(override, self._overrides) for override in self._overrides if not _SWEEP.fullmatch(override)
        ]
        if not any(override.startswith("world_size=") for override in overrides):
            overrides.insert(0, f"world_size={self._place.world_size}")
        command = shlex.join(["python", sys.argv[0], "-m", *overrides])
        launcher = self._place.launcher
        return InputError(
            f"a sweep cannot run under {launcher}, which fixes the number of ranks; run: {command}"
        )

    def _task(self, composed: DictConfig) -> None:
        """What Hydra calls for each job."""
        hydra_config = HydraConfig.get()
        run_dir = hydra_config.runtime.output_dir
        log = log_file(self._job.kind, run_dir)
        sweeping = hydra_config.mode == RunMode.MULTIRUN
        # A job of a sweep that submitit has sent elsewhere begins here, in each of its tasks.
        place = Place.from_environment(os.environ) if self._place is None else None
        if place is not None and place.rank > 0:
            code = follow(self._worker)
            if code:
                raise JobFailed(code)
            return
        redactor = Redactor()
        try:
            if sweeping and self._place is not None:
                raise self._sweep_under_torchrun()
            mapping = _plain(composed, self._overrides, self._job)
            redactor = Redactor(mapping)
            for handler in logging.getLogger().handlers:
                handler.addFilter(SecretFilter(mapping))
            if sweeping:
                _clean_sweep_file(Path(hydra_config.sweep.dir), mapping, self._overrides)
            config = self._job.from_mapping(mapping, run_dir)
            code = launch(config, self._worker)
            self.announced = not config.dry_run
        except InputError as error:
            tell(str(error), log, redactor)
            code = 2
        except Exception as error:
            text = redactor.text(_traceback(error))
            record(text, log)
            if not sweeping:
                self._error = error
                raise _Leave from None
            print(text, file=sys.stderr, flush=True)
            code = 1
        if place is not None and not self.announced:
            dismiss(code)
        if code == 0:
            return
        if sweeping and self._place is None:
            raise JobFailed(code)
        raise SystemExit(code)


def _plain(composed: DictConfig, overrides: Sequence[str], job: type[JobConfig]) -> dict[str, Any]:
    """The composed configuration as plain data, every interpolation resolved.

    Raises:
        InputError: a group without a choice, a missing value, or an interpolation that leads nowhere.
    """
    try:
        mapping = OmegaConf.to_container(composed, resolve=True, throw_on_missing=True)
    except Exception as error:
        sentence = sentence_of(error, overrides, job)
        if sentence is None:
            raise
        raise InputError(sentence) from None
    assert isinstance(mapping, dict)
    for name, hint in get_type_hints(job).items():
        if dataclasses.is_dataclass(hint) and mapping.get(name) is None:
            raise InputError(f"{name}=null leaves nothing to run; choose one that --help lists under {name}")
    return {str(key): value for key, value in mapping.items()}


def _clean_sweep_file(folder: Path, mapping: Mapping[str, Any], overrides: Sequence[str]) -> None:
    """Take secrets out of what Hydra's sweeper has written about the sweep."""
    path = folder / "multirun.yaml"
    if path.exists():
        redactor = Redactor(mapping)
        text = hide(redactor.text(path.read_text(encoding="utf-8")), overrides)
        path.write_text(
            yaml.safe_dump(redactor.mapping(yaml.safe_load(text)), sort_keys=False), encoding="utf-8"
        )


def _traceback(error: Exception) -> str:
    import traceback

    return "".join(traceback.format_exception(error)).rstrip("\n")

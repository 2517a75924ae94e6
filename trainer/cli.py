"""The command line behind scripts/train.py and bench.py: Hydra composes, all that is wrong is a sentence.

Exit codes: 0 success, 1 failure, 2 wrong input, 130 and 143 for SIGINT and SIGTERM.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import hydra
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from trainer.composed import plain_config, traceback_of
from trainer.config import RunConfig
from trainer.errors import InputError, Interrupted, Stopped, exit_code_of
from trainer.job import JobConfig
from trainer.launch import dismiss, follow, launch
from trainer.named_code import may_name_code
from trainer.place import Place
from trainer.rank import log_file, record, tell
from trainer.refusals import hide, sentence_of
from trainer.resolvers import register_resolvers
from trainer.secrets import Redactor, keep_out_of_logs
from trainer.signals import ignore_signals, leave, obey_signals, raising_signals
from trainer.sweep_end import finish_sweep
from trainer.sweep_files import SWEEP_FILE
from trainer.sweep_folder import begin, end, find_folder, locked
from trainer.sweep_job import SweepEnded, run_job
from trainer.sweep_plan import (
    MULTIRUN,
    SweepPlan,
    asks_for_sweep,
    compose,
    hydra_overrides,
    may_be_sweep,
    plan_sweep,
    register_resolver,
)

# Not pkg://conf: a folder named conf on the user's own path would hide it.
CONF = str(Path(__file__).resolve().parents[1] / "conf")
# On import: a process that a remote launcher starts composes a job too.
register_resolver()
register_resolvers()


def _list_groups_once() -> None:
    """Hydra's --help copies the whole search path for each of a hundred folders: half of its time.

    The folders are all of one command line, so one copy serves them. Where Hydra has no such method, it is
    left as it is.
    """
    find = getattr(ConfigLoaderImpl, "_parse_overrides_and_create_caching_repo", None)
    if find is None:
        return
    found: dict[str, Any] = {}

    def once(loader: Any, config_name: str | None, overrides: list[str]) -> Any:
        key = repr((id(loader), config_name, overrides))
        if key not in found:
            found[key] = find(loader, config_name, overrides)
        return found[key]

    ConfigLoaderImpl._parse_overrides_and_create_caching_repo = once  # type: ignore[method-assign, assignment]


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
    if code != 0 or place.world_size > 1:
        # A group with a failed peer may hold up an orderly end, and threads that come back from torch's C++
        # while the interpreter is taken down abort the process.
        leave(code)
    return code


def run_script(job: type[JobConfig] = RunConfig) -> NoReturn:
    """`main`, and the end of the process.

    After a signal it ends at once: a store of torch's launcher that was broken off takes seconds to go.
    """
    code = main(job=job)
    if code > 128:
        leave(code)
    sys.exit(code)


class _App:
    """One call of the command line in the process that resolves the configuration."""

    def __init__(self, job: type[JobConfig], worker: str | None, place: Place | None) -> None:
        self.announced = False
        self._job = job
        self._worker = worker
        self._place = place
        self._overrides = sys.argv[1:]
        self._error: Exception | None = None
        self._sweep: SweepPlan | None = None

    def run(self) -> int:
        # Hydra then raises what it would otherwise print in several lines.
        os.environ["HYDRA_FULL_ERROR"] = "1"
        return self._code_of(self._run)

    def _run(self) -> int:
        begun_at = time.time()
        flags = self._refuse_flags()
        with warnings.catch_warnings():
            warnings.filterwarnings("error", r"provider=hydra\.searchpath.* is not available", UserWarning)
            plan = None
            if self._place is None and (
                asks_for_sweep(flags, self._overrides) or may_be_sweep(flags, self._overrides)
            ):
                plan = plan_sweep(self._job, CONF, flags, begun_at)
            elif may_name_code(flags, self._overrides):
                compose(self._job, CONF, flags)
            if plan is not None:
                self._refuse_secrets()
                return self._run_sweep(find_folder(plan), flags)
            if flags.help:
                _list_groups_once()
            self._start()
        return 0

    def _start(self) -> int:
        hydra.main(version_base="1.3", config_path=CONF, config_name=self._job.root)(self._task)()
        return 0

    def _run_sweep(self, plan: SweepPlan, flags: argparse.Namespace) -> int:
        """Run all jobs of a sweep; whatever happens, its folder is brought to an end."""
        with locked(plan):
            begin(plan)
            self._sweep = plan
            # Before a flag: argparse takes overrides in one row only.
            place = len(sys.argv) - sys.argv[::-1].index(flags.overrides[-1]) if flags.overrides else 1
            sys.argv[place:place] = hydra_overrides(plan)
            code = 1
            with raising_signals():
                try:
                    code = self._code_of(self._start)
                except Interrupted as error:  # as that was about to return
                    code = 128 + error.signum
                except Exception:
                    traceback.print_exc()
                finally:
                    ignore_signals()
                    code = end(plan, code)
                obey_signals()  # who asks again does not want to wait for the table
                if self._job.kind == RunConfig.kind and (plan.folder / SWEEP_FILE).exists():
                    finish_sweep(plan.folder, elsewhere=not plan.runs_here)
        return code

    def _code_of(self, call: Callable[[], int]) -> int:
        """What `call` returns, or the exit code of what it raises, told in a sentence."""
        code = 0
        try:
            code = call()
        except (InputError, Stopped) as error:
            tell(str(error))
            code = exit_code_of(error)
        except Interrupted as error:
            code = 128 + error.signum
        except KeyboardInterrupt:
            code = 128 + signal.SIGINT
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
        except SweepEnded:
            code = 1
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

    def _refuse_flags(self) -> argparse.Namespace:
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
        if self._place is not None and asks_for_sweep(flags, self._overrides):
            raise self._sweep_under_torchrun()
        return flags

    def _refuse_secrets(self) -> None:
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
            hide(override, self._overrides)
            for override in self._overrides
            if not MULTIRUN.fullmatch(override)
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
        if self._sweep is not None:
            try:
                run_job(self._sweep, self._job, self._worker, composed)
            except InputError as error:
                if self._sweep.pid != os.getpid():
                    raise  # the launcher carries it
                tell(str(error))
                raise SystemExit(2) from None  # Hydra would tell it in lines of its own
            return
        hydra_config = HydraConfig.get()
        run_dir = hydra_config.runtime.output_dir
        log = log_file(self._job.kind, run_dir)
        redactor = Redactor()
        try:
            if hydra_config.mode == RunMode.MULTIRUN:
                raise self._sweep_under_torchrun()
            mapping = plain_config(composed, self._overrides, self._job)
            redactor = Redactor(mapping)
            keep_out_of_logs(mapping)
            if mapping.get("sweep", {}).get("resume"):
                raise InputError("sweep.resume=true is for a sweep; add -m, or leave it out")
            config = self._job.from_mapping(mapping, run_dir)
            code = launch(config, self._worker)
            self.announced = not config.dry_run
        except (InputError, Stopped) as error:
            tell(str(error), log, redactor)
            code = exit_code_of(error)
        except Exception as error:
            record(redactor.text(traceback_of(error)), log)
            self._error = error
            raise _Leave from None
        if code != 0:
            raise SystemExit(code)

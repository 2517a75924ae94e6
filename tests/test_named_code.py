"""Code that is named to Hydra is refused before Hydra imports it, however it is spelt and whoever says it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Run
from trainer.place import Place

TARGET = "{_target_:builtins.print}"
NAMED = [
    ("+hydra.callbacks.own._target_=os.system", "hydra.callbacks.own"),
    (f"+hydra.callbacks.own={TARGET}", "hydra.callbacks.own"),
    (f"++hydra.callbacks={{own:{TARGET}}}", "hydra.callbacks.own"),
    (f"hydra.launcher={TARGET}", "hydra.launcher._target_"),
    ("hydra.launcher._target_=os.system", "hydra.launcher._target_"),
    ("hydra.launcher._target_=hydra._internal.core_plugins.basic_launcher.logging.os.system",
     "hydra.launcher._target_"),
    ("hydra.launcher._target_=${oc.env:HOME}", "hydra.launcher._target_"),
    ("hydra.sweeper._target_=os.system", "hydra.sweeper._target_"),
    ("hydra.job_logging.handlers.console.class=os.system", "hydra.job_logging.handlers.console.class"),
    ("+hydra.job_logging.handlers.x={class:logging.os.system}", "hydra.job_logging.handlers.x.class"),
    ("hydra.hydra_logging.handlers.console.stream=ext://antigravity.fly",
     "hydra.hydra_logging.handlers.console.stream"),
]  # fmt: skip


def sentence(key: str) -> str:
    return f"{key} names code to run; choose a plug-in by its name, as in hydra/launcher=slurm\n"


@pytest.mark.parametrize(("override", "key"), NAMED, ids=[override for override, _ in NAMED])
def test_code_named_on_the_command_line_is_refused(
    run: Run, capfd: pytest.CaptureFixture[str], tmp_path: Path, override: str, key: str
) -> None:
    assert run(override) == 2
    assert capfd.readouterr() == ("", sentence(key))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("flags", [["-m"], ["--help"], ["--hydra-help"]])
def test_it_is_refused_whatever_is_asked(
    run: Run, capfd: pytest.CaptureFixture[str], tmp_path: Path, flags: list[str]
) -> None:
    assert run(*flags, f"+hydra.callbacks.own={TARGET}") == 2
    assert capfd.readouterr() == ("", sentence("hydra.callbacks.own"))
    assert not list(tmp_path.iterdir())


def test_it_is_refused_under_torchrun(
    run: Run, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Place, "from_environment", lambda environ: Place(0, 2, 0, 2))
    monkeypatch.setattr("trainer.cli.dismiss", lambda code: None)
    monkeypatch.setattr("trainer.cli.leave", lambda code: None)
    assert run(f"+hydra.callbacks.own={TARGET}") == 2
    assert capfd.readouterr() == ("", sentence("hydra.callbacks.own"))


CALLED = "_target_: pathlib.Path.touch\n      self: {_target_: pathlib.Path, _args_: [called]}"
FILES = {
    "hydra.callbacks.own": f"callbacks:\n    own:\n      {CALLED}",
    "hydra.job_logging.handlers.x.()": "job_logging:\n    handlers:\n      x: {(): pathlib.Path}",
    "hydra.launcher._target_": "launcher:\n    _target_: pathlib.Path",
}


@pytest.mark.parametrize("key", FILES)
@pytest.mark.parametrize("flags", [[], ["-m"]], ids=["run", "sweep"])
def test_code_named_by_a_file_is_refused(
    run: Run,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    key: str,
    flags: list[str],
) -> None:
    (tmp_path / "mine" / "experiment").mkdir(parents=True)
    (tmp_path / "mine" / "experiment" / "own.yaml").write_text(
        f"# @package _global_\nhydra:\n  {FILES[key]}\n"
    )
    found = ["--config-dir", "mine"] if flags else ["hydra.searchpath=[file://mine]"]
    assert run(*flags, *found, "experiment=own") == 2
    assert capfd.readouterr() == ("", sentence(key))
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_file_may_set_loggers_and_folders(run: Run, tmp_path: Path) -> None:
    (tmp_path / "mine" / "experiment").mkdir(parents=True)
    (tmp_path / "mine" / "experiment" / "own.yaml").write_text(
        "# @package _global_\nhydra:\n  run:\n    dir: there\n  job_logging:\n    handlers:\n      more: "
        "{class: logging.handlers.RotatingFileHandler, filename: '${hydra.runtime.output_dir}/more.log'}\n"
    )
    assert run("--config-dir", "mine", "experiment=own") == 0
    assert (tmp_path / "there" / "more.log").exists()

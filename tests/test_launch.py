"""Ranks under torchrun and under our own launcher: one config, one folder, one report, no process left."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.launched import NAMES, Launched
from trainer import launch, rank
from trainer.config import RunConfig
from trainer.elastic import _exit_code
from trainer.errors import InputError
from trainer.place import Place
from trainer.rank import is_echo, threads_per_rank

# Each starts Python and torch up to three times, which a busy machine may take half a minute for.
pytestmark = pytest.mark.timeout(240)

STUB = str(Path(__file__).with_name("stub_train.py"))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    """`start(worker, *overrides, torchrun=ranks, **environment)`: scripts/train.py with a stub worker."""
    launched: list[Launched] = []

    def call(worker: str, *overrides: str, torchrun: int = 0, **environment: str) -> Launched:
        command = [STUB, worker, *overrides]
        if torchrun:
            command = ["-m", "torch.distributed.run", f"--nproc-per-node={torchrun}", *command]
        launched.append(Launched(tmp_path, *command, **environment))
        return launched[-1]

    yield call
    for one in launched:
        one.clean_up()


def facts(folder: Path, count: int) -> list[dict[str, Any]]:
    return [json.loads((folder / f"rank{r}.json").read_text()) for r in range(count)]


def test_our_own_launcher_gives_each_rank_its_place_and_plain_config(start: Any, tmp_path: Path) -> None:
    code, output = start(
        "describe", "strategy=ddp", "world_size=2", "seed=7", "hydra.run.dir=run", OMP_NUM_THREADS="7"
    ).result()
    assert (code, output) == (0, "")
    first, second = facts(tmp_path / "run", 2)
    for r, found in enumerate((first, second)):
        place = [found[name] for name in ("rank", "world_size", "local_rank", "local_world_size")]
        assert place == [r, 2, r, 2]
        assert found["run_dir"] == str(tmp_path / "run")
        assert found["config"]["seed"] == 7
        threads = max(1, len(os.sched_getaffinity(0)) // 2)
        assert (found["threads"], found["OMP_NUM_THREADS"]) == (threads, str(threads))
        assert found["GLOO_SOCKET_IFNAME"] == "lo" and found["collects_garbage"]
    assert first["config"] == second["config"]
    assert first["pid"] != second["pid"]


def test_wrong_input_on_one_rank_is_told_once_and_ends_the_others(start: Any, tmp_path: Path) -> None:
    code, output = start("refuse_on_last_rank", "strategy=ddp", "world_size=2", "hydra.run.dir=run").result()
    assert code == 2
    assert output == "data.inputs=x.npy holds NaN in row 7; remove the row\n"
    assert [file.name for file in (tmp_path / "run").iterdir()] == ["train.log"]
    assert (tmp_path / "run" / "train.log").read_text().count("NaN in row 7") == 1


def test_the_first_cause_is_told_with_its_rank_and_not_its_echo(start: Any) -> None:
    code, output = start("crash_on_last_rank", "strategy=ddp", "world_size=2").result()
    assert code == 1
    assert output.startswith("Rank 1 of 2 failed:\nTraceback")
    assert output.endswith("ZeroDivisionError: boom\n")
    assert output.count("Traceback") == 1


def test_a_rank_that_is_killed_is_named(start: Any) -> None:
    code, output = start("killed_on_last_rank", "strategy=ddp", "world_size=2").result()
    assert (code, output) == (1, "Rank 1 of 2 was ended by SIGKILL\n")


@pytest.mark.parametrize(("worker", "signum"), [("poll", signal.SIGTERM), ("hang", signal.SIGINT)])
def test_a_signal_ends_launcher_and_ranks_within_five_seconds(
    start: Any, tmp_path: Path, worker: str, signum: signal.Signals
) -> None:
    launched = start(worker, "strategy=ddp", "world_size=2", "hydra.run.dir=run")
    launched.wait_for_ranks(2)
    started = time.monotonic()
    if signum == signal.SIGINT:
        os.killpg(launched.process.pid, signum)  # as a terminal does it: launcher and ranks
    else:
        launched.process.send_signal(signum)
    code, output = launched.result()
    seconds = time.monotonic() - started
    # A loop that hangs is given three seconds; a busy machine may need some more to end processes.
    assert seconds < (5 if worker == "poll" else 7)
    assert (code, output) == (128 + signum, "")
    assert launched.ranks_alive(0) == []
    name = "stopped" if worker == "poll" else "emergency"
    assert {file.name for file in (tmp_path / "run").glob(f"{name}*")} == {f"{name}0", f"{name}1"}


def test_ranks_do_not_outlive_a_launcher_that_is_killed(start: Any, tmp_path: Path) -> None:
    launched = start("poll", "strategy=ddp", "world_size=2", "hydra.run.dir=run")
    launched.wait_for_ranks(2)
    launched.process.kill()
    assert launched.ranks_alive(6) == []
    assert (tmp_path / "run" / "stopped0").exists()


def test_torchrun_ranks_share_config_and_folder_though_they_start_apart(start: Any, tmp_path: Path) -> None:
    code, output = start(
        "describe", "strategy=ddp", "seed=3", torchrun=2, STUB_LATE_RANK="0", STUB_LATE_S="2"
    ).result()
    assert code == 0, output
    (folder,) = {file.parent for file in tmp_path.rglob("rank*.json")}
    first, second = facts(folder, 2)
    assert first["config"] == second["config"]
    assert first["config"]["seed"] == 3
    assert first["config"]["world_size"] == 2
    assert [found["local_world_size"] for found in (first, second)] == [2, 2]


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (
            ["strategy=ddp", "world_size=3"],
            "world_size=3 contradicts torchrun, which started 2; "
            "leave it out, or start 3 with --nproc-per-node 3",
        ),
        (
            ["-m", "strategy=ddp,tensor", "seed=1"],
            "a sweep cannot run under torchrun, which fixes the number of ranks; "
            f"run: python {STUB} -m world_size=2 strategy=ddp,tensor seed=1",
        ),
    ],
)
def test_torchrun_ranks_all_leave_with_code_two(
    start: Any, tmp_path: Path, overrides: list[str], sentence: str
) -> None:
    code, output = start("describe", *overrides, torchrun=2, STUB_LATE_RANK="1", STUB_LATE_S="1").result()
    assert code == 1  # torchrun's own
    assert output.count(sentence + "\n") == 1
    assert output.count("exitcode  : 2 ") == 2
    assert {file.name for file in tmp_path.rglob("*") if file.is_file()} <= {"train.log"}


def test_torchrun_ranks_leave_together_when_one_finds_wrong_input(start: Any) -> None:
    code, output = start("refuse_on_last_rank", "strategy=ddp", torchrun=2).result()
    assert code == 1
    assert output.count("data.inputs=x.npy holds NaN in row 7; remove the row\n") == 1
    assert output.count("exitcode  : 2 ") == 2


def test_torchrun_with_one_rank_needs_no_number(start: Any, tmp_path: Path) -> None:
    code, output = start("describe", "strategy=pipeline", "hydra.run.dir=run", torchrun=1).result()
    assert code == 0, output
    (found,) = facts(tmp_path / "run", 1)
    assert (found["world_size"], found["config"]["strategy"]["name"]) == (1, "pipeline")


def test_a_place_needs_all_that_torchrun_sets() -> None:
    environment = dict.fromkeys(NAMES, "1") | {"WORLD_SIZE": "4", "RANK": "3"}
    assert Place.from_environment(environment) == Place(3, 4, 1, 4)
    assert Place.from_environment({**environment, "LOCAL_WORLD_SIZE": "2"}) == Place(3, 4, 1, 2)
    for name in NAMES:
        assert Place.from_environment({key: "1" for key in NAMES if key != name}) is None


def test_threads_are_cores_over_local_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank, "cores", lambda: 8)
    config = RunConfig.from_mapping({}, "/run")
    assert [threads_per_rank(config, Place(local_world_size=local)) for local in (1, 2, 3, 8, 9)] == [
        8,
        4,
        2,
        1,
        1,
    ]
    assert threads_per_rank(config, Place(local_world_size=8, cpus=3)) == 3
    five = RunConfig.from_mapping({"trainer": {"num_threads": 5}}, "/run")
    assert threads_per_rank(five, Place(local_world_size=2)) == 5


def test_more_ranks_than_cores_gives_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(launch, "cores", lambda: 2)
    launch._warn(2)
    assert not caplog.records
    launch._warn(3)
    assert "3 ranks share 2 cores" in caplog.text


def test_a_lost_connection_is_an_echo_and_an_ordinary_error_is_not() -> None:
    assert is_echo(RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1"))
    assert is_echo(ConnectionResetError("reset"))
    assert not is_echo(ZeroDivisionError("boom"))
    assert not is_echo(InputError("seed=x must be a whole number"))


def test_a_signal_that_ended_a_rank_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    config = RunConfig.from_mapping({"world_size": 4}, "/nowhere")
    assert _exit_code(2, 2, config) == 2
    assert capsys.readouterr().err == ""
    assert _exit_code(3, -signal.SIGSEGV, config) == 1
    assert capsys.readouterr().err == "Rank 3 of 4 was ended by SIGSEGV\n"


def test_a_dry_run_starts_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int | None] = []
    monkeypatch.setattr("trainer.dryrun.print_plan", lambda config: seen.append(config.world_size))
    config = RunConfig.from_mapping(
        {"world_size": 64, "strategy": {"name": "pipeline"}, "trainer": {"dry_run": True}}, "/nowhere"
    )
    assert launch.launch(config, "no_such_module:run") == 0
    assert seen == [64]

"""A rank's place from the environment of Slurm and of submitit, as srun 22.05 and submitit 1.5 set it."""

from __future__ import annotations

import pytest
from hydra.errors import MissingConfigException

from trainer.config import RunConfig
from trainer.errors import InputError
from trainer.place import Place, first_host, tasks_per_node
from trainer.rank import node_cores
from trainer.refusals import sentence_of

TASK = {  # of the fourth task of srun -n4 -N2, which puts three on the first node
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "2",
    "SLURM_NTASKS": "4",
    "SLURM_TASKS_PER_NODE": "3,1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "3,1",
    "SLURM_STEP_NODELIST": "node[03-04]",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "1",
}
PORT = 10_000 + 8 * 7 + 2


def test_a_task_of_srun_is_a_rank() -> None:
    store = ("node03", PORT, "slurm-7.2")
    assert Place.from_environment(TASK) == Place(3, 4, 0, 1, 1, "srun", store)
    first = {**TASK, "SLURM_PROCID": "1", "SLURM_LOCALID": "1", "SLURM_NODEID": "0"}
    assert Place.from_environment(first) == Place(1, 4, 1, 3, 0, "srun", store)
    place = Place.from_environment({**TASK, "SLURM_CPUS_PER_TASK": "5", "SUBMITIT_EXECUTOR": "slurm"})
    assert place is not None and (place.cpus, place.launcher) == (5, "submitit")


def test_ranks_with_cores_of_their_own_have_them_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.rank.cores", lambda: 3)  # what a task that is bound to its own is told
    assert node_cores(Place(0, 4, 0, 2, 0, "srun", None, cpus=3)) == 6
    assert node_cores(Place(0, 2, 0, 2)) == node_cores(None) == 3


def test_tasks_on_one_node_meet_on_its_loopback() -> None:
    per_node = {"SLURM_TASKS_PER_NODE": "4", "SLURM_STEP_TASKS_PER_NODE": "4", "SLURM_NODEID": "0"}
    place = Place.from_environment({**TASK, **per_node})
    assert place is not None and place.on_one_node and place.store == ("127.0.0.1", PORT, "slurm-7.2")


def test_an_address_and_port_that_are_given_count() -> None:
    place = Place.from_environment({**TASK, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "4321"})
    assert place is not None and place.store == ("10.0.0.1", 4321, "slurm-7.2")


@pytest.mark.parametrize(
    "change",
    [
        {"SLURM_STEP_ID": None},  # a batch script, or the shell of salloc
        {"SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_TASKS_PER_NODE": "1"},
        {"SLURM_TASKS_PER_NODE": "1"},  # a batch script that a task submitted: the step is another job's
    ],
)
def test_what_is_one_process_is_no_rank(change: dict[str, str | None]) -> None:
    environment = {name: value for name, value in {**TASK, **change}.items() if value is not None}
    assert Place.from_environment(environment) is None


def test_torchrun_inside_a_task_has_the_first_word() -> None:
    torchrun = dict.fromkeys(("RANK", "LOCAL_RANK", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"), "1")
    place = Place.from_environment({**TASK, **torchrun, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"})
    assert place == Place(1, 2, 1, 1, 1)


def test_a_task_of_submitits_local_mode_is_a_rank() -> None:
    environment = {
        "SUBMITIT_EXECUTOR": "local",
        "SUBMITIT_LOCAL_JOB_ID": "2600",
        "SUBMITIT_LOCAL_NTASKS": "2",
        "SUBMITIT_LOCAL_GLOBALID": "1",
        "SUBMITIT_LOCAL_LOCALID": "1",
    }
    # 8 x 2600 is 800 more than the 20,000 ports there are
    store = ("127.0.0.1", 10_800, "submitit-2600")
    assert Place.from_environment(environment) == Place(1, 2, 1, 2, 0, "submitit", store, None, True)
    assert Place.from_environment({**environment, "SUBMITIT_LOCAL_NTASKS": "1"}) is None
    assert Place.from_environment({**environment, "SUBMITIT_EXECUTOR": "slurm"}) is None


def test_jobs_of_an_array_have_ports_of_their_own() -> None:
    ports = set()
    for job in range(2500):
        place = Place.from_environment({**TASK, "SLURM_JOB_ID": str(job)})
        assert place is not None and place.store is not None
        ports.add(place.store[1])
    assert len(ports) == 2500 and min(ports) >= 10_000 and max(ports) < 30_000


def test_slurms_notation() -> None:
    assert tasks_per_node("2(x3),1") == [2, 2, 2, 1]
    assert first_host("a[03-05,9]b[1,2],c") == "a03b1"
    assert first_host("login,a[1-2]") == "login"
    with pytest.raises(
        InputError, match=r"cannot be read \(SLURM_STEP_TASKS_PER_NODE=two\); start the ranks"
    ):
        Place.from_environment({**TASK, "SLURM_TASKS_PER_NODE": "two", "SLURM_STEP_TASKS_PER_NODE": "two"})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"SLURM_NODEID": "2"}, "SLURM_NODEID=2 of SLURM_STEP_TASKS_PER_NODE=3,1"),
        ({"SLURM_PROCID": "-1"}, "SLURM_PROCID=-1"),
        ({"SLURM_CPUS_PER_TASK": "all"}, "SLURM_CPUS_PER_TASK=all"),
        ({"MASTER_PORT": ""}, "MASTER_PORT="),
    ],
)
def test_what_slurm_never_sets_is_a_sentence(change: dict[str, str], said: str) -> None:
    with pytest.raises(InputError) as caught:
        Place.from_environment({**TASK, **change})
    assert str(caught.value) == (
        f"Slurm's or submitit's variables cannot be read ({said}); "
        "start the ranks with srun, torchrun or world_size"
    )


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"])
def test_what_torchrun_never_sets_is_a_sentence(name: str) -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    environment = {**dict.fromkeys(names, "1"), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    with pytest.raises(InputError) as caught:
        Place.from_environment({**environment, name: "x"})
    assert str(caught.value) == (
        f"torchrun's variables cannot be read ({name}=x); start the ranks with srun, torchrun or world_size"
    )


def test_without_the_plug_in_a_sentence_says_how_to_get_it() -> None:
    error = MissingConfigException("", "hydra/launcher/submitit_slurm", ["basic", "slurm"])
    assert sentence_of(error, [], RunConfig) == (
        "hydra/launcher=submitit_slurm comes with a plug-in that is not installed; "
        "pip install 'splitmeter[slurm]'"
    )

"""Where a rank stands: read from the environment that torchrun, Slurm or submitit's local mode sets."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from trainer.errors import InputError

TORCHRUN_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
SLURM_NAMES = (
    "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE",
    "SLURM_STEP_NODELIST", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID",
)  # fmt: skip
LOCAL_NAMES = (
    "SUBMITIT_LOCAL_JOB_ID", "SUBMITIT_LOCAL_NTASKS", "SUBMITIT_LOCAL_GLOBALID", "SUBMITIT_LOCAL_LOCALID",
)  # fmt: skip
LOOPBACK = "127.0.0.1"
FIRST_PORT, PORTS = 10_000, 20_000  # below what systems give to outgoing connections
PORTS_PER_JOB = 8  # steps of a job that may run at once


@dataclass(frozen=True)
class Place:
    """Where a rank stands among all, and among those on its machine.

    `store` is (host, port, name of the run) where rank 0 serves the store itself; None is torch's own way,
    from MASTER_ADDR and MASTER_PORT.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    node: int | None = None  # among the run's nodes; None where the launcher does not say
    launcher: str = "torchrun"
    store: tuple[str, int, str] | None = None
    cpus: int | None = None  # of this rank alone, where the launcher says
    on_one_node: bool = False  # known to be

    @staticmethod
    def from_environment(environ: Mapping[str, str]) -> Place | None:
        """The place of this process among ranks that a launcher has started; None when it was started alone.

        torchrun, or torch's elastic launcher, has the first word, then a step of Slurm, then submitit's local
        mode. A task that is the only one of its step is alone: it may start ranks itself.

        Raises:
            InputError: a launcher's variable that cannot be read.
        """
        whose = "torchrun's" if all(name in environ for name in TORCHRUN_NAMES) else "Slurm's or submitit's"
        try:
            if whose == "torchrun's":
                return _of_torchrun(environ)
            return _of_slurm(environ) or _of_submitit(environ)
        except ValueError as error:
            raise InputError(
                f"{whose} variables cannot be read ({error}); "
                "start the ranks with srun, torchrun or world_size"
            ) from None


def _of_torchrun(environ: Mapping[str, str]) -> Place:
    world_size = _count(environ, "WORLD_SIZE")
    return Place(
        _count(environ, "RANK"),
        world_size,
        _count(environ, "LOCAL_RANK"),
        _count(environ, "LOCAL_WORLD_SIZE", world_size),
        _count(environ, "GROUP_RANK") if "GROUP_RANK" in environ else None,
    )


def _of_slurm(environ: Mapping[str, str]) -> Place | None:
    """Of a task that srun has started.

    A batch script and the shell of salloc have SLURM_NTASKS and even SLURM_PROCID, but are one process and in
    no step. A batch script that a task has submitted inherits the variables of that task's step; its own
    SLURM_TASKS_PER_NODE then differs from the step's.
    """
    if not all(name in environ for name in SLURM_NAMES):
        return None
    per_node = environ["SLURM_STEP_TASKS_PER_NODE"]
    if environ.get("SLURM_TASKS_PER_NODE", per_node) != per_node:
        return None
    world_size = _count(environ, "SLURM_STEP_NUM_TASKS")
    if world_size == 1:
        return None
    node, tasks = _count(environ, "SLURM_NODEID"), tasks_per_node(per_node)
    job, step = _count(environ, "SLURM_JOB_ID"), _count(environ, "SLURM_STEP_ID")
    host = LOOPBACK if len(tasks) == 1 else first_host(environ["SLURM_STEP_NODELIST"])
    if node >= len(tasks):
        raise ValueError(f"SLURM_NODEID={node} of SLURM_STEP_TASKS_PER_NODE={per_node}")
    return Place(
        _count(environ, "SLURM_PROCID"),
        world_size,
        _count(environ, "SLURM_LOCALID"),
        tasks[node],
        node,
        "submitit" if environ.get("SUBMITIT_EXECUTOR") == "slurm" else "srun",
        _store(environ, host, job, step, f"slurm-{job}.{step}"),
        _count(environ, "SLURM_CPUS_PER_TASK") if "SLURM_CPUS_PER_TASK" in environ else None,
        len(tasks) == 1,
    )


def _of_submitit(environ: Mapping[str, str]) -> Place | None:
    """Of a task of submitit's local mode, whose job is a process of this machine."""
    if environ.get("SUBMITIT_EXECUTOR") != "local" or not all(name in environ for name in LOCAL_NAMES):
        return None
    job, world_size = _count(environ, "SUBMITIT_LOCAL_JOB_ID"), _count(environ, "SUBMITIT_LOCAL_NTASKS")
    if world_size == 1:
        return None
    local_rank = _count(environ, "SUBMITIT_LOCAL_LOCALID")
    store = _store(environ, LOOPBACK, job, 0, f"submitit-{job}")
    rank = _count(environ, "SUBMITIT_LOCAL_GLOBALID")
    return Place(rank, world_size, local_rank, world_size, 0, "submitit", store, None, True)


def _store(environ: Mapping[str, str], host: str, job: int, step: int, name: str) -> tuple[str, int, str]:
    """The user's MASTER_ADDR and MASTER_PORT have the first word.

    Tasks of an array have job ids of their own, one after the other: their ports differ.
    """
    port = FIRST_PORT + (PORTS_PER_JOB * job + step % PORTS_PER_JOB) % PORTS
    return environ.get("MASTER_ADDR", host), _count(environ, "MASTER_PORT", port), name


def _count(environ: Mapping[str, str], name: str, otherwise: int | None = None) -> int:
    """A variable's whole number, 0 or more; `otherwise` where it is not set.

    Raises:
        ValueError: something else stands there; names variable and value.
    """
    text = environ.get(name)
    if text is None and otherwise is not None:
        return otherwise
    if text is None or not re.fullmatch(r"[0-9]+", text.strip()):
        raise ValueError(f"{name}={text}")
    return int(text)


def tasks_per_node(text: str) -> list[int]:
    """Tasks of every node from Slurm's notation: 2(x3),1 is [2, 2, 2, 1].

    Raises:
        ValueError: another notation.
    """
    tasks: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise ValueError(f"SLURM_STEP_TASKS_PER_NODE={text}")
        tasks += [int(match[1])] * int(match[2] or 1)
    return tasks


def first_host(nodes: str) -> str:
    """The first name of Slurm's list of nodes: a[03-05,9]b,c begins with a03b.

    Raises:
        ValueError: another notation.
    """
    host = re.match(r"(?:[^,\[\]]|\[[^\]]+\])+", nodes)
    if host is None:
        raise ValueError(f"SLURM_STEP_NODELIST={nodes}")
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", host[0])

"""Which device a job's tensors are on, and which of its machine's a rank takes."""

from __future__ import annotations

import torch

from trainer.errors import InputError


def choose_device(choice: str, backend: str, key: str = "trainer.device") -> str:
    """`choice` under `key` resolved; gloo carries CPU tensors, so asking for it moves `auto` to the CPU.

    Raises:
        InputError: a GPU asked for where there is none, or with a backend that cannot carry its tensors.
    """
    available = torch.cuda.is_available()
    if choice == "cuda" and not available:
        raise InputError(f"{key}=cuda, but this machine has no GPU that torch can use; use cpu or auto")
    if choice == "cuda" and backend == "gloo":
        raise InputError(f"collectives.backend=gloo carries no GPU tensors; use nccl, or {key}=cpu")
    return "cuda" if available and choice != "cpu" and backend != "gloo" else "cpu"


def rank_device(
    device_type: str,
    backend: str,
    world_size: int,
    local_rank: int,
    local_world_size: int,
    key: str = "trainer.device",
) -> torch.device:
    """A rank's device; makes it torch's current one. Has not run with more than one GPU.

    Raises:
        InputError: more ranks than GPUs where each needs its own.
    """
    if device_type != "cuda":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if backend == "nccl" and local_world_size > count:
        raise InputError(
            f"world_size={world_size} puts {local_world_size} ranks on a machine with {count} GPUs; "
            f"nccl needs one each, so use fewer ranks, or collectives.backend=gloo with {key}=cpu"
        )
    device = torch.device("cuda", local_rank % count)
    torch.cuda.set_device(device)
    return device

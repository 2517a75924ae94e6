"""What all operations share: tensors as messages need them, calls begun, kinds of calls remembered."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from torch import Tensor

from collectives.choice import choose
from collectives.group import Group
from collectives.native import Starter, averages
from collectives.traffic import ITEMSIZE
from collectives.transfer import Started, Transfer

Back = Callable[[], object] | None
Key = tuple[object, ...]
Ready = tuple[str, str, Starter]  # operation, algorithm, what starts it

MOST_READY = 4096  # kinds of calls that a group remembers


def plain(tensor: Tensor) -> bool:
    """Contiguous, on the CPU and without history: what gloo takes as it is."""
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.requires_grad


def apart(tensor: Tensor, output: Tensor) -> bool:
    """Two contiguous tensors that share no memory."""
    first, second = tensor.data_ptr(), output.data_ptr()
    return first + tensor.nbytes <= second or second + output.nbytes <= first


def flat(tensor: Tensor) -> Tensor:
    """[elements], contiguous: the same memory where it can be."""
    return tensor.contiguous().view(-1)


def landing(output: Tensor) -> tuple[Tensor, Back]:
    """(flat contiguous memory for a result, what brings the result from there to `output`)."""
    if output.is_contiguous():
        return output.view(-1), None
    memory = output.contiguous().view(-1)
    return memory, lambda: output.copy_(memory.view(output.shape))


def blocks_choice(operation: str, choice: str, group: Group, numels: Sequence[int], dtype: str) -> str:
    """The algorithm for an operation on blocks of these sizes."""
    size_bytes = sum(numels) * ITEMSIZE[dtype]
    return choose(operation, choice, group.backend, group.size, size_bytes, uneven(numels))


def uneven(numels: Sequence[int]) -> bool:
    return len(set(numels)) > 1


def is_nothing(group: Group, numel: int) -> bool:
    """Whether there is nothing to send."""
    return group.size == 1 or numel == 0


def copy(target: Tensor, source: Tensor) -> None:
    """Unless they are the same memory."""
    if target.data_ptr() != source.data_ptr():
        target.copy_(source)


def average(transfer: Transfer, group: Group, op: str, memory: Tensor) -> None:
    """Make a sum the mean, where the backend's reductions know none."""
    if op == "mean" and not averages(group):
        transfer.after(lambda: memory.div_(group.size))


def borrow(
    transfer_of: Callable[[Tensor], Transfer], group: Group, shape: Sequence[int], like: Tensor
) -> Transfer:
    """A transfer with scratch memory that goes back to the group's pool with the result."""
    scratch, buffer = group.scratch.take(math.prod(shape), like.dtype, like.device)
    transfer = transfer_of(scratch.view(*shape))
    transfer.after(lambda: group.scratch.give_back(buffer))
    return transfer


def begin(
    transfer: Transfer,
    operation: str,
    group: Group,
    result: Tensor | None,
    asynchronous: bool,
    back: Back = None,
) -> Transfer:
    """Start an operation for a single use, and complete it unless it is to be `asynchronous`."""
    transfer.operation, transfer.where, transfer.pending = operation, group.where, group.in_flight
    transfer.output = result
    if back is not None:
        transfer.after(back)
    transfer.start()
    transfer.single_use = True
    if not asynchronous:
        transfer.wait()
    return transfer


def remember(group: Group, key: Key, operation: str, algorithm: str, prepare: Callable[[], Starter]) -> None:
    """Calls of this kind have been checked, and go to the backend: the next ones start at once.

    Only on gloo, whose own operations take tens of microseconds and are measured against torch's calls.
    """
    if group.backend != "gloo":
        return
    if len(group.ready) >= MOST_READY:
        group.ready.clear()
    group.ready[key] = (operation, algorithm, prepare())


def begun(
    ready: Ready,
    group: Group,
    tensor: Tensor | None,
    target: Tensor | None,
    output: Tensor | None,
    asynchronous: bool,
) -> Transfer:
    """A call of a kind that was checked before."""
    operation, algorithm, start = ready
    try:
        work = start(tensor, target)
    except RuntimeError as error:
        raise RuntimeError(f"{operation} {group.where} could not start: {error}") from error
    transfer = Started(operation, algorithm, work, output, group)
    if not asynchronous:
        transfer.wait()
    return transfer

"""Process groups: one for the data that a split moves, one for control, so that their bytes stay apart."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from collectives.counters import SocketCounter, tcp_connections
from collectives.nodes import Ends, bytes_between, peers_of_connections
from collectives.scratch import ScratchPool

if TYPE_CHECKING:
    from collectives.transfer import Phased

CPU = torch.device("cpu")


@dataclass(eq=False)
class Group:
    """Ranks that communicate together. `index` is this process's place among `ranks`, -1 if it has none."""

    name: str
    ranks: tuple[int, ...]
    index: int
    backend: str
    process_group: dist.ProcessGroup | None  # None where there is one rank and nothing to say
    device: torch.device = CPU
    wire: SocketCounter | None = None  # the kernel's count of what its own connections sent
    wire_away: list[bool] | None = None  # which of them lead to another node; None is not known
    scratch: ScratchPool = field(default_factory=ScratchPool)
    in_flight: deque[Phased] = field(default_factory=deque)  # phased operations of all groups, by start
    phased_count: int = 0
    options: dict[tuple[object, ...], object] = field(default_factory=dict)  # of native calls
    ready: dict[tuple[object, ...], tuple[str, str, Callable[..., Any]]] = field(default_factory=dict)
    size: int = field(init=False)
    where: str = field(init=False)  # for messages

    def __post_init__(self) -> None:
        self.size = len(self.ranks)
        self.where = f"in group {self.name} of ranks {list(self.ranks)}"
        if self.index >= 0:
            self.where += f" on rank {self.ranks[self.index]}"

    def place(self, rank: int) -> int:
        """Place of a global rank in this group."""
        return self.ranks.index(rank)


class World:
    """All ranks of a run.

    The default process group carries control on gloo whatever the backend, so that a loss sum or a
    stop decision never queues behind gradients. `group` makes further ones for the data; every rank
    must ask for the same ones in the same order.

    `nodes` is the node of every rank; all are on one until `spread` says otherwise.

    The nccl side has not run on a GPU.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        backend: str,
        timeout_s: float,
        store: dist.Store | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.rank, self.size, self.backend = rank, size, backend
        self.device = device or torch.device("cpu")
        self.timeout = timedelta(seconds=timeout_s)
        if size > 1:
            dist.init_process_group(
                "gloo",
                store=dist.PrefixStore("splitmeter/world", store) if store is not None else None,
                rank=rank,
                world_size=size,
                timeout=self.timeout,
            )
        everyone = dist.group.WORLD if size > 1 else None
        self._in_flight: deque[Phased] = deque()
        self.control = Group("control", tuple(range(size)), rank, "gloo", everyone, in_flight=self._in_flight)
        self._groups: dict[str, Group] = {}
        self.nodes = (0,) * size

    def spread(self, nodes: Sequence[int]) -> None:
        """Say on which node each rank runs, before operations are made.

        Raises:
            ValueError: not one number for each rank.
        """
        if len(nodes) != self.size:
            raise ValueError(f"nodes {list(nodes)} must be one for each of {self.size} ranks")
        self.nodes = tuple(nodes)

    def group(self, name: str, ranks: Sequence[int]) -> Group:
        """The data group of that name, made on first use.

        Raises:
            ValueError: ranks that the world does not have, or others than when the name was first used.
        """
        members = tuple(sorted(set(ranks)))  # as torch orders them, whatever the order given
        if not members or members[0] < 0 or members[-1] >= self.size:
            raise ValueError(f"group {name}: ranks {list(ranks)} must be some of 0 to {self.size - 1}")
        known = self._groups.get(name)
        if known is not None and known.ranks != members:
            raise ValueError(
                f"group {name} has ranks {list(known.ranks)}, and {list(members)} need another name"
            )
        if known is None:
            process_group, before = None, tcp_connections()
            if len(members) > 1:
                process_group = dist.new_group(list(members), timeout=self.timeout, backend=self.backend)
            index = members.index(self.rank) if self.rank in members else -1
            wire = SocketCounter(tcp_connections() - before) if self.backend == "gloo" else None
            own = process_group if index >= 0 else None
            self._groups[name] = Group(
                name, members, index, self.backend, own, self.device, wire, in_flight=self._in_flight
            )
        return self._groups[name]

    def wire_bytes(self) -> int | None:
        """What the kernel says left this process over its data groups; None where it does not say.

        TCP_INFO of gloo's connections. nccl's links have counters of whole devices only
        (`collectives.device_counters`), which are no rank's own.
        """
        total = 0
        counters = self._counters()
        for counter in counters:
            own = counter.bytes_sent() if counter is not None else None
            if own is None:
                return None
            total += own
        return total if counters else None

    def bytes_between_nodes(self, group: Group, sent: int, by_place: Mapping[int, int] | None) -> int | None:
        """Of `sent` bytes, those that go to other nodes; see `collectives.nodes.bytes_between`."""
        return bytes_between(self.nodes, self.rank, group.ranks, sent, by_place)

    def connection_ends(self) -> list[Ends]:
        """The ends of the data groups' connections, for `find_peers` of all ranks."""
        return [ends for counter in self._counters() if counter is not None for ends in counter.ends()]

    def find_peers(self, ends_of_rank: Sequence[Sequence[Sequence[str]]]) -> None:
        """Learn which connections of the groups so far lead to other nodes.

        Args:
            ends_of_rank: `connection_ends` of every rank.
        """
        peers = iter(peers_of_connections(self.rank, ends_of_rank))
        for group in self._groups.values():
            if group.size > 1 and group.wire is not None:
                own = [next(peers) for _ in group.wire.connections]
                known = [self.nodes[peer] != self.nodes[self.rank] for peer in own if peer is not None]
                group.wire_away = known if len(known) == len(own) else None

    def wire_bytes_between_nodes(self) -> int | None:
        """Of `wire_bytes`, what went to other nodes; None where it is not known which connections do."""
        groups = [group for group in self._groups.values() if group.size > 1]
        total = 0
        for group in groups:
            if len({self.nodes[rank] for rank in group.ranks}) == 1 and group.wire is not None:
                continue
            if group.wire is None or group.wire_away is None:
                return None
            own = group.wire.bytes_sent(group.wire_away)
            if own is None:
                return None
            total += own
        return total if groups else None

    def _counters(self) -> list[SocketCounter | None]:
        return [group.wire for group in self._groups.values() if group.size > 1]

    def sum_on_control(self, tensor: Tensor) -> None:
        """In-place sum over all ranks, complete on return. Moves CUDA tensors through the host."""
        if self.size == 1:
            return
        on_host = tensor.cpu()  # the same tensor where it is on the CPU
        dist.all_reduce(on_host, group=self.control.process_group)
        if on_host is not tensor:
            tensor.copy_(on_host)

    def close(self) -> None:
        if self.size > 1 and dist.is_initialized():
            dist.destroy_process_group()


def choose_backend(choice: str, device: torch.device) -> str:
    """`collectives.backend` resolved: nccl for CUDA tensors, gloo otherwise.

    Raises:
        ValueError: nccl asked for tensors that it cannot carry.
    """
    if choice == "auto":
        return "nccl" if device.type == "cuda" else "gloo"
    if choice == "nccl" and device.type != "cuda":
        raise ValueError(
            f"collectives.backend=nccl needs trainer.device=cuda, but tensors are on {device.type}; use gloo"
        )
    return choice

"""Which rank runs on which node: gathered once at the start of a run, and kept in summary.json."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import Any

from collectives.group import World
from trainer.control import gather_json
from trainer.place import Place

NodeMap = list[dict[str, Any]]  # {"node": 0, "host": "name", "ranks": [0, 1]}, by node


def spread_over_nodes(world: World) -> NodeMap:
    """Tell the world the node of each rank; the map. All ranks call it before they make operations."""
    place = Place.from_environment(os.environ)
    own = (None if place is None else place.node, socket.gethostname())
    found = [(node, host) for node, host in gather_json(world, own)]
    nodes = number_nodes(found)
    world.spread(nodes)
    return node_map(nodes, [host for _, host in found])


def find_peers(world: World) -> None:
    """Learn which of the connections made so far lead to other nodes; all ranks call it."""
    if len(set(world.nodes)) > 1:
        world.find_peers(gather_json(world, world.connection_ends()))


def number_nodes(found: Sequence[tuple[int | None, str]]) -> list[int]:
    """The node of every rank, from what its launcher says and the name of its host.

    The launcher's number counts, since namespaces and containers on one machine may share a host name. Where
    it gives none, ranks of one host name are one node, and nodes are numbered by their first rank.
    """
    numbers = [node for node, _ in found if node is not None]
    if len(numbers) == len(found):
        return numbers
    hosts = list(dict.fromkeys(host for _, host in found))
    return [hosts.index(host) for _, host in found]


def node_map(nodes: Sequence[int], hosts: Sequence[str]) -> NodeMap:
    """A row for each node: its number, the host name of its first rank, its ranks."""
    return [
        {
            "node": node,
            "host": hosts[nodes.index(node)],
            "ranks": [rank for rank, own in enumerate(nodes) if own == node],
        }
        for node in sorted(set(nodes))
    ]

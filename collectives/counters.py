"""What the operating system says left this process: TCP_INFO of a group's own connections.

Payload and framing together, retransmissions taken off. Reading needs no rights and touches nobody's data; a
sweep over a group's sockets takes tens of microseconds. Bytes may still be on their way when an operation
returns at a peer: difference two readings across barriers of another group, or let late bytes belong to the
next reading.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Sequence
from typing import Any

from collectives.nodes import Ends

TCP_INFO_LENGTH = 240
# linux/tcp.h, struct tcp_info
BYTES_SENT_OFFSET, BYTES_RETRANSMITTED_OFFSET = 200, 208
TCP_LISTEN = 10  # include/net/tcp_states.h; the first byte of TCP_INFO is the state
DESCRIPTORS = "/proc/self/fd"

Connection = tuple[int, str]  # file descriptor, and the inode that tells whether it is still the same socket


def tcp_connections() -> frozenset[Connection]:
    """This process's TCP connections; empty where the system does not say."""
    if not os.path.isdir(DESCRIPTORS) or not hasattr(socket, "TCP_INFO"):
        return frozenset()
    found = []
    for name in os.listdir(DESCRIPTORS):
        descriptor = int(name)
        inode = _inode(descriptor)
        if inode is not None and _tcp_info(descriptor) is not None:
            found.append((descriptor, inode))
    return frozenset(found)


class SocketCounter:
    """Bytes that left over some connections, those that a process group has opened."""

    def __init__(self, connections: frozenset[Connection]) -> None:
        self.connections = sorted(connections)

    def bytes_sent(self, over: Sequence[bool] | None = None) -> int | None:
        """Since they were opened; None where a connection cannot be read (any more), or there are none.

        `over` says of each of `connections` whether it counts; None is all.
        """
        if not self.connections:
            return None
        total = 0
        for place, (descriptor, inode) in enumerate(self.connections):
            if over is not None and not over[place]:
                continue
            info = _tcp_info(descriptor) if _inode(descriptor) == inode else None
            if info is None:
                return None
            total += struct.unpack_from("=Q", info, BYTES_SENT_OFFSET)[0]
            total -= struct.unpack_from("=Q", info, BYTES_RETRANSMITTED_OFFSET)[0]
        return total

    def ends(self) -> list[Ends]:
        """Of each of `connections`, the end here and the peer's; empty texts where it cannot be read."""
        return [_ends(descriptor) for descriptor, _ in self.connections]


def _inode(descriptor: int) -> str | None:
    try:
        target = os.readlink(f"{DESCRIPTORS}/{descriptor}")
    except OSError:
        return None
    return target if target.startswith("socket:") else None


def _ends(descriptor: int) -> Ends:
    try:
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            here, there = connection.getsockname(), connection.getpeername()
    except OSError:
        return "", ""
    return _end(here), _end(there)


def _end(address: tuple[Any, ...]) -> str:
    """Alike at both ends: one may see an IPv4 address inside IPv6, or name the interface."""
    host = str(address[0]).removeprefix("::ffff:").partition("%")[0]
    return f"{host} {address[1]}"


def _tcp_info(descriptor: int) -> bytes | None:
    """TCP_INFO of a connected TCP socket; None for anything else."""
    try:
        # A duplicate, since a socket object closes its descriptor.
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            if connection.family not in (socket.AF_INET, socket.AF_INET6):
                return None
            if connection.type != socket.SOCK_STREAM:
                return None
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_LENGTH)
    except OSError:
        return None
    if len(info) < BYTES_RETRANSMITTED_OFFSET + 8 or info[0] == TCP_LISTEN:
        return None
    return info

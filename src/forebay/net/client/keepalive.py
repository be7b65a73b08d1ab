"""Finds connections whose other end is lost without a word."""

import asyncio
import socket
from typing import Final

KEEPALIVE: Final = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)
"""Seconds of silence after which the kernel asks, seconds between its questions, how many may stay unanswered. The
other kernel answers however busy its processes are: this finds lost connections, and nothing else."""


def keep_alive(transport: asyncio.Transport) -> None:
    """Have the kernel ask on a connection that is silent; nothing is done where there is no socket."""
    sock = transport.get_extra_info("socket")
    for option in KEEPALIVE if sock is not None else ():
        sock.setsockopt(*option)

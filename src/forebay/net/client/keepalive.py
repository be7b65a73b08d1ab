"""TCP keepalive: detects connections whose peer vanished without closing them."""

import asyncio
import socket
from typing import Final

KEEPALIVE: Final = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)
"""Idle seconds before the first probe, seconds between probes, and how many may go unanswered. The peer's kernel
answers probes however busy its process is: this detects lost connections, not hung upstreams."""


def keep_alive(transport: asyncio.Transport) -> None:
    """Enable TCP keepalive on a connection; does nothing if the transport has no socket."""
    sock = transport.get_extra_info("socket")
    for option in KEEPALIVE if sock is not None else ():
        sock.setsockopt(*option)

"""Binds a unit to the first free port and publishes it in a file for the process that started the unit."""

import errno
import os
from pathlib import Path
from typing import Final

import msgspec

from forebay.core.model import Endpoint
from forebay.net.server import HttpServer

PORTS_MAX: Final = 1000
"""How many ports are tried, from the first one on."""


class NoPort(Exception):  # noqa: N818 - states the condition
    """No port could be bound; the text is the exit message of the process."""


async def listen(server: HttpServer, host: str, port_first: int, endpoint_path: Path) -> None:
    """Bind the first free port at or above `port_first` and write an `Endpoint` to the path. Raises `NoPort`."""
    last = min(port_first + PORTS_MAX, 65_536)
    for port in range(port_first, last):
        try:
            await server.start(host, port)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise NoPort(f"cannot listen on {host}:{port}: {error}") from error
            continue
        endpoint_path.parent.mkdir(parents=True, exist_ok=True)
        draft = endpoint_path.with_name(f"{endpoint_path.name}.{os.getpid()}")
        draft.write_bytes(msgspec.json.encode(Endpoint(os.getpid(), host, server.port)))
        draft.replace(endpoint_path)
        return
    raise NoPort(f"no free port on {host} from {port_first} to {last - 1}")

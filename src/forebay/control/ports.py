"""Binds ports, and finds out which process holds one."""

import errno
import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path

LISTEN = "0A"
COMMAND_CHARS_MAX = 100
IN_USE = "stop that process, or change"


@dataclass(frozen=True)
class Taken:
    """A port that cannot be bound: why, and the processes that hold it, as far as they are visible. `remedy`: what
    to do to the port or the host, or instead."""

    why: str
    pids: tuple[int, ...] = ()
    remedy: str = "change"


def bind(host: str, port: int) -> socket.socket | Taken:
    """A socket that is bound but not listening yet, or why there is none."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        return Taken(f"the address {host} is unknown: {error.strerror}")
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        return _taken(host, port, error)
    return listener


def _taken(host: str, port: int, error: OSError) -> Taken:
    if error.errno == errno.EADDRINUSE:
        pids = holders(port)
        named = "; ".join(f"process {pid}: {_command(pid)}" for pid in pids)
        return Taken(f"port {port} is in use by {named or 'a process that is not visible from here'}", pids, IN_USE)
    if error.errno == errno.EACCES:
        return Taken(f"port {port} needs privileges; ports from 1024 on do not")
    if error.errno == errno.EADDRNOTAVAIL:
        return Taken(f"{host} is not an address of this machine")
    return Taken(f"{host}:{port} cannot be bound: {error.strerror}")


def holders(port: int) -> tuple[int, ...]:
    """The processes that listen on a port of this machine."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for fields in map(str.split, lines):
            if fields[3] == LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{fields[9]}]")
    return tuple(sorted(pid for pid in _pids() if inodes and _has(pid, inodes)))


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _has(pid: int, inodes: set[str]) -> bool:
    try:
        return any(os.readlink(f"/proc/{pid}/fd/{fd}") in inodes for fd in os.listdir(f"/proc/{pid}/fd"))
    except OSError:  # it ended, or belongs to another user
        return False


def _command(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        words = ""
    return re.sub(r"\s+", " ", words).strip()[:COMMAND_CHARS_MAX] or "?"

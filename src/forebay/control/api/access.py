"""Authentication for the admin API: by key, or, on loopback, by the OS account that the kernel reports."""

import os
import pwd
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from forebay.core.cluster import is_loopback
from forebay.core.errors import Code, Refusal
from forebay.core.registry.approval import Role
from forebay.core.tenancy import Denied
from forebay.core.tenancy.roles import Admins, Caller
from forebay.obs.clock import wall_s
from forebay.registry.keys import KeyFileError, read_keys

ESTABLISHED: Final = "01"
TABLES: Final = {socket.AF_INET: Path("/proc/net/tcp"), socket.AF_INET6: Path("/proc/net/tcp6")}
STRANGE_HOST: Final = (
    "With `admin.auth: off` the admin API answers at http://127.0.0.1 and http://localhost only, not through proxies."
)
ANONYMOUS: Final = Caller("anybody", Role.VIEWER)
"""A caller without a key, where reads require none."""


class Credentials(NamedTuple):
    """What is known of a caller: the presented key, and both ends of the connection; None: unknown."""

    presented: bytes | None
    peer: tuple[str, int] | None
    server: tuple[str, int] | None
    read_only: bool
    """Whether the request only reads."""
    host: str = ""
    """Name or address in the `host` header; empty: absent."""


class Authenticator(Protocol):
    """Identifies callers."""

    def admit(self, credentials: Credentials) -> Caller:
        """Identify the caller. Raises `Refusal`."""


class KeyAuthenticator:
    """Requires a key. The key file is reloaded whenever it has changed.

    While it cannot be read, every caller is rejected.
    """

    def __init__(self, path: Path, wall: Callable[[], float] = wall_s) -> None:
        self._path = path
        self._wall = wall
        self._seen: tuple[int, int, int] | None = None
        self._admins = Admins(())

    def admit(self, credentials: Credentials) -> Caller:
        """The holder of the key. Raises `Refusal`."""
        verdict = self._known().admit(credentials.presented, self._wall())
        if isinstance(verdict, Denied):
            raise Refusal(verdict.code, verdict.text)
        return verdict

    def _known(self) -> Admins:
        try:
            stat = os.stat(self._path)
            seen = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
            if seen != self._seen:
                self._admins, self._seen = Admins(read_keys(self._path)), seen
        except FileNotFoundError:
            self._admins, self._seen = Admins(()), None
        except (OSError, KeyFileError) as error:
            self._seen = None
            raise Refusal(Code.INTERNAL, f"The keys of the admin API cannot be read: {error}.") from error
        return self._admins


class AccountAuthenticator:
    """Asks the kernel which account a local connection belongs to.

    The account that this process runs as, and root, may do everything; others may only read, as may callers that the
    kernel cannot identify. A request whose `host` is not this machine is rejected: it comes from a web page by DNS
    rebinding, or through a proxy that may forward anyone's requests.
    """

    def __init__(self, table: Callable[[Credentials], str] | None = None) -> None:
        self._table = table or _connections

    def admit(self, credentials: Credentials) -> Caller:
        """The owner of the connection, which is not looked up for reads. Raises `Refusal`."""
        if credentials.host and not is_loopback(credentials.host):
            raise Refusal(Code.ROLE_NOT_ALLOWED, STRANGE_HOST)
        if credentials.read_only:
            return ANONYMOUS
        user = self._user(credentials)
        if user is None:
            return ANONYMOUS
        return Caller(account(user), Role.ADMIN if user in (0, os.geteuid()) else Role.VIEWER)

    def _user(self, credentials: Credentials) -> int | None:
        # While a socket is being closed, the kernel may report root as its owner: require the same answer twice.
        first = owner(self._table(credentials), credentials)
        return None if first is None or owner(self._table(credentials), credentials) != first else first[0]


def owner(table: str, credentials: Credentials) -> tuple[int, int] | None:
    """User id and inode of the peer's end of a connection, from /proc/net/tcp; None: it is not listed there."""
    if credentials.peer is None or credentials.server is None:
        return None
    try:
        ends = [_end(credentials.peer), _end(credentials.server)]
    except OSError:  # a name, not an address
        return None
    for line in table.splitlines():
        fields = line.split()
        if fields[1:3] == ends and fields[3] == ESTABLISHED and fields[9] != "0":
            return int(fields[7]), int(fields[9])
    return None


def _end(address: tuple[str, int]) -> str:
    """An address as in the table: 32-bit words in the machine's byte order, which is little-endian."""
    packed = socket.inet_pton(_family(address[0]), address[0])
    words = [packed[at : at + 4][::-1].hex() for at in range(0, len(packed), 4)]
    return f"{''.join(words)}:{address[1]:04x}".upper()


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _connections(credentials: Credentials) -> str:
    try:
        return TABLES[_family(credentials.peer[0])].read_text() if credentials.peer else ""
    except OSError:  # no /proc: no caller can be identified
        return ""


def account(user: int) -> str:
    """The name of a user id."""
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:  # a user id without a name
        return f"uid-{user}"

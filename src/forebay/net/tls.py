"""The certificate of a TLS listener: load it, say what is wrong with it, take over a new one while serving.

One outer context belongs to the listening socket for good. For every handshake it steps aside for the context of the
pair that was loaded last, so a new certificate needs no new socket, and connections that are open keep theirs.
"""

import asyncio
import fcntl
import os
import ssl
import struct
import termios
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from forebay.core.model import TlsSpec
from forebay.core.section import Conflict
from forebay.obs.clock import wall_s

if TYPE_CHECKING:
    import structlog

    from forebay.obs.metrics import Metrics

LOOK_S: Final = 1.0
"""A new pair is taken over at the second look at which it stands still."""
EXPIRY_WARNING_S: Final = 14 * 86_400
"""A certificate that ends sooner is warned of: whatever renews it should have done so by now."""
FILE_BYTES_MAX: Final = 1024 * 1024
_STRANGERS: Final = frozenset({"KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH", "NO_CERTIFICATE_ASSIGNED"})
"""What OpenSSL calls a key that does not belong to the certificate."""
_ALLOWED: Final = {
    "certificate": "a PEM file: the certificate of this server, then the chain to its CA",
    "key": "a PEM file: the private key of the certificate, without a password",
    "clients": "a PEM file: certificates of authorities",
}
HTTP_1: Final = ("http/1.1",)
Stamp = tuple[tuple[int, int, int] | None, ...]


class BadPair(Exception):  # noqa: N818 - states the condition
    """A listener cannot be served with that. The paths of `problems` are `certificate`, `key` and `clients`."""

    def __init__(self, *problems: Conflict) -> None:
        self.problems = problems
        super().__init__("; ".join(f"{p.path}: found {p.found}; allowed: {p.allowed}" for p in problems))


class Pair(NamedTuple):
    """A certificate with its key, loaded. `expires_s` is seconds since the epoch."""

    context: ssl.SSLContext
    expires_s: float


def load(spec: TlsSpec, clients: str | None = None, protocols: Sequence[str] = HTTP_1) -> Pair:
    """The pair in the files of `spec`, expired or not, for a listener that speaks those protocols.

    `clients` is a file of authorities, of which clients have to have a certificate; None: they need none. Raises
    `BadPair` with all that is wrong.
    """
    certificate, found = _read("certificate", spec.certificate)
    _, found_key = _read("key", spec.key)
    if found or found_key:
        raise BadPair(*found, *found_key)
    expires_s = _end_s(spec.certificate, certificate)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(list(protocols))
    try:
        context.load_cert_chain(spec.certificate, spec.key, _no_password)
    except _Locked:
        raise _bad("key", spec.key, "a key with a password") from None
    except OSError as error:  # ssl.SSLError is one
        reason = getattr(error, "reason", None)
        if reason in _STRANGERS:
            raise _bad("key", spec.key, "the key of another certificate") from None
        if reason is None:
            raise _bad("key", spec.key, "no PEM private key") from None
        raise _bad("certificate", spec.certificate, f"what OpenSSL refuses ({reason})") from None
    if clients is not None:
        try:
            context.load_verify_locations(clients)
        except OSError as error:
            raise _bad("clients", clients, f"which cannot be read ({error.strerror or error.args[-1]})") from None
        context.verify_mode = ssl.CERT_REQUIRED
    return Pair(context, expires_s)


def conflicts(raw: Mapping[str, Any]) -> Iterator[Conflict]:
    """What is wrong with the files that `gateway.tls` of a cluster, given as plain data, names."""
    gateway = raw.get("gateway")
    tls = gateway.get("tls") if isinstance(gateway, Mapping) else None
    if not isinstance(tls, Mapping):
        return
    certificate, key = tls.get("certificate"), tls.get("key")
    if not (isinstance(certificate, str) and isinstance(key, str) and certificate and key):
        return  # the types are somebody else's business
    try:
        pair = load(TlsSpec(certificate, key))
    except BadPair as error:
        yield from (Conflict(f"gateway.tls.{path}", found, allowed) for path, found, allowed in error.problems)
    else:
        if pair.expires_s <= wall_s():
            found = f'"{certificate}", which expired on {day(pair.expires_s)}'
            yield Conflict("gateway.tls.certificate", found, "a certificate that is still valid")


def day(at_s: float) -> str:
    """The day (UTC) of a time in seconds since the epoch."""
    return datetime.fromtimestamp(at_s, UTC).date().isoformat()


class Renewal:
    """The certificate that a listener serves with, renewed whenever its files change.

    `clients` and `protocols` are those of `load`. A client that was let in may resume its TLS session, whatever has
    become of its authority.
    """

    def __init__(
        self,
        spec: TlsSpec,
        log: "structlog.stdlib.BoundLogger",
        metrics: "Metrics | None" = None,
        *,
        clients: str | None = None,
        protocols: Sequence[str] = HTTP_1,
        wall: Callable[[], float] = wall_s,
    ) -> None:
        self._spec = spec
        self._clients = clients
        self._protocols = protocols
        self._log = log
        self._metrics = metrics
        self._wall = wall
        self._pair: Pair
        self._taken: Stamp = ()
        self._seen: Stamp = ()
        self._complaint = ""
        self._warned = False

    def start(self) -> ssl.SSLContext:
        """Load the pair; the context is for the listening socket. Raises `BadPair`."""
        self._take()
        outer = self._pair.context
        outer.sni_callback = self._choose  # called for every client, with or without a name
        return outer

    @property
    def expires_s(self) -> float:
        """When the certificate in use ends, seconds since the epoch."""
        return self._pair.expires_s

    async def follow(self) -> None:
        """Look again and again."""
        while True:
            self.look()
            await asyncio.sleep(LOOK_S)

    def look(self) -> None:
        """Take over a changed pair that has stood still since the last look; a broken one changes nothing."""
        if not self._warned and self._pair.expires_s - self._wall() < EXPIRY_WARNING_S:
            self._warned = True
            self._log.warning("certificate expires soon", path=self._spec.certificate, on=day(self._pair.expires_s))
        stamp = self._stamp()
        if stamp == self._taken:
            self._complaint = ""
        elif stamp == self._seen:
            self._renew()
        self._seen = stamp

    def _renew(self) -> None:
        outcome, complaint = "taken", ""
        try:
            self._take()
        except BadPair as error:
            outcome, complaint = "broken", str(error)
        if self._metrics is not None:
            self._metrics.counter("tls_reloads_total", outcome).inc()
        if complaint and complaint != self._complaint:
            self._log.warning("certificate unusable, going on with the last one", problem=complaint)
        self._complaint = complaint

    def _take(self) -> None:
        stamp = self._stamp()  # taken first: what changes while it is read is another pair at the next look
        self._pair = load(self._spec, self._clients, self._protocols)
        self._taken = stamp
        self._warned = False
        if self._metrics is not None:
            self._metrics.gauge("tls_certificate_expiry_seconds").set(self._pair.expires_s)
        self._log.info("certificate taken over", path=self._spec.certificate, expires=day(self._pair.expires_s))

    def _stamp(self) -> Stamp:
        paths = (self._spec.certificate, self._spec.key, *((self._clients,) if self._clients else ()))
        return tuple(_stamp(path) for path in paths)

    def _choose(self, handshake: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        handshake.context = self._pair.context


def in_flight_bytes(transport: asyncio.BaseTransport) -> int:
    """Bytes that the kernel holds because the peer's has not acknowledged them (SIOCOUTQ of Linux' tcp(7)).

    A TLS transport does not say what the transport below it has still to send. While that is anything, this is 0 for
    moments at most.
    """
    try:
        sock = transport.get_extra_info("socket")
        answer = fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4)) if sock else bytes(4)
    except OSError:  # closed meanwhile
        return 0
    return int(struct.unpack("i", answer)[0])


class _Locked(Exception):  # noqa: N818 - states the condition
    """OpenSSL asks for a password, which it would otherwise do on the terminal."""


def _no_password() -> str:
    raise _Locked


def _bad(field: str, path: str, what: str) -> BadPair:
    return BadPair(Conflict(field, f'"{path}", {what}', _ALLOWED[field]))


def _read(field: str, path: str) -> tuple[bytes, tuple[Conflict, ...]]:
    try:
        with open(path, "rb") as file:
            return file.read(FILE_BYTES_MAX), ()
    except OSError as error:
        return b"", _bad(field, path, f"which cannot be read ({error.strerror})").problems


def _end_s(path: str, text: bytes) -> float:
    """When the first certificate of a PEM file ends, seconds since the epoch. Raises `BadPair` if there is none."""
    from cryptography.x509 import load_pem_x509_certificate

    try:
        return load_pem_x509_certificate(text).not_valid_after_utc.timestamp()
    except ValueError:
        raise _bad("certificate", path, "no PEM certificate") from None


def _stamp(path: str) -> tuple[int, int, int] | None:
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return stat.st_ino, stat.st_size, stat.st_mtime_ns

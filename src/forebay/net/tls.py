"""The certificate of a TLS listener: loads it, validates it, and reloads it while serving.

The listening socket keeps one outer context. For every handshake it is swapped for the context that was loaded last,
so a new certificate needs no new socket, and open connections keep theirs.
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

from forebay.core.errors import Conflict
from forebay.core.model import TlsSpec
from forebay.obs.clock import wall_s

if TYPE_CHECKING:
    import structlog

    from forebay.obs.metrics import Metrics

LOOK_S: Final = 1.0
"""Poll interval. A new pair is loaded once its files are the same at two consecutive polls."""
EXPIRY_WARNING_S: Final = 14 * 86_400
"""Warn about a certificate that expires sooner: whatever renews it should have done so by now."""
FILE_BYTES_MAX: Final = 1024 * 1024
_KEY_MISMATCH: Final = frozenset({"KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH", "NO_CERTIFICATE_ASSIGNED"})
"""OpenSSL's reasons for a key that does not match the certificate."""
_ALLOWED: Final = {
    "certificate": "a PEM file: the certificate of this server, then the chain to its CA",
    "key": "a PEM file: the private key of the certificate, without a password",
    "clients": "a PEM file: certificates of authorities",
}
HTTP_1: Final = ("http/1.1",)
Stamp = tuple[tuple[int, int, int] | None, ...]


class BadPair(Exception):  # noqa: N818 - states the condition
    """A listener cannot use these files. The paths of `problems` are `certificate`, `key` and `clients`."""

    def __init__(self, *problems: Conflict) -> None:
        self.problems = problems
        super().__init__("; ".join(f"{p.path}: found {p.found}; allowed: {p.allowed}" for p in problems))


class Pair(NamedTuple):
    """A loaded certificate with its key, and when it is valid, in seconds since the epoch."""

    context: ssl.SSLContext
    begins_s: float
    expires_s: float

    def is_valid(self, now: float) -> bool:
        """Whether it is valid now."""
        return self.begins_s <= now < self.expires_s


def load(spec: TlsSpec, clients: str | None = None, protocols: Sequence[str] = HTTP_1) -> Pair:
    """Load the pair in the files of `spec`, expired or not, for a listener that offers those ALPN protocols.

    `clients`: a file of CA certificates, one of which must have signed the certificate of every client; None: clients
    need none. Raises `BadPair` with all problems.
    """
    certificate, found = _read("certificate", spec.certificate)
    _, found_key = _read("key", spec.key)
    if found or found_key:
        raise BadPair(*found, *found_key)
    begins_s, expires_s = _validity(spec.certificate, certificate)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(list(protocols))
    try:
        context.load_cert_chain(spec.certificate, spec.key, _no_password)
    except _PasswordRequired:
        raise _bad("key", spec.key, "a key with a password") from None
    except OSError as error:  # ssl.SSLError is one
        reason = getattr(error, "reason", None)
        if reason in _KEY_MISMATCH:
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
    return Pair(context, begins_s, expires_s)


def conflicts(raw: Mapping[str, Any]) -> Iterator[Conflict]:
    """Problems with the files named in `gateway.tls` of a cluster, which is given as plain data."""
    gateway = raw.get("gateway")
    tls = gateway.get("tls") if isinstance(gateway, Mapping) else None
    if not isinstance(tls, Mapping):
        return
    certificate, key = tls.get("certificate"), tls.get("key")
    if not (isinstance(certificate, str) and isinstance(key, str) and certificate and key):
        return  # wrong types are reported by the schema check
    try:
        pair = load(TlsSpec(certificate, key))
    except BadPair as error:
        yield from (Conflict(f"gateway.tls.{path}", found, allowed) for path, found, allowed in error.problems)
    else:
        if pair.expires_s <= wall_s():
            yield _expired("gateway.tls.certificate", certificate, pair)


def _expired(field: str, path: str, pair: Pair) -> Conflict:
    found = f'"{path}", which expired on {day(pair.expires_s)}'
    return Conflict(field, found, "a certificate that is still valid")


def _early(path: str, pair: Pair) -> Conflict:
    found = f'"{path}", which is not valid before {datetime.fromtimestamp(pair.begins_s, UTC):%Y-%m-%dT%H:%M:%SZ}'
    return Conflict("certificate", found, "a certificate that is valid already")


def day(at_s: float) -> str:
    """The day (UTC) of a time in seconds since the epoch."""
    return datetime.fromtimestamp(at_s, UTC).date().isoformat()


class CertificateReloader:
    """The certificate that a listener uses, reloaded whenever its files change.

    `clients` and `protocols` are those of `load`. A client may resume its TLS session even after the CA that signed
    its certificate has been removed.
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
        outer.sni_callback = self._choose  # called for every client, with or without SNI
        return outer

    @property
    def expires_s(self) -> float:
        """When the certificate in use expires, in seconds since the epoch."""
        return self._pair.expires_s

    async def follow(self) -> None:
        """Poll forever."""
        while True:
            self.look()
            await asyncio.sleep(LOOK_S)

    def look(self) -> None:
        """Load a changed pair whose files are the same as at the last poll; an invalid pair leaves the old one in
        use."""
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
            self._take(self._pair)
        except BadPair as error:
            outcome, complaint = "broken", str(error)
        if self._metrics is not None:
            self._metrics.counter("tls_reloads_total", outcome).inc()
        if complaint and complaint != self._complaint:
            self._log.warning("new certificate invalid, the old one stays in use", problem=complaint)
        self._complaint = complaint

    def _take(self, current: Pair | None = None) -> None:
        """Load the pair. Raises `BadPair`, also if it is not valid now and the `current` one is."""
        stamp = self._stamp()  # read first: a change during loading counts as another pair at the next poll
        pair, now = load(self._spec, self._clients, self._protocols), self._wall()
        if current is not None and current.is_valid(now) and not pair.is_valid(now):
            early, path = now < pair.begins_s, self._spec.certificate
            raise BadPair(_early(path, pair) if early else _expired("certificate", path, pair))
        self._pair = pair
        self._taken = stamp
        self._warned = False
        if self._metrics is not None:
            self._metrics.gauge("tls_certificate_expiry_seconds").set(self._pair.expires_s)
        self._log.info("certificate loaded", path=self._spec.certificate, expires=day(self._pair.expires_s))

    def _stamp(self) -> Stamp:
        paths = (self._spec.certificate, self._spec.key, *((self._clients,) if self._clients else ()))
        return tuple(_stamp(path) for path in paths)

    def _choose(self, handshake: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        handshake.context = self._pair.context


def in_flight_bytes(transport: asyncio.BaseTransport) -> int:
    """Bytes in the kernel that the peer has not acknowledged (SIOCOUTQ, Linux tcp(7)).

    A TLS transport does not report what the transport below it has still to send. While there is any, this is 0 only
    momentarily.
    """
    try:
        sock = transport.get_extra_info("socket")
        answer = fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4)) if sock else bytes(4)
    except OSError:  # already closed
        return 0
    return int(struct.unpack("i", answer)[0])


class _PasswordRequired(Exception):  # noqa: N818 - states the condition
    """OpenSSL asks for a password, which by default it reads from the terminal."""


def _no_password() -> str:
    raise _PasswordRequired


def _bad(field: str, path: str, what: str) -> BadPair:
    return BadPair(Conflict(field, f'"{path}", {what}', _ALLOWED[field]))


def _read(field: str, path: str) -> tuple[bytes, tuple[Conflict, ...]]:
    try:
        with open(path, "rb") as file:
            return file.read(FILE_BYTES_MAX), ()
    except OSError as error:
        return b"", _bad(field, path, f"which cannot be read ({error.strerror})").problems


def _validity(path: str, text: bytes) -> tuple[float, float]:
    """When the first certificate of a PEM file begins to be valid and expires, in seconds since the epoch.

    Raises `BadPair` if there is none.
    """
    from cryptography.x509 import load_pem_x509_certificate

    try:
        found = load_pem_x509_certificate(text)
        return found.not_valid_before_utc.timestamp(), found.not_valid_after_utc.timestamp()
    except ValueError:
        raise _bad("certificate", path, "no PEM certificate") from None


def _stamp(path: str) -> tuple[int, int, int] | None:
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return stat.st_ino, stat.st_size, stat.st_mtime_ns

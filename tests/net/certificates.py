"""Certificates for TLS tests, and clients that trust their CA."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from pathlib import Path

import trustme
from tests.net.rig import Peer

from forebay.core.model import TlsSpec

CA = trustme.CA()


def issue(expires_s: float | None = None, ca: trustme.CA = CA, *, begins_s: float | None = None) -> trustme.LeafCert:
    """A certificate for this machine."""
    begin, until = (None if at is None else datetime.fromtimestamp(at, UTC) for at in (begins_s, expires_s))
    return ca.issue_cert("localhost", "127.0.0.1", not_before=begin, not_after=until)


def chain(leaf: trustme.LeafCert) -> bytes:
    """What belongs into the certificate file."""
    return b"".join(pem.bytes() for pem in leaf.cert_chain_pems)


def write(folder: Path, leaf: trustme.LeafCert) -> TlsSpec:
    """Put a pair where a listener looks for it, the way certbot does: each file at once, one after the other."""
    spec = TlsSpec(str(folder / "tls.pem"), str(folder / "tls.key"))
    for path, content in ((spec.certificate, chain(leaf)), (spec.key, leaf.private_key_pem.bytes())):
        draft = Path(f"{path}.new")
        draft.write_bytes(content)
        draft.replace(path)
    return spec


def trusting(ca: trustme.CA = CA) -> ssl.SSLContext:
    """What a client that trusts the CA needs."""
    context = ssl.create_default_context()
    ca.configure_trust(context)
    return context


def der(leaf: trustme.LeafCert) -> bytes:
    """The certificate itself, as a client sees it."""
    return ssl.PEM_cert_to_DER_cert(leaf.cert_chain_pems[0].bytes().decode())


@contextlib.asynccontextmanager
async def tls_peer(port: int, context: ssl.SSLContext | None = None) -> AsyncIterator[Peer]:
    """A connection over TLS to a local port. Raises ssl.SSLError if the handshake fails."""
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", port, ssl=context or trusting(), server_hostname="localhost"
    )
    try:
        yield Peer(reader, writer)
    finally:
        writer.transport.abort()
        with contextlib.suppress(ConnectionError, ssl.SSLError):
            await writer.wait_closed()


def seen(client: Peer) -> bytes:
    """The certificate that the server has shown, DER."""
    shown = client.writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    assert isinstance(shown, bytes)
    return shown

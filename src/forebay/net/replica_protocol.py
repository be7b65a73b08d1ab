"""Between replicas (workers or model servers), their gateways and control: headers, and the replica's lease.

Clients never see most of the headers.
"""

import asyncio
from typing import Final, Protocol

from forebay.core.leading.lease import ReplicaLease

GATEWAY: Final = b"x-forebay-gateway"
"""Request header that a gateway sets to `1`: it can have another replica finish what this one cannot."""
UNIT: Final = b"x-forebay-unit"
"""Request header `ID.GENERATION`: the unit that the gateway expects to reach. Sent first on each connection."""
DEADLINE: Final = b"x-forebay-deadline-ms"
"""Request header of clients, sent on to model servers: milliseconds after arrival by which a response is needed."""
CONTINUE: Final = b"x-forebay-continue"
"""Request header `ID,CREATED,BYTES,EVENTS`: the last BYTES bytes of the body are text that the client already has,
from EVENTS events. They belong to the only choice of a stream that another replica began under this id, at this time
(Unix seconds). EVENTS may be omitted for APIs that neither number events nor open a stream with several."""
RETRYABLE: Final = (b"x-forebay-retryable", b"1")
"""Response header of a refusal: no work was done, and the gateway may try another replica."""
RESUMABLE: Final = b"x-forebay-resumable"
"""Response header `0` of a stream that no other replica could continue."""
USAGE: Final = b"x-forebay-usage"
"""Header of a whole response, or trailer of a stream, with its token counts: `PROMPT,COMPLETION,CACHED`."""
ERROR: Final = b"x-forebay-error"
"""Trailer of a stream that a replica cannot finish: the error code, which decides whether another one resumes it."""


class LoadPolled(Protocol):
    """What answers load polls, and so renews the replica's lease."""

    asked_at: float
    """Time of the last load poll, on the loop's clock, seconds."""


async def lease_expiry(polled: LoadPolled, lease_s: float) -> None:
    """Return when the lease, which begins now, has expired: nothing has polled the load for `lease_s`."""
    now = asyncio.get_running_loop().time
    polled.asked_at = now()
    while True:
        lease = ReplicaLease(polled.asked_at, lease_s)
        if lease.ended(now()):
            return
        await asyncio.sleep(lease.look_again_s(now()))

"""Operations on the gateways' records of requests: files of this machine, which may be many and large.

They are read in a thread of their own, so as not to block the registry, and for a limited time.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Final, TypeVar

from forebay.control.api.behind import Asked, Handler
from forebay.control.api.recorded import (
    TAIL_BYTES_MAX,
    USAGE_ROWS_MAX,
    AuditTail,
    AuditVerified,
    Decisions,
    Records,
    Still,
    Usage,
)
from forebay.core.errors import Code, Refusal
from forebay.wire import admin_request

T = TypeVar("T")
READ_S_MAX: Final = 300.0
"""The longest time spent on reading for one request."""


async def decisions(asked: Asked) -> Decisions:
    """How a request was routed."""
    request_id = admin_request.name(asked.request.query_params, "request_id")
    if not request_id:
        raise Refusal(Code.INVALID_REQUEST, "request_id: expected the `x-request-id` of a response", "request_id")
    return await _read(asked, lambda records, still: records.decisions(request_id, still))


async def usage(asked: Asked) -> Usage:
    """The usage by tenant and model."""
    wanted = admin_request.usage(asked.request.query_params)
    found = await _read(asked, lambda records, still: records.usage(wanted, still))
    if len(found.rows) > USAGE_ROWS_MAX:
        text = f"That is more than {USAGE_ROWS_MAX} rows: ask for a later `since`, one `tenant` or one `model`."
        raise Refusal(Code.INVALID_REQUEST, text, "since")
    return found


async def tail(asked: Asked) -> AuditTail:
    """The newest lines of the audit log."""
    last = admin_request.audit_tail(asked.body)
    return await _read(asked, lambda records, still: records.tail(last, TAIL_BYTES_MAX, still))


async def verify(asked: Asked) -> AuditVerified:
    """Verify the audit log."""
    archived = admin_request.audit_verify(asked.body)
    return await _read(asked, lambda records, still: records.verify(archived, still))


async def _read(asked: Asked, work: Callable[[Records, Still], T]) -> T:
    behind, clock = asked.behind, asyncio.get_running_loop().time
    records, ends_at = behind.records, clock() + READ_S_MAX
    if records is None:
        raise Refusal(Code.CONFLICT, "This cluster has no records of requests.")

    def still() -> None:
        behind.catalogue.progress("reading records", 0, None)
        if clock() > ends_at:
            text = f"The records take longer than {READ_S_MAX:.0f} s to read; read them where the gateways run."
            raise Refusal(Code.CONFLICT, text)

    try:
        return await behind.reading(lambda: work(records, still))
    except OSError as error:
        raise Refusal(Code.INTERNAL, f"The records cannot be read: {error}. Try again.") from error


HANDLERS: Final[Mapping[str, Handler]] = {
    "decisions": decisions,
    "usage": usage,
    "auditTail": tail,
    "verifyAudit": verify,
}

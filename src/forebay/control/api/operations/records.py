"""Operations on the gateways' records of requests: files of this machine, which may be many and large.

They are read in a thread of their own, so as not to block the registry, and for a limited time.
"""

import asyncio
from collections.abc import Callable, Mapping
from typing import Final, TypeVar

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
from forebay.control.api.services import AdminCall, Handler
from forebay.core.errors import Code, Refusal
from forebay.wire import admin_request

T = TypeVar("T")
READ_S_MAX: Final = 300.0
"""The longest time spent on reading for one request."""


async def decisions(call: AdminCall) -> Decisions:
    """How a request was routed."""
    request_id = admin_request.name(call.request.query_params, "request_id")
    if not request_id:
        raise Refusal(Code.INVALID_REQUEST, "request_id: expected the `x-request-id` of a response", "request_id")
    return await _read(call, lambda records, still: records.decisions(request_id, still))


async def usage(call: AdminCall) -> Usage:
    """The usage by tenant and model."""
    wanted = admin_request.usage(call.request.query_params)
    found = await _read(call, lambda records, still: records.usage(wanted, still))
    if len(found.rows) > USAGE_ROWS_MAX:
        text = f"That is more than {USAGE_ROWS_MAX} rows: ask for a later `since`, one `tenant` or one `model`."
        raise Refusal(Code.INVALID_REQUEST, text, "since")
    return found


async def tail(call: AdminCall) -> AuditTail:
    """The newest lines of the audit log."""
    last = admin_request.audit_tail(call.body)
    return await _read(call, lambda records, still: records.tail(last, TAIL_BYTES_MAX, still))


async def verify(call: AdminCall) -> AuditVerified:
    """Verify the audit log."""
    archived = admin_request.audit_verify(call.body)
    return await _read(call, lambda records, still: records.verify(archived, still))


async def _read(call: AdminCall, work: Callable[[Records, Still], T]) -> T:
    services, clock = call.services, asyncio.get_running_loop().time
    records, ends_at = services.records, clock() + READ_S_MAX
    if records is None:
        raise Refusal(Code.CONFLICT, "This cluster has no records of requests.")

    def still() -> None:
        services.catalogue.progress("reading records", 0, None)
        if clock() > ends_at:
            text = f"The records take longer than {READ_S_MAX:.0f} s to read; read them where the gateways run."
            raise Refusal(Code.CONFLICT, text)

    try:
        return await services.reading(lambda: work(records, still))
    except OSError as error:
        raise Refusal(Code.INTERNAL, f"The records cannot be read: {error}. Try again.") from error


HANDLERS: Final[Mapping[str, Handler]] = {
    "decisions": decisions,
    "usage": usage,
    "auditTail": tail,
    "verifyAudit": verify,
}

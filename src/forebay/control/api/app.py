"""The admin API as an application: authentication, authorisation, bodies and errors of every operation."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from forebay import __version__
from forebay.control.api import documents, recorded
from forebay.control.api.access import ANONYMOUS, Credentials
from forebay.control.api.operations import cluster, deploying, keys, nodes, records, registry, scaling, sla
from forebay.control.api.services import AdminCall, Handler, Services
from forebay.control.changes import Reloaded
from forebay.control.health.documents import NodeStanding
from forebay.control.rolling.values import DeployRefused
from forebay.control.standby.sla import Sla
from forebay.control.status import Status
from forebay.core.errors import TABLE, Code, Refusal
from forebay.core.tenancy.roles import ANYWHERE, OPEN, Caller, refusal
from forebay.registry.catalogue import Listed
from forebay.registry.proved import RegistryError, Unknown
from forebay.registry.sources import SourceError
from forebay.store.database import Conflict, StoreError
from forebay.wire.admin_request import BODY_BYTES_MAX
from forebay.wire.errors import error_body
from forebay.wire.openapi import admin
from forebay.wire.openapi.admin_parts import Answers
from forebay.wire.openapi.document import Operation

BODY_TIMEOUT_S: Final = 30.0
ANSWERS: Final = Answers(
    status=Status,
    events=documents.Events,
    reloaded=Reloaded,
    history=documents.History,
    rollouts=documents.Rollouts,
    rollout=documents.RolloutDocument,
    revisions=documents.Revisions,
    revision=Listed,
    verified=documents.Verified,
    collected=documents.Collected,
    scalings=documents.Scalings,
    scaling=documents.ScalingDocument,
    sla=Sla,
    nodes=documents.NodeDocuments,
    node=NodeStanding,
    keys=documents.KeyDocuments,
    key=documents.KeyDocument,
    new_key=documents.NewKeyDocument,
    decisions=recorded.Decisions,
    usage=recorded.Usage,
    audit_tail=recorded.AuditTail,
    audit_verified=recorded.AuditVerified,
    lacking=documents.LackingDocument,
    part=documents.PartDocument,
)
HANDLERS: Final[Mapping[str, Handler]] = {
    **cluster.HANDLERS,
    **deploying.HANDLERS,
    **registry.HANDLERS,
    **scaling.HANDLERS,
    **sla.HANDLERS,
    **nodes.HANDLERS,
    **keys.HANDLERS,
    **records.HANDLERS,
}
NOT_THERE: Final = ("model", "id")
"""Parameters of a rejected rollout that name something which does not exist."""


def make_app(services: Services) -> Starlette:
    """The application: one endpoint for each path of the API description, and no other."""
    description = admin.document(__version__, ANSWERS)

    async def describe(call: AdminCall) -> Response:
        return Response(description, media_type="application/json")

    handlers = {**HANDLERS, "openapi": describe}
    paths: dict[str, dict[str, Operation]] = {}
    for operation in admin.operations(ANSWERS):
        paths.setdefault(operation.path, {})[operation.method.upper()] = operation
    return Starlette(
        routes=[Route(path, _endpoint(services, each, handlers), methods=list(each)) for path, each in paths.items()],
        exception_handlers={404: _not_routed, 405: _not_routed},
    )


def _endpoint(
    services: Services, operations: Mapping[str, Operation], handlers: Mapping[str, Handler]
) -> Callable[[Request], Awaitable[Response]]:
    async def answer(request: Request) -> Response:
        operation = operations["GET" if request.method == "HEAD" else request.method]
        try:
            caller = _admitted(services, operation, request)
            _require_leader(services, operation)
            body = b"" if operation.method == "get" else await _body(request)
            return _response(await handlers[operation.id](AdminCall(services, request, caller, body)))
        except ClientDisconnect:
            return Response(status_code=TABLE[Code.BAD_HTTP].status)
        except (Refusal, DeployRefused, RegistryError, SourceError, StoreError) as error:
            return _error_response(_translated(error))
        except Exception as mistake:  # supervisor: one request must not stop the control plane
            services.journal.note("api_mistake", f"{operation.id}: {type(mistake).__name__}: {mistake}")
            return _error_response(Refusal(Code.INTERNAL))

    return answer


def _admitted(services: Services, operation: Operation, request: Request) -> Caller:
    """The caller. Raises `Refusal` if it is not authorised for the operation."""
    if operation.id in OPEN:
        return ANONYMOUS
    read_only = operation.method == "get"
    presented = request.headers.get("authorization", "").encode("latin-1")
    ends = _pair(request, "client"), _pair(request, "server")
    caller = services.authenticator.admit(Credentials(presented, *ends, read_only, _host(request)))
    why_not = refusal(operation.id, caller)
    if why_not:
        raise Refusal(Code.ROLE_NOT_ALLOWED, f"{why_not}.")
    if not read_only and "origin" in request.headers:  # browsers send it; any web page could make this request
        raise Refusal(Code.INVALID_REQUEST, "Web pages may not make this request.", "origin")
    return caller


def _require_leader(services: Services, operation: Operation) -> None:
    """Raise `Refusal` for operations that only the leader can serve, unless this controller is the leader."""
    leading = services.control.leading
    if leading is None or operation.id in ANYWHERE:
        return
    leader = leading.status
    if leader is None or not leader.here:
        raise Refusal(Code.NOT_LEADER, f"This controller is not the leader: {leading.why_not()}.")


def _host(request: Request) -> str:
    """The name or address in `host: NAME:PORT` or `host: [ADDRESS]:PORT`."""
    text = request.headers.get("host", "")
    return text[1:].partition("]")[0] if text.startswith("[") else text.partition(":")[0]


def _pair(request: Request, end: str) -> tuple[str, int] | None:
    address = request.scope.get(end)
    return (str(address[0]), int(address[1])) if address and address[1] else None


async def _body(request: Request) -> bytes:
    """The whole body. Raises `Refusal` if it is too large or arrives too slowly."""
    parts, size = list[bytes](), 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for part in request.stream():
                size += len(part)
                if size > BODY_BYTES_MAX:
                    raise Refusal(Code.BODY_TOO_LARGE, f"The body is larger than {BODY_BYTES_MAX} bytes.")
                parts.append(part)
    except TimeoutError:
        raise Refusal(Code.REQUEST_TIMEOUT, f"The body did not arrive within {BODY_TIMEOUT_S:.0f} s.") from None
    return b"".join(parts)


def _translated(error: Exception) -> Refusal:
    """An error of the services as a refusal with an error code."""
    match error:
        case Refusal():
            return error
        case DeployRefused():
            return Refusal(
                Code.NOT_FOUND if error.param in NOT_THERE else Code.CONFLICT, f"{error.text}.", error.param
            )
        case Unknown():
            return Refusal(Code.NOT_FOUND, f"{error}.", "revision")
        case Conflict() | RegistryError() | SourceError():
            return Refusal(Code.CONFLICT, f"{error}.")
        case _:
            return Refusal(Code.STORE_UNAVAILABLE, f"{error}.")


def _response(answer: object) -> Response:
    if isinstance(answer, Response):
        return answer
    status = 422 if isinstance(answer, Reloaded) and answer.problems else 200
    return Response(msgspec.json.encode(answer), status, media_type="application/json")


def _error_response(refusal: Refusal, headers: Mapping[str, str] | None = None) -> Response:
    status = TABLE[refusal.code].status
    if status == 401:
        headers = {"www-authenticate": "Bearer"}
    return Response(error_body(refusal), status, headers, "application/json")


async def _not_routed(request: Request, error: Exception) -> Response:
    """Responds to unknown paths and methods."""
    if isinstance(error, HTTPException) and error.status_code == 405:
        return _error_response(Refusal(Code.METHOD_NOT_ALLOWED), error.headers)
    return _error_response(Refusal(Code.NOT_FOUND))

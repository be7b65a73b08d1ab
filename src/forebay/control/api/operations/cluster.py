"""Operations on the cluster as a whole: its status, its events, and changes of its file."""

import asyncio
from collections import deque
from collections.abc import Mapping
from itertools import islice
from typing import Final

from starlette.responses import PlainTextResponse, Response

from forebay.control.api.documents import Events, History
from forebay.control.api.services import AdminCall, Handler
from forebay.control.changes import Reloaded
from forebay.control.status import Status, make_status
from forebay.obs.clock import wall_s
from forebay.obs.metrics import CONTENT_TYPE
from forebay.store import events
from forebay.wire import admin_request


def _status(call: AdminCall) -> Status:
    return make_status(call.services.control, asyncio.get_running_loop().time(), wall_s())


async def livez(call: AdminCall) -> Response:
    """The controller is alive, since it responds."""
    return PlainTextResponse("ok\n")


async def readyz(call: AdminCall) -> Response:
    """Whether every model has a ready replica or starts one on demand, and a gateway is ready; else what is
    missing."""
    now = _status(call)
    if now.ready:
        return PlainTextResponse("ok\n")
    lacking = [f"{m.name}: no replica is ready" for m in now.models if not m.serves]
    return PlainTextResponse("\n".join([*(lacking or [f"gateway: {now.phase}"]), ""]), status_code=503)


async def metrics(call: AdminCall) -> Response:
    """Prometheus text format. The leadership is looked up here, as a lease may end between two rounds."""
    services = call.services
    leading = services.control.leading
    leader = leading.status if leading is not None else None
    services.metrics.gauge("control_leader").set(leading is None or not leading.why_not())
    services.metrics.gauge("control_epoch").set(leader.epoch if leader is not None else 0)
    return Response(services.metrics.render(), headers={"content-type": CONTENT_TYPE.decode()})


async def status(call: AdminCall) -> Status:
    """The status of everything that runs, observed just now."""
    await call.services.control.look()
    return _status(call)


async def recent_events(call: AdminCall) -> Events:
    """Recent events of this controller."""
    after = admin_request.number(call.request.query_params.get("after", "0"), "after")
    return Events(tuple(call.services.journal.since(after)))


async def history(call: AdminCall) -> History:
    """Events from the store."""
    wanted, own = admin_request.history(call.request.query_params), call.services.control.plan.cluster

    def read() -> History:
        with call.services.catalogue.store() as store, store.read() as connection:
            found = events.since(connection, wanted.after or 0, subject=wanted.subject, cluster=own)
            if wanted.after is not None:
                return History(tuple(islice(found, wanted.last)))
            return History(tuple(deque(found, maxlen=wanted.last)))

    return await call.services.threads(read)


async def reload(call: AdminCall) -> Reloaded:
    """Reload the cluster file."""
    return await call.services.changing(call.caller.name)


async def apply(call: AdminCall) -> Reloaded:
    """Apply the cluster file in the request."""
    wanted = admin_request.apply(call.body)
    return await call.services.changing.apply(wanted.document, call.caller, dry_run=wanted.dry_run)


HANDLERS: Final[Mapping[str, Handler]] = {
    "livez": livez,
    "readyz": readyz,
    "metrics": metrics,
    "status": status,
    "events": recent_events,
    "history": history,
    "reload": reload,
    "apply": apply,
}

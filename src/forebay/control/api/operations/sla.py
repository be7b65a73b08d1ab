"""Estimated and delivered availability."""

from collections.abc import Mapping
from typing import Final

from forebay.control.api.services import AdminCall, Handler
from forebay.control.standby.history import past
from forebay.control.standby.sla import Sla, make_sla
from forebay.core.errors import Code, Refusal
from forebay.obs.clock import wall_s
from forebay.wire import admin_request
from forebay.wire.admin_request import PERIOD_S_MAX

PERIOD_S: Final = 30 * 86_400


async def sla(call: AdminCall) -> Sla:
    """The SLA report of every model, or of one."""
    services, query = call.services, call.request.query_params
    standby, model = services.control.standby, admin_request.name(query, "model")
    if standby is None or standby.history is None:
        raise Refusal(Code.CONFLICT, "This cluster does not record availability.")
    history = standby.history
    period_s = admin_request.number(query.get("period_s", str(PERIOD_S)), "period_s")
    if not 1 <= period_s <= PERIOD_S_MAX:
        raise Refusal(Code.INVALID_REQUEST, f"period_s: expected 1 to {PERIOD_S_MAX} seconds", "period_s")
    plan = services.control.plan.only(model)
    if not plan.models:
        there = ", ".join(each.routes.name for each in services.control.plan.models)
        raise Refusal(Code.NOT_FOUND, f"There is no model {model!r}; there is: {there}.", "model")
    today = history.today()  # not through its file: the disk may be full
    until = wall_s()
    since = until - period_s
    promised = {each.routes.name: each.slo for each in plan.models}

    def read() -> Sla:
        served = services.delivered(since, until, promised) if services.delivered is not None else {}
        return make_sla(plan, standby, past(history.folder, since, until, today), served, (since, until))

    return await services.threads(read)


HANDLERS: Final[Mapping[str, Handler]] = {"sla": sla}

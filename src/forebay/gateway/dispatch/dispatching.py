"""The request facts that `core.dispatch` needs, and how its choices change the bytes of the request.

For a model without rules this costs one lookup. Everything else is read only when needed.
"""

import math
import re
from collections.abc import Mapping
from typing import Final

import msgspec

from forebay.core.admission import Band
from forebay.core.dispatch import Chosen, Facts, Table, fall_back, make_table, may_fall_back, resolve, split
from forebay.core.errors import Code, Refusal
from forebay.core.model import Condition, Dispatch, Snapshot, Task
from forebay.core.routing.speed import Lengths
from forebay.core.tenancy import ANONYMOUS, Tenant
from forebay.gateway.asking import FALLBACK
from forebay.gateway.dispatch.endpoints import Endpoint
from forebay.gateway.fleet import Served
from forebay.gateway.link import Link
from forebay.gateway.tenancy import DeniedRefusal, forbidden
from forebay.gateway.tensor import requests as tensor
from forebay.net.server import Exchange
from forebay.wire.apis.request_fields import RequestFields, request_fields
from forebay.wire.documents import UNREADABLE

BUDGET: Final = b"x-forebay-budget-ms"
"""How long the caller is willing to wait, in milliseconds."""
COST: Final = b"x-forebay-max-cost"
"""The highest price of a million tokens, in the unit of `price_per_mtok`."""
NUMBER: Final = re.compile(rb"\d{1,12}(\.\d{1,9})?")
SHOWN_CHARS_MAX: Final = 128
UNLEARNED: Final = Lengths()
_TENSOR: Final = Task.TENSOR  # looked up once: access to enum members is slow

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class Dispatcher:
    """The names in the current snapshot."""

    __slots__ = ("_table", "plain")

    def __init__(self) -> None:
        self._take(make_table(Dispatch(), ()))

    def take_over(self, snapshot: Snapshot) -> None:
        """Use this snapshot from now on."""
        self._take(make_table(snapshot.dispatch, snapshot.models))

    def _take(self, table: Table) -> None:
        self._table = table
        self.plain = table.plain
        """Models served under their own names, without any rules."""

    @property
    def names(self) -> dict[str, tuple[str, ...]]:
        """Aliases and rule names that are not models, sorted, each with the models that it may resolve to."""
        table = self._table
        ruled = {name: tuple(dict.fromkeys(r.then for _, r in rules)) for name, rules in table.rules.items()}
        named = {alias: ruled.get(to, (to,)) for alias, to in table.aliases.items()}
        return {name: to for name, to in sorted({**ruled, **named}.items()) if name not in table.models}

    def resolve(
        self,
        request: RequestFields,
        exchange: Exchange,
        task: Task,
        served: Mapping[str, Served],
        tenant: Tenant = ANONYMOUS,
        *,
        also: tuple[Task, ...] = (),
    ) -> Chosen | None:
        """The model for a request; `also`: other tasks that may serve it. None: the one named, if there is one.

        Its prompt tokens are estimated from what was learned of that model, or of the first one that a rule names.

        Raises `Refusal` for a malformed budget, and if the name resolves to no suitable model, or to none that the
        tenant may use.
        """
        name, table = request.model, self._table
        asked, revision = split(name)
        if asked not in table.aliases and asked not in table.rules and not revision:
            return None
        to = table.aliases.get(asked, asked)
        if not any(map(tenant.may_use, (to, *(rule.then for _, rule in table.rules.get(to, ()))))):
            raise DeniedRefusal(forbidden(tenant, name))  # the same as for an unknown name
        likely = (served.get(name) for name in (to, *(rule.then for _, rule in table.rules.get(to, ()))))
        lengths = next((each.lengths for each in likely if each is not None), UNLEARNED)
        tokens = lengths.tokens(request.text_bytes)
        chosen = resolve(table, _facts(table, request, exchange, task, tenant, tokens=tokens, also=also))
        if chosen is not None:
            return chosen
        shown = name[:SHOWN_CHARS_MAX]
        if revision:
            text = f"`{shown}` does not exist: revisions are those of a model or of an alias."
            raise Refusal(Code.MODEL_NOT_FOUND, text, "model")
        raise Refusal(Code.WRONG_TASK, f"`{shown}` does not lead to a model that serves {task} requests.", "model")

    def fall_back(
        self,
        chosen: Chosen,
        exchange: Exchange,
        served: Mapping[str, Served],
        trouble: Condition,
        tenant: Tenant = ANONYMOUS,
        *,
        band: Band = Band.DEFAULT,
    ) -> Chosen | None:
        """The fallback model in this condition, if the caller allows one and may use it."""
        table = self._table
        meant = chosen.before[0] if chosen.before else chosen.model
        routes = table.models.get(meant)
        if routes is None or not routes.fallback:
            return None
        given = exchange.header(FALLBACK)
        if not may_fall_back(routes, given.decode("latin-1") if given is not None else None):
            return None
        cost_max = _cost_max(exchange)
        states = {
            each.model: condition(served[each.model], band)
            for each in routes.fallback
            if each.model in served and tenant.may_use(each.model) and _price(table, each.model) <= cost_max
        }
        return fall_back(table, chosen, {**states, meant: trouble})


def condition(served: Served, band: Band) -> Condition:
    """The condition of a model for a request of this band: batch work counts only for batch work."""
    live = [link for link in served.links if link.live]
    if not live:
        return Condition.DOWN
    loads = [link.load - (len(link.batch) if band < Band.BATCH else 0) for link in live]
    free = not served.waiting.ahead(band) and any(load < x.room for load, x in zip(loads, live, strict=True))
    return Condition.FREE if free else Condition.SATURATED


def serving(models: Mapping[str, Served], name: str, endpoint: Endpoint, *, loaded: bool) -> Served:
    """The model with this name. `loaded`: the gateway has a snapshot. Raises `Refusal`."""
    served = models.get(name)
    if served is None:
        if not loaded:
            raise Refusal(Code.NO_REPLICA, "The gateway does not know its models yet.")
        shown = name if len(name) <= 128 else f"{name[:128]}…"
        raise Refusal(Code.MODEL_NOT_FOUND, f"The model `{shown}` does not exist.", "model")
    task = served.routes.task
    if task is not endpoint.task and task not in endpoint.also:
        needed = " or ".join((endpoint.task, *endpoint.also))
        text = f"The model `{name}` serves {task} requests; {endpoint.path[:256]} needs a model of the "
        text += f"task {needed}{' (a model server)' if endpoint.task is Task.TENSOR else ''}."
        raise Refusal(Code.WRONG_TASK, text, "model")
    if endpoint.method != b"POST" and not served.ready:  # status requests do not wait for a replica
        raise Refusal(Code.NO_REPLICA)
    return served


def missing_revision(served: Served, revision: str) -> Refusal | None:
    """The error for a revision that no replica has, nor is meant to have; None: there is one, or `revision` is
    empty."""
    if not revision:
        return None
    known = {link.revision for link in served.links} | meant_revisions(served)
    if revision in known:
        return None
    text = f"No replica of `{served.routes.name}` has the revision `{revision[:SHOWN_CHARS_MAX]}`"
    return Refusal(Code.MODEL_NOT_FOUND, f"{text}; there are: {', '.join(sorted(known))}.", "model")


def meant_revisions(served: Served) -> set[str]:
    """The revisions that control serves, even while a crash or a scale to zero has left no replica of them."""
    split = served.split
    return {served.routes.revision} if split is None else {split.stable, split.canary}


def of_other_revisions(links: list[Link], revision: str) -> list[tuple[str, int]]:
    """Replicas of other revisions, as (id, generation)."""
    return [(link.id, link.generation) for link in links if link.revision != revision]


def addressed(endpoint: Endpoint, exchange: Exchange, body: bytes, model: str) -> tuple[Endpoint, bytes]:
    """The request rewritten for another model, in its path or its body. Raises `Refusal`."""
    if endpoint.model:
        return tensor.find(exchange, model) or endpoint, body
    form = tensor.form_renamed(exchange, body, model) if endpoint.task is Task.TENSOR else None
    return endpoint, renamed(body, model) if form is None else form


def read(endpoint: Endpoint, exchange: Exchange, body: bytes) -> RequestFields:
    """Parse what routing needs of a request. Raises `Refusal`."""
    if endpoint.task is _TENSOR:
        return tensor.request_fields(endpoint, exchange, body)
    request = request_fields(body)
    request.limit = request.limit or endpoint.tokens_default
    return request


def renamed(body: bytes, model: str) -> bytes:
    """The body with another `model`, as a replica accepts its own name only. Raises `Refusal`.

    All other values keep their bytes. Of a duplicate key the last one counts, as in any JSON parser.
    """
    try:
        return msgspec.json.encode({**_fields(body), "model": model})
    except UNREADABLE as error:
        raise Refusal(Code.INVALID_JSON, f"The body is not valid JSON: {error}.") from None


def _facts(
    table: Table,
    request: RequestFields,
    exchange: Exchange,
    task: Task,
    tenant: Tenant,
    *,
    tokens: int,
    also: tuple[Task, ...],
) -> Facts:
    found = ((name, exchange.header(name.encode())) for name in table.headers)
    return Facts(
        name=request.model,
        task=task,
        prompt_tokens=tokens,
        tenant=tenant.name,
        headers={name: value.decode("latin-1") for name, value in found if value is not None},
        budget_ms=_budget(exchange, BUDGET),
        cost_max=_budget(exchange, COST),
        also=also,
    )


def _budget(exchange: Exchange, name: bytes) -> float:
    given = exchange.header(name)
    if given is None:
        return math.inf
    if not NUMBER.fullmatch(given):
        raise Refusal(Code.INVALID_REQUEST, f"'{name.decode()}': expected a positive number.", name.decode())
    return float(given)


def _cost_max(exchange: Exchange) -> float:
    try:
        return _budget(exchange, COST)
    except Refusal:  # a malformed limit gets an error, not a model that may cost too much
        return -1.0


def _price(table: Table, model: str) -> float:
    price = table.models[model].price_per_mtok
    return math.inf if price is None else price

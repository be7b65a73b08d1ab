"""Aliases, routes and fallbacks of the cluster file, and the conflicts between them."""

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field

from forebay.core.dispatch.table import split, unfold
from forebay.core.errors import Conflict
from forebay.core.model import Condition, Dispatch, Rule, StandIn, Task, When
from forebay.core.section import Name, Section, sections

PUBLIC_PATTERN = r"^[A-Za-z0-9]([A-Za-z0-9._:/-]{0,126}[A-Za-z0-9])?$"
"""Wider than model names: clients have the model names of other services built in."""
TARGET_PATTERN = r"^[A-Za-z0-9]([A-Za-z0-9._:/-]{0,126}[A-Za-z0-9])?(@[A-Za-z0-9._-]{1,64})?$"
CIRCLE_NAMES_MAX: Final = 8
"""Most names of a cycle that an error shows."""
HEADER_PATTERN = r"^[a-z0-9]([a-z0-9-]{0,62}[a-z0-9])?$"
PublicName = Annotated[str, Field(pattern=PUBLIC_PATTERN)]
_CONDITIONS: Final = {
    "saturated": (Condition.SATURATED,),
    "down": (Condition.DOWN,),
    "either": (Condition.SATURATED, Condition.DOWN),
}


class HeaderSettings(Section):
    """A header that a request must have."""

    name: Annotated[str, Field(pattern=HEADER_PATTERN)]
    """Its name, in lower case."""
    value: str | None = None
    """Required value; none: any."""
    prefix: str = ""
    """Required prefix of its value."""


class WhenSettings(Section):
    """Conditions of a rule; all that are given must hold. Without any, every request matches."""

    task: Task | None = None
    """The kind of request."""
    prompt_tokens_min: Annotated[int, Field(ge=0, le=1_000_000_000)] = 0
    """Shortest prompt, tokens, estimated from its bytes."""
    prompt_tokens_max: Annotated[int, Field(ge=1, le=1_000_000_000)] | None = None
    """Longest prompt, tokens, estimated from its bytes."""
    header: HeaderSettings | None = None
    """A header of the request."""
    tenant: Annotated[str, Field(min_length=1)] | None = None
    """The tenant that sent the request."""
    budget_ms_below: Annotated[float, Field(gt=0)] | None = None
    """The header `x-forebay-budget-ms` is below this, milliseconds."""
    budget_ms_above: Annotated[float, Field(ge=0)] | None = None
    """That header is above this, or missing, milliseconds."""
    within_max_cost: bool = False
    """The `price_per_mtok` of the rule's model is at most the header `x-forebay-max-cost`, or the header is
    missing."""

    def value(self) -> When:
        """The condition as gateways know it."""
        header = self.header
        return When(
            task=self.task,
            prompt_tokens_min=self.prompt_tokens_min,
            prompt_tokens_max=self.prompt_tokens_max,
            tenant=self.tenant or "",
            header=header.name if header else "",
            header_value=header.value if header else None,
            header_prefix=header.prefix if header else "",
            budget_ms_below=self.budget_ms_below,
            budget_ms_above=self.budget_ms_above,
            within_max_cost=self.within_max_cost,
        )


UNCONDITIONAL: Final[tuple[dict[str, Any] | None, ...]] = (None, {}, WhenSettings().model_dump())
"""What `when` is if a rule has no conditions."""


class RouteSettings(Section):
    """A rule: requests for `name` that match `when` go to the model `then`. The first matching rule applies."""

    name: PublicName
    """The name that clients put into `model`: that of a model, or a new one."""
    when: WhenSettings = WhenSettings()
    """Conditions on the request; none: every request matches."""
    then: Annotated[str, Field(pattern=TARGET_PATTERN)]
    """The model, or an alias of it; with `@REVISION`, only its replicas of that revision."""


class FallbackSettings(Section):
    """A model that serves the requests of another one."""

    model: Name
    """The model; it has the same task."""
    when: Literal["saturated", "down", "either"] = "either"
    """`saturated`: the queue is full, or a request has waited for half of its time limit. `down`: no replica accepts
    requests."""


def _model(value: Any) -> Any:
    """`fallback: [small]` is short for `fallback: [{model: small}]`."""
    return {"model": value} if isinstance(value, str) else value


StandInSettings = Annotated[FallbackSettings, BeforeValidator(_model)]


def stand_ins(settings: tuple[FallbackSettings, ...]) -> tuple[StandIn, ...]:
    """Fallbacks as gateways know them."""
    return tuple(StandIn(each.model, _CONDITIONS[each.when]) for each in settings)


def make_dispatch(aliases: Mapping[str, str], routes: tuple[RouteSettings, ...]) -> Dispatch:
    """Aliases and rules as gateways know them. Without conflicts, every alias leads to a model or to a name with
    rules."""
    ends, _ = unfold(aliases)
    rules = []
    for route in routes:
        then, revision = split(route.then)
        rules.append(Rule(route.name, ends.get(then, then), revision, route.when.value()))
    return Dispatch(ends, tuple(rules))


def dispatch_conflicts(raw: Mapping[str, Any]) -> Iterator[Conflict]:
    """Conflicts between models, aliases, rules and tenants, given as unvalidated data."""
    models = {m["name"]: m for m in sections(raw.get("models")) if isinstance(m.get("name"), str)}
    given = raw.get("aliases")
    entries = given.items() if isinstance(given, Mapping) else ()
    aliases = {name: to for name, to in entries if isinstance(name, str) and isinstance(to, str)}
    routes = sections(raw.get("routes"))
    ruled = {route["name"] for route in routes if isinstance(route.get("name"), str)}
    tenants = [t["name"] for t in sections(raw.get("tenants")) if isinstance(t.get("name"), str)]
    yield from _alias_conflicts(aliases, models, ruled)
    yield from _route_conflicts(routes, aliases, models)
    for index, route in enumerate(routes):
        when = route.get("when")
        if isinstance(when, Mapping):
            yield from _when_conflicts(f"routes[{index}].when", when, tenants)
    for index, model in enumerate(sections(raw.get("models"))):
        yield from _fallback_conflicts(f"models[{index}].fallback", model, models)


def _alias_conflicts(aliases: Mapping[str, str], models: Mapping[str, Any], ruled: set[str]) -> Iterator[Conflict]:
    for circle in unfold(aliases)[1]:
        way = " → ".join((*circle[:CIRCLE_NAMES_MAX], "…" if len(circle) > CIRCLE_NAMES_MAX else circle[0]))
        yield Conflict(f"aliases.{circle[0]}", f"a cycle: {way}", "an alias that leads to a model")
    for name, to in aliases.items():
        path = f"aliases.{name}"
        if not re.fullmatch(PUBLIC_PATTERN, name):
            allowed = "up to 128 letters, digits, `.`, `_`, `:`, `/`, `-`, with a letter or digit at both ends"
            yield Conflict(path, f'the name "{name[:80]}"', allowed)
        elif name in models:
            yield Conflict(path, "also the name of a model", "a name that no model has")
        elif to not in aliases and to not in models and to not in ruled:
            yield Conflict(path, f'"{to}"', f"a model, another alias or a name in `routes`: {_listed(models)}")


def _route_conflicts(
    routes: list[Mapping[str, Any]], aliases: Mapping[str, str], models: Mapping[str, Any]
) -> Iterator[Conflict]:
    ends, _ = unfold(aliases)
    last: dict[str, int] = {}
    for index, route in enumerate(routes):
        name, then, when = route.get("name"), route.get("then"), route.get("when")
        when = when if isinstance(when, Mapping) else {}
        if isinstance(name, str):
            last[name] = index
            if name in aliases:
                yield Conflict(f"routes[{index}].name", f'"{name}", an alias', "the name that the alias stands for")
        if not isinstance(then, str) or not re.fullmatch(TARGET_PATTERN, then):
            continue
        target = split(then)[0]
        model = models.get(ends.get(target, target))
        if model is None:
            yield Conflict(f"routes[{index}].then", f'"{then}"', f"a model or an alias of one: {_listed(models)}")
            continue
        if when.get("task") in list(Task) and model.get("task") in list(Task) and when["task"] != model["task"]:
            found = f'"{then}", which has the task {model["task"]}'
            yield Conflict(f"routes[{index}].then", found, f"a model with the task {when['task']}, as in `when`")
        if when.get("within_max_cost") is True and model.get("price_per_mtok") is None:
            allowed = f"false, or a `price_per_mtok` for the model {model['name']}"
            yield Conflict(f"routes[{index}].when.within_max_cost", "true", allowed)
    yield from _open_ends(routes, last, models)
    yield from _never_applied(routes, ends, models)


def _never_applied(
    routes: list[Mapping[str, Any]], ends: Mapping[str, str], models: Mapping[str, Any]
) -> Iterator[Conflict]:
    """Rules that never apply, as an earlier one matches every request of their name and task."""
    first: dict[tuple[object, object], int] = {}
    for index, route in enumerate(routes):
        name, then = route.get("name"), route.get("then")
        target = split(then)[0] if isinstance(then, str) else ""
        model = models.get(ends.get(target, target))
        if not isinstance(name, str) or model is None or model.get("task") not in list(Task):
            continue
        rule = name, model["task"]
        if rule in first:
            allowed = f'a place before routes[{first[rule]}], which matches every request for "{name}"'
            yield Conflict(f"routes[{index}]", "a rule that never applies", allowed)
        elif route.get("when") in UNCONDITIONAL:
            first[rule] = index


def _open_ends(
    routes: list[Mapping[str, Any]], last: Mapping[str, int], models: Mapping[str, Any]
) -> Iterator[Conflict]:
    """Names of no model whose rules leave some requests without one."""
    for name, index in last.items():
        when = routes[index].get("when")
        if name not in models and isinstance(when, Mapping) and when not in UNCONDITIONAL:
            allowed = f'no `when`: no model is named "{name}", so its last rule must match every request'
            yield Conflict(f"routes[{index}].when", "conditions", allowed)


def _when_conflicts(path: str, when: Mapping[str, Any], tenants: Collection[str]) -> Iterator[Conflict]:
    least, most = when.get("prompt_tokens_min"), when.get("prompt_tokens_max")
    if isinstance(least, int) and isinstance(most, int) and least > most:
        yield Conflict(f"{path}.prompt_tokens_max", str(most), f"at least {least}, the `prompt_tokens_min`")
    below, above = when.get("budget_ms_below"), when.get("budget_ms_above")
    if isinstance(below, int | float) and isinstance(above, int | float) and below <= above:
        yield Conflict(f"{path}.budget_ms_below", f"{below:g}", f"more than {above:g}, the `budget_ms_above`")
    tenant = when.get("tenant")
    if isinstance(tenant, str) and tenant and tenant not in tenants:
        yield Conflict(f"{path}.tenant", f'"{tenant}"', f"one of `tenants`: {_listed(tenants)}")


def _fallback_conflicts(path: str, model: Mapping[str, Any], models: Mapping[str, Any]) -> Iterator[Conflict]:
    listed = model.get("fallback")
    seen = {str(model.get("name")): "this model itself"}
    for place, entry in enumerate(listed if isinstance(listed, list | tuple) else ()):
        section = _model(entry)
        name = section.get("model") if isinstance(section, Mapping) else None
        if not isinstance(name, str):
            continue
        other, at = models.get(name), f"{path}[{place}]" + ("" if isinstance(entry, str) else ".model")
        if other is None:
            yield Conflict(at, f'"{name}"', f"a model: {_listed(models)}")
        elif name in seen:
            yield Conflict(at, f'"{name}", {seen[name]}', "every other model at most once")
        elif all(m.get("task") in list(Task) for m in (model, other)) and model["task"] != other["task"]:
            yield Conflict(at, f'"{name}", which has the task {other["task"]}', f"one with the task {model['task']}")
        seen[name] = "which is listed already"


def _listed(names: Collection[str]) -> str:
    return ", ".join(sorted(names)) or "there is none"

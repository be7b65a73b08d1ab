"""Selection of a model by name and by rule, and of a fallback model. Each comes with its reason."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from forebay.core.model import Condition, Dispatch, ModelRoutes, Rule, Task, When

PIN: Final = "@"
"""`chat@r-1` requests the replicas of `chat` with the revision `r-1`."""
ALLOW: Final = "allow"


class Facts(NamedTuple):
    """What rules may match on."""

    name: str
    """The requested name: a model, an alias or a name with rules; the first two may have a revision."""
    task: Task
    prompt_tokens: int = 0
    """An estimate: only the engine has the tokenizer."""
    tenant: str = ""
    headers: Mapping[str, str] = {}
    """At least those headers of `Table.headers` that the request has, by lower-case name."""
    budget_ms: float = math.inf
    cost_max: float = math.inf
    also: tuple[Task, ...] = ()
    """Further tasks whose models may serve the request."""


class Chosen(NamedTuple):
    """The model that will serve a request."""

    model: str
    why: str
    """Safe to use in a header: ASCII, on one line."""
    revision: str = ""
    """Only replicas of this revision may serve it; empty: any."""
    before: tuple[str, ...] = ()
    """Models tried before, the originally requested one first."""
    trouble: Condition = Condition.FREE
    """The condition of that one which caused the fallback."""


@dataclass(frozen=True, slots=True)
class Table:
    """A `Dispatch` combined with the existing models, prepared for look-ups."""

    models: Mapping[str, ModelRoutes]
    aliases: Mapping[str, str]
    rules: Mapping[str, tuple[tuple[int, Rule], ...]]
    """By name, each with its position in the cluster file."""
    plain: frozenset[str]
    """Models without rules: a request for one of them needs no further look-up."""
    headers: tuple[str, ...]
    """Names of the headers that rules match on."""


def make_table(dispatch: Dispatch, models: Sequence[ModelRoutes]) -> Table:
    """The table of a snapshot."""
    rules: dict[str, tuple[tuple[int, Rule], ...]] = {}
    for place, rule in enumerate(dispatch.rules):
        rules[rule.name] = (*rules.get(rule.name, ()), (place, rule))
    named = {routes.name: routes for routes in models}
    return Table(
        models=named,
        aliases=dict(dispatch.aliases),
        rules=rules,
        plain=frozenset(named.keys() - rules.keys() - dispatch.aliases.keys()),
        headers=tuple(sorted({rule.when.header for rule in dispatch.rules if rule.when.header})),
    )


def split(name: str) -> tuple[str, str]:
    """Split a name from its revision, which is empty if there is none."""
    name, _, revision = name.partition(PIN)
    return name, revision


def unfold(aliases: Mapping[str, str]) -> tuple[dict[str, str], list[tuple[str, ...]]]:
    """The final target of every alias, and the cycles of aliases.

    An alias that leads into a cycle has no target.
    """
    ends: dict[str, str] = {}
    circles: list[tuple[str, ...]] = []
    lost: set[str] = set()
    for alias in aliases:
        way: dict[str, None] = {}
        at = alias
        while at in aliases and at not in ends and at not in lost and at not in way:
            way[at] = None
            at = aliases[at]
        if at in way:
            names = tuple(way)
            circles.append(names[names.index(at) :])
        if at in way or at in lost:
            lost.update(way)
        else:
            ends.update(dict.fromkeys(way, ends.get(at, at)))
    return ends, circles


def resolve(table: Table, facts: Facts) -> Chosen | None:
    """The model for a request: the first matching rule of its name, or the model of that name. None: there is none.

    A rule matches only if its model has the request's task; if none does, a further task that may serve the request.
    A revision is only valid for a model or an alias of one, and bypasses rules.
    """
    asked, revision = split(facts.name)
    name = table.aliases.get(asked, asked)
    if revision:
        return Chosen(name, "the revision asked for", revision) if name in table.models else None
    for task in (facts.task, *facts.also):
        for place, rule in table.rules.get(name, ()):
            routes = table.models.get(rule.then)
            if routes is not None and routes.task is task and _fits(rule.when, facts, task, routes.price_per_mtok):
                return Chosen(rule.then, f"routes[{place}]", rule.revision)
    if name not in table.models:
        return None
    return Chosen(name, "the name asked for" if name == asked else f"{asked} is an alias of it")


def _fits(when: When, facts: Facts, task: Task, price: float | None) -> bool:
    """Whether all conditions hold. A missing budget counts as unlimited."""
    if when.task is not None and when.task is not task:
        return False
    if not when.prompt_tokens_min <= facts.prompt_tokens <= (when.prompt_tokens_max or math.inf):
        return False
    if when.tenant and when.tenant != facts.tenant:
        return False
    if when.header and not _has(facts.headers.get(when.header), when):
        return False
    if when.budget_ms_below is not None and facts.budget_ms >= when.budget_ms_below:
        return False
    if when.budget_ms_above is not None and facts.budget_ms <= when.budget_ms_above:
        return False
    return not when.within_max_cost or (math.inf if price is None else price) <= facts.cost_max


def _has(value: str | None, when: When) -> bool:
    if value is None or not value.startswith(when.header_prefix):
        return False
    return when.header_value is None or value == when.header_value


def may_fall_back(routes: ModelRoutes, asked: str | None) -> bool:
    """Whether another model may serve a request for this one.

    `asked` is the caller's header, None if missing. Any value but `allow` means no: if it is misspelt, an error is
    better than an unwanted model.
    """
    return routes.fallback_default if asked is None else asked.strip().lower() == ALLOW


def fall_back(table: Table, chosen: Chosen, states: Mapping[str, Condition]) -> Chosen | None:
    """The fallback: the next usable one of those listed for the originally requested model. None: there is none.

    `states` has the conditions of the requested model and of those that the caller may use. There is no fallback for
    a request with a revision, to a model with another task, or to a model already tried.
    """
    meant = chosen.before[0] if chosen.before else chosen.model
    routes = table.models.get(meant)
    if routes is None or chosen.revision:
        return None
    trouble = chosen.trouble if chosen.before else states.get(meant, Condition.FREE)
    before = (*chosen.before, chosen.model)
    for stand_in in routes.fallback:
        other = table.models.get(stand_in.model)
        if other is None or other.task is not routes.task or other.name in before:
            continue
        if trouble in stand_in.when and states.get(other.name) is Condition.FREE:
            return Chosen(other.name, f"{meant} is {trouble}", "", before, trouble)
    return None

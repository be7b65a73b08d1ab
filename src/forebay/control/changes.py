"""The differences between two cluster files, and their effects on running units."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import msgspec

from forebay.control.plan import Plan, PlannedModel
from forebay.core.cluster import Cluster
from forebay.core.reconcile import Slot

NEED_RESTART: Final = (
    "name",
    "gateway.host",
    "gateway.port",
    "admin.host",
    "admin.port",
    "admin.auth",
    "admin.keys_file",
    "store",
    "control.controllers",
    "control.lease_s",
    "health.",
)
"""Settings that cannot change while `forebay up` runs: its folder, its store, the addresses that clients use, who may
change it, and, if a name ends in a dot, the whole section: the sources of GPU readings."""
NAMED: Final = ("models", "nodes", "tenants")
"""Lists whose entries are matched by name, not by position."""
VALUE_CHARS_MAX: Final = 80
NOTHING: Final = "nothing"
"""Stands for an absent value."""


@dataclass(frozen=True, slots=True)
class Change:
    """A changed setting; the values as JSON, truncated if long."""

    path: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.path}: {self.before} → {self.after}"


@dataclass(frozen=True, slots=True)
class Reloaded:
    """The outcome of reloading the cluster file. If there are `problems`, nothing was changed."""

    problems: tuple[str, ...] = ()
    changes: tuple[Change, ...] = ()
    effects: tuple[str, ...] = ()
    """What is done now, and to which units."""


def needs_restart(change: Change) -> bool:
    """Whether it cannot be applied to what is running."""
    return any(change.path == each or (each.endswith(".") and change.path.startswith(each)) for each in NEED_RESTART)


def changes(before: Cluster, after: Cluster) -> tuple[Change, ...]:
    """Every changed setting, in the order of the cluster file; removed ones come last in their section."""
    return tuple(_differences("", before.model_dump(mode="json"), after.model_dump(mode="json")))


def _differences(path: str, before: object, after: object) -> Iterator[Change]:
    if path in NAMED:
        before, after = _by_name(before), _by_name(after)
    if not (isinstance(before, Mapping) and isinstance(after, Mapping)):
        if before != after:
            yield Change(path, _show(before), _show(after))
        return
    for key in dict.fromkeys([*after, *before]):
        inner = f"{path}.{key}" if path else str(key)
        if key in before and key in after:
            yield from _differences(inner, before[key], after[key])
        elif key in after:
            yield Change(inner, NOTHING, _show(after[key]))
        else:
            yield Change(inner, _show(before[key]), NOTHING)


def _by_name(section: object) -> object:
    assert isinstance(section, Sequence)
    return {entry["name"]: entry for entry in section}


def _show(value: object) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= VALUE_CHARS_MAX else f"{text[: VALUE_CHARS_MAX - 1]}…"


def effects(before: Plan, after: Plan) -> tuple[str, ...]:
    """What the controller and the gateways do to get from one plan to the other, as sentences."""
    old, new = ({model.routes.name: model for model in plan.models} for plan in (before, after))
    told = []
    names = before.dispatch != after.dispatch or before.tenants != after.tenants
    if names or any(_routing(old[name], new[name]) for name in old if name in new):
        told.append("the gateways apply it within a second")
    told += _gateways(before.gateways, after.gateways)
    if before.nodes != after.nodes or any(old[name].placement != new[name].placement for name in old if name in new):
        told.append("replicas that may no longer run where they are move, one per model at a time; the rest stays")
    if before.limits != after.limits:
        told.append("the limits of GPUs or replicas for all models change; replicas over them are removed")
    for name, model in new.items():
        if name in old:
            told += [f"{name}: {effect}" for effect in (*_scaled(old[name], model), *_replicas(old[name], model))]
            if old[name].standby != model.standby:
                told.append(f"{name}: {_count(model.standby)} on standby, {old[name].standby} before")
        elif model.slots:
            told.append(f"{name}: {_count(len(model.slots))} {'start' if len(model.slots) > 1 else 'starts'}")
        else:
            told.append(f"{name}: starts on the first request")
    told += [f"{name}: is no longer served; requests in flight may finish" for name in old if name not in new]
    return tuple(told)


def _routing(old: PlannedModel, new: PlannedModel) -> bool:
    """Whether requests are routed differently; another revision alone concerns the replicas only."""
    return replace(old.routes, revision=new.routes.revision) != new.routes


def _gateways(old: Sequence[Slot], new: Sequence[Slot]) -> Iterator[str]:
    before = {slot.id: slot.digest for slot in old}
    for slot in new:
        if slot.id not in before:
            yield f"{slot.id}: starts"
        elif before[slot.id] != slot.digest:
            yield f"{slot.id}: is replaced"
    for slot in old[len(new) :]:
        yield f"{slot.id}: finishes its requests and stops"


def _scaled(old: PlannedModel, new: PlannedModel) -> Iterator[str]:
    if new.scale is None and old.scale is not None:
        yield f"is no longer scaled: {_count(len(new.slots))} from now on"
    elif new.scale is not None and new.scale != old.scale:
        does = "would be scaled" if new.scale.shadow else "is scaled"
        yield f"{does} between {new.scale.min} and {new.scale.max} replicas, by {new.scale.policy}"


def _replicas(before: PlannedModel, after: PlannedModel) -> Iterator[str]:
    """For a model that is scaled, its load decides how many there are."""
    old, new = before.slots, after.slots
    if after.scale is not None and not after.scale.shadow:
        if _first(before) != _first(after):
            yield "its replicas are replaced, one after the other"
        return
    if before.scale is not None:
        return
    outdated = sum(a.digest != b.digest for a, b in zip(old, new, strict=False))
    if outdated and len(new) == 1:
        until = "the standby stands in" if before.standby else "requests wait until the new one is ready"
        yield f"its replica is replaced; {until}"
    elif outdated:
        stands_in = "the standby" if before.standby else "a spare"
        yield f"{_count(outdated)} are replaced, one after the other; {stands_in} stands in"
    if len(new) > len(old):
        yield f"{_count(len(new) - len(old))} more"
    if len(new) < len(old):
        yield f"{_count(len(old) - len(new))} less; requests in flight there may finish"


def _first(model: PlannedModel) -> str:
    """The digest of the model's first slot, also of a model without replicas at the moment."""
    return next((slot.digest for slot in (*model.slots, model.spare) if slot is not None), "")


def _count(replicas: int) -> str:
    return "1 replica" if replicas == 1 else f"{replicas} replicas"

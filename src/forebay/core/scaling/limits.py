"""`limits` of the cluster file: limits on all models together, and conflicts with what models need at least."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final

from pydantic import Field, ValidationError

from forebay.core.errors import Conflict
from forebay.core.placement.settings import PlacementSettings
from forebay.core.scaling.sharing import GPU, Limits
from forebay.core.section import Section, sections

GPUS_MAX: Final = 100_000
"""More than any cluster has."""


class ClusterLimits(Section):
    """Limits on the replicas of all models together, whatever the load."""

    gpus: Annotated[int, Field(ge=1, le=GPUS_MAX)] | None = None
    """Most GPUs, by each replica's `placement.gpus`; a `placement.fraction` counts as that fraction, and a MIG slice
    as a whole GPU; none: all there are."""
    replicas: Annotated[int, Field(ge=1, le=GPUS_MAX)] | None = None
    """Most replicas, with GPUs or without; none: any number."""

    def value(self) -> Limits:
        """The limits."""
        return Limits(None if self.gpus is None else self.gpus * GPU, self.replicas)


def gpus_of(placement: PlacementSettings) -> int:
    """What a replica counts as, in 1/1000 GPU (see `GPU`)."""
    return round(placement.gpus * (placement.fraction or 1.0) * GPU)


def limit_conflicts(raw: Mapping[str, Any]) -> Iterator[Conflict]:
    """Limits below what models have at the least, in a cluster given as unvalidated data."""
    try:
        limits = ClusterLimits.model_validate(raw.get("limits") or {})
    except ValidationError:
        return  # others tell
    each = [(_least(model), model.get("name")) for model in sections(raw.get("models"))]
    for key, limit, unit, most in (("gpus", limits.gpus, 0, GPU), ("replicas", limits.replicas, 1, 1)):
        users = [(least[unit] / most, name) for least, name in each if least[unit]]
        total = sum(amount for amount, _ in users)
        if limit is not None and total > limit:
            named = ", ".join(f"{name} {amount:g}" for amount, name in users)
            allowed = f"at least {total:g}, what models have at any load (`min` or `replicas`, `standby`)"
            yield Conflict(f"limits.{key}", f"{limit}, with {named}", allowed)


def _least(model: Mapping[str, Any]) -> tuple[int, int]:
    """What a model has at any load: parts of a GPU, and replicas. Invalid parts count 0."""
    scale = model.get("scale")
    scaled = isinstance(scale, Mapping) and not scale.get("shadow", False)
    fixed = scale.get("min", 1) if isinstance(scale, Mapping) and scaled else model.get("replicas", 1)
    parts = (fixed, model.get("standby", 0), model.get("spares", 0))
    several, standby, spares = (part if isinstance(part, int) else 0 for part in parts)
    replicas = several + max(standby, spares)
    try:
        placement = PlacementSettings.model_validate(model.get("placement") or {})
    except ValidationError:
        return 0, replicas
    return replicas * gpus_of(placement), replicas

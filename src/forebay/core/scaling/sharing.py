"""How limited GPUs and replicas are shared between models.

Replicas are granted one by one. First come each model's guaranteed ones, then those that must not be removed now.
Each further one goes to the model whose dominant share would then be the smallest: the larger of its shares of GPUs
and replicas, divided by its weight (Ghodsi et al., "Dominant Resource Fairness", NSDI 2011, in whole replicas). A
replica that does not fit is skipped, so that nothing stays idle that another model could use.

Changes of an unmet demand do not affect any model's share.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

GPU: Final = 1000
"""GPUs are counted in thousandths, as replicas may share them."""
NAMED_MAX: Final = 6
"""Most models that a reason names, largest first."""


class Limits(NamedTuple):
    """Limits; None: unlimited."""

    gpus: int | None = None
    """In parts of a `GPU`."""
    replicas: int | None = None


class Claim(NamedTuple):
    """A model and its demand."""

    model: str
    wanted: int
    """Desired replicas."""
    least: int = 0
    """Of these, guaranteed before all demands of others ..."""
    kept: int = 0
    """... and not removed in favour of others' demands."""
    has: int = 0
    """Current replicas; at equal shares, existing replicas win."""
    gpus: int = 0
    """Per replica, in parts of a `GPU`."""
    weight: float = 1.0
    """Above 0."""
    low: bool = False
    """Low priority: it gets what the others leave."""


class Turn(NamedTuple):
    """One desired replica of a model; sorted by priority."""

    stage: int
    share: float
    new: bool
    model: str
    number: int
    gpus: int


def shared(limits: Limits, claims: Sequence[Claim]) -> dict[str, int]:
    """How many replicas each model gets, at most `wanted`; together never more than the limits."""
    gpus, replicas = _left(limits, claims)
    if gpus >= 0 and replicas >= 0:
        return {claim.model: claim.wanted for claim in claims}
    got = {claim.model: 0 for claim in claims}
    gpus, replicas = _left(limits, ())
    for turn in sorted(turn for claim in claims for turn in _turns(limits, claim)):
        if turn.gpus <= gpus and replicas > 0:
            got[turn.model] += 1
            gpus -= turn.gpus
            replicas -= 1
    return got


def _left(limits: Limits, claims: Iterable[Claim]) -> tuple[float, float]:
    """What remains of the limits if all get what they want."""
    gpus = float("inf") if limits.gpus is None else limits.gpus
    replicas = float("inf") if limits.replicas is None else limits.replicas
    for claim in claims:
        gpus -= claim.wanted * claim.gpus
        replicas -= claim.wanted
    return gpus, replicas


def _turns(limits: Limits, claim: Claim) -> Iterator[Turn]:
    part = max(claim.gpus / limits.gpus if limits.gpus else 0.0, 1 / limits.replicas if limits.replicas else 0.0)
    for number in range(1, claim.wanted + 1):
        stage = 0 if number <= claim.least else 1 if number <= claim.kept else 3 if claim.low else 2
        yield Turn(stage, number * part / claim.weight, number > claim.has, claim.model, number, claim.gpus)


def why_not(limits: Limits, claim: Claim, got: Mapping[str, int], claims: Iterable[Claim]) -> str:
    """Which models use the limit because of which a model gets no further replica."""
    users = {each.model: (got[each.model] * each.gpus, got[each.model]) for each in claims}
    gpus = sum(use for use, _ in users.values())
    if limits.gpus is not None and gpus + claim.gpus > limits.gpus:
        name, most, column, one = "gpus", limits.gpus, 0, GPU
    else:
        name, most, column, one = "replicas", limits.replicas or 0, 1, 1
    each = sorted(((use[column], model) for model, use in users.items()), key=lambda it: (-it[0], it[1]))
    total = sum(use for use, _ in each)
    used = f"all {most / one:g}" if total == most else f"{total / one:g} of {most / one:g}"
    named = ", ".join(f"{model} {use / one:g}" for use, model in each[:NAMED_MAX] if use)
    others = ", and others" if sum(use > 0 for use, _ in each[NAMED_MAX:]) else ""
    return f"{used} of `limits.{name}` are used: {named}{others}"

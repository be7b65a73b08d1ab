"""What each model gets where all of them together may have only so many GPUs and replicas.

Replicas are given out one by one. First come those that a model has whatever the others want, then those that may
not be taken away just now. Of the rest the next one goes to the model whose share would then be the smallest: of GPUs
or replicas, whichever it has the larger share of, by its weight (Ghodsi et al., "Dominant Resource Fairness", NSDI
2011, in whole replicas). What does not fit is passed over, so that nothing stays idle that another one could use.

A wish that is not fulfilled may grow or shrink without anything changing for anybody.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

GPU: Final = 1000
"""GPUs are counted in so many parts: replicas may share them."""
NAMED_MAX: Final = 6
"""Of more models only the largest are named."""


class Limits(NamedTuple):
    """None: any number."""

    gpus: int | None = None
    """In parts of a `GPU`."""
    replicas: int | None = None


class Claim(NamedTuple):
    """A model, and what it would have by itself."""

    model: str
    wanted: int
    """Replicas."""
    least: int = 0
    """Of these, the ones that come before everything of the others ..."""
    kept: int = 0
    """... and that are not taken away for more of the others."""
    has: int = 0
    """Who has a replica already keeps it, where all else is equal."""
    gpus: int = 0
    """Of a replica, in parts of a `GPU`."""
    weight: float = 1.0
    """Above 0."""
    low: bool = False
    """It gets of what the others leave."""


class Turn(NamedTuple):
    """One replica that a model wants. They are served in their order."""

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
    """What all of them would leave, if they got what they want."""
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
    """Who has what of the limit because of which a model has no replica more."""
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

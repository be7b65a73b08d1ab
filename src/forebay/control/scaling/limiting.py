"""Applies the cluster's limits for all models together to the decisions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from forebay.control.plan import PlannedModel
from forebay.control.scaling.state import ScalingState
from forebay.control.scaling.values import LimitUse, ScaleRefused
from forebay.core.scaling.limits import gpus_of
from forebay.core.scaling.sharing import GPU, Claim, Limits, shared, why_not


@dataclass(frozen=True, slots=True)
class Decided:
    """The decision for a model on its own."""

    asked: int
    """Replicas."""
    reason: str
    why: str
    figures: Mapping[str, float]
    least: int
    """The count it keeps whatever the others want."""
    held: bool = False
    """Whether scaling down is suspended."""
    shadow: bool = False
    """Whether it is only reported."""


class Share(NamedTuple):
    """What a model gets."""

    replicas: int
    why_not: str = ""
    """Why it gets fewer than it asks for; empty: it does not."""


def claim_of(state: ScalingState, model: PlannedModel, decided: Decided | None, standbys: int) -> Claim:
    """The claim of a model that also has `standbys` replicas, which do not serve."""
    more = max(model.standby, standbys)
    fixed = len(model.slots) + more
    weight, low = model.scale.weight if model.scale else 1.0, model.placement.low_priority
    claim = Claim(state.model, fixed, fixed, gpus=gpus_of(model.placement), weight=weight, low=low)
    if decided is None or decided.shadow:
        return claim
    has = 0 if state.wanted is None else state.wanted + more
    return claim._replace(
        wanted=decided.asked + more,
        least=min(decided.least, decided.asked) + more,
        kept=has if decided.held else 0,
        has=has,
    )


class Limiter:
    """Caches the last result: mostly, nothing changes from one second to the next."""

    def __init__(self) -> None:
        self._limits = Limits()
        self._claims: tuple[Claim, ...] = ()
        self._got: Mapping[str, int] = {}

    def share(self, limits: Limits, claims: Sequence[Claim], asked: Mapping[str, int]) -> dict[str, Share]:
        """What each of the models gets, given the replicas that it asks for."""
        given = tuple(claims)
        if (limits, given) != (self._limits, self._claims):
            self._limits, self._claims, self._got = limits, given, shared(limits, given)
        found = {}
        for claim in given:
            if claim.model in asked:
                got, lacking = self._got[claim.model], self._got[claim.model] < claim.wanted
                replicas = max(asked[claim.model] - claim.wanted + got, 0)
                found[claim.model] = Share(replicas, why_not(limits, claim, self._got, given) if lacking else "")
        return found

    @property
    def uses(self) -> tuple[LimitUse, ...]:
        """How much of each limit is used; without a limit, it is left out."""
        limits, got = self._limits, self._got
        gpus = sum(got[claim.model] * claim.gpus for claim in self._claims)
        both = (("gpus", gpus, limits.gpus, GPU), ("replicas", sum(got.values()), limits.replicas, 1))
        return tuple(LimitUse(name, used / one, most / one) for name, used, most, one in both if most is not None)

    def check(self, claim: Claim, param: str) -> None:
        """Raises `ScaleRefused` if a model's minimum does not fit beside the minimums of the others."""
        old = next((each for each in self._claims if each.model == claim.model), claim)
        if claim.least < old.least:
            return
        others = [each._replace(wanted=each.least) for each in self._claims if each.model != claim.model]
        claims = [*others, claim._replace(wanted=claim.least)]
        got = shared(self._limits, claims)[claim.model]
        if got < claim.least:
            users = {each.model: each.wanted for each in others} | {claim.model: got}
            text = f"beside the minimums of all models there is room for {got} of {claim.least} replicas"
            raise ScaleRefused(f"{text}: {why_not(self._limits, claim, users, claims)}", param)

"""The traffic split of a rollout that gateways are sent."""

from forebay.core.deploy.course import Kind, replicas_for
from forebay.core.deploy.rollout import ModelObservation, Phase, Rollout
from forebay.core.model import Split, Sticky


def split_of(rollout: Rollout, seen: ModelObservation, withdrawn: bool = False) -> Split:
    """The split of a running rollout, limited by what ready replicas can serve now, whatever was decided before.

    `withdrawn`: harm was found, and the canary gets only requests that name it.
    """
    share = 0.0 if withdrawn else carried(rollout.share, seen)
    shadow = rollout.course.kind is Kind.SHADOW
    return Split(
        rollout=rollout.id,
        stable=rollout.stable,
        canary=rollout.canary,
        share=0.0 if shadow else share,
        mirrored=share if shadow else 0.0,
        sticky=Sticky.CALLER if rollout.course.kind is Kind.AB else Sticky.REQUEST,
        counts_from=counts_from(rollout),
    )


def carried(share: float, seen: ModelObservation) -> float:
    """The part of a share that the canary's ready replicas can serve; all of it if they are unknown."""
    replicas = max(seen.wanted, 1)
    if seen.canary_ready is None or seen.canary_ready >= replicas_for(share, replicas):
        return share
    return min(share, seen.canary_ready / replicas)


def counts_from(rollout: Rollout) -> float:
    """When the warm-up of the current step ends, seconds since the epoch; 0 outside of a comparison."""
    return rollout.since + rollout.course.warm_up_s if rollout.phase is Phase.COMPARING else 0.0

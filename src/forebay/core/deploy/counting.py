"""What of the samples of gateways has been counted, so that nothing counts twice, whoever is started anew."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from forebay.core.deploy.samples import Observed
from forebay.core.rollout.values import State


class Cursor(NamedTuple):
    """How far a gateway's samples were counted."""

    instance: str
    last: int


@dataclass(frozen=True, slots=True)
class Counted:
    """What is known of a rollout, and which samples that came from. `cursors` by the slot of the gateway."""

    state: State
    cursors: Mapping[str, Cursor] = field(default_factory=dict)
    seen: int = 0
    """Samples that were counted."""


def moved(cursors: Mapping[str, Cursor], observed: Mapping[str, Observed]) -> dict[str, Cursor]:
    """The cursors after these answers; a gateway that is silent keeps its own."""
    return {**cursors, **{slot: Cursor(each.instance, each.last) for slot, each in observed.items()}}

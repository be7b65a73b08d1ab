"""Cursors into the gateways' samples, so that none counts twice, whichever process restarts."""

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
    """A rollout's statistics, and which samples they include. `cursors` by the gateway's slot."""

    state: State
    cursors: Mapping[str, Cursor] = field(default_factory=dict)
    seen: int = 0
    """Number of counted samples."""


def advanced(cursors: Mapping[str, Cursor], observed: Mapping[str, Observed]) -> dict[str, Cursor]:
    """The cursors after these responses; a gateway without one keeps its cursor."""
    return {**cursors, **{slot: Cursor(each.instance, each.last) for slot, each in observed.items()}}

"""The assignment of callers to arms."""

from typing import Final

from xxhash import xxh3_64_intdigest

from forebay.core.rollout.values import Arm

RANGE: Final = 1 << 64


def side_of(caller: str, rollout: str, share: float) -> Arm:
    """The arm of a caller. It is stable: as the canary's share grows, callers only move to the canary.

    Rollouts with different names assign callers independently.
    """
    drawn = xxh3_64_intdigest(f"{rollout}\0{caller}".encode())
    return Arm.CANARY if drawn < share * RANGE else Arm.STABLE

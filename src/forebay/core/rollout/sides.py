"""Which arm a caller is on."""

from typing import Final

from xxhash import xxh3_64_intdigest

from forebay.core.rollout.values import Arm

RANGE: Final = 1 << 64


def side_of(caller: str, rollout: str, share: float) -> Arm:
    """The arm of a caller, always the same one: as the canary's share grows callers only move to the canary.

    Rollouts with other names divide callers anew.
    """
    drawn = xxh3_64_intdigest(f"{rollout}\0{caller}".encode())
    return Arm.CANARY if drawn < share * RANGE else Arm.STABLE

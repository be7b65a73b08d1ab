"""GPU health: what an error means, when a GPU may serve again, and how much load a slow one gets."""

from forebay.core.health.attribution import devices_hit, inherited
from forebay.core.health.device import DeviceState, Effect, HealthRules, release, standing, step
from forebay.core.health.life import OUT, Health, Signal
from forebay.core.health.throttle import lightest
from forebay.core.health.values import (
    NOTHING_EXCLUDED,
    DeviceEvent,
    DeviceReading,
    Excluded,
    Recovery,
    Throttle,
)
from forebay.core.health.xid import Remedy, classify

__all__ = [
    "NOTHING_EXCLUDED",
    "OUT",
    "DeviceEvent",
    "DeviceReading",
    "DeviceState",
    "Effect",
    "Excluded",
    "Health",
    "HealthRules",
    "Recovery",
    "Remedy",
    "Signal",
    "Throttle",
    "classify",
    "devices_hit",
    "inherited",
    "lightest",
    "release",
    "standing",
    "step",
]

"""What a source of device readings can do."""

from typing import Protocol

from forebay.core.health import DeviceEvent, DeviceReading


class DevicesUnknown(Exception):  # noqa: N818 - a state, not a mistake
    """A source cannot tell anything now; the text says why, and what would help. It is no news of any device."""


class DeviceSource(Protocol):
    """Tells how devices are. Its methods block, for seconds at worst, and are called by one thread at a time."""

    def readings(self) -> tuple[DeviceReading, ...]:
        """All devices it knows, sorted by id, also those that are lost. Raises `DevicesUnknown`."""

    def events(self) -> tuple[DeviceEvent, ...]:
        """Errors since the last call, the oldest first; at the first call none. Raises `DevicesUnknown`."""

    def close(self) -> None:
        """Let go of everything. It may be called at any time, and twice."""

"""The protocol of device sources."""

from typing import Protocol

from forebay.core.health import DeviceEvent, DeviceReading


class DevicesUnknown(Exception):  # noqa: N818 - a state, not a mistake
    """A source cannot report anything now; the text says why, and how to fix it. It says nothing about any device."""


class DeviceSource(Protocol):
    """Reports the state of devices. Its methods block, at worst for seconds, and are called by one thread at a
    time."""

    def readings(self) -> tuple[DeviceReading, ...]:
        """All known devices, sorted by id, including lost ones. Raises `DevicesUnknown`."""

    def events(self) -> tuple[DeviceEvent, ...]:
        """Errors since the last call, oldest first; none at the first call. Raises `DevicesUnknown`."""

    def close(self) -> None:
        """Release all resources. It may be called at any time, and repeatedly."""

"""Which devices an error affects: a GPU and its MIG slices, by the driver's name for it."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from forebay.core.health.values import DeviceReading


def devices_hit(named: str, devices: Iterable[DeviceReading]) -> tuple[str, ...]:
    """Ids, sorted, of the devices affected by an event of `named`, an id or a PCI address; empty: unknown device.

    An error of a GPU affects all its slices. One that names a slice is contained in it.
    """
    known = tuple(devices)
    address = pci_of(named)
    own = {
        each.device
        for each in known
        if each.device == named or (address is not None and not each.parent and pci_of(each.pci) == address)
    }
    return tuple(sorted(own | {each.device for each in known if each.parent in own}))


def inherited(reading: DeviceReading, whole: Mapping[str, DeviceReading]) -> DeviceReading:
    """A slice's reading with the values that only its GPU has: clock, heat, errors, lost. Whole GPUs are
    unchanged."""
    parent = whole.get(reading.parent)
    if parent is None:
        return reading
    return replace(
        reading,
        pci=parent.pci,
        numa=parent.numa,
        life=parent.life,
        temperature_c=parent.temperature_c,
        power_w=parent.power_w,
        clock_mhz=parent.clock_mhz,
        clock_max_mhz=parent.clock_max_mhz,
        throttles=parent.throttles,
        ecc_errors=parent.ecc_errors,
        ecc_errors_ever=parent.ecc_errors_ever,
        remap_pending=parent.remap_pending,
        remap_failed=parent.remap_failed,
        recovery=parent.recovery,
        lost=reading.lost or parent.lost,
    )


def pci_of(text: str) -> tuple[int, int, int] | None:
    """Domain, bus and slot of an address such as `PCI:0000:3b:00` or `00000000:3B:00.0`; None: not an address."""
    parts = text.removeprefix("PCI:").partition(".")[0].split(":")
    try:
        domain, bus, slot = (int(part, 16) for part in parts)
    except ValueError:
        return None
    return domain, bus, slot

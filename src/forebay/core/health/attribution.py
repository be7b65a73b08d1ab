"""Whom an error hits: a GPU and its MIG slices, by what the driver calls it."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from forebay.core.health.values import DeviceReading


def hit(named: str, devices: Iterable[DeviceReading]) -> tuple[str, ...]:
    """Ids of the devices that an event of `named`, an id or a PCI address, is about, sorted; none: it is not known.

    An error of a GPU hits all its slices. One that names a slice is contained in it.
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
    """A slice with what only its GPU can tell: clock, heat, errors, whether it is lost. A whole GPU as it is."""
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
    """Domain, bus and slot of an address such as `PCI:0000:3b:00` or `00000000:3B:00.0`; None: it is none."""
    parts = text.removeprefix("PCI:").partition(".")[0].split(":")
    try:
        domain, bus, slot = (int(part, 16) for part in parts)
    except ValueError:
        return None
    return domain, bus, slot

"""Reads a DCGM exporter: NVIDIA's telemetry in Prometheus text format. Its set of rows depends on its configuration.

Names as in its `etc/default-counters.csv`. Of errors it exports only the latest XID: the same one twice in a row is
seen once. DCGM's blank values may appear as very large numbers, which are ignored.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

import httpx
from prometheus_client.parser import text_string_to_metric_families

from forebay.core.health import DeviceEvent, DeviceReading
from forebay.providers.devices.nvml import throttles_of
from forebay.providers.devices.protocol import DevicesUnknown

TIMEOUT_S: Final = 5.0
BYTES_MAX: Final = 8 * 1024 * 1024
BLANK: Final = 2**31 - 16
"""Values from here on are DCGM's blanks (dcgm_structs.h: those of INT32, INT64 and FP64)."""
MIB: Final = 1024 * 1024
PREFIX: Final = "DCGM_FI_DEV_"


@dataclass
class _Rows:
    """The values of one device, by row name without its prefix."""

    labels: Mapping[str, str]
    values: dict[str, float] = field(default_factory=dict)


class DcgmSource:
    """The GPUs of the machine that an exporter at `url` runs on."""

    def __init__(self, url: str, wall_s: Callable[[], float], get: Callable[[str], str] | None = None) -> None:
        self._url = url
        self._wall = wall_s
        self._get = get or _get
        self._codes: dict[str, int] | None = None
        self._happened: list[DeviceEvent] = []

    def readings(self) -> tuple[DeviceReading, ...]:
        devices = self._scrape()
        return tuple(_reading(id, rows) for id, rows in sorted(devices.items()))

    def events(self) -> tuple[DeviceEvent, ...]:
        """Errors found in previous readings: one scrape provides both."""
        if self._codes is None:
            self._scrape()
        happened, self._happened = self._happened, []
        return tuple(happened)

    def close(self) -> None:
        """Does nothing: no connection is kept open."""

    def _scrape(self) -> dict[str, _Rows]:
        try:
            devices = parse(self._get(self._url))
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise DevicesUnknown(f"{self._url}: {error}") from error
        codes = {id: int(rows.values["XID_ERRORS"]) for id, rows in devices.items() if "XID_ERRORS" in rows.values}
        if self._codes is not None:
            for id, code in sorted(codes.items()):
                if code and code != self._codes.get(id, 0):
                    self._happened.append(DeviceEvent(self._wall(), id, code))
        self._codes = {**(self._codes or {}), **codes}
        return devices


def parse(text: str) -> dict[str, _Rows]:
    """The rows by device: a UUID, for a slice the UUID of its GPU and the number of its instance.

    Raises ValueError for text that is not in Prometheus format, or contains no GPU.
    """
    devices: dict[str, _Rows] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            uuid = sample.labels.get("UUID") or sample.labels.get("uuid")
            if not sample.name.startswith(PREFIX) or not uuid:
                continue
            slice_id = sample.labels.get("GPU_I_ID", "")
            rows = devices.setdefault(f"{uuid}/{slice_id}" if slice_id else uuid, _Rows(sample.labels))
            if 0 <= sample.value < BLANK:
                rows.values[sample.name.removeprefix(PREFIX)] = float(sample.value)
    if not devices:
        raise ValueError("it contains no GPU")
    return devices


def _reading(id: str, rows: _Rows) -> DeviceReading:
    labels, values = rows.labels, rows.values
    slice_id = labels.get("GPU_I_ID", "")
    used, free = values.get("FB_USED"), values.get("FB_FREE")
    total = None if used is None or free is None else used + free + values.get("FB_RESERVED", 0.0)
    duty, reasons = values.get("GPU_UTIL"), values.get("CLOCKS_EVENT_REASONS", values.get("CLOCK_THROTTLE_REASONS"))
    ecc, ever = values.get("ECC_DBE_VOL_TOTAL"), values.get("ECC_DBE_AGG_TOTAL")
    pending, failed = values.get("ROW_REMAP_PENDING"), values.get("ROW_REMAP_FAILURE")
    return DeviceReading(
        id,
        index=int(labels["gpu"]) if labels.get("gpu", "").isdigit() else 0,
        name=labels.get("modelName", ""),
        parent=id.partition("/")[0] if slice_id else "",
        profile=labels.get("GPU_I_PROFILE", "") if slice_id else "",
        pci=labels.get("pci_bus_id", ""),
        memory_bytes=None if total is None else int(total * MIB),
        memory_used_bytes=None if used is None else int(used * MIB),
        duty=None if duty is None else min(1.0, duty / 100),
        temperature_c=values.get("GPU_TEMP"),
        power_w=values.get("POWER_USAGE"),
        clock_mhz=values.get("SM_CLOCK"),
        clock_max_mhz=values.get("MAX_SM_CLOCK"),
        throttles=None if reasons is None else throttles_of(int(reasons)),
        ecc_errors=None if ecc is None else int(ecc),
        ecc_errors_ever=None if ever is None else int(ever),
        remap_pending=None if pending is None else pending > 0,
        remap_failed=None if failed is None else failed > 0,
    )


def _get(url: str) -> str:
    """The body of a response. Raises `httpx.HTTPError`, and ValueError if it is too large."""
    with httpx.stream("GET", url, timeout=TIMEOUT_S, trust_env=False) as answer:
        answer.raise_for_status()
        parts, size = [], 0
        for part in answer.iter_bytes():
            parts.append(part)
            size += len(part)
            if size > BYTES_MAX:
                raise ValueError(f"its response is larger than {BYTES_MAX} bytes")
    return b"".join(parts).decode(errors="replace")

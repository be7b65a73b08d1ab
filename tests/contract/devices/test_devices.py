"""The contract of device sources, over every adapter."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.contract.devices import stub

from forebay.core.health import DeviceReading, Throttle
from forebay.providers.devices.dcgm import DcgmSource
from forebay.providers.devices.kernel import KernelLog
from forebay.providers.devices.nvml import NvmlSource
from forebay.providers.devices.protocol import DeviceSource, DevicesUnknown
from forebay.providers.devices.scripted import ScriptedSource

NOW = 1000.0
BLANK = 9223372036854775794
KEYS = {"memory_bytes": "memory", "memory_used_bytes": "used", "temperature_c": "temperature", "ecc_errors": "ecc"}
ROWS = {
    "temperature_c": "GPU_TEMP", "ecc_errors": "ECC_DBE_VOL_TOTAL", "clock_mhz": "SM_CLOCK",
    "clock_max_mhz": "MAX_SM_CLOCK", "power_w": "POWER_USAGE", "remap_failed": "ROW_REMAP_FAILURE",
}  # fmt: skip
MIB = 1024**2


@dataclass
class Stage:
    """What the devices behind a source do, as a test wants it."""

    folder: Path
    devices: dict[str, dict[str, Any]] = field(default_factory=dict)
    errors: list[tuple[str, int]] = field(default_factory=list)
    fails: bool = False
    source: DeviceSource = field(init=False)

    def __post_init__(self) -> None:
        """Make the source."""

    def set(self, device: str, **values: Any) -> None:
        self.devices.setdefault(device, {}).update(values)
        self.show()

    def hurt(self, device: str, xid: int) -> None:
        self.errors.append((device, xid))
        self.show()

    def fail(self, fails: bool) -> None:
        self.fails = fails
        self.show()

    def show(self) -> None:
        """Put it where the source finds it."""


class Scripted(Stage):
    def __post_init__(self) -> None:
        self.path, self.told = self.folder / "script.jsonl", 0
        self.path.write_text("")
        self.source = ScriptedSource(self.path, lambda: NOW, lambda: NOW)

    def show(self) -> None:
        lines = [{"device": id, **values} for id, values in self.devices.items()]
        lines += [{"device": id, "xid": xid} for id, xid in self.errors[self.told :]]
        lines.append({"fails": "the script says so" if self.fails else ""})
        self.told = len(self.errors)
        with self.path.open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)


class Nvml(Stage):
    def __post_init__(self) -> None:
        self.path = self.folder / "nvml"
        self.source = NvmlSource(lambda: NOW)
        self.show()

    def show(self) -> None:
        lines = ["init !9", "count !9"] if self.fails else [f"count {len(self.devices)}"]
        for index, (id, values) in enumerate(self.devices.items()):
            lines += [f"{index}.uuid {id}", f"{index}.pci 00000000:{index:02X}:00.0"]
            for name, value in values.items():
                lines += self.line(index, name, value)
        lines += [f"event {list(self.devices).index(id)} {xid}" for id, xid in self.errors]
        draft = self.path.with_suffix(".new")
        draft.write_text("\n".join(lines) + "\n")
        draft.rename(self.path)

    def line(self, index: int, name: str, value: Any) -> list[str]:
        match name:
            case "lost":
                return [f"{index}.all !15"] if value else []
            case "duty":
                return [f"{index}.busy {int(value * 100)}"]
            case "throttles":
                bits = {"heat": 0x20, "power cap": 0x04}
                return [f"{index}.throttles {sum(bits[each] for each in value)}"]
            case "remap_failed":
                return [f"{index}.pending 0", f"{index}.failed {int(value)}"]
            case "power_w":
                return [f"{index}.power {int(value * 1000)}"]
            case _:
                key = KEYS.get(name, name.removesuffix("_mhz"))
                return [f"{index}.{key} {int(value)}"]


class Dcgm(Stage):
    def __post_init__(self) -> None:
        self.source = DcgmSource("http://exporter:9400/metrics", lambda: NOW, self.text)

    def text(self, url: str) -> str:
        if self.fails:
            raise ValueError("no answer")
        last = dict(self.errors)
        lines = []
        for index, (id, values) in enumerate(self.devices.items()):
            rows: dict[str, float] = {"XID_ERRORS": last.get(id, 0), "MEMORY_TEMP": BLANK}
            for name, value in values.items():
                match name:
                    case "duty":
                        rows["GPU_UTIL"] = value * 100
                    case "throttles":
                        rows["CLOCKS_EVENT_REASONS"] = sum({"heat": 0x20, "power cap": 0x04}[each] for each in value)
                    case "memory_bytes":
                        rows["FB_FREE"] = (value - values["memory_used_bytes"]) / MIB
                    case "memory_used_bytes":
                        rows["FB_USED"] = value / MIB
                    case _:
                        rows[ROWS[name]] = float(value)
            labels = f'gpu="{index}",UUID="{id}",modelName="A100"'
            lines += [f"DCGM_FI_DEV_{name}{{{labels}}} {value}" for name, value in rows.items()]
        return "\n".join(lines) + "\n"


class Logged(Scripted):
    """A script behind a kernel log."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.log = self.folder / "kern.log"
        self.log.write_text("NVRM: Xid (PCI:0000:00:00): 79, of yesterday\n")
        self.source = KernelLog(self.log, self.source, lambda: NOW)


STAGES: dict[str, Callable[[Path], Stage]] = {"scripted": Scripted, "nvml": Nvml, "dcgm": Dcgm, "kernel log": Logged}


@pytest.fixture(params=STAGES)
def stage(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    if request.param == "nvml":
        if stub.compiler() is None:
            pytest.skip("needs a C compiler")
        stub.loaded()
        monkeypatch.setenv("NVML_STUB", str(tmp_path / "nvml"))
    made = STAGES[request.param](tmp_path)
    made.set("GPU-b", temperature_c=61)
    made.set("GPU-a", temperature_c=55)
    yield made
    made.source.close()


def read(stage: Stage) -> dict[str, DeviceReading]:
    return {each.device: each for each in stage.source.readings()}


def test_readings_are_sorted_by_id_with_all_known_values(stage: Stage) -> None:
    stage.set(
        "GPU-a", memory_used_bytes=2 * MIB, memory_bytes=8 * MIB, duty=0.25, power_w=300.0, clock_mhz=900.0,
        clock_max_mhz=1800.0, throttles=["heat"], ecc_errors=3, remap_failed=True,
    )  # fmt: skip
    first, second = stage.source.readings()
    assert (first.device, second.device) == ("GPU-a", "GPU-b")
    assert (first.temperature_c, second.temperature_c) == (55, 61)
    assert (first.memory_bytes, first.memory_used_bytes) == (8 * MIB, 2 * MIB)
    assert (first.duty, first.power_w, first.clock_mhz, first.clock_max_mhz) == (0.25, 300.0, 900.0, 1800.0)
    assert (first.throttles, first.ecc_errors, first.remap_failed) == ((Throttle.HEAT,), 3, True)
    assert not first.lost


def test_unknown_values_are_none_not_zero(stage: Stage) -> None:
    reading = read(stage)["GPU-b"]
    unknown = (reading.memory_bytes, reading.duty, reading.throttles, reading.ecc_errors, reading.remap_failed)
    assert unknown == (None, None, None, None, None)
    assert not reading.lost


def test_changed_values_appear_in_the_next_reading(stage: Stage) -> None:
    read(stage)
    stage.set("GPU-b", temperature_c=70, throttles=[])
    assert (read(stage)["GPU-b"].temperature_c, read(stage)["GPU-b"].throttles) == (70, ())


def test_errors_are_reported_once_and_only_new_ones(stage: Stage) -> None:
    stage.source.readings()
    assert stage.source.events() == ()
    stage.hurt("GPU-b", 79)
    stage.source.readings()
    [event] = stage.source.events()
    assert (event.at, event.device, event.xid) == (NOW, "GPU-b", 79)
    assert stage.source.events() == ()
    stage.hurt("GPU-b", 48)
    stage.source.readings()
    assert [each.xid for each in stage.source.events()] == [48]


def test_lost_device_is_marked_and_others_are_unaffected(stage: Stage) -> None:
    if isinstance(stage, Dcgm):
        pytest.skip("an exporter does not say so")
    read(stage)
    stage.set("GPU-b", lost=True)
    seen = read(stage)
    assert seen["GPU-b"].lost
    assert (seen["GPU-a"].lost, seen["GPU-a"].temperature_c) == (False, 55)
    stage.set("GPU-b", lost=False)
    assert not read(stage)["GPU-b"].lost


def test_failing_source_raises_and_recovers(stage: Stage) -> None:
    read(stage)
    stage.fail(True)
    for _ in range(2):
        with pytest.raises(DevicesUnknown):
            stage.source.readings()
    stage.fail(False)
    assert sorted(read(stage)) == ["GPU-a", "GPU-b"]


def test_close_is_idempotent(stage: Stage) -> None:
    read(stage)
    stage.source.close()
    stage.source.close()

"""What is specific to each device source: scripts, rotated logs, exporter rows, settings."""

import json
import os
from pathlib import Path

import httpx
import pytest

from forebay.core.health import DeviceEvent
from forebay.core.health.settings import HealthSettings
from forebay.providers.devices import dcgm, opening
from forebay.providers.devices.dcgm import DcgmSource
from forebay.providers.devices.kernel import KernelLog, parse
from forebay.providers.devices.opening import open_sources
from forebay.providers.devices.protocol import DevicesUnknown
from forebay.providers.devices.scripted import ScriptedSource


def script(path: Path, *lines: object) -> None:
    with path.open("a") as file:
        file.writelines(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines)


def test_script_lines_apply_at_their_time(tmp_path: Path) -> None:
    path, now = tmp_path / "s.jsonl", [100.0]
    script(
        path,
        {"device": "g", "temperature_c": 50},
        "",
        {"device": "g", "xid": 48},
        {"after_s": 20, "device": "g", "temperature_c": 90},
        {"after_s": 10, "device": "g", "xid": 79, "text": "off"},
        {"after_s": 10, "fails": "no driver"},
        {"after_s": 15, "fails": ""},
    )
    source = ScriptedSource(path, lambda: now[0], lambda: 7.0)
    assert [each.temperature_c for each in source.readings()] == [50]
    assert source.events() == ()
    now[0] = 110.0
    with pytest.raises(DevicesUnknown, match="no driver"):
        source.events()
    now[0] = 115.0
    assert source.events() == (DeviceEvent(7.0, "g", 79, "off"),)
    now[0] = 121.0
    assert [each.temperature_c for each in source.readings()] == [90]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "s.jsonl:2: "),
        ("[]", "s.jsonl:2: "),
        ({"device": "g", "heat": 3, "x": 1}, "s.jsonl:2: a reading has no heat, x"),
        ({"temperature_c": 3}, "s.jsonl:2: names no device"),
        ({"device": "g", "temperature_c": "hot"}, "s.jsonl:2: Expected `float | null`, got `str`"),
        ({"fails": 3}, "s.jsonl:2: Expected `str | null`, got `int`"),
        ({"after_s": "x", "device": "g"}, "s.jsonl:2: Expected `float | null`, got `str`"),
    ],
)
def test_invalid_script_line_is_reported_and_the_others_apply(tmp_path: Path, line: object, says: str) -> None:
    path = tmp_path / "s.jsonl"
    script(path, {"device": "g", "temperature_c": 50}, line, {"device": "h"})
    source = ScriptedSource(path, lambda: 0.0, lambda: 0.0)
    with pytest.raises(DevicesUnknown) as told:
        source.readings()
    assert says in str(told.value)
    assert [each.device for each in source.readings()] == ["g", "h"]


def test_partial_script_line_is_completed_later_and_missing_script_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "s.jsonl"
    path.write_text('{"device": "g"}\n{"device": ')
    source = ScriptedSource(path, lambda: 0.0, lambda: 0.0)
    assert [each.device for each in source.readings()] == ["g"]
    with path.open("a") as file:
        file.write('"h"}\n')
    assert [(each.device, each.index) for each in source.readings()] == [("g", 0), ("h", 1)]
    path.unlink()
    with pytest.raises(DevicesUnknown, match="No such file"):
        source.events()


@pytest.mark.parametrize(
    ("line", "event"),
    [
        (
            "6,1,5,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.",
            DeviceEvent(1.0, "PCI:0000:3b:00", 79, "pid=1, GPU has fallen off the bus."),
        ),
        ("kernel: [9.1] NVRM: Xid (PCI:0000:3b:00.0): 43", DeviceEvent(1.0, "PCI:0000:3b:00.0", 43, "")),
        (
            "NVRM: Xid (PCI:0000:01:00 GPU-I:05): 94, pid=7194, Contained: CE User Channel (0x9). RST: No, D-RST: No",
            DeviceEvent(1.0, "PCI:0000:01:00", 94, "pid=7194, Contained: CE User Channel (0x9). RST: No, D-RST: No"),
        ),
        ("NVRM: Xid (PCI:0000:01:00 GPU-I:05 GPU-CI:01): 31", DeviceEvent(1.0, "PCI:0000:01:00", 31, "")),
        ("NVRM: GPU at PCI:0000:3b:00: GPU-a", None),
        ("NVRM: Xid (PCI:0000:3b:00): many", None),
    ],
)
def test_kernel_log_line_is_parsed(line: str, event: DeviceEvent | None) -> None:
    assert parse(line, 1.0) == event


def test_log_is_followed_across_truncation_and_rotation(tmp_path: Path) -> None:
    path, line = tmp_path / "kern.log", "NVRM: Xid (PCI:0000:3b:00): {}, x\n"
    path.write_text(line.format(1))
    log = KernelLog(path, None, lambda: 0.0)

    def seen() -> list[int]:
        return [event.xid for event in log.events()]

    assert (seen(), log.readings()) == ([], ())
    with path.open("a") as file:
        file.write(line.format(2) + "NVRM: Xid (PCI:00")
    assert seen() == [2]
    with path.open("a") as file:
        file.write("00:3b:00): 3, x\n")
    assert seen() == [3]
    path.write_text(line.format(4))
    assert seen() == [4]
    with path.open("a") as file:
        file.write(line.format(41))
    (tmp_path / "new").write_text(line.format(5) + line.format(6))
    os.replace(tmp_path / "new", path)
    assert seen() == [41, 5, 6]
    with path.open("a") as file:
        file.write(line.format(61))
    path.unlink()
    with pytest.raises(DevicesUnknown, match="No such file"):
        log.events()
    (tmp_path / "new").write_text(line.format(7))
    os.replace(tmp_path / "new", path)
    assert seen() == [61, 7]
    log.close()


def test_events_of_the_driver_wait_for_a_log_that_cannot_be_read(tmp_path: Path) -> None:
    path, events = tmp_path / "s.jsonl", tmp_path / "kern.log"
    script(path, {"device": "g", "temperature_c": 50})
    log = KernelLog(events, ScriptedSource(path, lambda: 0.0, lambda: 7.0), lambda: 7.0)
    log.readings()
    script(path, {"device": "g", "xid": 79, "text": "off"})
    for _ in range(2):
        with pytest.raises(DevicesUnknown, match="No such file"):
            log.events()
    events.touch()
    assert (log.events(), log.events()) == ((DeviceEvent(7.0, "g", 79, "off"),), ())
    log.close()


@pytest.mark.skipif(not os.access("/dev/kmsg", os.R_OK), reason="may not read the kernel's log")
def test_kmsg_is_read_without_blocking_from_its_end() -> None:
    log = KernelLog(Path("/dev/kmsg"), None, lambda: 0.0)
    assert log.events() == ()
    assert log.events() == ()
    log.close()


ROWS = """# HELP DCGM_FI_DEV_SM_CLOCK SM clock frequency (in MHz).
DCGM_FI_DEV_SM_CLOCK{gpu="0",UUID="GPU-a",modelName="NVIDIA H100",pci_bus_id="00000000:3B:00.0"} 1980
DCGM_FI_DEV_FB_FREE{gpu="0",UUID="GPU-a"} 9223372036854775794
DCGM_FI_DEV_FB_USED{gpu="0",UUID="GPU-a"} 17
DCGM_FI_DEV_ROW_REMAP_FAILURE{gpu="0",UUID="GPU-a"} 0
DCGM_FI_DEV_FB_USED{gpu="0",UUID="GPU-a",GPU_I_PROFILE="1g.10gb",GPU_I_ID="7"} 5
DCGM_FI_DEV_FB_FREE{gpu="0",UUID="GPU-a",GPU_I_PROFILE="1g.10gb",GPU_I_ID="7"} 15
DCGM_FI_DEV_GPU_TEMP{gpu="x"} 40
up 1
"""


def test_dcgm_blank_values_are_unknown_and_slices_are_devices() -> None:
    gpu, slice = DcgmSource("http://x", lambda: 0.0, lambda url: ROWS).readings()
    assert (gpu.device, gpu.name, gpu.clock_mhz, gpu.memory_bytes, gpu.remap_failed) == (
        "GPU-a", "NVIDIA H100", 1980.0, None, False,
    )  # fmt: skip
    assert gpu.memory_used_bytes == 17 * dcgm.MIB
    assert (slice.device, slice.parent, slice.profile, slice.memory_bytes) == (
        "GPU-a/7", "GPU-a", "1g.10gb", 20 * dcgm.MIB,
    )  # fmt: skip


def test_invalid_exporter_response_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    for answer in ({"http://x": "<html>"}, {"http://x": "up 1\n"}):
        with pytest.raises(DevicesUnknown):
            DcgmSource("http://x", lambda: 0.0, answer.__getitem__).readings()
    with pytest.raises(DevicesUnknown, match="127"):
        DcgmSource("http://127.0.0.1:1/metrics", lambda: 0.0).events()

    class Answers(httpx.BaseTransport):
        def handle_request(self, request: httpx.Request) -> httpx.Response:
            return httpx.Response(200, text=ROWS)

    def stream(method: str, url: str, **_: object) -> object:
        return httpx.Client(transport=Answers()).stream(method, url)

    monkeypatch.setattr(httpx, "stream", stream)
    assert len(DcgmSource("http://x/metrics", lambda: 0.0).readings()) == 2
    monkeypatch.setattr(dcgm, "BYTES_MAX", 10)
    with pytest.raises(DevicesUnknown, match="larger than 10 bytes"):
        DcgmSource("http://x/metrics", lambda: 0.0).readings()


def test_settings_open_the_configured_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "DRIVER", (tmp_path / "none",))
    file = tmp_path / "s.jsonl"
    script(file, {"device": "g"})
    for settings, nodes in (
        (HealthSettings(source="off"), []),
        (HealthSettings(source="nvml"), ["local"]),
        (HealthSettings(), []),
        (HealthSettings(source="scripted", file=str(file)), ["local"]),
        (HealthSettings(source="dcgm", exporters={"b": "http://b/", "a": "http://a/"}), ["a", "b"]),
        (HealthSettings(source="off", kernel_log="/dev/kmsg"), ["local"]),
    ):
        sources = open_sources(settings)
        assert sorted(sources) == nodes
        for source in sources.values():
            source.close()
    monkeypatch.setattr(opening, "DRIVER", (tmp_path,))
    assert sorted(open_sources(HealthSettings())) == ["local"]

"""What is specific to NVML: MIG slices, links, recovery, GPUs that fall off, and libraries that lack functions.

The unmodified nvidia-ml-py drives a stub of the library: this proves our handling of what it may say, not NVML.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.contract.devices import stub

from forebay.core.health import Recovery
from forebay.providers.devices.nvml import NvmlSource, profile_of

pytestmark = pytest.mark.skipif(stub.compiler() is None, reason="needs a C compiler")
GPUS = [
    "count 2", "0.uuid GPU-a", "0.pci 00000000:3B:00.0", "0.name NVIDIA H100", "0.numa 1",
    "1.uuid GPU-b", "1.pci 00000000:5E:00.0",
]  # fmt: skip
SLICES = [
    "0.mig 2", "0s0.uuid MIG-1", "0s0.name NVIDIA H100 MIG 1g.10gb", "0s0.memory 100", "0s0.used 5", "0s0.instance 7",
    "0s1.uuid MIG-2", "0s1.instance 8",
]  # fmt: skip
Say = Callable[..., None]


@pytest.fixture
def say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Say:
    """Says what the library answers from now on; an event comes on top of those before."""
    stub.loaded()
    path, events = tmp_path / "nvml", list[str]()
    monkeypatch.setenv("NVML_STUB", str(path))

    def told(*lines: str, event: str = "") -> None:
        events.extend([f"event {event}"] if event else [])
        path.write_text("\n".join([*lines, *events]) + "\n")

    return told


def test_mig_slices_are_devices_and_errors_name_slice_or_gpu(say: Say) -> None:
    source = NvmlSource(lambda: 5.0)
    say(*GPUS, *SLICES)
    gpu, other, one, two = source.readings()
    assert (gpu.device, other.device, gpu.numa, gpu.pci) == ("GPU-a", "GPU-b", 1, "00000000:3B:00.0")
    assert (one.device, one.parent, one.profile, one.memory_bytes, one.memory_used_bytes) == (
        "MIG-1", "GPU-a", "1g.10gb", 100, 5,
    )  # fmt: skip
    assert (two.device, two.profile, two.memory_bytes) == ("MIG-2", "", None)
    source.events()
    for event in ("0 94 8", "0 95", "0 13 99", "1 31"):
        say(*GPUS, *SLICES, event=event)
    assert [(each.device, each.xid) for each in source.events()] == [
        ("MIG-2", 94), ("GPU-a", 95), ("GPU-a", 13), ("GPU-b", 31),
    ]  # fmt: skip
    say("count 2", *GPUS[1:], "0.all !15")
    assert [each.device for each in source.readings() if each.lost] == ["GPU-a", "MIG-1", "MIG-2"]
    say(*GPUS)
    assert [each.device for each in source.readings()] == ["GPU-a", "GPU-b"]
    source.close()


def test_fallen_off_gpu_is_lost_although_indices_shift(say: Say) -> None:
    source = NvmlSource(lambda: 5.0)
    say(*GPUS)
    source.readings()
    source.events()
    say("count 2", *GPUS[1:], "0.all !15", event="0 79")
    assert [(each.device, each.xid) for each in source.events()] == [("GPU-a", 79)]
    say("count 1", "0.uuid GPU-b", "0.pci 00000000:5E:00.0", "0.temperature 50")
    seen = {each.device: each for each in source.readings()}
    assert (seen["GPU-a"].lost, seen["GPU-b"].lost, seen["GPU-b"].temperature_c) == (True, False, 50)
    source.close()


def test_gpu_with_a_failed_uuid_query_is_unknown_not_lost(say: Say) -> None:
    source = NvmlSource(lambda: 5.0)
    say(*GPUS)
    source.readings()
    say("count 2", *GPUS[1:], "0.uuid !999", "0.handle !999")
    assert [(each.device, each.lost) for each in source.readings()] == [("GPU-a", False), ("GPU-b", False)]
    fresh = NvmlSource(lambda: 5.0)
    say("count 2", "0.uuid !999", *GPUS[5:])
    assert [each.device for each in fresh.readings()] == ["GPU-b"]
    source.close()
    fresh.close()


def test_nvlinks_to_known_gpus_and_recovery_action_are_read(say: Say) -> None:
    source = NvmlSource(lambda: 5.0)
    say(*GPUS, "0.link0 00000000:5E:00.0", "0.link1 00000000:99:00.0", "1.link0 00000000:3B:00.0", "0.recovery 4")
    gpu, other = source.readings()
    assert (gpu.links, other.links) == (("GPU-b",), ("GPU-a",))
    assert (gpu.recovery, other.recovery) == (Recovery.RESET, None)
    source.close()
    source = NvmlSource(lambda: 5.0)
    say(*GPUS, "0.link0 00000000:99:00.0", "1.link3 00000000:99:00.0")
    assert [each.links for each in source.readings()] == [("GPU-b",), ("GPU-a",)]
    source.close()


def test_missing_event_support_and_unknown_gpus_are_ignored(say: Say) -> None:
    source = NvmlSource(lambda: 5.0)
    say(*GPUS, "0.events !3", "1.events !999")
    assert source.events() == ()
    source.readings()
    assert source.events() == ()
    say(*GPUS, event="!15")
    assert source.events() == ()
    say(*GPUS, event="7 79")
    assert source.events() == ()
    source.close()


def test_mig_profile_is_parsed_from_the_name() -> None:
    assert profile_of("NVIDIA H100 80GB HBM3 MIG 3g.40gb") == "3g.40gb"
    assert profile_of("NVIDIA H100") == ""


LOOK = """
from forebay.providers.devices.nvml import NvmlSource
from forebay.providers.devices.protocol import DevicesUnknown
source = NvmlSource(lambda: 0.0)
try:
    for reading in source.readings():
        print(reading.device, reading.temperature_c, reading.throttles, reading.remap_failed, reading.recovery)
    print(source.events())
except DevicesUnknown as error:
    print(error)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("-DOLD",), "GPU-a 61 (<Throttle.HEAT: 'heat'>,) None None\n()\n"),
        (None, "NVML: NVML Shared Library Not Found\n"),
    ],
)
def test_old_library_reads_what_it_supports_and_missing_library_is_reported(
    flags: tuple[str, ...] | None, says: str, tmp_path: Path
) -> None:
    (tmp_path / "nvml").write_text("count 1\n0.uuid GPU-a\n0.temperature 61\n0.throttles 0x20\n")
    if flags is not None:
        stub.build(tmp_path, *flags)
    env = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path), "NVML_STUB": str(tmp_path / "nvml")}
    done = subprocess.run([sys.executable, "-c", LOOK], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == says

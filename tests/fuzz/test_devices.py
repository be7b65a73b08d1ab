"""What is read of devices: exporters, logs and scripts that are damaged are unknown, and break nothing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fuzz.corpus import json_bytes, mutated, survives

from forebay.core.health import DeviceReading, DeviceState, HealthRules, step
from forebay.providers.devices.dcgm import DcgmSource
from forebay.providers.devices.kernel import parse
from forebay.providers.devices.protocol import DevicesUnknown
from forebay.providers.devices.scripted import ScriptedSource

pytestmark = pytest.mark.slow
ROWS = b"""# TYPE DCGM_FI_DEV_SM_CLOCK gauge
DCGM_FI_DEV_SM_CLOCK{gpu="0",UUID="GPU-a",modelName="NVIDIA H100",pci_bus_id="00000000:3B:00.0"} 1980
DCGM_FI_DEV_MAX_SM_CLOCK{gpu="0",UUID="GPU-a"} 1980
DCGM_FI_DEV_CLOCKS_EVENT_REASONS{gpu="0",UUID="GPU-a"} 32
DCGM_FI_DEV_XID_ERRORS{gpu="0",UUID="GPU-a"} 79
DCGM_FI_DEV_FB_USED{gpu="0",UUID="GPU-a",GPU_I_PROFILE="1g.10gb",GPU_I_ID="7"} 5
"""
LINES = [
    {"device": "g", "throttles": ["heat"], "clock_mhz": 700.0, "clock_max_mhz": 1400.0, "ecc_errors": 3},
    {"device": "g", "xid": 79, "text": "off", "after_s": 1.0},
    {"fails": "x"},
]


def is_sane(readings: tuple[DeviceReading, ...]) -> None:
    """Whatever was read, a device comes out of it with a state and a weight."""
    for reading in readings:
        state, _ = step(DeviceState(reading.device), reading, (), 100.0, HealthRules())
        assert 0.1 <= state.weight <= 1.0


@given(st.lists(mutated([ROWS], (b"nan", b"+Inf", b"1e400", b"{", b'"')), min_size=1, max_size=3))
def test_any_answer_of_an_exporter_is_read_or_unknown(answers: list[bytes]) -> None:
    left = iter(answers)
    source = DcgmSource("http://x", lambda: 1.0, lambda url: next(left).decode(errors="replace"))
    for _ in answers:
        readings = survives(lambda _: source.readings(), b"", DevicesUnknown)
        is_sane(readings or ())


@given(mutated([b"6,1,5,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.\n"]))
def test_any_line_of_a_log_is_an_error_or_none(line: bytes) -> None:
    event = parse(line.decode(errors="replace"), 1.0)
    assert event is None or 0 <= event.xid < 10**6


@given(st.lists(json_bytes(LINES, [None, True, -(2**63), 1e300, "heat"]), max_size=4))
def test_any_line_of_a_script_is_played_or_told(tmp_path_factory: pytest.TempPathFactory, lines: list[bytes]) -> None:
    path = tmp_path_factory.getbasetemp() / "script.jsonl"
    path.write_bytes(b"\n".join(lines) + b"\n")
    source = ScriptedSource(path, lambda: 5.0, lambda: 1.0)
    for _ in range(2):
        is_sane(survives(lambda _: source.readings(), b"", DevicesUnknown) or ())
        survives(lambda _: source.events(), b"", DevicesUnknown)

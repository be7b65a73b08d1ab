"""Trace and log settings: valid changes, rejected ones, and extreme ones."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import structlog
from tests.modelserver.http.rig import FakeModels

from forebay.core.serving.errors import Kind, Refused
from forebay.modelserver.telemetry.logs import LogSettings
from forebay.modelserver.telemetry.settings import ServerSettings
from forebay.modelserver.telemetry.trace_files import TraceFiles
from forebay.modelserver.telemetry.tracing import Sampler, TraceSettings, Tracing

OFF = {
    "trace_level": ["OFF"], "trace_rate": "1000", "trace_count": "-1", "log_frequency": "0", "trace_file": "f",
    "trace_mode": "triton",
}  # fmt: skip


def settings(default: Tracing = Tracing(file="f")) -> ServerSettings:  # noqa: B008 - frozen
    return ServerSettings(FakeModels(), TraceSettings(default), LogSettings())


def test_model_trace_settings_override_server_and_default() -> None:
    it = settings()
    assert it.trace("") == it.trace("echo") == OFF
    it.change_trace("", {"trace_rate": "5", "log_frequency": "2"})
    it.change_trace("echo", {"trace_rate": "7", "trace_level": ["TENSORS", "TIMESTAMPS", "LOUD"]})
    assert it.trace("echo") == OFF | {
        "trace_rate": "7", "log_frequency": "2", "trace_level": ["TIMESTAMPS", "TENSORS"],
    }  # fmt: skip
    assert it.trace("add") == OFF | {"trace_rate": "5", "log_frequency": "2"}
    it.change_trace("", {"trace_rate": None, "log_frequency": None})
    it.change_trace("echo", {"trace_level": ["OFF"], "colour": "green"})
    assert it.trace("echo") == OFF | {"trace_rate": "7"}
    it.change_trace("echo", {"trace_level": None, "trace_rate": None})
    assert it.trace("echo") == it.trace("") == OFF


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"trace_rate": 5}, "attempt to access JSON non-string as string"),
        ({"trace_rate": "often"}, "Unable to parse 'trace_rate', got: often"),
        ({"trace_rate": "-1"}, "Unable to parse 'trace_rate', value is out of range [ 0, 4294967295 ], got: -1"),
        ({"trace_count": "-2"}, "Unable to parse 'trace_count'. Expecting value >= -1, got:-2"),
        ({"log_frequency": "5000000000"}, "Unable to parse 'log_frequency', value is out of range"),
        ({"trace_level": "TIMESTAMPS"}, "attempt to access JSON non-array as array"),
        ({"trace_level": [1]}, "attempt to access JSON non-string as string"),
        ({"trace_level": ["OFF", "TENSORS"]}, "Expect only one trace level 'OFF' is specified"),
        ({"trace_file": "/etc/passwd"}, "trace file location can not be updated through network protocol"),
        (
            {"trace_level": ["TENSORS"], "trace_rate": "0"},
            "Attempting to set invalid trace setting :sample rate must",
        ),
    ],
)
def test_invalid_trace_settings_change_nothing(change: dict[str, Any], text: str) -> None:
    for model in ("", "echo"):
        it = settings()
        with pytest.raises(Refused) as refused:
            it.change_trace(model, {"log_frequency": "9", **change})
        assert refused.value.text.startswith(text)
        assert it.trace(model) == OFF


def test_tracing_requires_a_file_and_a_known_model() -> None:
    it = settings(Tracing())
    with pytest.raises(Refused, match="trace file name is not given"):
        it.change_trace("", {"trace_level": ["TIMESTAMPS"]})
    with pytest.raises(Refused, match="Request for unknown model : none"):
        it.trace("none")
    with pytest.raises(Refused, match="Request for unknown model : none"):
        it.change_trace("none", {})


def test_sampler_honours_trace_rate_and_count() -> None:
    sampler = Sampler(Tracing(("TIMESTAMPS",), rate=3, count=2, file="f"))
    assert [sampler.hit() for _ in range(12)] == [False, False, True] * 2 + [False] * 6
    assert sampler.left == 0
    assert [sampler.add(b"1"), sampler.add(b"2")] == [False, True]
    assert not Sampler(Tracing(rate=1, file="f")).hit()
    often = Sampler(Tracing(("TIMESTAMPS",), rate=1, log_frequency=2, file="f"))
    assert all(often.hit() for _ in range(3))
    assert [often.add(b"") for _ in range(2)] == [False, True]


def test_changed_settings_retire_affected_samplers() -> None:
    retired: list[Sampler] = []
    traces = TraceSettings(Tracing(file="f"), retired.append)
    assert traces.off
    traces.change("a", {"trace_level": ["TIMESTAMPS"]})
    own, shared = traces.sampler("a"), traces.sampler("b")
    assert not traces.off
    assert traces.sampler("c") is shared
    traces.change("a", {"trace_rate": "2"})
    assert retired == [own]
    fresh = traces.sampler("a")
    traces.change("", {"trace_rate": "3"})
    assert retired == [own, shared, fresh]
    assert traces.samplers() == []


LINES = [("info", "log_info"), ("warning", "log_warning"), ("error", "log_error"), ("critical", "log_error")]


def test_log_levels_can_be_switched() -> None:
    logs = LogSettings()

    def said(method: str) -> bool:
        try:
            logs(None, method, {})
        except structlog.DropEvent:
            return False
        return True

    for method, switch in LINES:
        assert said(method)
        logs.change({switch: False})
        assert not said(method)
        logs.change({switch: True})
    assert not said("debug")
    logs.change({"log_verbose_level": 1, "log_format": "ISO8601", "colour": "green", "log_file": None})
    assert said("debug")
    assert logs.document() == {
        "log_file": "", "log_info": True, "log_warning": True, "log_error": True, "log_verbose_level": 1,
        "log_format": "ISO8601",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("change", "kind", "text"),
    [
        ({"log_file": "x"}, Kind.UNSUPPORTED, "log file location can not be updated through network protocol"),
        ({"log_info": 1}, Kind.INVALID_ARGUMENT, "attempt to access JSON non-boolean as boolean"),
        ({"log_verbose_level": -1}, Kind.INVALID_ARGUMENT, "attempt to access JSON non-unsigned-integer as unsigned"),
        (
            {"log_verbose_level": True},
            Kind.INVALID_ARGUMENT,
            "attempt to access JSON non-unsigned-integer as unsigned",
        ),
        ({"log_format": 1}, Kind.INVALID_ARGUMENT, "attempt to access JSON non-string as string"),
        ({"log_format": "pretty"}, Kind.UNAVAILABLE, "invalid argument for --log_format, got: pretty"),
    ],
)
def test_invalid_log_settings_are_rejected(change: dict[str, Any], kind: Kind, text: str) -> None:
    it = settings()
    before = it.logging()
    with pytest.raises(Refused) as refused:
        it.change_logging({"log_warning": False, **change})
    assert refused.value.kind is kind
    assert refused.value.text.startswith(text)
    assert it.logging() == before


def test_traces_of_a_very_large_file_are_neither_lost_nor_all_kept_in_memory(tmp_path: Path) -> None:
    async def main() -> None:
        files = TraceFiles(structlog.get_logger())
        traces = TraceSettings(Tracing(("TIMESTAMPS",), rate=1, log_frequency=1_000_000, file=str(tmp_path / "t")))
        sampler = traces.sampler("m")
        for _ in range(3):
            for _ in range(40_000):
                files.add(sampler, b"0")
            await files.flush(traces, last=False)
            assert len(sampler.traces) < 50_000
        await files.flush(traces, last=True)
        assert sum(len(json.loads(each.read_bytes())) for each in tmp_path.iterdir()) == 120_000
        assert files.lost == 0

    asyncio.run(main())

"""Trace settings of the server and of single models, with Triton's names, texts and rules."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from forebay.core.serving.errors import Kind, Refused
from forebay.wire.oip.fields import NOT_ARRAY, NOT_STRING, invalid

OFF: Final = "OFF"
TIMESTAMPS: Final = "TIMESTAMPS"
TENSORS: Final = "TENSORS"
UNLIMITED: Final = -1
_UINT32_MAX: Final = 2**32 - 1
_INT32_MAX: Final = 2**31 - 1
FILE_TRACES_MAX: Final = 50_000
"""A numbered file is written at the latest when it has so many: until then its traces are in memory."""
MODE: Final = "triton"
"""Traces are written to files; Triton's other mode exports to OpenTelemetry."""


@dataclass(frozen=True, slots=True)
class Tracing:
    """A complete trace setting."""

    levels: tuple[str, ...] = ()
    """TIMESTAMPS, TENSORS or both; empty: no tracing."""
    rate: int = 1000
    """One request in this many is traced."""
    count: int = UNLIMITED
    """Number of traces still to be made."""
    log_frequency: int = 0
    """Traces per numbered file; 0: all go into one file, at the end."""
    file: str = ""

    @property
    def flaw(self) -> str:
        """Why tracing is impossible with this setting; empty: it is possible."""
        if not self.levels:
            return "tracing is disabled"
        if self.rate == 0:
            return "sample rate must be non-zero"
        return "" if self.file else "trace file name is not given"


class Sampler:
    """Samples requests by one setting, and keeps their traces until they are written."""

    __slots__ = ("_seen", "_under_way", "left", "setting", "traces")

    def __init__(self, setting: Tracing) -> None:
        self.setting = setting
        self.left = setting.count
        """Traces still allowed; -1: unlimited."""
        self.traces: list[bytes] = []
        self._seen = 0
        self._under_way = 0

    def hit(self) -> bool:
        """Whether to trace the next request. If so, `add` must be called later."""
        if self.left == 0 or self.setting.flaw:
            return False
        self._seen += 1
        if self._seen % self.setting.rate:
            return False
        if self.left > 0:
            self.left -= 1
        self._under_way += 1
        return True

    def add(self, trace: bytes | None) -> bool:
        """Add a trace, None if it was dropped; returns whether to write the collected ones to a numbered file now."""
        if trace is not None:
            self.traces.append(trace)
        self._under_way -= 1
        frequency = self.setting.log_frequency
        if frequency and len(self.traces) >= min(frequency, FILE_TRACES_MAX):
            return True
        return self.left == 0 and self._under_way == 0


class TraceSettings:
    """Trace settings: a model's own setting overrides the server's, which overrides the default.

    Everything raises `Refused`. `replaced` is called with samplers whose setting has changed.
    """

    def __init__(self, default: Tracing, replaced: Callable[[Sampler], None] = lambda _: None) -> None:
        self._default = default
        self._replaced = replaced
        self._own: dict[str, dict[str, Any]] = {"": {}}
        """Explicit settings by model (empty: the server)."""
        self._samplers: dict[str, Sampler] = {}
        self.off = not default.levels
        """Whether tracing is off everywhere."""

    def sampler(self, model: str) -> Sampler:
        """The sampler for requests of a model."""
        owner = model if model in self._own else ""
        sampler = self._samplers.get(owner)
        if sampler is None:
            sampler = self._samplers[owner] = Sampler(self.of(model))
        return sampler

    def samplers(self) -> Sequence[Sampler]:
        """All samplers in use."""
        return list(self._samplers.values())

    def of(self, model: str) -> Tracing:
        """Effective setting of a model; empty name: of all models without their own."""
        return replace(self._default, **{**self._own[""], **self._own.get(model, {})})

    def change(self, model: str, changes: Mapping[str, Any]) -> None:
        """Apply changes, all or none. A value of None resets a setting; unknown names are ignored."""
        own = dict(self._own.get(model, {}))
        for name, value in _read(changes).items():
            if value is None:
                own.pop(name, None)
            else:
                own[name] = value
        before = self._own.get(model)
        self._own[model] = own
        fresh = self.of(model)
        if fresh.levels and fresh.flaw:
            if before is None:
                del self._own[model]
            else:
                self._own[model] = before
            raise invalid(f"Attempting to set invalid trace setting :{fresh.flaw}")
        if model and not own:
            del self._own[model]
        self.off = not any(self.of(each).levels for each in self._own)
        for each in [model] if model else list(self._samplers):
            if (sampler := self._samplers.pop(each, None)) is not None:
                self._replaced(sampler)


def trace_document(sampler: Sampler) -> dict[str, Any]:
    """A setting as the protocol shows it, with the number of traces left."""
    setting = sampler.setting
    return {
        "trace_level": list(setting.levels) or [OFF],
        "trace_rate": str(setting.rate),
        "trace_count": str(sampler.left),
        "log_frequency": str(setting.log_frequency),
        "trace_file": setting.file,
        "trace_mode": MODE,
    }


def _read(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Parse changes by field name; None for settings to reset."""
    if "trace_file" in changes:
        text = "trace file location can not be updated through network protocol"
        raise Refused(Kind.UNSUPPORTED, text)
    read: dict[str, Any] = {}
    if "trace_level" in changes:
        levels = changes["trace_level"]
        read["levels"] = None if levels is None else _levels(levels)
        if read["levels"] == () and OFF not in (levels or ()):
            del read["levels"]  # unknown level names have no effect
    for name, field, least, most in (
        ("trace_rate", "rate", 0, _UINT32_MAX),
        ("trace_count", "count", UNLIMITED, _INT32_MAX),
        ("log_frequency", "log_frequency", 0, _UINT32_MAX),
    ):
        if name in changes:
            value = changes[name]
            read[field] = None if value is None else _number(name, value, least, most)
    return read


def _levels(given: Any) -> tuple[str, ...]:
    if type(given) is not list:
        raise invalid(NOT_ARRAY)
    if any(type(level) is not str for level in given):
        raise invalid(NOT_STRING)
    if OFF in given and len(given) > 1:
        raise invalid("Expect only one trace level 'OFF' is specified")
    return tuple(level for level in (TIMESTAMPS, TENSORS) if level in given)


def _number(name: str, given: Any, least: int, most: int) -> int:
    if type(given) is not str:
        raise invalid(NOT_STRING)
    try:
        value = int(given[:64])
    except ValueError:
        raise invalid(f"Unable to parse '{name}', got: {given[:64]}") from None
    if name == "trace_count" and value < least:
        raise invalid(f"Unable to parse '{name}'. Expecting value >= {least}, got:{given[:64]}")
    if not least <= value <= most:
        raise invalid(f"Unable to parse '{name}', value is out of range [ {least}, {most} ], got: {given[:64]}")
    return value

"""Settings that clients may read and change. Implements `wire.oip.ports.Settings`."""

from collections.abc import Mapping
from typing import Any

from forebay.core.serving.errors import Refused
from forebay.modelserver.ports import Models
from forebay.modelserver.telemetry.logs import LogSettings
from forebay.modelserver.telemetry.tracing import TraceSettings, trace_document
from forebay.wire.oip.fields import invalid


class ServerSettings:
    """Trace and log settings as documents of the protocol. Everything raises `Refused`."""

    def __init__(self, models: Models, traces: TraceSettings, logs: LogSettings) -> None:
        self._models = models
        self._traces = traces
        self._logs = logs

    def trace(self, model: str) -> Mapping[str, Any]:
        """Trace settings of a model."""
        self._check(model)
        return trace_document(self._traces.sampler(model))

    def change_trace(self, model: str, changes: Mapping[str, Any]) -> None:
        """Change the trace settings of a model."""
        self._check(model)
        self._traces.change(model, changes)

    def logging(self) -> Mapping[str, Any]:
        """Log settings."""
        return self._logs.document()

    def change_logging(self, changes: Mapping[str, Any]) -> None:
        """Change the log settings."""
        self._logs.change(changes)

    def _check(self, model: str) -> None:
        if not model:
            return
        try:
            self._models.view(model, "")
        except Refused:
            raise invalid(f"Request for unknown model : {model}") from None
